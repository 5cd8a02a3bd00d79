"""The table of methods, for the terminal and for the documentation; generated from the registry."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any

from mlflow_compress.compression.method import METHODS, Method

COLUMNS = ("method", "bits", "needs", "extra", "format", "runs in", "what it does")
_MORE = 3.0  # times the KL that the dtype alone explains: more is a finding
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


def vllm_as_markdown() -> str:
    """Return the table of what vLLM does with each checkpoint, for the documentation."""
    head = ("method", "bits", "KL(transformers, vLLM)", "KL by bfloat16 alone", "mean difference", "vLLM says")
    lines = [head, ("---",) * len(head)]
    for line in measured_in_vllm():
        bits = "" if line["bits"] is None else str(line["bits"])
        if "not_run" in line:
            said = ("", "", "", "not run: a package is not installed")
        elif "vllm_kl" in line:
            more = line["vllm_kl"] > _MORE * line["transformers_kl"]
            remark = "loads; more than bfloat16 explains" if more else "loads"
            said = (_nats(line["vllm_kl"]), _nats(line["transformers_kl"]), _nats(line["vllm_difference"]), remark)
        else:
            said = (
                "",
                _nats(line["transformers_kl"]),
                "",
                html.escape(line["refused"], quote=False).replace("|", "\\|"),
            )
        lines.append((f"`{line['method']}`", bits, *said))
    versions = measured_in_vllm()[0]["versions"]
    where = ", ".join(f"{name} {version}" for name, version in versions.items())
    n_tokens = next(line["tokens"] for line in measured_in_vllm() if "tokens" in line)
    unit = "KL and the mean difference of a token's log-probability in nats"
    processor = ", ".join(sorted({line.get("processor", "processor not recorded") for line in measured_in_vllm()}))
    return f"{_table(lines)}\n\n{unit}, {n_tokens:,} tokens. {where}, {processor}."


def _nats(value: float) -> str:
    return f"{value:.2g}"


def _table(lines: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def methods_markdown() -> str:
    """Return the table for the documentation, which `tools/write_methods_table.py` writes."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *((f"`{name}`", *rest) for name, *rest in rows())]
    return _table(lines)
