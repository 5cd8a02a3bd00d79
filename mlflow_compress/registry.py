"""Plug-ins by name: a decorator registers an object; the first look-up imports the modules that hold such objects."""

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, entry_points, packages_distributions
from types import FrameType
from typing import Generic, TypeVar

from mlflow_compress.errors import ConfigError, MlflowCompressError, machine_fault

T = TypeVar("T")


@cache
def _package_of(module: str, group: str | None) -> str:
    """Return the installed package that a module belongs to, with its version: "my-package 1.2"."""
    top = module.partition(".")[0]
    for entry in [] if group is None else entry_points(group=group):
        if entry.dist is not None and entry.module.partition(".")[0] == top:
            return f"{entry.dist.name} {entry.dist.version}"
    with suppress(PackageNotFoundError):
        return f"{distribution(top).name} {distribution(top).version}"
    for name in packages_distributions().get(top, ()):  # reads the files of every installed package
        return f"{name} {distribution(name).version}"
    return "no installed package"


@cache
def _broken_plugin(group: str) -> tuple[str, Exception] | None:
    """Import every entry point of a group once per process; return the first that fails, with its error."""
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value)):
        try:
            entry.load()
        except Exception as error:  # noqa: BLE001 - somebody else's code: `Registry` raises it with its origin
            package = "an unnamed package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
            return f"{entry.name} = {entry.value} of {package}", error
    return None


class Registry(Generic[T]):
    """Objects of one kind by name: the package's own, and those of installed plug-ins.

    A new object is one new file with the `register` decorator; nothing else has to be edited. The first look-up imports
    every module of `package`, then every entry point of `group`. Another Python package adds objects by an entry point
    that names a module of its own, whose decorators register them::

        [project.entry-points."mlflow_compress.metrics"]
        my_metric = "my_package.my_metric"

    - `kind`: What the objects are, for messages ("compression method").
    - `package`: Dotted name of the package whose modules register themselves.
    - `group`: Group of entry points that are imported too. Without it there are no plug-ins of this kind.
    - `of`: Class of the objects; another one is refused when it registers.
    - `inside`: Name of the module that is imported of each sub-package of `package`, in place of the modules of
      `package`.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        *,
        group: str | None = None,
        of: type[T] | None = None,
        inside: str | None = None,
    ) -> None:
        self.kind = kind
        self._package, self._group, self._of, self._inside = package, group, of, inside
        self._objects: dict[str, T] = {}
        self._modules: dict[str, str] = {}  # name -> module that registered it
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that stores its argument under `name`, which nobody else may use."""

        def decorate(obj: T) -> T:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_name != "<module>":
                frame = frame.f_back
            module = "unknown" if frame is None else str(frame.f_globals["__name__"])
            if name in self._objects:
                raise ValueError(f"{self.kind} {name!r} is registered twice: by {self._modules[name]} and by {module}")
            self._modules[name] = module
            if self._of is not None and not isinstance(obj, self._of):
                raise ConfigError(
                    f"The {self.origin(name)} is of the wrong class",
                    allowed=self._of.__name__,
                    got=type(obj).__name__,
                )
            self._objects[name] = obj
            return obj

        return decorate

    def _load(self) -> None:
        if self._loaded:
            return
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            name = f"{self._package}.{module.name}"
            if self._inside is None:
                importlib.import_module(name)
            elif module.ispkg and importlib.util.find_spec(f"{name}.{self._inside}") is not None:
                importlib.import_module(f"{name}.{self._inside}")
        broken = _broken_plugin(self._group) if self._group is not None else None
        if broken is not None:
            origin, error = broken
            raise ConfigError(
                f"A plug-in of the entry point group {self._group} cannot be loaded: "
                f"{type(error).__name__}: {str(error).rstrip('.')}",
                got=origin,
                fix="Repair or uninstall that package",
            ) from error
        self._loaded = True

    def origin(self, name: str) -> str:
        """Return whose an object is: "metric 'a/b' of my-package 1.2 (/.../my_package/my_metric.py)"."""
        module = self._modules[name]
        file = getattr(sys.modules.get(module), "__file__", None) or module
        return f"{self.kind} {name!r} of {_package_of(module, self._group)} ({file})"

    @contextmanager
    def blaming(self, name: str) -> Iterator[None]:
        """Raise what a plug-in's code raises as a `ConfigError` that names the plug-in, its package and its file.

        Clear errors pass as they are, and so do those of the machine and of this package's own objects.
        """
        try:
            yield
        except Exception as error:
            own = self._modules[name].partition(".")[0] == __name__.partition(".")[0]
            if own or isinstance(error, MlflowCompressError) or machine_fault(error) is not None:
                raise
            raise ConfigError(
                f"The {self.origin(name)} failed with {type(error).__name__}: {str(error).rstrip('.')}",
                fix="Repair or uninstall that package",
            ) from error

    def get(self, name: str) -> T:
        """Return the object called `name`, or raise `ConfigError` naming what exists and the nearest match."""
        self._load()
        if name not in self._objects:
            raise ConfigError(f"Unknown {self.kind}", allowed=self.names(), got=name)
        return self._objects[name]

    def names(self) -> list[str]:
        self._load()
        return sorted(self._objects)

    def items(self) -> Iterator[tuple[str, T]]:
        for name in self.names():
            yield name, self._objects[name]
