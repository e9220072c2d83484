"""Soft ranks by projection onto the permutahedron.

M. Blondel, O. Teboul, Q. Berthet, J. Djolonga: Fast differentiable sorting and ranking, ICML 2020 (in code:
fast-soft-sort, torchsort). Here with quadratic regularisation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankgrad import _check
from rankgrad.surrogates._lists import read_lists, read_scores
from rankgrad.surrogates._soft_ranks import average_precision_losses


def permutahedron_rank(scores: Tensor, *, epsilon: float = 1.0, mask: Tensor | None = None) -> Tensor:
    r"""Soft ranks: the point of the permutahedron nearest to the scaled scores.

    .. math:: \tilde r = \arg\min_{\mu \in \mathcal P(n, \dots, 1)} \tfrac12 \| \mu + s / \epsilon \|^2

    over the convex hull of all permutations of 1..n. Small ``epsilon`` gives the ranks themselves (and no
    gradient), large ``epsilon`` the mean rank for every item. The projection is a sort and an isotonic
    regression; the gradient is exact. Computed in float64.

    Args:
        scores: ``[..., n]``, higher is better.
        epsilon: Regularisation strength, > 0, in score units: distinct scores further apart than this rank
            exactly.
        mask: bool, broadcast to ``scores``; items that do not exist tie behind all others, without gradient.

    Returns:
        Soft ranks in the shape of ``scores``: 1 to n, their sum is n (n + 1) / 2.

    Example:
        >>> scores = torch.tensor([0.0, 5.0, 0.5], requires_grad=True)
        >>> ranks = rankgrad.surrogates.permutahedron_rank(scores)
        >>> ranks
        tensor([2.7500, 1.0000, 2.2500], grad_fn=...)
        >>> ranks[0].backward()
        >>> scores.grad
        tensor([-0.5000, -0.0000,  0.5000])

    Reference:
        Blondel et al., Fast differentiable sorting and ranking, ICML 2020.
    """
    lists = read_scores(scores, mask)
    return lists.ranks(_soft_ranks(lists.scores, lists.exists, epsilon))


def permutahedron_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    epsilon: float = 1.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""One minus average precision with the ranks of :func:`permutahedron_rank`.

    One list has the loss :math:`1 - \frac1p \sum_i r^+_i / \tilde r_i` over its relevant items, :math:`r^+_i`
    their exact ranks among themselves, held constant. O(n log^2 n) here (O(n log n) with a sequential isotonic
    regression).

    Args:
        scores: ``[..., n]``, higher is better.
        relevance: The same shape; bool, or 0 and 1.
        epsilon: As in :func:`permutahedron_rank`.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists that have something relevant, ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or ``[...]`` for ``"none"`` (0 for lists with nothing relevant).

    Example:
        >>> scores = torch.tensor([0.5, 0.0, -5.0])
        >>> rankgrad.surrogates.permutahedron_loss(scores, torch.tensor([False, True, False]))  # 1 - 1 / 1.75
        tensor(0.4286)

    Reference:
        Blondel et al., Fast differentiable sorting and ranking, ICML 2020.
    """
    lists = read_lists(scores, relevance, mask, reduction)
    ranks = _soft_ranks(lists.scores, lists.exists, epsilon)
    return lists.reduce(average_precision_losses(lists, ranks), reduction)


def _soft_ranks(scores: Tensor, exists: Tensor, epsilon: float) -> Tensor:
    epsilon = _check.positive("epsilon", epsilon)
    if scores.numel() == 0:
        return scores
    ranks: Tensor = _Projection.apply(-scores.double() / epsilon, exists)
    return ranks.to(scores.dtype)


