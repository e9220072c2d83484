"""The bridge from embeddings and labels to score lists: every embedding a query against the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.engine import embeddings as engine
from rankgrad.engine.precision import compute_dtype, without_autocast
from rankgrad.engine.registration import is_plain_call


class Pairs(NamedTuple):
    """Score lists of a batch of queries: each ``[queries, candidates]``; ``mask`` None = all exist.

    Example:
        >>> embeddings, labels = torch.randn(4, 16), torch.tensor([0, 0, 1, 1])
        >>> scores, relevance, mask = rankgrad.retrieval_pairs(embeddings, labels)
        >>> rankgrad.metrics.recall_at_k(scores, relevance, k=3, mask=mask)
        tensor(1.)
    """

    scores: Tensor
    relevance: Tensor
    mask: Tensor | None


class Lookup(NamedTuple):
    """Queries and candidates with their labels and ids, before any score is computed.

    Attributes:
        queries: ``[queries, dim]``, of unit length.
        labels: ``[queries]``; relevant to a query are the candidates with its label.
        query_ids: ``[queries]``. A candidate with the id of a query is the same item, and is left out of that
            query's list; None: nothing is left out.
        candidates: ``[candidates, dim]``, of unit length.
        candidate_labels: ``[candidates]``.
        candidate_ids: ``[candidates]``.
        valid: bool ``[candidates]``; False = the candidate exists for no query. None: all exist.
    """

    queries: Tensor
    labels: Tensor
    query_ids: Tensor | None
    candidates: Tensor
    candidate_labels: Tensor
    candidate_ids: Tensor
    valid: Tensor | None = None

    def _labels(self) -> engine.Labels:
        return engine.Labels(self.labels, self.query_ids, self.candidate_labels, self.candidate_ids, self.valid)

    def relevance_and_mask(self) -> tuple[Tensor, Tensor | None]:
        """Which candidates are relevant to which query, and which exist: ``[queries, candidates]``."""
        return engine.relevance_and_mask(self._labels())

    def counting_lists(self, rows: int) -> Tensor:
        """How many queries have a relevant candidate; ``rows`` queries at a time where flags must be computed."""
        return engine.counting_lists(self._labels(), rows)

    def pairs(self) -> Pairs:
        """The score lists, by one product of matrices."""
        with without_autocast(self.queries.device.type):
            scores = self.queries @ self.candidates.T.to(self.queries.dtype)
        return Pairs(scores, *self.relevance_and_mask())


class _UnitLength(torch.autograd.Function):
    """Rows of unit length with their bounded gradient, by one launch forward and one backward on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, least: float) -> Tensor:
        unit, length = engine.normalized(rows)
        ctx.save_for_backward(rows, unit, length)
        ctx.least = least
        return unit

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows, unit, length = ctx.saved_tensors
        if torch.is_grad_enabled():  # for double backward
            length = engine.lengths_of(rows)
            unit = rows / length.clamp_min(engine.SHORTEST)
            return engine.gradient_of_normalized(grad, unit, length, ctx.least), None
        return engine.normalized_backward(grad, unit, length, ctx.least), None


def unit_length(embeddings: Tensor) -> Tensor:
    r"""L2-normalise rows in float32 (float64 stays float64), also under autocast.

    In bf16 16,000 cosines fall onto some 46 values, nearly all of them ties.

    The gradient of :math:`x / |x|` grows like :math:`1 / |x|`, without bound. Below a length of
    :math:`\epsilon = 10^{-6}` (:math:`10^{-3}` for fp16, whose numbers end at 65,504) the factor is
    :math:`|x| / \epsilon^2` instead: at most :math:`1 / \epsilon`, and 0 for a row of zeros.
    """
    least = 1e-3 if embeddings.dtype == torch.float16 else 1e-6
    with without_autocast(embeddings.device.type):
        rows = embeddings.to(compute_dtype(embeddings.dtype))
        if is_plain_call(rows):
            return _UnitLength.apply(rows, least)  # type: ignore[no-any-return]
        bounded = (engine.lengths_of(rows.detach()) / least).clamp(max=1).square()
        rows = rows.detach() + bounded * (rows - rows.detach())  # the same rows; their gradient times the factor
        return rows / engine.lengths_of(rows).clamp_min(engine.SHORTEST)


def check_batch(
    embeddings: Tensor,
    labels: Tensor,
    ref_embeddings: Tensor | None,
    ref_labels: Tensor | None,
    query_index: Tensor | None,
    items: Tensor | None = None,
    names: tuple[str, str] = ("ref_embeddings", "ref_labels"),
) -> None:
    """Require embeddings, labels and references that belong together; ``names`` are the references' arguments."""
    _check.floating("embeddings", embeddings, ndim=2)
    _check.per_row("labels", labels, "embeddings", embeddings)
    name, labels_name = names
    if (ref_embeddings is None) != (ref_labels is None):
        missing = labels_name if ref_labels is None else name
        raise ValueError(f"{missing}: expected {name} and {labels_name} together, received None")
    if ref_embeddings is not None:
        _check.floating(name, ref_embeddings, ndim=2)
        if ref_embeddings.shape[1] != embeddings.shape[1]:
            raise _check.fail(name, f"rows of length {embeddings.shape[1]}, as embeddings have", ref_embeddings)
        _check.same_device(name, ref_embeddings, "embeddings", embeddings)
        _check.per_row(labels_name, ref_labels, name, ref_embeddings)
    if query_index is not None:
        if ref_embeddings is None:
            raise _check.fail("query_index", "None without ref_embeddings (each item is its own row)", query_index)
        _check.per_row("query_index", query_index, "embeddings", embeddings)
        if _check.readable(query_index):
            wrong = query_index[(query_index < -1) | (query_index >= len(ref_embeddings))]
            if len(wrong):
                rows = f"rows of the {len(ref_embeddings)} references, or -1"
                raise _check.fail("query_index", rows, int(wrong[0]))
    if items is not None:
        if ref_embeddings is not None:
            raise _check.fail("items", "None with ref_embeddings (query_index is for them)", items)
        _check.per_row("items", items, "embeddings", embeddings)
        _check.numbers_of("items", items.long(), lowest=0)


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
        query_index: ``[B]``: which row of the references each query is, -1 for none; that row is excluded.

    Returns:
        ``scores`` in float32 (float64 for float64 embeddings), ``relevance`` and ``mask``, all ``[B, R]``.
        Without references each item is excluded from its own list; with them only the rows of ``query_index``
        are.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
        >>> pairs = rankgrad.retrieval_pairs(embeddings, torch.tensor([0, 0, 1]))
        >>> pairs.scores[0], pairs.relevance[0], pairs.mask[0]
        (tensor([1.0000, 0.6000, 0.0000]), tensor([ True,  True, False]), tensor([False,  True,  True]))
    """
    check_batch(embeddings, labels, ref_embeddings, ref_labels, query_index)
    return lookup_of(unit_length(embeddings), labels, ref_embeddings, ref_labels, query_index).pairs()


def lookup_of(
    queries: Tensor,
    labels: Tensor,
    ref_embeddings: Tensor | None,
    ref_labels: Tensor | None,
    query_index: Tensor | None,
    items: Tensor | None = None,
) -> Lookup:
    """Queries of unit length against the references, or against each other."""
    if ref_embeddings is None or ref_labels is None:
        ids = torch.arange(len(labels), device=labels.device) if items is None else items
        return Lookup(queries, labels, ids, queries, labels, ids)
    ids = torch.arange(len(ref_labels), device=labels.device)
    return Lookup(queries, labels, query_index, unit_length(ref_embeddings), ref_labels, ids)
