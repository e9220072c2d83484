"""The generated parts of the pages, by the name an include line calls them.

Every one takes the page it is for (its path inside ``docs/``) and the arguments of the include line, and returns
Markdown. Here: files of the repository, result tables and figures.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from package_parts import methods, name, names, others, words
from sources import ROOT, exists, missing
from training_parts import commands, extras, recipes, settings

RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"


def result_files() -> list[Path]:
    """Files of measurements, newest first; their names begin with the date. Without the index, README.md."""
    return sorted(RESULTS.glob("2*.md"), reverse=True)


def file(page: str, name: str) -> str:
    """A whole file of the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def section(page: str, name: str, heading: str, optional: str = "") -> str:
    """What stands under a heading of level 2 of a file; nothing, if it is optional and not there."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        if optional:
            return ""
        raise ValueError(f"{page}: {name} has no section {heading!r}")
    return found[1].strip()


def results(page: str, pattern: str, heading: str, command: str) -> str:
    """The newest table of a kind of measurement, or that there is none yet.

    Args:
        page: For the link to the whole file.
        pattern: Which files, e.g. ``*-h200-bench.md``.
        heading: A part of the heading the table stands under.
        command: What measures it.
    """
    for path in sorted(RESULTS.glob(pattern), reverse=True):
        text = path.read_text(encoding="utf-8")
        for title, body in re.findall(r"^#+ ([^\n]*)\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL):
            tables = re.findall(r"(?:^\|.*\n?)+", body, re.MULTILINE)
            if heading.lower() in title.lower() and tables:
                link = posixpath.relpath(f"results/{path.name}", posixpath.dirname(page) or ".")
                kept = [table.strip().replace(" ± ", "\u00a0±\u00a0") for table in tables]  # no line break inside
                return "\n\n".join([*kept, f"*{title}. From [{path.stem}]({link}).*"])
    return f'!!! warning "Not measured yet"\n    `{command}` will give this table.'


def _images() -> dict[str, Path]:
    """The images in ``docs/figures`` by name."""
    return {path.stem: path for path in sorted(FIGURES.iterdir()) if path.suffix in (".png", ".svg")}


def figure(page: str, stem: str) -> str:
    """An image with its caption (the text beside it), or the command that draws it."""
    image = _images().get(stem)
    if image is None:
        return f'!!! warning "Not drawn yet"\n    `rankgrad figure {stem}` draws this one.'
    link = posixpath.relpath(f"figures/{image.name}", posixpath.dirname(page) or ".")
    told = image.with_suffix(".md")
    caption = " ".join(told.read_text(encoding="utf-8").split()) if told.is_file() else ""
    return "\n".join(
        [
            '<figure markdown="span">',
            f"![{stem}]({link}){{ loading=lazy }}",
            f'<figcaption markdown="span">{caption}</figcaption>',
            "</figure>",
        ]
    )


def figures(page: str) -> str:
    """Every figure that can be drawn, with the images there are of it."""
    if not exists("rankgrad.lab.figures.catalogue"):
        return missing("rankgrad.lab.figures")
    from rankgrad.lab.figures import catalogue

    parts, drawn = [], _images()
    for stem, told in catalogue.FIGURES.items():
        parts += [f"## {stem.replace('-', ' ').capitalize()}", told[0].upper() + told[1:] + "."]
        parts.append(f"```bash\nrankgrad figure {stem}\n```")
        versions = sorted(one for one in drawn if one == stem or one.startswith(f"{stem}-"))
        parts += [figure(page, one) for one in versions or [stem]]
    return "\n\n".join(parts)


PARTS: dict[str, Callable[..., str]] = {
    part.__name__: part
    for part in (
        *(file, section, results),
        *(extras, recipes, settings, commands),
        *(name, names, words, others, methods, figure, figures),
    )
}
