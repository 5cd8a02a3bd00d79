"""How the functions of the Python front door read what they are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, TypeVar

from mlflow_compress.config import Command, parameters, parse
from mlflow_compress.config.declarations import AUTO
from mlflow_compress.errors import ConfigError
from mlflow_compress.paths import absolute_paths

if TYPE_CHECKING:
    from mlflow_compress.commands.quantize.result import CompressedModel
    from mlflow_compress.tracking.store import Store

C = TypeVar("C", bound=Command)
F = TypeVar("F", bound=Callable[..., Any])
StoreLike = str | PathLike[str] | None


def takes_parameters_of(cls: type[Command]) -> Callable[[F], F]:
    """Show the parameters of a command in the signature of a function, for `help` and editors."""

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        named = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        there = {p.name for p in named}
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
            for name, field in parameters(cls).items()
            if name not in there
        ]
        function.__signature__ = own.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
        return function

    return decorate


def configured(cls: type[C], given: dict[str, Any]) -> C:
    """Return checked parameters with absolute paths; a path object is its text."""
    values = {name: fspath(value) if isinstance(value, PathLike) else value for name, value in given.items()}
    return absolute_paths(parse(cls, values))


def opened_store(store: StoreLike, config: Command | None = None) -> Store | None:
    """Return the folder that keeps runs, or None for MLflow's tracking store, which a stage opens after its checks."""
    if store is None:
        return None
    if config is not None and config.experiment != AUTO:
        raise ConfigError(
            "A folder of runs has no experiments", got=config.experiment, fix="Give store or experiment, not both"
        )
    from mlflow_compress.tracking.folder_store import FolderStore

    return FolderStore(fspath(store))


def checkpoint_folder(checkpoint: CompressedModel | str | PathLike[str] | None) -> str | None:
    """Return the folder of a checkpoint that is given as a result or as a path."""
    from mlflow_compress.commands.quantize.result import CompressedModel

    if checkpoint is None:
        return None
    return fspath(checkpoint.folder if isinstance(checkpoint, CompressedModel) else checkpoint)
