"""What every configuration is made of: groups of parameters, and commands that are composed of groups.

A command has its parameters under one flat list of names, as a command line has, while code reads them by group:
``EvaluateConfig(model="demo", limit=20)`` is ``config.source.model`` and ``config.evaluation.limit``.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic.fields import Field, FieldInfo

from mlflow_compress.config.old_names import renamed
from mlflow_compress.config.validation_errors import one_error

EMBEDDED = "demo"  # the model, tasks and texts that ship with the package

NONE = "none"
"""How a parameter that has no value is written: there is none. (`None` in Python.)"""

AUTO = "auto"
"""How a parameter is written whose value is chosen for the user: the method's default, the demo's tasks."""

PathKind = Literal["file", "folder", "either", "files", "program"]


def option(default: Any, description: str, *, path: PathKind | None = None, **bounds: Any) -> Any:
    """Declare a parameter: its default, its one-line help, its bounds, and what path it may hold.

    `path` is "files" for a comma-separated list, and "program" for a file whose links are not followed: the Python of
    a virtual environment is a link. `mlflow_compress.paths` reads it.
    """
    return Field(default, description=description, json_schema_extra={"path": path} if path else None, **bounds)


def _nothing(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() in ("", NONE) else value


def _joined(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _pairs(value: object) -> object:
    """Read "name=value,name=value" as lm-evaluation-harness reads `model_args`."""
    if isinstance(value, dict):
        return {name: as_typed(part) for name, part in value.items()}
    if not isinstance(value, str):
        return {} if value is None else value
    pairs: dict[str, str] = {}
    for part in [] if _nothing(value) is None else value.split(","):
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if not (name and equals and text):
            raise ValueError("name=value,name=value")
        if name in pairs:
            raise ValueError(f"every name once, and {name} is there twice")
        pairs[name] = text
    return pairs


def as_typed(value: object) -> str:
    """Return a value as a user would type it."""
    if value is None or value == {}:
        return NONE
    if isinstance(value, dict):
        return ",".join(f"{name}={as_typed(part)}" for name, part in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)


OrNone = BeforeValidator(_nothing)
Names = Annotated[str, BeforeValidator(_joined)]
"""Names separated by commas; a Python list of them does too."""

Pairs = Annotated[dict[str, str], BeforeValidator(_pairs)]
"""Settings by name: a dictionary, or "name=value,name=value"."""

OptionalText = Annotated[str | None, OrNone]
OptionalNames = Annotated[str | None, OrNone, BeforeValidator(_joined)]


class _Checked(BaseModel):
    """Frozen, with strict names, and one clear `ConfigError` for whatever is wrong."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise one_error(error, self._names()) from None

    @classmethod
    def _names(cls) -> list[str]:
        """Return the names of the parameters."""
        return list(cls.model_fields)


class Group(_Checked):
    """Parameters that belong together."""


class Command(_Checked):
    """Every parameter of one command: its own, and those of its groups."""

    experiment: str = option(
        AUTO, "MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress'"
    )

    @model_validator(mode="before")
    @classmethod
    def _sort_into_groups(cls, given: Any) -> Any:
        """Put parameters that are given by their flat names into the groups that declare them."""
        sorted_: dict[str, Any] = {}
        groups = dict(_groups(cls))
        for name, value in renamed(dict(given), parameters(cls)).items():
            owner = next((group for group, kind in groups.items() if name in kind.model_fields), None)
            if owner is None or name in cls.model_fields:
                sorted_[name] = value
            else:
                sorted_.setdefault(owner, {})[name] = value
        return sorted_

    @classmethod
    def _names(cls) -> list[str]:
        return list(parameters(cls))

    def values(self) -> dict[str, Any]:
        """Return every parameter by its flat name."""
        found: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Group):
                found |= {inner: getattr(value, inner) for inner in type(value).model_fields}
            else:
                found[name] = value
        return found

    def with_values(self, **changes: Any) -> Self:
        """Return a copy with other values, by flat names, checked like those of a new one."""
        return type(self)(**{**self.values(), **changes})


def like(owner: type[_Checked], name: str) -> Any:
    """Return the declaration of a parameter that another command or group has too: its default, help, bounds, path."""
    return copy(owner.model_fields[name])


def _groups(cls: type[Command]) -> Iterator[tuple[str, type[Group]]]:
    for name, field in cls.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
            yield name, field.annotation


def parameters(cls: type[Command]) -> dict[str, FieldInfo]:
    """Return the declaration of every parameter of a command, by its flat name and in the order of the help."""
    groups = dict(_groups(cls))
    found: dict[str, FieldInfo] = {}
    # What every command has comes last.
    for name, field in sorted(cls.model_fields.items(), key=lambda item: item[0] in Command.model_fields):
        found |= groups[name].model_fields if name in groups else {name: field}
    return found


def path_kind(field: FieldInfo) -> PathKind | None:
    """Return what path a parameter may hold, or None where it holds none."""
    extra = field.json_schema_extra
    return extra.get("path") if isinstance(extra, dict) else None  # type: ignore[return-value]


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the values that a parameter accepts, where it is one of a few words; otherwise nothing."""
    kind = field.annotation
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()
