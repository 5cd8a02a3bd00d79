"""Replaces what an object, a class or a module of a library does, for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from mlflow_compress.errors import UnsupportedError


@contextmanager
def replaced(owner: object, name: str, by: object, *, of: str | None = None) -> Iterator[None]:
    """Within this block, an attribute is another one; afterwards it is what it was.

    - `of`: The library whose inside it is, and its minor version that was read: "llmcompressor 0.14". Another one, or
      one that has no such attribute, is an `UnsupportedError`: it may do something else there.
    """
    if of is not None:
        library, _, read = of.partition(" ")
        found = version(library)
        if not found.startswith(f"{read}.") or not hasattr(owner, name):
            raise UnsupportedError(
                f"This version of {library} is not known: {name}, which is replaced in it, may have changed",
                allowed=f"{read}.*",
                got=found if hasattr(owner, name) else f"{found}, without {name}",
                fix=f"Run: pip install '{library}=={read}.*'",
            )
    own = name in vars(owner)
    before = vars(owner)[name] if own else None  # as it is stored: a static method stays one
    setattr(owner, name, by)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
