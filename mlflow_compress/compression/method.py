"""Base class and registry of compression methods: typed settings, a check before any work, and `compress`."""

import importlib.util
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    TypeAlias,
    TypeVar,
    get_args,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from mlflow_compress.compression.calibration_tokens import Calibration
from mlflow_compress.compression.probe import Probe
from mlflow_compress.config.declarations import AUTO, one_error
from mlflow_compress.errors import ConfigError, MissingDependencyError, UnsupportedError, require_extra
from mlflow_compress.models.placement import BALANCED, Offload
from mlflow_compress.models.source_model import SourceModel
from mlflow_compress.registry import Registry

if TYPE_CHECKING:
    import torch

    from mlflow_compress.models.architectures.quantized_cache import QuantizedCache

Logits: TypeAlias = "torch.Tensor"
"""Float32 logits of a compressed model in memory on a job's probe, shape (n_positions, vocabulary)."""

Setting = int | float | bool | str
"""What a setting of a method can be; text is read as the type that the method declares."""

GroupSize = Annotated[int, Field(ge=1)] | Literal["channel"]
"""Number of neighbouring weights of a row that share a scale; "channel": one scale per row."""


class MethodConfig(BaseModel):
    """Base of every method's settings; a method adds only the fields that it uses, each with a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: object, info: ValidationInfo) -> object:
        """Read a number or switch that is given as text; pydantic then takes the declared type only."""
        if not isinstance(value, str) or cls.model_fields[str(info.field_name)].annotation is str:
            return value
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        with suppress(ValueError):
            return int(value) if len(value) < 19 else float(value)
        with suppress(ValueError):
            return float(value)
        return value

    def settings(self) -> dict[str, Any]:
        return self.model_dump()


class CalibratedConfig(MethodConfig):
    """Settings of a method that needs calibration text."""

    calibration_samples: int = Field(128, ge=1)  # Number of calibration sequences
    calibration_length: int = Field(256, ge=2)  # Tokens per sequence
    seed: int = Field(0, ge=0)  # Seed of the choice and order of the sequences


S = TypeVar("S", bound=MethodConfig)
JobSettings = TypeVar("JobSettings", bound=MethodConfig, covariant=True)


@dataclass(frozen=True, kw_only=True)
class CompressionJob(Generic[JobSettings]):
    """Everything that `Method.compress` needs."""

    source: SourceModel  # The model to compress, resolved to a local folder
    config: JobSettings  # The method's own settings, already checked
    calibration: Calibration | None  # Token ids, if the method needs them
    probe: Probe  # Input on which the logits of the compressed model in memory are computed
    device: str  # "cpu" or "cuda"
    folder: Path  # Existing empty folder to write the checkpoint and its tokenizer into
    # Where weights wait that do not fit into memory; None: the whole model is in memory
    offload: Offload | None = None
    # Filled by the method: experts to which the router sent no calibration token
    experts_without_tokens: list[str] = field(default_factory=list)
    caches: "Mapping[int, QuantizedCache]" = field(default_factory=dict)  # By layer, how keys and values are rounded

    def round_cache(self, model: Any) -> None:
        """Give a compressed model the job's caches; an `UnsupportedError` where they change no logit of the probe.

        What the weights move would hide later that a cache is not applied.
        """
        from mlflow_compress.models.architectures.quantized_cache import quantize_cache

        if not self.caches:
            return
        before = self.probe.logits(model)
        quantize_cache(model, self.caches)
        if before.equal(self.probe.logits(model)):
            raise UnsupportedError(
                "The cache is not applied: no logit of the reload probe differs from those without it",
                got=f"caches in {len(self.caches)} of {self.source.layers} layers",
                fix="Use a shorter residual and token_group",
            )


class Method(ABC, Generic[S]):
    """One compression method. A new method is a subclass with the `register` decorator."""

    name: ClassVar[str]  # Name in the registry and on the command line
    description: ClassVar[str]  # One line for `mlflow-compress list methods`
    reference: ClassVar[str]  # Paper, or documentation of the library
    format: ClassVar[str]  # Format of the checkpoint
    Config: type[S]  # The settings
    # Allowed values of the setting `bits` (per weight), from high to low; empty where the method has none
    supported_bits: ClassVar[tuple[int, ...]] = ()
    needs_calibration: ClassVar[bool] = False  # Whether calibration text is required
    requires: ClassVar[tuple[str, ...]] = ()  # Import names of optional packages
    linear_only: ClassVar[bool] = True  # Whether the method changes linear layers only; other weights stay as they are
    # Whether the method also compresses the experts of mixtures, each as linear layers of its own
    experts: ClassVar[bool] = False
    # Whether the method's library finds linear layers by their exact class, and skips subclasses
    by_class: ClassVar[bool] = False
    # Whether the reload check has a wider tolerance, for rounded activations: `probe.MAX_MEAN_KL_ROUNDED`
    rounds_activations: ClassVar[bool] = False
    # Whether the method can compress a model layer by layer from the disk (device=balanced)
    from_disk: ClassVar[bool] = False
    # False for a control, which does not change the weights and can never be promoted
    compresses: ClassVar[bool] = True
    # Whether keys and values are rounded: a variant that does not move at all is then refused as not applied
    rounds_cache: ClassVar[bool] = False
    # Extra of this package that installs `requires`, where the plain installation does not
    extra: ClassVar[str | None] = None
    # Settings with which all layers are stored alike, where the method's own choice is several formats
    for_single_layers: ClassVar[Mapping[str, Setting]] = {}
    runs_in: ClassVar[tuple[str, ...]] = ()
    """Serving engines that document the checkpoint's format: "vLLM"; "llama.cpp" after its own conversion to GGUF."""
    # Whether only this package reads the checkpoint: transformers alone does not know its format
    own_format: ClassVar[bool] = False

    def label(self, config: S) -> str:
        """Return a short name of a variant, most distinctive part first: ``awq-4bit-g128``."""
        parts = [self.name]
        bits = getattr(config, "bits", None)
        if bits is not None and len(self.supported_bits) > 1:
            parts.append(f"{bits}bit")
        group_size = getattr(config, "group_size", None)
        if group_size is not None:
            parts.append(group_size if isinstance(group_size, str) else f"g{group_size}")
        return "-".join(parts)

    def stored_bits(self, config: S) -> float | None:
        """Return the bits that a linear layer's weight will take, for the plan of a sweep; None: not known before.

        By default `bits` and, for every group, a scale of 16 bits and a zero point of `bits`.
        """
        bits, group_size = getattr(config, "bits", None), getattr(config, "group_size", None)
        if bits is None or not isinstance(group_size, int):
            return bits
        return float(bits + (16 + bits) / group_size)

    def fingerprint(self, config: S) -> str:
        """Return what else decides the checkpoint, besides settings, base and calibration text; "" by default."""
        return ""

    def takes_experts(self, config: S) -> bool:
        """Return whether experts are compressed with these settings; by default `experts`."""
        return self.experts

    def format_of(self, config: S) -> str:
        """Return the checkpoint format for these settings; by default `format`."""
        return self.format

    def packed(
        self, config: S, layers: Mapping[str, tuple[int, int]]
    ) -> list[tuple[int, int | str, Mapping[str, tuple[int, int]]]]:
        """Return bits, group size and shapes of the layers whose packed weights a kernel must take."""
        values = config.settings()
        return [(values["bits"], values["group_size"], layers)]

    def rounds(self, config: S) -> bool:
        """Return whether these settings round activations; by default `rounds_activations`."""
        return self.rounds_activations

    def packages(self, config: S) -> tuple[tuple[str, ...], str | None]:
        """Return the import names of the packages for these settings, and the extra that installs them."""
        return self.requires, self.extra

    def require_backend(self, config: S) -> None:
        """Raise `MissingDependencyError` naming the packages that are not installed."""
        packages, extra = self.packages(config)
        if extra is not None:
            require_extra(extra, *packages, by=f"Method {self.name!r}")
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            raise MissingDependencyError(
                f"Method {self.name!r} needs packages that are not installed: {', '.join(missing)}",
                fix=f"Run: pip install {' '.join(missing)}",
            )

    def check_folder(self, folder: Path) -> None:
        """Raise an error, before torch is imported, if the model's files alone show that the method cannot help."""

    def check(self, config: S, source: SourceModel) -> None:
        """Raise an error, before any work, if the method does not support the model.

        By default that is a `group_size` that does not divide a layer.
        """
        group_size = getattr(config, "group_size", None)
        if not isinstance(group_size, int):
            return
        for name, (_, in_features) in source.matrices.items():
            if in_features % group_size:
                raise UnsupportedError(
                    f"Group size {group_size} does not divide the {in_features} input features of {name}",
                    allowed="a divisor of every layer's input features, or 'channel'",
                    got=group_size,
                )

    @abstractmethod
    def compress(self, job: CompressionJob[S]) -> Logits:
        """Write the compressed checkpoint to `job.folder`. A new process that loads it must reproduce the logits."""


