"""Smooth-AP: average precision with sigmoids for steps.

A. Brown, W. Xie, V. Kalogeiton, A. Zisserman: Smooth-AP: smoothing the path towards large-scale image retrieval,
ECCV 2020.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankgrad import _check
from rankgrad.surrogates._lists import read_lists, read_scores
from rankgrad.surrogates._pairwise import block_of, pairwise_losses


def smoothap_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    temperature: float = 0.01,
    max_relevant: int | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""One minus average precision with every comparison a sigmoid.

    With :math:`G(x) = 1 / (1 + e^{-x/\tau})`, a list with relevant items P has the loss

    .. math:: 1 - \frac1p \sum_{i \in P} \frac{1 + \sum_{j \in P, j \ne i} G(s_j - s_i)}
        {1 + \sum_{j \ne i} G(s_j - s_i)}.

    O(n p) time; the gradient is summed up in blocks, so memory stays bounded.

    Args:
        scores: ``[..., n]``, higher is better.
        relevance: The same shape; bool, or 0 and 1.
        temperature: :math:`\tau` > 0, in score units. The paper uses 0.01 on cosines.
        max_relevant: No list has more relevant items than this. Saves a host sync.
        mask: bool, broadcast to ``scores``; False = the item does not exist.
        reduction: ``"mean"`` over the lists that have something relevant, ``"sum"``, or ``"none"``.

    Returns:
        A scalar, or ``[...]`` for ``"none"`` (0 for lists with nothing relevant).

    Example:
        >>> scores = torch.tensor([0.51, 0.5, 0.4], requires_grad=True)
        >>> loss = rankgrad.surrogates.smoothap_loss(scores, torch.tensor([False, True, False]), temperature=0.1)
        >>> loss  # 1 - 1 / (1 + G(0.01) + G(-0.1))
        tensor(0.4426, grad_fn=...)
        >>> loss.backward()
        >>> scores.grad
        tensor([ 0.7749, -1.3859,  0.6109])

    Reference:
        Brown et al., Smooth-AP: smoothing the path towards large-scale image retrieval, ECCV 2020.
    """
    lists = read_lists(scores, relevance, mask, reduction)
    temperature = _check.positive("temperature", temperature)
    lists, slots = lists.slots(max_relevant)

    def smooth(difference: Tensor, other: Tensor, relevant: Tensor) -> tuple[Tensor, Tensor]:
        step = torch.sigmoid(difference / temperature).where(other, 0)
        rank = 1 + step.sum(-1, keepdim=True)
        own = 1 + step.where(relevant, 0).sum(-1, keepdim=True)
        # loss = 1 - own / rank: every item in front costs own / rank^2, a relevant one gives 1 / rank back
        cost = own / rank.square() - relevant / rank
        return (1 - own / rank).squeeze(-1), cost * step * (1 - step) / temperature

    return lists.reduce(pairwise_losses(lists, slots, smooth), reduction)


def smoothap_rank(scores: Tensor, *, temperature: float = 0.01, mask: Tensor | None = None) -> Tensor:
    r"""Soft ranks by sigmoids: :math:`\tilde r_i = 1 + \sum_{j \ne i} G(s_j - s_i)`. O(n^2) time, bounded memory.

    Args:
        scores: ``[..., n]``, higher is better.
        temperature: As in :func:`smoothap_loss`.
        mask: bool, broadcast to ``scores``; items that do not exist tie behind all others, without gradient.

    Returns:
        Soft ranks in the shape of ``scores``, from 1 for the best to n.

    Example:
        >>> rankgrad.surrogates.smoothap_rank(torch.tensor([0.1, 0.3, 0.3]))
        tensor([3.0000, 1.5000, 1.5000])

    Reference:
        Brown et al., Smooth-AP: smoothing the path towards large-scale image retrieval, ECCV 2020.
    """
    lists = read_scores(scores, mask)
    temperature = _check.positive("temperature", temperature)
    ranks: Tensor = _SigmoidRank.apply(lists.scores, lists.exists, temperature)
    return lists.ranks(ranks)


class _SigmoidRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, exists: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(scores, exists)
        ctx.temperature = temperature
        ranks = torch.empty_like(scores)
        for items in _blocks(scores):
            step = _steps(scores, exists, items, temperature)
            ranks[:, items] = step.sum(-1) + 0.5  # its own sigmoid, one half, is in the sum
        return ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        scores, exists = ctx.saved_tensors
        gradient = torch.empty_like(scores)
        for items in _blocks(scores):
            step = _steps(scores, exists, items, ctx.temperature)
            # The slope is the same for (i, j) and (j, i): j ahead of i pulls one way, i ahead of j the other.
            pull = upstream.unsqueeze(1) - upstream[:, items].unsqueeze(-1)
            gradient[:, items] = (step * (1 - step) * pull).sum(-1) / ctx.temperature
        return gradient, None, None


def _blocks(scores: Tensor) -> list[slice]:
    step = block_of(scores.device, scores.numel())
    return [slice(start, start + step) for start in range(0, scores.shape[-1], step)]


def _steps(scores: Tensor, exists: Tensor, items: slice, temperature: float) -> Tensor:
    difference = scores.unsqueeze(1) - scores[:, items].unsqueeze(-1)
    return torch.sigmoid(difference / temperature).where(exists.unsqueeze(1), 0)
