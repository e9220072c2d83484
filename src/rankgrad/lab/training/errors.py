"""User errors are printed as one line; everything else keeps its traceback."""

from __future__ import annotations


class UserError(ValueError):
    """A wrong setting, a missing file, a run that cannot go on: the command line shows the message alone.

    Args:
        message: What is wrong, with the name of the setting or file.
        status: The exit status of the command.
    """

    def __init__(self, message: str, *, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class Interrupted(KeyboardInterrupt):
    """A signal asked a run to stop; its state is saved.

    Args:
        number: Of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def printable(text: str) -> str:
    r"""Text for a terminal or a report: control characters as escapes (``\x1b``), lines stay lines.

    Names of files may hold escape sequences, or bytes that are no UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