METHODS: Registry[Method[Any]] = Registry(
    "compression method", "mlflow_compress.compression.methods", group="mlflow_compress.methods"
)

M = TypeVar("M", bound=type[Method[Any]])


def register(cls: M) -> M:
    """Class decorator: register one instance of a `Method` subclass under its name; refuse a wrong declaration."""
    _require_declared(cls)
    METHODS.register(cls.name)(cls())
    return cls


def _require_declared(cls: type[Method[Any]]) -> None:
    """Raise `ConfigError` for what a class declares wrongly: it would show much later, or never."""
    method = f"The compression method {cls.__name__}"
    for name, hint in get_type_hints(Method).items():
        if name == "Config":
            continue
        (kind,), value = get_args(hint), getattr(cls, name, None)
        try:
            TypeAdapter(kind).validate_python(value, strict=True)
        except ValidationError:
            words = kind.__name__ if isinstance(kind, type) else str(kind)
            raise ConfigError(f"{method} declares a wrong {name}", allowed=words, got=repr(value)) from None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", cls.name):
        raise ConfigError(f"{method} has a wrong name", allowed="letters, digits, '.', '_' and '-'", got=cls.name)
    if inspect.isabstract(cls):
        raise ConfigError(f"{method} has no function `compress`")
    kind = getattr(cls, "Config", None)
    if not (isinstance(kind, type) and issubclass(kind, MethodConfig)):
        raise ConfigError(f"{method} declares a wrong Config", allowed="a subclass of MethodConfig", got=repr(kind))
    if needed := [name for name, one in kind.model_fields.items() if one.is_required()]:
        raise ConfigError(f"{method} has a setting without a default", got=needed[0])
    bits = getattr(kind(), "bits", None)
    if (bits is not None or cls.supported_bits) and bits not in cls.supported_bits:
        raise ConfigError(
            f"{method} declares supported_bits without the default of its setting bits",
            allowed=map(str, cls.supported_bits),
            got=f"bits={bits}",
        )
    if cls.needs_calibration != issubclass(kind, CalibratedConfig):
        raise ConfigError(
            f"{method} declares needs_calibration={cls.needs_calibration}",
            allowed="true with settings that are a CalibratedConfig, and only then",
            got=kind.__name__,
        )


