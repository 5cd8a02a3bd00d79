"""AutoGPTQ 0.7.1 in an environment of its own, on CUDA machines, for those who must reproduce its checkpoints.

Writes a folder that ``method=checkpoint`` evaluates in the main environment (with the extra ``gptqmodel``).
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.tracking.tracked_run import TrackedRun
from projects import archived_toolchain as toolchain

METHOD = "autogptq"
BITS = (2, 3, 4, 8)
DEVICE = torch.device("cuda:0")


def check(options: argparse.Namespace) -> None:
    """Refuse, before anything is read, a machine without CUDA and settings that AutoGPTQ does not have."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "AutoGPTQ quantizes on CUDA devices only, and torch finds none on this machine",
            fix="Run this project on a CUDA machine, or quantize in the main environment: -P method=gptq, "
            "with -P method_args=backend=gptqmodel for AutoGPTQ's format",
        )
    if options.bits not in BITS:
        raise ConfigError("AutoGPTQ has no such bits", allowed=[str(bits) for bits in BITS], got=options.bits)
    if options.group_size < 1 and options.group_size != -1:
        raise ConfigError("Not a group size", allowed="-1 (one scale a row), or 1 and above", got=options.group_size)
    if options.desc_act not in ("true", "false"):
        raise ConfigError("Parameter 'desc_act' is no truth value", allowed="true, false", got=options.desc_act)
    if not 0 < options.damp_percent < 1:
        raise ConfigError("damp_percent is a share", allowed="above 0, below 1", got=options.damp_percent)


def quantize(options: argparse.Namespace, run: TrackedRun) -> Path:
    """Quantize with AutoGPTQ, save, and log settings and cost."""
    from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig
    from auto_gptq.modeling._const import SUPPORTED_MODELS
    from transformers import AutoConfig

    desc_act = options.desc_act == "true"
    scope = f"-g{options.group_size}" if options.group_size > 0 else ""
    out = toolchain.new_folder(options, f"{METHOD}-{options.bits}bit{scope}{'-desc-act' if desc_act else ''}")
    folder = toolchain.read_base(options.model, options.group_size)
    architecture = AutoConfig.from_pretrained(folder).model_type
    if architecture not in SUPPORTED_MODELS:
        raise UnsupportedError("AutoGPTQ does not know this architecture", got=architecture, allowed=SUPPORTED_MODELS)
    _, tokens = toolchain.calibrate(options, folder)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in torch.from_numpy(tokens.ids)]
    settings = {
        "bits": options.bits,
        "group_size": options.group_size,
        "desc_act": desc_act,
        "damp_percent": options.damp_percent,
        "model_file_base_name": "model",  # the name under which transformers looks for the weights
    }
    start = time.perf_counter()
    # AutoGPTQ packs what the model's type has rounded: of bfloat16, 8 bits are hardly better than 4
    wrapped = AutoGPTQForCausalLM.from_pretrained(
        str(folder), BaseQuantizeConfig(**settings), torch_dtype=torch.float32, use_safetensors=True
    )
    wrapped.model.to(DEVICE)  # whole: layer by layer, AutoGPTQ forgets the rotary embedding of a newer transformers
    try:
        wrapped.quantize(rows)
    except torch.linalg.LinAlgError as error:
        raise UnsupportedError(
            f"GPTQ's Hessian cannot be inverted: {error}",
            got=f"damp_percent={options.damp_percent}",
            fix="Raise damp_percent or give more calibration samples",
        ) from error
    wrapped.save_quantized(str(out), use_safetensors=True)
    toolchain.copy_tokenizer(folder, out)
    seconds = time.perf_counter() - start
    toolchain.log(run, out, seconds, {"model": options.model, "method": METHOD, **settings, **tokens.describe()})
    return out


def main() -> int:
    """Run the project."""
    parser = toolchain.parser(__doc__, texts=["desc_act"], numbers=["bits"])
    parser.add_argument("--damp_percent", required=True, type=float)
    return toolchain.run_project(METHOD, parser.parse_args(), quantize, check)


if __name__ == "__main__":
    raise SystemExit(main())
