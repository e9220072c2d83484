"""Recipes: YAML settings in the package, by name; a file of the user's; the settings and weights of a run."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from rankgrad.lab.tasks import TASKS, task_class
from rankgrad.lab.training.checkpoint import Checkpoint, load_weights
from rankgrad.lab.training.config import RunConfig, chosen, nearest, override, sections_of, shown, validated
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.reading import size_of
from rankgrad.lab.training.task import Task

#: In a run's folder: the trials by which its settings are chosen, and the settings that the trials begin with.
TRIALS = "trials"
BEFORE_TRIALS = Path(TRIALS, "settings.yaml")
#: Settings are nested two levels deep; far deeper is no recipe.
_DEEPEST = 20
#: No recipe has more bytes. (The largest here has 2,000.)
_BYTES = 100_000


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-5 is a number (YAML 1.1 wants 1.0e-5). No aliases: they can multiply."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """A node of the document, if it is no alias and not too deep."""
        mark: Any = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(None, None, "an alias (*) is not allowed in settings", mark)
        if self._depth > _DEEPEST:
            raise ComposerError(None, None, f"nested deeper than {_DEEPEST} levels", mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)$|^[-+]?(\d[\d_]*\.\d*|\.\d+)$|^[-+]?\.(inf|nan)$"),
    list("-+0123456789."),
)


def parse(name: str, text: str) -> Any:
    """YAML from a file or a command line; ``name`` says which in messages."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: dates and numbers that are none
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = mark.line if mark else 0
        received = shown("".join(text.splitlines()[line : line + 1]))
        said = str(problem or error).partition("\n")[0]
        raise UserError(f"{name}: expected YAML, received {received} (line {line + 1}: {said})") from None


def recipe_names() -> list[str]:
    """The recipes of the package."""
    folder = resources.files("rankgrad.lab") / "recipes"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def _file(name: str) -> Any:
    """A recipe by name, a YAML file, or the settings of a run's folder."""
    path = Path(name)
    if name in recipe_names():
        return resources.files("rankgrad.lab") / "recipes" / f"{name}.yaml"
    # Of a run, or of one that was interrupted in its trials.
    for settings in (path / "config.yaml", path / BEFORE_TRIALS):
        if path.is_dir() and settings.is_file():
            return settings
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    raise UserError(f"RECIPE: no recipe, YAML file or run folder {name!r}{nearest(name, recipe_names())}")


def recipe_text(name: str) -> str:
    """The text of a recipe, of a YAML file, or of the settings of a run's folder."""
    file = _file(name)
    if isinstance(file, Path):
        size_of(file, _BYTES, "RECIPE")
    try:
        return str(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"RECIPE: {file}: expected UTF-8 ({error})") from None


def summary(name: str) -> str:
    """The first line of a recipe's header."""
    return recipe_text(name).splitlines()[0].lstrip("# ")


def task_of(settings: dict[str, Any]) -> type[Task]:
    """Which task the settings are for."""
    name = settings.get("task")
    if not isinstance(name, str) or name not in TASKS:
        raise UserError(f"task: unknown value {shown(name)}{nearest(str(name)[:80], TASKS)}")
    return task_class(name)


def load(name: str, overrides: Sequence[str] = ()) -> tuple[type[Task], Any]:
    """The validated settings of a recipe with ``key=value`` overrides, and their task."""
    label = f"RECIPE: {_file(name)}"
    settings = parse(label, recipe_text(name))
    if not isinstance(settings, dict):
        raise UserError(f"{label}: expected keys and values, received {shown(settings)}")
    try:
        return checked(copy.deepcopy(settings), overrides, saved=is_run(name))
    except UserError:
        try:
            checked(settings, saved=is_run(name))
        except UserError as error:  # not the overrides are wrong
            raise UserError(f"{label}: {error}") from None
        raise


def is_run(name: str) -> bool:
    """Whether a recipe's name is a run's folder."""
    return name not in recipe_names() and Path(name).is_dir()


def checked(
    settings: dict[str, Any], overrides: Sequence[str] = (), *, saved: bool = False
) -> tuple[type[Task], Any]:
    """:func:`load` for settings that were read already; ``saved`` with a run, perhaps by an older version."""
    task = task_of(settings)
    if saved:
        settings = task.config_class.upgraded(settings)
    given = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            hint = f"; for data say --data {text}" if Path(text).exists() else ""
            raise UserError(f"{text}: expected key=value{hint}")
        given.append((key, parse(key, value)))
    sections = sections_of(task.config_class)
    # Names first: a new one clears what its section had, but not what is given with it, in whatever order.
    given.sort(key=lambda one: one[0] not in sections and not one[0].endswith(".name"))
    for key, value in given:
        override(settings, key, value, task.config_class)
    return task, validated(settings, task.config_class)


def checkpoint_of(run: str | Path, weights: str = "best") -> Path:
    """The file of weights of a run; a file is taken as it is."""
    path = Path(run).expanduser()
    if not path.is_dir():
        return path
    file = path / f"{chosen('weights', weights, ('best', 'last'))}.safetensors"
    if not file.is_file():
        seeds = sorted(one.parent for one in path.glob(f"seed-*/{file.name}"))
        which = f"; one is {seeds[0]}" if seeds else ""
        raise UserError(f"RUN: no finished run in {str(path)!r} (it has no {file.name}){which}")
    return file


def of_checkpoint(path: Path, overrides: Sequence[str] = ()) -> tuple[type[Task], Checkpoint]:
    """The checkpoint of a file, and its task."""
    weights, metadata = load_weights(path)
    settings = task_of(metadata["config"]).located(metadata["config"], path.parent)
    task, config = checked(settings, overrides, saved=True)
    return task, Checkpoint(config, weights, metadata)


def dump(config: RunConfig) -> str:
    """Settings as YAML, defaults included."""
    return str(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
