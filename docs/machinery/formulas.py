"""Formulas as MathML, made when the page is built: browsers draw it themselves, nothing is fetched.

``$...$`` in a line, ``$$...$$`` on lines of their own.
"""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

#: A word in upright letters arrives as one element a letter, spaced like a product.
_LETTERS = re.compile(r'<mrow>((?:<mi mathvariant="normal">\w</mi>)+)</mrow>')


def mathml(latex: str, *, block: bool = False) -> str:
    """The formula as MathML; a command that is not understood is an error."""
    out = convert(latex.replace(r"\arg", r"\mathrm{arg}\,").strip(), display="block" if block else "inline")
    if "\\" in out:
        raise ValueError(f"formula not understood: {latex!r} gives {out!r}")
    return _LETTERS.sub(lambda found: f"<mi>{re.sub('<[^>]*>', '', found.group(1))}</mi>", out)


class _Inline(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: N802
        return self.md.htmlStash.store(mathml(m.group(1))), m.start(0), m.end(0)


class _Block(BlockProcessor):
    def test(self, parent: Element, block: str) -> bool:
        return block.startswith("$$") and block.rstrip().endswith("$$") and len(block) > 4

    def run(self, parent: Element, blocks: list[str]) -> None:
        formula = blocks.pop(0).strip().removeprefix("$$").removesuffix("$$")
        place = SubElement(parent, "div", {"class": "formula"})
        place.text = self.parser.md.htmlStash.store(mathml(formula, block=True))


class Formulas(Extension):
    """The Markdown extension."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        # After code (190), before escapes (180): a backslash in a formula is the formula's.
        md.inlinePatterns.register(_Inline(r"(?<![\\$\w])\$(?!\s)([^$\n]+?)(?<!\s)\$(?!\w)", md), "formula", 185)
        md.parser.blockprocessors.register(_Block(md.parser), "formula", 75)


def makeExtension(**settings: object) -> Formulas:  # noqa: N802
    """Called by Python-Markdown for the name ``formulas`` in ``markdown_extensions``."""
    return Formulas(**settings)
