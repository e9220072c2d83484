"""Rules of the layout: what may import what, names of files, one version."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import tomllib

import rankgrad

SOURCE = Path(rankgrad.__file__).parent
#: Lower layers first. A module may import its own layer and those below.
LIBRARY = [
    "_check reach distributed",
    "engine",
    "lists ranking memory pairs samplers parameters",
    "metrics",
    "losses graphs",
    "surrogates",
    "detection integrations",
    "",
]
LAB = [
    "training callbacks",
    "report vision sodeep",
    "retrieval detection text ranker",
    "tasks recipes",
    "use",
    "figures bench",
    "cli",
]
LAYERS = [{f"rankgrad.{name}" for name in layer.split()} for layer in LIBRARY]
LAYERS[-1] = {"rankgrad", "rankgrad.__init__"}
LAYERS += [{f"rankgrad.lab.{name}" for name in layer.split()} for layer in LAB]


def layer_of(module):
    for level, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names - {"rankgrad"}):
            return level
    if module == "rankgrad":
        return LAYERS.index({"rankgrad", "rankgrad.__init__"})
    return len(LAYERS)  # rankgrad.__main__, rankgrad.lab


def test_imports_point_down():
    seen = 0
    for path in SOURCE.rglob("*.py"):
        name = "rankgrad." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rankgrad"):
                packages = node.module in ("rankgrad", "rankgrad.lab")
                targets = [f"{node.module}.{a.name}" for a in node.names] if packages else [node.module]
                for target in targets:
                    assert layer_of(target) <= layer_of(name), f"{name} imports {target}"
                    seen += 1
    assert seen > 20


def test_file_names_say_what_is_inside():
    names = {path.stem for path in SOURCE.rglob("*.py")}
    assert not names & {"utils", "util", "base", "common", "helpers", "misc"}


def test_no_file_is_longer_than_400_lines():
    root = SOURCE.parent.parent
    parts = ("src", "tests", "benchmarks", "docs", "examples")
    files = [path for part in parts for path in (root / part).rglob("*.py")]
    assert len(files) > 300
    assert [str(path) for path in files if len(path.read_text().splitlines()) > 400] == []


def run(code):
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    return out.stdout


def test_import_is_light():
    """torch and numpy only, and little time on top of them: of the processor, whatever else the machine does."""
    code = (
        "import sys, time; t = [time.process_time()]; import torch, numpy; t.append(time.process_time());"
        "before = set(sys.modules); import rankgrad; t.append(time.process_time());"
        "print(t[1] - t[0], t[2] - t[1], *{m.split('.')[0] for m in set(sys.modules) - before})"
    )
    runs = [run(code).split() for _ in range(3)]
    assert min(float(own) / float(below) for below, own, *_ in runs) < 0.2
    new = set(runs[0][2:]) - {"rankgrad"} - set(sys.stdlib_module_names)
    assert new <= {"torch", "numpy"}, new


def test_one_version():
    project = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text())["project"]
    assert project["version"] == rankgrad.__version__
    assert f"version: {rankgrad.__version__}" in (SOURCE.parent.parent / "CITATION.cff").read_text()


def test_one_address():
    """The links of the package and of the citation lead to one place, and to files that exist there."""
    root = SOURCE.parent.parent
    links = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    assert set(links) == {"Documentation", "Source", "Changelog", "Issues"}
    assert f'repository-code: "{links["Source"]}"' in (root / "CITATION.cff").read_text()
    for link in links.values():
        inside = re.fullmatch(re.escape(links["Source"]) + r"(?:/(?:tree|blob)/main/(.+)|/issues)?", link)
        assert inside and (inside[1] is None or (root / inside[1]).exists()), link


def test_public_names_are_documented_in_the_readme():
    readme = (SOURCE.parent.parent / "README.md").read_text()
    missing = [n for n in rankgrad.__all__ if n not in readme and n not in ("Pairs", "retrieval_pairs")]
    assert not missing


def test_paths_that_contributing_names_exist():
    root = SOURCE.parent.parent
    text = (root / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`([\w/.]+(?:/|\.py|\.md))`", text))
    assert len(named) > 20
    places = (root, SOURCE, SOURCE / "engine" / "_kernels", SOURCE / "lab", SOURCE / "surrogates")
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []
