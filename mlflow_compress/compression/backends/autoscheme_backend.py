"""Asks AutoRound's AutoScheme for the bits of every layer, in a process of its own: ``python -m ... < question.json``.

AutoScheme scores a layer by the gradient of the model's loss times the rounding error, and solves a knapsack. Only its
choice is taken: the layers are then quantized by the methods of the search, so that the choices alone are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlflow_compress.errors import UnsupportedError

PACKAGE = "auto_round"


@dataclass(frozen=True, kw_only=True)
class IntegerFormat:
    """A format as AutoScheme knows it."""

    bits: int  # Bits per weight
    group_size: int  # Neighbouring weights that share a scale; -1: one scale per row
    sym: bool  # Whether the grid is around zero


def ask_autoscheme(
    model: str,
    texts: Sequence[str],
    formats: Sequence[IntegerFormat],
    groups: Sequence[Sequence[str]],
    bits: Sequence[float],
    *,
    length: int,
    trust_remote_code: bool = False,
) -> list[dict[str, int]]:
    """Return the bits of every layer, for each average number of bits.

    `texts` are what the loss is computed on, each of at least `length` tokens; layers of one of the `groups` get the
    same format; `bits` are averages to keep to, without scales and zero points.
    """
    question = {
        "model": model,
        "texts": list(texts),
        "formats": [asdict(one) for one in formats],
        "groups": [list(group) for group in groups],
        "bits": list(bits),
        "length": length,
        "trust_remote_code": trust_remote_code,
    }
    with tempfile.TemporaryDirectory() as scratch:  # its cache names models by the last part of their path
        caches = {"AR_AUTO_SCHEME_CACHE": scratch, "HF_DATASETS_CACHE": scratch, "HF_HUB_OFFLINE": "1"}
        package_root = str(Path(__file__).parents[3])
        path = os.pathsep.join(part for part in (package_root, os.environ.get("PYTHONPATH")) if part)
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            check=False,
            cwd=scratch,
            env={**os.environ, **caches, "PYTHONPATH": path},
        )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UnsupportedError(f"AutoScheme cannot choose formats for this model: {reason}")
    answer: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _answer(question: Mapping[str, Any]) -> list[dict[str, int]]:
    from auto_round.auto_scheme.gen_auto_scheme import AutoScheme, GenScheme
    from auto_round.schemes import QuantizationScheme

    from mlflow_compress.models.source_model import resolve

    source = resolve(question["model"], trust_remote_code=question["trust_remote_code"])
    data = Path("texts.json").resolve()
    data.write_text(json.dumps([{"text": text} for text in question["texts"]]))
    request = AutoScheme(
        avg_bits=question["bits"],
        options=[QuantizationScheme(data_type="int", act_bits=16, **one) for one in question["formats"]],
        shared_layers=question["groups"],
        ignore_scale_zp_bits=True,
        nsamples=len(question["texts"]),
        seqlen=question["length"],
        batch_size=1,
        dataset=str(data),
        enable_torch_compile=False,
        low_gpu_mem_usage=False,
        low_cpu_mem_usage=False,
    )
    model = source.load("cpu")
    scheme = GenScheme(
        request, model, list(source.linear), {}, str(data), "cpu", source.tokenizer(), enable_torch_compile=False
    )
    chosen_formats = scheme.get_layer_config()
    return [{layer: int(chosen["bits"]) for layer, chosen in chosen_formats[bits].items()} for bits in chosen_formats]


if __name__ == "__main__":
    import contextlib

    with contextlib.redirect_stdout(sys.stderr):
        answered = _answer(json.load(sys.stdin))
    sys.stdout.write(json.dumps(answered) + "\n")
