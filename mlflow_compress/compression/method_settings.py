"""Builds a method's settings from parameters, which are often strings from the command line."""

from __future__ import annotations

import math
import re
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mlflow_compress.compression.method import METHODS, MethodConfig
from mlflow_compress.errors import ConfigError

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
