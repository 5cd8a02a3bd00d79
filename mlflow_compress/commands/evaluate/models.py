"""Models of a stage: opened without their weights, loaded one at a time, and scored whole or on blocks of items."""

import gc
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mlflow_compress import files as atomic
from mlflow_compress.commands.command import Say
from mlflow_compress.commands.evaluate.outputs import ModelOutputs, run_model
from mlflow_compress.commands.evaluate.parameters import EvaluateConfig
from mlflow_compress.commands.judge.parameters import JudgeConfig
from mlflow_compress.commands.shared.named_models import baseline_label, folder_or_hub, is_small, model_path
from mlflow_compress.config import EngineConfig, InferenceConfig, SourceConfig, is_endpoint
from mlflow_compress.decide.item_sampling import ItemSampler
from mlflow_compress.engines.interface import (
    ENGINES,
    AnyEngineModel,
    EngineModel,
    Loaded,
    ModelRequest,
    ModelScorer,
    Stored,
    Writer,
    engine_of_files,
)
from mlflow_compress.engines.local import LocalEngine, LocalModel
from mlflow_compress.errors import ConfigError
from mlflow_compress.files import read_json_object
from mlflow_compress.items.suite import Suite
from mlflow_compress.metrics.core.metric_inputs import MetricInputs, MetricSettings
from mlflow_compress.models.identity import check_same_tokenizer
from mlflow_compress.models.placement import BALANCED
from mlflow_compress.records import ItemKey, RunRecords
from mlflow_compress.scoring.child_process import passes_in_forks
from mlflow_compress.scoring.plan.encoding import Shortened
from mlflow_compress.tracking.run_names import FACTS


def recognised_in(folder: Path, model: AnyEngineModel) -> None:
    """Write down who serves a model into a folder of unfinished work, or check that the same still answers."""
    if (served := model.at_server) is None:  # its weights have a hash
        return
    file = folder / f"{served.weights[:16]}-{FACTS}"
    if file.is_file():
        served.recognise(read_json_object(file))
    else:
        atomic.write(file, json.dumps(served.server_identity()).encode())


def try_out(model: AnyEngineModel) -> None:
    """Refuse a model that its engine cannot run on this machine; transformers has loaded all that were compressed."""
    if model.own_kernels is not None:
        model.own_kernels.try_out()


def require_unchanged(model: AnyEngineModel) -> None:
    """Refuse a served model that is not the one that was opened; weights in a folder have a hash."""
    if (served := model.at_server) is not None:
        served.require_unchanged()


def scorer_listing(
    model: EngineModel[Loaded, Writer, Stored], loaded: Loaded, items: Collection[ItemKey]
) -> ModelScorer[Writer, Stored]:
    """Return what scores with a model; a server is asked for lists of most probable tokens of these items alone."""
    served = model.at_server
    return (model if served is None else served.with_lists_for(items)).scorer(loaded)


def engine_started(running: EngineConfig, source: SourceConfig, workers: Any = None) -> AbstractContextManager[Any]:
    """Return a block within which the engine of the parameters runs: see `Engine.started`. Blocks share it."""
    engine = engine_of_files(running.engine)
    if engine.abilities.places_itself and source.device == BALANCED:
        raise ConfigError(
            f"Models are placed by engine={running.engine} itself", got="device=balanced", fix="Use engine=local"
        )
    on_gpu = {"auto": None, "cpu": False, "cuda": True}.get(source.device)
    return engine.started(running, on_gpu=on_gpu, workers=workers)


def cores_shared_out(running: EngineConfig, source: SourceConfig) -> AbstractContextManager[None]:
    """Return a block within which forks of one thread share the passes of a small baseline that runs here, on a CPU."""
    abilities = engine_of_files(running.engine).abilities
    in_forks = abilities.in_this_process and not abilities.own_kernels and is_small(source)
    return passes_in_forks() if in_forks else nullcontext()


