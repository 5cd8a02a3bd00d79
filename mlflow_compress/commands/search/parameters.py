"""The parameters of a search: formats and budgets, and how the candidates are measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator

from mlflow_compress.commands.main.parameters import LogWeights, MainConfig
from mlflow_compress.commands.promote.parameters import PromoteConfig
from mlflow_compress.config import as_text
from mlflow_compress.config.declarations import (
    AUTO,
    Group,
    Names,
    OptionalNames,
    OptionalText,
    Pairs,
    Parameters,
    Target,
    Together,
    like,
    option,
)
from mlflow_compress.config.groups import (
    AutoOrCount,
    CompressionConfig,
    EngineConfig,
    EvaluationConfig,
    InferenceConfig,
    SourceConfig,
    TracesConfig,
)
from mlflow_compress.errors import ConfigError

if TYPE_CHECKING:
    from mlflow_compress.compression.methods.kv_cache import KvCacheConfig


def _positive_numbers(value: str | None) -> str | None:
    for part in (value or "1").split(","):
        try:
            number = float(part)
        except ValueError:
            number = -1.0
        if not 0 < number < float("inf"):
            raise ValueError("positive numbers, comma-separated")
    return value


C = TypeVar("C", bound=Parameters)
Budgets = Annotated[OptionalNames, AfterValidator(_positive_numbers)]


_SEARCH_ARGS = Together("search_args", "how candidates are measured: name=value,name=value")


class _SearchSpaceConfig(Group):
    """Which formats may be mixed, and within which limit."""

    formats: Names = option(
        "gptq:3,gptq:4,gptq:8",
        "formats to choose from, METHOD:BITS, comma-separated; 'none' leaves a layer unchanged",
    )
    cache_formats: OptionalNames = option(
        None,
        "formats of each layer's cache of keys and values, comma-separated: BITS, or KEYS:VALUES, of 8, 4, 3, 2 and "
        "fp8; 16 leaves a cache unchanged",
    )
    cache_tokens: AutoOrCount = option(
        "auto",
        "number of cached tokens whose bytes count with the weights'; 'auto': the model's context",
        within=_SEARCH_ARGS,
    )
    bits_per_weight: Budgets = option(
        None, "most stored bits per weight of the linear layers; several, comma-separated, give one variant each"
    )
    max_bytes: Budgets = option(
        None, "instead of bits_per_weight: most bytes of all stored tensors (with cache_formats: and of the cache)"
    )
    max_kl: Budgets = option(None, "instead of both: find the smallest variant within this KL (nats, upper end)")

    repair: OptionalText = option(
        None,
        "instead of all three: id of a main run whose variant a policy refuses; find the fewest extra bytes with which "
        "it passes",
    )
    policy: OptionalText = like(PromoteConfig, "policy")
    search_text: OptionalText = option(
        None,
        "text on which the costs are measured, named as for 'calibration'; none: the calibration text after the part "
        "used for calibration",
        path="file",
        within=_SEARCH_ARGS,
    )
    search_windows: int = option(64, "windows of calibration_length tokens of that text", ge=2, within=_SEARCH_ARGS)
    search_rounds: int = option(
        2,
        "with max_kl or repair: how many more checkpoints are tried, until one is within the limit",
        ge=0,
        within=_SEARCH_ARGS,
    )

    group_size: str = like(CompressionConfig, "group_size")
    calibration: str = like(CompressionConfig, "calibration")
    calibration_samples: AutoOrCount = like(CompressionConfig, "calibration_samples")
    calibration_length: int = like(CompressionConfig, "calibration_length")
    method_args: Pairs = like(CompressionConfig, "method_args")
    target: Target = like(CompressionConfig, "target")
    output_dir: str = like(CompressionConfig, "output_dir")


_LIMITS = ("bits_per_weight", "max_bytes", "max_kl")
# What a repair takes: everything else is that of the run. Another engine would be another evaluation.
_OF_REPAIR = {
    *("repair", "policy", "search_text", "search_windows", "search_rounds", "cache_tokens"),
    *("device", "output_dir", "log_weights", "experiment"),
    *EngineConfig.model_fields.keys() - {"engine"},
}


class SearchConfig(Parameters):
    """Mixed precision: the closest variant within a budget of bits, or the smallest within a KL limit."""

    source: SourceConfig = SourceConfig()
    space: _SearchSpaceConfig = _SearchSpaceConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    traces: TracesConfig = TracesConfig()
    inference: InferenceConfig = InferenceConfig()
    running: EngineConfig = EngineConfig()
    log_weights: LogWeights = like(MainConfig, "log_weights")

    def for_variants(self, command: type[C], **compression: Any) -> C:
        """Return the parameters of one variant's main job, or of a sweep of variants: neither judge nor speed."""
        shared = {"experiment": self.experiment, "group_size": AUTO, "judge": False, "speed": False}
        return self.of_stage(command, **{**shared, **compression})

    @property
    def limited(self) -> str:
        """What is limited. Nothing, or two things, are a `ConfigError`."""
        kinds = [name for name in _LIMITS if getattr(self.space, name) is not None]
        if len(kinds) != 1:
            raise ConfigError("A search needs one kind of limit", allowed=_LIMITS, got=", ".join(kinds) or "none")
        if self.space.cache_formats is not None and kinds[0] == "bits_per_weight":
            raise ConfigError(
                "bits_per_weight does not count caches", allowed="max_bytes or max_kl with cache_formats", got=kinds[0]
            )
        return kinds[0]

    @property
    def caches(self) -> dict[str, KvCacheConfig | None]:
        """Settings of each format of a cache, by its name; None for one that stays as it is."""
        from mlflow_compress.compression.method import method_config

        caches: dict[str, Any] = {}
        for text in map(str.strip, (self.space.cache_formats or "").split(",")):
            keys, _, values = text.partition(":")
            kept = {keys, values or keys} == {"16"}
            if text:
                bits = {"key_bits": keys, "value_bits": values or keys}
                caches[f"kv-cache:{text}"] = None if kept else method_config("kv-cache", **bits)
        return caches

    def given_for_repair(self) -> dict[str, Any]:
        """Return the parameters that are given, by name. One that the run has already decided is a `ConfigError`."""
        text, defaults = as_text(self), as_text(SearchConfig())
        given = {name: value for name, value in self.values().items() if text[name] != defaults[name]}
        if decided := sorted(given.keys() - _OF_REPAIR):
            raise ConfigError(
                f"A repair takes {decided[0]!r} from the run that it repairs",
                allowed=sorted(_OF_REPAIR),
                got=f"{decided[0]}={text[decided[0]]}",
                fix="Leave it out",
            )
        return given

    def uniform_variants(self) -> tuple[dict[str, MainConfig], bool]:
        """Return the variant with one format in all layers, for each format, and whether a layer may stay as it is."""
        from mlflow_compress.compression.method import METHODS
        from mlflow_compress.compression.mixed_recipe import KEPT, format_parts

        names = [part.strip() for part in self.space.formats.split(",") if part.strip()]
        if len(set(names)) < max(2, len(names)):
            raise ConfigError("A search needs two different formats or more", got=self.space.formats)
        variants = {}
        for name in names:
            if name == KEPT:
                continue
            method, bits = format_parts(name)
            known = METHODS.get(method).Config.model_fields
            values = {"bits": bits, "group_size": self.space.group_size}
            own: dict[str, Any] = {name: value for name, value in values.items() if name in known}
            if fixed := METHODS.get(method).for_single_layers:
                own["method_args"] = {**fixed, **self.space.method_args}
            variants[name] = self.for_variants(MainConfig, method=method, **own)
        return variants, KEPT in names
