"""The small SoDeep sorter of the figures: trained once, then kept in the user's cache folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rankgrad.surrogates import sodeep

#: Lists of the landscape and of the gradients.
LENGTH = 20


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/rankgrad``, by default ``~/.cache/rankgrad``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rankgrad"


def sorter(tell: Callable[[str], None]) -> sodeep.Sorter:
    """An LSTM for lists of 20. The first call trains it; a file of another recipe is replaced."""
    path = cache_folder() / f"sodeep-{LENGTH}.safetensors"
    if not path.exists():
        tell(f"training SoDeep's sorter for {LENGTH} items, some two minutes, once; it stays in {path}")

    def report(step: int, error: float) -> None:
        if step % 500 == 0:
            tell(f"SoDeep: step {step}, wrong by {error:.2f} ranks")

    return sodeep.train(LENGTH, out=path, progress=report)
