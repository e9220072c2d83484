"""Replace the class of a torchvision submodule by a subclass with our methods, and restore it."""

from __future__ import annotations

from typing import Any


class Exchanged:
    """Base of our methods, which are mixed into the class of a submodule: torchvision's, or a user's subclass."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle names the two classes this one was made of at run time."""
        reduced: Any = super().__reduce_ex__(2)
        return _empty, _MADE_OF[type(self)], *reduced[2:]


_MADE_OF: dict[type, tuple[type, type]] = {}


def exchanged(kind: type, ours: type) -> type:
    """The subclass of ``kind`` that has the methods of ``ours``; the same one in every call."""
    for made, parts in _MADE_OF.items():
        if parts == (kind, ours):
            return made
    made = type(f"Ranking{kind.__name__}", (ours, kind), {})
    _MADE_OF[made] = kind, ours
    return made


def original(kind: type) -> type:
    """The class that :func:`exchanged` was given."""
    return _MADE_OF[kind][0]


def _empty(kind: type, ours: type) -> Any:
    made: Any = exchanged(kind, ours)
    return made.__new__(made)
