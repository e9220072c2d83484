"""What the losses on embeddings share: normalise, pair up, rank the batch and, by itself, the memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad import _check
from rankgrad.distributed import Processes
from rankgrad.engine.spread import spread_of
from rankgrad.losses._blocks import Asked, lookup_loss, survey
from rankgrad.losses._lists import Form, loss_of_lists, tables_of
from rankgrad.memory import EmbeddingMemory
from rankgrad.pairs import Lookup, check_batch, lookup, unit_length
from rankgrad.reach import Margin, Reach, margin_of, reach_of, text_of


class EmbeddingLoss(nn.Module):
    """Base of :class:`RecallLoss` and :class:`AveragePrecisionLoss`: a loss on lists made from embeddings.

    Subclasses give :attr:`form`.
    """

    def __init__(
        self,
        lam: float | None,
        margin: Margin,
        memory: int,
        max_relevant: int | None,
        distributed: bool,
        window: float | None,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        reach_of(lam, window), margin_of(margin)
        self.lam, self.window, self.margin = lam, window, margin
        self.memory = EmbeddingMemory(_check.count("memory", memory, at_least=0))
        if max_relevant is not None:
            max_relevant = _check.count("max_relevant", max_relevant, at_least=1)
        self.max_relevant = max_relevant
        self.processes = Processes(distributed, process_group)

    @property
    def form(self) -> Form:
        """What is computed of every list; see :func:`rankgrad.losses._lists.loss_of_lists`."""
        raise NotImplementedError

    def list_loss(
        self,
        scores: Tensor,
        relevance: Tensor,
        mask: Tensor | None,
        lists: Tensor | None = None,
        spread: Tensor | None = None,
    ) -> Tensor:
        """Mean loss of ``[queries, candidates]`` lists.

        ``lists``, ``spread``: how many lists count and the spread of all scores, where other calls have some.
        """
        return loss_of_lists(
            scores,
            relevance,
            form=self.form,
            lam=self.lam,
            window=self.window,
            margin=self.margin,
            mask=mask,
            max_relevant=self.max_relevant,
            lists=lists,
            spread=spread,
        )

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
            old, old_labels, old_items, valid = self.memory._candidates()
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
        """Mean over all lists that count: of every kind, and of every process.

        Each kind has its own spread: a drift of the fresh embeddings away from the remembered ones would enter a
        common one.
        """
        alone = len(kinds) == 1 and not self.processes.several
        if torch._C._are_functorch_transforms_active():  # these take one matrix product, not the op over blocks
            # The candidates are kept for backward, and the memory changes before.
            pairs = [kind._replace(candidates=kind.candidates.clone()).pairs() for kind in kinds]
            lists = None if alone else torch.stack([_counting(*one[1:]) for one in pairs]).sum()
            return torch.stack([self.list_loss(*one, lists) for one in pairs]).sum()
        dtype = kinds[0].queries.dtype
        reach, (margin, is_share) = reach_of(self.lam, self.window, dtype), margin_of(self.margin, dtype)
        name = self.form if isinstance(self.form, str) else "tables"
        asked = Asked(name, reach.kind, reach.strength, margin, is_share, self.max_relevant)
        lists, spreads = None, [None] * len(kinds)
        if not alone:
            several = self.processes.several
            counting, moments = zip(*(survey(kind, several and asked.needs_spread) for kind in kinds), strict=True)
            lists = self.processes.total(torch.stack(counting).sum())
            if several and asked.needs_spread:
                everywhere = self.processes.gather(torch.stack(moments).unsqueeze(0))
                spreads = list(spread_of(everywhere, dtype))
        losses = [
            lookup_loss(kind, self._tables(kind, reach), lists, spread, asked)
            for kind, spread in zip(kinds, spreads, strict=True)
        ]
        return losses[0] if alone else self.processes.total(torch.stack(losses).sum())

    def _tables(self, kind: Lookup, reach: Reach) -> Tensor | None:
        form = self.form
        if isinstance(form, str):
            return None
        by_window = reach.kind != "lam"
        return tables_of(
            form, len(kind.candidates), kind.queries.device, by_window=by_window, wanted=True
        ).detach()

    def reset(self) -> None:
        """Empty the memory."""
        self.memory.reset()

    def extra_repr(self) -> str:
        return text_of(self.lam, self.window, self.margin)


def _counting(relevance: Tensor, mask: Tensor | None) -> Tensor:
    """How many lists have something relevant."""
    return (relevance if mask is None else relevance & mask).any(-1).sum()
