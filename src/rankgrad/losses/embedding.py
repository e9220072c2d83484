"""What the losses on embeddings share: normalise, pair up, rank the batch and, by itself, the memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad import _check
from rankgrad.distributed import Processes
from rankgrad.memory import EmbeddingMemory
from rankgrad.pairs import Lookup, check_batch, lookup, unit_length


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
        process_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.lam, self.window = _check.lam_or_window(lam, window, default=0.2)
        self.margin = _check.non_negative("margin", margin)
        self.memory = EmbeddingMemory(_check.count("memory", memory, at_least=0))
        if max_relevant is not None:
            max_relevant = _check.count("max_relevant", max_relevant, at_least=1)
        self.max_relevant = max_relevant
        self.processes = Processes(distributed, process_group)

    def list_loss(
        self, scores: Tensor, relevance: Tensor, mask: Tensor | None, lists: Tensor | None = None
    ) -> Tensor:
        """Mean loss of ``[queries, candidates]`` lists; ``lists``: how many count, where there are others."""
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
        """Mean loss over the lists of the batch's queries.

        Args:
            embeddings: ``[B, dim]``, any float dtype; L2-normalised here, in float32.
            labels: ``[B]`` integers; equal labels are relevant to each other.
            ref_embeddings: ``[R, dim]`` candidates instead of the batch itself.
            ref_labels: ``[R]``.
            query_index: ``[B]``: which row of the references each query is, to leave it out of its own list.
            items: ``[B]`` integers >= 0: which image each row of the batch is. Rows of one image, repeated by a
                sampler or remembered from an earlier batch, are left out of each other's lists.
        """
        check_batch(embeddings, labels, ref_embeddings, ref_labels, query_index, items)
        items = None if items is None else items.long()  # -1 means no item
        self.memory._check_fits("embeddings", embeddings)
        queries = unit_length(embeddings)
        if self.processes.several:
            if ref_embeddings is not None:
                raise _check.fail(
                    "ref_embeddings", "None in a distributed loss (batches are gathered)", ref_embeddings
                )
            own = items if items is not None else self.processes.numbered(len(labels), labels.device)
            fresh = Lookup(queries, labels, own, *map(self.processes.gather, (queries, labels, own)))
        else:
            fresh = lookup(queries, labels, ref_embeddings, ref_labels, query_index, items)
        kinds = [fresh]
        if self.memory.rows:
            old, old_labels, old_items, valid = self.memory.candidates()
            kinds.append(Lookup(queries, labels, items, old.to(queries.dtype), old_labels, old_items, valid))
        loss = self._mean(kinds)
        # Trainers may call eval() of the network alone: a batch without a gradient is not one to learn from.
        if self.training and queries.requires_grad:
            if self.processes.several:  # all of them remember the whole batch, in the same order
                remembered = None if items is None else fresh.rows
                self.memory.push(fresh.candidates, fresh.candidate_labels, remembered)
            else:
                self.memory.push(queries, labels, items)
        return loss

    def _mean(self, kinds: list[Lookup]) -> Tensor:
        """Mean over all lists that count: of every kind, and of every process."""
        pairs = [kind.pairs() for kind in kinds]
        if len(pairs) == 1 and not self.processes.several:
            return self.list_loss(*pairs[0])
        lists = torch.stack([_counting(relevance, mask) for _, relevance, mask in pairs]).sum()
        lists = self.processes.total(lists)
        losses = [self.list_loss(scores, relevance, mask, lists) for scores, relevance, mask in pairs]
        return self.processes.total(torch.stack(losses).sum())

    def reset(self) -> None:
        """Forget the memory."""
        self.memory.reset()

    def extra_repr(self) -> str:
        reach = f"lam={self.lam}" if self.window is None else f"window={self.window}"
        return f"{reach}, margin={self.margin}"


def _counting(relevance: Tensor, mask: Tensor | None) -> Tensor:
    """How many lists have something relevant."""
    return (relevance if mask is None else relevance & mask).any(-1).sum()
