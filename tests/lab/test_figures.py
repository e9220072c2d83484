"""The figures: what they compute, and that they are drawn as they say."""

import base64
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import rankgrad
from rankgrad.lab.figures import (
    batch_bias,
    catalogue,
    cold_start,
    gradients,
    margin,
    retrieval_examples,
    sorters,
    style,
)
from rankgrad.lab.figures.drawing import Drawing
from rankgrad.lab.report.curves import apart
from rankgrad.lab.training.errors import UserError
from rankgrad.surrogates import sodeep

from drawings import assert_looks_like, assert_texts_apart, pixels, quiet, size, use_untrained_sorter
from runs import cli

# ---------------------------------------------------------------------------------------------- gradients


def test_ours_push_exactly_what_is_within_reach():
    scores, relevance = gradients.the_list()
    ranks = 1.0 + relevance.nonzero().flatten()
    own = torch.arange(1.0, 5.0)
    for weight, slope in (("ap", own / ranks**2), ("log", 1 / ranks)):
        move = gradients.push(
            lambda s, r, log=weight == "log": rankgrad.average_precision_loss(s, r, lam=gradients.LAM, log=log),
            scores,
            relevance,
        )
        reach = gradients.LAM * 20 * slope / 4
        start = scores[relevance]
        passed = [bool(((start < s) & (s < start + reach)).any()) for s in scores.tolist()]
        assert [bool(m) for m in (move != 0)[~relevance]] == [
            p for p, r in zip(passed, relevance, strict=True) if not r
        ]
        assert (move[relevance] > 0).all() and (move[~relevance] <= 0).all()


def test_every_row_has_a_push_of_one_and_words(monkeypatch):
    use_untrained_sorter(monkeypatch)
    scores, relevance = gradients.the_list()
    table = gradients.rows()
    assert len(table) == 10
    for row in table:
        move = gradients.push(row.loss, scores, relevance)
        assert move.abs().max() == 1 and row.words and row.setting
    assert not gradients.push(lambda s, r: 0 * s.sum(), scores, relevance).any()


def test_the_reach_is_the_step_of_algorithm_1():
    """Moving one relevant score to the end of its bar changes the rank by as many as it passes there."""
    figure = style.sheet(2, 2)
    axes = figure.subplots()
    scores, relevance = gradients.the_list()
    gradients._bars(axes, scores, relevance, lambda own, rank: 1 / rank)
    widths = [bar.get_width() for bar in axes.patches]
    ranks = [1 + i for i, r in enumerate(relevance.tolist()) if r]
    assert widths == pytest.approx([gradients.LAM * 20 / 4 / rank for rank in ranks])


def test_the_gradients_are_drawn(monkeypatch):
    use_untrained_sorter(monkeypatch)
    (drawing,) = gradients.draw(quiet()[0])
    assert pixels(drawing.figure).shape == size(drawing.figure)
    assert_texts_apart(drawing.figure)
    assert_looks_like(drawing.figure, "gradients")


# --------------------------------------------------------------------------------------------- batch-bias


def test_batch_bias_is_drawn(monkeypatch, tmp_path):
    monkeypatch.setattr(batch_bias, "drawn", lambda size: 5)
    (drawing,) = batch_bias.draw(quiet()[0])
    assert_texts_apart(drawing.figure)
    axes = drawing.figure.axes[0]
    lines = {line.get_label(): line.get_xdata() for line in axes.lines}
    assert max(lines["no memory"]) == 512 and max(lines["memory of 7 batches"]) == 128  # of 1,797 items
    assert "1,797" in drawing.caption and "digits" in drawing.caption


def test_batches_are_optimistic_and_memory_helps():
    embeddings, labels, _ = batch_bias._embeddings(quiet()[0])
    truth = batch_bias.whole(embeddings, labels)
    alone, helped = (batch_bias.estimates(embeddings, labels, 16, memory).mean() for memory in (0, 7))
    assert alone > truth + 0.05
    assert abs(helped - truth) < 0.5 * (alone - truth)


def test_estimates_by_hand():
    labels = torch.tensor([0, 0, 1, 1, 1])
    embeddings = torch.tensor([[1, 0], [0.9, 0.1], [0.7, 0.7], [0.1, 0.9], [1, 0.05]])
    rows = torch.arange(5)
    pairs = rankgrad.retrieval_pairs(embeddings, labels)
    expected = rankgrad.metrics.average_precision(*pairs[:2], mask=pairs.mask)
    assert batch_bias.whole(embeddings, labels) == pytest.approx(float(expected))
    found = batch_bias._average_precisions(embeddings, labels, rows[:1], torch.tensor([0, 2]))
    assert found.tolist() == [-1]  # nothing relevant there
    assert batch_bias._mean_ap(embeddings, labels, rows[:1], torch.tensor([0, 2])).isnan()
    # query 0 against 4 (cosine 0.999, wrong) and 1 (0.994, right), itself left out
    assert batch_bias._average_precisions(embeddings, labels, rows[:1], torch.tensor([4, 1, 0])).tolist() == [0.5]


