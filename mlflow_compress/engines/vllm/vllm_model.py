"""A model in vLLM, as the stages see it: its body runs there, its head here."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from safetensors import safe_open

from mlflow_compress.config import EngineConfig
from mlflow_compress.engines.file_model import FileModel, open_request
from mlflow_compress.engines.interface import Abilities, ModelRequest, engine
from mlflow_compress.engines.local import LocalModel
from mlflow_compress.engines.vllm.vllm_process import VllmEngine, VllmProcess, started_engine
from mlflow_compress.errors import UnsupportedError, WorkerError
from mlflow_compress.models import checkpoint_config
from mlflow_compress.models.identity import stored_config
from mlflow_compress.models.length_regimes import LengthRegime, one_regime
from mlflow_compress.models.loading import LightModel, LoadedModel, load_model
from mlflow_compress.models.memory_alignment import rounding_identity
from mlflow_compress.models.model_files import open_generation_settings
from mlflow_compress.scoring.engine import BaselineOutputs, PassWork, run_pass
from mlflow_compress.scoring.forward.head import Head, empty_model, rebuild_head
from mlflow_compress.scoring.forward.tree_attention import TreeAttention
from mlflow_compress.scoring.generation.decoding import GenerationJob, end_tokens_of
from mlflow_compress.scoring.generation.generation_rows import Ending, GenerationConfig, GenerationRow
from mlflow_compress.scoring.journal import Arrays
from mlflow_compress.scoring.plan import packing
from mlflow_compress.scoring.scoring_pass import ModelRunner


def read_head(model: LightModel) -> Head:
    """Return the model's head: its weights alone are read, or the whole model where they are quantized."""
    config = stored_config(model.model_config)
    weights = _stored(model, config)
    if weights is None:
        module = load_model(model.config).model.get_output_embeddings()
        if type(module) is not torch.nn.Linear:
            raise UnsupportedError(
                f"engine=vllm needs a head that is a plain linear layer, and this is a {type(module).__name__}",
                got=str(model.path),
            )
        weights = dict(module.state_dict())
    return rebuild_head(config, {name: weight.detach().to("cpu", model.dtype) for name, weight in weights.items()})


def _stored(model: LightModel, config: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
    """Return the head's weights as the files hold them; None where they are stored in another way."""
    shell = empty_model(config)
    by_module = {module: name for name, module in shell.named_modules()}
    names = [by_module[shell.get_output_embeddings()]]
    if model.model_config.get_text_config(decoder=True).tie_word_embeddings:
        names.append(by_module[shell.get_input_embeddings()])
    files = [file for file in checkpoint_config.weight_files(model.path) if file.suffix == ".safetensors"]
    for name in names:
        weights = {}
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for part in {f"{name}.weight", f"{name}.bias"}.intersection(tensors.keys()):
                    weights[part.rpartition(".")[2]] = tensors.get_tensor(part)
        weight = weights.get("weight")
        if weight is not None and weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
            return weights
    return None


Ask = Callable[[Sequence[packing.Ids], Sequence[Sequence[int]]], torch.Tensor]


@dataclass(frozen=True)
class _StatesRequest:
    """A sequence, and its positions whose states are wanted, in ascending order."""

    ids: packing.Ids
    rows: list[int]


def requests_of(
    unit: packing.PackedBatch | packing.PaddedBatch, makers: dict[int, packing.PackedBatch]
) -> list[_StatesRequest]:
    """Return the sequences that yield the scored positions of a unit, in its order. None without such a position.

    A pack becomes one request per branch. Neighbours share their beginnings, which vLLM then finds in its cache. A
    position that several branches share is asked of the first one, before it can be in the cache.

    `makers` are the packs that make the cached prefixes, by number.
    """
    if isinstance(unit, packing.PaddedBatch):
        pairs = zip(unit.sequences, unit.rows, strict=True)
        return [_StatesRequest(ids, rows.tolist()) for ids, rows in pairs if len(rows)]
    number = unit.prefix
    parts: list[packing.Ids] = []
    while number != packing.NO_PREFIX:
        parts.append(makers[number].ids)
        number = makers[number].prefix
    before = np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)
    requests: list[_StatesRequest] = []
    path: list[int] = []
    begin = 0  # the first token that no earlier branch has
    for token, end in enumerate(unit.ends.tolist()):
        while path and unit.ends[path[-1]] <= token:
            path.pop()
        path.append(token)
        if end > token + 1:
            continue  # the branch goes on
        rows = unit.rows[(unit.rows >= begin) & (unit.rows <= token)]
        begin = token + 1
        if len(rows):
            requests.append(_StatesRequest(np.concatenate([before, unit.ids[path]]), unit.positions[rows].tolist()))
    return requests


