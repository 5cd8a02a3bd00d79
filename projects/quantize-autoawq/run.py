"""AutoAWQ 0.2.9 in an environment of its own, for those who must reproduce its checkpoints.

Writes a folder that ``method=checkpoint`` evaluates in the main environment (with the extra ``gptqmodel``).
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from awq import AutoAWQForCausalLM
from awq.quantize.quantizer import AwqQuantizer

from mlflow_compress.tracking.tracked_run import TrackedRun
from projects import archived_toolchain as toolchain

METHOD = "autoawq"


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


def quantize(options: argparse.Namespace, run: TrackedRun) -> Path:
    """Quantize to 4 bits with AutoAWQ, save, and log settings and cost."""
    out = toolchain.new_folder(options, f"{METHOD}-4bit-g{options.group_size}")
    folder = toolchain.read_base(options.model, options.group_size)
    tokenizer, tokens = toolchain.calibrate(options, folder)
    dtype = toolchain.read_dtype(folder)
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
    toolchain.copy_tokenizer(folder, out)
    seconds = time.perf_counter() - start
    toolchain.log(run, out, seconds, {"model": options.model, "method": METHOD, **settings, **tokens.describe()})
    return out


def main() -> int:
    """Run the project."""
    return toolchain.run_project(METHOD, toolchain.parser(__doc__).parse_args(), quantize)


if __name__ == "__main__":
    raise SystemExit(main())
