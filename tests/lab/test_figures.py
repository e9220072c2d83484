"""The figures: what they compute, and that they are drawn as they say."""

import base64
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import cub, side_by_side
from PIL import Image

import rankgrad
from rankgrad.lab.figures import (
    ablations,
    batch_bias,
    catalogue,
    cold_start,
    gradients,
    landscape,
    margin,
    retrieval_examples,
    sorters,
    style,
)
from rankgrad.lab.figures.drawing import Drawing, Sources
from rankgrad.lab.training.errors import UserError
from rankgrad.surrogates import sodeep

from runs import cli

REFERENCE = Path(__file__).with_name("figures_reference.json")


def quiet(**given):
    told = []
    return Sources(tell=told.append, **given), told


@pytest.fixture
def untrained(monkeypatch):
    """A smaller sorter; its ranks are about the mean rank."""
    torch.manual_seed(0)
    network = sodeep.LSTMSorter(sorters.LENGTH, hidden=4).requires_grad_(False)
    monkeypatch.setattr(sorters, "sorter", lambda: network)


def pixels(figure):
    """The drawn image, ``[height, width]`` in grey, 0 to 1."""
    file = io.BytesIO()
    with style.applied():
        figure.savefig(file, format="png", dpi=style.DPI)
    return np.asarray(Image.open(file).convert("L"), dtype=float) / 255


def size(figure):
    """Height and width in pixels that the sheet was made with."""
    width, height = figure.get_size_inches()
    return round(height * style.DPI), round(width * style.DPI)


