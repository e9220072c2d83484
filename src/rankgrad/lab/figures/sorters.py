"""The small SoDeep sorter of the figures, which comes with the package."""

from __future__ import annotations

from importlib import resources

from rankgrad.lab import sodeep
from rankgrad.surrogates.sodeep import Sorter

#: Lists of the landscape and of the gradients.
LENGTH = 20


def sorter() -> Sorter:
    """An LSTM for lists of 20, made by ``rankgrad sodeep train --length 20``, its weights rounded to float16."""
    with resources.as_file(resources.files("rankgrad.lab.figures") / f"sodeep-{LENGTH}.safetensors") as path:
        return sodeep.load(path)
