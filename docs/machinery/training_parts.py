"""Parts made from recipes, settings, commands and the extras of the package."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import tomllib

from sources import ROOT, exists, missing, table


def extras(page: str) -> str:
    """What can be installed besides the package itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = [["(nothing)", ", ".join(map(_package, project["dependencies"]))]]
    for extra, packages in project["optional-dependencies"].items():
        if extra not in ("dev", "docs"):
            rows.append([f"`.[{extra}]`", ", ".join(map(_package, packages))])
    return table(["extra", "adds"], rows)


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
    from rankgrad.lab import recipes as room

    parts = []
    for name in room.recipe_names():
        summary, commands, remarks, settings = _header(room.recipe_text(name))
        # A remark behind a command goes above it: lines stay short enough for a telephone.
        commands = [re.sub(r"^(.*?)\s{2,}\(?(.*?)\)?$", r"# \2\n\1", command) for command in commands]
        parts += [f"## {name}", summary, "```bash\n" + "\n".join(commands) + "\n```", remarks]
        indented = "\n".join(f"    {line}" for line in settings.splitlines())
        parts.append(f'??? abstract "Settings of {name}"\n    ```yaml\n{indented}\n    ```')
    return "\n\n".join(parts)


def _kind(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    choices = re.search(r"Literal\[(.*?)\]", text)
    if choices:
        return ", ".join(f"`{choice.strip(chr(39))}`" for choice in choices[1].split(", "))
    return re.sub(r"typing\.|Annotated\[(\w+).*\]|rankgrad\.\S+\.", r"\1", text)


def settings(page: str, module: str) -> str:
    """Tables of the settings of one task, section by section."""
    if not exists(module):
        return missing(module)
    from rankgrad.lab.training.config import comments, sections_of

    config = importlib.import_module(module).Config
    sections = sections_of(config)
    kinds = {"": config, **sections}
    parts = []
    for prefix, kind in kinds.items():
        if kind.model_config.get("extra") == "allow":  # a loss by name: its arguments are its own
            continue
        told = comments(kind)
        rows = []
        for name, field in kind.model_fields.items():
            if not prefix and name in (*sections, "task"):
                continue
            default = "" if field.is_required() else f"`{field.default}`"
            key = f"{prefix}.{name}" if prefix else name
            rows.append([f"`{key}`", _kind(field.annotation), default, told.get(name, "")])
        first = re.sub(r":\w+:`([^`]*)`", r"\1", (inspect.getdoc(kind) or "").partition("\n")[0])
        title = f"`{prefix}`: {first}" if prefix else "Of the run"
        parts += [f"#### {title.rstrip('.')}", table(["setting", "kind", "default", "meaning"], rows)]
    return "\n\n".join(parts)


def commands(page: str) -> str:
    """Every command of ``rankgrad`` with its arguments and options."""
    import typer

    from rankgrad.lab.cli import build

    return "\n\n".join(_command(typer.main.get_command(build()), "rankgrad"))


def _command(command: Any, name: str) -> list[str]:
    import typer

    inner = getattr(command, "commands", {})
    rows, usage, context = [], [name], typer.Context(command, info_name=name)
    for parameter in command.params:
        given, told = parameter.get_help_record(context) or ("", "")
        told, *rest = re.split(r"\s*\[(?:[^\[\]]*; )?(?=required|default)", told.rstrip("]"))
        default = "".join(rest).removeprefix("default: ").partition(";")[0]
        if parameter.param_type_name == "argument":
            given = parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
            usage.append(given if default == "required" else f"[{given}]")
        given = re.sub(r" <(?:list\[)?(\w+)[^>]*>", lambda kind: f" {kind[1].upper()}", given)
        if given and parameter.name != "help":
            rows.append([f"`{given}`", told, f"`{default}`" if default not in ("", "required") else default])
    usage += ["[OPTIONS]"] if any(row[0].startswith("`-") for row in rows) else []
    parts = []
    if name != "rankgrad":
        parts += [f"## {name}", inspect.cleandoc(command.help or "")]
        if rows or not inner:
            parts.append(f"```text\n{' '.join(usage)}\n```")
        if rows:
            parts.append(table(["argument", "meaning", "default"], rows))
    for word, one in inner.items():
        parts += _command(one, f"{name} {word}")
    return parts
