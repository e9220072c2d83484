"""Which rows form a batch: a function of (seed, step), so easy to resume and to split among processes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rankgrad import _check, distributed


def random_order(count: int, generator: torch.Generator) -> Tensor:
    """``[count]`` row numbers, shuffled; with the generator on the CPU, whatever the default device is."""
    return torch.randperm(count, generator=generator, device=generator.device)


class Batches:
    """Epochs of batches, each epoch planned at once from (seed, epoch).

    A DataLoader with workers draws batches ahead of those you have seen, and :meth:`state_dict` counts what was
    drawn. So count your own steps, and resume by ``load_state_dict({"step": steps})``.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = _check.count("size", size, at_least=1)
        self.seed = _check.count("seed", seed, at_least=0)
        self.step = 0
        self._plans: dict[tuple[int, int], Tensor] = {}  # of the last two epochs, by (seed, epoch)

    def __len__(self) -> int:
        """Batches of an epoch."""
        raise NotImplementedError

    def plan(self, epoch: int) -> Tensor:
        """All batches of an epoch, ``[batches, size]`` rows."""
        raise NotImplementedError

    def at(self, step: int) -> Tensor:
        """The global batch of a step, counted from 0 over all epochs: ``[size]`` rows."""
        epoch, number = divmod(step, len(self))
        return self._planned(epoch)[number]

    def _planned(self, epoch: int) -> Tensor:
        key, plans = (self.seed, epoch), self._plans
        if key not in plans:
            self._plans = plans = {**dict([*plans.items()][-1:]), key: self.plan(epoch)}
        return plans[key]

    def __iter__(self) -> Iterator[list[int]]:
        """This process's part of the remaining batches of the epoch; the next epoch follows with the next loop."""
        while True:
            batch = distributed.share(self.at(self.step)).tolist()
            self.step += 1
            yield batch
            if self.step % len(self) == 0:
                return

    def state_dict(self) -> dict[str, int]:
        """How many batches were drawn; for a DataLoader with workers, more than you have seen."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a saved sampler stood, in the middle of an epoch too."""
        self.step = _check.count("step", state["step"], at_least=0)

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