class _Projection(torch.autograd.Function):
    """Projects each row of z onto the permutahedron of (m, ..., 1), m its existing items.

    With z sorted, largest first, that is ``z - v`` for the best non-increasing fit v of ``z - (m, ..., 1)``.
    The fit averages over blocks of neighbours, so its derivative does too.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, exists: Tensor) -> Tensor:
        n = z.shape[-1]
        count = exists.sum(-1, keepdim=True).double()
        z, order = z.where(exists, -torch.inf).sort(dim=-1, descending=True, stable=True)
        here = exists.gather(-1, order)
        # Only the gaps between neighbours matter, and none beyond n: nothing is averaged across such a gap. Cut
        # there, huge scores cannot absorb small ones in rounding. Items that do not exist follow at such gaps.
        gap = torch.where(here[:, 1:], z[:, :-1] - z[:, 1:], n + 1.0).clamp(max=n + 1.0)
        line = torch.arange(n, device=z.device)
        start, end = isotonic_blocks(_from_gaps(gap) + line)
        ctx.save_for_backward(order, start, end, here)
        inside = _from_gaps(gap.where(start[:, 1:] == start[:, :-1], 0))
        for _ in range(2):  # the second time takes away what the first, of large sums, has rounded
            inside = inside - _block_means(inside, start, end)
        ranks = inside + count - (start + end - 1).double() / 2
        return torch.empty_like(z).scatter_(-1, order, ranks.where(here, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        order, start, end, here = ctx.saved_tensors
        sorted_upstream = upstream.gather(-1, order).where(here, 0)
        gradient = sorted_upstream - _block_means(sorted_upstream, start, end)
        return torch.empty_like(upstream).scatter_(-1, order, gradient), None


def _from_gaps(gap: Tensor) -> Tensor:
    """Falling values that start at 0, from the ``n - 1`` gaps between them."""
    return F.pad(-gap.cumsum(-1), (1, 0)) if gap.shape[-1] else gap.new_zeros(len(gap), 1)


def _block_means(values: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Mean of ``values`` over ``[start, end)`` at every position."""
    sums = F.pad(values.cumsum(-1), (1, 0))
    mean = (sums.gather(-1, end) - sums.gather(-1, start)) / (end - start)
    # A block of one is its own mean, to the bit.
    return torch.where(end - start == 1, values, mean)


def isotonic_blocks(y: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks ``[start, end)`` over which the best non-increasing fit of y (least squares) averages.

    Pool adjacent violators by divide and conquer: the fits of neighbouring stretches are merged, all pairs of
    stretches of one length at once. A stretch is in order already, so a merge forms one block across the seam, of
    some value v: left values below v and right values above v join it, and v is where their pulls

        h(v) = sum over left of min(value - v, 0) + sum over right of max(value - v, 0)

    cancel. h falls, so a left value joins if h(value) > 0, a right one if h(value) < 0. O(log n) rounds of O(n
    log n) work, no host sync.

    Args:
        y: ``[rows, n]``, float64, n > 0.

    Returns:
        Two int64 tensors ``[rows, n]``.
    """
    rows, n = y.shape
    length = 1 << (n - 1).bit_length()
    place = torch.arange(length, device=y.device)
    # Fill up to a power of two with values that fall from below all others: they stay alone.
    tail = y.amin(-1, keepdim=True) - 1 - place[n:]
    value = plain = torch.cat([y, tail], -1)
    start = place.expand(rows, length)
    end = start + 1
    width = 1
    while width < length:
        halves, whole = (rows, -1, 2, width), (rows, -1, 2 * width)
        seam = place.view(-1, 2, width)[:, 1, :1]
        # Everything relative to the seam, sums from the seam outwards: accurate where the block may form.
        origin = plain.view(halves)[:, :, 0, -1:]
        left, right = (value.view(halves) - origin.unsqueeze(-1)).unbind(2)
        left_plain, right_plain = (plain.view(halves) - origin.unsqueeze(-1)).unbind(2)
        left_sums = F.pad(left_plain.flip(-1).cumsum(-1), (1, 0))  # of the last k of the left
        right_sums = F.pad(right_plain.cumsum(-1), (1, 0))  # of the first k of the right

        # A left value: all behind its own block are below it; how many on the right are above?
        behind = seam - end.view(halves)[:, :, 0]
        above = torch.searchsorted(-right, -left)
        pull = left_sums.gather(-1, behind) - behind * left + right_sums.gather(-1, above) - above * left
        from_left = (pull > 0).sum(-1, keepdim=True)
        # A right value, now that the left part of the block is known: all before its own block are above it.
        left_sum = left_sums.gather(-1, from_left)
        before = start.view(halves)[:, :, 1] - seam
        pull = left_sum - from_left * right + right_sums.gather(-1, before) - before * right
        from_right = ((pull < 0) & (from_left > 0)).sum(-1, keepdim=True)

        pooled = (left_sum + right_sums.gather(-1, from_right)) / (from_left + from_right).clamp(min=1) + origin
        first, last = seam - from_left, seam + from_right
        spot = place.view(-1, 2 * width)
        joined = (spot >= first) & (spot < last)
        value = torch.where(joined, pooled, value.view(whole)).view(rows, length)
        start = torch.where(joined, first, start.view(whole)).view(rows, length)
        end = torch.where(joined, last, end.view(whole)).view(rows, length)
        width *= 2
    return start[:, :n].contiguous(), end[:, :n].contiguous()
