"""What pydantic finds wrong, as the one clear error of this package: what, allowed, got, what to change."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from mlflow_compress.errors import ConfigError

Details = Mapping[str, Any]  # one entry of `ValidationError.errors()`

_KINDS = {"int": "a whole number", "float": "a number", "finite": "a number", "bool": "a switch", "string": "text"}


def one_error(error: ValidationError, known: list[str]) -> ConfigError:
    """Return the first thing that is wrong with the values of parameters, whose names are `known`."""
    details = error.errors(include_url=False)
    first = details[0]
    names = [str(part) for part in first["loc"] if part in known]
    if first["type"] == "extra_forbidden":
        return unknown_parameter(str(first["loc"][-1]), known)
    name = names[-1] if names else str(first["loc"][-1])
    same = [detail for detail in details if name in detail["loc"]]
    return _wrong_value(name, first, same)


def unknown_parameter(name: str, known: list[str]) -> ConfigError:
    """Return the error for a name that no parameter has, with the nearest one that there is."""
    near = difflib.get_close_matches(name, known, n=1)
    return ConfigError("Unknown parameter", allowed=known, got=name, fix=f"Did you mean '{near[0]}'?" if near else None)


def _wrong_value(name: str, first: Details, same: Sequence[Details]) -> ConfigError:
    """Return the error for one value; of a parameter that accepts several types, `same` has an entry per type."""
    got, what = first["input"], f"Parameter '{name}'"
    context = first.get("ctx", {})
    literal = next((detail for detail in same if detail["type"] == "literal_error"), None)
    kind = _KINDS.get(same[0]["type"].split("_")[0])
    if literal is not None and len(same) > 1:  # a number or a word
        other = next(detail for detail in same if detail is not literal)
        number = _KINDS.get(other["type"].split("_")[0]) or _bound(other)
        return ConfigError(f"{what} has the wrong type or size", allowed=f"{_words(literal)}, or {number}", got=got)
    if literal is not None:
        return ConfigError(f"{what} has an unknown value", allowed=_words(literal), got=got)
    if first["type"] in ("greater_than_equal", "greater_than"):
        return ConfigError(f"{what} is too small", allowed=_bound(first), got=got)
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
    context = detail.get("ctx", {})
    return f"{context['ge']} or more" if "ge" in context else f"more than {context.get('gt')}"
