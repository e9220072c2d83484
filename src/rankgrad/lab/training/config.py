"""Settings of a run, in sections with checked values; the error of an unknown key suggests the nearest one."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankgrad.lab.training.errors import UserError

Positive = Annotated[float, Field(gt=0, le=1e20, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e20, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Width = Annotated[int, Field(ge=1, le=2**16)]  # of a layer
Side = Annotated[int, Field(ge=1, le=2**12)]  # of an image, in pixels
Many = Annotated[int, Field(ge=1, le=2**20)]  # items of a batch
Seed = Annotated[int, Field(ge=0, le=2**62)]  # what generators take, with room for epochs and --seeds
Precision = Literal["auto", "fp32", "bf16", "fp16"]


class Section(BaseModel):
    """A group of settings. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Optim(Section):
    """The optimiser and its schedule."""

    name: Literal["adam", "adamw", "sgd"] = "adam"  # the optimiser
    lr: Positive = 1e-5  # the learning rate; image retrieval: auto, by model.weights and rates
    weight_decay: NonNegative = 0.0  # weight decay of all parameters but proxies
    momentum: NonNegative = 0.9  # momentum (sgd only)
    clip: NonNegative = 0.0  # gradients are clipped to this norm; 0: not clipped
    warmup: Annotated[int, Field(ge=0)] = 0  # first steps, in which the rate rises to lr; at most half of the run
    schedule: Literal["steps", "cosine", "constant"] = "steps"  # how the learning rate falls
    milestones: tuple[NonNegative, ...] = ()  # schedule steps: the epochs after which the rate falls
    decay: Positive = 0.3  # schedule steps: the factor at each milestone


class RunConfig(Section):
    """What every run has. A task adds its own sections."""

    task: str  # what is trained; see `rankgrad ls`
    seed: Seed = 0  # seed of weights, batches and augmentation
    epochs: Count = 1  # passes over the training items; image retrieval: auto, as optim.lr
    precision: Precision = "fp32"  # precision of the network; auto: bf16 on a GPU, fp32 on a CPU
    device: str = "auto"  # auto, cpu or cuda; auto takes a GPU if there is one
    compile: bool = False  # whether to use torch.compile (on a GPU; not for detectors)
    evaluate_every: Count | Literal["auto"] = 1  # epochs between evaluations; auto: about a tenth of the time
    evaluate_first: bool = False  # whether to evaluate before training as well
    save_minutes: NonNegative = 5.0  # minutes between checkpoints; 0: a checkpoint after every step
    callbacks: tuple[str, ...] = ("tensorboard",)  # loggers: tensorboard, wandb, mlflow, or module:Class
    optim: Optim = Optim()

    @classmethod
    def upgraded(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings saved by an older version, in the format of this one and with the same behaviour."""
        return settings


def comments(section: type[Section]) -> dict[str, str]:
    """The comment behind every setting of a section, by its name: ``{"lr": "the learning rate", ...}``."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section) and base is not Section:
            found |= dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(base), re.MULTILINE))
    return found


