"""The promotion policy: what a variant must satisfy, what ranks higher, and who may be replaced. Read from YAML."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from mlflow_compress.config.declarations import Group, OptionalText, OrNone, Target, option, read_file
from mlflow_compress.errors import ConfigError
from mlflow_compress.formats import upgraded

POLICY_FORMAT = 1
OptionalNumber = Annotated[float | None, OrNone]
OptionalCount = Annotated[Annotated[float, Field(ge=0)] | None, OrNone]
"""A number that is 0 or more, or none."""

MARGIN = 1.0
"""Points of accuracy that a variant may lose and still be called no worse, where no policy says otherwise."""

PINNED = "pinned"  # alias of a version that is never replaced; people give it
PREVIOUS = "-previous"
_RESERVED_ALIASES = ("latest", "v1", "previous", PINNED)


def named_alias(alias: str) -> str:
    """Return an alias; one that MLflow or this package reserves is refused."""
    number = alias[1:] if alias[:1] in ("v", "V") else ""
    if alias.lower() in _RESERVED_ALIASES or number.isdecimal() or alias.endswith(PREVIOUS):
        raise ConfigError(
            "This alias is reserved",
            allowed=f"anything but {', '.join(_RESERVED_ALIASES)}, v2, v3 ... and what ends in {PREVIOUS}",
            got=alias,
        )
    if not alias or not all(c.isalnum() or c in "_-" for c in alias):
        raise ConfigError(
            "Parameter 'alias' is not a name that MLflow takes", allowed="letters, digits, '_' and '-'", got=alias
        )
    return alias


class KlBounds(Group):
    """The gate on KL."""

    max_kl: float = option(
        0.05, "largest mean of the KL clipped at 1 nat per item, in nats: upper end of its 95 % interval", ge=0
    )
    max_outliers_pct: float = option(
        1.0, "largest share of items with a KL above 1 nat, in percent: upper end of its 95 % interval", ge=0
    )


class MetricGate(Group):
    """A bound on one metric. Missing is failed."""

    metric: str = option(..., "name of a metric, as runs show it")
    at_most: OptionalNumber = option(None, "largest accepted value; either this or at_least")
    at_least: OptionalNumber = option(None, "smallest accepted value")
    bound: Literal["auto", "upper", "lower", "value"] = option(
        "auto", "what is read: the upper or lower end of the 95 % interval, or the value; auto: the worse end"
    )
    task: OptionalText = option(None, "of this task; none: pooled")
    category: OptionalText = option(None, "of this category of the task; none: of all")

    def model_post_init(self, context: Any, /) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ConfigError(f"The gate on {self.metric} needs one limit", allowed="at_most or at_least")
        if self.category is not None and self.task is None:
            raise ConfigError(f"The gate on {self.metric} names a category without its task", got=self.category)

    @property
    def end(self) -> Literal["upper", "lower", "value"]:
        """What is read of the metric, with "auto" resolved."""
        if self.bound == "auto":
            return "upper" if self.at_most is not None else "lower"
        return self.bound

    @property
    def limit(self) -> float:
        limit = self.at_most if self.at_most is not None else self.at_least
        assert limit is not None
        return limit


class MarginGate(Group):
    """Non-inferiority: the variant must be shown to be worse than its baseline by no more than a margin."""

    metric: str = option(..., "a distance from the baseline, or a difference to it (quality/accuracy_delta)")
    margin: float = option(..., "largest accepted harm, in the metric's unit", ge=0)
    task: OptionalText = option(None, "of this task; none: pooled")
    category: OptionalText = option(None, "of this category of the task; none: of all")

    def model_post_init(self, context: Any, /) -> None:
        if self.category is not None and self.task is None:
            raise ConfigError(f"The margin on {self.metric} names a category without its task", got=self.category)


class Requirements(Group):
    """What must have been measured."""

    stages: tuple[Literal["evaluate", "judge"], ...] = option((), "stages that must have finished: evaluate, judge")
    items: int = option(0, "smallest number of items with an answer, pooled", ge=0)
    replicates: int = option(
        1,
        "smallest number of replicates (sweep: replicates); a method without calibration text needs one",
        ge=1,
    )
    items_by_task: dict[str, Annotated[int, Field(ge=1)]] = option({}, "fewest items with an answer, by task")
    max_unscored_pct: float = option(1.0, "largest share of items that lack a score of either model, in percent", ge=0)
    max_cut_pct: float = option(1.0, "largest share of the items whose prompt was cut to the context, in percent", ge=0)


class _UtilityTerm(Group):
    """One metric of a weighted utility."""

    metric: str = option(..., "name of a metric that the main run shows")
    weight: float = option(..., "its weight", gt=0)
    prefer: Literal["auto", "lower", "higher"] = option("auto", "which way is better; auto: as the metric declares")
    scale: Annotated[float, Field(gt=0)] = option(1.0, "with normalisation 'scale': value that counts as 1")


class Objective(Group):
    """What ranks higher, among the variants that pass."""

    by: Literal["size", "kl", "speed", "utility"] = option(
        "size",
        "size: the smaller (within 2 % of the smallest, the closest); kl: the smaller KL; speed: the better "
        "speed_metric; utility: the larger; ties by KL, then flips, then name",
    )
    speed_metric: str = option(
        "speed/decode_ratio_batch_1",
        "metric of 'speed'; by default decode speed relative to the baseline, one sequence at a time",
    )
    speed_prefer: Literal["lower", "higher"] = option("higher", "which way is better")
    normalisation: Literal["range", "scale"] = option(
        "range", "utility: 'range' maps the worst variant that passes to 0 and the best to 1; 'scale' divides by scale"
    )
    utility: tuple[_UtilityTerm, ...] = option((), "terms of the utility: {metric: size/bytes, weight: 0.7}")

    def model_post_init(self, context: Any, /) -> None:
        if self.by == "utility" and not self.utility:
            raise ConfigError("The objective 'utility' has no terms", fix="Give utility: [{metric: ..., weight: ...}]")


class ReplacementRule(Group):
    """Who may be replaced, and by whom. A version with the registry alias 'pinned' never is."""

    replace: Literal["any", "same_evaluation"] = option(
        "any", "'same_evaluation': only a champion that was measured on the same items"
    )
    require: Literal["none", "not_worse", "better"] = option(
        "none",
        "compared with the champion item by item: 'not_worse' by more than the margins; 'better': the interval of the "
        "KL difference is below 0, and accuracy is not worse by more than its margin",
    )
    kl_margin: float = option(0.0, "largest accepted increase of the mean KL in nats: upper end", ge=0)
    accuracy_margin: float = option(0.0, "largest accepted loss of accuracy as a share (0.01 is a point)", ge=0)


class AnomalyRule(Group):
    """Gains that are too good to be true are refused as anomalous."""

    max_accuracy_gain: OptionalCount = option(
        None, "largest plausible gain of accuracy as a share: lower end of its interval; none: not checked"
    )
    zero_kl: bool = option(False, "refuse a KL of exactly 0 if the method changes weights")


class Policy(Group):
    """Everything that decides a promotion."""

    kl: Annotated[KlBounds | None, OrNone] = option(KlBounds(), "the gate on KL; none: no such gate")
    gates: tuple[MetricGate, ...] = option(
        (MetricGate(metric="distance/flips_pct", at_most=5.0),),
        "limits on metrics: {metric, at_most or at_least, bound, task, category}",
    )
    margins: tuple[MarginGate, ...] = option(
        (MarginGate(metric="quality/accuracy_delta", margin=0.02),),
        "non-inferiority to the baseline: {metric, margin, task, category}; 0.02 of accuracy are 2 points",
    )
    margin: float = option(
        MARGIN,
        "points of accuracy that a variant may lose and still be called 'no worse' in the verdict; this is no gate",
        ge=0,
        le=100,
    )
    require: Requirements = option(Requirements(), "what must have been measured")
    objective: Objective = option(Objective(), "what ranks higher, among the variants that pass")
    champion: ReplacementRule = option(
        ReplacementRule(), "which champion may be replaced; a version with the registry alias 'pinned' never is"
    )
    target: Target = option(
        "any", "server that must load the variant; 'any': what no server loads is chosen only if nothing else passes"
    )
    anomalies: AnomalyRule = option(AnomalyRule(), "implausible gains, refused as anomalous")

    @property
    def sha256(self) -> str:
        """SHA-256 of the policy's text, which names every value: equal policies have equal hashes."""
        return hashlib.sha256(policy_yaml(self, comments=False).encode()).hexdigest()

    def overridden(
        self,
        *,
        max_kl: float | None = None,
        max_kl_outliers_pct: float | None = None,
        max_flips_pct: float | None = None,
        max_accuracy_drop_pct: float | None = None,
        min_decode_speedup: float | None = None,
        max_memory_ratio: float | None = None,
    ) -> "Policy":
        """Return the policy with other bounds of the standard gates, and on speed and memory; None keeps a bound.

        A gate that the policy does not have is added. Accuracy is given in points here, as the parameter is.
        """
        changes: dict[str, Any] = {}
        kl = {"max_kl": max_kl, "max_outliers_pct": max_kl_outliers_pct}
        if bounds := {name: value for name, value in kl.items() if value is not None}:
            changes["kl"] = KlBounds(**{**(self.kl.model_dump() if self.kl else {}), **bounds})
        gates = []
        for name, end, bound in (
            ("distance/flips_pct", "at_most", max_flips_pct),
            ("speed/decode_ratio_batch_1", "at_least", min_decode_speedup),
            ("speed/memory_peak_ratio", "at_most", max_memory_ratio),
        ):
            limit: dict[str, Any] = {end: bound}
            if bound is not None:
                gates.append(MetricGate(metric=name, **limit))
        if gates:
            replaced = {(gate.metric, gate.task, gate.end) for gate in gates}
            remaining = [gate for gate in self.gates if (gate.metric, gate.task, gate.end) not in replaced]
            changes["gates"] = (*gates, *remaining)
        if max_accuracy_drop_pct is not None:
            drop = MarginGate(metric="quality/accuracy_delta", margin=max_accuracy_drop_pct / 100.0)
            changes["margins"] = (drop, *(m for m in self.margins if (m.metric, m.task) != (drop.metric, None)))
        return self.model_copy(update=changes)

    def without_each(self) -> "dict[str, Policy]":
        """Return the policy without one requirement, for each that can be waived, by its name."""
        entries: list[MetricGate | MarginGate] = [*self.gates, *self.margins]
        policies = {} if self.kl is None else {"kl": self.model_copy(update={"kl": None})}
        for name in dict.fromkeys(map(_place, entries)):
            others = {part: tuple(e for e in getattr(self, part) if _place(e) != name) for part in ("gates", "margins")}
            policies[name] = self.model_copy(update=others)
        asks_nothing = Requirements().model_dump() | {"max_unscored_pct": 100.0, "max_cut_pct": 100.0}
        for name, nothing in asks_nothing.items():
            if getattr(self.require, name) != nothing:
                policies[f"require.{name}"] = self.model_copy(
                    update={"require": self.require.model_copy(update={name: nothing})}
                )
        for name in ("target", "anomalies"):
            nothing = type(self).model_fields[name].default
            if getattr(self, name) != nothing:
                policies[name] = self.model_copy(update={name: nothing})
        return policies


