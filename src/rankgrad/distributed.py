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
from torch import Tensor, nn

from rankgrad import _check


def active(group: dist.ProcessGroup | None = None) -> bool:
    """Whether there is more than one process (in the group)."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def count(group: dist.ProcessGroup | None = None) -> int:
    """How many processes there are."""
    return dist.get_world_size(group) if active(group) else 1


def process_index(group: dist.ProcessGroup | None = None) -> int:
    """Which of them this is; 0 is the one that writes files."""
    return dist.get_rank(group) if active(group) else 0


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
    return rows[process_index() * part : (process_index() + 1) * part]


def same_everywhere(value: Any) -> Any:
    """The value that process 0 has."""
    if not active():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def share_buffers(network: nn.Module) -> None:
    """Give all processes the buffers of process 0, such as the statistics of its batch norm, which it saves."""
    if active():
        for buffer in network.buffers():
            dist.broadcast(buffer, src=0)


class Processes:
    """The processes that share a batch: this one alone, those of a group, or all there are.

    Beside tensor or pipeline parallelism the group is that of the data-parallel processes, the one
    DistributedDataParallel has. A copy of a loss has the same group, which itself cannot be copied.

    Args:
        shared: Whether the batch is shared at all.
        group: A group of torch.distributed; None: all processes.
    """

    def __init__(self, shared: bool, group: dist.ProcessGroup | None) -> None:
        if group is not None and not shared:
            raise _check.fail("process_group", "None without distributed=True", group)
        self.shared, self.group = bool(shared), group

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        return self

    @property
    def several(self) -> bool:
        """Whether other processes hold parts of the batch."""
        return self.shared and active(self.group)

    def gather(self, rows: Tensor) -> Tensor:
        """As :func:`gather`, of these processes."""
        return gather(rows, self.group) if self.shared else rows

    def total(self, value: Tensor) -> Tensor:
        """As :func:`total`, of these processes."""
        return total(value, self.group) if self.shared else value

    def numbered(self, rows: int, device: torch.device) -> Tensor:
        """Row numbers of this process that are unique over all processes."""
        own = process_index(self.group) if self.several else 0
        return torch.arange(rows, device=device) + (own << 40)


def _sizes(rows: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    own = torch.tensor([len(rows)], device=rows.device)
    sizes = [torch.empty_like(own) for _ in range(count(group))]
    dist.all_gather(sizes, own, group=group)
    return [int(size) for size in torch.cat(sizes)]


def _gathered(rows: Tensor, sizes: list[int], group: dist.ProcessGroup | None) -> Tensor:
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        sizes = _sizes(rows, group)
        ctx.begin, ctx.size, ctx.group = sum(sizes[: process_index(group)]), len(rows), group
        if rows.dtype == torch.bool:
            return _gathered(rows.to(torch.uint8), sizes, group).bool()
        return _gathered(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.begin : ctx.begin + ctx.size], None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def gather(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All processes' rows in the order of their ranks, ``[sum of B, ...]``; gradients flow back likewise.

    Processes may have different numbers of rows (the sizes are exchanged first).
    """
    return cast(Tensor, _Gather.apply(rows, group)) if active(group) else rows


def total(value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum over processes, with gradient."""
    return cast(Tensor, _Total.apply(value, group)) if active(group) else value


def wait() -> None:
    """A barrier: wait for all processes."""
    if active():
        dist.barrier()
