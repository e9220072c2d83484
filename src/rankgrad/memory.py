"""Score and embedding memory: the last batches as further candidates (paper, section 4.3).

A ring of ``size`` slots, one batch each, padded to the largest batch seen. Buffers on the device say what is
valid and where the next batch goes: nothing waits for the GPU, and a state_dict holds everything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rankgrad import _check
from rankgrad.engine.precision import compute_dtype


class _Ring(nn.Module):
    """Batches of parallel tensors, ``[rows, ...]`` each, in a ring of slots."""

    fields: tuple[str, ...]  # the last one is bool: which rows, or which of their entries, exist
    position: Tensor

    @torch.inference_mode(False)
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = _check.count("size", size, at_least=0, at_most=_check.MANY)
        for name in self.fields:
            self.register_buffer(name, torch.empty(self.size, 0, dtype=torch.bool))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))

    def extra_repr(self) -> str:
        return f"size={self.size}"

    @torch.no_grad()
    @torch.inference_mode(False)
    def _push(self, *batch: Tensor) -> None:
        """Take in a batch, in place of the oldest."""
        self._make_writable()
        self._make_room(batch)
        for name, value in zip(self.fields, batch, strict=True):
            ring: Tensor = getattr(self, name)
            missing = ring.shape[1] - len(value)
            if missing:
                value = torch.cat([value, value.new_zeros(missing, *value.shape[1:])])
            ring.index_copy_(0, self.position, value.to(ring.dtype).unsqueeze(0))
        self.position.add_(1).remainder_(self.size)

    def _make_writable(self) -> None:
        """Copy tensors made in inference mode (as a deepcopy may): elsewhere they cannot be written to."""
        if torch.compiler.is_compiling():  # is_inference cannot be traced
            return
        for name in (*self.fields, "position"):
            held: Tensor = getattr(self, name)
            if held.is_inference():
                setattr(self, name, held.clone())

    def _make_room(self, batch: tuple[Tensor, ...]) -> None:
        """Bring the ring into the batch's shape: at first use, or when a batch is wider than any before."""
        rows = len(batch[0])
        if self.rows == 0:
            for name, value in zip(self.fields, batch, strict=True):
                setattr(self, name, value.new_zeros(self.size, rows, *value.shape[1:]))
            # Set to 0 again: in a memory built on `meta` and allocated by to_empty it is uninitialised.
            self.position = torch.zeros_like(self.position, device=batch[0].device)
        for name in self.fields:
            ring: Tensor = getattr(self, name)
            if ring.shape[1] < rows:
                grown = ring.new_zeros(self.size, rows, *ring.shape[2:])
                grown[:, : ring.shape[1]] = ring
                setattr(self, name, grown)

    def follow(self, device: torch.device) -> None:
        """Move to the device of the batches, if it was made or loaded elsewhere."""
        if self.position.device != device:
            with torch.inference_mode(False):
                self.to(device)

    def _check_fits(self, name: str, value: Tensor) -> None:
        """Require rows of the shape the memory holds."""
        ring: Tensor = getattr(self, name)
        if self.rows and ring.shape[2:] != value.shape[1:]:
            raise _check.fail(name, f"rows of shape {list(ring.shape[2:])}, as the memory holds", value)
        if self.rows:
            _check.same_device(name, value, "the memory", ring)

    @property
    def rows(self) -> int:
        """How many rows :meth:`candidates` has, padding included; 0 before the first batch."""
        ring: Tensor = getattr(self, self.fields[0])
        return ring.shape[0] * ring.shape[1]

    def _views(self) -> tuple[Tensor, ...]:
        """All slots of every field as rows ``[size * width, ...]``: no copies, the next batch overwrites them."""
        return tuple(getattr(self, name).flatten(0, 1) for name in self.fields)

    @torch.inference_mode(False)
    def reset(self) -> None:
        """Empty the memory; the shape of the batches is forgotten too."""
        for name in self.fields:
            ring: Tensor = getattr(self, name)
            setattr(self, name, ring.new_zeros(self.size, 0, *ring.shape[2:]))
        self.position = torch.zeros_like(self.position)

    @torch.inference_mode(False)
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._make_writable()
        held = [prefix + name for name in self.fields if prefix + name in state_dict]
        if prefix + "position" in state_dict and not any(state_dict[key].numel() for key in held):
            # Saved empty. Some writers keep one of several tensors with the same address; all empty ones have 0.
            for name in self.fields:
                state_dict.setdefault(prefix + name, torch.empty(self.size, 0, dtype=torch.bool))
        # The padding of the saved ring may differ from ours: take its shape, then copy as usual.
        for name in self.fields:
            saved = state_dict.get(prefix + name)
            if saved is None:
                continue
            if saved.shape[0] != self.size:
                raise ValueError(
                    f"{prefix}{name}: expected a memory of size {self.size}, received one of size {saved.shape[0]}"
                )
            ring: Tensor = getattr(self, name)
            if ring.shape != saved.shape or ring.dtype != saved.dtype:
                setattr(self, name, torch.empty_like(saved, device=ring.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ScoreMemory(_Ring):
    """Scores and relevance of the last ``size`` batches, ``[items, classes]`` each, detached.

    :class:`ClassRankingLoss` has one; by itself it serves losses of your own. Push a batch after its loss is
    computed.

    Args:
        size: How many batches to keep; 0 keeps nothing.

    Example:
        >>> memory = rankgrad.ScoreMemory(2)
        >>> memory.push(torch.rand(4, 3), torch.zeros(4, 3, dtype=torch.bool))
        >>> scores, relevance, mask = memory.candidates()
        >>> scores.shape, mask.sum()
        (torch.Size([8, 3]), tensor(12))
    """

    fields = ("scores", "relevance", "exists")

    def push(self, scores: Tensor, relevance: Tensor, mask: Tensor | None = None) -> None:
        """Take in a batch, ``[items, classes]``, in place of the oldest."""
        scores = _check.floating("scores", scores, ndim=2)
        relevance = _check.relevance(relevance, scores)
        mask = _check.mask(mask, scores)
        self._check_fits("scores", scores)
        if self.size == 0:
            return
        # A NaN score leaves out its (item, class) pair; the other classes of the item stay.
        valid = scores == scores  # not NaN, in one launch
        exists = valid if mask is None else mask & valid
        self._push(
            scores.detach().to(compute_dtype(scores.dtype)).nan_to_num(0.0, torch.inf, -torch.inf),
            relevance if relevance.dtype == torch.bool else relevance != 0,
            exists,
        )

    def candidates(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, relevance and mask, ``[rows, classes]`` each; no rows before the first batch."""
        if not self.rows:
            nothing = self.position.new_empty(0, 0)
            return nothing.float(), nothing.bool(), nothing.bool()
        scores, relevance, mask = (view.clone() for view in self._views())
        return scores, relevance, mask


class EmbeddingMemory(_Ring):
    """Embeddings of the last ``size`` batches, detached, with their labels and item numbers.

    :class:`RecallLoss`, :class:`AveragePrecisionLoss` and :class:`PairRankingLoss` have one; by itself it serves
    losses of your own. Push a batch after its loss is computed.

    Args:
        size: How many batches to keep; 0 keeps nothing.

    Example:
        >>> memory = rankgrad.EmbeddingMemory(3)
        >>> memory.push(torch.rand(4, 16), torch.tensor([0, 0, 1, 1]))
        >>> embeddings, labels, items, valid = memory.candidates()
        >>> embeddings.shape, items[valid], valid.sum()
        (torch.Size([12, 16]), tensor([-1, -1, -1, -1]), tensor(4))
    """

    fields = ("embeddings", "labels", "items", "valid")

    def push(self, embeddings: Tensor, labels: Tensor, items: Tensor | None = None) -> None:
        """Take in a batch in place of the oldest.

        Args:
            embeddings: ``[B, dim]``. A row with a NaN is left out.
            labels: ``[B]`` integers.
            items: ``[B]`` integers >= 0: which image each row is. Without them all rows get -1, which is no image.
        """
        embeddings = _check.floating("embeddings", embeddings, ndim=2)
        labels = _check.per_row("labels", labels, "embeddings", embeddings)
        if items is not None:
            items = _check.per_row("items", items, "embeddings", embeddings)
            _check.numbers_of("items", items, lowest=-1)
        self._check_fits("embeddings", embeddings)
        if self.size == 0:
            return
        items = torch.full_like(labels, -1, dtype=torch.int64) if items is None else items
        kept = embeddings.detach().to(compute_dtype(embeddings.dtype))
        valid = ~kept.isnan().any(1)  # a row with a NaN would spoil the following steps too
        self._push(kept.where(valid.unsqueeze(1), 0), labels.long(), items.long(), valid)

    def candidates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embeddings ``[rows, dim]``, labels, items and validity ``[rows]``; no rows before the first batch."""
        if not self.rows:
            nothing = self.position.new_empty(0)
            return nothing.float().reshape(0, 0), nothing, nothing, nothing.bool()
        embeddings, labels, items, valid = (view.clone() for view in self._views())
        return embeddings, labels, items, valid

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        labels = state_dict.get(prefix + "labels")
        if labels is not None and prefix + "items" not in state_dict:  # saved before items were remembered
            state_dict[prefix + "items"] = torch.full_like(labels, -1, dtype=torch.int64)
        super()._load_from_state_dict(state_dict, prefix, *rest)
