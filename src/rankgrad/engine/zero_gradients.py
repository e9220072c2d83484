"""A warning, once, where nearly all lists have a loss and no gradient: their reach is too short to learn from.

On a CPU only, where reading a gradient waits for no device, and in calls 1, 2, 4, 8, ...: what is wrong with the
settings is wrong in all of them, and checking every gradient would cost a few percent.
"""

import warnings

from torch import Tensor

MOST_SCORES = 1 << 20
FEWEST_ITEMS = 32  # items with a slope that a call must have: in a tiny one it may be chance
NEARLY_ALL = 0.95  # of the lists with a loss


class _Seen:
    calls = 0
    warned = False


def is_due(scores: Tensor) -> bool:
    """Count a call, and say whether it is one to check."""
    _Seen.calls += 1
    return not _Seen.warned and not _Seen.calls & (_Seen.calls - 1) and scores.numel() <= MOST_SCORES


def warn_if_mostly_zero(with_loss: Tensor, with_gradient: Tensor, reach: str, strength: float) -> None:
    """Warn if nearly all lists with a loss have no gradient.

    Args:
        with_loss: bool, for each list: whether it has a loss that another reach could lower.
        with_gradient: bool, for each list: whether an item of it has a gradient.
        reach, strength: As in :class:`rankgrad.reach.Reach`.
    """
    lists, without = int(with_loss.sum()), int((with_loss & ~with_gradient).sum())
    if not without or without < NEARLY_ALL * lists:
        return
    _Seen.warned = True
    if reach == "share":
        remedy = "try a larger window, in units of the scores"
    else:
        name = "lam" if reach == "lam" else "window"
        remedy = (
            f"try a larger {name} (received {strength:g}), or neither lam nor window: the reach is then "
            "taken from the scores"
        )
    warnings.warn(
        f"rankgrad: {without:,} of {lists:,} lists with a loss have no gradient: nothing that an item should pass "
        f"is within its reach; {remedy}",
        stacklevel=2,
    )