def test_embeddings_of_a_file(tmp_path):
    path = tmp_path / "e.npz"
    np.savez(path, embeddings=np.eye(3), names=np.array(["x/cat/1.png", "x/dog/2.png", "y/cat/3.png"]))
    embeddings, labels, name = batch_bias._embeddings(quiet(embeddings=path)[0])
    assert labels.tolist() == [0, 1, 0] and embeddings.dtype == torch.float32 and name == "e.npz"
    np.savez(path, embeddings=np.eye(3), labels=np.array([7, 7, 9]))
    assert batch_bias._embeddings(quiet(embeddings=path)[0])[1].tolist() == [0, 0, 1]
    np.savez(path, vectors=np.eye(3))
    with pytest.raises(UserError, match="expected `embeddings` and `labels`"):
        batch_bias.draw(quiet(embeddings=path)[0])
    with pytest.raises(UserError, match="no such file"):
        batch_bias.draw(quiet(embeddings=tmp_path / "nothing")[0])


def test_embeddings_of_a_run(digits_run):
    embeddings, labels, name = batch_bias._embeddings(quiet(run=Path("runs/digits"))[0])
    assert embeddings.shape == (len(labels), 16) and name == "the test images of the run 'digits'"


# ------------------------------------------------------------------------------------------------- margin


def test_without_a_margin_scores_run_together():
    before, without = margin.train(0.0, steps=(0, 60))
    start, with_one = margin.train(margin.MARGIN, steps=(0, 60))
    assert torch.equal(before.relevant, start.relevant)
    assert without.irrelevant.std() < 0.5 * before.irrelevant.std() < 0.5 * with_one.irrelevant.std()
    assert without.rounded < without.precision - 0.05 and with_one.rounded > with_one.precision - 0.02


def test_the_margin_is_drawn(monkeypatch):
    real = margin.train
    monkeypatch.setattr(margin, "train", lambda alpha: real(alpha, steps=(0, 1, 2, 3)))
    (drawing,) = margin.draw(quiet()[0])
    assert_texts_apart(drawing.figure)
    assert "margin of 0.1" in drawing.caption


# --------------------------------------------------------------------------------------- retrieval-examples


def test_examples_of_a_run(tmp_path):
    def image(level):
        file = io.BytesIO()
        Image.new("RGB", (96, 120), (level, level, level)).save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    nearest = [
        {"name": "n", "class": "c", "image": image(200), "score": 0.5, "right": k % 2 == 0} for k in range(3)
    ]
    query = {"name": "q", "class": "c", "image": image(40), "rank": 1, "nearest": nearest}
    (tmp_path / "examples.json").write_text(json.dumps({"examples": [query, query], "hardest": [query]}))
    (drawing,) = retrieval_examples.draw(quiet(run=tmp_path)[0])
    axes = drawing.figure.axes
    assert len(axes) == 3 * (1 + retrieval_examples._NEAREST)
    assert [a.get_xlabel() for a in axes[:4]] == ["first relevant: 1", "\u2713 0.50", "\u2717 0.50", "\u2713 0.50"]
    frames = [a.spines["left"].get_edgecolor()[:3] for a in axes[1:3]]
    assert frames[0] != frames[1]
    assert not axes[5].axison  # no fourth neighbour
    assert tmp_path.name in drawing.caption
    with pytest.raises(UserError, match=r"--run: no examples\.json"):
        retrieval_examples.draw(quiet(run=tmp_path / "nothing")[0])


# --------------------------------------------------------------------------------------------- cold-start


def test_the_cold_start_is_drawn(monkeypatch):
    """That AP makes no progress and its log form starts is tested in test_cold_start.py."""
    real = cold_start.cold_start
    small = {"items": 256, "classes": 4}
    monkeypatch.setattr(cold_start, "cold_start", lambda names, steps: real(names, steps=10, **small))
    (drawing,) = cold_start.draw(quiet()[0])
    assert_texts_apart(drawing.figure)
    assert len(drawing.figure.axes[0].lines) == len(cold_start.LOOKS)


# -------------------------------------------------------------------------------------------------- style


