"""How the loops of the CPU kernel are compiled.

KL alone: what the kernel with all statistics says, and float64.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numba.core.registry import cpu_target

from mlflow_compress.errors import CheckpointError
from mlflow_compress.scoring.kernels import numba_kernel
from mlflow_compress.scoring.kernels.logit_stats import KlBaseline, compute_kl, compute_logit_stats
from tests.conftest import Fork
from tests.unit.test_scoring_kernel_bounds import distances_with_bounds

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


def pair(n: int, width: int, scale: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    base = 4 * torch.randn((n, width), generator=random)
    return base + scale * torch.randn((n, width), generator=random), base


@pytest.mark.parametrize("width", [3, 128, 129, 2048, 5000])
@pytest.mark.parametrize("scale", [1e-4, 0.05, 3.0])
def test_kl_alone_is_that_of_all_statistics(width: int, scale: float) -> None:
    logits, base = pair(17, width, scale)
    kl, top = compute_kl(logits, KlBaseline(base))
    wanted = compute_logit_stats(logits, base)
    truth, bound = distances_with_bounds(base, logits)["kl"]
    assert kl.dtype == torch.float64 and top.dtype == torch.int64
    assert (np.abs(kl.numpy() - truth) <= bound).all()
    assert (np.abs(kl.numpy() - wanted.distances["kl"].numpy()) <= 2 * bound).all()  # both are rounded
    assert torch.equal(top, wanted.argmax) and torch.equal(top, logits.argmax(dim=1))


def test_one_baseline_serves_many_models_and_equal_rows_ties_and_zeros_are_exact() -> None:
    base = pair(9, 300, 0.0)[1]
    shared = KlBaseline(base)
    for seed in range(3):
        logits = base + 0.1 * torch.randn(base.shape, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(compute_kl(logits, shared)[0], compute_kl(logits, KlBaseline(base.clone()))[0])
    logits, _ = pair(5, 300, 0.0)
    logits[:, [200, 7]] = 50.0
    kl, top = compute_kl(logits, KlBaseline(logits.clone()))
    assert (kl == 0).all() and (top == 7).all()
    logits, base = pair(4, 64, 0.1)
    base[:, 3] = logits[:, 3] = -torch.inf
    base[1, 5] = -torch.inf
    base[2, :] = -200.0
    base[2, 9] = 0.0
    kl, _ = compute_kl(logits, KlBaseline(base))
    assert torch.equal(kl, compute_logit_stats(logits, base).distances["kl"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_logits_that_are_not_numbers_are_refused(bad: float, side: int) -> None:
    both = pair(3, 64, 0.1)
    both[side][1, 8] = bad
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        compute_kl(both[0], KlBaseline(both[1]))
