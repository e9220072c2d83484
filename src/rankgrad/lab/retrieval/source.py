"""A source of a retrieval run: items of one split as batches of (inputs, labels, ids) on a device.

Sampler, loss, evaluation and report use nothing else of what is embedded. A new kind of input is a subclass
of :class:`Source` and a network that takes what its :meth:`~Source.inputs` gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankgrad import distributed
from rankgrad.lab.retrieval.splits import Items
from rankgrad.lab.training.seeding import step_generator


class LabelledBatch(NamedTuple):
    """What the network takes, the labels ``[B]`` and the ids ``[B]``: equal ids are one item, drawn twice."""

    inputs: Any
    labels: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Draw:
    """The randomness of one training batch: equal whatever the number of processes.

    Args:
        generator: Seeded from (seed, step); to be used for the whole batch of all processes.
        total: Items in that batch.
        first: Which of them is this process's first one.
    """

    generator: torch.Generator
    total: int
    first: int

    @staticmethod
    def of(seed: int, step: int, total: int) -> Draw:
        """The draw of a step."""
        return Draw(
            step_generator(seed, step), total, distributed.process_index() * (total // distributed.count())
        )


class Source(ABC):
    """Items of one split.

    Args:
        items: What there is, in order: row i of it is id i.
        device: Where batches are made.
    """

    def __init__(self, items: Items, device: torch.device) -> None:
        self.items, self.device = items, device

    def __len__(self) -> int:
        return len(self.items)

    @abstractmethod
    def inputs(self, rows: Tensor, following: Tensor | None = None, draw: Draw | None = None) -> Any:
        """What the network takes for these rows, on the device.

        Args:
            rows: ``[B]`` row numbers.
            following: The rows of the next batch, which may begin to be read.
            draw: For training: how to augment. Without one the items as they are.
        """

    @abstractmethod
    def shown(self, row: int) -> dict[str, str]:
        """An item in the report: ``{"image": data URL}`` or ``{"text": ...}``."""

    def batch(self, rows: Tensor, following: Tensor | None = None, draw: Draw | None = None) -> LabelledBatch:
        """Inputs, labels and ids of these rows."""
        labels, ids = (part.to(self.device, non_blocking=True) for part in (self.items.labels[rows], rows))
        return LabelledBatch(self.inputs(rows, following, draw), labels, ids)


class Sources(NamedTuple):
    """Training items (None where only evaluated), the queries, and the gallery they search, if not themselves."""

    train: Source | None
    query: Source
    gallery: Source | None
