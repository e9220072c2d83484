"""How Python and torch values are handed to Triton kernels."""

import struct

import torch
from torch import Tensor


def bits(value: float) -> int:
    """A float64 as its bits: Triton would pass it as float32."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def half_of(margin: float) -> float:
    """fl(margin / 2) as a float32 value."""
    return float(struct.unpack("f", struct.pack("f", margin / 2))[0])


def as_bytes(flags: Tensor) -> Tensor:
    """Bools as the bytes they are."""
    return flags.contiguous().view(torch.uint8)
