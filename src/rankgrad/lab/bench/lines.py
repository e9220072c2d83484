"""Lines of a table that say themselves whether a goal was met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankgrad.lab.bench.tables import Cells, in_mib, in_time

HEAD = ["what", "time", "beside", "ratio", "memory over the inputs", "goal", ""]


@dataclass
class Measurement:
    """One measurement: times in seconds, memory in bytes; what it stands beside, and the goal.

    Attributes:
        what: What was measured.
        time: How long it takes; None if it failed.
        other: What it is compared with, and ``beside`` the time of that.
        memory: Memory over the inputs, gradients included.
        most_ratio, most_time, most_over, most_memory: The goal: how often the time of the other at the most, how
            many seconds, how many more than the other, how many bytes.
        fault: Why there is no time, or why it does not count.
    """

    what: str
    time: float | None = None
    other: str = ""
    beside: float | None = None
    memory: int | None = None
    most_ratio: float | None = None
    most_time: float | None = None
    most_over: float | None = None
    most_memory: int | None = None
    fault: str = ""

    @property
    def goal(self) -> str:
        """In words; empty where there is none."""
        parts = []
        if self.most_ratio is not None:
            parts.append(f"{self.most_ratio:g}x {self.other}")
        if self.most_over is not None:
            parts.append(f"{self.other} + {in_time(self.most_over)}")
        if self.most_time is not None:
            parts.append(in_time(self.most_time))
        if self.most_memory is not None:
            parts.append(in_mib(self.most_memory))
        return "at most " + ", ".join(parts) if parts else ""

    @property
    def met(self) -> bool | None:
        """Whether the goal was met; None where there is none."""
        if not self.goal:
            return None
        if self.time is None or self.fault:
            return False
        beside = self.beside or 0.0
        return (
            (self.most_ratio is None or self.time <= self.most_ratio * beside)
            and (self.most_over is None or self.time <= beside + self.most_over)
            and (self.most_time is None or self.time <= self.most_time)
            and (self.most_memory is None or (self.memory is not None and self.memory <= self.most_memory))
        )

    def cells(self) -> list[str]:
        """As a row of a table with the columns :data:`HEAD`."""
        compared = self.time is not None and self.beside
        return [
            self.what,
            self.fault or in_time(self.time),
            f"{self.other}: {in_time(self.beside)}" if self.other else "",
            f"{self.time / self.beside:.2f}x" if compared and self.time and self.beside else "",
            "" if self.memory is None else in_mib(self.memory),
            self.goal,
            {True: "met", False: "MISSED", None: ""}[self.met],
        ]


def cells_of(lines: Sequence[Measurement]) -> Cells:
    """The table."""
    return [HEAD, *(line.cells() for line in lines)]
