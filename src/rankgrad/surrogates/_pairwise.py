"""Losses made of pairs (a relevant item, any other item), in O(n p) time and bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rankgrad.surrogates._lists import SurrogateLists, bind_gradient, needs_gradient

#: Pairs held at a time: on a CPU they should stay in its cache, on a GPU fill it.
_PAIRS_AT_ONCE = {"cpu": 2**19, "cuda": 2**25}


def block_of(device: torch.device, pairs_per_step: int) -> int:
    """How many steps of ``pairs_per_step`` pairs to take at once."""
    return max(1, _PAIRS_AT_ONCE.get(device.type, 2**22) // max(pairs_per_step, 1))


class Slots(NamedTuple):
    """The relevant items of each list, best first (ties by index), in ``[lists, slots]``."""

    scores: Tensor
    position: Tensor
    in_use: Tensor


def relevant_slots(lists: SurrogateLists, slots: int) -> Slots:
    """Collect the relevant items: O(n) to find and O(p log p) to sort them. Empty slots come last."""
    rows, n = lists.scores.shape
    slot = torch.where(lists.relevant, lists.relevant.cumsum(-1) - 1, slots).clamp(max=slots)
    index = torch.zeros(rows, slots + 1, dtype=torch.int64, device=slot.device)
    index = index.scatter_(-1, slot, torch.arange(n, device=slot.device).expand(rows, n))[:, :slots]
    in_use = torch.arange(slots, device=slot.device) < lists.relevant.sum(-1, keepdim=True)
    if n == 0:
        return Slots(lists.scores.new_zeros(rows, slots), index, in_use)
    scores = lists.scores.detach().gather(-1, index.where(in_use, 0)).where(in_use, -torch.inf)
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    return Slots(scores.where(in_use, 0), index.gather(-1, order).where(in_use, 0), in_use)


#: Takes differences ``score_j - score_i`` ``[lists, slots, n]`` of every item j to the relevant items i of some
#: slots, which j are existing items other than i, and which are relevant ``[lists, 1, n]``. Returns the loss of
#: each i ``[lists, slots]`` and d(loss of i) / d(difference), ``[lists, slots, n]``, both before the mean over i.
PairRule = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def pairwise_losses(lists: SurrogateLists, slots: int, rule: PairRule) -> Tensor:
    """Mean of the rule's losses over the relevant items of each list, ``[lists]``, with its gradient bound.

    Slots go to the rule worst item first, a block at a time. The gradient is summed up on the way, so that nothing
    of size n times p outlives its block.
    """
    scores = lists.scores.detach()
    rows, n = scores.shape
    relevant = relevant_slots(lists, slots)
    everything = torch.arange(n, device=scores.device)
    wanted = needs_gradient(lists.scores)
    total, gradient = scores.new_zeros(rows), torch.zeros_like(scores)
    step = block_of(scores.device, rows * n)
    for end in range(slots, 0, -step):
        here = slice(max(end - step, 0), end)
        own, index, in_use = relevant.scores[:, here], relevant.position[:, here], relevant.in_use[:, here]
        other = lists.exists.unsqueeze(1) & (everything != index.unsqueeze(-1)) & in_use.unsqueeze(-1)
        difference = scores.unsqueeze(1) - own.unsqueeze(-1)
        loss, slope = rule(difference, other, lists.relevant.unsqueeze(1))
        total += loss.where(in_use, 0).sum(-1)
        if wanted:
            slope = slope.where(other, 0)
            gradient += slope.sum(1)
            gradient.scatter_add_(-1, index, -slope.sum(-1))
    count = lists.relevant.sum(-1).clamp(min=1)
    if not wanted:
        return total / count
    return bind_gradient(lists.scores, total / count, gradient / count.unsqueeze(-1))
