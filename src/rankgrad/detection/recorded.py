"""A loss recorded as a CUDA graph: one launch instead of some hundred, for losses whose work is small.

Everything of the loss is in the recording: ranks, cross entropy, their gradient at an upstream gradient of one
(it is linear in what arrives), and the push into the memory. Batches are padded to the recorded number of
regions; padding is masked, and masked is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

Eager = Callable[[Tensor, Tensor, Tensor], Tensor]


class Recording:
    """One recorded step of a loss with buffers.

    Args:
        module: Whose buffers the loss reads and writes; they are as before afterwards.
        eager: ``(class_logits, labels, mask) -> loss`` of the module.
        rows: Regions at most.
        columns: Logits of a region.
        device: A CUDA device.
    """

    def __init__(self, module: nn.Module, eager: Eager, rows: int, columns: int, device: torch.device) -> None:
        self.rows, self.columns, self._module, self._eager = rows, columns, module, eager
        self.logits = torch.zeros(rows, columns, device=device, requires_grad=True)
        self.labels = torch.zeros(rows, dtype=torch.int64, device=device)
        self.mask = torch.zeros(rows, dtype=torch.bool, device=device)
        before = [buffer.clone() for buffer in module.buffers()]
        current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(3):  # compile and allocate outside of the recording
                self._work()
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.value, self.gradient = self._work()
        for buffer, old in zip(module.buffers(), before, strict=True):
            buffer.copy_(old)
        self._addresses = self._where()

    def _work(self) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            value = self._eager(self.logits, self.labels, self.mask)
            (gradient,) = torch.autograd.grad(value, self.logits)
        return value.detach(), gradient

    def _where(self) -> list[int]:
        return [buffer.data_ptr() for buffer in self._module.buffers()]

    def fits(self, class_logits: Tensor) -> bool:
        """Whether it can stand for the loss of these logits: same form, and the buffers are where they were."""
        return (
            len(class_logits) <= self.rows
            and class_logits.shape[1] == self.columns
            and class_logits.device == self.logits.device
            and self._addresses == self._where()
        )

    def __call__(self, class_logits: Tensor, labels: Tensor) -> Tensor:
        """The loss, with gradient; the memory takes the regions in."""
        return cast(Tensor, _Replay.apply(class_logits, labels, self))

    def replay(self, class_logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient at the logits."""
        count = len(class_logits)
        with torch.no_grad():
            self.logits[:count].copy_(class_logits)
            self.labels[:count].copy_(labels)
            self.mask[:count] = True
            self.mask[count:] = False
        self._graph.replay()
        return self.value.clone(), self.gradient[:count].clone()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, class_logits: Tensor, labels: Tensor, recording: Recording) -> Tensor:
        value, gradient = recording.replay(class_logits, labels)
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None


def padded(class_logits: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and a mask of so many rows."""
    more = rows - len(class_logits)
    mask = torch.arange(rows, device=class_logits.device) < len(class_logits)
    return (
        torch.cat([class_logits, class_logits.new_zeros(more, class_logits.shape[1])]),
        torch.cat([labels, labels.new_zeros(more)]),
        mask,
    )
