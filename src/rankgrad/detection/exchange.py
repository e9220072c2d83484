"""Give a part of a torchvision model methods of ours, and take them back: its class is exchanged, nothing else."""

from __future__ import annotations

from typing import Any


class Exchanged:
    """Methods of ours, mixed into the class of a part: torchvision's, or a user's subclass of it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made at run time: a pickle names the two it was made of."""
        reduced: Any = super().__reduce_ex__(2)
        return _empty, _MADE_OF[type(self)], *reduced[2:]


_MADE_OF: dict[type, tuple[type, type]] = {}


def exchanged(kind: type, ours: type) -> type:
    """The class of a part with our methods."""
    for made, parts in _MADE_OF.items():
        if parts == (kind, ours):
            return made
    made = type(f"Ranking{kind.__name__}", (ours, kind), {})
    _MADE_OF[made] = kind, ours
    return made


def original(kind: type) -> type:
    """The class of a part before the exchange."""
    return _MADE_OF[kind][0]


def _empty(kind: type, ours: type) -> Any:
    made: Any = exchanged(kind, ours)
    return made.__new__(made)
