"""Who can serve a checkpoint, said before anything is compressed; for vLLM by format, bits, group sizes and shapes.

Also the table of methods, and what vLLM has done with each.

From the source of vLLM 0.32.0: `quantization/__init__.py` for formats; for packed weights `mixed_precision/cpu.py` on
CPUs, and Marlin (`marlin_utils.py`) on CUDA. benchmarks/vllm_formats.py loads every format in the CPU build.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import files
from typing import Any, get_args

from mlflow_compress.compression.method import METHODS, Method, MethodConfig
from mlflow_compress.config.declarations import Target
from mlflow_compress.errors import UnsupportedError
from mlflow_compress.models.checkpoint_config import QUANTIZED_CACHE
from mlflow_compress.models.source_model import SourceModel

_FP8_CACHE = "compressed-tensors (dense, kv_cache_scheme)"
_PACKED = "compressed-tensors (pack-quantized)"
# Its loader has a scheme for these; kernels are on GPUs alone (benchmarks/vllm_formats.py).
_NOT_ON_CPUS = tuple(
    f"compressed-tensors ({name})" for name in ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized")
)
FORMATS = (
    _PACKED,
    "compressed-tensors (float-quantized)",
    "compressed-tensors (int-quantized)",
    *_NOT_ON_CPUS,
    _FP8_CACHE,
    "safetensors",
    "safetensors (dense)",
)
_MARLIN_GROUPS = (32, 64, 128)


def served_by(method: Method[Any], settings: MethodConfig, source: SourceModel) -> list[str] | None:
    """Return the targets that take a checkpoint; none: only this package reads it. None where nobody knows."""
    if not method.runs_in and not method.own_format:
        return None
    targets = []
    for target in (target for target in get_args(Target) if target != "any"):
        with suppress(UnsupportedError):
            check_target(target, method, settings, source)
            targets.append(target)
    return targets


def check_target(target: str, method: Method[Any], settings: MethodConfig, source: SourceModel | None = None) -> None:
    """Refuse a checkpoint that the target could not serve. Without `source`, nothing is said of the layers' shapes.

    `target` is "vllm" (its CUDA build or its CPU build), "vllm-cpu" (that build), "llama.cpp" (where its own converter
    takes the checkpoint, or it is a GGUF file), "transformers" (without this package), or "any", which accepts
    everything.
    """
    if target == "any":
        return
    label, written = method.label(settings), method.format_of(settings)
    fix = "Choose another method, other bits or another group_size, or leave target=any"
    if target in ("llama.cpp", "transformers"):
        engines = [engine for engine in method.runs_in if engine.startswith("llama.cpp")]
        gguf_alone = any("gguf" in engine for engine in engines) and not written.startswith("gguf")
        own = method.own_format or QUANTIZED_CACHE in written
        if own or (target == "llama.cpp" and (not engines or gguf_alone)):
            raise UnsupportedError(f"{target} does not read the format of {label}", got=written, fix=fix)
        if target == "transformers" and source is not None and _needs_our_loader(method, settings, source):
            raise UnsupportedError(
                f"transformers alone cannot load the experts of {source.architecture} in the format of {label}",
                got=written,
                fix=fix,
            )
        return
    if written not in FORMATS:
        raise UnsupportedError(f"vLLM does not read the format of {label}", allowed=FORMATS, got=written, fix=fix)
    if target == "vllm-cpu" and (written in _NOT_ON_CPUS or _rounds_to_fp8(method.name, settings)):
        raise UnsupportedError(f"vLLM's CPU build has no kernel for {label}", got=written, fix=fix)
    if target == "vllm-cpu" and written == _FP8_CACHE:
        raise UnsupportedError(f"vLLM's CPU build was not tried with {label}", got=written, fix=fix)
    if written != _PACKED:
        return
    for bits, group, layers in method.packed(settings, {} if source is None else source.linear):
        reasons = [_reason_of_cpu(bits, group, layers)]
        if target == "vllm":
            reasons.append(_reason_of_marlin(bits, group, layers))
        if all(reasons):
            raise UnsupportedError(f"vLLM has no kernel for {label}: {'; '.join(map(str, reasons))}", fix=fix)


def _needs_our_loader(method: Method[Any], settings: Any, source: SourceModel) -> bool:
    """Return whether transformers fails at a mixture's experts, or computes them otherwise (`linear_experts`)."""
    if not (source.experts and method.takes_experts(settings)):
        return False
    renamed, written = source.architecture == "MixtralForCausalLM", method.format_of(settings)
    if written.startswith("compressed-tensors"):
        return renamed or written != _PACKED or not getattr(settings, "symmetric", False)
    return renamed and written.startswith("gguf")


