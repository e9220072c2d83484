"""From embeddings to score lists in few launches on a GPU: unit length, relevance, mask, how many lists count.

Called in plain eager mode and inside ops; see :func:`rankgrad.engine.registration.is_plain_call`.
"""

import functools
from types import ModuleType
from typing import Any

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
    return across(grad, unit, length, least)


def across(grad: Tensor, unit: Tensor, length: Tensor, least: float) -> Tensor:
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


def _labels_by_kernels(
    labels: Tensor, ids: Tensor | None, candidate_labels: Tensor, candidate_ids: Tensor
) -> bool:
    alike = labels.dtype == candidate_labels.dtype and (ids is None or ids.dtype == candidate_ids.dtype)
    some = len(labels) * len(candidate_labels)
    return bool(labels.is_cuda and alike and some and is_plain_call(labels) and has_triton())


def relevance_and_mask(
    labels: Tensor, ids: Tensor | None, candidate_labels: Tensor, candidate_ids: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Which candidates are relevant to which query, and which exist, ``[queries, candidates]``; None: all.

    Relevant are candidates with a query's label. A candidate with the query's id does not exist for it, nor does
    one that is not valid.
    """
    if _labels_by_kernels(labels, ids, candidate_labels, candidate_ids):
        return launch_flags(labels, ids, candidate_labels, candidate_ids, valid)
    mask = None if ids is None else ids.unsqueeze(1) != candidate_ids
    if valid is not None:
        mask = valid.expand(len(labels), -1) if mask is None else mask & valid
    return labels.unsqueeze(1) == candidate_labels, mask


def launch_flags(
    labels: Tensor, ids: Tensor | None, candidate_labels: Tensor, candidate_ids: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """:func:`relevance_and_mask` in one launch."""
    queries, candidates = len(labels), len(candidate_labels)
    relevance = torch.empty(queries, candidates, dtype=torch.bool, device=labels.device)
    mask = None if ids is None and valid is None else torch.empty_like(relevance)
    given = _label_arguments(labels, ids, candidate_labels, candidate_ids, valid)
    written = as_numbers(relevance), as_numbers(relevance if mask is None else mask)
    rows, block = 8, min(512, _width(candidates))
    grid = -(-queries // rows), min(-(-candidates // block), _MOST_BLOCKS)
    with on_its_device(labels):
        Launcher(_plan("flags", labels.device, queries, candidates, *kinds(*given)), labels.device)(
            _kernels().flag_pairs, grid, *given, *written, queries, candidates,
            OWN=ids is not None, VALID=valid is not None, ROWS=rows, BLOCK=block,
        )  # fmt: skip
    return relevance, mask


def counting_lists(
    labels: Tensor,
    ids: Tensor | None,
    candidate_labels: Tensor,
    candidate_ids: Tensor,
    valid: Tensor | None,
    rows: int,
) -> Tensor:
    """How many queries have a relevant candidate, a scalar; flags, if needed, of ``rows`` queries at a time."""
    if _labels_by_kernels(labels, ids, candidate_labels, candidate_ids):
        return launch_count_lists(labels, ids, candidate_labels, candidate_ids, valid)
    lists = torch.zeros((), dtype=torch.int64, device=labels.device)
    for start in range(0, len(labels), rows):
        part = slice(start, start + rows)
        its = None if ids is None else ids[part]
        relevance, mask = relevance_and_mask(labels[part], its, candidate_labels, candidate_ids, valid)
        lists = lists + (relevance if mask is None else relevance & mask).any(-1).sum()
    return lists


def launch_count_lists(
    labels: Tensor, ids: Tensor | None, candidate_labels: Tensor, candidate_ids: Tensor, valid: Tensor | None
) -> Tensor:
    """:func:`counting_lists` in one launch, without flags."""
    queries, candidates = len(labels), len(candidate_labels)
    lists = torch.zeros((), dtype=torch.int64, device=labels.device)
    given = _label_arguments(labels, ids, candidate_labels, candidate_ids, valid)
    with on_its_device(labels):
        Launcher(_plan("lists", labels.device, queries, candidates, *kinds(*given)), labels.device)(
            _kernels().count_lists, (-(-queries // 8), 1), *given, lists, queries, candidates,
            OWN=ids is not None, VALID=valid is not None, ROWS=8, BLOCK=min(512, _width(candidates)),
        )  # fmt: skip
    return lists


def _label_arguments(
    labels: Tensor, ids: Tensor | None, candidate_labels: Tensor, candidate_ids: Tensor, valid: Tensor | None
) -> list[Tensor]:
    """For the kernels; pointers that are not used point to some other tensor."""
    read = (labels, ids, candidate_labels, candidate_ids, valid)
    return [as_numbers(labels if one is None else one) for one in read]
