"""Weights & Biases; its own environment variables say where to: ``WANDB_PROJECT``, ``WANDB_MODE=offline``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankgrad.lab.callbacks import Callback, scalars
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.errors import UserError


class WeightsAndBiases(Callback):
    """One run there for one run here: a resumed run goes on in the same one, by the id in ``wandb-id.txt``."""

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def begin(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        """Start or continue the run."""
        kept = folder / "wandb-id.txt"
        known = kept.read_text().strip() if step and kept.is_file() else None
        try:
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "rankgrad"),
                name=folder.name,
                dir=str(folder),
                config=dict(settings),
                id=known,
                resume="allow" if known else None,
            )
        except self._wandb.Error as error:
            raise UserError(f"callbacks: wandb: {error}") from None
        for part in ("train", "evaluation"):  # its own count of calls is no step of ours
            self._run.define_metric(f"{part}/*", step_metric="step")
        write_text(kept, self._run.id)

    def log(self, part: str, rows: Sequence[Mapping[str, float]]) -> None:
        """Add the numbers."""
        for row in rows:
            self._run.log({**scalars(row, part), "step": int(row["step"]), "epoch": row["epoch"]})

    def end(self) -> None:
        """Wait until all is sent."""
        if self._run is not None:
            self._run.finish()
