"""How the compiled loops are compiled."""

from __future__ import annotations

import os

import numba
import numpy as np
import pytest
from llvmlite import binding

from mlflow_compress.scoring.kernels import numba_kernel


def test_importing_the_loops_changes_nothing_for_other_code() -> None:
    assert os.environ.get("NUMBA_CPU_FEATURES") == numba.config.CPU_FEATURES


@pytest.mark.skipif(not binding.get_host_cpu_features().get("avx512f"), reason="the CPU has no 512-bit registers")
def test_the_loops_over_the_vocabulary_use_whole_registers() -> None:
    row = np.zeros(2048, dtype=np.float32)
    calls = {
        numba_kernel._block_maxima: (row, np.empty(16, dtype=np.float32)),
        numba_kernel._exp_sums: (row, np.float32(0)),
        numba_kernel._compare_row: (row, row, np.float32(0), 2048.0, np.float32(0), np.empty(5, dtype=np.float32)),
    }
    for loop, arguments in calls.items():
        loop(*arguments)
        (assembly,) = loop.inspect_asm().values()
        assert assembly.count("zmm") > assembly.count("ymm"), loop.__name__
