"""Parts made from the package itself: docstrings of names and modules, the register of baselines."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from sources import exists, missing, table


def _methods_of(kind: type) -> list[str]:
    """Public methods with a docstring, its own or those of a class of ours it is made from."""
    found: list[str] = []
    for base in kind.__mro__:
        if base.__module__.startswith("rankgrad"):
            for name, value in vars(base).items():
                hidden = name.startswith("_") or name in ("extra_repr", "asked", "mean") or name in found
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
    if not exists(module):
        return ""
    room = importlib.import_module(module)
    listed = list(chosen) or list(getattr(room, "__all__", ()))
    if not listed:
        listed = [n for n, v in vars(room).items() if n[0] != "_" and getattr(v, "__module__", "") == module]
    documented = [n for n in listed if not inspect.ismodule(getattr(room, n))]
    return "\n\n".join(name(page, f"{module}.{one}") for one in documented)


def words(page: str, module: str) -> str:
    """The docstring of a module."""
    if not exists(module):
        return missing(module)
    return f"::: {module}\n    options:\n      show_root_heading: false\n      show_root_toc_entry: false"


#: Modules that have pages of their own.
_TOLD = (
    "rankgrad",
    "rankgrad.losses",
    "rankgrad.surrogates",
    "rankgrad.surrogates.sodeep",
    "rankgrad.detection",
    "rankgrad.lab.figures",
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
    """The baselines' register as a table."""
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
    return table(["name in `METHODS`", "paper", "claimed", "serves"], rows)
