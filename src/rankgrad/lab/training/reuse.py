"""Read data once for several runs of one command: a cache that lives as long as ``with shared():``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

#: What was read inside :func:`shared`, the last of each reader; None outside, where files may change in between.
_kept: dict[ReadOnce[..., Any], tuple[Hashable, Any]] | None = None


@contextmanager
def shared() -> Iterator[None]:
    """Inside, a reader that was called before with the same arguments gives the same object again."""
    global _kept
    if _kept is not None:
        yield
        return
    _kept = {}
    try:
        yield
    finally:
        _kept = None


class ReadOnce(Generic[P, T]):
    """A reader whose last result is kept inside :func:`shared`, for the same arguments."""

    def __init__(self, reader: Callable[P, T]) -> None:
        self._reader = reader
        update_wrapper(self, reader)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """What was read, or is read now."""
        if _kept is None:
            return self._reader(*args, **kwargs)
        found = self.kept(*args, **kwargs)
        if found is None:
            _kept.pop(self, None)  # not two data sets in memory at once
            found = self._reader(*args, **kwargs)
            _kept[self] = (_key(*args, **kwargs), found)
        return found

    def kept(self, *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What was read with these arguments before, or None."""
        key, found = (_kept or {}).get(self, (None, None))
        return cast(T, found) if key == _key(*args, **kwargs) else None


def _key(*args: Any, **kwargs: Any) -> Hashable:
    return args, tuple(sorted(kwargs.items()))


def read_once(reader: Callable[P, T]) -> ReadOnce[P, T]:
    """See :class:`ReadOnce`."""
    return ReadOnce(reader)
