"""Which rows form a batch. A batch is a function of (seed, step): easy to resume and to split.

The samplers yield global batches of row numbers; several processes each take their part of the same batch
(:func:`rankgrad.distributed.share`). They can serve as ``batch_sampler`` of a torch DataLoader. Its workers draw
batches ahead: to resume there, count your own steps and say ``load_state_dict({"step": steps})``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

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


def _numbers(name: str, labels: Tensor | Sequence[int]) -> Tensor:
    """Labels as a tensor on the CPU; a list, such as the targets of torchvision's data sets, will do."""
    numbers = torch.as_tensor(labels, device="cpu")
    if numbers.ndim != 1 or numbers.is_floating_point():
        raise _check.fail(name, "[N] integers", labels)
    return numbers


def _rows_by(labels: Tensor) -> dict[int, Tensor]:
    order = labels.argsort(stable=True)
    values, counts = labels[order].unique_consecutive(return_counts=True)
    return dict(zip(values.tolist(), order.split(counts.tolist()), strict=True))


class ClassSampler(Batches):
    """P classes x K images: every class as often as the others, every image of a class as often.

    A class with fewer than K images repeats some in a batch; the losses of this library leave a repeated image
    out of its own list when told which image each row is (``items``).

    Args:
        labels: ``[N]`` integers.
        size: Batch size, a multiple of ``per_class``.
        per_class: K.
        seed: Which epochs are drawn.

    Example:
        >>> from rankgrad.samplers import ClassSampler
        >>> labels = torch.arange(6).repeat_interleave(10)
        >>> sampler = ClassSampler(labels, size=12, per_class=4)
        >>> len(sampler), labels[sampler.at(0)].unique().numel()
        (5, 3)
    """

    def __init__(self, labels: Tensor | Sequence[int], *, size: int, per_class: int, seed: int = 0) -> None:
        super().__init__(size, seed)
        self.per_class = _check.count("per_class", per_class, at_least=1)
        labels = _numbers("labels", labels)
        self._classes = list(_rows_by(labels).values())
        self._items = len(labels)
        if size % per_class:
            raise _check.fail("size", f"a multiple of per_class = {per_class}", size)
        if size // per_class > len(self._classes):
            expected = f"at most {per_class} images of each of the {len(self._classes)} classes"
            raise _check.fail("size", expected, size)

    def __len__(self) -> int:
        return max(1, self._items // self.size)

    def plan(self, epoch: int) -> Tensor:
        """All batches of an epoch, ``[batches, size]`` rows."""
        generator = self._generator(epoch)
        chosen = self.size // self.per_class
        waiting: list[list[int]] = [[] for _ in self._classes]
        classes: list[int] = []
        batches = []
        for _ in range(len(self)):
            if len(classes) < chosen:  # deal the classes out, then shuffle again: none comes twice in a batch
                late = set(classes)
                again = random_order(len(waiting), generator).tolist()
                classes += [c for c in again if c not in late] + [c for c in again if c in late]
            now, classes = classes[:chosen], classes[chosen:]
            batches.append([row for c in now for row in self._draw(waiting[c], self._classes[c], generator)])
        return torch.tensor(batches, device="cpu")

    def _draw(self, waiting: list[int], rows: Tensor, generator: torch.Generator) -> list[int]:
        while len(waiting) < self.per_class:
            shuffled = rows[random_order(len(rows), generator)].tolist()
            waiting += [r for r in shuffled if r not in waiting] + [r for r in shuffled if r in waiting]
        drawn = waiting[: self.per_class]
        del waiting[: self.per_class]
        return drawn


class SuperLabelSampler(Batches):
    """Batches from pairs of super-labels, as the paper draws them (after FastAP): hard negatives share a batch.

    An epoch: each class is shuffled and cut into groups of ``per_class`` (a short last group is filled up from the
    same class); the groups of a super-label are shuffled into a circular list; for every unordered pair of
    super-labels, in random order, ``batches_per_pair`` batches take half of their groups from each list.

    Args:
        labels: ``[N]`` integers.
        super_labels: ``[N]`` integers, at least two different ones.
        size: Batch size, a multiple of ``2 * per_class``.
        per_class: Images in a group.
        batches_per_pair: 10 for Stanford Online Products, 4 for In-shop in the paper.
        seed: Which epochs are drawn.
    """

    def __init__(
        self,
        labels: Tensor | Sequence[int],
        super_labels: Tensor | Sequence[int],
        *,
        size: int,
        per_class: int,
        batches_per_pair: int,
        seed: int = 0,
    ) -> None:
        super().__init__(size, seed)
        self.per_class = _check.count("per_class", per_class, at_least=1)
        self.batches_per_pair = _check.count("batches_per_pair", batches_per_pair, at_least=1)
        if size % (2 * per_class):
            raise _check.fail("size", f"a multiple of 2 * per_class = {2 * per_class}", size)
        labels, super_labels = _numbers("labels", labels), _numbers("super_labels", super_labels)
        if len(super_labels) != len(labels):
            raise _check.fail("super_labels", f"one for each of the {len(labels)} labels", super_labels)
        by_super = _rows_by(super_labels)
        if len(by_super) < 2:
            raise _check.fail("super_labels", "at least two different ones", super_labels)
        self._supers = [[rows[part] for part in _rows_by(labels[rows]).values()] for rows in by_super.values()]
        self._pairs = list(combinations(range(len(self._supers)), 2))

    def __len__(self) -> int:
        return len(self._pairs) * self.batches_per_pair

    def plan(self, epoch: int) -> Tensor:
        """All batches of an epoch, ``[batches, size]`` rows."""
        generator = self._generator(epoch)
        groups = [self._groups(classes, generator) for classes in self._supers]
        pointers = [0] * len(groups)
        half = self.size // (2 * self.per_class)
        batches = []
        for pair in random_order(len(self._pairs), generator).tolist():
            for _ in range(self.batches_per_pair):
                halves = []
                for at in self._pairs[pair]:
                    index = (pointers[at] + torch.arange(half, device="cpu")) % len(groups[at])
                    halves.append(groups[at][index].flatten())
                    pointers[at] = (pointers[at] + half) % len(groups[at])
                batches.append(torch.cat(halves))
        return torch.stack(batches)

    def _groups(self, classes: list[Tensor], generator: torch.Generator) -> Tensor:
        """``[groups, per_class]`` rows of one super-label, shuffled."""
        groups = []
        for rows in classes:
            shuffled = rows[random_order(len(rows), generator)]
            missing = -len(rows) % self.per_class
            filled = torch.arange(missing, device="cpu") % len(rows)  # a class smaller than the gap goes round
            groups.append(torch.cat([shuffled, shuffled[filled]]).reshape(-1, self.per_class))
        together = torch.cat(groups)
        return together[random_order(len(together), generator)]
