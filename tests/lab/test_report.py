"""The report: what it says, and how it looks in a real browser."""

import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from rankgrad.lab.recipes import run
from rankgrad.lab.report import curves
from rankgrad.lab.retrieval.images.paper import TABLES

import images

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
#: Run in the page: what the browser made of it.
PROBE = """<script>addEventListener("load", () => {
  const all = (s) => [...document.querySelectorAll(s)];
  const colour = (s) => [...new Set(all(s).map((e) => getComputedStyle(e).borderTopColor))];
  document.body.setAttribute("data-facts", JSON.stringify({
    images: all("img").length,
    loaded: all("img").filter((i) => i.complete && i.naturalWidth > 0).length,
    right: colour(".right img"), wrong: colour(".wrong img"),
    right_many: all(".right img").length, wrong_many: all(".wrong img").length,
    overflow: document.documentElement.scrollWidth - innerWidth,
    cut: all(".row").filter((r) => r.scrollWidth > r.clientWidth).length,
    lines: all("polyline").map((l) => l.getBBox().width),
    headings: all("h2").map((h) => h.textContent),
    requests: performance.getEntriesByType("resource").filter((r) => !r.name.startsWith("data:")).length,
  }));
});</script>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    settings = [
        "backbone=tiny",
        "pooling=own",
        "weights=none",
        "precision=fp32",
        "embedding=8",
        "batch.size=6",
        "per_class=2",
    ]
    settings += ["view.resize=16", "view.crop=12", "lr=1e-3", "epochs=3", "device=cpu", "data.counts=any"]
    settings += [
        f"data.root={images.cub_set(folder / 'data')}",
        "loss.lam=3.75",
        "loss.memory=3",
        "target=64",
        "evaluate_first=true",
    ]
    out, (result,) = run.run("cub", settings, out=str(folder / "a <b> & c"))
    return out / "report.html", result, json.loads((out / "examples.json").read_text())


def test_one_file_that_needs_nothing_else(report):
    text = report[0].read_text()
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", text)
    assert len(links) > 50
    assert all(link.startswith("data:image/jpeg;base64,") for link in links)
    assert "<script" not in text and "@import" not in text and "url(" not in text


def test_it_is_well_formed(report):
    class Tags(HTMLParser):
        open, void = [], {"meta", "img"}

        def handle_starttag(self, tag, attrs):
            if tag not in self.void:
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    parser = Tags()
    parser.feed(report[0].read_text())
    assert parser.open == []
    assert "rankgrad: a &lt;b&gt; &amp; c" in report[0].read_text()


def test_what_it_says(report):
    path, result, _ = report
    text = path.read_text()
    for name, numbers in TABLES["cub"][1]:  # the paper's rows
        cells = "".join(f"<td>{'-' if n is None else n}</td>" for n in numbers)
        assert f"<td>{name}</td>{cells}" in text
    first = "".join(f"<td>{result.first[m]:.1f}</td>" for m in ("R@1", "R@2", "R@4", "R@8", "mAP@R"))
    assert f"<td>this run, before training</td>{first}" in text
    counts = "".join(f"<td>{n}</td>" for n in (15, 3, 15, 3))
    assert (
        f"<th>training classes</th><th>queries</th><th>test classes</th></tr></thead><tbody><tr>{counts}" in text
    )
    assert "spread of the embeddings of a batch" in text and ">102.Bird</figcaption>" in text
    for which, label in ((result.best, "best evaluation"), (result.last, "last epoch")):
        cells = "".join(f"<td>{which[m]:.1f}</td>" for m in ("R@1", "R@2", "R@4", "R@8", "mAP@R"))
        assert f"this run, {label} (epoch {which['epoch']:.0f})</td>{cells}" in text
    assert "memory of 3 batches is full from step 3" in text
    for said in ("loss.lam", "3.75", "items/s in training", "torch 2", "hardware", "about 64", "first relevant:"):
        assert said in text


def test_the_paper_s_tables():
    assert dict(TABLES["cub"][1])["RaMBO loglog 512 R50"] == [64.0, 75.3, 84.1, 90.6]
    assert dict(TABLES["sop"][1])["RaMBO log 512 R50"] == [77.8, 90.1, 95.9, 98.7]
    assert dict(TABLES["inshop"][1])["RaMBO log 512 R50"] == [88.1, 97.0, 97.9, 98.4, 98.8]
    for ks, rows in TABLES.values():
        assert all(len(numbers) == len(ks) for _, numbers in rows)
        for _, numbers in rows:
            known = [n for n in numbers if n is not None]
            assert known == sorted(known)


def test_examples_are_nearest_first_and_the_hardest_are_hard(report):
    _, _, examples = report
    for kind in ("examples", "hardest"):
        assert len(examples[kind]) == 8
        for example in examples[kind]:
            scores = [item["score"] for item in example["nearest"]]
            assert scores == sorted(scores, reverse=True) and len(scores) == 8
            assert all(item["right"] == (item["name"][:3] == example["name"][:3]) for item in example["nearest"])
            assert example["name"] not in [item["name"] for item in example["nearest"]]
            if example["rank"] <= 8:
                assert [item["right"] for item in example["nearest"]].index(True) + 1 == example["rank"]
    right = {kind: sum(i["right"] for e in examples[kind] for i in e["nearest"]) for kind in examples}
    assert right["hardest"] <= right["examples"]


def test_curves():
    assert curves.ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert curves.ticks(37, 98) == [40, 60, 80]
    assert curves.ticks(5, 5) == [5]
    assert curves.smoothed([(0, 1.0), (1, 3.0), (2, 5.0)], share=0.7) == [(0, 1.0), (1, 2.0), (2, 4.0)]
    assert "nothing yet" in curves.chart("a", {"x": []}, "step")
    for smooth in (False, True):  # a line of one point would not be seen
        assert "<circle" in (dot := curves.chart("a", {"x": [(1, 3.0)]}, "epoch", smooth=smooth))
        assert "<polyline" not in dot
    one = curves.chart("a < b", {"x": [(0, 1.0), (1, float("nan")), (2, 2.0)]}, "step")
    assert "a &lt; b" in one and "nan" not in one


def test_names_of_lines_that_end_together():
    """Eight metrics of a detector at 0: every name is inside the chart, none on another."""
    drawn = curves.chart("a", {f"m{i}": [(1, 5.0 - i), (2, 0.0)] for i in range(8)}, "epoch")
    heights = [float(y) for y in re.findall(r'y="([\d.]+)" style="fill', drawn)]
    assert len(heights) == 8 and max(heights) <= 280 - 30
    assert min(b - a for a, b in itertools.pairwise(sorted(heights))) >= 12


def test_names_of_lines_stand_in_the_order_of_their_ends():
    """Lines that end close together: each name moves a little, none jumps below the others."""
    ends = {"R@1": 80.0, "R@2": 88.0, "R@4": 93.5, "R@8": 96.0, "mAP@R": 47.0, "AP": 60.0}
    drawn = curves.chart("a", {name: [(0, 50.0), (1, end)] for name, end in ends.items()}, "epoch")
    heights = {name: float(y) for y, name in re.findall(r'y="([\d.]+)" style="fill:[^"]+">([^<]+)<', drawn)}
    assert sorted(heights, key=heights.get) == sorted(ends, key=ends.get, reverse=True)
    assert curves.apart([50.0, 51.0, 49.0, 98.0, 99.0], 10, 0, 100) == [50.0, 60.0, 40.0, 90.0, 100.0]
    assert curves.apart([], 10, 0, 100) == []


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (apt-get install chromium)")
def test_in_a_browser(report, tmp_path):
    path, _, examples = report
    page = tmp_path / "page.html"
    page.write_text(path.read_text().replace("</body>", PROBE + "</body>"))
    base = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    base += ["--hide-scrollbars", "--window-size=1100,3400"]
    shot = tmp_path / "shot.png"
    dom = subprocess.run(
        [*base, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r'data-facts="([^"]*)"', dom.stdout)
    facts = json.loads(found.group(1).replace("&quot;", '"'))
    marks = [item["right"] for kind in examples.values() for example in kind for item in example["nearest"]]
    assert facts["images"] == facts["loaded"] == len(marks) + 16
    assert (facts["right_many"], facts["wrong_many"]) == (sum(marks), len(marks) - sum(marks))
    assert facts["right"] == ["rgb(26, 152, 80)"] and facts["wrong"] == ["rgb(215, 48, 39)"]
    assert facts["overflow"] <= 0 and facts["cut"] == 0 and facts["requests"] == 0
    assert len(facts["lines"]) >= 8 and min(facts["lines"]) > 200
    assert facts["headings"] == [
        "Result, %",
        "Curves",
        "Data and embeddings",
        "Retrieval examples",
        "The hardest queries",
        "Machine and time",
        "Settings",
    ]
    subprocess.run([*base, f"--screenshot={shot}", page.as_uri()], capture_output=True, timeout=120, check=True)
    with Image.open(shot) as file:
        pixels = np.array(file.convert("RGB"))
    for colour in ((26, 152, 80), (215, 48, 39), (33, 102, 172)):  # right, wrong, the first curve
        assert (pixels == colour).all(-1).sum() > 300
