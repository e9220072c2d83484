"""A warning, once, where nearly all lists have a loss and no gradient: their reach is too short to learn from.

On a CPU only, where reading a gradient waits for no device, and in calls 1, 2, 4, 8, ...: what is wrong with the
settings is wrong in all of them, and checking every gradient would cost a few percent.
"""

import warnings

from rankgrad.engine.layouts import layout_of
from rankgrad.engine.request import Answer, Request

MOST_SCORES = 1 << 20
FEWEST_RELEVANT = 32  # relevant items a call must have: in a tiny one it may be chance
NEARLY_ALL = 0.95  # of the lists with a loss


class _Seen:
    calls = 0
    warned = False


def warn_if_zero(request: Request, answer: Answer) -> None:
    """Count a call, and warn if it is one to check and its gradient is zero nearly everywhere."""
    _Seen.calls += 1
    if _Seen.warned or _Seen.calls & (_Seen.calls - 1) or request.scores.numel() > MOST_SCORES:
        return
    if int(request.relevance.count_nonzero()) < FEWEST_RELEVANT:
        return
    to_learn = answer.losses > 0
    moved = layout_of(request).total((answer.gradient != 0).long()) > 0
    lists, still = int(to_learn.sum()), int((to_learn & ~moved).sum())
    if not still or still < NEARLY_ALL * lists:
        return
    _Seen.warned = True
    if request.reach == "share":
        remedy = "try a larger window, in units of the scores"
    else:
        name = "lam" if request.reach == "lam" else "window"
        remedy = (
            f"try a larger {name} (received {request.strength:g}), or neither lam nor window: the reach is then "
            "taken from the scores"
        )
    warnings.warn(
        f"rankgrad: {still:,} of {lists:,} lists with a loss have no gradient: no irrelevant item is within reach "
        f"of a relevant one; {remedy}",
        stacklevel=2,
    )