def meanings(config: type[Section], prefix: str = "") -> dict[str, str]:
    """Choices and comment of every setting, by its full key: ``{"optim.lr": "the learning rate", ...}``."""
    told, inner = comments(config), sections_of(config)
    found: dict[str, str] = {}
    for name, field in config.model_fields.items():
        choices = _choices(field.annotation)
        known = " | ".join(choices) if len(choices) > 1 else ""
        found[prefix + name] = "; ".join(part for part in (known, told.get(name, "")) if part)
        if name in inner:
            found |= meanings(inner[name], f"{prefix}{name}.")
    return found


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal; none of any other type."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def shown(value: Any) -> str:
    """A value for a message, in a line of at most 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of many thousand digits
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their full keys: ``{"optim.lr": 1e-5, ...}``."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def nearest(word: str, words: Iterable[str]) -> str:
    """``, did you mean 'x'?`` for the known word that looks most like this one, or the list of all."""
    words = sorted(words)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else f"; there are {', '.join(words)}"


def chosen(argument: str, given: str, words: Iterable[str]) -> str:
    """``given``, if it is one of ``words``; else an error that names the argument and the nearest word."""
    words = list(words)
    if given not in words:
        raise UserError(f"{argument}: unknown value {given!r}{nearest(given, words)}")
    return given


def sections_of(config: type[Section]) -> dict[str, type[Section]]:
    """The fields of a section that are sections themselves."""
    found = {}
    for name, field in config.model_fields.items():
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Section):
                found[name] = kind
    return found


def section_of(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """What is given of a section, before validation, which refuses what is no section; empty if nothing is."""
    given = settings.get(name)
    return given if isinstance(given, dict) else {}


def full_key(key: str, settings: dict[str, Any], config: type[Section]) -> str:
    """``lr`` -> ``optim.lr``: a bare key that only one section has, or has been given, needs no prefix."""
    if "." in key or key in config.model_fields:
        return key
    owners = [
        name
        for name, kind in sections_of(config).items()
        if key in kind.model_fields or key in section_of(settings, name)
    ]
    if len(owners) == 1:
        return f"{owners[0]}.{key}"
    if owners:
        choices = " or ".join(f"{owner}.{key}" for owner in owners)
        raise UserError(f"{key}: several sections have it, say {choices}")
    return key


def override(settings: dict[str, Any], key: str, value: Any, config: type[Section]) -> None:
    """Set one value in nested settings. A section given by its name alone starts from its defaults."""
    *path, last = full_key(key, settings, config).split(".")
    place, kind = settings, config
    for part in path:
        inner = sections_of(kind).get(part)
        if inner is None:
            raise UserError(f"{key}: unknown section {part!r}" + nearest(part, sections_of(kind)))
        place[part] = dict(section_of(place, part))
        place, kind = place[part], inner
    section = sections_of(kind).get(last)
    if section is not None and isinstance(value, str):
        value = {"name": value}
    if last == "name" and value != place.get("name"):
        place.clear()  # the old one's arguments do not fit the new one
    place[last] = value


def validated(settings: dict[str, Any], config: type[RunConfig]) -> Any:
    """Check settings against a config class; every fault is named, with what was received."""
    try:
        return config.model_validate(settings)
    except ValidationError as error:
        raise UserError("; ".join(_fault(one, config, settings) for one in error.errors())) from None


def _place(loc: tuple[str | int, ...], config: type[Section]) -> list[str]:
    """The setting that an error is about; which alternative of its type it failed on is left out."""
    path: list[str] = []
    kind: type[Section] | None = config
    for part in loc:
        if kind is not None or isinstance(part, int):
            path.append(str(part))
        if kind is not None and part in kind.model_fields:
            kind = sections_of(kind).get(str(part))
    return path


def _section_words(key: str, section: type[Section]) -> str:
    """What can be given for a whole section: a name if it has one, or settings."""
    names, fields = [], dict(section.model_fields)
    if (name := fields.pop("name", None)) is not None:
        names = [*_choices(name.annotation)] or ["a name (rankgrad ls)"]
    return " or ".join([*names, *(f"settings of its own, as {key}.{field}=..." for field in list(fields)[:1])])


def _fault(error: Any, config: type[Section], settings: dict[str, Any]) -> str:
    path = _place(error["loc"], config)
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        kind: type[Section] = config
        for part in path[:-1]:
            kind = sections_of(kind).get(part, kind)
        known = set(kind.model_fields)
        if kind is config:  # a bare key may be meant for any section
            for name, section in sections_of(kind).items():  # and a loss has arguments of its own
                known |= {*section.model_fields, *section_of(settings, name)}
        return f"{key}: unknown setting{nearest(path[-1], known)}"
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        words = [word.strip(" '") for word in error["ctx"]["expected"].replace(" or ", ",").split(",")]
        return f"{key}: unknown value {shown(error['input'])}{nearest(error['input'], words)}"
    if error["type"] == "missing":
        return f"{key}: missing, it has no default"
    if error["type"] == "model_type":
        return f"{key}: expected {_section_words(key, sections_of(config)[key])}, received {shown(error['input'])}"
    if error["type"] == "tuple_type":
        return f"{key}: expected a list, as {key}=[...], received {shown(error['input'])}"
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if error["type"] == "value_error" and isinstance(error["input"], dict):  # settings that do not fit each other
        return f"{key}: {message}" if key else message
    return f"{key}: {message}, received {shown(error['input'])}"
