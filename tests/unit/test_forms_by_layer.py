"""Variants of a model whose weights wait on a disk are scored beside it, while each of its layers is read once."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mlflow_compress as mc
from benchmarks.architectures import make
from mlflow_compress import demo
from mlflow_compress.commands.evaluate.outputs import run_model
from mlflow_compress.commands.plan import run
from mlflow_compress.compression import compress_model, method_config, one_layer
from mlflow_compress.compression.one_layer import LayerMaker
from mlflow_compress.errors import ConfigError
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.models.loading import LoadConfig, load_model
from mlflow_compress.models.source_model import resolve
from mlflow_compress.scoring import costs
from mlflow_compress.scoring.baseline_store import StateStore, StateWriter
from mlflow_compress.scoring.engine import Scorer, ScoringConfig, scorers_of_forms
from mlflow_compress.scoring.forward.by_layer import BodyByLayer, Form
from tests.unit.test_by_layer import SIZES, Sweeps, count_fetched, on_disk, requests
from tests.unit.test_offloading import make as make_llama

VARIANTS = [
    ("rtn", {"bits": 8}), ("rtn", {"bits": 4, "group_size": 64}), ("fp8", {}), ("hqq", {}), ("w8a8", {}),
    ("magnitude", {}), ("mxfp4", {}), ("rtn", {"bits": 4, "symmetric": False}),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, path, n_sweeps",
    [
        ("Llama", "packed", 1),
        pytest.param("Qwen3", "plain", 2, marks=pytest.mark.ci),
        pytest.param("Gemma3Text", "packed", 1, marks=pytest.mark.ci),
    ],
)
def test_records_are_those_of_checkpoints_and_the_baseline_is_read_once(
    name: str, path: str, n_sweeps: int, tmp_path: Path, no_fresh_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(name, tmp_path / "base", torch.bfloat16)
    config = ScoringConfig(path=path, shard_seconds=0.0, **SIZES)
    base, wanted = load_model(LoadConfig(path=str(folder), device="cpu")), []
    with StateWriter(tmp_path / "states", base) as writer:
        Scorer(base, config).score(requests(), capture=writer)
    states = StateStore.open(tmp_path / "states", baseline=base)
    for number, (method, given) in enumerate(VARIANTS):
        out = tmp_path / str(number)
        compress_model(str(folder), method, method_config(method, **given), [], out, device="cpu")
        whole = load_model(LoadConfig(path=str(out), device="cpu"))
        wanted.append(Scorer(whole, config).score(requests(), baseline=states))
    counted = Sweeps(n_sweeps, monkeypatch)
    loaded = on_disk(folder, tmp_path)
    maker = LayerMaker(loaded, resolve(str(folder)), tmp_path)
    forms = [maker.forms(method, method_config(method, **given)) for method, given in VARIANTS]
    found = [one.score(requests(), baseline=states) for one in scorers_of_forms(loaded, forms, config)]
    assert counted.fetched == n_sweeps * counted.waiting
    for (method, given), (scores, distances), (own, far) in zip(VARIANTS, found, wanted, strict=True):
        assert scores.table.equals(own.table), (method, given)
        assert distances is not None and far is not None and distances.table.equals(far.table), (method, given)
    made: list[int] = []

    def counting(form: Form, number: int) -> torch.nn.Module:
        made.append(number)
        return form(number)

    noted = [partial(counting, form) for form in forms]
    # Killed in the last sweep, at its last layer of two: what was written behind each layer loses that one, and what
    # is written behind each sweep alone both.
    for seconds, lost in ((0.0, 1), (1e9, 2)):
        config, parts = ScoringConfig(path=path, shard_seconds=seconds, **SIZES), tmp_path / f"parts-{seconds}"
        killed, *_ = scorers_of_forms(loaded, forms, config)
        counted.stop_at = 2 * n_sweeps
        with pytest.raises(KeyboardInterrupt):
            killed.score(requests(), baseline=states, resume=parts)
        counted.stop_at = None
        made.clear()
        scorers = scorers_of_forms(loaded, noted, config)
        again = [one.score(requests(), baseline=states, resume=parts) for one in scorers]
        assert counted.n_layers == lost and made == [n for n in (0, 1)[-lost:] for _ in forms]
        for (scores, distances), (own, far) in zip(again, found, strict=True):
            assert distances is not None and far is not None
            assert scores.table.equals(own.table) and distances.table.equals(far.table)
        made.clear()
        scorers_of_forms(loaded, noted, config)[0].score(requests(), baseline=states, resume=parts)
        assert counted.n_layers == 0 and not made, "a finished pass is not computed again"


@pytest.mark.ci
def test_a_plan_says_what_screening_reads_writes_and_holds(
    tmp_path: Path, no_fresh_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned from the configuration, counted with the weights; a stream of states for each of two variants."""
    folder = make_llama(tmp_path / "m", intermediate_size=1024, num_hidden_layers=2)
    tasks, memory = str(demo.DATA_DIR / "choice.jsonl"), {"cpu": "3MB"}
    monkeypatch.setattr(run, "seconds_of_a_form", lambda *_: (10.0, 1e-3))
    monkeypatch.setattr(costs, "this_machine", lambda: (1e9, 1e9, 1e9))
    given: dict[str, Any] = {
        "device": "balanced",
        "max_memory": memory,
        "method": "rtn",
        "variants": 2,
        "save": "passing",
    }
    asked: dict[str, Any] = {"tasks": tasks, "limit": 2, "task_args": {"noise_items": 0}, "judge": False}
    plan = mc.plan(model=str(folder), **asked, **given)
    [planned] = [stage for stage in plan.stages if stage.stage == "screen"]

    suite = load_suite(tasks, model=str(folder), settings=TaskSettings(limit=2))
    config = ScoringConfig(progress=False)
    whole = Scorer(load_model(LoadConfig(path=str(folder), device="cpu")), config)
    with StateWriter(tmp_path / "states", whole.loaded) as writer:
        run_model(whole, suite, capture=writer)
    fetched, written, sweep = count_fetched(monkeypatch), [0, 0], BodyByLayer._sweep
    held: list[int] = []  # bytes of states, by sweep
    write = one_layer.write_compressed

    def counting(*args: Any) -> None:
        write(*args)
        files = (tmp_path / "scratch").glob("*/*/*.safetensors")
        written[:] = written[0] + 1, written[1] + sum(file.stat().st_size for file in files)

    def beginning(*args: Any) -> list[torch.Tensor]:
        if args[0].forms:  # no probe
            held.append(4 * 128 * 2 * sum(unit.n_tokens for unit, _ in args[1]))
        return sweep(*args)

    monkeypatch.setattr(one_layer, "write_compressed", counting)
    loaded = load_model(LoadConfig(path=str(folder), device="balanced", max_memory=memory, offload_dir=str(tmp_path)))
    monkeypatch.setattr(BodyByLayer, "_sweep", beginning)
    (tmp_path / "scratch").mkdir()
    maker = LayerMaker(loaded, resolve(str(folder)), tmp_path / "scratch")
    forms = [maker.forms("rtn", method_config("rtn", group_size=size)) for size in (128, 64)]
    states = StateStore.open(tmp_path / "states")
    for one in scorers_of_forms(loaded, forms, config):
        run_model(one, suite, baseline=states, generations=False)
    n_reads = len(held)
    assert planned.reads == n_reads > 1 and written[0] == 2 * 2 * n_reads
    assert planned.states_memory == pytest.approx(max(held), rel=0.1)
    stored = sum(file.stat().st_size for file in (tmp_path / "states").glob("*.safetensors"))
    assert planned.bytes_read == pytest.approx(stored + fetched["bytes"] / 2, rel=0.1)  # stored in bfloat16
    assert planned.bytes_written == pytest.approx(written[1], rel=0.1)
    matrices = sum(p.numel() for p in loaded.model.model.layers.parameters() if p.ndim > 1)
    assert planned.seconds is not None
    assert planned.seconds > 2 * n_reads * (2 * 10 + 1e-3 * matrices), "each layer is made once a sweep and variant"
    winner = mc.plan(model=str(folder), **asked, **{**given, "save": "winner"})
    evaluated = [next(stage for stage in each.stages if stage.stage == "evaluate") for each in (winner, plan)]
    assert [stage.times for stage in evaluated] == [1, 2], "the winner alone is evaluated"
    with pytest.raises(ConfigError, match="only if the model does not fit into memory"):
        mc.plan(model=str(folder), **asked, save="passing", device="cpu")
