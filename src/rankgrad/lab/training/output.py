"""Output that cannot be written: the reader of a pipe has ended, a terminal was closed, a disk is full."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class _Stream:
    """A stream that drops all text after the first text that cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As of any stream."""
        with self._dropped():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As of any stream."""
        with self._dropped():
            self._stream.flush()

    @contextmanager
    def _dropped(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # Not the stream but what it writes to: it has text left that Python writes when the program ends.
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def ignoring_write_errors() -> Iterator[None]:
    """Work inside goes on when its output cannot be written any more."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Stream(before[0]), _Stream(before[1])
    try:
        yield
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        sys.stdout, sys.stderr = before