class VllmBody:
    """Yields the states of a plan's units, as `forward.body.Body` does. The next group is computed ahead."""

    def __init__(self, plan: packing.Plan, head_rows: int, ask: Ask) -> None:
        self._plan, self._ask = plan, ask
        self._groups = packing.group_units(plan, head_rows)
        self._group_of = {
            id(plan.units[unit]): number
            for number, group in enumerate(self._groups)
            for unit in range(group.units.start, group.units.stop)
        }
        self._makers = plan.makers
        self._pool = ThreadPoolExecutor(1)
        self._asked: dict[int, Future[dict[int, torch.Tensor]]] = {}

    def run(
        self, unit: packing.PackedBatch | packing.PaddedBatch, attention: TreeAttention | None = None
    ) -> torch.Tensor:
        number = self._group_of[id(unit)]
        for wanted in range(number, min(number + 2, len(self._groups))):
            if wanted not in self._asked:
                self._asked[wanted] = self._pool.submit(self._states, self._groups[wanted])
        for done in [n for n in self._asked if n < number]:
            del self._asked[done]
        return self._asked[number].result()[id(unit)]

    def has(self, prefix: int) -> bool:
        """Return True: vLLM computes a prefix again where its cache has lost it."""
        return True

    def forget(self, prefix: int) -> None:
        """Do nothing: vLLM frees its cache itself."""

    def clear(self) -> None:
        """Release the tensors that nobody has read."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def busy(self) -> bool:
        """Whether vLLM computes something that nobody waits for."""
        return any(not future.done() for future in self._asked.values())

    def _states(self, group: packing.UnitGroup) -> dict[int, torch.Tensor]:
        units = [self._plan.units[number] for number in range(group.units.start, group.units.stop)]
        requests = [request for unit in units for request in requests_of(unit, self._makers)]
        states = self._ask([request.ids for request in requests], [request.rows for request in requests])
        parts = torch.split(states, [packing.n_scored_rows(unit) for unit in units])
        return {id(unit): part for unit, part in zip(units, parts, strict=True)}


_PROBE = 12  # tokens of which vLLM's own log-probabilities are compared with ours


@dataclass(frozen=True)
class VllmModel(FileModel):
    """A model that vLLM loads when it is first needed."""

    vllm: VllmEngine

    abilities = Abilities(places_itself=True, own_kernels=True)

    @property
    def engine(self) -> dict[str, str]:
        """What decides its numbers besides our own code: the engine, its version, its device and settings."""
        return {"engine": "vllm", **{f"vllm {name}": value for name, value in self.vllm.described.items()}}

    @property
    def rounding(self) -> dict[str, str]:
        """What decides the last bits of its numbers: in vLLM (see `engine`), and here, for the head."""
        return {**rounding_identity(self.device), **self.engine}

    @cached_property
    def head(self) -> Head:
        return read_head(self).to(self.device)

    @property
    def model(self) -> Any:
        """The transformers model without the weights of its body: what a baseline store takes the head from."""
        return self.head.model

    @property
    def execution(self) -> "_VllmExecution":
        return _VllmExecution(self)

    @property
    def own_kernels(self) -> "VllmModel":
        return self

    def load(self) -> Self:
        """Return the model itself: vLLM loads the weights when they are first needed."""
        return self

    def in_this_process(self) -> LocalModel:
        """Return the same checkpoint under transformers. vLLM's process ends: memory may not hold the model twice."""
        self.vllm.release()
        return LocalModel.of(self)

    def process(self) -> VllmProcess:
        """Return the process in which vLLM holds it, checked when it is new.

        An `UnsupportedError`: vLLM does not load it, or our head on vLLM's states does not give vLLM's own
        log-probabilities.
        """
        process, is_new = self.vllm.process(
            str(self.path),
            dtype=str(self.dtype).removeprefix("torch."),
            max_length=self.max_length,
            trust_remote_code=self.config.trust_remote_code,
        )
        if is_new:
            try:
                self._check(process)
            except WorkerError as error:  # some kernels are looked for when the first tokens are computed
                self.vllm.release()
                raise UnsupportedError(
                    f"vLLM loads this checkpoint but cannot run it: {error.args[0]}", got=str(self.path)
                ) from None
        return process

    def try_out(self) -> None:
        """Load it into vLLM and compute a few tokens: only that shows whether vLLM has its kernels on this machine."""
        self.process()

    def _check(self, process: VllmProcess) -> None:
        ids = np.random.default_rng(1).integers(0, self.vocab_size, size=_PROBE).astype(np.int32)
        vllm_logprobs = torch.from_numpy(process.logprobs([ids])[0])
        states = process.states([ids], [range(_PROBE - 1)])
        logprobs = torch.log_softmax(self.head.logits(states).cpu().double(), dim=-1)
        ours = logprobs[torch.arange(_PROBE - 1), torch.from_numpy(ids[1:].astype(np.int64))]
        worst = float((ours - vllm_logprobs).abs().max())
        # vLLM rounds the logits of a half-precision head to 3 digits, which we do not; a wrong head is far off.
        if not worst <= (1e-3 if self.dtype == torch.float32 else 0.05 * float(vllm_logprobs.abs().max())):
            raise UnsupportedError(
                f"The head on vLLM's states differs from vLLM's own log-probabilities by {worst:.1e} nat",
                got=str(self.path),
                fix="Use engine=local",
            )

    def decode(self, job: GenerationJob) -> None:
        """Generate the answers of all rows in place, as `decoding.decode` does, with our own sampler and seeds.

        vLLM chooses which rows it computes together, so that its answers may depend on that by rounding.
        """
        ends = sorted(end_tokens_of(self._generation_settings, self.tokenizer) | set(job.end_tokens))
        unfinished = job.unfinished()
        with job.bar(unfinished) as bar:
            ending = Ending(self.tokenizer, ends, job.until, job.config.max_new_tokens, finished=bar.update)
            for shard in unfinished:
                drafts = [row.restarted() for row in shard]
                begin = time.perf_counter()
                self._generate(drafts, job.config, ends, ending)
                job.take(shard, drafts, time.perf_counter() - begin)

    def _generate(
        self, rows: Sequence[GenerationRow], config: GenerationConfig, ends: Sequence[int], ending: Ending
    ) -> None:
        def draw(row: GenerationRow) -> dict[str, Any] | None:
            if row.temperature == 0:
                return None
            numbers = row.u.tolist()
            return {"u": numbers, "temperature": row.temperature, "top_k": config.top_k, "top_p": config.top_p}

        written = self.process().generate(
            [row.prompt for row in rows], [config.max_new_tokens] * len(rows), [draw(row) for row in rows], ends
        )
        for row, tokens in zip(rows, written, strict=True):
            for token in tokens:
                if not row.done:  # vLLM does not know our stop texts, and writes on behind them
                    ending.add(row, token)

    @cached_property
    def _generation_settings(self) -> Any:
        from transformers import GenerationConfig as Settings

        return open_generation_settings(self.path) or Settings.from_model_config(self.model_config)


