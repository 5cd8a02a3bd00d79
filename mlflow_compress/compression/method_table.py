"""The table of methods, from the registry, and what vLLM does with each: for the terminal and the documentation."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from mlflow_compress.compression.method import METHODS, Method

COLUMNS = ("method", "bits", "needs", "extra", "format", "runs in", "what it does")
_UNKNOWN = "Unknown quantization method"  # in vLLM's own reason


def rows() -> list[tuple[str, ...]]:
    """Return one row per method with the columns of `COLUMNS`, sorted by name."""
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
