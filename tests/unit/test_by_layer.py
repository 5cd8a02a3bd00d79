"""Scoring layer by layer: the records are those of whole forward passes, and weights are read once a sweep."""

import errno
import io
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import mlflow_compress as mc
from benchmarks.architectures import ARCHITECTURES, EXPERTS, GROUPED, SCALED, make, random_model
from mlflow_compress import demo
from mlflow_compress.commands.evaluate.items import suite_of
from mlflow_compress.commands.evaluate.outputs import run_model
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.compression import compress_model, method_config
from mlflow_compress.items.suite import load_suite
from mlflow_compress.items.task import TaskSettings
from mlflow_compress.models import offloading
from mlflow_compress.models.loading import LoadConfig, LoadedModel, load_model
from mlflow_compress.models.weight_groups import decoder_layers
from mlflow_compress.records import Request
from mlflow_compress.reporting.numbers import bytes_text
from mlflow_compress.scoring import costs as scoring_costs
from mlflow_compress.scoring import engine
from mlflow_compress.scoring.engine import Scorer, ScoringConfig
from mlflow_compress.scoring.forward.by_layer import BodyByLayer, body_by_layer, sweep_bytes, sweeps
from mlflow_compress.scoring.plan.packing import Plan, UnitGroup
from tests.unit.test_offloading import LITTLE
from tests.unit.test_offloading import make as make_llama

SIZES: dict[str, Any] = {"batch_tokens": 96, "head_rows": 1, "progress": False}


def requests() -> list[Request]:
    return suite_of(EvaluateConfig(model="demo", limit=4)).requests[:60]


def records(loaded: LoadedModel, path: str = "auto") -> tuple[Any, Any, str]:
    """Return the records of options and of a corpus, and the path of the first."""
    scorer = Scorer(loaded, ScoringConfig(path=path, **SIZES))
    options, _ = scorer.score(requests())
    assert scorer.report is not None
    path = scorer.report.path
    text = (demo.DATA_DIR / "corpus.txt").read_text()
    corpus, _ = scorer.score_corpus("c", text, window=100, max_tokens=1000)
    return options.table, corpus.table, path


@pytest.fixture
def by_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Let models in memory be scored layer by layer, with a little room; count the sweeps."""
    counted: Counter[str] = Counter()
    plain, sweep = engine.split_body_and_head, BodyByLayer._sweep

    def split(model: Any) -> Any:
        body, head, whole = plain(model)
        body, reason = body_by_layer(body, 1 << 20)
        assert reason is None, reason
        return body, head, whole

    def counting(*args: Any) -> list[torch.Tensor]:
        counted["sweeps"] += 1
        counted["units"] += len(args[1])
        return sweep(*args)

    monkeypatch.setattr(engine, "split_body_and_head", split)
    monkeypatch.setattr(BodyByLayer, "_sweep", counting)
    yield counted


@pytest.mark.parametrize("name", [*ARCHITECTURES, *SCALED])
def test_records_are_those_of_whole_passes(name: str, request: pytest.FixtureRequest) -> None:
    """Every architecture can; the model has two layers."""
    model, tokenizer = random_model(name)
    loaded = LoadedModel(model, tokenizer, Path("nowhere"), torch.float32, torch.device("cpu"))
    wanted = records(loaded)
    counted = request.getfixturevalue("by_layer")
    found = records(loaded)
    assert counted["units"] > counted["sweeps"] > 2, "more than the probes, and several units at once"
    assert found[2] == wanted[2] and found[0].equals(wanted[0]) and found[1].equals(wanted[1])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base"))


def on_disk(path: Path, folder: Path) -> LoadedModel:
    return load_model(
        LoadConfig(path=str(path), device="balanced", max_memory=LITTLE, offload_dir=str(folder), dtype="float32")
    )


def count_fetched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the bytes of weights that are fetched from now on."""
    counted: Counter[str] = Counter()
    fetch = offloading._Fetched.__getitem__

    def counting(weights: Any, name: str) -> Any:
        weight = fetch(weights, name)
        counted["bytes"] += weight.nbytes
        return weight

    monkeypatch.setattr(offloading._Fetched, "__getitem__", counting)
    return counted


