"""What every configuration is made of: groups of parameters, and commands that are composed of groups.

A command has its parameters under one flat list of names, as a command line has, while code reads them by group:
``EvaluateConfig(model="demo", limit=20)`` is ``config.source.model`` and ``config.evaluation.limit``.
"""

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic.fields import Field, FieldInfo

from mlflow_compress.errors import ConfigError, nearest
from mlflow_compress.files import read_yaml

Details = Mapping[str, Any]  # one entry of `ValidationError.errors()`

_KINDS = {"int": "a whole number", "float": "a number", "finite": "a number", "bool": "a switch", "string": "text"}


def one_error(error: ValidationError, known: Mapping[str, FieldInfo]) -> ConfigError:
    """Return every name that no parameter has; where each is `known`, the first value that is wrong."""
    details = error.errors(include_url=False)
    first = details[0]
    names = [str(part) for part in first["loc"] if part in known]
    unknown = [str(detail["loc"][-1]) for detail in details if detail["type"] == "extra_forbidden"]
    if len(unknown) > 1:
        near = [f"'{near}' for '{name}'" for name in unknown for near in nearest(name, list(known))]
        fix = f"Did you mean {', '.join(near)}?" if near else None
        return ConfigError("Unknown parameters", allowed=list(known), got=", ".join(unknown), fix=fix)
    if unknown:
        return ConfigError("Unknown parameter", allowed=list(known), got=unknown[0])
    name = names[-1] if names else str(first["loc"][-1])
    same = [detail for detail in details if name in detail["loc"]]
    return _wrong_value(named(name, known.get(name)), first, same)


def named(name: str, field: FieldInfo | None) -> str:
    """Return how an error names a parameter: as people give it."""
    together = None if field is None else _extra(field, "within")
    return f"Parameter '{name}'" if together is None else f"Setting '{together.setting(name)}' of '{together.name}'"


def _wrong_value(what: str, first: Details, same: Sequence[Details]) -> ConfigError:
    """Return the error for one value; of a parameter that accepts several types, `same` has an entry per type."""
    value = first["input"]
    # The text of a model or of a table is no help.
    plain = isinstance(value, str | int | float | list | tuple | dict | NoneType)
    got = value if plain else type(value).__name__
    context = first.get("ctx", {})
    literal = next((detail for detail in same if detail["type"] == "literal_error"), None)
    kind = _KINDS.get(same[0]["type"].split("_")[0])
    if literal is not None and len(same) > 1:  # a number or a word
        other = next(detail for detail in same if detail is not literal)
        number = _KINDS.get(other["type"].split("_")[0]) or _bound(other)
        return ConfigError(f"{what} has the wrong type or size", allowed=f"{_words(literal)}, or {number}", got=got)
    if literal is not None:
        return ConfigError(f"{what} has an unknown value", allowed=_words(literal), got=got)
    if first["type"].startswith(("greater_than", "less_than")):
        size = "small" if first["type"].startswith("greater") else "large"
        return ConfigError(f"{what} is too {size}", allowed=_bound(first), got=got)
    if first["type"] == "value_error":
        return ConfigError(f"{what} cannot be read", allowed=str(context.get("error", first["msg"])), got=got)
    if kind == "a switch":
        return ConfigError(f"{what} is a switch", allowed=("true", "false"), got=got)
    if kind is not None:
        return ConfigError(f"{what} must be {kind}", got=got)
    return ConfigError(f"{what} cannot be used: {first['msg']}", got=got)


def _words(detail: Details) -> str:
    return str(detail["ctx"]["expected"]).replace("'", "").replace(" or ", ", ")


def _bound(detail: Details) -> str:
    bounds = {"ge": "{} or more", "gt": "more than {}", "le": "{} or less", "lt": "below {}"}
    context = detail.get("ctx", {})
    return next((words.format(context[name]) for name, words in bounds.items() if name in context), "another value")


EMBEDDED = "demo"  # the model, tasks and texts that ship with the package

NONE = "none"
"""How a parameter that has no value is written: there is none. (`None` in Python.)"""

AUTO = "auto"
"""How a parameter is written whose value is chosen for the user: the method's default, the demo's tasks."""

PathKind = Literal["file", "folder", "either", "files", "program"]


@dataclass(frozen=True)
class Together:
    """Parameters that few people set, given as the settings of one: ``judge_args=timeout=60,attempts=5``."""

    name: str  # Ends in "_args"
    description: str  # One line for the help

    def setting(self, parameter: str) -> str:
        """Return what a parameter is called here: "timeout" for "judge_timeout" in "judge_args"."""
        return parameter.removeprefix(self.name.removesuffix("args"))


