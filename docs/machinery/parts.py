"""The generated parts of the pages: Markdown made from recipes, commands, settings, result tables, docstrings.

Every function takes the page it is for (its path inside ``docs/``) and the arguments of the include line.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"


def result_files() -> list[Path]:
    """Files of measurements, newest first; their names begin with the date."""
    return sorted(RESULTS.glob("*.md"), reverse=True)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package it would be in
        return False


def _missing(module: str) -> str:
    return f'!!! warning "Not in this version yet"\n    `{module}` is being written.'


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join([_row(head), "|" + "---|" * len(head), *map(_row, rows)])


# Files of the repository


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
                return "\n\n".join([*(t.strip() for t in tables), f"*{title}. From [{path.stem}]({link}).*"])
    return f'!!! warning "Not measured yet"\n    `{command}` will give this table.'


def measurements(page: str) -> str:
    """Links to all files of measurements."""
    lines = []
    for path in result_files():
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        link = posixpath.relpath(f"results/{path.name}", posixpath.dirname(page) or ".")
        lines.append(f"- [{title}]({link})")
    return "\n".join(lines)


# Recipes, settings, commands


def extras(page: str) -> str:
    """What can be installed besides the package itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = [["(nothing)", ", ".join(map(_package, project["dependencies"]))]]
    for extra, packages in project["optional-dependencies"].items():
        if extra not in ("dev", "docs"):
            rows.append([f"`.[{extra}]`", ", ".join(map(_package, packages))])
    return _table(["extra", "adds"], rows)


def _package(requirement: str) -> str:
    """The name alone; an extra of our own stays recognisable."""
    return re.sub(r"rankgrad\[(.*)\]", r"what `\1` adds", re.split(r"[<>=;]", requirement)[0].strip())


def _header(text: str) -> tuple[str, list[str], str, str]:
    """Summary, commands, remarks and settings of a recipe."""
    lines = text.splitlines()
    many = next(k for k, line in enumerate(lines) if not line.startswith("#"))
    summary, *rest = (line.removeprefix("#").removeprefix(" ") for line in lines[:many])
    commands = [line.strip() for line in rest if line.startswith("  ")]
    remarks = " ".join(line.strip() for line in rest if not line.startswith("  ")).strip()
    return summary, commands, remarks, "\n".join(lines[many:])


def recipes(page: str) -> str:
    """Every recipe: what it trains, its commands, the number to expect, its settings."""
    from rankgrad import recipes as room

    parts = []
    for name in room.recipe_names():
        summary, commands, remarks, settings = _header(room.recipe_text(name))
        # A remark behind a command goes above it: lines stay short enough for a telephone.
        commands = [re.sub(r"^(.*?)\s{2,}\(?(.*?)\)?$", r"# \2\n\1", command) for command in commands]
        parts += [f"## {name}", summary, "```bash\n" + "\n".join(commands) + "\n```", remarks]
        indented = "\n".join(f"    {line}" for line in settings.splitlines())
        parts.append(f'??? abstract "Settings of {name}"\n    ```yaml\n{indented}\n    ```')
    return "\n\n".join(parts)


def _comments(kind: type) -> dict[str, str]:
    """What the source says behind each setting."""
    found = re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(kind), re.MULTILINE)
    return dict(found)


