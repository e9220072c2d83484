"""What a figure is made from, and what it becomes: files with a caption beside them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from rankgrad.lab.figures import style
from rankgrad.lab.training.checkpoint import write_text


@dataclass(frozen=True)
class FigureInputs:
    """What the user gave; a figure takes what it needs and has its own data where it can.

    Attributes:
        run: The folder of a run of ``rankgrad train``.
        embeddings: An .npz with ``embeddings`` and ``labels``.
        results: Result tables: a file, or a folder of them.
        tell: Called with a line on what takes time or is missing.
    """

    run: Path | None = None
    embeddings: Path | None = None
    results: Path | None = None
    tell: Callable[[str], None] = print


@dataclass(frozen=True)
class Drawing:
    """A finished figure: its file name without ending, and a caption that says what to see."""

    name: str
    figure: Figure
    caption: str

    @property
    def text(self) -> str:
        """The caption in lines."""
        return textwrap.fill(" ".join(self.caption.split()), 100, break_on_hyphens=False)

    def save(self, folder: Path) -> list[Path]:
        """Write NAME.png, NAME.svg and the caption as NAME.md."""
        written = style.save(self.figure, folder, self.name)
        text = folder / f"{self.name}.md"
        write_text(text, self.text + "\n")
        return [*written, text]
