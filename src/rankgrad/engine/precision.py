"""Dtypes of scores, counts and ranks in computation, and when scores count as equal."""

import contextlib
from typing import Any

import torch
from torch import Tensor

#: The spread is at least this share of the largest score: adding a window to that score must change it in float32.
LEAST_SHARE = 1e-6
#: A deviation that is no more than this share of the largest score is rounding: all scores are equal. (Two float32
#: numbers that differ make a larger one among up to 10^12.)
EQUAL = 1e-14


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp16, bf16 and fp32 scores are ranked as fp32 values (the upcast is exact), fp64 as fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def count_dtype(n: int) -> torch.dtype:
    """The smallest dtype that holds any rank change of a list of ``n`` items."""
    return torch.int32 if n < 2**31 else torch.int64


def rank_dtype(scores: Tensor) -> torch.dtype:
    """float32 while it holds every rank and half rank exactly, float64 beyond."""
    wide = scores.dtype == torch.float64 or scores.shape[-1] > 2**23
    return torch.float64 if wide else torch.float32


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Leave torch.autocast; entering that context costs as much as a launch, so only where autocast is on."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):  # torch raises for the device type meta
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
