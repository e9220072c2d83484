"""From embeddings to score lists in few launches on a GPU: unit length, relevance, mask, how many lists count.

Called in plain eager mode and inside ops; see :func:`rankgrad.engine.registration.is_plain_call`.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankgrad.engine.dispatch import has_triton
from rankgrad.engine.launching import Launcher, Plan, kinds, on_its_device
from rankgrad.engine.registration import is_plain_call
from rankgrad.engine.triton_arguments import as_numbers

_WIDEST = 16_384  # a row is held in registers
_MOST_BLOCKS = 65_535
SHORTEST = 1e-12  # shorter rows are divided by this, as torch.nn.functional.normalize does


@functools.cache
def _kernels() -> ModuleType:
    from rankgrad.engine._kernels import rows

    return rows


@functools.lru_cache(maxsize=256)
def _plan(*key: Any) -> Plan:
    return Plan()


def _width(columns: int) -> int:
    return max(32, 1 << (columns - 1).bit_length())


def _by_kernels(rows: Tensor) -> bool:
    fits = rows.ndim == 2 and rows.dtype == torch.float32 and rows.numel() > 0 and rows.shape[1] <= _WIDEST
    return rows.is_cuda and fits and has_triton()


def normalized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of unit length and the lengths before, ``[rows, 1]``."""
    if _by_kernels(rows):
        return launch_normalize(rows)
    length = lengths_of(rows)
    return rows / length.clamp_min(SHORTEST), length


def lengths_of(rows: Tensor) -> Tensor:
    """Lengths along the last dimension, which stays.

    By squares in float64: those of numbers beyond 1e19 are infinite in float32. A length that float32 does not
    hold is the largest number it has.
    """
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64)
    bounded = lengths.clamp(max=torch.finfo(rows.dtype).max)
    return bounded.where(lengths.isfinite(), lengths).to(rows.dtype)  # infinite rows become NaN