@pytest.mark.parametrize("wanted", [[0.5, 0.5, 0.5], [0.0, 0.01, 1.0, 0.99], [0.2], [], [0.3, 0.1, 0.9, 0.12]])
def test_labels_stand_apart(wanted):
    placed = apart(wanted, 0.1, 0.0, 1.0)
    assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(sorted(placed)))
    assert all(-1e-9 <= p <= 1 + 1e-9 for p in placed)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    assert [placed[i] for i in order] == sorted(placed)
    for want, place in zip(wanted, placed, strict=True):
        if all(abs(want - other) >= 0.2 for other in wanted if other != want) and wanted.count(want) == 1:
            assert place == pytest.approx(want)


def small_drawing():
    with style.applied():
        figure = style.sheet(2, 1.5)
        figure.subplots().plot([0, 1], [0, 1])
    return Drawing("one", figure, "What to see.\n")


def test_files_are_the_same_each_time(tmp_path):
    first, second = (small_drawing().save(tmp_path / name) for name in "ab")
    assert [path.name for path in first] == ["one.png", "one.svg", "one.md"]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))
    assert Image.open(first[0]).size == (2 * style.DPI, 1.5 * style.DPI)
    assert first[2].read_text() == "What to see.\n"


def test_the_style_leaves_the_users_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    small_drawing()
    assert dict(matplotlib.rcParams) == before


# ------------------------------------------------------------------------------------------------ command


def test_every_figure_has_a_module_and_a_caption():
    import importlib

    for name in catalogue.FIGURES:
        module = importlib.import_module(f"rankgrad.lab.figures.{name.replace('-', '_')}")
        assert callable(module.draw)
        assert len(module.CAPTION) > 200


def test_the_command(tmp_path, monkeypatch, capsys):
    def make(name, inputs):
        if name == "ablations":
            raise UserError("--results: nothing here")
        return [small_drawing()] if name == "margin" else []

    monkeypatch.setattr(catalogue, "make", make)
    assert cli("figure", "margin", "--out", tmp_path) == 0
    out = capsys.readouterr().out
    assert "one.png" in out and "What to see." in out
    assert {path.name for path in tmp_path.iterdir()} == {"one.png", "one.svg", "one.md"}
    assert cli("figure", "ablations") == "rankgrad: --results: nothing here"
    assert cli("figure", "all", "--out", tmp_path / "all") == 0
    assert "ablations: left out, --results: nothing here" in capsys.readouterr().err
    assert cli("figure", "ls") == 0
    assert all(name in capsys.readouterr().out for name in ["landscape"])


def test_names_are_checked():
    assert cli("figure", "landscap") == "rankgrad: NAME: unknown value 'landscap', did you mean 'landscape'?"
    assert "there are" in cli("figure", "xyz")


def test_without_matplotlib_the_extra_is_named():
    code = (
        "import sys; sys.modules['matplotlib'] = None; from rankgrad.lab import cli; cli.main(['figure', 'all'])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stderr == "rankgrad: matplotlib is not installed: pip install matplotlib (or the extra figures)\n"


def test_the_sorter_of_the_package_sorts():
    """It is SoDeep's network for 20 items, trained: closer to the ranks than any constant, in milliseconds."""
    scores = torch.rand(200, sorters.LENGTH, generator=torch.Generator().manual_seed(3)) * 2 - 1
    ranks = sodeep.sodeep_rank(scores, sorter=sorters.sorter())
    error = (ranks - rankgrad.rank(scores, lam=1.0)).abs().mean()
    assert error < 1  # the best constant, 10.5 for all, is wrong by 5


def test_complexity_from_files(tmp_path):
    from rankgrad.lab.figures import complexity

    def numbers(place, end):
        points = [{"n": n, "seconds": n * 1e-6, "peak": 0, "note": ""} for n in (100, 1000)]
        points.append({"n": 3000, "seconds": None, "peak": None, "note": end})
        curve = {"name": "chen2019", "label": "Chen et al. 2019", "exponent": 1.0, "points": points}
        return json.dumps({"devices": {place: {"machine": f"{place} here; torch", "curves": [curve]}}})

    (tmp_path / "1-complexity.json").write_text(numbers("cpu", "> 60 s"))
    (tmp_path / "2-complexity-gpu.json").write_text(numbers("cuda", "out of memory"))
    (drawing,) = complexity.draw(quiet(results=tmp_path)[0])
    titles = [axes.get_title(loc="left") for axes in drawing.figure.axes]
    assert titles == ["CPU: cpu here", "GPU: cuda here"]
    assert_texts_apart(drawing.figure)
    labels = [axes.get_legend().get_texts()[0].get_text() for axes in drawing.figure.axes]
    assert labels == [
        "Chen et al. 2019: $n^{1.00}$, then > 60 s",
        "Chen et al. 2019: $n^{1.00}$, then out of memory",
    ]
    with pytest.raises(UserError, match="no numbers of"):
        complexity.draw(quiet(results=tmp_path / "nothing")[0])
