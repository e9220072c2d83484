"""The gradient with a fixed score window: every relevant item looks equally far up. Plain torch, any device.

Algorithm 1 moves the score of the relevant item i by lambda times its slope, so an item that stands badly (a
small slope) hardly looks beyond itself. Give every item a lambda of its own, ``window / slope_i``, and all of them
move by ``window``. Then they keep their order among themselves, and with ``y`` the scores after the margin

    grad_i = -slope_i / window * (irrelevant j with y_i <= y_j < y_i + window)
    grad_j = sum over the relevant i with y_i <= y_j < y_i + window of slope_i / window

Sorted best first, the relevant items that j stands at or above begin at one place before the move and at a later
one after it: the sum is a difference of two prefix sums of slopes.
"""

import torch
from torch import Tensor

from rankgrad.engine.precision import compute_dtype
from rankgrad.engine.reference import shifted


def window_gradient(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    margin: float,
    position: Tensor,
    slopes: Tensor,
    window: float,
) -> Tensor:
    """Gradient of every list's loss.

    Args:
        scores: ``[calls, lists, n]``.
        relevance: bool.
        mask: bool, or None if all items exist.
        margin: Score margin.
        position: From :func:`rankgrad.engine.reference.relevant_ranks`.
        slopes: d(list loss)/d(rank) of the item in each slot, 0 in empty ones; float64 ``[calls, lists, n]``.
        window: How far each relevant item looks up.

    Returns:
        ``[calls, lists, n]`` in the compute dtype, 0 for items that do not exist.
    """
    n = scores.shape[-1]
    relevant = relevance if mask is None else relevance & mask
    others = ~relevance if mask is None else ~relevance & mask
    y = shifted(scores, relevant, margin)
    filled = position < n
    # Negated, so that best first is ascending, as searchsorted wants it; empty slots behind everything.
    levels = -y.gather(-1, position.clamp(max=max(n - 1, 0))).masked_fill(~filled, -torch.inf)
    moved = -(-levels + torch.full((), window, dtype=y.dtype, device=y.device)).masked_fill(~filled, -torch.inf)

    def places(best_first: Tensor) -> Tensor:
        """How many relevant items stand strictly above each item."""
        return torch.searchsorted(best_first.contiguous(), (-y).contiguous())

    def at_or_above(place: Tensor) -> Tensor:
        """Irrelevant items at or above each slot."""
        ones = others.to(torch.int64)
        return ones.new_zeros(*place.shape[:-1], n + 1).scatter_add(-1, place, ones).cumsum(-1)[..., :n]

    before, after = places(levels), places(moved)
    passed = at_or_above(before) - at_or_above(after)
    pull = slopes / window
    sums = torch.nn.functional.pad(pull.cumsum(-1), (1, 0))
    gradient = (sums.gather(-1, after) - sums.gather(-1, before)).where(others, 0)
    gradient = torch.nn.functional.pad(gradient, (0, 1))  # one more place, where empty slots write
    gradient = gradient.scatter(-1, position, -(pull * passed).where(filled, 0))
    return gradient[..., :n].to(compute_dtype(scores.dtype)).contiguous()
