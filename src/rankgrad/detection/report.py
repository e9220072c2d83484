"""What a detection run adds to its report: results, average precision by class, gradients, detections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rankgrad.detection.config import Config
from rankgrad.training.checkpoint import write_text


def write_examples(
    folder: Path, config: Config, source: Any, classes: tuple[str, ...], found: Any, stands: Any
) -> None:
    """Keep the average precisions of the classes as ``classes.json``."""
    table = {
        scores: {
            "AP50": dict(zip(classes, (100 * stand.area).tolist(), strict=True)),
            "AP50-11": dict(zip(classes, (100 * stand.eleven).tolist(), strict=True)),
            "AP": dict(zip(classes, (100 * stand.coco.mean(0)).tolist(), strict=True)),
        }
        for scores, stand in stands.items()
    }
    write_text(folder / "classes.json", json.dumps(table))


def sections(run: Path, config: Config) -> list[tuple[str, str]]:
    """(heading, HTML) of a detection run."""
    return []
