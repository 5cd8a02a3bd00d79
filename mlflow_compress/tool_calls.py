"""Calls of tools that a model writes: reading them, validity against the schemas, and equality by type."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlflow_compress.errors import DataError

Tool = Mapping[str, Any]  # As OpenAI's `tools` lists it: {"type": "function", "function": {"name": ..., ...}}


@dataclass(frozen=True)
class CallForm:
    """How a chat template writes calls."""

    mark: str  # Text before the JSON of each call, as decoded text shows it; "" where an answer begins with the JSON
    first: str  # Text of the first token of an answer that begins with a call: there call or no call is decided
    end_tokens: frozenset[int] = frozenset()  # Close an answer


@dataclass(frozen=True)
class Call:
    """One call."""

    name: str
    arguments: Any  # An object, where it is valid


def read_calls(text: str, mark: str) -> tuple[Call | None, ...]:
    """Return the calls that an answer makes, None for one that is no JSON, and nothing where it makes none.

    A call is an object with `name` and `arguments` (or `parameters`), or a list of such objects, behind every `mark`;
    without a mark, only an answer that begins with JSON calls.
    """
    if not mark:
        return _read(text.lstrip()) if text.lstrip()[:1] in ("{", "[") else ()
    return tuple(call for part in text.split(mark)[1:] for call in _read(part.lstrip()))


def _read(text: str) -> tuple[Call | None, ...]:
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
        return tuple(map(_call, value if isinstance(value, list) else [value])) or (None,)
    except (ValueError, KeyError, TypeError, RecursionError):
        return (None,)


def _call(value: Any) -> Call:
    arguments = value["arguments"] if "arguments" in value else value["parameters"]
    if not isinstance(value["name"], str):
        raise TypeError
    return Call(value["name"], json.loads(arguments) if isinstance(arguments, str) else arguments)


def gold_calls(message: Mapping[str, Any]) -> list[Call]:
    """Return the calls of a message of an assistant in OpenAI's format."""
    try:
        calls = [_call(call.get("function", call)) for call in message.get("tool_calls") or []]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError("'tool_calls' are not of OpenAI's format", got=str(message)[:200]) from error
    if wrong := [call for call in calls if not isinstance(call.arguments, dict)]:
        raise DataError("The arguments of a call are no JSON object", got=str(wrong[0])[:200])
    return calls


def check_tools(tools: object) -> None:
    """Refuse what is no list of functions in OpenAI's format, or has a schema that is no JSON Schema."""
    # Imported here: it takes a tenth of a second, and few evaluations have tools.
    from jsonschema import SchemaError

    form = 'a list of {"type": "function", "function": {"name": ..., "parameters": JSON Schema}}'
    if not isinstance(tools, list) or not tools:
        raise DataError("'tools' must be a list that is not empty", allowed=form, got=str(tools)[:200])
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError("A tool is not of OpenAI's format", allowed=form, got=str(tool)[:200])
        schema = function.get("parameters", {})
        if elsewhere := re.findall(r'"\$(?:dynamicRef|ref)": "([^#"][^"]*)"', json.dumps(schema)):
            raise DataError(
                f"The parameters of the tool {function['name']!r} refer to another schema, which is not fetched",
                allowed="references within the schema, as '#/$defs/name'",
                got=elsewhere[0][:200],
            )
        try:
            _validator(json.dumps(schema, sort_keys=True))
        except (SchemaError, TypeError) as error:
            raise DataError(
                f"The parameters of the tool {function['name']!r} are no valid JSON Schema",
                allowed="JSON Schema, draft 2020-12 unless '$schema' says otherwise",
                got=str(getattr(error, "message", error))[:200],
            ) from error


@lru_cache(maxsize=4096)
def _validator(schema: str) -> Any:
    """Return the validator of a schema in JSON; one that is not valid is a `SchemaError`."""
    from jsonschema.validators import Draft202012Validator, validator_for

    read = json.loads(schema)
    kind = validator_for(read, default=Draft202012Validator)
    kind.check_schema(read)
    return kind(read)


def _schema(name: str, tools: Sequence[Tool]) -> Mapping[str, Any] | None:
    known = (tool["function"] for tool in tools)
    return next((function.get("parameters", {}) for function in known if function["name"] == name), None)


def is_valid(call: Call | None, tools: Sequence[Tool]) -> bool:
    """Return whether a call is of one of the tools, and its arguments are valid against the tool's schema."""
    if call is None or (schema := _schema(call.name, tools)) is None or not isinstance(call.arguments, dict):
        return False
    return bool(_validator(json.dumps(schema, sort_keys=True)).is_valid(call.arguments))


def same_calls(first: Sequence[Call | None], second: Sequence[Call | None], tools: Sequence[Tool]) -> bool:
    """Return whether two answers make equal calls, in any order; a call that is no JSON equals none.

    Equality is that of BFCL's syntax-tree match: the same function and the same arguments; texts without case, spaces
    and the signs ``,./-_*^``; numbers by type, so that 5.0 is no integer and true no number, but an integer stands for
    an argument of the type number. BFCL lists several accepted values per argument; here there is one.
    """
    if None in (*first, *second):
        return False
    counted = (Counter(_canonical(call, tools) for call in calls if call is not None) for calls in (first, second))
    return next(counted) == next(counted)


def _canonical(call: Call, tools: Sequence[Tool]) -> tuple[str, str]:
    properties = (_schema(call.name, tools) or {}).get("properties", {})
    if not isinstance(call.arguments, dict):
        return call.name, f"no object: {call.arguments}"
    values = {}
    for name, value in call.arguments.items():
        declared = properties.get(name)
        if isinstance(declared, dict) and declared.get("type") in ("number", "float") and type(value) is int:
            value = float(value)
        values[name] = _standard(value)
    return call.name, json.dumps(values, sort_keys=True)


def _standard(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"')
    if isinstance(value, list):
        return [_standard(one) for one in value]
    return {key: _standard(one) for key, one in value.items()} if isinstance(value, dict) else value
