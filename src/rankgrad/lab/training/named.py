"""A loss or a miner by its name in the settings, with arguments of its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ConfigDict

from rankgrad.lab.training.config import Section, nearest
from rankgrad.lab.training.errors import UserError


class Named(Section):
    """A loss or miner by name, with its own arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str  # name of the loss, see `rankgrad ls`; other keys are its arguments

    def arguments(self) -> dict[str, Any]:
        """Everything but the name."""
        return dict(self.model_extra or {})

    def checked(self, known: Collection[str], of: str, key: str = "loss") -> dict[str, Any]:
        """The arguments, if all are ``known``; ``of`` and ``key`` say in messages whose they are."""
        for argument in self.arguments():
            if argument not in known:
                raise UserError(f"{key}.{argument}: unknown argument of {of}{nearest(argument, known)}")
        return self.arguments()


@contextmanager
def user_errors(prefix: str) -> Iterator[None]:
    """Around a call with arguments from the settings: a wrong type or value is an error of the user's."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UserError(f"{prefix}: {error}") from None


def explained(loss: Callable[..., Any], names: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Default and meaning of arguments of a loss, from its signature and docstring, by key (``loss.margin``)."""
    parameters = inspect.signature(loss).parameters
    return {
        f"loss.{name}": (parameters[name].default, _meaning(loss, name)) for name in parameters if name in names
    }


def _meaning(function: Callable[..., Any], argument: str) -> str:
    """The first sentence that a docstring has on an argument, or an empty text."""
    text = re.search(rf"^    {argument}: (.*(?:\n        .*)*)", inspect.getdoc(function) or "", re.MULTILINE)
    meaning = re.sub(r":\w+:`~?([^`]*)`", r"\1", " ".join(text[1].split()) if text else "").replace("``", "")
    return re.split(r"(?<=[a-z0-9)])\. (?=[A-Z])", meaning)[0].rstrip(".")
