"""Files that are whole or not there: checkpoints, weights, texts.

A run's folder has ``state.pt`` (everything needed to go on, one file, so that it cannot be torn), the state before
it as ``state.previous.pt``, and the weights alone as ``last.safetensors`` and ``best.safetensors`` with the
settings in their metadata. All of them carry a SHA-256 of their content: a damaged file is refused, not used.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankgrad.lab.training.errors import UserError

_PART = re.compile(r"^\..+\.(\d+)\.part$")
#: state.pt is a zip archive; its comment, the last bytes of the file, is this mark and the checksum in hex.
_MARK = b"rankgrad sha256 "
_COMMENT = len(_MARK) + 64


class Checkpoint(NamedTuple):
    """The weights of a run, the settings they were trained with, and what ``Task.metadata`` gave."""

    config: Any
    weights: dict[str, Tensor]
    metadata: dict[str, Any]


def write_bytes(path: Path, content: bytes | memoryview, before: Callable[[], object] = lambda: None) -> None:
    """Write beside the target, flush to the disk, then rename: a reader sees the old file or the new one.

    ``before`` is called when the new file is safe on the disk and not yet in its place.
    """
    if not path.name:
        raise UserError(f"{path}: expected the name of a file")
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        before()
        os.replace(beside, path)
    except OSError as error:
        raise not_written(path, error, len(content)) from None
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def not_written(path: Path, error: OSError, size: int) -> UserError:
    """The error of a file that cannot be written: which one, why, and what it needs where the disk is full."""
    message = f"{path}: cannot be written ({error.strerror or error})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with suppress(OSError):
            free = shutil.disk_usage(path.parent).free
            message += f"; it needs {_megabytes(size)}, {_megabytes(free)} are free"
    if path.is_file():
        message += "; the file that was there is unchanged"
    return UserError(message)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


def remove_parts(folder: Path) -> None:
    """Remove what processes that were killed had begun to write in a folder."""
    for path in folder.glob(".*.part"):
        made_by = _PART.match(path.name)
        if made_by and (int(made_by.group(1)) == os.getpid() or not _runs(int(made_by.group(1)))):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        pass
    return True


def write_text(path: Path, text: str) -> None:
    """A text file, atomically; names of files that are no UTF-8 are written with backslashes."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_folder(path: Path, write: Callable[[Path], object], size: int) -> None:
    """A folder that ``write`` makes, whole or not at all: the one that was there stays until then.

    Args:
        path: The folder.
        write: Called with another path, beside it.
        size: About how many bytes it has, for a message.
    """
    beside, before = (path.with_name(f".{path.name}{kind}.{os.getpid()}.part") for kind in ("", ".before"))
    try:
        write(beside)
        with suppress(FileNotFoundError):
            path.rename(before)  # no system replaces a folder that has files
        beside.rename(path)
    except Exception as error:  # safetensors and tokenizers have errors of their own for a full disk
        if before.is_dir() and not path.exists():
            before.rename(path)
        raise not_written(path, error if isinstance(error, OSError) else OSError(str(error)), size) from None
    finally:
        for part in (beside, before):
            shutil.rmtree(part, ignore_errors=True)


def previous_of(path: Path) -> Path:
    """Where the state before the last one is kept: ``state.previous.pt``."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def save_state(path: Path, state: dict[str, Any]) -> None:
    """The state of a run with a checksum, atomically; the one that was there stays as the previous one."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(-2, io.SEEK_END)  # the length of the archive's comment, 0 until now
    file.write(_COMMENT.to_bytes(2, "little"))
    checksum = hashlib.sha256(file.getbuffer()).hexdigest()
    file.write(_MARK + checksum.encode())

    def keep() -> None:
        if path.is_file():
            previous_of(path).unlink(missing_ok=True)
            try:
                os.link(path, previous_of(path))
            except OSError:  # a file system without hard links
                os.replace(path, previous_of(path))

    write_bytes(path, file.getbuffer(), keep)


def load_state(path: Path) -> dict[str, Any]:
    """The state of a run, if its checksum is right; tensors and plain values only, no code is run by loading."""
    content = memoryview(path.read_bytes())
    body, comment = content[:-_COMMENT], bytes(content[-_COMMENT:])
    if not comment.startswith(_MARK):
        raise UserError(f"--resume: {path} is damaged or not a state of rankgrad (no checksum at its end)")
    if comment[len(_MARK) :] != hashlib.sha256(body).hexdigest().encode():
        raise UserError(f"--resume: {path} is damaged (its checksum does not match its content)")
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds: all of them mean that this is no state
        said = str(error).partition("\n")[0]
        raise UserError(f"--resume: {path} cannot be read ({type(error).__name__}: {said})") from None
    return state


def _checksum(header: dict[str, Any], content: memoryview) -> str:
    """SHA-256 of a safetensors file: of its header in a fixed order without the checksum, and of the tensors."""
    notes = {key: value for key, value in header.get("__metadata__", {}).items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps({**header, "__metadata__": notes}, sort_keys=True).encode())
    digest.update(content)
    return digest.hexdigest()


def _parts(raw: bytes) -> tuple[dict[str, Any], memoryview]:
    """Header and content of a safetensors file."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), memoryview(raw)[8 + length :]


def save_weights(path: Path, network: nn.Module, metadata: dict[str, Any]) -> None:
    """The weights as safetensors, atomically, with metadata (one JSON text under ``rankgrad``) and a checksum.

    The same weights and metadata give the same bytes. (The library writes metadata in a random order.)
    """
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    header, content = _parts(save(tensors))
    notes = {"format": "pt", "rankgrad": json.dumps(metadata)}
    notes["sha256"] = _checksum({**header, "__metadata__": notes}, content)
    head = json.dumps({"__metadata__": notes, **header}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # tensors begin at a multiple of 8
    write_bytes(path, b"".join([len(head).to_bytes(8, "little"), head, content]))


def read_tensors(path: Path, argument: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; one of ours has a checksum, which must be right.

    Files of version 0.1 have no checksum, and no third key in their metadata. With a third key a checksum is
    required: the key may be its damaged name.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    raw = path.read_bytes()
    try:
        tensors = load(raw)
        header, content = _parts(raw)
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{argument}: expected a safetensors file, received {path} ({error})") from None
    except (KeyError, TypeError, RuntimeError) as error:  # types that torch does not have
        raise UserError(f"{argument}: {path} cannot be read ({type(error).__name__}: {error})") from None
    notes: dict[str, str] = header.get("__metadata__") or {}
    without = notes.keys() == {"format", "rankgrad"} or not {"rankgrad", "sha256"} & notes.keys()
    if not without and notes.get("sha256") != _checksum(header, content):
        raise UserError(f"{argument}: {path} is damaged (its checksum does not match its content)")
    return tensors, notes


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and the metadata :func:`save_weights` wrote."""
    from rankgrad.lab.training.run_files import CheckpointMetadata, checked_json

    if not path.is_file():
        raise UserError(f"RUN: no such file or folder {str(path)!r}")
    tensors, notes = read_tensors(path, "RUN")
    if "rankgrad" not in notes:
        raise UserError(f"RUN: {path} was not written by rankgrad (no settings in its metadata)")
    metadata: dict[str, Any] = checked_json(notes["rankgrad"], CheckpointMetadata, f"RUN: {path}, metadata")
    return tensors, metadata


def fill(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """The weights of a checkpoint into the network that its settings made."""
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        first = textwrap.shorten(str(error).splitlines()[1], 200)
        raise UserError(f"model: expected the settings that the checkpoint was trained with; {first}") from None