def assert_texts_apart(figure):
    """No two texts of a drawn figure touch, and none is cut off."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    with style.applied():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    beyond = set()  # labels of ticks outside of the view, and of axes that are off
    for axes in figure.axes:
        for axis in axes._axis_map.values():
            beyond |= {id(text) for text in axis.findobj(Text)}
            if axes.axison:
                beyond -= {id(tick.label1) for tick in axis._update_ticks()} | {
                    id(axis.label),
                    id(axis.offsetText),
                }
    boxes = [
        (text.get_text(), text.get_window_extent(canvas.get_renderer()))
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and id(text) not in beyond
    ]
    assert boxes
    for told, box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, (
            told
        )
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.padded(-1).overlaps(b.padded(-1)), (one, other)


def assert_looks_like(figure, name):
    """The image in 24 x 24 grey fields against the stored one; RANKGRAD_WRITE_REFERENCE=1 stores it anew."""
    image = pixels(figure)
    rows, columns = (np.linspace(0, length, 25).astype(int)[:-1] for length in image.shape)
    fields = np.add.reduceat(np.add.reduceat(image, rows, 0), columns, 1)
    fields /= np.outer(np.diff([*rows, image.shape[0]]), np.diff([*columns, image.shape[1]]))
    stored = json.loads(REFERENCE.read_text()) if REFERENCE.is_file() else {}
    if os.environ.get("RANKGRAD_WRITE_REFERENCE"):
        stored[name] = np.round(100 * fields).astype(int).tolist()
        REFERENCE.write_text(json.dumps(stored) + "\n")
    assert np.abs(fields - np.array(stored[name]) / 100).mean() < 0.01


# ---------------------------------------------------------------------------------------------- landscape


def by_brute_force(scores, weights, lam):
    """min over permutations of (y + lam g) . r / n, minus that of y . r / n, over lam."""
    n = len(scores)
    ranks = torch.tensor(list(itertools.permutations(range(1, n + 1))), dtype=torch.float64)
    return ((ranks @ (scores + lam * weights)).min() - (ranks @ scores).min()) / n / lam


def test_the_closed_form_is_the_difference_of_two_minima():
    generator = torch.Generator().manual_seed(3)
    for lam in (0.05, 0.5, 3.0):
        scores, weights = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        expected = by_brute_force(scores, weights, lam)
        torch.testing.assert_close(landscape.interpolated_values(scores, weights, lam), expected)


def test_its_gradient_is_the_one_of_rank():
    section = landscape.random_section()
    scores = section.scores(torch.tensor([0.3], dtype=torch.float64), torch.tensor([-0.4], dtype=torch.float64))[
        0, 0
    ]
    for lam in landscape.LAMBDAS:
        leaf = scores.clone().requires_grad_()
        (rankgrad.rank(leaf, lam=lam, normalize=True) @ section.weights).backward()
        nudge = 1e-7 * torch.eye(len(scores), dtype=torch.float64)
        ahead, behind = (
            landscape.interpolated_values(scores + sign * nudge, section.weights, lam) for sign in (1, -1)
        )
        torch.testing.assert_close(leaf.grad, (ahead - behind) / 2e-7, atol=1e-6, rtol=1e-6)


@pytest.fixture(scope="module")
def plane():
    line = torch.linspace(-1, 1, 61, dtype=torch.float64)
    section = landscape.random_section()
    return section, section.scores(line, line)


def test_a_small_lambda_gives_the_truth_away_from_jumps(plane):
    section, scores = plane
    truth = landscape.true_values(scores, section.weights)
    near = landscape.interpolated_values(scores, section.weights, 1e-3)
    gaps = scores.sort(-1).values.diff(dim=-1).amin(-1)
    away = gaps > 2e-3 * section.weights.abs().max()  # nothing can be passed
    assert 0.3 < away.double().mean() < 1
    torch.testing.assert_close(near[away], truth[away])
    assert not torch.allclose(near, truth)


@pytest.mark.parametrize("lam", landscape.LAMBDAS)
def test_the_interpolation_stays_within_its_bounds(plane, lam):
    section, scores = plane
    truth = landscape.true_values(scores, section.weights)
    found = landscape.interpolated_values(scores, section.weights, lam)
    moved = landscape.true_values(scores + lam * section.weights, section.weights)
    assert (found <= truth + 1e-12).all() and (found >= moved - 1e-12).all()
    assert (found < truth - 1e-3).any()


@pytest.mark.parametrize("lam", landscape.LAMBDAS)
def test_the_interpolation_is_continuous_where_the_truth_jumps(lam):
    section = landscape.random_section()
    a = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    scores = section.scores(a, torch.zeros(1, dtype=torch.float64))[0]
    truth = landscape.true_values(scores, section.weights)
    found = landscape.interpolated_values(scores, section.weights, lam)
    # |difference| <= sum over items of |change of score| (n - 1) / (n lam): the ranks differ by n - 1 at most
    steepest = section.across.abs().sum() / lam
    assert found.diff().abs().max() <= steepest * (a[1] - a[0])
    assert truth.diff().abs().max() > 10 * found.diff().abs().max()


def test_rows_are_b_and_columns_are_a():
    section = landscape.random_section()
    a, b = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), torch.tensor([-1.0, 1.0], dtype=torch.float64)
    scores = section.scores(a, b)
    assert scores.shape == (2, 3, 20)
    torch.testing.assert_close(scores[1, 2], section.origin + 0.3 * section.across + 1.0 * section.up)


def test_the_map_has_a_to_the_right_and_b_upwards():
    """A surface that is 1 only at the largest a and the smallest b: light in the corner below right."""
    found = np.zeros((9, 9))
    found[0, -1] = 1
    with style.applied():
        figure = style.sheet(3, 3)
        axes = figure.subplots()
        landscape._map(axes, found, np.linspace(-1, 1, 9), landscape.Normalize(0, 1))
        axes.set_position((0, 0, 1, 1))
        figure.set_layout_engine("none")
    image = pixels(figure)
    assert image[-12, -12] > 0.7 > 0.4 > image[12, -12]


def test_the_landscape_is_drawn(untrained, monkeypatch):
    monkeypatch.setattr(landscape, "_POINTS", 31)
    sources, _ = quiet()
    surfaces, flat = landscape.draw(sources)
    assert (surfaces.name, flat.name) == ("landscape", "landscape-flat")
    assert pixels(flat.figure).shape == size(flat.figure)
    assert_texts_apart(flat.figure)
    assert_texts_apart(surfaces.figure)
    titles = [axes.get_title() for axes in flat.figure.axes]
    assert (
        titles[0] == "true" and sum("lambda" in t for t in titles) == 4 and sum("bins" in t for t in titles) == 4
    )
    # the same values in both, one scale for all
    images = [axes.images[0] for axes in flat.figure.axes[:12]]
    assert len({image.norm for image in images}) == 1
    section, line = landscape.random_section(), torch.linspace(-1, 1, 31, dtype=torch.float64)
    expected = landscape.true_values(section.scores(line, line), section.weights)
    np.testing.assert_allclose(images[0].get_array(), expected)
    assert_looks_like(flat.figure, "landscape-flat")


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


def test_every_row_has_a_push_of_one_and_words(untrained):
    scores, relevance = gradients.the_list()
    table = gradients.rows(quiet()[0])
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


def test_the_gradients_are_drawn(untrained):
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


# ---------------------------------------------------------------------------------------------- ablations


def cub_table(folder, names):
    """As benchmarks/cub.py writes it: R@1 of 60 in two runs of each row, and 65 ± 0.7 in the last epoch."""
    for name, seed in itertools.product(names, (0, 1)):
        run = side_by_side.folder_of(folder, name, seed)
        run.mkdir(parents=True)
        metrics = {"R@1": 60.0, "R@2": 61.0, "R@4": 62.0, "R@8": 63.0, "mAP@R": 20.0}
        last = metrics | {"R@1": 64.5 + seed, "epoch": 20.0}
        result = {"best": metrics, "last": last, "seconds": 100.0, "speed": 3000.0}
        (run / "result.json").write_text(json.dumps(result))
    return cub.table(folder, ["epochs=20"])


def test_tables_of_the_benchmark_are_read(tmp_path):
    found = ablations.read_table(cub_table(tmp_path, cub.ROWS))[20]
    assert list(found) == list(cub.ROWS)
    assert found["ap"] == ablations.Line(ablations.Score(60, 0), ablations.Score(65, 0.7))
    assert ablations.read_table("| a | b |\n|---|---|\n| 1 | 2 |\n") == {}


def test_every_row_of_the_figure_is_a_row_of_the_benchmark():
    assert {row for panel in ablations.PANELS.values() for _, row in panel} <= set(cub.ROWS)
    assert set(ablations.PAPER) <= set(cub.ROWS)


def test_the_caption_says_how_far_a_change_moves_the_recall_loss(tmp_path):
    table = """| loss | best R@1 | last R@1 |
