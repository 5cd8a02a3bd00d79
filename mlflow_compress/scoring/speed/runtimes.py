"""Which runtime computes with a checkpoint's own format; transformers only simulates some."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from mlflow_compress.models import architectures

TRANSFORMERS, VLLM, LLAMA_CPP = "transformers", "vllm", "llama.cpp"

_OF_VLLM = ("compressed-tensors", "gptq", "awq", "fp8")


@dataclass(frozen=True)
class RuntimeChoice:
    """The runtime that a checkpoint is meant for; None, and the reason, where there is none to be timed in."""

    runtime: str | None
    reason: str = ""


def runtime_of(folder: Path, device: str) -> RuntimeChoice:
    """Return the runtime whose kernels compute with what the checkpoint stores.

    Parameters
    ----------
    folder : Path
        The checkpoint.
    device : str
        "cpu" or "cuda".
    """
    files = architectures.weight_files(folder)
    if files and files[0].suffix == ".gguf":
        if importlib.util.find_spec("llama_cpp") is None:
            return RuntimeChoice(None, "llama.cpp is not installed here (extra llama-cpp)")
        return RuntimeChoice(LLAMA_CPP)
    kind = architectures.quant_method(folder)
    if kind is None:
        return RuntimeChoice(TRANSFORMERS)
    if kind in architectures.OWN_FORMATS:
        return RuntimeChoice(None, f"the format {kind} is only simulated: no kernel computes with it")
    if kind in _OF_VLLM:
        return RuntimeChoice(VLLM)
    if kind == "bitsandbytes" and device == "cpu":
        return RuntimeChoice(None, "bitsandbytes' weights are expanded on a CPU: its kernels run on a GPU")
    if kind in ("torchao", "bitsandbytes"):
        return RuntimeChoice(TRANSFORMERS)
    return RuntimeChoice(None, f"it is not known which runtime computes with the format {kind}")