def light(path: str, source: SourceConfig, inference: InferenceConfig) -> LocalModel:
    """Return a model in a folder without its weights: tokenizer, configuration and hashes; this process loads it."""
    return LocalEngine().open(ModelRequest(address=path, source=source, inference=inference))


def as_baseline(inference: InferenceConfig, base: AnyEngineModel) -> InferenceConfig:
    """Return the settings with the dtype that the baseline has, so that like is compared with like."""
    if base.abilities.served:
        return inference
    return inference.model_copy(update={"dtype": str(base.dtype).removeprefix("torch.")})


def _opened(address: str, config: EvaluateConfig | JudgeConfig, **more: Any) -> AnyEngineModel:
    """Return a stage's model by its address: a server's, or a folder or hub id for the engine of the parameters."""
    name = "endpoint" if is_endpoint(address) else config.running.engine
    request = ModelRequest(
        address=address,
        source=config.source,
        inference=config.inference,
        running=config.running,
        served=config.served,
    )
    return ENGINES.get(name).open(replace(request, **more))


def open_baseline(config: EvaluateConfig | JudgeConfig) -> AnyEngineModel:
    """Return a stage's baseline without its weights."""
    model = config.source.model
    if is_endpoint(model):
        names = {"parameter": "model", "name_parameter": "baseline_served_model"}
        return _opened(
            model, config, name=baseline_label(config.source, config.served), reader=_reader(config), **names
        )
    with folder_or_hub("model", model_path(model)):
        return _opened(model_path(model), config)


def open_variant(config: EvaluateConfig | JudgeConfig, base: AnyEngineModel) -> AnyEngineModel:
    """Return a stage's variant without its weights; a served one has the baseline's tokenizer, or the one given."""
    if not is_endpoint(config.checkpoint):
        return _opened(str(config.checkpoint), config, inference=as_baseline(config.inference, base))
    reader = base if config.served.tokenizer is None else _reader(config)
    names = {"parameter": "checkpoint", "name_parameter": "served_model"}
    return _opened(str(config.checkpoint), config, name=str(config.served.served_model), reader=reader, **names)


def open_both(config: EvaluateConfig | JudgeConfig, say: Say) -> tuple[AnyEngineModel, AnyEngineModel]:
    """Return baseline and variant without their weights; `say` is told what a person should know of them."""
    base = open_baseline(config)
    variant = open_variant(config, base)
    for model in (base, variant):
        if notice := model.notice():
            say(notice)
    check_same_tokenizer(base, variant)
    return base, variant


def _reader(config: EvaluateConfig | JudgeConfig) -> LocalModel:
    """Return the model whose tokenizer served models have."""
    if config.served.tokenizer is None:
        raise ConfigError("Parameter 'tokenizer' must be given with a served baseline", allowed="a folder or a hub id")
    with folder_or_hub("tokenizer", config.served.tokenizer):
        # Its weights are not read: any dtype will do.
        return light(config.served.tokenizer, config.source, config.inference.model_copy(update={"dtype": "float32"}))


class OneLoaded:
    """Loads models, one at a time: the last one stays in memory until another is asked for, or until `free`."""

    def __init__(self) -> None:
        self._loaded: Any = None
        self._model: AnyEngineModel | None = None

    def __call__(self, model: EngineModel[Loaded, Writer, Stored]) -> Loaded:
        if self._model is not model:
            self.free()
            self._loaded, self._model = model.load(), model
        loaded: Loaded = self._loaded
        return loaded

    def free(self) -> None:
        self._loaded = self._model = None
        gc.collect()  # modules have reference cycles: without this, two models would be in memory


ItemKeys = Sequence[ItemKey]

_DONE = "done.json"  # in the folder of a block whose records are complete


def joined_records(parts: Sequence[RunRecords]) -> RunRecords:
    """Return the records of several blocks together."""
    whole = {}
    for column in fields(RunRecords):
        tables = [table for part in parts if (table := getattr(part, column.name)) is not None]
        whole[column.name] = type(tables[0]).concat(tables) if tables else None
    return RunRecords(**whole)


