"""What the losses on embeddings share: normalise, pair up, rank against the batch and the memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankgrad import _check, distributed
from rankgrad.memory import EmbeddingMemory
from rankgrad.pairs import candidates_of, check_batch, pairs_of, unit_length


class EmbeddingLoss(nn.Module):
    """Base of :class:`RecallLoss` and :class:`AveragePrecisionLoss`: a loss on lists made from embeddings.

    Subclasses give :meth:`list_loss`.
    """

    def __init__(
        self,
        lam: float | None,
        margin: float,
        memory: int,
        max_relevant: int | None,
        distributed: bool,
        window: float | None,
    ) -> None:
        super().__init__()
        self.lam, self.window = _check.lam_or_window(lam, window, default=0.2)
        self.margin = _check.non_negative("margin", margin)
        self.memory = EmbeddingMemory(_check.count("memory", memory, at_least=0))
        if max_relevant is not None:
            max_relevant = _check.count("max_relevant", max_relevant, at_least=1)
        self.max_relevant = max_relevant
        self.distributed = bool(distributed)

    def list_loss(
        self, scores: Tensor, relevance: Tensor, mask: Tensor | None, lists: Tensor | None = None
    ) -> Tensor:
        """Mean loss of ``[queries, candidates]`` lists; ``lists`` counts those of all processes."""
        raise NotImplementedError

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        ref_embeddings: Tensor | None = None,
        ref_labels: Tensor | None = None,
        query_index: Tensor | None = None,
        *,
        items: Tensor | None = None,
    ) -> Tensor:
        """Mean loss over the batch's queries.

        Args:
            embeddings: ``[B, dim]``, any float dtype; L2-normalised here, in float32.
            labels: ``[B]`` integers; equal labels are relevant to each other.
            ref_embeddings: ``[R, dim]`` candidates instead of the batch itself.
            ref_labels: ``[R]``.
            query_index: ``[B]``: which row of the references each query is, to leave it out of its own list.
            items: ``[B]`` integers >= 0: which image each row of the batch is. Rows of one image, which a
                sampler may repeat, are left out of each other's lists.
        """
        check_batch(embeddings, labels, ref_embeddings, ref_labels, query_index, items)
        items = None if items is None else items.long()  # -1 below means no item
        self.memory._check_fits("embeddings", embeddings)
        queries = unit_length(embeddings)
        spread = self.distributed and distributed.active()
        if spread:
            if ref_embeddings is not None:
                raise _check.fail(
                    "ref_embeddings", "None in a distributed loss (batches are gathered)", ref_embeddings
                )
            own = items if items is not None else distributed.numbered(len(labels), labels.device)
            candidates, candidate_labels, rows = (distributed.gather(part) for part in (queries, labels, own))
        else:
            candidates, candidate_labels, own, rows = candidates_of(  # type: ignore[assignment]
                queries, labels, ref_embeddings, ref_labels, query_index, items
            )
        batch = (candidates, candidate_labels) if spread else (queries, labels)
        valid = None
        if self.memory.rows:
            old, old_labels, old_valid = self.memory.candidates()
            valid = torch.cat([old_valid.new_ones(len(candidates)), old_valid])
            candidates = torch.cat([candidates, old.to(candidates.dtype)])
            candidate_labels = torch.cat([candidate_labels, old_labels])
            rows = torch.cat([rows, rows.new_full((len(old),), -1)])
        scores, relevance, mask = pairs_of(queries, labels, candidates, candidate_labels, own, rows)
        if valid is not None:
            mask = valid.expand(scores.shape) if mask is None else mask & valid
        if spread:
            counting = (relevance if mask is None else relevance & mask).any(-1).sum()
            loss = distributed.total(self.list_loss(scores, relevance, mask, distributed.total(counting)))
        else:
            loss = self.list_loss(scores, relevance, mask)
        if self.training:
            self.memory.push(*batch)
        return loss

    def reset(self) -> None:
        """Forget the memory."""
        self.memory.reset()

    def extra_repr(self) -> str:
        reach = f"lam={self.lam}" if self.window is None else f"window={self.window}"
        return f"{reach}, margin={self.margin}"
