"""Use the network of a run: load it in Python, embed, search, detect, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rankgrad.lab import recipes
from rankgrad.lab.training import machine


def load(run: str | Path, *, weights: str = "best", device: str = "auto") -> Any:
    """The network of a run, ready to be used.

    Args:
        run: The folder of a run, or a checkpoint in it.
        weights: ``"best"`` or ``"last"``, where a folder is given.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``, which takes a GPU if there is one.

    Returns:
        An object with ``embed(items)`` (image retrieval and text), ``detect(images)`` (detection) or
        ``score(features)`` (rankers), and with ``network``, the Module itself.
    """
    task, checkpoint = recipes.of_checkpoint(recipes.checkpoint_of(run, weights))
    return task.trained(checkpoint, machine.device_of(device))
