"""The built site: no warning, every link leads somewhere, every name is documented, and a browser agrees."""

import functools
import http.server
import importlib.util
import inspect
import json
import pkgutil
import re
import shutil
import subprocess
import sys
import threading
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import rankgrad

import parts

ROOT = Path(__file__).parent.parent
PAGES = [str(path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs").rglob("*.md"))]
BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)


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
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, str(ROOT / "docs/machinery/build.py"), str(folder)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0 and "Warning" not in built.stdout, built.stdout + built.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site):
    return {str(p.relative_to(site)): Page(p.read_text()) for p in site.rglob("*.html") if p.name != "404.html"}


def test_every_page_is_there(pages):
    for name in PAGES:
        assert (name.replace(".md", ".html") in pages) == (
            not name.startswith("figures/")
        )  # captions are no pages
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
        "baselines.html",
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


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (apt-get install chromium)")
def test_messages_of_the_search_are_copies_in_pages_from_a_folder(tmp_path):
    """As a Worker gets a copy: with objects shared, every key emptied the search box."""
    shutil.copy(ROOT / "docs/assets/worker.js", tmp_path)
    (tmp_path / "empties.js").write_text("""
        addEventListener("message", ({ data }) => { postMessage({ got: data.query }); data.query = ""; });
    """)
    (tmp_path / "page.html").write_text("""<!doctype html><body><script src="worker.js"></script><script>
        const worker = new Worker("empties.js"), sent = { query: "margin" };
        worker.onmessage = ({ data }) => setTimeout(() => { document.title = `${data.got} ${sent.query}`; });
        worker.postMessage(sent);
    </script>""")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=5000", "--dump-dom", (tmp_path / "page.html").as_uri()]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "<title>margin margin</title>" in out.stdout
