"""Whether a run may be resumed: by the version, the settings and the data that it was started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rankgrad.lab import recipes
from rankgrad.lab.training.config import flat
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.run_files import data_notes
from rankgrad.lab.training.task import Task

#: Settings that may differ when a run is resumed: they do not change its results.
_FREE = {"device", "callbacks", "baselines", "save_minutes", "data.root", "data.workers", "data.cache"}


def same_version(folder: Path, kind: type[Task]) -> None:
    """Refuse to resume a run of an older version, whose columns and parameters differ; its weights still load."""
    settings = recipes.parse(f"--resume: {folder}/config.yaml", recipes.recipe_text(str(folder)))
    if kind.config_class.upgraded(settings) != settings:
        raise UserError(
            f"--resume: {folder} was started by an older version of rankgrad and cannot be continued; its "
            "checkpoints still load (rankgrad eval, embed)"
        )


def same_settings(folder: Path, config: Any, option: str, saved: Path | None = None) -> None:
    """Refuse to resume with other settings than the run began with (``saved``); the error names what differs."""
    before = flat(recipes.load(str(saved or folder))[1].model_dump(mode="json"))
    now = flat(config.model_dump(mode="json"))
    changed = [k for k in sorted(before.keys() | now.keys()) if k not in _FREE and before.get(k) != now.get(k)]
    if changed:
        differences = "; ".join(f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in changed)
        raise UserError(f"{option}: {folder} was started with other settings: {differences}")


def same_data(folder: Path, now: dict[str, Any]) -> None:
    """Refuse to resume on other data or in other batches: classes would be others, test items be trained on."""
    before = data_notes(folder)
    found = now.get("counts", {})
    changed = [
        f"{many:,} {what}, now {found.get(what, 0):,}"
        for what, many in before.get("counts", {}).items()
        if many != found.get(what)
    ]
    if not changed and before.get("items", now.get("items")) != now.get("items"):
        changed = ["the names, classes, grades or order of the items differ"]
    if changed:
        raise UserError(f"--resume: {folder} was started on other data: {'; '.join(changed)}")
    if before.get("batch", now.get("batch")) != now.get("batch"):
        raise UserError(
            f"--resume: {folder} was started with batches of {before['batch']}, now they have {now['batch']}; a "
            "batch that is fitted to the data depends on the number of processes"
        )