def option(
    default: Any, description: str, *, path: PathKind | None = None, within: Together | None = None, **bounds: Any
) -> Any:
    """Declare a parameter: its default, its one-line help, its bounds, what path it may hold, and where it is given.

    `path` is "files" for a comma-separated list, and "program" for a file whose links are not followed: the Python of
    a virtual environment is a link. `mlflow_compress.paths` reads it.
    """
    extra: dict[str, Any] = {key: value for key, value in (("path", path), ("within", within)) if value is not None}
    return Field(default, description=description, json_schema_extra=extra or None, **bounds)


def _nothing(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() in ("", NONE) else value


def _joined(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _pairs(value: object, *, between: str = ",") -> object:
    """Read "name=value,name=value" as lm-evaluation-harness reads `model_args`; `between` is a pattern."""
    if isinstance(value, Mapping):
        return {name: as_typed(part) for name, part in value.items()}
    if not isinstance(value, str):
        return {} if value is None else value
    pairs: dict[str, str] = {}
    for part in [] if _nothing(value) is None else re.split(between, value):
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if not (name and equals and text):
            raise ValueError("name=value,name=value")
        if name in pairs:
            raise ValueError(f"every name once, but {name} occurs twice")
        pairs[name] = text
    return pairs


def _in_words(value: object) -> object:
    if str(value).lower() in ("true", "false", "1", "0"):
        raise ValueError("a reason in words, or none")
    return value


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

Target = Literal["any", "vllm", "vllm-cpu", "llama.cpp", "transformers"]
"""Who is to serve a checkpoint."""

OptionalText = Annotated[str | None, OrNone]
OptionalReason = Annotated[str | None, OrNone, BeforeValidator(_in_words)]
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
            raise one_error(error, self._fields()) from None

    @classmethod
    def _fields(cls) -> dict[str, FieldInfo]:
        return cls.model_fields


class Group(_Checked):
    """Parameters that belong together."""


class Parameters(_Checked):
    """Every parameter of one command: its own, and those of its groups."""

    experiment: str = option(
        AUTO, "MLflow experiment of the runs; 'auto' is MLFLOW_EXPERIMENT_NAME, or else 'mlflow-compress'"
    )

    @model_validator(mode="before")
    @classmethod
    def _sort_into_groups(cls, data: Any) -> Any:
        """Put parameters that are given by their flat names into the groups that declare them."""
        sorted_: dict[str, Any] = {}
        known = groups(cls)
        for name, value in dict(data).items():
            owner = next((group for group, kind in known.items() if name in kind.model_fields), None)
            if owner is None or name in cls.model_fields:
                sorted_[name] = value
            else:
                sorted_.setdefault(owner, {})[name] = value
        return sorted_

    @classmethod
    def _fields(cls) -> dict[str, FieldInfo]:
        return parameters(cls)

    @property
    def computes_here(self) -> bool:
        """Whether this machine's devices are used: a plan says what others would do."""
        return True

    def require_known(self) -> None:
        """Refuse what the command's own parameters name and is not there; those of its groups are checked with it."""

    def values(self) -> dict[str, Any]:
        """Return every parameter by its flat name."""
        by_name: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Group):
                by_name |= {inner: getattr(value, inner) for inner in type(value).model_fields}
            else:
                by_name[name] = value
        return by_name

    def with_values(self, **changes: Any) -> Self:
        """Return a copy with other values, by flat names, checked like those of a new one."""
        return type(self)(**{**self.values(), **changes})

    def of_stage(self, stage: "type[C]", **changes: Any) -> "C":
        """Return the parameters of another command that is a part of this one; `experiment` is not passed on."""
        values = self.values()
        shared = parameters(stage).keys() & values.keys() - Parameters.model_fields.keys()
        return stage(**{**{name: values[name] for name in shared}, **changes})


def like(owner: type[_Checked], name: str) -> Any:
    """Return the declaration of a parameter that another command or group has too: its default, help, bounds, path."""
    return copy(owner.model_fields[name])


def groups(cls: type[Parameters]) -> dict[str, type[Group]]:
    """Return the groups of a command by the names of its fields."""
    kinds = {name: field.annotation for name, field in cls.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Group)}


def parameters(cls: type[Parameters]) -> dict[str, FieldInfo]:
    """Return the declaration of every parameter of a command, by its flat name and in the order of the help."""
    known = groups(cls)
    fields: dict[str, FieldInfo] = {}
    # What every command has comes last.
    for name, field in sorted(cls.model_fields.items(), key=lambda item: item[0] in Parameters.model_fields):
        fields |= known[name].model_fields if name in known else {name: field}
    return fields


def path_kind(field: FieldInfo) -> PathKind | None:
    """Return what path a parameter may hold, or None where it holds none."""
    return _extra(field, "path")  # type: ignore[no-any-return]


def _extra(field: FieldInfo, name: str) -> Any:
    extra = field.json_schema_extra
    return extra.get(name) if isinstance(extra, dict) else None


