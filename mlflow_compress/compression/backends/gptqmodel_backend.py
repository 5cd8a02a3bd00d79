"""Runs gptqmodel: the second backend of `gptq` and `awq`, which writes the formats of AutoGPTQ and AutoAWQ."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import model_validator

from mlflow_compress.compression.layers import ForLayers
from mlflow_compress.compression.method import CalibratedConfig, CompressionJob, GroupSize, Logits, MethodConfig
from mlflow_compress.compression.schemes import SCHEMES
from mlflow_compress.errors import ConfigError, UnsupportedError
from mlflow_compress.models.architectures import packed_layers
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.replaced import replaced

BACKEND_NAME = "gptqmodel"
EXTRA, PACKAGES = packed_layers.GPTQMODEL_EXTRA, packed_layers.GPTQMODEL_PACKAGES
_BATCH = 8
CLIPPED_SAMPLES = 64
"""Number of output features for which AWQ searches the clipping together."""
_WITH_AWQ = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
"""Architectures on which gptqmodel's AWQ is closer to the base than plain rounding (`benchmarks/architectures.py`).

Gemma 2 and OPT are four to six times as far away, and GPT-NeoX gives NaN. Others are not supported, or not tested.
"""
_WITHOUT_GPTQ = ("falcon", "gemma3_text", "phi3")
"""Architectures whose GPTQ checkpoint gptqmodel does not save, or saves without some parameters."""


class TwoBackendConfig(CalibratedConfig):
    """Settings of `gptq` and `awq`."""

    bits: int = 4  # Bits per weight
    group_size: GroupSize = 128
    backend: Literal["llmcompressor", "gptqmodel"] = "llmcompressor"
    """Library that compresses. gptqmodel writes the formats of AutoGPTQ and AutoAWQ (GEMM); its AWQ also clips."""
    scheme: Literal["int", "nvfp4", "mxfp4", "mxfp8", "w4a8", "w4afp8", "fp8-block"] = "int"
    """"int": integers of `bits`, weights alone. Others: the format of the method of that name, which has its own bits
    and group size, and rounds activations."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_scheme(cls, values: Any) -> Any:
        """Give the scheme's own bits and groups where they are not set."""
        scheme = SCHEMES.get(values.get("scheme", ""))
        return values if scheme is None else {**scheme.as_settings(), **values}

    @model_validator(mode="after")
    def _require_scheme(self) -> Self:
        if self.scheme == "int":
            return self
        for name, value in SCHEMES[self.scheme].as_settings().items():
            if getattr(self, name) != value:
                raise ConfigError(f"The scheme {self.scheme} fixes {name}", allowed=str(value), got=getattr(self, name))
        if self.backend == BACKEND_NAME:
            raise UnsupportedError(
                "gptqmodel writes integers only", got=f"scheme={self.scheme}", fix="Use backend=llmcompressor"
            )
        return self


B = TypeVar("B", bound=TwoBackendConfig)


class TwoBackendMethod(ForLayers[B]):
    """Base of `gptq` and `awq`: with llm-compressor by default, with gptqmodel for ``backend=gptqmodel``."""

    other_format: ClassVar[str]  # Format of gptqmodel's checkpoints

    def label(self, config: B) -> str:
        """Return ``gptq-4bit-g128``, ``gptq-4bit-g128-gptqmodel`` or ``gptq-nvfp4``."""
        if config.scheme != "int":
            return f"{self.name}-{config.scheme}"
        name = super().label(config)
        return f"{name}-{BACKEND_NAME}" if config.backend == BACKEND_NAME else name

    def stored_bits(self, config: B) -> float | None:
        return super().stored_bits(config) if config.scheme == "int" else SCHEMES[config.scheme].stored_bits

    def rounds(self, config: B) -> bool:
        return config.scheme != "int"

    def scheme(self, config: Any, targets: Sequence[str]) -> dict[str, Any]:
        return (
            super().scheme(config, targets) if config.scheme == "int" else SCHEMES[config.scheme].config_group(targets)
        )

    def format_of(self, config: B) -> str:
        if config.scheme != "int":
            return f"compressed-tensors ({SCHEMES[config.scheme].format})"
        return self.other_format if config.backend == BACKEND_NAME else self.format

    def packages(self, config: B) -> tuple[tuple[str, ...], str | None]:
        return (PACKAGES, EXTRA) if config.backend == BACKEND_NAME else super().packages(config)

    def takes_experts(self, config: B) -> bool:
        return config.backend != BACKEND_NAME

    def check(self, config: B, source: SourceModel) -> None:
        super().check(config, source)
        if config.backend == BACKEND_NAME:
            _check_supported(source, self.name, self.quantize_config(config))
        else:
            self.check_llmcompressor(source)

    def compress(self, job: CompressionJob[B]) -> Logits:
        if job.config.backend == BACKEND_NAME:
            return _quantize_by_gptqmodel(job, self.quantize_config(job.config))
        return super().compress(job)

    def quantize_config(self, config: B) -> dict[str, Any]:
        """Return the arguments of `gptqmodel.QuantizeConfig`."""
        grouped = not isinstance(config.group_size, str)
        return {"bits": config.bits, "group_size": config.group_size if grouped else -1}

    def check_llmcompressor(self, source: SourceModel) -> None:
        """Raise an error for what llm-compressor does not support with this model; the default accepts everything."""


