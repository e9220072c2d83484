"""TensorBoard's files in ``tensorboard/`` of the run's folder, where it is installed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankgrad.lab.callbacks import Callback, scalars
from rankgrad.lab.training.checkpoint import not_written
from rankgrad.lab.training.errors import UserError


class TensorBoard(Callback):
    """Scalars ``train/...`` and ``evaluation/...`` by step."""

    def __init__(self) -> None:
        self._board: Any = None
        self._folder = Path()
        self._hook = threading.excepthook

    def begin(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        """Open the files; what they have of later steps is purged."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:  # named by default: no reason to stop, the CSV tables hold the same numbers
            print("callbacks: tensorboard is not installed (pip install tensorboard), its files are not written")
            return
        self._folder = folder / "tensorboard"
        with self._write_errors():
            self._board = SummaryWriter(self._folder, purge_step=step + 1)
        threading.excepthook = self._in_a_thread

    def log(self, part: str, rows: Sequence[Mapping[str, float]]) -> None:
        """Add the scalars."""
        if self._board is None:
            return
        with self._write_errors():
            for row in rows:
                for name, value in scalars(row, part).items():
                    self._board.add_scalar(name, value, int(row["step"]))

    def end(self) -> None:
        """Flush what is still waiting."""
        threading.excepthook = self._hook
        if self._board is not None:
            with self._write_errors():
                self._board.close()

    def _in_a_thread(self, error: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread; its next call in this one raises the thread's error again."""
        if not isinstance(error.exc_value, OSError):
            self._hook(error)

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Make an error of writing the files one of the user's."""
        try:
            yield
        except UnicodeEncodeError:
            raise UserError(
                f"--out: {self._folder}: TensorBoard writes to folders whose names are UTF-8; callbacks=[] does "
                "without it"
            ) from None
        except OSError as error:
            self._board = None
            raise not_written(self._folder, error, 4096) from None
