"""From the ranks of the relevant items to a loss and its slope, in float64 plain torch.

The relevant items of a list sit in slots, best first, so slot ``m`` has rank ``m + 1`` among the
relevant items; ``above`` is the number of irrelevant items at or above it.
"""

import torch
from torch import Tensor

#: The named forms: average precision, its -log form, recall with its two closed-form weights, and
#: recall with a given sequence of weights.
FORMS = ("ap", "log_ap", "log", "loglog", "weights")


def item_terms(form: str, weights: Tensor | None, above: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`terms_of` for relevant items in slots, best first: ``above`` is ``[..., slots]``."""
    return terms_of(form, weights, above, torch.arange(1, above.shape[-1] + 1, device=above.device))


def terms_of(form: str, weights: Tensor | None, above: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and d(loss)/d(rank) of each relevant item, before the mean over the list's relevant items.

    Args:
        form: One of :data:`FORMS`.
        weights: ``w_1, w_2, ...`` for the form ``"weights"``, shape ``[K]``.
        above: Irrelevant items at or above each relevant item.
        own: Its rank among the relevant items.

    Returns:
        Two float64 tensors of the shape of ``above``.
    """
    c = above.double()
    if form in ("ap", "log_ap"):
        own = own.double()
        rank = own + c
        if form == "ap":
            return c / rank, own / (rank * rank)
        return torch.log(rank / own), 1 / rank
    if form == "log":
        return torch.log(1 + c), 1 / (1 + c)
    if form == "loglog":
        inner = torch.log(1 + c)
        return torch.log(1 + inner), 1 / ((1 + c) * (1 + inner))
    assert form == "weights" and weights is not None, form
    sums, steps = weight_tables(weights)
    at = above.clamp(max=len(weights) + 1)
    return sums[at], steps[at]


def weight_tables(weights: Tensor) -> tuple[Tensor, Tensor]:
    """W(c) and w_c for c = 0 ... K + 1, float64: nobody to pass at 0, nothing more to gain beyond the end."""
    zero = weights.new_zeros(1, dtype=torch.float64)
    steps = torch.cat([zero, weights.double(), zero])
    return steps.cumsum(0), steps


def in_use(count: Tensor, slots: int) -> Tensor:
    """Which slots hold a relevant item: ``[..., lists]`` counts -> bool ``[..., lists, slots]``."""
    return torch.arange(slots, device=count.device) < count.unsqueeze(-1)


def list_losses(values: Tensor, count: Tensor) -> Tensor:
    """Mean over the relevant items of each list, 0 for a list that has none; float64 ``[..., lists]``."""
    total = values.where(in_use(count, values.shape[-1]), 0).sum(-1)
    return total / count.clamp(min=1)


def score_steps(
    slopes: Tensor, count: Tensor, items: Tensor, lists: Tensor, lam: float, dtype: torch.dtype
) -> Tensor:
    """How far Algorithm 1 moves each relevant score: ``lam n / L * slope / p``, rounded once to ``dtype``.

    Args:
        slopes: d(loss)/d(rank) of each relevant item, ``[calls, lists, slots]``.
        count: Relevant items of each list (p), ``[calls, lists]``.
        items: Existing items of each list (n), ``[calls, lists]``.
        lists: Lists that count (L), ``[calls]``.
    """
    steps = step_scale(count, items, lists, lam).unsqueeze(-1) * slopes
    return steps.where(in_use(count, slopes.shape[-1]), 0).to(dtype)


def step_scale(count: Tensor, items: Tensor, lists: Tensor, lam: float) -> Tensor:
    """``lam n / L / p`` of each list, float64 ``[calls, lists]``."""
    return lam * items.double() / lists.clamp(min=1).double().unsqueeze(-1) / count.clamp(min=1)
