"""Values that baseline and variant, or several variants, need: made once, and kept in memory meanwhile."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_values: dict[Hashable, Any] | None = None  # None outside of such a block: nothing is kept


@contextmanager
def keeping() -> Iterator[None]:
    """Within this block, what `kept` returns stays in memory. Inner blocks share it; the last one frees it."""
    global _values
    if _values is not None:
        yield
        return
    _values = {}
    try:
        yield
    finally:
        _values = None


def keeps() -> bool:
    """Return whether values are kept now: keys that cost something are made only then."""
    return _values is not None


def kept(key: Hashable, make: Callable[[], T]) -> T:
    """Return the value of this key. It is made now, unless it was made before in a block of `keeping`.

    The key has everything that the value depends on; its first part names what it is. Nobody may change a value that is
    kept, except a budget, which is there to be shared, and the tokens of texts, to which further ones are added.
    """
    if _values is None:
        return make()
    if key not in _values:
        _values[key] = make()
    return _values[key]  # type: ignore[no-any-return]