class Sweeps:
    """Lets a pass be computed in a number of sweeps, from when its probes are over."""

    def __init__(self, n_sweeps: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list[torch.nn.Module] = []  # Of the model whose pass began last
        self.n_layers = 0  # How many of them were held, over all sweeps
        self.waiting = 0  # Bytes of weights on the disk
        self.stop_at: int | None = None  # The number of the layer that is interrupted, counted over all sweeps
        self.n_sweeps = n_sweeps
        self.counted = count_fetched(monkeypatch)
        hold = offloading.held

        def held(layer: torch.nn.Module) -> Any:
            if layer in self.layers:
                self.n_layers += 1
                if self.n_layers == self.stop_at:
                    raise KeyboardInterrupt
            return hold(layer)

        def begin(body: BodyByLayer, plan: Plan, groups: list[UnitGroup]) -> None:
            each = [sweep_bytes(body, plan, group) for group in groups]
            numbers = range(len(groups))
            for room in np.linspace(1, sum(each), 500).astype(int).tolist():
                body.room = room
                if len(list(sweeps([body], plan, groups, numbers))) == self.n_sweeps:
                    break
            else:
                pytest.fail(f"the groups {each} are not cut into {self.n_sweeps}")
            self.fetched_before = self.fetched
            self.n_layers = self.counted["bytes"] = 0
            self.layers = body._layers
            self.waiting = sum(4 * p.numel() for p in body.model.parameters() if p.device.type == "meta")

        monkeypatch.setattr(offloading, "held", held)
        monkeypatch.setattr(BodyByLayer, "say_reads", begin)

    @property
    def fetched(self) -> int:
        """Bytes of weights, since the last pass began."""
        return self.counted["bytes"]


@pytest.mark.parametrize("n_sweeps", [1, 2, 5])
@pytest.mark.parametrize("path", ["packed", "plain"])
def test_weights_are_read_once_a_sweep(
    base: Path, tmp_path: Path, path: str, n_sweeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_model(LoadConfig(path=str(base), device="cpu"))
    wanted = records(whole, path)
    counted = Sweeps(n_sweeps, monkeypatch)
    scorer = Scorer(on_disk(base, tmp_path), ScoringConfig(path=path, **SIZES))
    found, _ = scorer.score(requests())
    assert found.table.equals(wanted[0])
    assert counted.fetched == n_sweeps * counted.waiting and counted.n_layers == 3 * n_sweeps


@pytest.mark.parametrize("kind, more, shapes", [("Llama", {}, 1), ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": [0]}, 2)])
def test_opening_reads_one_layer_of_each_shape_four_times(
    kind: str, more: dict[str, Any], shapes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 layers. It is asked whether the model is causal, has a head, runs by layer, and, once, whether it packs."""
    monkeypatch.setitem(SCALED, "deep", (kind, {**GROUPED, **more, "num_hidden_layers": 8}))
    folder = make("deep", tmp_path / "deep", torch.float32)
    wanted, _ = Scorer(load_model(LoadConfig(path=str(folder), device="cpu")), ScoringConfig(**SIZES)).score(requests())
    counted = Sweeps(1, monkeypatch)
    monkeypatch.setattr(offloading, "SAMPLE", 0)  # how fast the disk is, one weight shows
    loaded = on_disk(folder, tmp_path)
    model = loaded.model.model
    kept, norm, sample = (m.weight.nbytes for m in (model.embed_tokens, model.norm, model.layers[0].self_attn.q_proj))
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.layers]
    once = sum(layers[:shapes]) + norm
    assert len(set(layers)) == shapes and 4 * once < sum(layers) * shapes
    assert counted.fetched == 2 * kept + sample + once
    computed: list[int] = []  # tokens of the first layer
    model.layers[0].register_forward_hook(lambda _, given, out: computed.append(given[0].shape[:2].numel()))
    scorer = Scorer(loaded, ScoringConfig(**SIZES))
    assert counted.fetched == 2 * kept + sample + 3 * once
    for before in (2 * kept + sample + 4 * once, sum(layers) + norm):
        found, _ = scorer.score(requests())
        assert found.table.equals(wanted.table)
        assert counted.fetched_before == before and counted.fetched == sum(layers) + norm


def test_a_model_that_would_not_pass_with_other_weights_is_asked_with_its_own(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the states are no numbers where two layers have equal weights, as where half precision overflows."""
    loaded = on_disk(base, tmp_path)
    layers = loaded.model.model.layers
    plain = layers[1].forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = plain(*args, **kwargs)
        weights = [layer.mlp.up_proj.weight for layer in layers[:2]]
        return out * float("nan") if weights[0] is weights[1] else out

    layers[1].forward = forward
    scorer = Scorer(loaded, ScoringConfig(**SIZES))
    assert isinstance(scorer._execution._body, BodyByLayer)  # type: ignore[attr-defined]
    wanted = records(load_model(LoadConfig(path=str(base), device="cpu")))
    assert scorer.score(requests())[0].table.equals(wanted[0])
    assert scorer.report is not None and scorer.report.path == "packed"


@pytest.mark.parametrize(
    "shape, memory, reads",
    [
        ({"hidden_size": 128, "num_hidden_layers": 6}, "3MB", 4),  # some layers fit
        ({"hidden_size": 64, "intermediate_size": 4096, "num_hidden_layers": 4}, "8MB", 2),  # several groups at once
        ({"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 5}, "400KB", 4),
    ],
)
def test_a_plan_says_what_is_read_and_held(
    shape: dict[str, int], memory: str, reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned from the configuration, counted with the weights."""
    folder = make_llama(tmp_path / "m", dtype=torch.float32, **shape)
    tasks = str(demo.DATA_DIR / "choice.jsonl")
    monkeypatch.setattr(scoring_costs, "this_machine", lambda: (1e9, 1e9, 1e9))
    for module in (offloading, scoring_costs):
        monkeypatch.setattr(module, "SAMPLE", 0)
    monkeypatch.setattr(scoring_costs.Offloaded, "extra_seconds", lambda *_, **__: 0.0)  # see test_plan_costs
    given = {"model": str(folder), "device": "balanced", "max_memory": f"cpu={memory}", "judge": False}
    plan = mc.plan(tasks=tasks, limit=8, task_args={"noise_items": 0}, **given)
    planned = plan.stages[0]

    [slow, *_] = mc.plan(
        tasks=tasks, limit=8, task_args={"noise_items": 0}, machine_args={"disk_bandwidth": 1e-6}, **given
    ).stages

    fetched = count_fetched(monkeypatch)
    held: list[int] = []  # bytes of states behind the first layer, by sweep
    forward, sweep = BodyByLayer._forward, BodyByLayer._sweep

    def adding(body: BodyByLayer, **inputs: Any) -> torch.Tensor:
        states = forward(body, **inputs)
        held[-1] += states.nbytes if body.states is None else 0
        return states

    def beginning(*args: Any) -> list[torch.Tensor]:
        held.append(0)
        return sweep(*args)

    monkeypatch.setattr(BodyByLayer, "_forward", adding)
    monkeypatch.setattr(BodyByLayer, "_sweep", beginning)
    loaded = load_model(
        LoadConfig(path=str(folder), device="balanced", max_memory={"cpu": memory}, offload_dir=str(tmp_path))
    )
    waiting = sum(p.nbytes for p in loaded.model.parameters() if p.device.type == "meta")
    scorer = Scorer(loaded, ScoringConfig(progress=False))
    assert plan.waiting_bytes == waiting
    n_probes = len(held)
    suite = load_suite(tasks, model=str(folder), settings=TaskSettings(limit=8))
    run_model(scorer, suite)
    assert planned.reads == len(held) - n_probes == reads
    assert planned.states_memory == max(held)
    # Beside the file's hash, and what stays in memory once it is read.
    whole = 4 * sum(p.numel() for p in loaded.model.parameters())
    ends = 2 * loaded.model.lm_head.weight.nbytes
    assert planned.bytes_read - whole == pytest.approx(fetched["bytes"] - ends, rel=0.1)
    # All layers of a sweep but the first are read while the device computes; a slow disk is waited for all the time.
    behind_first = planned.reads * (waiting - sum(p.nbytes for p in loaded.model.model.layers[-1].parameters()))
    moved = planned.bytes_read - behind_first + planned.bytes_written
    assert planned.operations is not None
    assert planned.seconds == pytest.approx(planned.operations / 1e9 + moved / 2e9)
    assert slow.seconds == pytest.approx((slow.bytes_read + slow.bytes_written) / 1e3)
    text = (
        f"Layer by layer, baseline: {planned.reads} reads of {bytes_text(waiting)}, {bytes_text(max(held))} of states"
    )
    assert text in plan.as_text()


# Dense, with windows, with experts, and without a library of rtn (it skips Falcon's layers): each is stored otherwise.
DIFFERENT = {"Llama": "rtn", "Gemma3Text": "fp8", "Mixtral": "mxfp4", "Falcon": "hqq"}
MARKED = [pytest.param(n, marks=pytest.mark.ci if n in DIFFERENT else pytest.mark.slow) for n in ARCHITECTURES]


@pytest.mark.parametrize("n_sweeps", [1, 2, 5])
@pytest.mark.parametrize("name", MARKED)
def test_each_of_three_kills_loses_the_layer_that_was_computed(
    name: str, n_sweeps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At random layers of 4, in a number of sweeps; what is written down is written after each layer."""
    monkeypatch.setitem(ARCHITECTURES, name, {**ARCHITECTURES[name], "num_hidden_layers": 4})
    folder, config = make(name, tmp_path / "model", torch.float32), ScoringConfig(shard_seconds=0.0, **SIZES)
    wanted, _ = Scorer(load_model(LoadConfig(path=str(folder), device="cpu")), config).score(requests())
    counted, draw, left = Sweeps(n_sweeps, monkeypatch), random.Random(f"{name} {n_sweeps}"), 4 * n_sweeps
    for _ in range(3):
        loaded = on_disk(folder, tmp_path)
        counted.stop_at = draw.randint(1, left)
        with pytest.raises(KeyboardInterrupt):
            Scorer(loaded, config).score(requests(), resume=tmp_path / "parts")
        left -= counted.stop_at - 1
        layers = decoder_layers(loaded.model)
        assert layers is not None
        assert all(p.device.type == "meta" for p in layers[1].parameters()), "nothing stays in memory"
    counted.stop_at = None
    found, _ = Scorer(on_disk(folder, tmp_path), config).score(requests(), resume=tmp_path / "parts")
    assert found.table.equals(wanted.table) and counted.n_layers == left


@pytest.mark.parametrize("method", ["rtn", "fp8", "hqq"])
def test_a_killed_pass_of_a_compressed_model_goes_on_behind_a_layer(
    method: str, tmp_path: Path, no_fresh_process: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed twice, at random layers of 8, in two sweeps. hqq's format is not read from the disk layer by layer."""
    folder, out = make_llama(tmp_path / "base", num_hidden_layers=4), tmp_path / "compressed"
    compress_model(str(folder), method, method_config(method), [], out, device="cpu")
    in_memory, config = LoadConfig(path=str(out), device="cpu"), ScoringConfig(shard_seconds=0.0, **SIZES)
    wanted, _ = Scorer(load_model(in_memory), config).score(requests())
    if method == "hqq":
        request.getfixturevalue("by_layer")
    counted, draw, left = Sweeps(2, monkeypatch), random.Random(method), 8

    def score() -> Any:
        loaded = load_model(in_memory) if method == "hqq" else on_disk(out, tmp_path)
        return Scorer(loaded, config).score(requests(), resume=tmp_path / "parts")[0].table

    for _ in range(2):
        counted.stop_at = draw.randint(1, left)
        with pytest.raises(KeyboardInterrupt):
            score()
        left -= counted.stop_at - 1
    counted.stop_at = None
    assert score().equals(wanted.table) and counted.n_layers == left < 8


def test_the_next_layer_is_read_while_one_computes(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's batches wait here until the next layer is read: its stored bytes, once, and no others."""
    wanted = records(load_model(LoadConfig(path=str(base), device="cpu")), "plain")
    loaded, config = on_disk(base, tmp_path), ScoringConfig(path="plain", **SIZES)
    scorer, layers = Scorer(loaded, config), list(loaded.model.model.layers)
    scorer._execution._body.room = 1 << 30  # type: ignore[attr-defined]  # one sweep
    done, blocks = [threading.Event() for _ in layers], [bytearray() for _ in layers]
    read, forward = offloading._read, BodyByLayer._forward

    class Noted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            n = super().readinto(buffer)
            blocks[number] += buffer[:n]
            return n

    def reading(layer: torch.nn.Module, *args: Any) -> None:
        nonlocal number
        number = layers.index(layer)
        try:
            read(layer, *args)
        finally:
            done[number].set()

    def computing(body: BodyByLayer, **inputs: Any) -> torch.Tensor:
        if body.present + 1 < len(layers):
            done[body.present + 1].wait()
        return forward(body, **inputs)

    number = 0
    monkeypatch.setattr(offloading, "Path", lambda path: SimpleNamespace(open=lambda *_, **__: Noted(path)))
    monkeypatch.setattr(offloading, "_read", reading)
    monkeypatch.setattr(BodyByLayer, "_forward", computing)
    monkeypatch.setattr(offloading, "_BLOCK", 1000)  # no weight is a multiple of it
    found, _ = scorer.score(requests())
    assert found.table.equals(wanted[0])
    with safe_open(base / "model.safetensors", framework="pt") as file:
        for n, block in enumerate(blocks):
            names = [name for name in file.offset_keys() if name.startswith(f"model.layers.{n}.") and n > 0]
            assert block == b"".join(file.get_tensor(name).view(torch.uint8).numpy().tobytes() for name in names)


@pytest.mark.parametrize("broken", [True, False], ids=["its disk fails", "interrupted while it reads"])
def test_reading_ahead_ends_with_the_pass_and_loses_nothing(
    base: Path, tmp_path: Path, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = records(load_model(LoadConfig(path=str(base), device="cpu")))
    loaded, config = on_disk(base, tmp_path), ScoringConfig(shard_seconds=0.0, **SIZES)
    scorer, last = Scorer(loaded, config), loaded.model.model.layers[-1]
    scorer._execution._body.room = 1 << 30  # type: ignore[attr-defined]
    fault = OSError(errno.EIO, os.strerror(errno.EIO), "model.safetensors")

    def reading(layer: torch.nn.Module, ended: threading.Event) -> None:
        if broken and layer is last:
            raise fault
        if layer is last:
            ended.wait()  # nothing waits until it is read

    def computing(body: BodyByLayer, **inputs: Any) -> torch.Tensor:
        if not broken and body.present == 1:
            raise KeyboardInterrupt
        return forward(body, **inputs)

    forward = BodyByLayer._forward
    with monkeypatch.context() as patched:
        patched.setattr(offloading, "_read", reading)
        patched.setattr(BodyByLayer, "_forward", computing)
        with pytest.raises((OSError, KeyboardInterrupt)) as caught:
            scorer.score(requests(), resume=tmp_path / "parts")
    assert caught.value is fault if broken else caught.type is KeyboardInterrupt
    assert all(p.device.type == "meta" for p in loaded.model.model.layers.parameters()), "nothing stays in memory"
    assert all(not thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate())
    counted = Sweeps(1, monkeypatch)
    found, _ = Scorer(loaded, config).score(requests(), resume=tmp_path / "parts")
    assert found.table.equals(wanted[0]) and counted.n_layers == 2, "those behind the first"


def test_a_layer_that_needs_more_than_its_states_is_run_batch_by_batch(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here each layer adds what the layer before it has left behind."""
    loaded = on_disk(base, tmp_path)
    layers, left = loaded.model.model.layers, [torch.zeros(())]
    for layer in layers:
        plain = layer.forward

        def forward(states: torch.Tensor, *args: Any, _plain: Any = plain, **kwargs: Any) -> torch.Tensor:
            out: torch.Tensor = _plain(states, *args, **kwargs) + left[0]
            left[0] = out.mean()
            return out

        layer.forward = forward
    scorer = Scorer(loaded, ScoringConfig(**SIZES))
    assert not isinstance(scorer._execution._body, BodyByLayer)  # type: ignore[attr-defined]
    assert "fetched again for every batch" in caplog.text and "states differ" in caplog.text


def test_a_sweep_that_runs_out_of_memory_goes_on_batch_by_batch(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = records(load_model(LoadConfig(path=str(base), device="cpu")))
    scorer = Scorer(on_disk(base, tmp_path), ScoringConfig(**SIZES))
    assert isinstance(scorer._execution._body, BodyByLayer)  # type: ignore[attr-defined]

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(BodyByLayer, "_sweep", full)
    found, _ = scorer.score(requests())
    assert found.table.equals(wanted[0]) and "going on batch by batch" in caplog.text


@pytest.mark.parametrize("name", MARKED)
def test_a_compressed_model_has_the_records_of_whole_passes(
    name: str, tmp_path: Path, no_fresh_process: None, request: pytest.FixtureRequest
) -> None:
    base, out = make(name, tmp_path / "base", torch.float32), tmp_path / "compressed"
    method = DIFFERENT.get(name, "rtn")
    settings = {"group_size": 64} if method in ("rtn", "hqq") else {}
    compress_model(str(base), method, method_config(method, **settings), [], out, device="cpu")
    wanted = records(load_model(LoadConfig(path=str(out), device="cpu")))
    request.getfixturevalue("by_layer")
    found = records(load_model(LoadConfig(path=str(out), device="cpu")))
    assert found[0].equals(wanted[0]) and found[1].equals(wanted[1])
