"""What mkdocs calls: formulas in every page, generated parts, a page for every file of measurements.

A line ``<!-- include: NAME arguments -->`` in a page stands for what ``parts.PARTS[NAME]`` makes of the sources
(recipes, commands, result tables), so that a page cannot say something else than they do.
"""

from __future__ import annotations

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import parts
from formulas import Formulas

_INCLUDE = re.compile(r"^<!-- include: (\w+)(?: (.+?))? -->$", re.MULTILINE)
#: In narrow columns a number and its unit stay together.
_TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_QUANTITY = re.compile(r"(?<=\d) (?=(?:%|us|ms|s|MiB|GiB|points)(?:\W|$))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Formulas everywhere; the measurements in the navigation."""
    config.markdown_extensions.append(Formulas())  # type: ignore[arg-type]
    nav: list[Any] = config.nav or []
    nav.insert(-1, {"Measurements": [f"results/{path.name}" for path in parts.result_files()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """A page for every file of measurements."""
    for path in parts.result_files():
        text = "---\nhide: [toc]\n---\n\n" + path.read_text(encoding="utf-8")  # room for wide tables
        files.append(File.generated(config, f"results/{path.name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in the generated parts."""

    def made(found: re.Match[str]) -> str:
        arguments = [part.strip() for part in (found[2] or "").split("|") if part.strip()]
        return parts.PARTS[found[1]](page.file.src_uri, *arguments)

    return _TABLE_ROW.sub(lambda row: _QUANTITY.sub("\N{NO-BREAK SPACE}", row[0]), _INCLUDE.sub(made, markdown))
