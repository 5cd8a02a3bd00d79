"""Times models in the runtimes that they are meant for: one process per model, baseline and variant in turn."""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from mlflow_compress.errors import WorkerError
from mlflow_compress.lifetime import as_the_user_set
from mlflow_compress.models import checkpoint_config
from mlflow_compress.records import Timings
from mlflow_compress.transport.json_process import JsonProcess

_TRANSFORMERS, VLLM, LLAMA_CPP = "transformers", "vllm", "llama.cpp"

_MOST_ROUNDS = 4  # times the fewest
PROCESSES = 3  # per model, in which its memory is measured; in the last one it is timed, too
BATCHES = (1, 8)  # sequences that are generated together: one user, and a busy server
_OF_VLLM = ("compressed-tensors", "gptq", "awq", "fp8")
_PROCESS = Path(__file__).with_name("model_process.py")
_PACKAGE_ROOT = str(Path(__file__).parents[3])


@dataclass(frozen=True)
class _RuntimeChoice:
    """The runtime that a checkpoint is meant for; None, and the reason, where there is none to be timed in."""

    runtime: str | None
    reason: str = ""


def runtime_of(folder: Path, device: str) -> _RuntimeChoice:
    """Return the runtime whose kernels compute with what the checkpoint stores."""
    simulated = checkpoint_config.has_quantized_cache(folder)
    kind = checkpoint_config.QUANTIZED_CACHE if simulated else checkpoint_config.quant_method(folder)
    if simulated or kind in checkpoint_config.OWN_FORMATS:
        return _RuntimeChoice(None, f"the format {kind} is only simulated: no kernel computes with it")
    files = checkpoint_config.weight_files(folder)
    if files and files[0].suffix == ".gguf":
        if importlib.util.find_spec("llama_cpp") is None:
            return _RuntimeChoice(None, "llama.cpp is not installed here (extra llama-cpp)")
        return _RuntimeChoice(LLAMA_CPP)
    if kind is None:
        return _RuntimeChoice(_TRANSFORMERS)
    if kind in _OF_VLLM:
        return _RuntimeChoice(VLLM)
    if kind == "bitsandbytes" and device == "cpu":
        return _RuntimeChoice(None, "bitsandbytes' weights are expanded on a CPU: its kernels run on a GPU")
    if kind in ("torchao", "bitsandbytes"):
        return _RuntimeChoice(_TRANSFORMERS)
    return _RuntimeChoice(None, f"it is not known which runtime computes with the format {kind}")


@dataclass(frozen=True, kw_only=True)
class RuntimeCall:
    """How a runtime opens one model."""

    runtime: str  # "transformers", "vllm" or "llama.cpp"
    python: str  # The interpreter of the runtime's environment
    folder: str  # The checkpoint, or the GGUF file
    dtype: str  # "auto" for the checkpoint's own
    device: str  # "cpu" or "cuda"
    n_threads: int  # Threads on a CPU
    n_context: int  # Longest sequence in tokens
    n_batch: int  # Most sequences at the same time


@dataclass(frozen=True)
class _Memory:
    """Bytes that a model takes above the libraries, after it has worked, and at most."""

    resident: int
    peak: int


