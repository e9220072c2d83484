"""The command ``rankgrad``: thin verbs; what they do is in the rooms."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer


def build() -> typer.Typer:
    """The application, with the commands of every room."""
    import typer

    from rankgrad.lab.bench import commands as bench
    from rankgrad.lab.figures import commands as figures
    from rankgrad.lab.recipes import commands as recipes
    from rankgrad.lab.retrieval import commands as retrieval
    from rankgrad.lab.sodeep import commands as sodeep

    app = typer.Typer(
        help="Train directly for ranking metrics.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    for room in (recipes, retrieval, bench, sodeep, figures):
        room.register(app)
    return app


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; user errors are printed as one line."""
    from rankgrad.lab.training.errors import UserError, printable

    try:
        return build()(arguments)
    except (UserError, OSError) as error:
        message, status = printable(f"rankgrad: {error}"), getattr(error, "status", 1)
        if status == 1:
            sys.exit(message)
        print(message, file=sys.stderr)
        sys.exit(status)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "rankgrad"):
            raise
        extra = "figures" if package == "matplotlib" else "train"
        sys.exit(f"rankgrad: {package} is not installed: pip install 'rankgrad[{extra}]'")