def given_parameters(cls: type[Parameters]) -> dict[str, FieldInfo]:
    """Return what people give: `parameters`, with one declaration of each `Together` in place of its settings."""
    shown: dict[str, FieldInfo] = {}
    for name, field in parameters(cls).items():
        together = _extra(field, "within")
        if together is None:
            shown[name] = field
        elif together.name not in shown:
            shown[together.name] = FieldInfo(annotation=Pairs, default={}, description=together.description)
    return shown


def settings_within(cls: type[Parameters], name: str) -> dict[str, str]:
    """Return the parameters that are given together under this name, by what they are called there."""
    known = {parameter: _extra(field, "within") for parameter, field in parameters(cls).items()}
    return {held.setting(parameter): parameter for parameter, held in known.items() if held and held.name == name}


def expanded(cls: type[Parameters], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what people gave, by the names of `parameters`."""
    known = parameters(cls)
    together = {held.name: held for field in known.values() if (held := _extra(field, "within"))}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in known and (held := _extra(known[name], "within")):
            raise ConfigError(
                f"Parameter '{name}' is a setting of '{held.name}'",
                got=f"{name}={as_typed(value)}",
                fix=f"Give {held.name}={held.setting(name)}={as_typed(value)}",
            )
        if name not in together:
            values[name] = value
            continue
        settings = settings_within(cls, name)
        try:
            pairs = _pairs(value, between=",(?=[^,]*=)")  # a path may hold a comma
        except ValueError as error:
            raise ConfigError(f"Parameter '{name}' cannot be read", allowed=str(error), got=value) from None
        if not isinstance(pairs, dict):
            raise ConfigError(f"Parameter '{name}' cannot be read", allowed="name=value,name=value", got=value)
        for setting, text in pairs.items():
            if setting not in settings:
                raise ConfigError(f"Parameter '{name}' has no such setting", allowed=list(settings), got=setting)
            values[settings[setting]] = text
    return values


def as_given(config: Parameters) -> dict[str, str]:
    """Return every parameter as people would give it: `expanded` and `parse` read it back."""
    text, known = as_text(config), parameters(type(config))
    given: dict[str, str] = {}
    for name in given_parameters(type(config)):
        if name in text:
            given[name] = text[name]
            continue
        settings = settings_within(type(config), name)
        changed = {
            setting: text[held] for setting, held in settings.items() if text[held] != as_typed(known[held].default)
        }
        given[name] = as_typed(changed)
    return given


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the values that a parameter accepts, where it is one of a few words; otherwise nothing."""
    kind = field.annotation
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


C = TypeVar("C", bound=Parameters)

_NAME_BYTES, _PATH_BYTES = 255, 4095  # longest name of a file or folder, longest path
_PROSE = ("system_prompt", "reason")  # parameters that are neither names nor paths


def parse(cls: type[C], values: Mapping[str, Any]) -> C:
    """Return the configuration of a command, from text or Python values by the names of `parameters`.

    "config" names a YAML file of what people give (see `expanded`), before which these values go.
    """
    known = parameters(cls)
    given = dict(values)
    file = given.pop("config", NONE)
    if str(file) not in ("", NONE):
        given = {**expanded(cls, read_file(Path(str(file)))), **given}
    for name, value in given.items():
        if name not in known:
            raise ConfigError("Unknown parameter", allowed=given_parameters(cls), got=name)
        if isinstance(value, str) and name not in _PROSE:
            check_text(name, value)
    return cls(**given)


def read_file(path: Path, *, parameter: str = "config") -> dict[str, Any]:
    """Return the values of a YAML file, by name; `parameter` is the one that names the file."""
    content = read_yaml(path, parameter=parameter)
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        what = f"The file of parameter '{parameter}' has no names"
        raise ConfigError(what, allowed="lines of 'name: value'", got=str(path))
    return content


def as_text(config: Parameters) -> dict[str, str]:
    """Return each of `parameters` as the text that `parse` reads back."""
    return {name: as_typed(value) for name, value in config.values().items()}


def check_text(name: str, text: str) -> None:
    """Refuse a parameter's text (names, paths, or several) that no file system and no hub has a name for."""
    if "\0" in text:
        raise ConfigError(f"Parameter '{name}' holds a NUL character", got=text[:_NAME_BYTES])
    for most, separators in ((_NAME_BYTES, "[/,]"), (_PATH_BYTES, ",")):
        n_bytes = max(len(part.encode()) for part in re.split(separators, text))
        if n_bytes > most:
            what = "name" if most == _NAME_BYTES else "path"
            raise ConfigError(
                f"Parameter '{name}' holds a {what} that is too long", allowed=f"{most} bytes", got=f"{n_bytes:,} bytes"
            )
