"""The report of a detector: what it says and draws, alone and beside another run, and how a browser shows it."""

import json
import re
import shutil
import subprocess

import pytest
import torch

from rankgrad.detection.data import Objects
from rankgrad.detection.evaluate import evaluate
from rankgrad.detection.paper import TABLE
from rankgrad.detection.report import _picture, bars, sections, write_examples
from rankgrad.recipes import load, run
from test_detection_training import SMALL

import scenes

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
PROBE = """<script>addEventListener("load", () => {
  const all = (s) => [...document.querySelectorAll(s)];
  document.body.setAttribute("data-facts", JSON.stringify({
    pictures: all("image").length,
    shown: all("image").filter((i) => i.getBBox().width > 100).length,
    boxes: all(".scene rect").length, bars: all("rect.bar").length,
    overflow: document.documentElement.scrollWidth - innerWidth,
    outside: all(".charts svg text").filter((t) => t.getBBox().x + t.getBBox().width > 456).length,
    requests: performance.getEntriesByType("resource").filter((r) => !r.name.startsWith("data:")).length,
  }));
});</script>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("report")
    root = scenes.voc_set(folder / "data", train=16, test=6)
    settings = [*SMALL, f"data.root={root}", "epochs=4", "milestones=[3]", "lr=0.02"]
    plain = [s for s in settings if not s.startswith("loss")]
    ce, _ = run.run("voc", [*plain, "loss=cross_entropy"], out=str(folder / "runs" / "ce <1>"))
    out, (result,) = run.run("voc", settings, out=str(folder / "runs" / "ranking"))
    run.write_report(out, [ce])
    return out, ce, result


def test_what_it_says(report):
    out, _, result = report
    text = (out / "report.html").read_text()
    for scores in ("softmax", "odds"):
        cells = "".join(f"<td>{result.last[f'{m} {scores}']:.1f}</td>" for m in ("AP50", "AP50-11", "AP"))
        assert f"this run, last epoch (epoch 4)</td><td>{scores}</td>{cells}" in text
    assert "ce &lt;1&gt;, last epoch" in text and "ce <1>" not in text
    for said in (
        "Average precision by class, %",
        "Gradients at the classifier",
        "The surest mistakes",
        "hardware",
    ):
        assert said in text
    assert ">ranking</text>" in text and ">ce &lt;1&gt;</text>" in text  # the bars' names
    assert "<script" not in text
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", text)
    assert links and all(link.startswith("data:image/jpeg;base64,") for link in links)


def test_detections_are_drawn_right(tmp_path):
    """One picture with a right, a wrong, a doubled and a missed box, and one on a difficult object."""
    objects = Objects(
        torch.tensor([[0.0, 0, 20, 20], [40, 0, 60, 20], [0, 40, 20, 60], [40, 40, 60, 60]]),
        torch.tensor([1, 1, 2, 1]),
        torch.tensor([False, False, False, True]),
    )
    boxes = torch.tensor([[0.0, 0, 20, 20], [1, 1, 20, 20], [0, 40, 20, 60], [40, 40, 60, 60], [70, 70, 79, 79]])
    found = {
        "boxes": boxes,
        "labels": torch.tensor([1, 1, 1, 1, 2]),
        "scores": torch.tensor([0.9, 0.8, 0.7, 0.95, 0.1]),
    }
    stand = evaluate([found], [objects], 2)
    assert stand.outcomes[0].tolist() == [1, 0, 0, -1, 0]
    assert stand.threshold == pytest.approx(0.9)  # the best F1 keeps the right one alone

    class Source:
        class scenes:  # noqa: N801
            names = ("one",)

        def picture(self, row):
            return torch.zeros(80, 80, 3, dtype=torch.uint8)

    source = Source()
    source.scenes.objects = [objects]
    write_examples(tmp_path, source, ("cat", "dog"), "odds", {"odds": [found]}, {"odds": stand})
    (scene,) = json.loads((tmp_path / "detections.json").read_text())["examples"]
    kinds = sorted((box["kind"], box["name"]) for box in scene["boxes"])
    assert kinds == [("missed", "cat"), ("missed", "dog"), ("neither", "cat"), ("right", "cat")]
    right = next(box for box in scene["boxes"] if box["kind"] == "right")
    assert right["box"] == [0.0, 0.0, 80.0, 80.0]  # shown at 320 pixels
    table = json.loads((tmp_path / "classes.json").read_text())["odds"]
    assert table["AP50"] == {"cat": 50.0, "dog": 0.0}


def test_a_strip_is_drawn():
    class Source:
        def picture(self, row):
            return torch.zeros(1, 2000, 3, dtype=torch.uint8)

    _, scale, width, height = _picture(Source(), 0)
    assert (width, height) == (320, 1) and scale == pytest.approx(0.16)


def test_the_papers_rows():
    _, config = load("voc07", [])
    assert TABLE["voc07", "resnet50"] == (74.2, 75.7)
    text = sections(__import__("pathlib").Path("nowhere"), config)[0][1]
    assert "<td>paper, cross entropy</td><td></td><td>74.2</td>" in text
    assert "<td>paper, RaMBO</td><td></td><td>75.7</td>" in text


def test_bars_of_classes_without_objects():
    drawn = bars({"a & b": {"cat": 50.0, "dog": None}, "c": {"cat": 25.0, "dog": None}}, "AP")
    assert drawn.count('class="bar"') == 2
    assert "a &amp; b" in drawn and "- / -" in drawn


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (apt-get install chromium)")
def test_in_a_browser(report, tmp_path):
    out, _, _ = report
    page = tmp_path / "page.html"
    page.write_text((out / "report.html").read_text().replace("</body>", PROBE + "</body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--hide-scrollbars", "--window-size=1100,3400", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    facts = json.loads(re.search(r'data-facts="([^"]*)"', dom.stdout).group(1).replace("&quot;", '"'))
    seen = json.loads((out / "detections.json").read_text())
    assert facts["pictures"] == facts["shown"] >= len(seen["examples"]) + len(seen["hardest"])
    assert facts["boxes"] > 3 and facts["bars"] == 2 * 2 * len(scenes.NAMES)
    assert facts["overflow"] <= 0 and facts["outside"] == 0 and facts["requests"] == 0
