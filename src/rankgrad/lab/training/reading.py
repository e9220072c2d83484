"""Read the user's files safely: only regular files, up to a maximum size and a maximum of memory."""

from __future__ import annotations

import stat
from pathlib import Path

from rankgrad.lab.training.errors import UserError

#: Bytes of memory that the content of a file may take, images apart; that of a large file eight times its size.
MOST = 4 * 2**30

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder"}


def size_of(path: Path, most: int = MOST, argument: str = "") -> int:
    """The bytes of a file that can be read whole; one without an end, or with more than ``most``, is an error."""
    name = f"{argument}: {path}" if argument else str(path)
    try:
        found = path.stat()
    except FileNotFoundError:
        raise UserError(f"{name}: no such file") from None
    if not stat.S_ISREG(found.st_mode):
        raise UserError(
            f"{name}: expected a file, found {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}"
        )
    if found.st_size > most:
        raise UserError(f"{name} has {found.st_size:,} bytes, expected at most {most:,}")
    return found.st_size


def read(path: Path, most: int = MOST, argument: str = "") -> bytes:
    """The content of a file of at most so many bytes."""
    size_of(path, most, argument)
    return path.read_bytes()


def read_lines(path: Path, most: int = 200_000_000, argument: str = "") -> list[str]:
    """The lines of a text file; the error of one that is no UTF-8 names the line and the byte.

    No list of a benchmark has more than 4 million bytes.
    """
    content = read(path, most, argument)
    try:
        return content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        name = f"{argument}: {path}" if argument else str(path)
        raise UserError(f"{name} line {line}: expected UTF-8, received byte {content[error.start]:#04x}") from None


def check_memory(needed: int, name: str, what: str, size: int = 0) -> None:
    """Refuse what a file of ``size`` bytes would take in memory, if it is out of proportion.

    Args:
        needed: How many bytes.
        name: Of the file, for the message.
        what: What needs them.
        size: Of the file.
    """
    most = max(MOST, 8 * size)
    if needed > most:
        raise UserError(
            f"{name}: {what} need {needed / 1e9:,.1f} GB of memory, expected at most {most / 1e9:,.1f}"
        )
