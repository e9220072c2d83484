"""The average of a network's weights over the last steps, which is evaluated and saved in place of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """An exponential moving average of weights and buffers.

    Args:
        network: Its weights are averaged in place of being copied; it stays the network that is trained.
        steps: Over how many steps; over all of them as long as there are fewer.
    """

    def __init__(self, network: nn.Module, steps: float) -> None:
        learned = [p for p in network.parameters() if p.requires_grad]
        self._live = [t.detach() for t in (*learned, *network.buffers()) if t.is_floating_point()]
        self.kept = [t.clone() for t in self._live]
        self.decay = math.exp(-1 / max(steps, 1e-9))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after a step, counted from 1."""
        torch._foreach_lerp_(self.kept, self._live, 1 - min(self.decay, (step - 1) / (step + 1)))

    def load(self, kept: list[Tensor]) -> None:
        """Go on from a saved average."""
        for mine, saved in zip(self.kept, kept, strict=True):
            mine.copy_(saved)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The network has the average for its weights, in the same memory."""
        with torch.no_grad():
            trained = [t.clone() for t in self._live]
            torch._foreach_copy_(self._live, self.kept)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._live, trained)
