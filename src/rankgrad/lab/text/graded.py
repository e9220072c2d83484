"""Graded lists as a source and a loss: queries rank the documents of a batch, and their grades say how well."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.lab.retrieval.source import Draw, LabelledBatch
from rankgrad.lab.retrieval.splits import Items
from rankgrad.lab.text.data import Judgements
from rankgrad.lab.text.source import TextSource
from rankgrad.lab.training.config import nearest
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.named import Named, user_errors
from rankgrad.losses import average_precision_loss, ndcg_loss, recall_loss
from rankgrad.metrics import RetrievalMetrics, average_precision, map_at_r, ndcg, reciprocal_rank
from rankgrad.pairs import unit_length

#: name -> function of (scores, relevance), and whether it reads grades
LOSSES: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "ndcg": (ndcg_loss, True),
    "ap": (average_precision_loss, False),
    "recall": (recall_loss, False),
}
_NOT_SET = {"scores", "relevance", "mask", "reduction", "groups", "num_groups", "spread"}


class GradedSource(TextSource):
    """Judged documents, labelled by their query. A batch is its queries, each once, and the documents drawn.

    Args:
        judgements: The lists.
        device: Where the labels are.
    """

    def __init__(self, judgements: Judgements, device: torch.device) -> None:
        documents = [judgements.documents[i] for i in judgements.document.tolist()]
        super().__init__(Items(documents, judgements.query, None, documents, judgements.queries), device)
        self.judgements: Judgements = judgements

    def batch(self, rows: Tensor, following: Tensor | None = None, draw: Draw | None = None) -> LabelledBatch:
        """Texts of queries and documents; labels and ids are rows of the queries, then of the documents."""
        queries = self.judgements.query[rows].unique()
        documents = self.judgements.document[rows]
        texts = [self.judgements.queries[i] for i in queries.tolist()]
        texts += [self.judgements.documents[i] for i in documents.tolist()]
        numbers = torch.cat([queries, documents]).to(self.device)
        return LabelledBatch(texts, numbers, numbers)


class GradedLoss(nn.Module):
    """Every query of a batch ranks the documents of all of them; a document without a judgement has grade 0.

    Args:
        config: ``ndcg``, ``ap`` or ``recall``, with arguments of the library's function.
        judgements: The grades.
        queries: How many of a batch's rows are queries.
    """

    def __init__(self, config: Named, judgements: Judgements, queries: int) -> None:
        super().__init__()
        self.function, self.reads_grades, self.arguments = loss_of(config)
        self.judgements, self.queries = judgements, queries

    def forward(self, embeddings: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
        """Mean loss over the queries."""
        del labels
        rows = unit_length(embeddings)
        queries, documents = ids[: self.queries], ids[self.queries :]
        scores = rows[: self.queries] @ rows[self.queries :].T
        grades = self.judgements.grades(queries, documents).to(scores.dtype)
        again = (documents.unsqueeze(0) == documents.unsqueeze(1)).tril(-1).any(1)  # drawn a second time
        relevance = grades if self.reads_grades else grades > 0
        return self.function(scores, relevance, mask=(~again).expand(scores.shape), **self.arguments)


def loss_of(config: Named) -> tuple[Callable[..., Tensor], bool, dict[str, Any]]:
    """A loss of lists by name, with its arguments checked."""
    if config.name not in LOSSES:
        raise UserError(f"loss: unknown name {config.name!r} for graded lists{nearest(config.name, LOSSES)}")
    function, grades = LOSSES[config.name]
    given = config.checked(inspect.signature(function).parameters.keys() - _NOT_SET, function.__name__)
    arguments = {"margin": "auto", **given}  # as the Modules, which are for training
    with user_errors("loss"):
        function(torch.zeros(1, 2), torch.tensor([[True, False]]), **arguments)
    return function, grades, arguments


def measure(
    queries: Tensor, documents: Tensor, judgements: Judgements, recall_at: tuple[int, ...], *, at_once: int = 256
) -> tuple[RetrievalMetrics, dict[str, float]]:
    """Every query ranks all documents: per query where the relevant ones stand; NDCG@10 and R@K in percent."""
    queries, documents = unit_length(queries), unit_length(documents)
    judgements = judgements.to(queries.device)
    columns = torch.arange(len(documents), device=queries.device)
    parts: list[tuple[Tensor, ...]] = []
    for rows in torch.arange(len(queries), device=queries.device).split(at_once):
        scores, grades = queries[rows] @ documents.T, judgements.grades(rows, columns)
        relevant = grades > 0
        first = (1 / reciprocal_rank(scores, relevant, reduction="none").clamp(min=1e-12)).round().long()
        first = first.where(relevant.any(1), 0)
        found = [metric(scores, relevant, reduction="none").double() for metric in (average_precision, map_at_r)]
        parts.append((first, *found, ndcg(scores, grades.to(scores.dtype), k=10, reduction="none").double()))
    first, precision, at_r, gain = (torch.cat(column) for column in zip(*parts, strict=True))
    metrics = RetrievalMetrics(first, precision, at_r)
    many = (first > 0).sum().clamp(min=1)
    return metrics, {"NDCG@10": 100 * float(gain.sum() / many), **metrics.summary(recall_at)}
