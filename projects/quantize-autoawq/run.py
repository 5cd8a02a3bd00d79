"""AutoAWQ 0.2.9 in an environment of its own, for those who must reproduce its checkpoints.

Writes a folder that ``method=checkpoint`` evaluates in the main environment (with the extra ``gptqmodel``).
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from awq import AutoAWQForCausalLM
from awq.quantize.quantizer import AwqQuantizer
from transformers import AutoConfig, PreTrainedTokenizerFast

from mlflow_compress.compress import calibration
from mlflow_compress.compress.source import local_folder
from mlflow_compress.compress.storage import read_headers, total_bytes
from mlflow_compress.errors import ConfigError, MlflowCompressError, UnsupportedError
from mlflow_compress.stages.variant import model_label, model_path
from mlflow_compress.tasks.calibration import load_calibration
from mlflow_compress.tracking import names
from mlflow_compress.tracking.store import TrackedRun, Tracker


class ClonedBackUp(AwqQuantizer):
    """AutoAWQ with a back-up of the weights that is one.

    Before it tries scales, AutoAWQ keeps the weights with ``tensor.cpu()``. On a CPU that copies nothing: the first
    trial scales the back-up too, and the checkpoint holds weights that are none of the model's.
    """

    def _compute_best_scale(self, x: Any, w_mean: Any, x_mean: Any, module: Any, *rest: Any) -> Any:
        weights = module.state_dict
        module.state_dict = lambda: {name: tensor.clone() for name, tensor in weights().items()}
        try:
            return super()._compute_best_scale(x, w_mean, x_mean, module, *rest)
        finally:
            del module.state_dict


def read_base(model: str, group_size: int) -> Path:
    """Return the base's folder, or refuse what AutoAWQ or its transformers would read wrongly."""
    folder = local_folder(model_path(model))
    config = AutoConfig.from_pretrained(folder)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default" or rope.get("rope_theta", config.rope_theta) != config.rope_theta:
        raise UnsupportedError("transformers 4.51 does not read the rotary settings of this config.json", got=str(rope))
    for size in (config.hidden_size, config.intermediate_size):
        if size % group_size:
            raise UnsupportedError(f"group_size {group_size} does not divide the model's {size} features")
    return folder


def quantize(options: argparse.Namespace, run: TrackedRun) -> Path:
    """Quantize to 4 bits with AutoAWQ, save, and log settings and cost."""
    out = Path(options.out).resolve() / f"{model_label(options.model)}-autoawq-4bit-g{options.group_size}"
    if out.exists():
        raise ConfigError("The output folder exists", got=str(out), fix="Remove it, or give another -P out=...")
    folder = read_base(options.model, options.group_size)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, extra_special_tokens={})  # transformers 5 writes a list
    texts = load_calibration(options.calibration, model=options.model, data_dir=options.data_dir).rendered(tokenizer)
    tokens = calibration.prepare(
        tokenizer, texts, samples=options.calibration_samples, length=options.calibration_length, seed=options.seed
    )
    stored = json.loads((folder / "config.json").read_text())
    dtype = getattr(torch, stored.get("dtype") or stored.get("torch_dtype") or "float32")
    device = {"device_map": "auto"} if torch.cuda.is_available() else {"device_map": None}
    start = time.perf_counter()
    model = AutoAWQForCausalLM.from_pretrained(str(folder), torch_dtype=dtype, safetensors=True, **device)
    settings = {"zero_point": True, "q_group_size": options.group_size, "w_bit": 4, "version": "GEMM"}
    model.quantize(
        tokenizer,
        quant_config=settings,
        calib_data=tokens.ids.tolist(),
        max_calib_samples=options.calibration_samples,
        max_calib_seq_len=options.calibration_length,
        quantizer_cls=ClonedBackUp,
    )
    model.save_quantized(str(out))
    for path in folder.glob("*token*"):  # the tokenizer's files as they came
        (out / path.name).write_bytes(path.read_bytes())
    seconds = time.perf_counter() - start
    run.log_params({"model": options.model, "method": "autoawq", **settings, **tokens.describe()})
    run.log_values({"speed/compress_seconds": round(seconds, 2), "size/bytes": total_bytes(read_headers(out))})
    run.set_tags({names.CHECKPOINT: str(out), names.METHOD: "autoawq"})
    return out


def main() -> int:
    """Run the project; an error that is the user's to read is one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "calibration", "data_dir", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("calibration_samples", "calibration_length", "group_size", "seed"):
        parser.add_argument(f"--{name}", required=True, type=int)
    options = parser.parse_args()
    try:
        label = model_label(options.model)
        with Tracker().run(f"quantize autoawq {label}", "quantize", {names.BASE_MODEL: label}) as run:
            out = quantize(options, run)
    except MlflowCompressError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    sys.stdout.write(
        f"Checkpoint: {out}\nEvaluate it: -P method=checkpoint -P checkpoint={out} -P model={options.model}\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
