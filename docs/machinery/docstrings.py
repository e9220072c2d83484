"""Docstrings as they are written (Google sections, Sphinx roles) for a Markdown page.

``:func:`rank_loss` `` becomes a link where the name is ours, ``:math:`` and ``.. math::`` become formulas, and the
section "Example" is called "Examples" by mkdocstrings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?([^`]+)`")
_MATH = re.compile(r":math:`([^`]+)`")
_BLOCK = re.compile(r"^( *)\.\. math:: (.*(?:\n(?:\1 +\S.*))*)", re.MULTILINE)


def _link(name: str, place: griffe.Object) -> str:
    """A link to a documented name, as seen from the object whose docstring says it; else the name as code."""
    try:
        path = name if name.startswith("rankgrad.") else place.resolve(name)
        found = place.modules_collection[path]
    except (griffe.NameResolutionError, KeyError, griffe.AliasResolutionError):
        return f"`{name}`"
    public = all(not part.startswith("_") for part in found.path.split("."))
    public = public and not found.path.startswith("rankgrad.engine")
    public = public and not (found.is_module and found.path.startswith("rankgrad.lab"))  # no pages of their own
    return f"[`{name}`][{found.canonical_path}]" if public and found.has_docstring else f"`{name}`"


def as_markdown(text: str, place: griffe.Object) -> str:
    """One docstring."""
    text = _BLOCK.sub(lambda m: f"{m[1]}$${' '.join(m[2].split())}$$", text)
    text = _MATH.sub(lambda m: f"${' '.join(m[1].split())}$", text)
    text = _ROLE.sub(lambda m: _link(m[1], place), text)
    if isinstance(place, griffe.Function) and place.returns is not None:
        # Our Returns sections are prose; up to a colon the parser would take it for a type. Give it the type.
        text = re.sub(r"^(Returns:\n +)", rf"\1{place.returns}: ", text, flags=re.MULTILINE)
    text = re.sub(r"^Reference:\n +(.*)", r"**Reference:** \1", text, flags=re.MULTILINE)
    return re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


def _all(room: griffe.Module | griffe.Class) -> Iterator[griffe.Object]:
    yield room
    for member in room.members.values():
        if isinstance(member, griffe.Module | griffe.Class):
            yield from _all(member)
        elif not member.is_alias:
            yield member  # type: ignore[misc]


class Docstrings(griffe.Extension):
    """Rewrites every docstring once the package is known as a whole."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for place in _all(pkg):
            if place.docstring is not None:
                place.docstring.value = as_markdown(place.docstring.value, place)