def _load_for_gptqmodel() -> None:
    """Import gptqmodel with at least two workers: its default on two cores is one.

    It reads the number from the environment. A value that is already set is not changed.
    """
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(max(2, min(12, os.cpu_count() or 2))))
    import gptqmodel  # noqa: F401


def _check_supported(source: SourceModel, method: str, settings: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for architectures, group sizes and layers that gptqmodel does not support."""
    _load_for_gptqmodel()
    from gptqmodel.models.auto import SUPPORTED_MODELS
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    kernel = {"gptq": TorchLinear, "awq": AwqTorchLinear}[method]
    reason, allowed = None, None
    if source.model_type not in SUPPORTED_MODELS:
        reason = "gptqmodel does not know this architecture"
    elif method == "gptq" and source.model_type in _WITHOUT_GPTQ:
        reason = "gptqmodel does not save its GPTQ checkpoint of this architecture completely"
    elif method == "awq" and source.model_type not in _WITH_AWQ:
        reason, allowed = "gptqmodel's AWQ has not proved right on this architecture", _WITH_AWQ
    if reason is not None:
        raise UnsupportedError(reason, allowed=allowed, got=source.architecture, fix="Use backend=llmcompressor")
    sizes = kernel.SUPPORTS_GROUP_SIZE
    if settings["group_size"] not in sizes:
        raise UnsupportedError(
            f"gptqmodel's {method} has no kernel for this group size",
            allowed=["channel" if size == -1 else str(size) for size in sizes],
            got=settings["group_size"],
        )
    for name, (out_features, _) in source.linear.items():
        if method == "awq" and out_features % CLIPPED_SAMPLES:
            raise UnsupportedError(
                f"gptqmodel's AWQ cannot clip the {out_features} output features of {name}",
                allowed=f"multiples of {CLIPPED_SAMPLES}",
                got=out_features,
            )


def _quantize_by_gptqmodel(job: CompressionJob[MethodConfig], settings: dict[str, Any]) -> Logits:
    """Quantize on the calibration set, save, and return the logits of the packed weights.

    The base is read in its own dtype, in which gptqmodel also runs the calibration text; layers are solved in float32.
    `settings` are those of `gptqmodel.QuantizeConfig`. The logits are of the packed layers, dequantized.
    """
    _load_for_gptqmodel()
    import torch
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    assert job.calibration is not None
    kernel = BACKEND.AWQ_TORCH if settings.get("quant_method") == "awq" else BACKEND.GPTQ_TORCH
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * row.size} for row in job.calibration.ids]
    try:
        wrapped = GPTQModel.load(
            str(job.source.folder),
            QuantizeConfig(**settings, fallback=None, offload_to_disk=False),
            device=job.device,
            dtype=job.source.torch_dtype,
            trust_remote_code=job.source.trust_remote_code,
        )
        with _collect_worker_errors() as failures:
            wrapped.quantize(rows, calibration_sort=None, batch_size=_BATCH, backend=kernel)
            if failures:
                raise RuntimeError(failures[0]) from failures[0]
        damping = settings.get("damp_percent")
        for entry in wrapped.quant_log:  # a layer whose Hessian needed more damping than was given
            if damping is not None and float(entry["damp"]) != round(damping, 5):
                raise UnsupportedError(
                    f"GPTQ's Hessian of {entry['module']} in layer {entry['layer']} cannot be inverted",
                    got=f"damping={damping}",
                    fix="Raise damping or give more calibration samples",
                )
        wrapped.save(str(job.folder))
    except (ValueError, RuntimeError, AssertionError, AttributeError, TypeError, LookupError) as error:
        # Raised where its definition of an architecture does not fit the pinned version of transformers.
        raise UnsupportedError(f"gptqmodel cannot compress this model: {error}", got=job.source.architecture) from error
    job.source.save_others(job.folder)  # gptqmodel adds a padding token to its own copy of the tokenizer
    model = wrapped.model.eval()
    packed_layers.cast_floats(model, torch.float32)
    packed_layers.expand(model)
    return job.probe.logits(model)


_READ = "gptqmodel 7.6"


@contextlib.contextmanager
def _collect_worker_errors() -> Iterator[list[BaseException]]:
    """Within this block, collect the errors of worker threads, for which gptqmodel would end the process.

    Its log files go to a temporary folder.
    """
    from gptqmodel.looper import loop_processor
    from gptqmodel.utils import threadx

    failures: list[BaseException] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        replaced(loop_processor, "_PROJECT_LOG_DIR", Path(folder), of=_READ),
        replaced(threadx._DeviceWorker, "_abort_process", lambda _, failure: failures.append(failure), of=_READ),
    ):
        yield failures
