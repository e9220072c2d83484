"""The pages of docs/: every block runs, every command is one, every name is documented, nothing is fetched."""

import functools
import http.server
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import threading
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image

import rankgrad
from rankgrad import cli, recipes
from rankgrad.retrieval import losses

import code_blocks
from docs.machinery import parts, pictures

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
PAGES = {name: text for name, text in PAGES.items() if not name.startswith("docs/figures/")}  # captions
BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)


@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if "```python" in text])
def test_python_blocks(name):
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
    if word == "train":
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
    assert ("README.md", ["ls"]) in COMMANDS and any(w == ["show", "cub"] for _, w in COMMANDS)
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
        "# A\n\n| z |\n|---|\n\n## Speed, all\n\n| a |\n|---|\n| new |\n\n## B\n"
    )
    made = parts.results(*arguments)
    assert "| new |" in made and "old" not in made and "| z |" not in made
    assert "(../results/2026-02-01-bench.md)" in made
    assert "Not measured" in parts.results("x.md", "*-bench.md", "memory", "c")


def test_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "FIGURES", tmp_path)
    assert "rankgrad figure gradients" in parts.figure("rivals.md", "gradients")
    (tmp_path / "gradients.png").write_bytes(b"x")
    (tmp_path / "gradients.md").write_text("What to\nsee.\n")
    assert "(../figures/gradients.png)" in parts.figure("train/x.md", "gradients")
    assert ">What to see.<" in parts.figure("train/x.md", "gradients")


