"""How the loops of the CPU kernel are compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core.registry import cpu_target

from mlflow_compress.scoring.kernels import numba_kernel
from tests.conftest import Fork

DIGEST = """
import hashlib, numpy as np, torch
from mlflow_compress.scoring.kernels.numba_kernel import compute_row_stats
rows = np.random.default_rng(0).normal(size=(2, 40, 5000)).astype(np.float32)
alone = compute_row_stats(torch.from_numpy(rows[0]), None)
both = compute_row_stats(torch.from_numpy(rows[0]), torch.from_numpy(rows[1]))
print(hashlib.sha256(b"".join(x.numpy().tobytes() for x in (*alone[:3], *both))).hexdigest())
"""

IMPORTS = """
import os, pkgutil, numba, torch, transformers.modeling_utils  # importing these may change the environment
before = dict(os.environ), {n: getattr(numba.config, n) for n in dir(numba.config) if n.isupper()}
import mlflow_compress.scoring
for module in pkgutil.walk_packages(mlflow_compress.scoring.__path__, "mlflow_compress.scoring."):
    if module.name.rpartition(".")[2] not in ("vllm_worker", "in_vllm"):  # scripts of vLLM's own environment
        __import__(module.name)
after = dict(os.environ), {n: getattr(numba.config, n) for n in dir(numba.config) if n.isupper()}
assert before == after, [set(map(str, a.items())) ^ set(map(str, b.items())) for a, b in zip(before, after)]
print(len(before[1]))
"""


def output_of(program: str, **environment: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_scoring_changes_neither_the_environment_nor_numbas_settings(python: Fork) -> None:
    done = python("-c", IMPORTS)
    assert done.returncode == 0 and int(done.stdout) > 20, done.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_compiled_code_from_the_cache_gives_the_bits_of_newly_compiled_code(tmp_path: Path) -> None:
    digests = [output_of(DIGEST, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert list(tmp_path.rglob("*.nbc"))
    assert digests[0] == digests[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nbc", "nbi"])  # code, and the index of it
def test_a_damaged_cache_is_compiled_again(kind: str, tmp_path: Path) -> None:
    whole = output_of(DIGEST, NUMBA_CACHE_DIR=str(tmp_path))
    for path in tmp_path.rglob(f"*.{kind}"):
        path.write_bytes(path.read_bytes()[:60])
    assert output_of(DIGEST, NUMBA_CACHE_DIR=str(tmp_path)) == whole
    assert all(path.stat().st_size > 60 for path in tmp_path.rglob(f"*.{kind}"))  # made again


def target_features() -> str:
    """Return what numba compiles for: the CPU, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say."""
    return str(cpu_target.target_context.codegen().magic_tuple()[2])


@pytest.mark.skipif("+avx512f" not in target_features(), reason="the CPU has no 512-bit registers")
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
