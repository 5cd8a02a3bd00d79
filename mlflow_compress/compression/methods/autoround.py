"""AutoRound: learns by signed gradients which weights to round up or down, and how far each group's range reaches."""

import contextlib
import functools
import random
from collections.abc import Iterator

import numpy as np
from pydantic import Field

from mlflow_compress.compression.backends import llmcompressor_backend as backend
from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, GroupSize, Logits, Method, register
from mlflow_compress.replaced import replaced


class _AutoRoundConfig(CalibratedConfig):
    """Settings of `autoround`."""

    bits: int = 4  # Bits per weight
    group_size: GroupSize = 128
    iters: int = Field(200, ge=1)
    """Steps of the optimizer per decoder layer; the paper's number. The time grows in proportion."""
    batch_size: int = Field(8, ge=1)  # Calibration sequences in a step


@register
class AutoRound(Method[_AutoRoundConfig]):
    """Weight-only quantization whose rounding is learned, decoder layer by decoder layer, on a grid around zero."""

    name = "autoround"
    description = "AutoRound, weight only: learns the rounding of each layer by signed gradients"
    reference = "Cheng et al. 2024, https://arxiv.org/abs/2309.05516 (llm-compressor AutoRoundModifier, auto-round)"
    format = "compressed-tensors (pack-quantized)"
    experts = True
    Config = _AutoRoundConfig
    runs_in = ("vLLM (8 and 4 bit)",)
    supported_bits = (8, 4, 3, 2)
    by_class = True
    needs_calibration = True
    requires = ("llmcompressor", "auto_round")

    def compress(self, job: CompressionJob[_AutoRoundConfig]) -> Logits:
        def recipe() -> list[object]:
            from llmcompressor.modifiers.autoround import AutoRoundModifier

            config = job.config
            scheme = backend.weight_scheme(
                config.bits, group_size=config.group_size, symmetric=True, targets=["Linear"]
            )
            return [
                AutoRoundModifier(
                    config_groups={"group_0": scheme},
                    ignore=job.source.ignored,
                    iters=config.iters,
                    batch_size=config.batch_size,
                    enable_torch_compile=False,
                )
            ]

        with _in_float32(job.config.seed):
            return backend.run_oneshot(job, recipe)


@contextlib.contextmanager
def _in_float32(seed: int) -> Iterator[None]:
    """Within this block, the modifier computes in float32 with this seed, and what it sets globally is set back.

    It would convert each layer to bfloat16 on a CPU, which rounds the weights before they are quantized.
    """
    import torch

    backend.load_for_llmcompressor()
    from llmcompressor.modifiers.autoround import base

    numbers, states = random.getstate(), np.random.get_state()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with replaced(
            base, "AutoRound", functools.partial(base.AutoRound, amp=False, seed=seed), of="llmcompressor 0.14"
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        random.setstate(numbers)
        np.random.set_state(states)
