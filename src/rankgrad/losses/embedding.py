"""What the losses on embeddings share: normalise, pair up, rank the batch and, by itself, the memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankgrad import _check
from rankgrad.distributed import Processes
from rankgrad.engine.spread import spread_of
from rankgrad.losses._blocks import GlobalStats, LossSpec, list_stats, lookup_loss
from rankgrad.losses._list_loss import FormLike, tables_of
from rankgrad.memory import EmbeddingMemory
from rankgrad.pairs import Lookup, check_batch, lookup_of, unit_length
from rankgrad.reach import Margin, margin_of, reach_of, text_of


class EmbeddingLoss(nn.Module):
    """Base of the losses on embeddings: a loss on lists made from a batch, and from its memory.

    A subclass defines :attr:`form`, and may add a hinge in :meth:`spec`.
    """

    def __init__(
        self,
        lam: float | None,
        window: float | None,
        margin: Margin,
        memory: int,
        max_relevant: int | None,
        distributed: bool,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        reach_of(lam, window)
        margin_of(margin)
        self.lam, self.window, self.margin = lam, window, margin
        self.memory = EmbeddingMemory(_check.count("memory", memory, at_least=0, at_most=_check.MANY))
        if max_relevant is not None:
            max_relevant = _check.count("max_relevant", max_relevant, at_least=1)
        self.max_relevant = max_relevant
        self.processes = Processes(distributed, process_group)

    @property
    def form(self) -> FormLike:
        """Which loss of a list; see :data:`rankgrad.losses._list_loss.FormLike`."""
        raise NotImplementedError

    def spec(self, dtype: torch.dtype) -> LossSpec:
        """What is computed of every list of the batch, for scores of a dtype."""
        reach, (margin, is_share) = reach_of(self.lam, self.window, dtype), margin_of(self.margin, dtype)
        name = self.form if isinstance(self.form, str) else "tables"
        return LossSpec(name, reach.kind, reach.strength, margin, is_share, self.max_relevant)

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
            ids = items if items is not None else self.processes.numbered(len(labels), labels.device)
            fresh = Lookup(queries, labels, ids, *map(self.processes.gather, (queries, labels, ids)))
        else:
            fresh = lookup_of(queries, labels, ref_embeddings, ref_labels, query_index, items)
        lookups = [fresh]
        if self.memory.rows:
            old, old_labels, old_items, valid = self.memory._views()
            lookups.append(Lookup(queries, labels, items, old.to(queries.dtype), old_labels, old_items, valid))
        loss = self.mean(lookups)
        # Trainers may call eval() of the network alone: a batch without a gradient is not one to learn from.
        if self.training and queries.requires_grad:
            if self.processes.several:  # every process keeps the whole batch, in the same order
                remembered = None if items is None else fresh.candidate_ids
                self.memory.push(fresh.candidates, fresh.candidate_labels, remembered)
            else:
                self.memory.push(queries, labels, items)
        return loss

    def mean(self, lookups: list[Lookup]) -> Tensor:
        """Mean over all lists that count: of every lookup (the batch, then the memory), and of every process.

        Each lookup has its own spread: a drift of the fresh embeddings away from the remembered ones would enter a
        common one. Forces act on the first lookup alone.
        """
        several, dtype = self.processes.several, lookups[0].queries.dtype
        if not several and not len(lookups[0].queries):
            return lookups[0].queries.sum()  # no list counts: 0, with a gradient of no rows
        spec = self.spec(dtype)
        specs = [spec, *[spec._replace(forces="")] * (len(lookups) - 1)]
        stats = [GlobalStats(self._tables(one, spec.reach)) for one in lookups]
        alone = len(lookups) == 1 and not several
        if not alone:
            found = [list_stats(*one, several) for one in zip(lookups, specs, strict=True)]
            lists = self.processes.total(torch.stack([one.lists for one in found]).sum())
            stats = [one._replace(lists=lists) for one in stats]
            if several and spec.needs_spread:
                moments = self.processes.gather(torch.stack([one.moments for one in found]).unsqueeze(0))
                spreads = spread_of(moments, dtype)
                stats = [one._replace(spread=spread) for one, spread in zip(stats, spreads, strict=True)]
            if several and spec.forces == "hinge":
                stats[0] = stats[0]._replace(hinge_pairs=self.processes.total(found[0].hinge_pairs))
        losses = [lookup_loss(*one) for one in zip(lookups, stats, specs, strict=True)]
        return losses[0] if alone else self.processes.total(torch.stack(losses).sum())

    def _tables(self, lookup: Lookup, reach: str) -> Tensor | None:
        if isinstance(self.form, str):
            return None
        n, device = len(lookup.candidates), lookup.queries.device
        tables = tables_of(self.form, n, device, by_window=reach != "lam", wanted=True)
        if tables.requires_grad:
            raise ValueError(
                "weight: expected a W without parameters that learn, received one with some; "
                "give recall_loss the lists of retrieval_pairs to train them"
            )
        return tables

    def reset(self) -> None:
        """Empty the memory."""
        self.memory.reset()

    def extra_repr(self) -> str:
        return text_of(self.lam, self.window, self.margin)