def test_pictures_are_light(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (300, 2000, 3), dtype=np.uint8)
    drawn, folder = tmp_path / "drawn", tmp_path / "figures"
    drawn.mkdir()
    for name, svg in (("small", "<svg/>"), ("large", "<svg/>" * 10**6)):
        Image.fromarray(noise // 64 * 64).save(drawn / f"{name}.png")
        (drawn / f"{name}.svg").write_text(svg)
        (drawn / f"{name}.md").write_text(name)
    folder.mkdir()
    (folder / "small.png").write_bytes(b"an older form")
    pictures.collect(drawn, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["large.md", "large.png", "small.md", "small.svg"]
    with Image.open(folder / "large.png") as picture:
        assert picture.size == (1600, 240) and picture.mode == "P"


def test_the_pictures_of_the_repository_are_few_and_light():
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
    from rankgrad.retrieval.config import Config, Data

    page = parts.settings("x", "rankgrad.retrieval.config")
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


def test_formulas():
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed: pip install '.[docs]'")
    from docs.machinery import formulas

    assert formulas.mathml(r"\mathrm{rank}(s)").count("<mi>rank</mi>") == 1
    with pytest.raises(ValueError, match="not understood"):
        formulas.mathml(r"\nosuchcommand x")


# The site


class Page(HTMLParser):
    """Links, things the browser would load, anchors and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.ids, self.text, self.quiet = [], [], set(), [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids.add(given.get("id"))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe") and given.get("src"):
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loads.append(given["href"])
        self.quiet += tag in ("script", "style", "pre", "code")

    def handle_endtag(self, tag):
        self.quiet -= tag in ("script", "style", "pre", "code")

    def handle_data(self, data):
        if not self.quiet:
            self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("docs") / "site"
    environment = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]),
    }
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {str(p.relative_to(site)): Page(p.read_text()) for p in site.rglob("*.html") if p.name != "404.html"}


def test_every_page_is_there(pages):
    for name in PAGES:
        assert name.removeprefix("docs/").replace(".md", ".html") in pages
    assert all(f"results/{path.stem}.html" in pages for path in parts.result_files())


def test_links(site, pages):
    internal = 0
    for name, page in pages.items():
        for link in page.links + page.loads:
            target, _, anchor = link.partition("#")
            if re.match(r"\w+:", target):
                continue
            path = ((site / name).parent / target).resolve() if target else site / name
            assert path.exists(), f"{name}: {link}"
            key = str(path.relative_to(site.resolve())) if target else name
            if anchor and key in pages:
                assert anchor in pages[key].ids, f"{name}: {link}"
            internal += 1
    assert internal > 500


def test_nothing_is_fetched_from_elsewhere(site, pages):
    for name, page in pages.items():
        assert not [load for load in page.loads if re.match(r"(\w+:)?//", load)], name
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", styles)


def test_docstrings_became_pages(pages):
    for name, page in pages.items():
        text = "".join(page.text)
        assert not re.search(r":(func|class|meth|math|mod|data):|\.\. math::|<!-- include|\$\$", text), name


def documented(site, pages):
    """Names the site's inventory knows, each with a place that exists."""
    content = (site / "objects.inv").read_bytes()
    listed = zlib.decompress(content.split(b"zlib.\n", 1)[1]).decode()
    found = set()
    for name, place in re.findall(r"^(\S+) \S+ \S+ (\S+) -$", listed, re.MULTILINE):
        page, _, anchor = place.replace("$", name).partition("#")
        assert anchor in pages[page].ids, name
        found.add(name)
    return found


def test_every_public_name_is_documented(site, pages):
    known = documented(site, pages)
    rooms = [m.name for m in pkgutil.walk_packages(rankgrad.__path__, "rankgrad.") if "_kernels" not in m.name]
    public = {"rankgrad": rankgrad, **{name: importlib.import_module(name) for name in rooms}}
    names = {f"{room}.{name}" for room, module in public.items() for name in getattr(module, "__all__", ())}
    names |= {
        f"rankgrad.metrics.{name}"
        for name, value in vars(rankgrad.metrics).items()
        if inspect.isfunction(value) and name[0] != "_" and "reduction" in inspect.signature(value).parameters
    }
    assert len(names) > 40 and "rankgrad.nothing" not in known
    assert names - set(public) <= known


PROBE = """<!doctype html><link rel="icon" href="data:,"><body><script>
const told = [];
addEventListener("load", () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement;
    told.push({
      page: frame.dataset.page, width: frame.clientWidth, overflow: root.scrollWidth - frame.clientWidth,
      height: root.scrollHeight, title: page.querySelector("h1")?.textContent,
      broken: [...page.images].filter((i) => i.loading != "lazy" && !(i.complete && i.naturalWidth)).length,
      formulas: [...page.querySelectorAll("math")].map((m) => m.getBoundingClientRect().width),
      script: page.documentElement.classList.contains("js"),
    });
  }
  document.body.setAttribute("data-facts", JSON.stringify(told));
});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (apt-get install chromium)")
def test_in_a_browser(site, tmp_path):
    """Home and others at the width of a desk and of a telephone: no error, no sideways scrolling."""
    looked_at = [
        "index.html",
        "guide/losses.html",
        "train/recipes.html",
        "speed.html",
        "rivals.html",
        "api/ranking.html",
    ]
    frames = [
        f'<iframe src="{p}" data-page="{p}" width="{w}" height="900"></iframe>'
        for p in looked_at
        for w in (1300, 390)
    ]
    (site / "probe.html").write_text(PROBE + "".join(frames))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        missing = []  # noqa: RUF012

        def log_message(self, *arguments):
            pass

        def send_error(self, code, *rest):
            self.missing.append(self.path)
            super().send_error(code, *rest)

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        out = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
             "--enable-logging=stderr", "--dump-dom", f"http://127.0.0.1:{server.server_port}/probe.html"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        server.shutdown()
    (site / "probe.html").unlink()
    facts = json.loads(re.search(r'data-facts="([^"]*)"', out.stdout).group(1).replace("&quot;", '"'))
    assert len(facts) == len(frames)
    for fact in facts:
        assert fact["overflow"] <= 0 and fact["broken"] == 0 and fact["height"] > 900, fact
        assert fact["title"] and fact["script"] and all(width > 3 for width in fact["formulas"]), fact
    assert sum(len(fact["formulas"]) for fact in facts) > 20
    assert not Quiet.missing
    assert not re.findall(r"CONSOLE.*", out.stderr)
