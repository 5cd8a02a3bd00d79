"""Client of the worker process in which vLLM holds one model."""

import contextlib
import json
import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mlflow_compress.config import EngineConfig
from mlflow_compress.engines.vllm_environment import described_environment, find_python, for_worker
from mlflow_compress.errors import ConfigError, MissingDependencyError, UnsupportedError, WorkerError
from mlflow_compress.models.memory_alignment import rounding_identity
from mlflow_compress.scoring.baseline_store import from_bytes
from mlflow_compress.transport.json_process import JsonProcess

VLLM_WORKER = Path(__file__).with_name("vllm_worker.py")
_LONGEST = 600  # characters of vLLM's reason in an error
_NO_TORCHVISION = "operator torchvision::nms does not exist"


class VllmProcess(JsonProcess):
    """A model in vLLM, in a process of its own. Nothing of vLLM's is left when it ends.

    A model that vLLM does not load is an `UnsupportedError` with vLLM's reason.
    """

    def __init__(self, python: str, arguments: Mapping[str, Any]) -> None:
        # Ctrl-C in a terminal is for this process, which then ends that one.
        super().__init__([python, str(VLLM_WORKER)], env=for_worker(torch.get_num_threads()), start_new_session=True)
        self._lock = Lock()
        try:
            self._ask(arguments)
        except WorkerError as error:
            if _NO_TORCHVISION in error.args[0]:
                raise MissingDependencyError(
                    f"The environment of vLLM does not work: {_NO_TORCHVISION}",
                    got=python,
                    fix="Its torchvision is built for CUDA, and its torch for CPUs. Run: "
                    f"{shlex.quote(python)} -m pip uninstall -y torchvision torchaudio torchcodec",
                ) from None
            raise UnsupportedError(
                f"vLLM cannot load this checkpoint: {error.args[0]}", got=str(arguments["model"])
            ) from None

    def states(self, sequences: Sequence[npt.NDArray[Any]], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the inputs of the head at the rows of each sequence, in order, shape (k, hidden_size)."""
        question = {"do": "states", "sequences": [ids.tolist() for ids in sequences], "rows": [list(r) for r in rows]}
        said, raw = self._ask(question)
        return from_bytes(np.frombuffer(raw, np.uint8), said["dtype"], tuple(said["shape"]))

    def logprobs(self, sequences: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[np.float64]]:
        """Return vLLM's own log-probability of every token of each sequence but the first."""
        said, _ = self._ask({"do": "logprobs", "sequences": [ids.tolist() for ids in sequences]})
        return [np.asarray(values, dtype=np.float64) for values in said["logprobs"]]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        most: Sequence[int],
        draws: Sequence[dict[str, Any] | None],
        ends: Sequence[int],
    ) -> list[list[int]]:
        """Return the tokens that follow each prompt, up to and with an end token.

        A draw is a prompt's `temperature`, `top_k`, `top_p` and the random numbers `u`, one per token; None is greedy.
        """
        question = {"do": "generate", "prompts": [list(p) for p in prompts], "most": list(most), "draws": list(draws)}
        said, _ = self._ask({**question, "ends": list(ends)})
        return [list(tokens) for tokens in said["tokens"]]

    def forget(self) -> None:
        self._ask({"do": "forget"})

    def kill(self) -> None:
        """End the process, whatever it is doing, and those that vLLM has started for tensor parallelism."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads a group of its own, see `start_new_session`
        self.end()

    def _ask(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        with self._lock:
            said, raw = self.ask(question)
        if "error" in said:
            raise WorkerError(shorten(said["error"], _LONGEST, placeholder=" ..."), fix=_cure(said["error"]))
        return said, raw


def _cure(reason: str) -> str | None:
    """Return what helps where vLLM's build lacks a kernel on this machine; None for any other reason."""
    if "'_OpNamespace' '_C' object has no attribute" not in reason:
        return None
    here = rounding_identity(torch.device("cpu"))
    return (
        "vLLM's build has no such kernel for this machine: on a CPU those of 4-bit weights need AVX-512, and this is "
        f"{here['processor']} with {here['instructions']}. Use another machine, or engine=local"
    )


_OURS = (
    "model",
    "dtype",
    "max_model_len",
    "enforce_eager",
    "enable_prefix_caching",
    "trust_remote_code",
    "worker_extension_cls",
    "logits_processors",
)
"""Arguments of `vllm.LLM` that this package sets."""


class VllmEngine:
    """Starts vLLM for a model; the process of the model before it is ended, because memory may not hold two.

    `settings` are further arguments of `vllm.LLM`, as a user types them; `described` is what decides its numbers
    besides the model.
    """

    def __init__(self, python: str, settings: Mapping[str, str]) -> None:
        if taken := sorted(settings.keys() & set(_OURS)):
            raise ConfigError(
                "Parameter 'vllm_args' sets what engine=vllm sets itself",
                got=", ".join(taken),
                fix="Leave them out; dtype and trust_remote_code are parameters of the command",
            )
        self._python = python
        self._settings = {name: _typed(value) for name, value in settings.items()}
        self._process: VllmProcess | None = None
        self._arguments: dict[str, Any] = {}
        self.described = {**described_environment(python), "arguments": json.dumps(self._settings, sort_keys=True)}

    def process(self, model: str, *, dtype: str, max_length: int, trust_remote_code: bool) -> tuple[VllmProcess, bool]:
        """Return the process that holds a model, and whether it was started now."""
        arguments = {
            **self._settings,
            "model": model,
            "dtype": dtype,
            "max_model_len": max_length + 1,
            "enforce_eager": True,  # the hook on the model is not part of a compiled graph
            "enable_prefix_caching": True,
            "trust_remote_code": trust_remote_code,
        }
        if self._process is not None and arguments == self._arguments:
            return self._process, False
        self.release()
        self._process, self._arguments = VllmProcess(self._python, arguments), arguments
        return self._process, True

    def release(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._process = None


@contextmanager
def started_engine(settings: EngineConfig, outer: VllmEngine | None = None) -> Iterator[VllmEngine]:
    """Yield the vLLM of the outer block, or a new one. When any block ends, no process of vLLM is left.

    Compression may need the memory.
    """
    engine = outer or VllmEngine(find_python(settings.vllm_python), settings.vllm_args)
    try:
        yield engine
    finally:
        engine.release()


def _typed(value: str) -> Any:
    """Return what a user has typed as the number, truth value or text that it is."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
