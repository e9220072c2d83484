"""The pages of docs/: every block runs, every command is one, every name is documented, nothing is fetched."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image

from rankgrad.engine import zero_gradients
from rankgrad.lab import cli, recipes
from rankgrad.lab.retrieval import losses

import code_blocks
import lighter
import parts

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
PAGES = {name: text for name, text in PAGES.items() if not name.startswith("docs/figures/")}  # captions
BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)


@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if "```python" in text])
@pytest.mark.filterwarnings("error:rankgrad:UserWarning")
def test_python_blocks(name, request, monkeypatch):
    """The losses of a page have a gradient: there is no warning, checked in every call."""
    monkeypatch.setattr(zero_gradients, "is_due", lambda scores: True)
    if "runs/digits" in PAGES[name]:
        request.getfixturevalue("digits_run")
    ran, compared = code_blocks.run_python(PAGES[name], name)
    assert ran > 0 and compared > 0


def test_the_runner_can_fail():
    good = "```python\nprint(1)\n```\n\n```text\n1\n```\n"
    assert code_blocks.run_python(good, "a page") == (1, 1)
    for bad in (good.replace("text\n1", "text\n2"), good.replace("print(1)", "print(a)"), good[:24]):
        with pytest.raises((AssertionError, NameError)):
            code_blocks.run_python(bad, "a page")


@pytest.mark.parametrize("name", PAGES)
def test_blocks_are_found_and_readable(name):
    """A fence that is indented would not be run; a long line is cut off on the page."""
    fences = re.findall(r"^( *)```(\w*)", PAGES[name], re.MULTILINE)
    assert all(not indent for indent, _ in fences)
    assert {language for _, language in fences} <= {"", "python", "text", "bash", "console"}
    python = [
        line
        for language, code in code_blocks.blocks(PAGES[name])
        if language == "python"
        for line in code.split("\n")
    ]
    assert max(map(len, python), default=0) <= 88


# Commands

README = {"README.md": (ROOT / "README.md").read_text(), "headers of the recipes": parts.recipes("")}
COMMANDS = [(name, w) for name, text in (README | PAGES).items() for w in code_blocks.command_lines(text)]
#: Shown for their messages.
WRONG = [["train", "cub", "lrr=1e-5"], ["train", "cubb"]]


def check_command(words):
    """Parse a command line without running it; settings are checked as far as they can be without data."""
    command = typer.main.get_command(cli.build())
    word = ""
    while hasattr(command, "commands") and (not word or (words and not words[0].startswith("-"))):
        word, *words = words
        assert word in command.commands, word
        command = command.commands[word]
    given = command.make_context(word, list(words)).params
    if {"recipe", "settings"} <= set(given):
        _, config = recipes.load(given["recipe"], given["settings"] or [])
        if config.task == "retrieval":
            losses.build(config.loss, config.miner, classes=4, embedding=8)


def test_commands():
    assert len(COMMANDS) > 40 and all(wrong in [words for _, words in COMMANDS] for wrong in WRONG)
    for name, words in COMMANDS:
        if words not in WRONG:
            try:
                check_command(words)
            except Exception as error:
                pytest.fail(f"{name}: rankgrad {' '.join(words)}: {error}")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["trian", "cub"], "trian"),
        (["train", "cub", "--dta", "x"], "--dta"),
        (["train", "cub", "loss.lamb=1"], "lamb"),
        *((words, words[-1].partition("=")[0]) for words in WRONG),
    ],
)
def test_the_check_of_commands_can_fail(words, named):
    with pytest.raises(Exception, match=named):
        check_command(words)


def test_console_blocks(capsys):
    """What a console block shows is what the command says."""
    ran = 0
    for name, text in PAGES.items():
        for language, code in code_blocks.blocks(text):
            if language == "console":
                for command, shown in re.findall(r"^\$ rankgrad (.*)\n((?:(?!\$ ).*\n)*)", code, re.MULTILINE):
                    with pytest.raises(SystemExit) as stopped:
                        cli.main(command.split())
                    message = "" if stopped.value.code in (0, None) else f"{stopped.value.code}\n"
                    assert capsys.readouterr().out + message == shown, f"{name}: {command}"
                    ran += 1
    assert ran >= 2


@pytest.mark.parametrize("words", [["ls"], ["show", "cub"]])
def test_cheap_commands_run(words, capsys):
    assert any(w == words for _, w in COMMANDS)
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code in (0, None) and "recall" in capsys.readouterr().out


# Generated parts


def test_result_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "RESULTS", tmp_path)
    arguments = ("guide/x.md", "*-bench.md", "speed", "rankgrad bench")
    assert "Not measured yet" in parts.results(*arguments) and "rankgrad bench" in parts.results(*arguments)
    (tmp_path / "2026-01-01-bench.md").write_text("# A\n\n## Speed\n\n| a |\n|---|\n| old |\n")
    (tmp_path / "2026-02-01-bench.md").write_text(
        "# A\n\n| z |\n|---|\n\n## Speed, all\n\n| a |\n|---|\n| new |\n| 1.0 ± 0.2 |\n\n## B\n"
    )
    made = parts.results(*arguments)
    assert "| new |" in made and "old" not in made and "| z |" not in made
    assert "| 1.0\u00a0±\u00a00.2 |" in made  # a number and its deviation stay in one line
    assert "(../results/2026-02-01-bench.md)" in made
    assert "Not measured" in parts.results("x.md", "*-bench.md", "memory", "c")


def test_the_index_of_measurements_has_every_file():
    linked = set(re.findall(r"\((2[^)]+\.md)\)", (parts.RESULTS / "README.md").read_text()))
    assert linked == {path.name for path in parts.result_files()}


def test_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "FIGURES", tmp_path)
    assert "rankgrad figure gradients" in parts.figure("baselines.md", "gradients")
    (tmp_path / "gradients.png").write_bytes(b"x")
    (tmp_path / "gradients.md").write_text("What to\nsee.\n")
    assert "(../figures/gradients.png)" in parts.figure("train/x.md", "gradients")
    assert ">What to see.<" in parts.figure("train/x.md", "gradients")


def test_images_are_light(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (300, 2000, 3), dtype=np.uint8)
    drawn, folder = tmp_path / "drawn", tmp_path / "figures"
    drawn.mkdir()
    for name, svg in (("small", "<svg/>"), ("large", "<svg/>" * 10**6)):
        Image.fromarray(noise // 64 * 64).save(drawn / f"{name}.png")
        (drawn / f"{name}.svg").write_text(svg)
        (drawn / f"{name}.md").write_text(name)
    folder.mkdir()
    (folder / "small.png").write_bytes(b"an older form")
    lighter.collect(drawn, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["large.md", "large.png", "small.md", "small.svg"]
    with Image.open(folder / "large.png") as image:
        assert image.size == (1600, 240) and image.mode == "P"


def test_the_images_of_the_repository_are_few_and_light():
    sizes = [path.stat().st_size for path in (ROOT / "docs" / "figures").iterdir()]
    assert sum(sizes) < 1_500_000


def test_recipes_say_what_their_headers_say():
    page = parts.recipes("train/recipes.md")
    for name in recipes.recipe_names():
        text = recipes.recipe_text(name)
        part = page.split(f"## {name}\n")[1].split("\n## ")[0]
        target = getattr(recipes.load(name)[1], "target", None)
        assert f"rankgrad train {name}" in part
        assert target is None or f"{target}" in part.split("???")[0]
        for line in text.splitlines():
            assert line.lstrip("# ").strip() in part or line.startswith("#")
        words = re.sub(r"\W+", " ", " ".join(line for line in text.splitlines() if line.startswith("#")))
        assert set(words.split()) <= set(re.sub(r"\W+", " ", part).split())


def test_settings_are_all_there():
    from rankgrad.lab.retrieval.images.config import Config, Data

    page = parts.settings("x", "rankgrad.lab.retrieval.images.config")
    for name in Data.model_fields:
        assert f"| `data.{name}` |" in page
    assert "share of the classes to test on" in page and "| `optim.lr` | float | `1e-05` |" in page
    assert {"epochs", "seed", "proxy_lr"} <= set(Config.model_fields) and "| `proxy_lr` |" in page
    assert "`ram`, `device`, `none`" in page


def test_commands_are_all_there():
    page = parts.commands("x")
    command = typer.main.get_command(cli.build())
    many = 0
    for name, one in command.commands.items():
        assert f"## rankgrad {name}\n" in page
        for parameter in getattr(one, "params", ()):
            for flag in (o for o in parameter.opts if o.startswith("--") and o != "--help"):
                assert f"`{flag}" in page.split(f"## rankgrad {name}\n")[1]
                many += 1
    assert many > 10
    assert not re.search(r"\[x|required.*\| *`", page)  # how a help text says what is required


def test_formulas():
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed: pip install '.[docs]'")
    import formulas

    assert formulas.mathml(r"\mathrm{rank}(s)").count("<mi>rank</mi>") == 1
    with pytest.raises(ValueError, match="not understood"):
        formulas.mathml(r"\nosuchcommand x")
