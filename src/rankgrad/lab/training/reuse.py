"""Read data once for several runs of one command: a cache that lives as long as ``with shared():``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: What was read inside :func:`shared`, the last of each reader; None outside, where files may change in between.
_kept: dict[Callable[..., Any], tuple[Hashable, Any]] | None = None


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


def read_once(reader: Callable[P, T]) -> Callable[P, T]:
    """A reader whose last result is kept inside :func:`shared`; its arguments must be hashable."""

    @wraps(reader)
    def reading(*args: P.args, **kwargs: P.kwargs) -> T:
        if _kept is None:
            return reader(*args, **kwargs)
        key = (args, tuple(sorted(kwargs.items())))
        if reader not in _kept or _kept[reader][0] != key:
            _kept.pop(reader, None)  # not two data sets in memory at once
            _kept[reader] = (key, reader(*args, **kwargs))
        found: T = _kept[reader][1]
        return found

    return reading