|---|---|---|
| recall loglog | 59.7 ± 0.2 | 59.2 ± 0.2 |
| recall loglog, no margin | 55.9 ± 0.2 | 40.2 ± 0.5 |
| ap | 60.8 ± 0.4 | 60.5 ± 0.7 |
"""
    (tmp_path / "cub.md").write_text(table)
    (drawing,) = ablations.draw(quiet(results=tmp_path)[0])
    seen = "What to see: 59.7 (59.2 at the end) moves by -3.8 (-19.0) with no margin."
    assert seen in " ".join(drawing.caption.split())


def test_rows_of_runs_of_different_length_do_not_meet(tmp_path):
    table = """| loss | epochs | best R@1 | last R@1 |
|---|---|---|---|
| recall loglog | 12 | 59.7 ± 0.2 | 59.2 ± 0.2 |
| recall loglog, no margin | 12 | 55.9 ± 0.2 | 40.2 ± 0.5 |
| recall loglog | 20 | 90.0 ± 0.2 | 90.0 ± 0.2 |
"""
    (tmp_path / "cub.md").write_text(table)
    (drawing,) = ablations.draw(quiet(results=tmp_path)[0])
    caption = " ".join(drawing.caption.split())
    assert (
        "After 12 epochs." in caption and "59.7 (59.2 at the end) moves by -3.8 (-19.0) with no margin" in caption
    )


def test_missing_rows_are_reported(tmp_path):
    (tmp_path / "2026-01-01-other.md").write_text("no table")
    with pytest.raises(UserError, match=r"no table of benchmarks/cub\.py"):
        ablations.draw(quiet(results=tmp_path)[0])
    (tmp_path / "2026-01-02-cub.md").write_text(cub_table(tmp_path / "runs", ["recall loglog", "ap", "FastAP"]))
    sources, told = quiet(results=tmp_path)
    (drawing,) = ablations.draw(sources)
    assert told == [
        "not in the tables: recall loglog, no memory, ap, no memory, recall loglog, no margin, "
        "recall loglog, lambda 0.04, recall loglog, lambda 1"
    ]
    assert "2026-01-02-cub.md" in drawing.caption and "Not measured: recall loglog, no memory" in drawing.caption
    assert "other" not in drawing.caption
    assert pixels(drawing.figure).shape == size(drawing.figure)
    assert_texts_apart(drawing.figure)
    (tmp_path / "2026-01-02-cub.md").write_text(cub_table(tmp_path / "others", ["FastAP"]))
    with pytest.raises(UserError, match="has none of the rows"):
        ablations.draw(sources)
    with pytest.raises(UserError, match="no such file or folder"):
        ablations.draw(quiet(results=tmp_path / "nothing")[0])


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
    placed = style.apart(wanted, 0.1, 0.0, 1.0)
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
    def make(name, sources):
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
    assert out.stderr == "rankgrad: matplotlib is not installed: pip install matplotlib\n"


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
