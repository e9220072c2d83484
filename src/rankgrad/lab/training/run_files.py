"""The files of a run, validated by pydantic: an error is one line with the file and the place in it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from rankgrad.lab.training import reading
from rankgrad.lab.training.errors import UserError

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _placed(row: dict[str, float]) -> dict[str, float]:
    missing = [name for name in ("step", "epoch") if row and name not in row]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing")
    return row


#: The metrics of an evaluation with its step and epoch; nothing before the first one.
EvaluationRow = Annotated[dict[str, float], AfterValidator(_placed)]


@dataclass
class Result:
    """``result.json``: metrics before training, of the best evaluation and of the last one, and time."""

    first: EvaluationRow = field(default_factory=dict)  #: before training, where it was evaluated
    best: EvaluationRow = field(default_factory=dict)
    last: EvaluationRow = field(default_factory=dict)
    seconds: Seconds = 0.0
    speed: Seconds = 0.0  #: items per second in training, evaluations and checkpoints apart, at the end


class State(TypedDict):
    """``state.pt``: what a run resumes from."""

    step: Annotated[int, Field(ge=0)]
    network: dict[str, Any]
    loss: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    result: Result


class CheckpointMetadata(TypedDict):
    """The metadata of ``best.safetensors`` and ``last.safetensors``; a task adds keys of its own."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    config: dict[str, Any]
    metrics: dict[str, float]
    training_classes: NotRequired[list[str]]  #: of retrieval


class SeedStatistic(BaseModel):
    """An entry of ``seeds.json``: a metric's mean and deviation over seeds."""

    metric: str
    of: str
    mean: float
    deviation: float
    values: list[float]


class DataNotes(TypedDict):
    """``data.json``, as far as it is read again."""

    counts: NotRequired[dict[str, int]]
    batch: NotRequired[int]  #: items in it
    items: NotRequired[str]  #: a digest of the items' names, their classes or grades, and their order
    #: ``told`` in the folders of older runs.
    notes: NotRequired[Annotated[list[str], Field(validation_alias=AliasChoices("notes", "told"))]]
    chosen: NotRequired[list[str]]  #: of the notes, those on settings that were chosen by trials
    headline: NotRequired[str]
    advice: NotRequired[str]


#: ``machine.json``.
Machine = dict[str, str]


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


#: Bytes of memory that JSON takes while it is read: a value in a list, a list, an object (measured, with room).
_JSON = {",": 32, "[": 128, "{": 480}

#: A byte of a file's name that is no UTF-8, as Python writes it; pydantic's parser refuses it.
_NO_UTF8 = re.compile(rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][cC][89a-fA-F][0-9a-fA-F]")


def checked_json(content: str | bytes, kind: Any, name: str) -> Any:
    """JSON as an object of this kind; ``name`` says in messages where it is from."""
    content = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    needed = sum(size * content.count(mark.encode()) for mark, size in _JSON.items())
    reading.check_memory(needed, name, "its values")
    if _NO_UTF8.search(content):
        try:
            value = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}: invalid JSON ({error})") from None
        return checked(value, kind, name)
    try:
        return _adapter(kind).validate_json(content)
    except ValidationError as error:
        raise _fault(error, name) from None


def checked(value: Any, kind: Any, name: str) -> Any:
    """A value that was read already as an object of this kind, as :func:`checked_json`."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise _fault(error, name) from None


def read_json(path: Path, kind: Any) -> Any:
    """The content of a file of a run."""
    return checked_json(reading.read(path), kind, str(path))


def read_json_if_there(path: Path, kind: Any) -> Any:
    """:func:`read_json`, or None where there is no such file."""
    return read_json(path, kind) if path.is_file() else None


def data_notes(run: Path) -> DataNotes:
    """``data.json`` of a run, or of the first of several seeds; empty where there is none."""
    files = [path for path in (run / "data.json", *sorted(run.glob("seed-*/data.json"))) if path.is_file()]
    notes: DataNotes = read_json(files[0], DataNotes) if files else DataNotes()
    return notes


def _fault(error: ValidationError, name: str) -> UserError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return UserError(f"{name}: {place + ': ' if place else ''}{message[0].lower()}{message[1:]}")
