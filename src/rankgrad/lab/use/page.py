"""The page of a search: every query with its nearest items."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rankgrad.lab.report import page
from rankgrad.lab.vision.decoding import upright

if TYPE_CHECKING:
    from PIL import Image

_SIDE = 132
_STYLE = """
.row { display: flex; gap: 8px; align-items: flex-start; overflow-x: auto; margin: 8px 0; }
.row figure { margin: 0; width: 132px; flex: none; }
.row img { width: 132px; height: 132px; object-fit: cover; border-radius: 6px; display: block; }
.row figcaption { font-size: 11px; color: var(--soft); overflow-wrap: anywhere; }
.row .query { margin-right: 16px; } .row .query img { outline: 3px solid #2166ac; outline-offset: -3px; }
"""


def write(path: Path, queries: list[str], found: list[list[tuple[str, float]]], kind: str) -> str:
    """An HTML page that needs nothing else, as text for ``path``."""
    sections = []
    for query, nearest in zip(queries, found, strict=True):
        if kind == "image":
            inner = _figure(query, "the query", "query")
            inner += "".join(_figure(name, f"{score:.3f} {name}", "item") for name, score in nearest)
            sections.append((query, f'<div class="row">{inner}</div>'))
        else:
            rows = [[name, f"{score:.3f}"] for name, score in nearest]
            sections.append((query, page.table(["nearest", "similarity"], rows)))
    return page.document(f"rankgrad: {path.stem}", sections, style=_STYLE)


def _figure(name: str, caption: str, kind: str) -> str:
    label = escape(name)
    shown = f'<img src="{_thumbnail(Path(name))}" alt="{label}" title="{label}">' if Path(name).is_file() else ""
    return f'<figure class="{kind}">{shown}<figcaption>{escape(caption)}</figcaption></figure>'


def _thumbnail(path: Path) -> str:
    """A small JPEG as a data URL; nothing for a file that can no longer be read."""
    try:
        return upright(path, lambda *size: (2 * _SIDE, 2 * _SIDE), _small)
    except (OSError, ValueError):
        return ""


def _small(image: Image.Image) -> str:
    image.thumbnail((2 * _SIDE, 2 * _SIDE))
    return page.data_url(image)