@dataclass(frozen=True, kw_only=True)
class BlockScorer:
    """Scores blocks of items, each of them once."""

    suite: Suite  # All tasks
    # Loads the model when the first block must be scored; it stays loaded
    scorer: Callable[[], ModelScorer[Any, Any]]
    states: Any  # What the variant is compared with: see `EngineModel.comparable_with`
    folder: Path  # Folder of finished blocks, which a command that was interrupted finds again
    every_order: bool = False  # Score the shuffled orders of the options too

    def records(self, number: int, keys: ItemKeys) -> tuple[RunRecords, Shortened]:
        """Return the variant's records of one block, and the items that it could not read whole."""
        folder = self.folder / f"block-{number:05d}"
        done = folder / _DONE
        if done.is_file():
            known = read_json_object(done)
            if known.get("items") == [list(key) for key in keys]:
                cut, too_long = (frozenset(map(tuple, known[name])) for name in ("cut", "too_long"))
                return RunRecords.read(folder), Shortened(cut, too_long)
        outputs = self._score(keys, folder / "unfinished")
        outputs.records.write(folder)
        short = {"cut": sorted(outputs.shortened.cut), "too_long": sorted(outputs.shortened.too_long)}
        # Last, so that an interrupted block is scored again.
        atomic.write(done, json.dumps({"items": [*map(list, keys)], **short}).encode())
        return outputs.records, outputs.shortened

    def _score(self, keys: ItemKeys, resume: Path) -> ModelOutputs:
        """Score some items, without corpora, documents and chains, and unless asked for without shuffled options."""
        tasks = []
        for task in self.suite.tasks:
            ids = {item_id for name, item_id in keys if name == task.name}
            if ids:
                orders = (r for r in task.requests if self.every_order or r.permutation == 0)
                requests = tuple(request for request in orders if request.item_id in ids)
                items = task.items.where(item_id=ids)
                tasks.append(replace(task, items=items, requests=requests, documents=(), chains=None))
        part = replace(self.suite, tasks=tuple(tasks), corpora=(), averages=())
        return run_model(self.scorer(), part, baseline=self.states, resume=resume)


def run_sampled(
    blocks: BlockScorer, baseline: RunRecords, config: EvaluateConfig, scored: RunRecords | None
) -> ModelOutputs:
    """Score a model on drawn items, round after round, and on all texts; `scored` are rounds of an earlier run."""
    assert config.sampling.size is not None
    seed = config.source.seed
    settings = MetricSettings(seed=seed, split_seed=seed)
    sampler = ItemSampler.of_baseline(config.sampling.size, MetricInputs(baseline=baseline), seed=seed)
    tasks = (
        replace(task, items=task.items.where(item_id=[]), requests=(), answering=None)
        for task in blocks.suite.tasks
        if task.documents
    )
    texts = replace(blocks.suite, tasks=tuple(tasks), averages=())
    parts: list[RunRecords] = []
    short, seen = Shortened(), set[ItemKey]()
    if scored is not None:
        assert scored.draws is not None
        sampler.begin_after(scored.draws)
    while True:
        keys = [key for key in sampler.keys if key not in seen]
        if scored is not None and not parts:
            records, shortened = replace(scored, draws=None), Shortened()
        else:
            records, shortened = blocks.records(sampler.rounds, keys)
        parts.append(records)
        seen |= set(keys)
        short = Shortened(short.cut | shortened.cut, short.too_long | shortened.too_long)
        joined = replace(joined_records(parts), draws=sampler.draws())
        if not sampler.go_on(MetricInputs(baseline=baseline, variant=joined, settings=settings)):
            break
    if scored is None and (texts.corpora or texts.tasks):
        text = run_model(
            blocks.scorer(), texts, baseline=blocks.states, generations=False, resume=blocks.folder / "text"
        )
        joined = text.records.with_records(joined)
        short = Shortened(short.cut | text.shortened.cut, short.too_long | text.shortened.too_long)
    return ModelOutputs(joined, len(short.cut), short)
