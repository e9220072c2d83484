"""What the losses on embeddings share: normalise, pair up, rank against the batch and the memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankgrad import _check
from rankgrad.memory import EmbeddingMemory
from rankgrad.pairs import candidates_of, check_batch, pairs_of, unit_length


class EmbeddingLoss(nn.Module):
    """Base of :class:`RecallLoss` and :class:`AveragePrecisionLoss`: a loss on lists made from embeddings.

    Subclasses give :meth:`list_loss`.
    """

    def __init__(self, lam: float, margin: float, memory: int, max_relevant: int | None) -> None:
        super().__init__()
        self.lam = _check.lam(lam)
        self.margin = _check.non_negative("margin", margin)
        self.memory = EmbeddingMemory(_check.count("memory", memory, at_least=0))
        if max_relevant is not None:
            max_relevant = _check.count("max_relevant", max_relevant, at_least=1)
        self.max_relevant = max_relevant

    def list_loss(self, scores: Tensor, relevance: Tensor, mask: Tensor | None) -> Tensor:
        """Mean loss of ``[queries, candidates]`` lists."""
        raise NotImplementedError

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_embeddings: Tensor | None = None,
        ref_labels: Tensor | None = None,
        query_index: Tensor | None = None,
    ) -> Tensor:
        """Mean loss over the batch's queries.

        Args:
            embeddings: ``[B, dim]``, any float dtype; L2-normalised here, in float32.
            labels: ``[B]`` integers; equal labels are relevant to each other.
            ref_embeddings: ``[R, dim]`` candidates instead of the batch itself.
            ref_labels: ``[R]``.
            query_index: ``[B]``: which row of the references each query is, to leave it out of its own list.
        """
        check_batch(embeddings, labels, ref_embeddings, ref_labels, query_index)
        self.memory._check_fits("embeddings", embeddings)
        queries = unit_length(embeddings)
        candidates, candidate_labels, own = candidates_of(queries, labels, ref_embeddings, ref_labels, query_index)
        valid = None
        if self.memory.rows:
            old, old_labels, old_valid = self.memory.candidates()
            valid = torch.cat([old_valid.new_ones(len(candidates)), old_valid])
            candidates = torch.cat([candidates, old.to(candidates.dtype)])
            candidate_labels = torch.cat([candidate_labels, old_labels])
        scores, relevance, mask = pairs_of(queries, labels, candidates, candidate_labels, own)
        if valid is not None:
            mask = valid.expand(scores.shape) if mask is None else mask & valid
        loss = self.list_loss(scores, relevance, mask)
        if self.training:
            self.memory.push(queries, labels)
        return loss

    def reset(self) -> None:
        """Forget the memory."""
        self.memory.reset()

    def extra_repr(self) -> str:
        return f"lam={self.lam}, margin={self.margin}"