class MeasuredModel(JsonProcess, AbstractContextManager["MeasuredModel"]):
    """A loaded model in its runtime. Use it as a context manager: the process ends with the block.

    `load_seconds` runs from the imported libraries to the model that can be used. `described` is the runtime with
    version, device, dtype and threads.
    """

    def __init__(self, call: RuntimeCall) -> None:
        self._call = call
        script = _PROCESS.with_name(f"in_{call.runtime.replace('.', '_')}.py")
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = {**as_the_user_set(os.environ), **quiet, "OMP_NUM_THREADS": str(call.n_threads)}
        if call.runtime == "transformers":
            known = (_PACKAGE_ROOT, os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(part for part in known if part)
        else:
            environment.pop("PYTHONPATH", None)  # other environments have other libraries
        super().__init__([call.python, "-P", str(_PROCESS), str(script)], env=environment)

    def open(self) -> None:
        reply = self._ask(do="open", **asdict(self._call))
        self.load_seconds = float(reply.pop("load_seconds"))
        threads = {"threads": self._call.n_threads} if self._call.device == "cpu" else {}
        self.described = {name: str(value) for name, value in {**reply, **threads}.items()}

    def generate(self, prompts: Sequence[Sequence[int]], n_new: int) -> list[float]:
        """Continue all prompts together by `n_new` tokens; return the seconds from the start to each step's end."""
        reply = self._ask(do="generate", prompts=[list(map(int, prompt)) for prompt in prompts], n_new=n_new)
        return [float(seconds) for seconds in reply["seconds"]]

    def measured(self, plan: "TimingPlan") -> _Memory:
        """Load the model, generate once with each batch size, and return what that takes."""
        self.open()
        for batch in BATCHES:
            self.generate(plan.prompts(batch, 0), plan.new_tokens)
        reply = self._ask(do="memory")
        return _Memory(int(reply["resident_bytes"]), int(reply["peak_bytes"]))

    def _ask(self, **command: Any) -> dict[str, Any]:
        answer, _ = self.ask(command)
        if "error" in answer:
            raise WorkerError(f"{self._call.runtime} failed with {self._call.folder}: {answer['error']}")
        return answer

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.end()


@dataclass(frozen=True, kw_only=True)
class TimingPlan:
    """What is generated, and how often."""

    tokens: Sequence[int]  # Token ids of a text; prompts are cut from it
    prompt_tokens: int  # Length of a prompt
    new_tokens: int  # Tokens that are generated for it
    repeats: int  # Fewest rounds that count; one more comes before them, to warm up
    # Whether the rounds so far are enough; they end after `_MOST_ROUNDS` times the fewest in any case
    enough: Callable[[Mapping[str, Timings]], bool] = lambda timings: True

    def prompts(self, batch: int, repeat: int) -> list[list[int]]:
        """Return other prompts for each sequence and round: no cache of a runtime can have read them before."""
        n = len(self.tokens)
        starts = [(7919 * (repeat * max(BATCHES) + number)) % n for number in range(batch)]
        return [[self.tokens[(start + i) % n] for i in range(self.prompt_tokens)] for start in starts]


@dataclass(frozen=True, kw_only=True)
class ModelTimes:
    """What was measured of one model."""

    timings: Timings  # When each token was there
    load_seconds: float | None  # Time to load it; None of a served model
    memory: Sequence[_Memory]  # What it takes, in each of its processes; of a served model nothing is known
    described: Mapping[str, str]  # Runtime with version, device and dtype


class _Generates(Protocol):
    """Interface of a model that can be timed."""

    def generate(self, prompts: Sequence[Sequence[int]], n_new: int) -> list[float]:
        """Continue all prompts together by `n_new` tokens; return the seconds from the start to each step's end."""


def timings_in_turn(models: Mapping[str, _Generates], plan: TimingPlan) -> dict[str, Timings]:
    """Return when each token was there, by the model's name.

    In every round each model generates once, and the order turns round from one round to the next. There are as many
    rounds as the plan calls enough.
    """
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    timings: dict[str, Timings] = {}
    for repeat in range(-1, _MOST_ROUNDS * plan.repeats):
        if repeat >= plan.repeats and plan.enough(timings):
            break
        for batch in BATCHES:
            for name in list(models)[:: 1 if repeat % 2 else -1]:
                seconds = models[name].generate(plan.prompts(batch, repeat + 1), plan.new_tokens)
                if repeat >= 0:
                    row = {"batch": batch, "repeat": repeat, "prompt_tokens": plan.prompt_tokens}
                    rows[name] += [{**row, "step": step, "seconds": at} for step, at in enumerate(seconds)]
        timings = {name: Timings.from_rows(steps) for name, steps in rows.items()}
    return timings


def timed_in_turn(calls: Mapping[str, RuntimeCall], plan: TimingPlan) -> dict[str, ModelTimes]:
    """Return what was measured of each model, by its name in `calls`. All are in memory at the same time."""
    memory: dict[str, list[_Memory]] = {name: [] for name in calls}

    def alone(call: RuntimeCall) -> _Memory:
        with MeasuredModel(call) as model:
            return model.measured(plan)

    with ThreadPoolExecutor(len(calls)) as pool:  # memory does not depend on what else the machine does
        for _ in range(PROCESSES - 1):
            for name, taken in zip(calls, pool.map(alone, calls.values()), strict=True):
                memory[name].append(taken)
    with ExitStack() as stack:
        models = {name: stack.enter_context(MeasuredModel(call)) for name, call in calls.items()}
        for name, model in models.items():
            memory[name].append(model.measured(plan))
        timings = timings_in_turn(models, plan)
        return {
            name: ModelTimes(
                timings=timings[name], load_seconds=one.load_seconds, memory=memory[name], described=one.described
            )
            for name, one in models.items()
        }
