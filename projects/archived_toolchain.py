"""What the projects that run an archived toolchain share: reading the base, calibration, log, and one-line errors.

Imported by their `run.py`, each in an environment of its own; a toolchain itself is imported only there.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerFast

from mlflow_compress.commands.shared.named_models import model_label, model_path
from mlflow_compress.compression import calibration_tokens
from mlflow_compress.errors import ConfigError, MlflowCompressError, UnsupportedError
from mlflow_compress.home import out_folder
from mlflow_compress.items.sources.calibration_sets import load_calibration
from mlflow_compress.models.source_model import local_model_folder
from mlflow_compress.models.stored_weights import read_headers, total_bytes
from mlflow_compress.tracking import run_names
from mlflow_compress.tracking.tracked_run import TrackedRun
from mlflow_compress.tracking.tracker import Tracker

TEXTS = ("model", "calibration", "data_dir", "out")
NUMBERS = ("calibration_samples", "calibration_length", "group_size", "seed")
"""Parameters that every such project has."""


def read_base(model: str, group_size: int) -> Path:
    """Return the base's folder, or refuse what an old transformers would read wrongly."""
    folder = local_model_folder(model_path(model))
    if "auto_map" in json.loads((folder / "config.json").read_text()):
        raise UnsupportedError("The model brings code of its own, which this toolchain would run unasked", got=model)
    config = AutoConfig.from_pretrained(folder)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default" or rope.get("rope_theta", config.rope_theta) != config.rope_theta:
        raise UnsupportedError("This old transformers does not read the rotary settings of config.json", got=str(rope))
    for size in (config.hidden_size, config.intermediate_size):
        if size % group_size:
            raise UnsupportedError(f"group_size {group_size} does not divide the model's {size} features")
    return folder


def read_dtype(folder: Path) -> torch.dtype:
    """Return the type that the base's weights are stored in."""
    stored = json.loads((folder / "config.json").read_text())
    dtype = getattr(torch, stored.get("dtype") or stored.get("torch_dtype") or "float32")
    assert isinstance(dtype, torch.dtype)
    return dtype


def calibrate(options: argparse.Namespace, folder: Path) -> tuple[Any, calibration_tokens.Calibration]:
    """Return the tokenizer and the calibration tokens, those of the quantize stage with the same parameters."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens={})  # transformers 5 writes a list
    texts = load_calibration(options.calibration, model=options.model, data_dir=options.data_dir).rendered(tokenizer)
    return tokenizer, calibration_tokens.prepare_calibration(
        tokenizer, texts, samples=options.calibration_samples, length=options.calibration_length, seed=options.seed
    )


def new_folder(options: argparse.Namespace, label: str) -> Path:
    """Return where the checkpoint goes; a folder that exists is a `ConfigError`."""
    out = Path(options.out) / f"{model_label(options.model)}-{label}"
    if out.exists():
        raise ConfigError("The output folder exists", got=str(out), fix="Remove it, or give another -P out=...")
    return out


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copy the tokenizer's files as they came."""
    for path in [*folder.glob("*token*"), *folder.glob("chat_template*")]:
        (out / path.name).write_bytes(path.read_bytes())


def log(run: TrackedRun, out: Path, seconds: float, params: dict[str, Any]) -> None:
    """Log settings, cost and where the checkpoint is."""
    run.log_params(params)
    run.log_values({"speed/compress_seconds": round(seconds, 2), "size/bytes": total_bytes(read_headers(out))})
    run.set_tags({run_names.CHECKPOINT: str(out), run_names.METHOD: params["method"]})


def parser(description: str, *, texts: Sequence[str] = (), numbers: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of the parameters that every such project has, and of a project's own."""
    found = argparse.ArgumentParser(description=description)
    for name in (*TEXTS, *texts):
        found.add_argument(f"--{name}", required=True)
    for name in (*NUMBERS, *numbers):
        found.add_argument(f"--{name}", required=True, type=int)
    return found


def run_project(
    method: str,
    options: argparse.Namespace,
    quantize: Callable[[argparse.Namespace, TrackedRun], Path],
    check: Callable[[argparse.Namespace], None] = lambda options: None,
) -> int:
    """Check, then quantize in a run; return the exit code. An error that is the user's to read is one line."""
    try:
        check(options)
        tracker, label = Tracker(), model_label(options.model)
        options.out = str(out_folder(options.out, tracker.uri))
        with tracker.run(f"quantize {method} {label}", "quantize", {run_names.BASE_MODEL: label}) as run:
            out = quantize(options, run)
    except MlflowCompressError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    sys.stdout.write(
        f"Checkpoint: {out}\nEvaluate it: -P method=checkpoint -P checkpoint={out} -P model={options.model}\n"
    )
    return 0
