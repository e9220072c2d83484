"""The command ``rankgrad``; each package of the lab registers its own verbs."""

from __future__ import annotations

import re
import signal
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

#: Distributions whose name differs from that of their module.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "faiss": "faiss-cpu",
    "mlflow": "mlflow-skinny",
    "pytorch_metric_learning": "pytorch-metric-learning",
    "sentence_transformers": "sentence-transformers",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def _extra_with(distribution: str) -> str:
    """The smallest extra of this package with a distribution, as the end of a message; empty if none has it."""
    from importlib import metadata

    try:
        needs = [need.partition("; extra == ") for need in metadata.requires("rankgrad") or ()]
    except metadata.PackageNotFoundError:  # run from its source
        return ""
    sizes = Counter(extra.strip("\"'") for _, _, extra in needs)
    names = {extra.strip("\"'") for need, _, extra in needs if re.match(rf"{distribution}(?![\w.-])", need)}
    found = "train" if "train" in names else min(names - {""}, key=sizes.__getitem__, default="")
    return f" (or the extra {found})" if found else ""


def _version(asked: bool) -> None:
    import typer

    import rankgrad

    if asked:
        print(f"rankgrad {rankgrad.__version__}")
        raise typer.Exit


def build() -> typer.Typer:
    """The application, with the verbs of every package."""
    import typer

    from rankgrad.lab.bench import commands as bench
    from rankgrad.lab.figures import commands as figures
    from rankgrad.lab.recipes import commands as recipes
    from rankgrad.lab.sodeep import commands as sodeep
    from rankgrad.lab.use import commands as use

    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    version = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")

    @app.callback()
    def options(version: bool = version) -> None:
        """Train directly for ranking metrics. A first try: rankgrad train digits"""

    for verbs in (recipes, use, bench, sodeep, figures):
        verbs.register(app)
    return app


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; user errors are printed as one line."""
    from rankgrad.lab.training.errors import UserError, meaning_of, printable
    from rankgrad.lab.training.output import ignoring_write_errors

    try:
        return build()(arguments)
    except (UserError, OSError) as error:
        message, status = printable(f"rankgrad: {error}"), getattr(error, "status", 1)
        if status == 1:
            sys.exit(message)
        with ignoring_write_errors():
            print(message, file=sys.stderr)
        sys.exit(status)
    except (KeyboardInterrupt, SystemExit) as error:
        # before a verb begins, and where typer has made a status of it
        if isinstance(error, SystemExit) and error.code != 128 + signal.SIGINT:
            raise
        with ignoring_write_errors():
            print("rankgrad: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (MemoryError, RuntimeError, ValueError) as error:
        meaning = meaning_of(error)
        if meaning is None:
            raise
        sys.exit(f"rankgrad: {meaning}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "rankgrad"):
            raise
        name = _DISTRIBUTIONS.get(package, package)
        sys.exit(f"rankgrad: {package} is not installed: pip install {name}{_extra_with(name)}")
