"""The reload check, run in a new process: ``python -m mlflow_compress.compression.reload_check FOLDER [FOLDER ...]``.

Loads each checkpoint with plain transformers, as a user does, computes its logits on the stored probe, and compares
them with those of the model that was compressed in memory. Writes one line of JSON per folder to the standard output.
Exit code 0: all agree; 1: at least one does not; 2: at least one does not load.
"""

import argparse
import json
import logging
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlflow_compress.compression import probe
from mlflow_compress.errors import MlflowCompressError
from mlflow_compress.models import architectures
from mlflow_compress.models.architectures import packed_layers
from mlflow_compress.models.model_files import weights_errors
from mlflow_compress.models.placement import BALANCED, Offload


def check_reload(
    folder: Path, *, device: str, trust_remote_code: bool, offload: Offload | None = None
) -> probe.ReloadReport:
    """Load a checkpoint in float32, and compare its logits with the stored ones."""
    stored, logits, rounded = probe.read_probe(folder)
    if offload is None:
        model = load_checkpoint(folder, device=device, trust_remote_code=trust_remote_code)
    else:
        from mlflow_compress.models.loading import LoadConfig, load_model  # imports torch

        model = load_model(
            LoadConfig(
                path=str(folder),
                device=BALANCED,
                max_memory=offload.max_memory,
                offload_dir=offload.folder,
                trust_remote_code=trust_remote_code,
            )
        ).model
    return probe.compare_logits(logits, stored.logits(model), rounded=rounded)


def load_checkpoint(folder: Path, *, device: str, trust_remote_code: bool) -> Any:
    """Load a checkpoint of any format in float32 with plain transformers, for evaluation."""
    import torch
    from transformers import AutoModelForCausalLM

    placed = {} if device == "cpu" else {"device_map": {"": device}}
    options = architectures.loading_options(folder, trust_remote_code=trust_remote_code)
    with weights_errors(folder, trust_remote_code=trust_remote_code):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            **options,
            **placed,
        )
    architectures.require_complete(info, folder)
    model.eval()
    packed_layers.decompress(model)
    packed_layers.check_decompressed(model, folder)
    # transformers leaves a renamed parameter of a quantized checkpoint (GPT-NeoX's head) in its stored dtype, and the
    # model then fails with mixed dtypes. The conversion to float32 changes no number.
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    packed_layers.expand(model)
    return model


def main(arguments: list[str] | None = None) -> int:
    """Run the check from the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Compare a checkpoint with the logits stored when it was made.")
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 keeps torch's default")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--offload", type=lambda text: Offload(**json.loads(text)), help="JSON of an `Offload`")
    options = parser.parse_args(arguments)
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return max([_check_and_report(folder, options) for folder in options.folders])


def _check_and_report(folder: Path, options: argparse.Namespace) -> int:
    from safetensors import SafetensorError

    try:
        report = check_reload(
            folder, device=options.device, trust_remote_code=options.trust_remote_code, offload=options.offload
        )
    except (MlflowCompressError, SafetensorError, OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        sys.stdout.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        return 2
    sys.stdout.write(json.dumps({"agrees": report.agrees, **asdict(report)}) + "\n")
    return 0 if report.agrees else 1


if __name__ == "__main__":
    sys.exit(main())
