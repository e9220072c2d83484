"""Files that are whole or not there: checkpoints, weights, texts.

A run's folder has ``state.pt`` (everything needed to go on, one file, so that it cannot be torn), and the weights
alone as ``last.safetensors`` and ``best.safetensors`` with the settings in their metadata.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad.lab.training.errors import UserError


def _atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the target, flush to the disk, then rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(beside)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """A text file, atomically; names of files that are no UTF-8 are written with backslashes."""
    _atomically(path, lambda beside: beside.write_text(text, encoding="utf-8", errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """A file of bytes, atomically."""
    _atomically(path, lambda beside: beside.write_bytes(content))


def save_state(path: Path, state: dict[str, Any]) -> None:
    """The state of a run, atomically."""
    _atomically(path, lambda beside: torch.save(state, beside))


def load_state(path: Path) -> dict[str, Any]:
    """The state of a run; tensors and plain values only, no code is run by loading."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (EOFError, RuntimeError, UnpicklingError) as error:
        said = str(error).partition("\n")[0] or "it ends too early"
        raise UserError(f"--resume: {path} cannot be read ({said})") from None
    return state


def save_weights(path: Path, network: nn.Module, metadata: dict[str, Any]) -> None:
    """The weights as safetensors, atomically, with metadata (one JSON text under ``rankgrad``)."""
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    notes = {"format": "pt", "rankgrad": json.dumps(metadata)}
    write_bytes(path, save(tensors, metadata=notes))  # save_file would keep the file from others in one's group


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the metadata :func:`save_weights` wrote."""
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        raise UserError(
            f"CHECKPOINT: expected a file, received the folder {str(path)!r}; say {path}/best.safetensors"
        )
    if not path.is_file():
        raise UserError(f"CHECKPOINT: no such file {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = (file.metadata() or {}).get("rankgrad")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"CHECKPOINT: {path} is not a safetensors file ({error})") from None
    if metadata is None:
        raise UserError(f"CHECKPOINT: {path} was not written by rankgrad (no settings in its metadata)")
    return tensors, json.loads(metadata)


def fill(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """The weights of a checkpoint into the network that its settings made."""
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        first = textwrap.shorten(str(error).splitlines()[1], 200)
        raise UserError(f"model: expected the settings that the checkpoint was trained with; {first}") from None