def _place(entry: MetricGate | MarginGate) -> str:
    return entry.metric + (f" of {'/'.join(filter(None, (entry.task, entry.category)))}" if entry.task else "")


Said = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Waiver(Group):
    """One requirement of a policy that somebody waives until a date."""

    requirement: Said = option(..., "what is waived: kl, the metric of a gate or margin, require.items ...")
    reason: Said = option(..., "why")
    person: Said = option(..., "who answers for it")
    until: date = option(..., "its last day (UTC)")

    def require_valid(self) -> None:
        if (today := datetime.now(UTC).date()) > self.until:
            raise ConfigError(
                f"The waiver of {self.requirement} by {self.person} has expired",
                allowed=f"until {self.until}",
                got=str(today),
                fix="Promote without it, or with a new one",
            )

    @property
    def described(self) -> str:
        """The whole waiver, in one sentence."""
        return f"{self.requirement} is waived until {self.until} by {self.person}: {self.reason.rstrip('.')}"


def read_waiver(path: str) -> Waiver:
    """Return the waiver of a YAML file; one that has expired is refused."""
    try:
        waiver = Waiver(**read_file(Path(path), parameter="waiver"))
    except ConfigError as error:
        raise ConfigError(f"The waiver {path} cannot be used: {str(error).rstrip('.')}") from error
    waiver.require_valid()
    return waiver


