"""Base class and registry of compression methods: frozen settings, a check before any work, and `compress`."""

from __future__ import annotations

import importlib.util
import math
import re
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mlflow_compress.errors import ConfigError, MissingDependencyError, UnsupportedError
from mlflow_compress.registry import Registry

if TYPE_CHECKING:
    import torch

    from mlflow_compress.compression.calibration_tokens import Calibration
    from mlflow_compress.compression.probe import Probe
    from mlflow_compress.models.placement import Offload
    from mlflow_compress.models.source_model import SourceModel


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Base of every method's settings; a method adds only the fields that it uses."""

    def settings(self) -> dict[str, Any]:
        """Return the settings by name, as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, kw_only=True)
class CalibratedConfig(MethodConfig):
    """Settings of a method that needs calibration text."""

    calibration_samples: int = 128
    """Number of calibration sequences."""
    calibration_length: int = 256
    """Tokens per sequence."""
    seed: int = 0
    """Seed of the choice and order of the sequences."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for counts that are too small."""
        require_at_least("calibration_samples", self.calibration_samples, 1)
        require_at_least("calibration_length", self.calibration_length, 2)
        require_at_least("seed", self.seed, 0)


@dataclass(frozen=True, kw_only=True)
class CompressionJob:
    """Everything that `Method.compress` needs."""

    source: SourceModel  # The model to compress, resolved to a local folder
    config: Any  # The method's own settings, already checked
    calibration: Calibration | None  # Token ids, if the method needs them
    probe: Probe  # Input on which the logits of the compressed model in memory are computed
    device: str  # "cpu" or "cuda"
    folder: Path  # Existing empty folder to write the checkpoint and its tokenizer into
    offload: Offload | None = None  # Where weights wait that do not fit into memory; None: the whole model is in memory
    # Filled by the method: experts to which the router sent no calibration token
    experts_without_tokens: list[str] = field(default_factory=list)


class Method(ABC):
    """One compression method. A new method is a subclass with the `register` decorator."""

    name: ClassVar[str]
    """Name in the registry and on the command line."""
    description: ClassVar[str]
    """One line for `mlflow-compress methods`."""
    reference: ClassVar[str]
    """Paper, or documentation of the library."""
    format: ClassVar[str]
    """Format of the checkpoint."""
    Config: ClassVar[type[MethodConfig]]
    """Frozen keyword-only settings."""
    supported_bits: ClassVar[tuple[int, ...]] = ()
    """Allowed bits per weight, from high to low; empty where the method has no such setting."""
    needs_calibration: ClassVar[bool] = False
    """Whether calibration text is required."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Import names of optional packages."""
    linear_only: ClassVar[bool] = True
    """Whether the method changes linear layers only; other weights stay as they are."""
    by_class: ClassVar[bool] = False
    """Whether the method's library finds linear layers by their exact class, and skips subclasses."""
    rounds_activations: ClassVar[bool] = False
    """Whether the reload check has a wider tolerance, for rounded activations: `probe.MAX_MEAN_KL_ROUNDED`."""
    from_disk: ClassVar[bool] = False
    """Whether the method can compress a model layer by layer from the disk (device=balanced)."""
    compresses: ClassVar[bool] = True
    """False for a control, which does not change the weights and can never be promoted."""
    extra: ClassVar[str | None] = None
    """Extra of this package that installs `requires`, where the plain installation does not."""
    for_single_layers: ClassVar[Mapping[str, Any]] = {}
    """Settings with which all layers are stored alike, where the method's own choice is several formats."""
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
        """Return what else decides the checkpoint, besides settings, base and calibration text; "" by default."""
        return ""

    def takes_experts(self, config: Any) -> bool:
        """Return whether the method also compresses the experts of mixtures, each as linear layers of its own."""
        return False

    def format_of(self, config: Any) -> str:
        """Return the checkpoint format for these settings; by default `format`."""
        return self.format

    def rounds(self, config: Any) -> bool:
        """Return whether these settings round activations; by default `rounds_activations`."""
        return self.rounds_activations

    def packages(self, config: Any) -> tuple[tuple[str, ...], str | None]:
        """Return the import names of the packages for these settings, and the extra that installs them."""
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
        """Raise an error, before any work, if the method does not support the model; the default accepts all."""

    @abstractmethod
    def compress(self, job: CompressionJob) -> torch.Tensor:
        """Write the compressed checkpoint to `job.folder`.

        Returns
        -------
        torch.Tensor
            Float32 logits of the compressed model in memory on `job.probe`, shape (n_positions, vocabulary). The saved
            checkpoint must reproduce them in a new process.
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


AUTO = "auto"
"""Means "not given": use the method's default."""

NONE = "none"
"""Means "no further settings"."""


def method_config(name: str, *, bits: int | str = AUTO, group_size: int | str = AUTO, **overrides: Any) -> MethodConfig:
    """Return the settings of method `name`.

    Parameters
    ----------
    name : str
        Registered method.
    bits, group_size : int or str
        Values that replace the method's default; "auto" keeps it.
    **overrides
        Other settings of the method, as values or as text ("true", "0.01", "64").

    Returns
    -------
    MethodConfig
        Validated settings.

    Raises
    ------
    ConfigError
        Unknown method, a parameter that the method does not have, or a value of the wrong type or range.
    """
    method = METHODS.get(name)
    hints = get_type_hints(method.Config)
    given = {
        key: value for key, value in {"bits": bits, "group_size": group_size, **overrides}.items() if value != AUTO
    }
    unknown = [key for key in given if key not in hints]
    if unknown:
        raise ConfigError(
            f"Method {name!r} has no parameter {unknown[0]!r}",
            allowed=sorted(hints) or "no parameters",
            got=f"{unknown[0]}={given[unknown[0]]}",
        )
    return method.Config(**{key: _parse(key, value, hints[key]) for key, value in given.items()})


def _parse(name: str, value: Any, kind: Any) -> Any:
    for choice in _choices(kind):
        parsed = _parse_one(value, choice)
        if parsed is not None:
            return parsed
    raise ConfigError(f"Parameter {name!r} has the wrong type", allowed=_describe(kind), got=value)


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _parse_one(value: Any, kind: Any) -> Any:
    """Return `value` converted to `kind`, or None where that is not possible."""
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else None
    if kind is bool:
        return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
    if isinstance(value, bool):
        return None
    if kind is int:
        return int(value) if re.fullmatch(r"[+-]?\d{1,18}", str(value)) else None
    if kind is float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            return None
        return number if math.isfinite(number) else None
    return value if kind is str and isinstance(value, str) else None


def _describe(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return " or ".join(
        ", ".join(map(repr, get_args(choice))) if get_origin(choice) is Literal else names[choice]
        for choice in _choices(kind)
    )
