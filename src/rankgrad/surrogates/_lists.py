"""How every surrogate reads its score lists, and how list losses become one number.

Surrogates calculate with scores instead of only comparing them, so infinities are no ordinary scores here: on the
CPU a non-finite score is an error, elsewhere (no host sync) its list's result and gradient become NaN.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rankgrad import _check
from rankgrad.engine.precision import compute_dtype


@dataclasses.dataclass(frozen=True)
class SurrogateLists:
    """Validated score lists.

    Attributes:
        scores: ``[lists, n]`` in the compute dtype, attached to the graph of the caller's scores; 0 where no item
            exists.
        relevant: bool ``[lists, n]``, existing items only (all False for soft ranks, where there is no relevance).
        exists: bool ``[lists, n]``.
        poison: ``[lists]``, 1, or NaN for lists that must not give a number; None where that has raised.
        shape: The caller's shape ``[..., n]``.
    """

    scores: Tensor
    relevant: Tensor
    exists: Tensor
    poison: Tensor | None
    shape: torch.Size

    def reduce(self, losses: Tensor, reduction: str) -> Tensor:
        """Reduce the loss of each list, ``[lists]``: lists with nothing relevant have none and do not count."""
        counts = self.relevant.any(-1)
        losses = losses.where(counts, 0)
        if self.poison is not None:
            losses = losses * self.poison.to(losses.dtype)
        if reduction == "none":
            return losses.to(self.scores.dtype).reshape(self.shape[:-1])
        total = losses.double().sum()
        if reduction == "mean":
            total = total / counts.sum().clamp(min=1)
        return total.to(self.scores.dtype)

    def ranks(self, ranks: Tensor) -> Tensor:
        """Soft ranks ``[lists, n]`` in the caller's shape; items that do not exist tie behind all others."""
        behind = self.exists.sum(-1, keepdim=True).to(ranks.dtype) + 1
        ranks = torch.where(self.exists, ranks, behind)
        if self.poison is not None:
            ranks = ranks * self.poison.to(ranks.dtype).unsqueeze(-1)
        return ranks.reshape(self.shape)

    def slots(self, max_relevant: int | None) -> tuple[SurrogateLists, int]:
        """How many slots hold the relevant items of any of these lists.

        Without the hint ``max_relevant`` the number is read from the device (a host sync). A list that does not
        fit a hint is an error, without a sync a NaN.
        """
        n = self.scores.shape[-1]
        count = self.relevant.sum(-1)
        if max_relevant is None:
            return self, int(count.max()) if count.numel() else 0
        slots = min(_check.count("max_relevant", max_relevant, at_least=0), n)
        overfull = count > slots
        if self.poison is None:
            if bool(overfull.any()):
                raise _check.fail(
                    "max_relevant", f"at least the {int(count.max())} relevant items of a list", max_relevant
                )
            return self, slots
        return dataclasses.replace(self, poison=self.poison.masked_fill(overfull, torch.nan)), slots


def read_lists(scores: Tensor, relevance: Tensor, mask: Tensor | None, reduction: str) -> SurrogateLists:
    """Validate the arguments of a loss."""
    scores = _check.floating("scores", scores)
    relevance = _check.relevance(relevance, scores)
    _check.one_of("reduction", reduction, _check.REDUCTIONS)
    relevant, exists = relevance != 0, _check.mask(mask, scores)
    if relevance.dtype != torch.bool and relevance.device.type == "cpu":
        other = relevant & (relevance != 1)
        other = other if exists is None else other & exists
        if bool(other.any()):
            raise _check.fail("relevance", "only 0 and 1 (or bool)", relevance[other][0].item())
    return _read(scores, relevant, exists)


def read_scores(scores: Tensor, mask: Tensor | None) -> SurrogateLists:
    """Validate the arguments of a soft rank."""
    scores = _check.floating("scores", scores)
    return _read(scores, torch.zeros_like(scores, dtype=torch.bool), _check.mask(mask, scores))


def _read(scores: Tensor, relevant: Tensor, mask: Tensor | None) -> SurrogateLists:
    rows = (math.prod(scores.shape[:-1]), scores.shape[-1])
    exists = torch.ones_like(relevant) if mask is None else mask
    usable = scores.isfinite()
    wrong = exists & ~usable
    poison = None
    if scores.device.type == "cpu":
        if bool(wrong.any()):
            raise ValueError(
                "scores: expected finite scores, received NaN or infinity (mask items that do not exist)"
            )
    else:
        poison = torch.where(wrong.reshape(rows).any(-1), torch.nan, 1.0)
    values = scores.to(compute_dtype(scores.dtype)).where(exists & usable, 0)
    return SurrogateLists(
        values.reshape(rows), (relevant & exists).reshape(rows), exists.reshape(rows), poison, scores.shape
    )


class _BoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, losses: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return losses.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return upstream.unsqueeze(-1) * gradient, None, None


def bind_gradient(scores: Tensor, losses: Tensor, gradient: Tensor) -> Tensor:
    """``losses [lists]`` whose gradient with respect to ``scores [lists, n]`` is the given one, times upstream."""
    bound: Tensor = _BoundGradient.apply(scores, losses, gradient)
    return bound


def needs_gradient(scores: Tensor) -> bool:
    """Whether a gradient that is computed along with the loss may be needed."""
    return torch.is_grad_enabled() and scores.requires_grad
