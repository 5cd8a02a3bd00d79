"""The vLLM of a command: its environment, its settings, and the one model that it holds at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlflow_compress.config import EngineConfig
from mlflow_compress.errors import ConfigError
from mlflow_compress.scoring.vllm.vllm_environment import described, find_python
from mlflow_compress.scoring.vllm.vllm_process import VllmProcess

OURS = (
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

_open: VllmEngine | None = None


class VllmEngine:
    """Starts vLLM for a model; the process of the model before it is ended, because memory may not hold two.

    Parameters
    ----------
    python : str
        Python of vLLM's environment.
    settings : mapping of str to str
        Further arguments of `vllm.LLM`, as a user types them.

    Attributes
    ----------
    described : dict of str to str
        What decides its numbers, besides the model: versions, device and settings.
    """

    def __init__(self, python: str, settings: Mapping[str, str]) -> None:
        if taken := sorted(settings.keys() & set(OURS)):
            raise ConfigError(
                "Parameter 'vllm_args' sets what engine=vllm sets itself",
                got=", ".join(taken),
                fix="Leave them out; dtype and trust_remote_code are parameters of the command",
            )
        self._python = python
        self._settings = {name: _typed(value) for name, value in settings.items()}
        self._process: VllmProcess | None = None
        self._arguments: dict[str, Any] = {}
        self.described = {**described(python), "arguments": json.dumps(self._settings, sort_keys=True)}

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
        """End the process, and free its memory."""
        if self._process is not None:
            self._process.end()
        self._process = None


@contextmanager
def started(settings: EngineConfig) -> Iterator[VllmEngine]:
    """Yield the vLLM of a command. Within a block of an outer call, yield that of the outer one.

    Whichever block ends, no process of vLLM is left: compression may need the memory.

    Raises
    ------
    MissingDependencyError
        There is no environment with vLLM.
    ConfigError
        A setting of vLLM is not the user's to set.
    """
    global _open
    outer = _open
    engine = outer if outer is not None else VllmEngine(find_python(settings.vllm_python), settings.vllm_args)
    _open = engine
    try:
        yield engine
    finally:
        engine.release()
        _open = outer


def current() -> VllmEngine:
    """Return the vLLM of the innermost block of `started`."""
    assert _open is not None, "engine=vllm is used outside of `started`"
    return _open


def _typed(value: str) -> Any:
    """Return what a user has typed as the number, truth value or text that it is."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