def _rounds_to_fp8(method: str, settings: Any) -> bool:
    """Return whether the inputs of packed integer weights are rounded to 8-bit floats."""
    if formats := getattr(settings, "formats", None):  # of `mixed`
        return any(_rounds_to_fp8(one.method, one.config) for one in formats.values())
    return getattr(settings, "scheme", method) == "w4afp8" and getattr(settings, "activations", True)


def _reason_of_cpu(bits: int, group: int | str, layers: Mapping[str, tuple[int, int]]) -> str | None:
    """Return why the CPU build's kernel does not take these layers; None where it does."""
    if bits != 4:
        return f"on a CPU it takes 4 bits, not {bits}"
    if isinstance(group, int) and group % 2:
        return f"on a CPU it takes even group sizes, not {group}"
    return _shapes("on a CPU", layers, 32, 32)


def _reason_of_marlin(bits: int, group: int | str, layers: Mapping[str, tuple[int, int]]) -> str | None:
    """Return why Marlin does not take these layers; None where it does."""
    if bits not in (4, 8):
        return f"on CUDA it takes 4 and 8 bits, not {bits}"
    if isinstance(group, int) and group not in _MARLIN_GROUPS:
        return f"on CUDA it takes group sizes {_MARLIN_GROUPS} and 'channel', not {group}"
    return _shapes("on CUDA", layers, 64, 128)


def _shapes(where: str, layers: Mapping[str, tuple[int, int]], of_outputs: int, of_inputs: int) -> str | None:
    for name, (n_outputs, n_inputs) in layers.items():
        if n_outputs % of_outputs or n_inputs % of_inputs:
            return (
                f"{where} it takes multiples of {of_outputs} outputs and {of_inputs} inputs, "
                f"and {name} has {n_outputs} and {n_inputs}"
            )
    return None


METHOD_COLUMNS = ("method", "bits", "needs", "extra", "format", "runs in", "what it does")
_UNKNOWN = "Unknown quantization method"  # in vLLM's own reason


def method_rows() -> list[tuple[str, ...]]:
    """Return one row per method with the columns of `METHOD_COLUMNS`, sorted by name."""
    return [
        (
            method.name,
            ", ".join(map(str, method.supported_bits)),
            "calibration" if method.needs_calibration else "",
            method.extra or "",
            method.format,
            ", ".join(_engines(method)),
            method.description,
        )
        for _, method in METHODS.items()
    ]


def measured_in_vllm() -> list[dict[str, Any]]:
    """Return what vLLM has done with every method's checkpoint: the records of benchmarks/vllm_formats.py."""
    text = (files("mlflow_compress.compression") / "vllm_formats.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _engines(method: Method[Any]) -> list[str]:
    """Return the engines that run the checkpoints: vLLM where it was seen to, others by their documentation."""
    lines = [line for line in measured_in_vllm() if line["method"] == method.name and "not_run" not in line]
    taken = [line["bits"] for line in lines if "vllm_kl" in line]
    engines = []
    if taken:
        some = len(taken) < len(lines)
        engines.append(f"vLLM ({' and '.join(map(str, taken))} bit)" if some else "vLLM")
    elif lines and all(_UNKNOWN in line["refused"] for line in lines):
        pass  # its list of formats is one for all devices
    elif any(engine.startswith("vLLM") for engine in method.runs_in):
        engines.append("vLLM on CUDA (not run)" if lines else "vLLM (not run)")
    return engines + [engine for engine in method.runs_in if not engine.startswith("vLLM")]
