"""Values that baseline and variant, or several variants, need: made once, and kept in memory meanwhile."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_values: ContextVar[dict[Hashable, Any] | None] = ContextVar("kept", default=None)  # None: nothing is kept


@contextmanager
def keeping() -> Iterator[None]:
    """Within this block, what `kept` returns stays in memory. Inner blocks share it; the last one frees it."""
    if keeps():
        yield
        return
    before = _values.set({})
    try:
        yield
    finally:
        _values.reset(before)


def keeps() -> bool:
    """Return whether values are kept now: keys that cost something are made only then."""
    return _values.get() is not None


def kept(key: Hashable, make: Callable[[], T]) -> T:
    """Return the value of this key. It is made now, unless it was made before in a block of `keeping`.

    The key has all that the value depends on. Nobody may change a value that is kept, except a budget, which is there
    to be shared, and the tokens of texts, to which further ones are added.
    """
    values = _values.get()
    if values is None:
        return make()
    if key not in values:
        values[key] = make()
    return values[key]  # type: ignore[no-any-return]
