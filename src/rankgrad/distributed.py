"""Several processes, one batch: gathering rows and sums with gradients, so that N processes equal one.

The convention is torch's own for differentiable collectives: every process calls backward on the same total, so
a gradient that went through a collective arrives N times, and DistributedDataParallel's averaging undoes that.
With one process, or before ``torch.distributed`` is initialised, everything here is the identity.
"""

from __future__ import annotations

import os
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def active() -> bool:
    """Whether there is more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if active() else 1


def rank() -> int:
    """Which of them this is; 0 is the one that writes files."""
    return dist.get_rank() if active() else 0


def start(device: torch.device) -> torch.device:
    """Join the processes that torchrun launched, if it did; returns this process's device."""
    if "LOCAL_RANK" not in os.environ:
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def share(rows: Tensor) -> Tensor:
    """This process's rows of a global batch: equal parts, in the order of the ranks."""
    if len(rows) % count():
        raise ValueError(f"batch: expected a multiple of the {count()} processes, received {len(rows)}")
    part = len(rows) // count()
    return rows[rank() * part : (rank() + 1) * part]


def same_everywhere(value: Any) -> Any:
    """The value that process 0 has."""
    if not active():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _sizes(rows: Tensor) -> list[int]:
    own = torch.tensor([len(rows)], device=rows.device)
    sizes = [torch.empty_like(own) for _ in range(count())]
    dist.all_gather(sizes, own)
    return [int(size) for size in torch.cat(sizes)]


def _gathered(rows: Tensor, sizes: list[int]) -> Tensor:
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        sizes = _sizes(rows)
        ctx.begin, ctx.size = sum(sizes[: rank()]), len(rows)
        if rows.dtype == torch.bool:
            return _gathered(rows.to(torch.uint8), sizes).bool()
        return _gathered(rows, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad[ctx.begin : ctx.begin + ctx.size]


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


def gather(rows: Tensor) -> Tensor:
    """All processes' rows in the order of their ranks, ``[sum of B, ...]``; gradients return to their owner.

    Processes may have different numbers of rows (the sizes are exchanged first).
    """
    return cast(Tensor, _Gather.apply(rows)) if active() else rows


def total(value: Tensor) -> Tensor:
    """The sum over processes, with gradient."""
    return cast(Tensor, _Total.apply(value)) if active() else value


def numbered(rows: int, device: torch.device) -> Tensor:
    """Numbers for this process's rows that no other process gives."""
    return torch.arange(rows, device=device) + (rank() << 40)


def wait() -> None:
    """Until all processes are here."""
    if active():
        dist.barrier()
