"""Exact retrieval metrics of embeddings, in chunks over queries and gallery: any size fits.

Ties are counted pessimistically (irrelevant items first), as everywhere in this library. Similarities that differ
by no more than rounding are ties: a product of matrices may give equal rows different numbers, by where they stand
in it. Two passes over the gallery: one collects the scores of each query's relevant items, the other counts,
for all of them at once, the irrelevant items at or above.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.pairs import Lookup, check_batch, unit_length

#: Similarities that differ by less tie. Equal rows of up to 4,096 numbers differ by up to 4.2e-7 and 3.9e-15.
_ROUNDING = {torch.float32: 5e-7, torch.float64: 1e-14}


@dataclass(frozen=True)
class RetrievalMetrics:
    """What :func:`retrieval_metrics` returns: for each query, ``[Q]``.

    Attributes:
        first: Rank of the best relevant item; 0 where nothing is relevant.
        average_precision: Average precision.
        map_at_r: mAP@R.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.2, 0.8], [0.0, 1.0]])
        >>> rankgrad.metrics.retrieval_metrics(embeddings, torch.tensor([0, 0, 1, 1])).summary([1])
        {'R@1': 100.0, 'mAP@R': 100.0, 'AP': 100.0}
    """

    first: Tensor
    average_precision: Tensor
    map_at_r: Tensor

    def summary(self, recall_at: Sequence[int]) -> dict[str, float]:
        """R@K for every K in ``recall_at``, mAP@R and AP, in percent of the queries with something relevant."""
        recall_at = [_check.count("recall_at", k, at_least=1) for k in recall_at]
        counts = self.first > 0
        many = counts.sum().clamp(min=1)
        shares = {f"R@{k}": (counts & (self.first <= k)).sum().double() / many for k in recall_at}
        shares["mAP@R"] = self.map_at_r.sum() / many
        shares["AP"] = self.average_precision.sum() / many
        return {name: 100 * float(value) for name, value in shares.items()}


def retrieval_metrics(
    embeddings: Tensor,
    labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    chunk: int = 1 << 14,
    queries_at_once: int = 1 << 10,
) -> RetrievalMetrics:
    """Ranks of the relevant items of every query, and the metrics that follow from them.

    An irrelevant item of the same similarity ranks before a relevant one. Similarities that differ by rounding
    alone (up to 5e-7 in float32) count as the same, so that a collapsed network, whose embeddings are all alike,
    finds nothing.

    Args:
        embeddings: ``[Q, dim]`` queries, normalised here.
        labels: ``[Q]``.
        gallery: ``[N, dim]`` candidates; without one every query ranks the other queries.
        gallery_labels: ``[N]``.
        chunk: Gallery items at a time.
        queries_at_once: Queries at a time.

    Returns:
        A :class:`RetrievalMetrics`: for each query the rank of the first relevant item (0 if there is none), the
        average precision and the mAP@R, ``[Q]`` each; its ``summary`` has R@K, mAP@R and AP as percentages.

    Example:
        >>> from rankgrad.metrics import retrieval_metrics
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.8, 0.2], [0.0, 1.0]])
        >>> retrieval_metrics(embeddings, torch.tensor([0, 1, 0, 1])).first
        tensor([2, 3, 2, 2])
    """
    check_batch(embeddings, labels, gallery, gallery_labels, None, names=("gallery", "gallery_labels"))
    _check.count("chunk", chunk, at_least=1)
    _check.count("queries_at_once", queries_at_once, at_least=1)
    queries = unit_length(embeddings.detach())
    query_ids = None
    if gallery is None or gallery_labels is None:
        candidates, candidate_labels, query_ids = queries, labels, torch.arange(len(labels), device=labels.device)
    else:
        candidates, candidate_labels = unit_length(gallery.detach()), gallery_labels
    for name, rows in (("embeddings", queries), ("gallery", candidates)):
        if bool(rows.isnan().any()):  # a row with an infinite number has no direction: normalised, it is NaN
            raise _check.NotANumberError(f"{name}: expected finite numbers, received NaN or infinity")
    index = _Index(candidates, candidate_labels, chunk)
    parts = [
        index.metrics_of(
            queries[i : i + queries_at_once],
            labels[i : i + queries_at_once],
            None if query_ids is None else query_ids[i : i + queries_at_once],
        )
        for i in range(0, len(queries), queries_at_once)
    ]
    if not parts:
        nothing = queries.new_zeros(0)
        return RetrievalMetrics(nothing.long(), nothing.double(), nothing.double())
    return RetrievalMetrics(*(torch.cat(column) for column in zip(*parts, strict=True)))


class _Index:
    """A gallery: its rows, labels, and each row's place within its class (its slot)."""

    def __init__(self, rows: Tensor, labels: Tensor, chunk: int) -> None:
        self.rows, self.labels, self.chunk = rows, labels, chunk
        order = labels.argsort(stable=True)
        _, counts = labels[order].unique_consecutive(return_counts=True)
        within = torch.arange(len(labels), device=labels.device) - (counts.cumsum(0) - counts).repeat_interleave(
            counts
        )
        self.slot = torch.empty_like(order).scatter_(0, order, within)
        self.slots = int(counts.max()) if len(counts) else 0

    def _scores(
        self, queries: Tensor, labels: Tensor, query_ids: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Chunk by chunk: scores, relevant and irrelevant (neither: the query itself), slots."""
        for begin in range(0, len(self.rows), self.chunk):
            part = slice(begin, begin + self.chunk)
            ids = torch.arange(len(self.rows), device=self.rows.device)[part]
            lists = Lookup(queries, labels, query_ids, self.rows[part], self.labels[part], ids)
            scores, relevant, exists = lists.pairs()
            irrelevant = ~relevant
            if exists is not None:
                relevant = relevant & exists
            yield scores, relevant, irrelevant, self.slot[part]

    def metrics_of(
        self, queries: Tensor, labels: Tensor, query_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rank of the first relevant item, AP and mAP@R of some queries."""
        many, slots = len(queries), self.slots
        relevant_scores = queries.new_full((many, slots + 1), -torch.inf)
        count = queries.new_zeros(many, dtype=torch.int64)
        for scores, relevant, _, slot in self._scores(queries, labels, query_ids):
            count += relevant.sum(1)
            place = torch.where(relevant, slot, slots)
            relevant_scores.scatter_(1, place, scores.where(relevant, -torch.inf))
        lowest_tie = relevant_scores[:, :slots] - _ROUNDING[queries.dtype]
        ascending = lowest_tie.sort(dim=1).values.contiguous()

        above = queries.new_zeros(many, slots + 1, dtype=torch.int64)
        for scores, _, irrelevant, _ in self._scores(queries, labels, query_ids):
            passed = torch.searchsorted(ascending, scores.contiguous(), right=True)  # relevant items at or below
            above.scatter_add_(1, passed, irrelevant.long())
        # c of the relevant item at ascending place i: irrelevant items that passed more than i; then best first.
        c = above.flip(1).cumsum(1)[:, :slots]
        rank_among = torch.arange(1, slots + 1, device=queries.device)
        exists = rank_among <= count.unsqueeze(1)
        rank = c + rank_among
        precision = (rank_among / rank.double()).where(exists, 0)
        per_query = count.clamp(min=1)
        first = rank[:, :1].where(exists[:, :1], 0).sum(1)
        within = precision.where(rank <= count.unsqueeze(1), 0)
        return first, precision.sum(1) / per_query, within.sum(1) / per_query
