"""Detection, as the recipes know it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rankgrad.detection.config import Config

__all__ = ["Config", "build_task", "evaluate_checkpoint", "listing", "report_sections"]


def listing() -> dict[str, dict[str, str]]:
    """Losses and data sets, a line each."""
    from rankgrad.detection.data import READERS

    losses = {
        "ranking": "mAP and pooled AP of the regions' class scores, beside cross entropy; form, rank, weight, ...",
        "cross_entropy": "torchvision's own",
    }
    return {"loss": losses, "data set": dict(READERS)}


def build_task(config: Config, device: torch.device) -> Any:
    """The task of these settings."""
    from rankgrad.detection.task import DetectionTask

    return DetectionTask(config, device)


def evaluate_checkpoint(
    config: Config, weights: dict[str, Any], notes: dict[str, Any], device: torch.device
) -> dict[str, float]:
    """The metrics of a checkpoint on its data set's test pictures."""
    from rankgrad.detection.evaluate import evaluate
    from rankgrad.detection.model import rebuild
    from rankgrad.detection.task import detect, read_sources
    from rankgrad.training import log

    network = rebuild(config.model, config.view, regions=config.batch.regions, notes=notes, weights=weights).to(
        device
    )
    _, source, classes = read_sources(config.data, device, tuple(notes["classes"]))
    with log.progress("detecting", len(source.scenes), 0, show=True) as bar:
        found = detect(network, source, config, bar.advance)
    stands = {scores: evaluate(f, source.scenes.objects, len(classes)) for scores, f in found.items()}
    return {key: value for scores, stand in stands.items() for key, value in stand.summary(scores).items()}


def report_sections(run: Path, config: Config, beside: Sequence[Path]) -> list[tuple[str, str]]:
    """The result, average precision by class, gradients and detections, of this run and others."""
    from rankgrad.detection.report import sections

    return sections(run, config, beside)
