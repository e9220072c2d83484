"""What a recipe trains: a task brings data, a network, a loss and an evaluation to the loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rankgrad import distributed
from rankgrad.lab.training.checkpoint import Checkpoint
from rankgrad.lab.training.config import RunConfig
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.trained import Trained

#: Trains under a name with these settings, as a trial before the run itself; returns the last evaluation, empty if
#: training failed.
Training = Callable[[str, Any], Mapping[str, float]]


def check_batch_size(size: int) -> None:
    """Require a batch that the processes can share in equal parts."""
    if size % distributed.count():
        several = f"a multiple of the {distributed.count()} processes"
        raise UserError(f"batch.size: expected {several}, received {size}")


class Task(ABC):
    """One kind of training (image retrieval, detection, ...), and one run of it.

    The class says what can be set and how a finished run is judged and reported; an instance, made from the
    settings and a device, has read its data and built network and loss. :data:`rankgrad.lab.tasks.TASKS` lists
    all of them.

    Whatever is random must follow from (seed, step): the loop seeds the generators before each step, so a
    checkpoint holds no random state and a resumed run is the same to the bit.
    """

    config_class: ClassVar[type[RunConfig]]  #: the settings of a run
    headline: str  #: the metric that says which checkpoint is best; higher is better
    tie_break: str = ""  #: decides between evaluations with the same headline; of equal ones the last is best
    same_shapes: ClassVar[bool]  #: all batches have one shape: cuDNN may benchmark its algorithms

    network: Any  #: a Module: what is trained and saved as weights
    loss: nn.Module  #: its parameters are trained too; its state (memory, proxies) is saved with the run
    steps_per_epoch: int
    items_per_step: int  #: items in a batch, of all processes
    tested_items: float  #: items of an evaluation; larger images than in training count as more
    #: Scalars of the last step to log beside the loss; the same names in every step, NaN if not known.
    parts: dict[str, Tensor]
    notes: Sequence[str] = ()  #: lines about data and settings, printed before training begins

    @abstractmethod
    def __init__(self, config: Any, device: torch.device) -> None: ...

    @abstractmethod
    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters of network and loss, with a ``scale`` on the learning rate where it is not 1.

        A group with ``begin`` stays as it is in the first so many epochs.
        """

    @abstractmethod
    def batch_loss(self, network: nn.Module, step: int) -> Tensor:
        """The loss of the batch of a step; ``network`` is the task's own, perhaps compiled or wrapped."""

    def watch(self, rows: Sequence[Mapping[str, float]]) -> list[str]:
        """Check the logged rows of finished steps: returns lines to print, or raises to stop the run.

        A resumed run begins with the rows logged before, so any state of this method must follow from them.
        """
        return []

    def describe(self) -> dict[str, Any]:
        """What the report says about the data, for JSON; written as ``data.json`` when training begins."""
        return {}

    @classmethod
    def completed(cls, config: Any) -> Any:
        """The settings with everything filled in that follows from others, as they are saved with a run."""
        return config

    @classmethod
    def chosen(
        cls, config: Any, device: torch.device, train: Training, print_note: Callable[[str], None]
    ) -> tuple[Any, list[str]]:
        """The settings with those that are found by trials on part of the training data, and notes on them.

        ``train(name, settings)`` does a trial on the device; see :data:`Training`. ``print_note`` is
        called with what the user should know before the trials.
        """
        return config, []

    @classmethod
    def as_chosen(cls, config: Any, before: Any) -> Any:
        """The settings of a resumed run, with what :meth:`chosen` found ``before``: the settings saved with it."""
        return config

    @classmethod
    def located(cls, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The settings saved with a checkpoint in this folder; what the run itself keeps is taken from there."""
        return settings

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """The metrics of the network as it is now."""

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """What a checkpoint needs besides settings and weights to build the network again."""

    @abstractmethod
    def finish(self, folder: Path) -> None:
        """After training, with the best weights, in every process: process 0 writes what the report shows."""

    @classmethod
    def loss_arguments(cls, config: Any) -> dict[str, tuple[Any, str]]:
        """Default and meaning of the arguments of the loss in these settings, by their keys (``loss.margin``)."""
        return {}

    @classmethod
    @abstractmethod
    def listing(cls) -> dict[str, dict[str, str]]:
        """What the task offers, by kind (losses, data sets), a line each."""

    @classmethod
    @abstractmethod
    def evaluate_checkpoint(cls, checkpoint: Checkpoint, device: torch.device) -> dict[str, float]:
        """The metrics of a checkpoint on its data set's test items."""

    @classmethod
    @abstractmethod
    def trained(cls, checkpoint: Checkpoint, device: torch.device) -> Trained:
        """The network of a checkpoint, ready to be used; see :func:`rankgrad.lab.use.load`."""

    @classmethod
    @abstractmethod
    def report_sections(cls, run: Path, config: Any, beside: Sequence[Path]) -> list[tuple[str, str]]:
        """(heading, HTML) for the report of a run, next to settings and curves, compared with other runs."""
