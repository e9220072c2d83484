"""A finished run in use: loaded in a program, searched, drawn, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rankgrad.lab import recipes
from rankgrad.lab.training import checkpoint, machine
from rankgrad.lab.training.config import chosen


def checkpoint_of(run: str | Path, weights: str = "best") -> Path:
    """The file of weights of a run; a file is taken as it is."""
    path = Path(run).expanduser()
    if path.is_dir():
        return path / f"{chosen('weights', weights, ('best', 'last'))}.safetensors"
    return path


def load(run: str | Path, *, weights: str = "best", device: str = "cpu") -> Any:
    """The network of a run, ready to be used.

    Args:
        run: The folder of a run, or a checkpoint in it.
        weights: ``"best"`` or ``"last"``, where a folder is given.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.

    Returns:
        An object with ``embed(items)`` (image retrieval and text), ``detect(images)`` (detection) or
        ``score(features)`` (rankers), and with ``network``, the Module itself.
    """
    tensors, notes = checkpoint.load_weights(checkpoint_of(run, weights))
    task, config = recipes.checked(notes["config"])
    return task.trained(config, tensors, notes, machine.device_of(device))
