"""User errors are printed as one line; everything else keeps its traceback."""

from __future__ import annotations

import re


class UserError(ValueError):
    """A wrong setting, a missing file, a run that cannot go on: the command line shows the message alone.

    Args:
        message: What is wrong, with the name of the setting or file.
        status: The exit status of the command.
    """

    def __init__(self, message: str, *, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class DataError(UserError):
    """The data do not have what a run needs, such as two classes; found before anything is trained."""


class TrainingError(UserError):
    """Training went wrong and would again: a loss or embeddings that are not finite, embeddings that collapsed.

    Args:
        what: What went wrong.
        advice: What there is to go on from, and what to try.
    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}. {advice}")
        self.what = what


class Interrupted(KeyboardInterrupt):
    """A signal asked a run to stop; its state is saved.

    Args:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def printable(text: str) -> str:
    r"""A line for a terminal: control characters as escapes (``\x1b``, ``\n``).

    Names of files may hold escape sequences, ends of lines, or bytes that are no UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


#: Words of torch's errors -> what they mean for a user.
_MEANINGS = {
    r"allocate memory|not enough memory|out of memory|bad_alloc|[Ss]torage size calc|multiplication overflow": (
        "out of memory; lower the batch size (batch.size), the image size (view.*), the size of the network "
        "(model.*) or the loss's memory; data.cache=none keeps no images in memory"
    ),
    r"Connection (closed|reset) by peer|ncclRemoteError": (
        "another process of this run has ended, so this one ends too; the other's message says why, and --resume "
        "continues from the last checkpoint"
    ),
    r"without overflow": "a number in the settings is too large for the network's precision",
    r"^(lam|window|margin|weight|memory|threshold|pairs): expected": "a setting of the loss",
    r"determine home directory": "a path begins with ~ and the name of an unknown user",
    r"can't start new thread": "the system cannot start more threads; lower data.workers",
}


def meaning_of(error: BaseException) -> str | None:
    """What an error of torch's or the system's means for the user; None if it is a fault of this program."""
    said = " ".join(str(error).split())
    if isinstance(error, MemoryError):
        said = f"cannot allocate memory {said}"
    for words, meaning in _MEANINGS.items():
        if re.search(words, said):
            return f"{meaning} ({said[:160]})"
    return None
