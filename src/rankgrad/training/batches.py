"""Which rows form a batch: a function of (seed, step), so easy to resume and to split among processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from rankgrad import _check, distributed


class Batches:
    """Epochs of batches, each epoch planned at once from (seed, epoch)."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = _check.count("size", size, at_least=1)
        self.seed = _check.count("seed", seed, at_least=0)
        self.step = 0
        self._plan = lru_cache(maxsize=2)(self.plan)

    def __len__(self) -> int:
        """Batches of an epoch."""
        raise NotImplementedError

    def plan(self, epoch: int) -> Tensor:
        """All batches of an epoch, ``[batches, size]`` rows."""
        raise NotImplementedError

    def at(self, step: int) -> Tensor:
        """The global batch of a step, counted from 0 over all epochs: ``[size]`` rows."""
        return self._plan(step // len(self))[step % len(self)]

    def __iter__(self) -> Iterator[list[int]]:
        """This process's part of the remaining batches of the epoch; the next epoch follows with the next loop."""
        while True:
            batch = distributed.share(self.at(self.step)).tolist()
            self.step += 1
            yield batch
            if self.step % len(self) == 0:
                return

    def state_dict(self) -> dict[str, int]:
        """How many batches were drawn."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a saved sampler stood, in the middle of an epoch too."""
        self.step = _check.count("step", state["step"], at_least=0)

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
