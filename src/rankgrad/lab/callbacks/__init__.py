"""Callbacks receive the losses and metrics of a run; the setting ``callbacks`` names those of a run.

``rankgrad train digits callbacks=[tensorboard,wandb]``; a class of your own is named as ``module:Class``, in a
module that is installed or in the current folder. ``steps.csv`` and ``evaluations.csv`` are always written.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankgrad.lab.training.config import nearest
from rankgrad.lab.training.errors import UserError

#: Name -> module and class; each is imported when a run uses it.
CALLBACKS = {
    "tensorboard": "rankgrad.lab.callbacks.tensorboard:TensorBoard",
    "wandb": "rankgrad.lab.callbacks.weights_and_biases:WeightsAndBiases",
    "mlflow": "rankgrad.lab.callbacks.ml_flow:MLflow",
}


class Callback:
    """Called by the training loop, in the process that writes. Subclasses override what they need."""

    def begin(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        """Training begins, or goes on after ``step``.

        Args:
            folder: Of the run.
            settings: Of the run, in nested dictionaries.
            step: How many steps are done; numbers reported for later steps are void.
        """

    def log(self, part: str, rows: Sequence[Mapping[str, float]]) -> None:
        """Numbers of finished steps (``part`` is ``"train"``) or of an evaluation (``"evaluation"``).

        Every row has ``step`` and ``epoch`` among its numbers; a number may be NaN where it is not known.
        """

    def end(self) -> None:
        """The run is over, to its end or by an error."""


def build(names: Sequence[str]) -> list[Callback]:
    """The callbacks of these names."""
    return [_class(name)() for name in names]


def _class(name: str) -> type[Callback]:
    module, colon, kind = CALLBACKS.get(name, name).partition(":")
    if not colon:
        raise UserError(f"callbacks: unknown value {name!r}{nearest(name, CALLBACKS)}, or say module:Class")
    if name not in CALLBACKS and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a module of the user's; the command has the folder of the program there
    try:
        found = getattr(importlib.import_module(module), kind, None)
    except ModuleNotFoundError as error:
        if name in CALLBACKS:
            raise
        raise UserError(f"callbacks: {name}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise UserError(f"callbacks: expected a subclass of {__name__}.Callback, received {name!r}")
    return found


def scalars(row: Mapping[str, float], part: str) -> dict[str, float]:
    """``{"train/loss": 0.3, ...}``: the numbers of a row that are not NaN, without step and epoch."""
    return {
        f"{part}/{name}": value
        for name, value in row.items()
        if name not in ("step", "epoch") and not math.isnan(value)
    }