def method_config(name: str, /, **settings: Setting) -> MethodConfig:
    """Return the checked settings of a method.

    - `name`: Registered method.
    - `**settings`: Settings of the method, as values or as text ("true", "0.01", "64"); "auto" keeps the method's
      default.
    """
    method = METHODS.get(name)
    chosen = {key: value for key, value in settings.items() if value != AUTO}
    fields = method.Config.model_fields
    if unknown := [key for key in chosen if key not in fields]:
        raise ConfigError(
            f"Method {name!r} has no parameter {unknown[0]!r}",
            allowed=sorted(fields) or "no parameters",
            got=f"{unknown[0]}={chosen[unknown[0]]}",
        )
    try:
        with METHODS.blaming(name):
            config: MethodConfig = method.Config(**chosen)
    except ValidationError as error:
        if not (first := error.errors(include_url=False)[0])["loc"]:  # of a plug-in's own check
            raise ConfigError(f"Method {name!r} refuses its settings: {first['msg']}") from None
        raise one_error(error, fields) from None
    bits = getattr(config, "bits", None)
    if bits is not None and bits not in method.supported_bits:
        raise UnsupportedError(
            f"Method {name!r} does not support these bits", allowed=map(str, method.supported_bits), got=bits
        )
    return config


def require_placed(method: Method[Any], settings: MethodConfig, device: str) -> None:
    """Raise `UnsupportedError` where a model on the disk (device=balanced) cannot be compressed with these settings."""
    if device == BALANCED and not (
        method.from_disk and getattr(settings, "backend", "llmcompressor") == "llmcompressor"
    ):
        raise UnsupportedError(
            f"Method {method.name!r} needs the whole model in memory",
            allowed=sorted(name for name, known in METHODS.items() if known.from_disk),
            got="device=balanced",
            fix="Use device=auto, or one of these methods with its backend llmcompressor",
        )


def variant_label(name: str, config: MethodConfig) -> str:
    """Return a method's short name of a variant; a plug-in's wrong answer is its error."""
    with METHODS.blaming(name):
        label = METHODS.get(name).label(config)
        if not isinstance(label, str) or not re.fullmatch(r"[^\s/]+", label):
            raise TypeError(f"label() gave {label!r}, and not a short name without spaces and slashes")
        return label