class _VllmExecution:
    """Runs the passes of one model: its body in vLLM, its head and everything behind it in this process."""

    whole_model_reason: str | None = None

    def __init__(self, model: VllmModel) -> None:
        self._model = model

    def reason_not_to_pack(self, max_length: int, baseline: BaselineOutputs) -> str | None:
        """Return None: vLLM shares the prefixes of any sequences, in the order of a packed plan."""
        return None

    def length_regimes(self, baseline: BaselineOutputs) -> LengthRegime:
        """Return a single one: vLLM chooses a model's frequencies once, when it loads it."""
        return one_regime

    def run(self, work: PassWork) -> tuple[Arrays, int]:
        if isinstance(work.baseline, LoadedModel):
            raise UnsupportedError("engine=vllm compares with a stored baseline, not with a model in this process")
        if not work.plan.units:
            return work.empty(), 0
        process = self._model.process()
        process.forget()  # a position that is cached has no state
        body = VllmBody(work.plan, work.head_rows, process.states)
        try:
            return run_pass(work, ModelRunner(body, self._model.head), work.baseline)
        finally:
            body.clear()
            if body.busy:  # the pass was interrupted
                self._model.vllm.release()


@engine("vllm")
class InVllmEngine:
    """Runs bodies in vLLM, with its own kernels, and heads in this process."""

    abilities = VllmModel.abilities

    def __init__(self) -> None:
        self._vllm: VllmEngine | None = None  # That of the outermost block

    @contextmanager
    def started(self, running: EngineConfig, *, on_gpu: bool | None, workers: Any = None) -> Iterator[None]:
        """Within this block there is a vLLM; see `vllm_process.started_engine`."""
        outer = self._vllm
        with started_engine(running, outer) as self._vllm:
            try:
                yield None
            finally:
                self._vllm = outer

    def open(self, request: ModelRequest) -> VllmModel:
        assert self._vllm is not None, "engine=vllm is used outside of a block of `started`"
        on_cpu = self._vllm.described["device"] == "cpu"  # torch may see no GPU in this process
        opened = open_request(request, computes_on="cpu" if on_cpu else "cuda")
        if checkpoint_config.has_quantized_cache(opened.path):
            raise UnsupportedError(
                "vLLM does not round the cache of this checkpoint", got=str(opened.path), fix="Use engine=local"
            )
        return VllmModel.of(opened, vllm=self._vllm)