def read_policy(path: str | None) -> Policy:
    """Return the checked policy of a YAML file, or the default policy; what a file leaves out has its default."""
    if path is None:
        return Policy()
    return policy_of(read_file(Path(path), parameter="policy"), path)


def policy_of(content: Mapping[str, Any], where: str) -> Policy:
    """Return the checked policy of what a file or a dictionary holds; `where` names that in messages.

    `format` is the number of its format: 1 where it is not given. One that this version does not know is refused.
    """
    fix = "Write it as `mlflow-compress promote policy` prints it"
    found = content.get("format", 1)
    content = upgraded("The policy", content, found, POLICY_FORMAT, got=where, error=ConfigError, fix=fix)
    content = {name: value for name, value in content.items() if name != "format"}
    if not all(isinstance(name, str) for name in content):
        raise ConfigError(
            f"The policy {where} has a key that is no text", allowed=Policy.model_fields, got=list(content)
        )
    try:
        return Policy(**content)
    except ConfigError as error:
        raise ConfigError(f"The policy {where} cannot be used: {str(error).rstrip('.')}") from error


def policy_yaml(policy: Policy, *, comments: bool = True) -> str:
    """Return a policy as YAML that `read_policy` reads back, every value named.

    With `comments` the values are explained, and the text says its format. Without, it is what the hash is taken of.
    """
    head = (
        "# A promotion policy. A value that is left out has its default; `mlflow-compress promote policy` prints all "
        f"defaults.\nformat: {POLICY_FORMAT}\n"
    )
    return (head if comments else "") + "\n".join(_lines(policy, comments, "")) + "\n"


def _lines(group: Group, comments: bool, indent: str) -> list[str]:
    lines = []
    for name, field in type(group).model_fields.items():
        value = getattr(group, name)
        if comments:
            lines += [f"{indent}# {line}" for line in wrap(str(field.description), 100)]
        if isinstance(value, Group):
            lines += [f"{indent}{name}:", *_lines(value, comments, indent + "  ")]
        elif isinstance(value, tuple) and value and isinstance(value[0], Group):
            lines += [f"{indent}{name}:", *(f"{indent}  - {_flow(entry)}" for entry in value)]
        else:
            lines.append(f"{indent}{name}: {_flow(list(value) if isinstance(value, tuple) else value)}")
    return lines


def _flow(value: object) -> str:
    """Return a value on one line of YAML; of a group, what differs from its defaults."""
    import yaml  # type: ignore[import-untyped]

    shown = value.model_dump(exclude_defaults=True, mode="json") if isinstance(value, Group) else value
    text = yaml.safe_dump("none" if shown is None else shown, default_flow_style=True, sort_keys=False, width=10_000)
    return str(text).removesuffix("\n").removesuffix("...").strip()
