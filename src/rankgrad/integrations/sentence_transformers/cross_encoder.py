"""Losses on the scores of a CrossEncoder."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers.base.model import BaseModel
from torch import Tensor, nn

from rankgrad import _check
from rankgrad.distributed import Processes
from rankgrad.integrations.sentence_transformers.list_losses import ListLossFunction, described
from rankgrad.losses import NDCGLoss, ProxyRankingLoss
from rankgrad.losses.embedding import EmbeddingLoss


class CrossEncoderRankingLoss(nn.Module):
    """A ranking loss on the scores of a CrossEncoder; takes what its ``LambdaLoss`` takes.

    Columns: a query, a list of documents; label: a list of as many grades. Lists may differ in length.

    Args:
        model: A CrossEncoder with one output.
        loss: Any list loss, ``loss(scores, relevance, mask=mask)`` of ``[queries, documents]``: NDCG at k,
            ``functools.partial(rankgrad.average_precision_loss, window=1.0)``, ... None: NDCG.
        activation_fn: Applied to the logits first; None: nothing.
        mini_batch_size: How many pairs go through the model at a time; None: as many as there are queries; 0: all.
        distributed: Whether the lists of all processes make one batch: the mean, and a reach that follows the
            scores, are then those of all lists, also where processes have different numbers of them.
        process_group: Which processes; None: all.

    Example:
        >>> model = CrossEncoder("cross-encoder/ms-marco-MiniLM-L6-v2", num_labels=1)  # doctest: +SKIP
        >>> loss = CrossEncoderRankingLoss(model)  # doctest: +SKIP
        >>> loss([["a query"], [["one document", "another"]]], [torch.tensor([1, 0])])  # doctest: +SKIP
    """

    def __init__(
        self,
        model: BaseModel,
        loss: ListLossFunction | None = None,
        *,
        activation_fn: nn.Module | None = None,
        mini_batch_size: int | None = None,
        distributed: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if getattr(model, "num_labels", None) != 1:
            raise _check.fail("model", "a CrossEncoder with num_labels=1", getattr(model, "num_labels", model))
        if isinstance(loss, EmbeddingLoss | ProxyRankingLoss) or (loss is not None and not callable(loss)):
            raise _check.fail("loss", "a list loss, loss(scores, relevance, mask=mask)", loss)
        self.model, self.loss = model, loss
        self.activation_fn = nn.Identity() if activation_fn is None else activation_fn
        if mini_batch_size is not None:
            _check.count("mini_batch_size", mini_batch_size, at_least=0)
        self.mini_batch_size = mini_batch_size
        self.processes = Processes(distributed, process_group)

    def forward(
        self,
        inputs: list[list[Any]],
        labels: list[Tensor],
        prompt: str | None = None,
        task: str | None = None,
    ) -> Tensor:
        """Mean loss over queries.

        Args:
            inputs: The queries, and for each a list of documents.
            labels: For each query the grades of its documents, ``[documents]`` >= 0.
            prompt, task: Passed on to the model's ``preprocess``.
        """
        if len(inputs) != 2:
            raise _check.fail("inputs", "two columns: a query and a list of documents", f"{len(inputs)} columns")
        queries, lists = inputs
        sizes = [len(documents) for documents in lists]
        if isinstance(labels, Tensor) or sizes != [len(grades) for grades in labels]:
            received = labels if isinstance(labels, Tensor) else [len(grades) for grades in labels]
            raise _check.fail("labels", f"a list of grades for each query, of lengths {sizes}", received)
        pairs = [(query, text) for query, documents in zip(queries, lists, strict=True) for text in documents]
        if not pairs:
            raise _check.fail("inputs", "at least one document", sizes)
        try:
            grades = torch.cat([torch.as_tensor(grade) for grade in labels])
        except (TypeError, ValueError, RuntimeError):
            raise _check.fail("labels", "grades that are numbers", labels) from None
        _check.numbers_of("labels", grades, lowest=0)
        at_once = (len(queries) if self.mini_batch_size is None else self.mini_batch_size) or len(pairs)
        logits = []
        for begin in range(0, len(pairs), at_once):
            tokens = self.model.preprocess(pairs[begin : begin + at_once], prompt=prompt, task=task)
            tokens = {k: v.to(self.model.device) if isinstance(v, Tensor) else v for k, v in tokens.items()}
            logits.append(self.model(tokens)["scores"].view(-1))
        scores = self.activation_fn(torch.cat(logits).float())
        places = torch.tensor(sizes, device=scores.device)
        scores, grades, places = map(self.processes.gather, (scores, grades.to(scores), places))
        mask = torch.arange(int(places.max()), device=scores.device) < places.unsqueeze(1)
        table = scores.new_zeros(mask.shape).masked_scatter(mask, scores)
        relevance = grades.new_zeros(mask.shape).masked_scatter(mask, grades)
        return (NDCGLoss() if self.loss is None else self.loss)(table, relevance, mask=mask)

    def get_config_dict(self) -> dict[str, Any]:
        """The settings of the loss, for the model card."""
        activation = type(self.activation_fn).__name__
        return {
            "loss": described(self.loss),
            "activation_fn": activation,
            "mini_batch_size": self.mini_batch_size,
        }
