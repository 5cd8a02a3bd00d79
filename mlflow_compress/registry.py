"""Named plug-ins: a decorator registers an object, the first look-up imports the package that holds them."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from mlflow_compress.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one kind by name.

    A new object is one new file in `package` with the `register` decorator: look-ups import every
    module of the package once, so nothing else has to be edited.

    Parameters
    ----------
    kind : str
        What the objects are, for messages ("compression method").
    package : str
        Dotted name of the package whose modules register themselves.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._objects: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that stores its argument under `name`; a second use of a name is a ValueError."""

        def decorate(obj: T) -> T:
            if name in self._objects:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._objects[name] = obj
            return obj

        return decorate

    def _load(self) -> None:
        if self._loaded:
            return
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self._package}.{module.name}")
        self._loaded = True

    def get(self, name: str) -> T:
        """Return the object called `name`, or raise `ConfigError` naming what exists and the nearest match."""
        self._load()
        if name not in self._objects:
            near = difflib.get_close_matches(name, self._objects, n=1)
            raise ConfigError(
                f"Unknown {self.kind}",
                allowed=self.names(),
                got=name,
                fix=f"Did you mean {near[0]!r}?" if near else None,
            )
        return self._objects[name]

    def names(self) -> list[str]:
        """Return every registered name, sorted."""
        self._load()
        return sorted(self._objects)

    def items(self) -> Iterator[tuple[str, T]]:
        """Iterate over (name, object), sorted by name."""
        for name in self.names():
            yield name, self._objects[name]
