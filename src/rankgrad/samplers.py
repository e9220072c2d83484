"""Which rows form a batch. A batch is a function of (seed, step): easy to resume and to split.

The samplers are torch ``BatchSampler``: give one to a DataLoader as ``batch_sampler``. Workers of a DataLoader
draw batches ahead of those you have seen, and ``state_dict`` counts what was drawn: to resume there, count your
own steps and call ``load_state_dict({"step": steps})``.

**Several processes.** One rule: a sampler plans whole batches, the same in every process, and gives each process
its part of every batch, in a plain loop and under Lightning. Only accelerate divides batches itself, in
``Accelerator.prepare`` and in the Hugging Face trainers built on it. So where an ``Accelerator`` exists the
sampler returns whole batches: one for each process, or one divided among them with ``split_batches=True``.
``shard=`` overrides this.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler

from rankgrad import _check, distributed

__all__ = ["ClassSampler", "SuperLabelSampler"]


def random_order(count: int, generator: torch.Generator) -> Tensor:
    """``[count]`` row numbers, shuffled; with the generator on the CPU, whatever the default device is."""
    return torch.randperm(count, generator=generator, device=generator.device)


def _accelerate_divides() -> bool:
    """Whether this process has an Accelerator, whose ``prepare`` divides the batches of a loader."""
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.is_initialized())


class Batches(BatchSampler):
    """Epochs of batches, each epoch planned at once from (seed, epoch). A subclass defines length and plan.

    Args:
        size: Rows of a batch, over all processes where the sampler divides it.
        seed: Which epochs are drawn.
        sampler: A ``DistributedSampler``, as Lightning hands one over: this process's part is the one of its
            ``rank`` among ``num_replicas``. None: of this process in ``torch.distributed``.
        shard: Whether iterating gives this process's part of each batch (True) or whole batches (False). None:
            parts, unless an ``Accelerator`` exists, which divides batches itself.
    """

    drop_last = True  # all batches are full

    def __new__(cls, *args: object, **kwargs: object) -> Batches:
        """Reject the call that Lightning makes for a loader created outside of its hooks, with advice."""
        if args and isinstance(args[0], DistributedSampler):
            raise TypeError(
                f"{cls.__name__}: expected labels first, received a {type(args[0]).__name__}. Under Lightning, "
                "make the loader inside train_dataloader, or pass use_distributed_sampler=False to the Trainer: "
                "the sampler divides its batches among the processes itself"
            )
        return super().__new__(cls)

    def __init__(
        self, size: int, seed: int, sampler: DistributedSampler[int] | None = None, shard: bool | None = None
    ) -> None:
        self.size = _check.count("size", size, at_least=1)
        self.seed = _check.count("seed", seed, at_least=0)
        if sampler is not None and not isinstance(sampler, DistributedSampler):
            raise _check.fail("sampler", "a torch.utils.data.DistributedSampler or None", sampler)
        self._process = None if sampler is None else (sampler.rank, sampler.num_replicas)
        self.shard = shard
        self.step = 0
        self._plans: dict[tuple[int, int], Tensor] = {}  # of the last two epochs, by (seed, epoch)

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Rows of a whole batch."""
        return self.size

    @property
    def sampler(self) -> Batches:  # type: ignore[override]
        """Itself: accelerate and Lightning call :meth:`set_epoch` on this attribute."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop begin this epoch; in the middle of it already, go on there."""
        if self.step // len(self) != _check.count("epoch", epoch, at_least=0):
            self.step = epoch * len(self)

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
        """The remaining batches of the epoch, or this process's part; then a new loop begins the next."""
        sharded = not _accelerate_divides() if self.shard is None else self.shard
        # Counted here: a trainer may call set_epoch when workers have drawn the first batches already.
        for _ in range(len(self) - self.step % len(self)):
            whole = self.at(self.step)
            batch = (self._part(whole) if sharded else whole).tolist()
            self.step += 1
            yield batch

    def _part(self, batch: Tensor) -> Tensor:
        if self._process is None:
            return distributed.share(batch)
        rank, count = self._process
        if len(batch) % count:
            raise _check.fail("size", f"a multiple of the {count} processes", len(batch))
        return batch.chunk(count)[rank]

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
    try:
        numbers = torch.as_tensor(labels, device="cpu")
    except (TypeError, ValueError):  # strings, or lists of different lengths
        raise _check.fail(name, "[N] integers", labels) from None
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
    out of its own list if they are given the image of each row (``items``).

    Args:
        labels: ``[N]`` integers.
        size: Batch size, a multiple of ``per_class``.
        per_class: K.
        seed: Which epochs are drawn.
        sampler, shard: Which part of a batch this process gets; as in :class:`Batches`, nearly never needed.

    Example:
        >>> from rankgrad.samplers import ClassSampler
        >>> labels = torch.arange(6).repeat_interleave(10)
        >>> sampler = ClassSampler(labels, size=12, per_class=4)
        >>> len(sampler), labels[sampler.at(0)].unique().numel()
        (5, 3)
    """

    def __init__(
        self,
        labels: Tensor | Sequence[int],
        *,
        size: int,
        per_class: int,
        seed: int = 0,
        sampler: DistributedSampler[int] | None = None,
        shard: bool | None = None,
    ) -> None:
        super().__init__(size, seed, sampler, shard)
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
        sampler, shard: Which part of a batch this process gets; as in :class:`Batches`, nearly never needed.

    Example:
        >>> from rankgrad.samplers import SuperLabelSampler
        >>> labels = torch.arange(8).repeat_interleave(5)
        >>> sampler = SuperLabelSampler(labels, labels // 4, size=8, per_class=2, batches_per_pair=3)
        >>> len(sampler), sampler.at(0).shape
        (3, torch.Size([8]))
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
        sampler: DistributedSampler[int] | None = None,
        shard: bool | None = None,
    ) -> None:
        super().__init__(size, seed, sampler, shard)
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
