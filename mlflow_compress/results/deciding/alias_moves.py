"""What became of a registry alias: a rollback, and its history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlflow_compress.results.tabular import Tabular
from mlflow_compress.tracking.store import RunLink


@dataclass(frozen=True, kw_only=True)
class Rollback(Tabular):
    """An alias that went back to the version that had it before.

    Attributes
    ----------
    registered_model, alias : str
        What moved.
    variant, version : str
        Who has the alias now.
    replaced : str
        The version that had it.
    reason : str or None
        Why, as it was given.
    verdict : str
        What happened, in one sentence.
    run : RunLink
        The run that holds it.
    """

    registered_model: str
    alias: str
    variant: str
    version: str
    replaced: str
    reason: str | None
    verdict: str
    run: RunLink

    @property
    def summary(self) -> str:
        """What happened to the alias."""
        return self.verdict

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row."""
        named = ("registered_model", "alias", "variant", "version", "replaced", "reason")
        return [{name: getattr(self, name) for name in named}]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Tenure:
    """The time in which one version had an alias.

    Attributes
    ----------
    since, until : str, str or None
        Beginning and end in UTC (ISO 8601); until is None for the one that has it now.
    variant, version : str
        Who had it.
    by : {"promote", "rollback"}
        What gave it.
    run_id : str
        The run that gave it.
    policy_sha256 : str or None
        The policy that decided; None for a rollback.
    verdict : str
        What happened, in one sentence.
    """

    since: str
    until: str | None
    variant: str
    version: str
    by: Literal["promote", "rollback"]
    run_id: str
    policy_sha256: str | None
    verdict: str


@dataclass(frozen=True, kw_only=True)
class AliasHistory(Tabular):
    """Who had an alias when, newest first.

    Attributes
    ----------
    registered_model, alias : str
        Whose history it is.
    tenures : tuple of Tenure
        One per move of the alias.
    holder : str or None
        The version that has the alias in the registry now.
    remarks : tuple of str
        What the history does not know.
    """

    registered_model: str
    alias: str
    tenures: tuple[Tenure, ...]
    holder: str | None
    remarks: tuple[str, ...]

    @property
    def summary(self) -> str:
        """How often the alias moved, and who has it."""
        times = "once" if len(self.tenures) == 1 else f"{len(self.tenures)} times"
        has = "nobody has it now" if self.holder is None else f"version {self.holder} has it now"
        return f"'{self.alias}' of {self.registered_model} moved {times}; {has}"

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return one row per move, newest first."""
        return [asdict(tenure) for tenure in self.tenures]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, ready for JSON."""
        return asdict(self)
