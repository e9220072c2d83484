"""Sorters as files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from rankgrad.lab.training.checkpoint import read_tensors, write_bytes
from rankgrad.lab.training.run_files import checked_json
from rankgrad.surrogates.sodeep.networks import ARCHITECTURES, Sorter

#: The key of our JSON among the file's metadata.
_KEY = "rankgrad.sodeep"


Size = Annotated[int, Field(ge=1, le=2**16)]


class About(TypedDict):
    """What a file says about its sorter."""

    architecture: Literal["lstm", "cnn"]
    length: Size
    hidden: Size
    layers: Size
    recipe: dict[str, Any] | None


def save(sorter: Sorter, path: str | os.PathLike[str], *, recipe: dict[str, Any] | None = None) -> None:
    """Save a sorter as safetensors, with its sizes and the recipe it was made by. Needs ``safetensors``.

    The file appears complete or not at all.
    """
    from safetensors.torch import save as to_bytes

    about = {
        "architecture": next(name for name, kind in ARCHITECTURES.items() if type(sorter) is kind),
        "length": sorter.length,
        "hidden": sorter.hidden,
        "layers": sorter.layers,
        "recipe": recipe,
    }
    weights = {name: weight.detach().cpu().contiguous() for name, weight in sorter.state_dict().items()}
    write_bytes(Path(path), to_bytes(weights, metadata={_KEY: json.dumps(about)}))


def load(path: str | os.PathLike[str]) -> Sorter:
    """A sorter saved by :func:`save` or by ``train(..., out=path)``, frozen. Needs ``safetensors``."""
    return read(path)[0]


def read(path: str | os.PathLike[str]) -> tuple[Sorter, dict[str, Any] | None]:
    """A sorter and the recipe it was made by."""
    weights, metadata = read_tensors(Path(path), "path")
    if _KEY not in metadata:
        raise ValueError(
            f"path: expected a sorter saved by rankgrad, received {os.fspath(path)!r} without its sizes"
        )
    about: About = checked_json(metadata[_KEY], About, f"path: {os.fspath(path)}, metadata")
    sorter = ARCHITECTURES[about["architecture"]](about["length"], hidden=about["hidden"], layers=about["layers"])
    try:
        sorter.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"path: the weights in {os.fspath(path)!r} do not fit its sizes ({reason})") from None
    return sorter.requires_grad_(False), about["recipe"]
