"""Recipes: YAML settings in the package, by name; a file of the user's; the settings saved with a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from rankgrad.lab.tasks import TASKS, task_class
from rankgrad.lab.training.config import RunConfig, nearest, override, validated
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.task import Task


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-5 is a number (YAML 1.1 wants 1.0e-5)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)$|^[-+]?(\d[\d_]*\.\d*|\.\d+)$|^[-+]?\.(inf|nan)$"),
    list("-+0123456789."),
)


def parse(name: str, text: str) -> Any:
    """YAML from a file or a command line; ``name`` says which in messages."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = mark.line if mark else 0
        received = text.split("\n")[line]
        raise UserError(
            f"{name}: expected YAML, received {received!r} (line {line + 1}: {problem or error})"
        ) from None


def recipe_names() -> list[str]:
    """The recipes of the package."""
    folder = resources.files("rankgrad.lab") / "recipes"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """A recipe by name, a YAML file, or the settings of a run's folder."""
    path = Path(name)
    if name in recipe_names():
        return (resources.files("rankgrad.lab") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    if path.is_dir() and (path / "config.yaml").is_file():
        return (path / "config.yaml").read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path.read_text(encoding="utf-8")
    raise UserError(f"RECIPE: no recipe, YAML file or run folder {name!r}{nearest(name, recipe_names())}")


def summary(name: str) -> str:
    """The first line of a recipe's header."""
    return recipe_text(name).splitlines()[0].lstrip("# ")


def task_of(settings: dict[str, Any]) -> type[Task]:
    """Which task the settings are for."""
    name = settings.get("task")
    if name not in TASKS:
        raise UserError(f"task: unknown value {name!r}{nearest(str(name), TASKS)}")
    return task_class(name)


def load(name: str, overrides: Sequence[str] = ()) -> tuple[type[Task], Any]:
    """The validated settings of a recipe with ``key=value`` overrides, and their task."""
    settings = parse("RECIPE", recipe_text(name))
    if not isinstance(settings, dict):
        raise UserError(f"RECIPE: expected keys and values in {name}, received {type(settings).__name__}")
    return checked(settings, overrides, saved=is_run(name))


def is_run(name: str) -> bool:
    """Whether a recipe's name is a run's folder."""
    return name not in recipe_names() and Path(name).is_dir()


def checked(
    settings: dict[str, Any], overrides: Sequence[str] = (), *, saved: bool = False
) -> tuple[type[Task], Any]:
    """The same for settings that were read already; ``saved`` with a run, perhaps by an older version."""
    task = task_of(settings)
    if saved:
        settings = task.config_class.upgraded(settings)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"{text}: expected key=value")
        override(settings, key, parse(key, value), task.config_class)
    return task, validated(settings, task.config_class)


def dump(config: RunConfig) -> str:
    """Settings as YAML, defaults included."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
