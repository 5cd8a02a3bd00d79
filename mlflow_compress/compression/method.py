"""What a compression method is: a frozen Config, a check before any work, and `compress`."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mlflow_compress.errors import ConfigError, MissingDependencyError, UnsupportedError
from mlflow_compress.registry import Registry

if TYPE_CHECKING:
    import torch

    from mlflow_compress.compression.calibration_tokens import Calibration
    from mlflow_compress.compression.probe import Probe
    from mlflow_compress.models.source_model import SourceModel


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Base of every method's settings; a method adds exactly the fields that it reads."""

    def settings(self) -> dict[str, Any]:
        """Return the settings by name, as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, kw_only=True)
class CalibratedConfig(MethodConfig):
    """Settings of a method that looks at text."""

    calibration_samples: int = 128
    """Sequences used for calibration."""
    calibration_length: int = 256
    """Tokens in each sequence."""
    seed: int = 0
    """Chooses and orders the sequences."""

    def __post_init__(self) -> None:
        """Refuse counts that are not positive."""
        require_at_least("calibration_samples", self.calibration_samples, 1)
        require_at_least("calibration_length", self.calibration_length, 2)
        require_at_least("seed", self.seed, 0)


@dataclass(frozen=True, kw_only=True)
class CompressionJob:
    """Everything that `Method.compress` gets.

    Parameters
    ----------
    source : SourceModel
        The model to compress, resolved to a local folder.
    config : MethodConfig
        The method's own settings, already checked.
    calibration : Calibration or None
        Token ids, when the method needs them.
    probe : Probe
        Input on which the in-memory compressed model has to be measured.
    device : str
        "cpu" or "cuda".
    folder : Path
        Existing empty folder to write the checkpoint and its tokenizer into.
    """

    source: SourceModel
    config: Any
    calibration: Calibration | None
    probe: Probe
    device: str
    folder: Path


class Method(ABC):
    """One compression method; a subclass with the `register` decorator is all that a new method needs."""

    name: ClassVar[str]
    """Name in the registry and on the command line."""
    description: ClassVar[str]
    """One line for `mlflow-compress methods`."""
    reference: ClassVar[str]
    """The paper or the library's documentation."""
    format: ClassVar[str]
    """Checkpoint format written."""
    Config: ClassVar[type[MethodConfig]]
    """Frozen keyword-only settings."""
    supported_bits: ClassVar[tuple[int, ...]] = ()
    """Weight bits that may be asked for, high to low; empty where the method has no such setting."""
    needs_calibration: ClassVar[bool] = False
    """Whether calibration text is required."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Import names of optional packages."""
    linear_only: ClassVar[bool] = True
    """Whether linear layers are all that changes: weights elsewhere, as of experts in one tensor, would stay."""
    by_class: ClassVar[bool] = False
    """Whether its library knows linear layers by their exact class, and passes over those of another."""
    rounds_activations: ClassVar[bool] = False
    """Whether the reload check allows that activations land on neighbouring steps: see `probe.MAX_MEAN_KL_ROUNDED`."""
    compresses: ClassVar[bool] = True
    """False for a control that leaves the weights as they are and may never be promoted."""
    extra: ClassVar[str | None] = None
    """Extra of this package that installs `requires`, where the plain installation does not."""
    runs_in: ClassVar[tuple[str, ...]] = ()
    """Serving engines that document the checkpoint's format: "vLLM"; "llama.cpp" after its own conversion to GGUF."""

    def label(self, config: Any) -> str:
        """Return a short name of a variant, most distinctive part first: ``awq-4bit-g128``."""
        parts = [self.name]
        bits = getattr(config, "bits", None)
        if bits is not None and len(self.supported_bits) > 1:
            parts.append(f"{bits}bit")
        group_size = getattr(config, "group_size", None)
        if group_size is not None:
            parts.append(group_size if isinstance(group_size, str) else f"g{group_size}")
        return "-".join(parts)

    def fingerprint(self, config: Any) -> str:
        """Return what decides the checkpoint's bytes beside settings, base and calibration text; mostly nothing."""
        return ""

    def format_of(self, config: Any) -> str:
        """Return the format of the checkpoint that these settings make: `format`, unless they choose another."""
        return self.format

    def packages(self, config: Any) -> tuple[tuple[str, ...], str | None]:
        """Return the import names of the packages that these settings need, and the extra that installs them."""
        return self.requires, self.extra

    def require_backend(self, config: Any) -> None:
        """Raise `MissingDependencyError` naming the packages that are not installed."""
        packages, extra = self.packages(config)
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            what = " ".join(missing) if extra is None else f"-e '.[{extra}]' (in the project's folder)"
            raise MissingDependencyError(
                f"Method {self.name!r} needs packages that are not installed",
                got=", ".join(missing),
                fix=f"Run: pip install {what}",
            )

    def check(self, config: Any, source: SourceModel) -> None:  # noqa: B027 - a hook, not every method has limits
        """Refuse, before any work, what this method cannot do with this model; the default accepts everything."""

    @abstractmethod
    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Write the compressed checkpoint to `job.folder`.

        Returns
        -------
        torch.Tensor
            Float32 logits of the in-memory compressed model on `job.probe`, of shape (n_positions, vocabulary).
            They are what the saved checkpoint must reproduce in a fresh process.
        """


METHODS: Registry[Method] = Registry(
    "compression method", "mlflow_compress.compression.methods", group="mlflow_compress.methods"
)

M = TypeVar("M", bound=type[Method])


def register(cls: M) -> M:
    """Class decorator: register one instance of a `Method` subclass under its name."""
    METHODS.register(cls.name)(cls())
    return cls


def require_bits(method: str, bits: int, supported: Iterable[int]) -> None:
    """Raise `UnsupportedError` listing the allowed bits unless `bits` is one of them."""
    if bits not in tuple(supported):
        raise UnsupportedError(f"Method {method!r} does not support these bits", allowed=map(str, supported), got=bits)


def require_at_least(name: str, value: int, least: int) -> None:
    """Raise `ConfigError` unless `value` is at least `least`."""
    if value < least:
        raise ConfigError(f"{name} is too small", allowed=f"at least {least}", got=value)


def require_between(name: str, value: float, low: float, high: float) -> None:
    """Raise `ConfigError` unless `low` < `value` < `high`."""
    if not low < value < high:
        raise ConfigError(f"{name} is out of range", allowed=f"between {low} and {high}, exclusive", got=value)
