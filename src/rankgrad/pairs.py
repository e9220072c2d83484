"""The bridge from embeddings and labels to score lists: every embedding a query against the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rankgrad import _check
from rankgrad.engine.precision import compute_dtype, without_autocast
from rankgrad.engine.registration import is_plain_call

_SHORTEST = 1e-12  # shorter rows are divided by this, as torch.nn.functional.normalize does


class Pairs(NamedTuple):
    """Score lists of a batch of queries: each ``[queries, candidates]``; ``mask`` None = all exist."""

    scores: Tensor
    relevance: Tensor
    mask: Tensor | None


class _UnitLength(torch.autograd.Function):
    """torch's normalize in three launches forward and four backward, a third of what autograd makes of it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min_(_SHORTEST)
        unit: Tensor = rows / length
        ctx.save_for_backward(rows, unit, length)
        return unit

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rows, unit, length = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody may differentiate once more
            length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_min(_SHORTEST)
            unit = rows / length
        along = (grad * unit).sum(-1, keepdim=True)
        across: Tensor = torch.addcmul(grad, unit, along, value=-1) / length
        return across


def unit_length(embeddings: Tensor) -> Tensor:
    """L2-normalise rows in float32 (float64 stays), whatever autocast says.

    In bf16 16,000 cosines fall onto some 46 values, nearly all of them ties.
    """
    with without_autocast(embeddings.device.type):
        rows = embeddings.to(compute_dtype(embeddings.dtype))
        if is_plain_call(rows):
            return _UnitLength.apply(rows)  # type: ignore[no-any-return]
        return F.normalize(rows, dim=-1, eps=_SHORTEST)


def check_batch(
    embeddings: Tensor,
    labels: Tensor,
    ref_embeddings: Tensor | None,
    ref_labels: Tensor | None,
    query_index: Tensor | None,
    items: Tensor | None = None,
) -> None:
    """Require embeddings, labels and references that belong together."""
    _check.floating("embeddings", embeddings, ndim=2)
    _check.per_row("labels", labels, "embeddings", embeddings)
    if (ref_embeddings is None) != (ref_labels is None):
        missing = "ref_labels" if ref_labels is None else "ref_embeddings"
        raise ValueError(f"{missing}: expected ref_embeddings and ref_labels together, received None")
    if ref_embeddings is not None:
        _check.floating("ref_embeddings", ref_embeddings, ndim=2)
        if ref_embeddings.shape[1] != embeddings.shape[1]:
            expected = f"rows of length {embeddings.shape[1]}, as embeddings have"
            raise _check.fail("ref_embeddings", expected, ref_embeddings)
        _check.same_device("ref_embeddings", ref_embeddings, "embeddings", embeddings)
        _check.per_row("ref_labels", ref_labels, "ref_embeddings", ref_embeddings)
    if query_index is not None:
        if ref_embeddings is None:
            raise _check.fail("query_index", "None without ref_embeddings (each item is its own row)", query_index)
        _check.per_row("query_index", query_index, "embeddings", embeddings)
    if items is not None:
        if ref_embeddings is not None:
            raise _check.fail("items", "None with ref_embeddings (query_index says which row a query is)", items)
        _check.per_row("items", items, "embeddings", embeddings)


def retrieval_pairs(
    embeddings: Tensor,
    labels: Tensor,
    ref_embeddings: Tensor | None = None,
    ref_labels: Tensor | None = None,
    query_index: Tensor | None = None,
) -> Pairs:
    """Cosine similarities of queries and candidates, relevant where the labels agree.

    Args:
        embeddings: ``[B, dim]``, normalised here.
        labels: ``[B]`` integers.
        ref_embeddings: ``[R, dim]`` candidates instead of the batch itself; gradient flows to them.
        ref_labels: ``[R]``.
        query_index: ``[B]``: which row of the references each query is; that row is excluded.

    Returns:
        ``scores`` in float32 (float64 for float64 embeddings), ``relevance`` and ``mask``, all ``[B, R]``.
        Without references each item is excluded from its own list; with them nothing is, unless
        ``query_index`` says so.
    """
    check_batch(embeddings, labels, ref_embeddings, ref_labels, query_index)
    queries = unit_length(embeddings)
    return pairs_of(queries, labels, *candidates_of(queries, labels, ref_embeddings, ref_labels, query_index))


def candidates_of(
    queries: Tensor,
    labels: Tensor,
    ref_embeddings: Tensor | None,
    ref_labels: Tensor | None,
    query_index: Tensor | None,
    items: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Candidates of unit length (the references or the batch), their labels, and who is who.

    The last two are numbers: of each query (None: it is no candidate) and of each candidate.
    """
    if ref_embeddings is None or ref_labels is None:
        numbers = torch.arange(len(labels), device=labels.device) if items is None else items
        return queries, labels, numbers, numbers
    return (
        unit_length(ref_embeddings),
        ref_labels,
        query_index,
        torch.arange(len(ref_labels), device=labels.device),
    )


def pairs_of(
    queries: Tensor, labels: Tensor, candidates: Tensor, candidate_labels: Tensor, own: Tensor | None, rows: Tensor
) -> Pairs:
    """Score lists from rows of unit length; a query and a candidate of the same number are one and the same."""
    with without_autocast(queries.device.type):
        scores = queries @ candidates.T.to(queries.dtype)
    mask = None if own is None else own.unsqueeze(1) != rows
    return Pairs(scores, labels.unsqueeze(1) == candidate_labels, mask)
