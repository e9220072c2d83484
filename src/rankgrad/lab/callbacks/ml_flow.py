"""MLflow; ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` say where to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankgrad.lab.callbacks import Callback, scalars
from rankgrad.lab.training.checkpoint import write_text
from rankgrad.lab.training.config import flat


class MLflow(Callback):
    """One run there for one run here: a resumed run goes on in the same one, by the id in ``mlflow-id.txt``."""

    def __init__(self) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        self._open = False

    def begin(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        """Start or continue the run."""
        kept = folder / "mlflow-id.txt"
        known = kept.read_text().strip() if step and kept.is_file() else None
        run = self._mlflow.start_run(run_id=known, run_name=None if known else folder.name)
        self._open = True
        if known is None:
            self._mlflow.log_params(flat(settings))
            write_text(kept, run.info.run_id)

    def log(self, part: str, rows: Sequence[Mapping[str, float]]) -> None:
        """Add the numbers; names may not have an ``@`` there: ``R@1`` is ``R_at_1``."""
        for row in rows:
            numbers = {name.replace("@", "_at_"): value for name, value in scalars(row, part).items()}
            self._mlflow.log_metrics(numbers, step=int(row["step"]))

    def end(self) -> None:
        """Close the run."""
        if self._open:
            self._mlflow.end_run()
