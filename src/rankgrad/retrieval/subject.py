"""Retrieval, as the recipes know it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rankgrad.retrieval.config import Config
from rankgrad.training.errors import UserError

__all__ = ["Config", "build_task", "evaluate_checkpoint", "listing", "report_sections"]


def listing() -> dict[str, dict[str, str]]:
    """Losses and data sets, a line each."""
    from rankgrad.retrieval.data import READERS
    from rankgrad.retrieval.losses import OURS

    rivals = {"pml:NAME": "any loss of pytorch-metric-learning, e.g. pml:FastAPLoss"}
    return {
        "loss": {name: told for name, (_, told) in OURS.items()} | rivals,
        "data set": {name: told for name, (_, told) in READERS.items()},
    }


def build_task(config: Config, device: torch.device) -> Any:
    """The task of these settings."""
    from rankgrad.retrieval.task import RetrievalTask

    return RetrievalTask(config, device)


def evaluate_checkpoint(
    config: Config, weights: dict[str, Any], notes: dict[str, Any], device: torch.device
) -> dict[str, float]:
    """The metrics of a checkpoint on its data set's test pictures."""
    from rankgrad.retrieval.model import rebuild
    from rankgrad.retrieval.task import read_sources, standing
    from rankgrad.training import log

    network = rebuild(config.model, config.view.crop, notes, weights).to(device)
    _, query, gallery = read_sources(config.data, config.view, device, train=False)
    many = len(query.pictures) + (len(gallery.pictures) if gallery else 0)
    with log.progress("embedding", many, 0, show=True) as bar:
        found, _, _ = standing(network, query, gallery, config, bar.advance)
    if not bool((found.first > 0).any()):
        raise UserError("--data: expected classes with two test pictures at least, found no picture to look for")
    return found.summary(config.recall_at)


def report_sections(run: Path, config: Config, beside: Sequence[Path]) -> list[tuple[str, str]]:
    """The result beside the paper's and other runs', and examples."""
    from rankgrad.retrieval.report import sections

    return sections(run, config, beside)
