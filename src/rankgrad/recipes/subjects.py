"""What can be trained: each subject's room, imported when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

    from rankgrad.training.config import RunConfig
    from rankgrad.training.loop import Task


class Subject:
    """A module with ``Config``, ``listing``, ``build_task``, ``evaluate_checkpoint`` and ``report_sections``."""

    def __init__(self, module: str) -> None:
        self._name = module

    @property
    def _room(self) -> Any:
        return importlib.import_module(self._name)

    def config(self) -> type[RunConfig]:
        """The class of its settings."""
        return cast("type[RunConfig]", self._room.Config)

    def listing(self) -> dict[str, dict[str, str]]:
        """What it offers, by kind: losses and data sets, a line each."""
        return cast("dict[str, dict[str, str]]", self._room.listing())

    def build(self, config: Any, device: torch.device) -> Task:
        """The task of these settings: data read, network and loss made."""
        return cast("Task", self._room.build_task(config, device))

    def evaluate(self, config: Any, weights: Any, notes: dict[str, Any], device: torch.device) -> dict[str, float]:
        """The metrics of a checkpoint."""
        return cast("dict[str, float]", self._room.evaluate_checkpoint(config, weights, notes, device))

    def report_sections(self, run: Path, config: Any, beside: Sequence[Path]) -> list[tuple[str, str]]:
        """(heading, HTML) for the report of a run, next to settings and curves, compared with other runs."""
        return cast("list[tuple[str, str]]", self._room.report_sections(run, config, beside))


SUBJECTS = {
    "retrieval": Subject("rankgrad.retrieval.subject"),
    "detection": Subject("rankgrad.detection.subject"),
}
