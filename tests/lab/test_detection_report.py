"""The report of a detector: what it says and draws, alone and beside another run, and how a browser shows it."""

import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from rankgrad.lab.detection.evaluate import evaluate
from rankgrad.lab.detection.paper import TABLE
from rankgrad.lab.detection.report import _image, _shown_from, bars, sections, write_examples
from rankgrad.lab.detection.scenes import Objects
from rankgrad.lab.recipes import load, run

import scenes
from scenes import SMALL

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
PROBE = """<script>addEventListener("load", () => {
  const all = (s) => [...document.querySelectorAll(s)];
  document.body.setAttribute("data-facts", JSON.stringify({
    images: all("image").length,
    shown: all("image").filter((i) => i.getBBox().width > 100).length,
    boxes: all(".scene rect").length, bars: all(".bar").filter((b) => b.getBoundingClientRect().height > 0).length,
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
    out, ce, result = report
    text = (out / "report.html").read_text()
    for scores in ("softmax", "odds"):
        cells = "".join(f"<td>{result.last[f'{m} {scores}']:.1f}</td>" for m in ("AP50", "AP50-11", "AP", "AP75"))
        assert f"this run, last epoch (epoch 4)</td><td>{scores}</td>{cells}" in text
    assert "ce &lt;1&gt;, last epoch" in text and "ce <1>" not in text
    for said in (
        "Average precision by class, %",
        "Gradients at the classifier",
        "The most confident mistakes",
        "hardware",
    ):
        assert said in text
    assert "</i>ranking" in text and "</i>ce &lt;1&gt;" in text  # the names of the bars
    for folder, name in ((out, "ranking"), (ce, "ce &lt;1&gt;")):  # each drawn from a score of its own
        own = json.loads((folder / "detections.json").read_text())["threshold"]
        assert f"{name}: Detections with a score (softmax) of at least {own:.2g}, " in text
    assert "<script" not in text
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", text)
    assert links and all(link.startswith("data:image/jpeg;base64,") for link in links)


def grey_images(objects):
    """A source of images, 80 x 80."""
    names = [str(row) for row in range(len(objects))]
    return SimpleNamespace(
        scenes=SimpleNamespace(names=names, objects=objects),
        image=lambda row: torch.zeros(80, 80, 3, dtype=torch.uint8),
    )


@pytest.mark.parametrize("many", [0, 3])
def test_nothing_is_right(tmp_path, many):
    """The most confident mistakes are drawn, and the report says why these."""
    objects = [Objects(torch.tensor([[0.0, 0, 20, 20]]), torch.tensor([1]), torch.tensor([False]))] * 2
    first = {
        "boxes": torch.tensor([[40.0, 40, 60, 60]]).repeat(many, 1),
        "labels": torch.ones(many, dtype=torch.int64),
        "scores": torch.tensor([0.4, 0.3, 0.2])[:many],
    }
    found = [first, {name: value[:0] for name, value in first.items()}]
    stand = evaluate(found, objects, 1)
    write_examples(tmp_path, grey_images(objects), ("cat",), "odds", {"odds": found}, {"odds": stand})
    seen = json.loads((tmp_path / "detections.json").read_text())
    drawn = [[(box["kind"], box.get("score")) for box in scene["boxes"]] for scene in seen["examples"]]
    if many:
        assert drawn == [[("wrong", 0.4), ("wrong", 0.3), ("missed", None)], [("missed", None)]]
        assert [scene["name"] for scene in seen["hardest"]] == ["0"]  # not the image without a mistake
        assert _shown_from(seen).endswith("of at least 0.3, the most confident: none is right.")
    else:
        assert drawn == [[("missed", None)]] * 2 and seen["hardest"] == []


def test_detections_are_drawn_right(tmp_path):
    """One image with a right, a wrong, a doubled and a missed box, and one on a difficult object."""
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
    source = grey_images([objects])
    write_examples(tmp_path, source, ("cat", "dog"), "odds", {"odds": [found]}, {"odds": stand})
    seen = json.loads((tmp_path / "detections.json").read_text())
    (scene,) = seen["examples"]
    assert seen["hardest"] == []  # its mistakes are not among what is shown
    kinds = sorted((box["kind"], box["name"]) for box in scene["boxes"])
    assert kinds == [("missed", "cat"), ("missed", "dog"), ("neither", "cat"), ("right", "cat")]
    right = next(box for box in scene["boxes"] if box["kind"] == "right")
    assert right["box"] == [0.0, 0.0, 80.0, 80.0]  # shown at 320 pixels
    table = json.loads((tmp_path / "classes.json").read_text())["odds"]
    assert table["AP50"] == {"cat": 50.0, "dog": 0.0}


def test_a_strip_is_drawn():
    class Source:
        def image(self, row):
            return torch.zeros(1, 2000, 3, dtype=torch.uint8)

    _, scale, width, height = _image(Source(), 0)
    assert (width, height) == (320, 1) and scale == pytest.approx(0.16)


def test_the_papers_rows():
    _, config = load("voc07", [])
    assert TABLE["voc07", "resnet50"] == (74.2, 75.7)
    text = sections(__import__("pathlib").Path("nowhere"), config)[0][1]
    assert "<td>paper, cross entropy</td><td></td><td>74.2</td>" in text
    assert "<td>paper, RaMBO</td><td></td><td>75.7</td>" in text


def test_bars_of_all_classes():
    name = "construction_worker_without_helmet"
    drawn = bars({"beside": {"cat": 50.0, "dog": 20.0}, "own": {name: 25.0, "cat": 40.0}}, "AP")
    assert drawn.count('class="bar"') == 4
    assert re.findall("<tr><td>([^<]*)<", drawn) == [name, "cat", "dog"]
    assert re.findall("width:([^%]*)%", drawn) == ["25.0", "50.0", "40.0", "20.0"]
    assert "<td>50.0 / 40.0</td>" in drawn and "<td>- / 25.0</td>" in drawn


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
    assert facts["images"] == facts["shown"] >= len(seen["examples"]) + len(seen["hardest"])
    assert facts["boxes"] > 3 and facts["bars"] == 2 * 2 * len(scenes.NAMES)
    assert facts["overflow"] <= 0 and facts["outside"] == 0 and facts["requests"] == 0
