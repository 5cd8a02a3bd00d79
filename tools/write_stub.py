"""Write `mlflow_compress/__init__.pyi`, what type checkers and editors read, from the registry of commands.

`setup.py` does so where a package is built or installed in place. Run it after a change of a command, to see it in an
editor.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

import mlflow_compress
from mlflow_compress.commands.command import Command, all_commands
from mlflow_compress.commands.compare.command import load
from mlflow_compress.commands.in_memory import TAKES_MODELS
from mlflow_compress.config import given_parameters
from mlflow_compress.config.declarations import Names, path_kind

STUB = Path(mlflow_compress.__file__).with_suffix(".pyi")
HEADER = '''"""Written by tools/write_stub.py from the registry of commands: what type checkers and editors read."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Literal, overload

from mlflow_compress.commands.command import PathOrText, PolicyLike, ResultOfRun, Say, StoreLike
from mlflow_compress.commands.in_memory import ModelInMemory, TaskRows
from mlflow_compress.commands.sweep.result import SweepProgress
'''
_LIST = get_args(Names)[1]  # the validator that joins a list by commas
_OVERLOADS = {
    "sweep": (
        "dry_run",
        {"Literal[False] = False": "Sweep", "Literal[True]": "SweepPlan", "bool": "Sweep | SweepPlan"},
    ),
    "search": ("repair", {"None = None": "Search", "str": "Repair", "str | None": "Search | Repair"}),
}
"""Functions whose result depends on a parameter: that parameter, and its types, each with the result."""

_NUMBERS = ("group_size", "bits_per_weight", "max_bytes", "max_kl")  # text that is often a number


def type_text(annotation: Any) -> str:
    """Return a type as a stub says it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(parts[0])
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(type_text(part) for part in parts))
    if origin is Literal:
        return f"Literal[{', '.join(map(_literal, parts))}]"
    if origin is dict:
        return "str | Mapping[str, object]"
    return "None" if annotation is NoneType else str(annotation.__name__)


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def parameter_type(name: str, declared: FieldInfo) -> str:
    """Return what Python may give for a parameter: more than its type where text stands for a list, path or number."""
    types = type_text(declared.annotation).split(" | ")
    if name == "policy":
        return "PolicyLike | None"
    if name == "bits":  # what a command line has read is text
        types = ["int", "str"]
    if types == ["bool"] or "Literal" in types[0]:
        return " | ".join(types)
    if path_kind(declared) is not None or name in TAKES_MODELS or name.startswith("output"):
        types.append("PathLike[str]")
    if any(isinstance(part, BeforeValidator) and part.func is _LIST.func for part in declared.metadata):
        types.append("Sequence[object]")
    if name in TAKES_MODELS:
        types.append("ModelInMemory")
    if name == "tasks":
        types.append("TaskRows")
    if name in _NUMBERS and "str" in types:
        types += ["int", "float"]
    return " | ".join(sorted(dict.fromkeys(types), key=lambda text: text == "None"))


def _written(function: Callable[..., Any]) -> dict[str, str]:
    """Return the types that stand in the function itself, as they are written there, by parameter, and of `return`."""
    node = ast.parse(inspect.getsource(function)).body[0]
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    types = {one.arg: one.annotation for one in (*given.args, *given.kwonlyargs, given.vararg) if one is not None}
    texts = {"return": node.returns, **types}
    return {
        name: str(kind.value) if isinstance(kind, ast.Constant) else ast.unparse(kind)
        for name, kind in texts.items()
        if kind is not None
    }


def function_text(function: Callable[..., Any], declared: dict[str, FieldInfo]) -> str:
    """Return a function of the front door with every parameter of its command written out, once per overload."""
    text = _one_text(function, declared)
    if function.__name__ not in _OVERLOADS:
        return text
    name, results = _OVERLOADS[function.__name__]
    head, documented, body = text.partition(':\n    """')
    texts = []
    for kind, result in results.items():
        lines = [f"    {name}: {kind}," if line.startswith(f"    {name}: ") else line for line in head.split("\n")]
        lines[-1] = f") -> {result}"
        texts.append("@overload\n" + "\n".join(lines) + (f"{documented}{body}" if not texts else ": ...\n"))
    return "\n".join(texts)


def _one_text(function: Callable[..., Any], declared: dict[str, FieldInfo]) -> str:
    written = _written(function)
    lines, star = [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            lines.append(f"*{name}: {written[name]}")
            star = True
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            lines.append("*")
            star = True
        kind = written[name] if name in written else parameter_type(name, declared[name])
        default = "" if parameter.default is parameter.empty else f" = {_literal(parameter.default)}"
        lines.append(f"{name}: {kind}{default}")
    doc = (inspect.getdoc(function) or "").partition("\nRaises\n")[0].partition("\nExamples\n")[0].rstrip()
    closing = "\n" if "\n" in doc else ""
    return (
        f"def {function.__name__}(\n"
        + "".join(f"    {line},\n" for line in lines)
        + f") -> {written['return']}:\n"
        + textwrap.indent(f'"""{doc}{closing}"""', "    ", lambda line: bool(line.strip()))
        + "\n"
    )


def stub() -> str:
    """Return the text of the stub."""
    besides = {name: module for name, module in mlflow_compress.BESIDES.items() if name != load.__name__}
    lines = [f"from mlflow_compress.{module} import {name} as {name}" for name, module in sorted(besides.items())]
    functions = {command.function.__name__: command for command in all_commands().values()}
    texts = {name: function_text(known.function, _declared(known)) for name, known in functions.items()}
    texts[load.__name__] = function_text(load, {})
    names = sorted([*besides, *texts, "__version__"])
    listed = "__all__ = [\n" + "".join(f'    "{name}",\n' for name in names) + "]\n"
    lines.append("from mlflow_compress.version import __version__ as __version__")
    return "\n".join([HEADER + "\n".join(lines) + "\n", listed, *(texts[name] for name in sorted(texts))])


def _declared(command: Command) -> dict[str, FieldInfo]:
    return {} if command.parameters is None else given_parameters(command.parameters)


if __name__ == "__main__":
    STUB.write_text(stub())
    print(STUB.name)
