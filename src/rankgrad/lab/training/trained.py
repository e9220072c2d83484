"""The trained network of a run, with its preprocessing, for use in other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.lab.training.errors import UserError
from rankgrad.pairs import unit_length


@dataclass(frozen=True)
class Exportable:
    """A network as other programs take it: tensors in, one tensor out, any number of rows.

    Attributes:
        module: What is exported.
        draw: Gives inputs of so many rows, on the module's device.
        inputs: Name of each input, and in words what it must be.
        output: Likewise.
        lengths: Where the second dimension of the inputs varies too (tokens): its smallest and its largest value.
        write_beside: Writes what else a program needs (a tokenizer) into a folder, and returns where.
    """

    module: nn.Module
    draw: Callable[[int], tuple[Tensor, ...]]
    inputs: dict[str, str]
    output: tuple[str, str]
    lengths: tuple[int, int | None] | None = None
    write_beside: Callable[[Path], Path] | None = None


class Trained:
    """The network of a run in evaluation mode; the base of what :func:`rankgrad.lab.use.load` returns.

    Args:
        config: The settings of the run.
        network: With the weights of a checkpoint.
        device: Where it is.
    """

    def __init__(self, config: Any, network: nn.Module, device: torch.device) -> None:
        self.config, self.device = config, device
        self.network = network.to(device).eval()

    def exportable(self) -> Exportable:
        """The network for other programs."""
        raise UserError(f"RUN: a network of the task {self.config.task!r} cannot be exported")


class TrainedEmbedder(Trained):
    """A network that embeds items, images or texts."""

    kind: str  #: what an item is: ``image`` or ``text``

    def embed(self, items: Sequence[Any], *, progress: Callable[[int], None] = lambda done: None) -> Tensor:
        """Embeddings of unit length, ``[N, dim]`` float32 on the CPU.

        ``progress`` is called with the number of items done so far.
        """
        raise NotImplementedError

    def embed_readable(
        self, items: Sequence[Any], *, progress: Callable[[int], None] = lambda done: None
    ) -> tuple[Tensor, list[int], list[str]]:
        """The same for the items that can be read, their rows in ``items``, and what is wrong with the others."""
        return self.embed(items, progress=progress), list(range(len(items))), []

    @staticmethod
    def unit(embeddings: Tensor) -> Tensor:
        """Embeddings of unit length on the CPU, if all of them are numbers."""
        odd = ~embeddings.isfinite().all(1)
        if bool(odd.any()):
            many = f"{int(odd.sum())} of {len(odd)} items"
            raise UserError(f"RUN: the network produced NaN or infinite embeddings for {many}")
        return unit_length(embeddings).cpu()
