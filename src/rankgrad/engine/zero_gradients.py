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


def warn_if_still(to_learn: Tensor, moved: Tensor, reach: str, strength: float) -> None:
    """Warn if nearly all lists ``to_learn`` from are not ``moved``; both bool, a value for each list.

    Args:
        reach, strength: As in :class:`rankgrad.reach.Reach`.
    """
    lists, still = int(to_learn.sum()), int((to_learn & ~moved).sum())
    if not still or still < NEARLY_ALL * lists:
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
        f"rankgrad: {still:,} of {lists:,} lists with a loss have no gradient: nothing that an item should pass "
        f"is within its reach; {remedy}",
        stacklevel=2,
    )
