"""Signals that ask a run to stop (Ctrl-C, Slurm's SIGTERM, a closed terminal's SIGHUP) wait until it is saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from rankgrad import distributed
from rankgrad.lab.training.errors import Interrupted

#: Signal -> the handler it has unless another one was set. (nohup ignores SIGHUP: it stays ignored.)
_DEFAULTS: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
if hasattr(signal, "SIGHUP"):  # not on Windows
    _DEFAULTS[signal.SIGHUP] = signal.SIG_DFL


class Stop:
    """Whether a signal asked this process to stop."""

    def __init__(self) -> None:
        self.number = 0  #: of the signal; 0: none came
        self._interruptible = False

    def note(self, number: int) -> None:
        """A signal came; work that can be repeated is left at once."""
        self.number = self.number or number
        if self._interruptible:
            raise Interrupted(self.number)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around work that a signal ends at once, as :class:`Interrupted`, because it can be repeated.

        Several processes wait for each other, so none of them may stop alone.
        """
        if distributed.active():
            yield
            return
        self._interruptible = True
        try:
            if self.number:
                raise Interrupted(self.number)
            yield
        finally:
            self._interruptible = False

    def agreed(self, device: torch.device) -> int:
        """The signal that any process has noted; all processes must ask together."""
        if not distributed.active():
            return self.number
        number = torch.tensor(self.number, device=device)
        torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
        return int(number)


@contextmanager
def noted() -> Iterator[Stop]:
    """Signals are only noted, so that a step can end and be saved; a second one acts at once.

    With several processes a second one changes nothing: torchrun sends its own after the terminal's. A signal that
    is ignored or has another handler keeps it, and only the main thread can note signals.
    """
    stop = Stop()
    in_main = threading.current_thread() is threading.main_thread()
    ours = {n: h for n, h in _DEFAULTS.items() if in_main and signal.getsignal(n) is h}

    def back() -> None:
        for number, handler in ours.items():
            signal.signal(number, handler)

    def note(number: int, frame: Any) -> None:
        again = "" if distributed.active() else "; a second signal (Ctrl-C) stops at once"
        if not distributed.active():
            back()
        if not stop.number:
            # Not print, which may be what was interrupted; and the reader of a pipe may have ended by the same
            # Ctrl-C.
            with suppress(OSError):
                os.write(2, f"\nstopping after this step{again}\n".encode())
        stop.note(number)

    for number in ours:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        back()