def _kind(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    choices = re.search(r"Literal\[(.*?)\]", text)
    if choices:
        return ", ".join(f"`{choice.strip(chr(39))}`" for choice in choices[1].split(", "))
    return re.sub(r"typing\.|Annotated\[(\w+).*\]|rankgrad\.\S+\.", r"\1", text)


def settings(page: str, module: str) -> str:
    """Tables of the settings a run of one subject knows, section by section."""
    if not _exists(module):
        return _missing(module)
    from rankgrad.training.config import sections_of

    config = importlib.import_module(module).Config
    sections = sections_of(config)
    kinds = {"": config, **sections}
    parts = []
    for prefix, kind in kinds.items():
        if kind.model_config.get("extra") == "allow":  # a loss by name: its arguments are its own
            continue
        told = {name: text for base in reversed(kind.__mro__[:-2]) for name, text in _comments(base).items()}
        rows = []
        for name, field in kind.model_fields.items():
            if not prefix and name in (*sections, "task"):
                continue
            default = "" if field.is_required() else f"`{field.default}`"
            key = f"{prefix}.{name}" if prefix else name
            rows.append([f"`{key}`", _kind(field.annotation), default, told.get(name, "")])
        first = re.sub(r":\w+:`([^`]*)`", r"\1", (inspect.getdoc(kind) or "").partition("\n")[0])
        title = f"`{prefix}`: {first}" if prefix else "Of the run"
        parts += [f"#### {title.rstrip('.')}", _table(["setting", "kind", "default", "meaning"], rows)]
    return "\n\n".join(parts)


def commands(page: str) -> str:
    """Every command of ``rankgrad`` with its arguments and options."""
    import typer

    from rankgrad.cli import build

    return "\n\n".join(_command(typer.main.get_command(build()), "rankgrad"))


def _command(command: Any, name: str) -> list[str]:
    import typer

    inner = getattr(command, "commands", {})
    rows, usage, context = [], [name], typer.Context(command, info_name=name)
    for parameter in command.params:
        given, told = parameter.get_help_record(context) or ("", "")
        told, *rest = re.split(r"\s*\[(?=required|default)", told.rstrip("]"))
        default = "".join(rest).removeprefix("default: ").partition(";")[0]
        if parameter.param_type_name == "argument":
            given = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
            usage.append(given if default == "required" else f"[{given}]")
        if given and parameter.name != "help":
            rows.append([f"`{given}`", told, f"`{default}`" if default not in ("", "required") else default])
    usage += ["[OPTIONS]"] if any(row[0].startswith("`-") for row in rows) else []
    parts = []
    if name != "rankgrad":
        parts += [f"## {name}", inspect.cleandoc(command.help or "")]
        if rows or not inner:
            parts.append(f"```text\n{' '.join(usage)}\n```")
        if rows:
            parts.append(_table(["argument", "meaning", "default"], rows))
    for word, one in inner.items():
        parts += _command(one, f"{name} {word}")
    return parts


# The package


def _methods_of(kind: type) -> list[str]:
    """Public methods with something to say, its own or those of a class of ours it is made from."""
    found: list[str] = []
    for base in kind.__mro__:
        if base.__module__.startswith("rankgrad"):
            for name, value in vars(base).items():
                hidden = name.startswith("_") or name in ("extra_repr", "list_loss") or name in found
                if not hidden and inspect.isfunction(value) and value.__doc__:
                    found.append(name)
    return found


def name(page: str, path: str) -> str:
    """One name of the package, from its docstring; a class with its methods."""
    module, _, last = path.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    text = f"::: {path}"
    if inspect.isclass(value) and (methods := _methods_of(value)):
        text += f"\n    options:\n      inherited_members: true\n      members: [{', '.join(methods)}]"
    return text


def names(page: str, module: str, *chosen: str) -> str:
    """Every name of a module's ``__all__`` (or those given) from its docstring; nothing without the module."""
    if not _exists(module):
        return ""
    room = importlib.import_module(module)
    listed = list(chosen) or list(getattr(room, "__all__", ()))
    if not listed:
        listed = [n for n, v in vars(room).items() if n[0] != "_" and getattr(v, "__module__", "") == module]
    documented = [n for n in listed if not inspect.ismodule(getattr(room, n))]
    return "\n\n".join(name(page, f"{module}.{one}") for one in documented)


def words(page: str, module: str) -> str:
    """What a module says about itself."""
    if not _exists(module):
        return _missing(module)
    return f"::: {module}\n    options:\n      show_root_heading: false\n      show_root_toc_entry: false"


#: Rooms that have pages of their own.
_TOLD = (
    "rankgrad",
    "rankgrad.losses",
    "rankgrad.surrogates",
    "rankgrad.surrogates.sodeep",
    "rankgrad.detection",
    "rankgrad.figures",
)


def others(page: str) -> str:
    """Every further module that has an ``__all__``: what it says about itself, and its names."""
    import rankgrad

    text = []
    for found in pkgutil.walk_packages(rankgrad.__path__, "rankgrad."):
        if found.name in _TOLD or "._" in found.name:
            continue
        if hasattr(importlib.import_module(found.name), "__all__"):
            text += [words(page, found.name), names(page, found.name)]
    return "\n\n".join(text)


def methods(page: str) -> str:
    """The rivals' register as a table."""
    from rankgrad.surrogates import METHODS

    rows = [
        [
            f"`{key}`",
            one.citation,
            one.complexity.replace("^2", "²"),
            "any ranking loss" if one.general else "AP only",
        ]
        for key, one in METHODS.items()
    ]
    return _table(["name in `METHODS`", "paper", "claimed", "serves"], rows)


def _pictures() -> dict[str, Path]:
    """The pictures in ``docs/figures`` by name."""
    return {path.stem: path for path in sorted(FIGURES.iterdir()) if path.suffix in (".png", ".svg")}


def figure(page: str, stem: str) -> str:
    """A picture with its caption (the text beside it), or the command that draws it."""
    picture = _pictures().get(stem)
    if picture is None:
        return f'!!! warning "Not drawn yet"\n    `rankgrad figure {stem}` draws this one.'
    link = posixpath.relpath(f"figures/{picture.name}", posixpath.dirname(page) or ".")
    told = picture.with_suffix(".md")
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
    """Every figure that can be drawn, with the pictures there are of it."""
    if not _exists("rankgrad.figures.catalogue"):
        return _missing("rankgrad.figures")
    from rankgrad.figures import catalogue

    parts, drawn = [], _pictures()
    for stem, told in catalogue.FIGURES.items():
        parts += [f"## {stem.replace('-', ' ').capitalize()}", told[0].upper() + told[1:] + "."]
        parts.append(f"```bash\nrankgrad figure {stem}\n```")
        versions = sorted(one for one in drawn if one == stem or one.startswith(f"{stem}-"))
        parts += [figure(page, one) for one in versions or [stem]]
    return "\n\n".join(parts)


PARTS: dict[str, Callable[..., str]] = {
    part.__name__: part
    for part in (
        *(file, section, results, measurements),
        *(extras, recipes, settings, commands),
        *(name, names, words, others, methods, figure, figures),
    )
}
