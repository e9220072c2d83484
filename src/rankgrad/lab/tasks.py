"""What can be trained, by the name a recipe gives as ``task``; imported when used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from rankgrad.lab.training.task import Task

#: Name -> module and class. A new task needs a line here and nothing else.
TASKS = {
    "retrieval": "rankgrad.lab.retrieval.images.task:ImageTask",
    "text": "rankgrad.lab.text.task:TextTask",
    "detection": "rankgrad.lab.detection.task:DetectionTask",
    "ranker": "rankgrad.lab.ranker.task:RankerTask",
}


def task_class(name: str) -> type[Task]:
    """The class of a task."""
    module, _, kind = TASKS[name].partition(":")
    return cast("type[Task]", getattr(importlib.import_module(module), kind))