def launch_normalize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`normalized` in one launch."""
    rows, (count, width) = rows.contiguous(), rows.shape
    unit, length = torch.empty_like(rows), rows.new_empty(count, 1)
    with on_its_device(rows):
        Launcher(_plan("forward", rows.device, width, *kinds(rows)), rows.device)(
            _kernels().normalize_rows, (count, 1), rows, unit, length, width, SHORTEST, BLOCK=_width(width)
        )
    return unit, length


def normalized_backward(grad: Tensor, unit: Tensor, length: Tensor, least: float) -> Tensor:
    """The gradient of rows from that of :func:`normalized` ones, bounded for rows shorter than ``least``."""
    if _by_kernels(grad):
        return launch_normalize_backward(grad, unit, length, least)
    return gradient_of_normalized(grad, unit, length, least)


def gradient_of_normalized(grad: Tensor, unit: Tensor, length: Tensor, least: float) -> Tensor:
    """The formula of :func:`normalized_backward`, which can be differentiated again."""
    sideways = grad - unit * (grad * unit).sum(-1, keepdim=True)
    return sideways * torch.minimum(length.clamp_min(least).reciprocal(), length / least / least)


def launch_normalize_backward(grad: Tensor, unit: Tensor, length: Tensor, least: float) -> Tensor:
    """:func:`normalized_backward` in one launch."""
    grad, (count, width) = grad.contiguous(), grad.shape
    out = torch.empty_like(grad)
    with on_its_device(grad):
        Launcher(_plan("backward", grad.device, width, *kinds(grad)), grad.device)(
            _kernels().normalize_rows_backward, (count, 1), grad, unit, length, out, width, least,
            BLOCK=_width(width),
        )  # fmt: skip
    return out


class Labels(NamedTuple):
    """Labels and ids of queries and candidates.

    Relevant are candidates with a query's label. A candidate with the query's id does not exist for it, nor does
    one that is not valid.

    Attributes:
        labels: ``[queries]``.
        ids: ``[queries]``; None: no candidate is left out by its id.
        candidate_labels: ``[candidates]``.
        candidate_ids: ``[candidates]``.
        valid: bool ``[candidates]``; None: all are.
    """

    labels: Tensor
    ids: Tensor | None
    candidate_labels: Tensor
    candidate_ids: Tensor
    valid: Tensor | None

    def part(self, queries: slice) -> Labels:
        """Some of the queries, all candidates."""
        ids = None if self.ids is None else self.ids[queries]
        return self._replace(labels=self.labels[queries], ids=ids)

    def arguments(self) -> list[Tensor]:
        """For the kernels; pointers that are not used point to some other tensor."""
        return [as_numbers(self.labels if one is None else one) for one in self]


def _labels_by_kernels(given: Labels) -> bool:
    labels, ids, candidate_labels, candidate_ids, _ = given
    alike = labels.dtype == candidate_labels.dtype and (ids is None or ids.dtype == candidate_ids.dtype)
    some = len(labels) * len(candidate_labels)
    return bool(labels.is_cuda and alike and some and is_plain_call(labels) and has_triton())


def relevance_and_mask(given: Labels) -> tuple[Tensor, Tensor | None]:
    """Which candidates are relevant to which query, and which exist, ``[queries, candidates]``; None: all."""
    if _labels_by_kernels(given):
        return launch_flags(given)
    labels, ids, candidate_labels, candidate_ids, valid = given
    mask = None if ids is None else ids.unsqueeze(1) != candidate_ids
    if valid is not None:
        mask = valid.expand(len(labels), -1) if mask is None else mask & valid
    return labels.unsqueeze(1) == candidate_labels, mask


def launch_flags(given: Labels) -> tuple[Tensor, Tensor | None]:
    """:func:`relevance_and_mask` in one launch."""
    queries, candidates, device = len(given.labels), len(given.candidate_labels), given.labels.device
    relevance = torch.empty(queries, candidates, dtype=torch.bool, device=device)
    mask = None if given.ids is None and given.valid is None else torch.empty_like(relevance)
    read = given.arguments()
    written = as_numbers(relevance), as_numbers(relevance if mask is None else mask)
    rows, block = 8, min(512, _width(candidates))
    grid = -(-queries // rows), min(-(-candidates // block), _MOST_BLOCKS)
    with on_its_device(given.labels):
        Launcher(_plan("flags", device, queries, candidates, *kinds(*read)), device)(
            _kernels().flag_pairs, grid, *read, *written, queries, candidates,
            OWN=given.ids is not None, VALID=given.valid is not None, ROWS=rows, BLOCK=block,
        )  # fmt: skip
    return relevance, mask


def counting_lists(given: Labels, rows: int) -> Tensor:
    """How many queries have a relevant candidate, a scalar; flags, if needed, of ``rows`` queries at a time."""
    if _labels_by_kernels(given):
        return launch_count_lists(given)
    lists = torch.zeros((), dtype=torch.int64, device=given.labels.device)
    for start in range(0, len(given.labels), rows):
        relevance, mask = relevance_and_mask(given.part(slice(start, start + rows)))
        lists = lists + (relevance if mask is None else relevance & mask).any(-1).sum()
    return lists


def launch_count_lists(given: Labels) -> Tensor:
    """:func:`counting_lists` in one launch, without flags."""
    queries, candidates, device = len(given.labels), len(given.candidate_labels), given.labels.device
    lists = torch.zeros((), dtype=torch.int64, device=device)
    read = given.arguments()
    with on_its_device(given.labels):
        Launcher(_plan("lists", device, queries, candidates, *kinds(*read)), device)(
            _kernels().count_lists, (-(-queries // 8), 1), *read, lists, queries, candidates,
            OWN=given.ids is not None, VALID=given.valid is not None, ROWS=8, BLOCK=min(512, _width(candidates)),
        )  # fmt: skip
    return lists
