"""The spread of scores: their standard deviation in float64, over all blocks and processes."""

import torch
from torch import Tensor

from rankgrad.engine import cpu, cuda
from rankgrad.engine.dispatch import has_triton, large_on_cpu
from rankgrad.engine.precision import EQUAL, LEAST_SHARE
from rankgrad.engine.registration import is_plain_call

_BLOCK = 1 << 22  # scores that are turned into float64 at a time


def moments(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Count, mean, sum of squared deviations and largest absolute value of the finite existing scores.

    Args:
        scores: ``[calls, ...]``.
        mask: bool in the same shape, or None.

    Returns:
        float64 ``[calls, 4]``.
    """
    if _has_kernels(scores):
        return cuda.moments(scores, mask)[0]
    if large_on_cpu(scores) and is_plain_call(scores) and cpu.reads(scores.dtype):
        return cpu.moments(scores, mask)
    calls = scores.shape[0]
    rows = scores.detach().reshape(calls, -1)
    exists = None if mask is None else mask.reshape(calls, -1)
    parts = []
    for start in range(0, max(rows.shape[1], 1), _BLOCK):
        part = slice(start, start + _BLOCK)
        parts.append(_moments(rows[:, part], None if exists is None else exists[:, part]))
    return merged(torch.stack(parts))


def _moments(rows: Tensor, exists: Tensor | None) -> Tensor:
    values = rows.double()
    counted = values.isfinite() if exists is None else values.isfinite() & exists
    values = values.where(counted, 0)
    count = counted.sum(-1).double()
    mean = values.sum(-1) / count.clamp(min=1)
    squares = (values - mean.unsqueeze(-1)).where(counted, 0).square().sum(-1)
    largest = values.abs().amax(-1) if values.shape[-1] else torch.zeros_like(count)
    return torch.stack([count, mean, squares, largest], -1)


def merged(parts: Tensor) -> Tensor:
    """The moments of everything from those of its parts, ``[parts, ..., 4] -> [..., 4]`` (Chan et al. 1979)."""
    if parts.shape[0] == 1:
        return parts[0]
    count, mean, squares, largest = parts.unbind(-1)
    total = count.sum(0)
    together = (count * mean).sum(0) / total.clamp(min=1)
    squares = squares.sum(0) + (count * (mean - together).square()).sum(0)
    return torch.stack([total, together, squares, largest.amax(0)], -1)


def spread_of(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The spread from the :func:`moments` of all parts, ``[parts, ..., 4]`` -> float64 ``[...]``.

    At least :data:`LEAST_SHARE` of the largest score and the smallest normal number of ``dtype``, the compute
    dtype. Where all scores are equal it is 1: they have no scale, and a layer that starts at zero would get a
    gradient of 1e35.
    """
    count, _, squares, largest = merged(parts).unbind(-1)
    deviation = (squares / count.clamp(min=1)).sqrt()
    least = (LEAST_SHARE * largest).clamp(min=torch.finfo(dtype).tiny)
    return torch.maximum(deviation, least).masked_fill(deviation <= EQUAL * largest, 1.0)


def spread(scores: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The spread of each call's scores, ``[calls, ...]`` -> float64 ``[calls]``."""
    if _has_kernels(scores):
        return cuda.moments(scores, mask)[1]
    return spread_of(moments(scores, mask).unsqueeze(0), dtype)


def _has_kernels(scores: Tensor) -> bool:
    """Whether one pass of a kernel does it."""
    one_pass = scores.is_cuda and scores.dtype != torch.float64 and scores.numel() > 0
    return one_pass and is_plain_call(scores) and has_triton()
