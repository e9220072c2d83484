"""The reach (how far above itself a relevant item is compared) and the margin: numbers, or shares of a spread."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rankgrad import _check

#: Where neither ``lam`` nor ``window`` is given, the window is this share of the spread of the scores.
WINDOW_SHARE = 1.0
#: The margin ``"auto"`` is this share of the spread.
MARGIN_SHARE = 0.5

#: What the losses take as a margin: a number, or ``"auto"``.
Margin = float | str


class Reach(NamedTuple):
    """Which kind of reach, ``"lam"``, ``"window"`` or ``"share"`` (of the spread), and its number."""

    kind: str
    strength: float


def reach_of(lam: Any, window: Any, dtype: torch.dtype | None = None, *, share: float = WINDOW_SHARE) -> Reach:
    """Check ``lam`` and ``window``: one of them, or neither for the automatic reach.

    Args:
        dtype: The compute dtype, in which a window must be a number too; None if it is not known yet.
        share: Of the spread, for the automatic reach.
    """
    if lam is not None and window is not None:
        raise ValueError(f"lam, window: expected one of them, received lam={lam!r} and window={window!r}")
    for name, value in (("lam", lam), ("window", window)):
        if isinstance(value, str) and value == "auto":
            raise TypeError(
                f"{name}: expected a number, or None to take the reach from the scores, received 'auto'"
            )
    if lam is not None:
        return Reach("lam", _check.lam(lam))
    if window is None:
        return Reach("share", share)
    number = _check.positive("window", window)
    if not 1e-30 <= number <= _largest(dtype):
        raise _check.fail("window", f"a number from 1e-30 to {_largest(dtype):.1e}", window)
    return Reach("window", number)


class MarginValue(NamedTuple):
    """A number in units of the scores or, with ``is_share``, of their spread."""

    number: float
    is_share: bool


def margin_of(margin: Any, dtype: torch.dtype | None = None) -> MarginValue:
    """Check a margin; ``dtype`` as in :func:`reach_of`."""
    if isinstance(margin, str):
        if margin != "auto":
            raise _check.fail("margin", "a number >= 0 or 'auto'", margin)
        return MarginValue(MARGIN_SHARE, True)
    number = _check.non_negative("margin", margin)
    if number > _largest(dtype):
        raise _check.fail("margin", f"a number up to {_largest(dtype):.1e}", margin)
    return MarginValue(number, False)


def _largest(dtype: torch.dtype | None) -> float:
    return torch.finfo(torch.float64 if dtype is None else dtype).max


def text_of(lam: float | None, window: float | None, margin: Margin) -> str:
    """For the ``extra_repr`` of a Module."""
    given = [f"lam={lam}"] if lam is not None else [f"window={window}"] if window is not None else []
    return ", ".join([*given, f"margin={margin!r}"])
