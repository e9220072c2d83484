"""Build the site: write the pages with their generated parts filled in, then let Zensical make HTML of them.

    python docs/machinery/build.py build

makes ``build/site`` by way of ``build/pages``. A line ``<!-- include: NAME arguments -->`` in a page stands for
what ``parts.PARTS[NAME]`` makes of the sources (recipes, commands, result tables), so that a page cannot
disagree with them. Every file of measurements in ``benchmarks/results`` becomes a page, with the README there as
their index. The site generator sees plain Markdown and needs no plugin of ours.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import parts
from sources import ROOT

_INCLUDE = re.compile(r"^<!-- include: (\w+)(?: (.+?))? -->$", re.MULTILINE)
#: In narrow columns a number and its unit stay together.
_TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_QUANTITY = re.compile(r"(?<=\d) (?=(?:%|us|ms|s|MiB|GiB|points)(?:\W|$))")
#: What Zensical would fetch for a search in pages opened from a folder; docs/assets/worker.js does it.
_FETCHED = re.compile(r'<script src="https://[^"]*iframe-worker[^"]*"[^>]*></script>')


def filled(markdown: str, page: str) -> str:
    """A page with its generated parts."""

    def made(found: re.Match[str]) -> str:
        arguments = [part.strip() for part in (found[2] or "").split("|") if part.strip()]
        return parts.PARTS[found[1]](page, *arguments)

    return _TABLE_ROW.sub(lambda row: _QUANTITY.sub("\N{NO-BREAK SPACE}", row[0]), _INCLUDE.sub(made, markdown))


def write(out: Path) -> None:
    """All pages below ``out/docs``, and ``out/mkdocs.yml`` with the measurements in the navigation."""
    shutil.rmtree(out, ignore_errors=True)
    docs = ROOT / "docs"
    for path in sorted(p for p in docs.rglob("*") if p.is_file()):
        name = path.relative_to(docs).as_posix()
        if name.startswith("machinery/") or (name.startswith("figures/") and path.suffix == ".md"):
            continue
        target = out / "docs" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(filled(path.read_text(encoding="utf-8"), name), encoding="utf-8")
        else:
            shutil.copy(path, target)
    (out / "docs/results").mkdir(parents=True)
    pages = {"results/index.md": parts.RESULTS / "README.md"}
    pages |= {f"results/{path.name}": path for path in parts.result_files()}
    for name, path in pages.items():
        wide = "---\nhide: [toc]\n---\n\n"  # room for wide tables
        (out / "docs" / name).write_text(wide + filled(path.read_text(encoding="utf-8"), name), encoding="utf-8")
    settings: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    python = next(p["mkdocstrings"] for p in settings["plugins"] if "mkdocstrings" in p)["handlers"]["python"]
    python["paths"] = [str(ROOT / "src")]
    python["options"]["extensions"] = [f"{ROOT / 'docs/machinery/docstrings.py'}:Docstrings"]
    settings["nav"].insert(-1, {"Measurements": list(pages)})
    (out / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def build(folder: Path) -> str:
    """``folder/site``; returns what Zensical printed. A warning of it is an error."""
    write(folder / "pages")
    machinery = os.pathsep.join(
        [str(ROOT / "docs/machinery"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    environment = {**os.environ, "PYTHONPATH": machinery, "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=folder / "pages", env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}")
    shutil.rmtree(folder / "site", ignore_errors=True)
    (folder / "pages/site").rename(folder / "site")
    for page in (folder / "site").rglob("*.html"):
        deep = "../" * (len(page.relative_to(folder / "site").parts) - 1)
        text = _FETCHED.sub(f'<script src="{deep}assets/worker.js"></script>', page.read_text(encoding="utf-8"))
        page.write_text(text, encoding="utf-8")
    return done.stdout


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
