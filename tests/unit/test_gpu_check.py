"""The check of a GPU: what it calls wrong, and that it goes on after a failure (there is no GPU here)."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import MAX_KL, MAX_LOG_PROB, Row, compare_bfloat16, compare_float32, difference, log_probs
from benchmarks.one_process import JobError, OneProcess
from mlflow_compress.commands.evaluate.models import open_baseline, open_variant
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.main.parameters import MainConfig
from mlflow_compress.commands.main.run import variant_key
from mlflow_compress.config.groups import EngineConfig, InferenceConfig, SourceConfig
from mlflow_compress.engines.file_model import open_request
from mlflow_compress.engines.interface import ENGINES, ModelRequest
from mlflow_compress.models.loading import load_model
from mlflow_compress.records import OptionDistances, OptionScores, RunRecords, TokenScores
from tests.compress_models import make_llama

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


def records(logliks: list[float | None], kl: float = 0.1, nll: float = 2.0) -> RunRecords:
    """Options of two tokens each, and one corpus token."""
    keys = [{"task": "t", "item_id": str(i), "permutation": 0, "option": 0} for i in range(len(logliks))]
    rest = {"content": 0, "n_tokens": 2, "n_chars": 3, "n_bytes": 3, "greedy": False}
    others = {"kl_reverse": kl, "js": 0.0, "tv": 0.0, "same_top": 1.0, "top10": 1.0, "rbo10": 1.0}
    token = {"position": 0, "target": 1, "nll": nll, "p_target": 0.1, "argmax": 1, "entropy": 1.0}
    return RunRecords(
        option_scores=OptionScores.from_rows(
            [{**key, "loglik": x, **rest} for key, x in zip(keys, logliks, strict=True)]
        ),
        option_distances=OptionDistances.from_rows([{**key, "kl": kl, **others} for key in keys]),
        token_scores=TokenScores.from_rows([{"task": "c", "item_id": "0", **token}]),
    )


def test_log_probabilities_are_compared_a_token_and_nan_or_other_missing_values_are_wrong() -> None:
    # -4 nats over two tokens is -2; a nll of 3 is -3.
    assert log_probs(records([-4.0, -1.0], nll=3.0)).tolist() == [-2.0, -0.5, -3.0]
    row = Row(check="x")
    compare_float32(row, records([-4.0, None]), records([-4.0, None]))
    assert row.verdict == "ok" and row.found == {"log-prob. apart": 0.0, "KL apart": 0.0}
    with pytest.raises(ValueError, match="not of the same options"):
        difference(log_probs(records([None, -1.0])), log_probs(records([-1.0, None])))
    row = Row(check="x")
    row.require("KL", float("nan"), most=1.0)
    assert row.wrong


@pytest.mark.parametrize(
    "ours, named",
    [
        # Two tokens an option: the difference a token is half of this.
        (records([-4.0 - 2.2 * MAX_LOG_PROB]), "log-prob. apart"),
        (records([-4.0], nll=2.0 + 1.1 * MAX_LOG_PROB), "log-prob. apart"),
        (records([-4.0], kl=0.1 + 1.1 * MAX_KL), "KL apart"),
        (records([float("inf")]), "log-prob. apart"),
    ],
)
def test_a_wrong_number_is_named(ours: RunRecords, named: str) -> None:
    row = Row(check="x")
    compare_float32(row, ours, records([-4.0]))
    assert row.verdict.startswith(f"WRONG: {named}")


def test_bfloat16_is_measured_by_the_cpus() -> None:
    exact, cpus = records([-4.0], nll=2.0), records([-4.02], nll=2.01)  # 0.01 nats a token from float32
    for factor, verdict in ((1.9, "ok"), (2.3, "WRONG")):
        row = Row(check="x")
        compare_bfloat16(row, records([-4.0 - 0.02 * factor], nll=2.0 + 0.01 * factor), cpus, exact)
        assert row.verdict.startswith(verdict)


def pid() -> dict[str, Any]:
    return {"pid": os.getpid(), "told": os.environ.get("TOLD")}


def wait() -> dict[str, Any]:
    signal.pause()
    return {}


@pytest.mark.ci
def test_a_job_that_breaks_its_process_costs_only_itself() -> None:
    with OneProcess(None, environment={"TOLD": "yes"}) as process:
        first = process(pid)
        assert process(pid) == first  # the same process
        with pytest.raises(JobError, match="exit code 3"):
            process(os._exit, 3)
        assert process(pid)["told"] == "yes"
        process.timeout = 0
        with pytest.raises(JobError, match="no answer"):
            process(wait)


@pytest.mark.slow
def test_the_script_goes_on_after_a_failure(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    command = [sys.executable, str(SCRIPT), "--cpu", "--only", "nonsense,fp16", "--limit", "1", "--output", str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    failed = [row["check"] for row in rows if row["wrong"]]
    assert failed == ["nonsense: compress, reload"]
    assert "Unknown compression method" in done.stdout.splitlines()[-1]
    scored = next(row for row in rows if row["check"] == "fp16: score" and row["dtype"] == "float32")
    # On one machine both devices are the CPU: equal bits.
    assert scored["found"] == {"log-prob. apart": 0.0, "KL apart": 0.0}
    assert scored["tokens_per_second"] > 0 and scored["peak_memory_bytes"] > 0


@pytest.mark.parametrize(
    ("named", "computes_on", "expected"),
    [("auto", "cpu", "float32"), ("auto", "cuda", "bfloat16"), ("float16", "cpu", "float16")],
)
def test_no_named_dtype_is_the_checkpoints_own_on_an_accelerator(
    base: Path, named: str, computes_on: str, expected: str
) -> None:
    request = ModelRequest(address=str(base), source=SourceConfig(device="cpu"), inference=InferenceConfig(dtype=named))
    model = open_request(request, computes_on=computes_on)
    assert model.dtype == getattr(torch, expected)
    assert load_model(model.config).dtype == getattr(torch, expected)


def test_on_a_cpu_it_is_the_evaluation_of_float32_and_the_variant_has_the_baselines(base: Path, tmp_path: Path) -> None:
    variant = make_llama(tmp_path / "variant", dtype=torch.float16)
    config = EvaluateConfig(model=str(base), checkpoint=str(variant), device="cpu")
    opened = open_baseline(config)
    assert opened.identity == open_baseline(config.with_values(dtype="float32")).identity
    keys = {variant_key(MainConfig(dtype=dtype, judge=True), "folder", "evaluation") for dtype in ("auto", "float32")}
    assert len(keys) == 1
    on_an_accelerator = replace(opened, dtype=torch.bfloat16)  # type: ignore[type-var]
    assert str(open_variant(config, on_an_accelerator).dtype) == "torch.bfloat16"


@pytest.mark.parametrize(("device", "expected"), [("cpu", torch.float32), ("NVIDIA H200", torch.bfloat16)])
def test_in_vllm_the_device_of_its_environment_decides(
    base: Path, device: str, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {"vllm": "1", "device": device}
    monkeypatch.setattr("mlflow_compress.engines.vllm.vllm_process.described_environment", lambda python: described)
    running = EngineConfig(engine="vllm", vllm_python=sys.executable)
    with ENGINES.get("vllm").started(running, on_gpu=None):
        request = ModelRequest(address=str(base), source=SourceConfig(device="cpu"), running=running)
        assert ENGINES.get("vllm").open(request).dtype == expected
