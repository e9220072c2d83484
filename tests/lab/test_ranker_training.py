"""The task ranker, the whole way: it learns, resumes exactly, is judged again from its files, and reports."""

import json
import re
import sys

import numpy as np
import pytest
import torch

from rankgrad import metrics
from rankgrad.lab import recipes
from rankgrad.lab.ranker.task import RankerTask, measure, prepared, read, rebuild, score
from rankgrad.lab.recipes import run
from rankgrad.lab.training.errors import UserError

from runs import cli, rows, same_weights, stop_after

SMALL = ["epochs=3", "save_minutes=0", "device=cpu", "hidden=[8]", "batch.queries=8", "lr=0.01", "baselines=[]"]


@pytest.fixture
def queries(tmp_path):
    """Grades that follow from three of five features, with noise."""
    random = np.random.default_rng(0)
    lines = []
    for query in range(60):
        features = random.normal(size=(int(random.integers(3, 12)), 5))
        grades = np.digitize(features[:, :3].sum(1) + 0.5 * random.normal(size=len(features)), [0, 1.5])
        lines += [
            f"{grade} qid:{query} " + " ".join(f"{at}:{value:.4f}" for at, value in enumerate(row, 1))
            for grade, row in zip(grades, features, strict=True)
        ]
    path = tmp_path / "queries.txt"
    path.write_text("\n".join(lines))
    return path


def test_it_learns_and_reports(queries, tmp_path, capsys):
    out = tmp_path / "run"
    assert cli("train", "ranker", "--data", queries, "--out", out, *SMALL, "epochs=12") == 0
    first, *_, last = rows(out, "evaluations")
    assert float(first["NDCG@10"]) < 80 and float(last["NDCG@10"]) > 92
    result = json.loads((out / "result.json").read_text())
    evaluations = rows(out, "evaluations")
    best = max(reversed(evaluations), key=lambda row: float(row["validation NDCG@10"]))  # of equals the last
    assert result["best"]["epoch"] == float(best["epoch"])
    page = (out / "report.html").read_text()
    for row, label in ((first, "this run, before training"), (best, "this run, best evaluation")):
        cells = re.search(rf"<td>{label}[^<]*</td>(.*?)</tr>", page).group(1)
        names = ("validation NDCG@10", "NDCG@1", "NDCG@5", "NDCG@10", "MAP", "MRR")
        assert re.findall("<td>([^<]*)</td>", cells) == [f"{float(row[name]):.1f}" for name in names]
    assert "The hardest queries" in page
    capsys.readouterr()
    assert cli("eval", out / "best.safetensors") == 0
    assert f"NDCG@10 {result['best']['NDCG@10']:.1f}  MAP {result['best']['MAP']:.1f}" in capsys.readouterr().out
    other = tmp_path / "other"
    assert cli("train", "ranker", "--data", queries, "--out", other, *SMALL, "loss=lambdarank") == 0
    assert cli("report", out, "--beside", other) == 0
    assert "<td>other, best evaluation" in (out / "report.html").read_text()


def test_lines_say_which_part_is_measured(queries, tmp_path, capsys):
    """In every epoch, at the end, of baselines and over seeds; and that the validation queries chose the best."""
    settings = [*SMALL[:-1], "epochs=1", "baselines=[listnet]"]
    assert cli("train", "ranker", "--data", queries, "--out", tmp_path / "a", *settings) == 0
    words = r"validation NDCG@10 [\d.]+  test NDCG@1 [\d.]+  test NDCG@5 [\d.]+  test NDCG@10 [\d.]+  test MAP"
    said = capsys.readouterr().out
    for begin in (r"epoch   0  ", r"epoch   1  ", "best  ", "last  ", "ListNet: "):
        assert re.search(f"^{begin}{words}", said, re.MULTILINE), begin
    assert re.search(r"^best .*\(epoch \d, by validation NDCG@10\)$", said, re.MULTILINE)
    assert cli("train", "ranker", "--data", queries, "--out", tmp_path / "b", *settings, "--seeds", 2) == 0
    said = capsys.readouterr().out
    assert "\nvalidation NDCG@10 (best): " in said and "\ntest MRR (last): " in said and "\nMRR" not in said


def test_metrics_are_those_of_each_query(queries):
    _, config = recipes.load("ranker", [*SMALL, f"data.root={queries}"])
    task = RankerTask(config, torch.device("cpu"))
    scores = score(task.network, task.test)
    found = task.evaluate()
    ndcg, ap, rr = [], [], []
    for number in range(len(task.test)):
        s, g = (values[task.test.groups == number] for values in (scores, task.test.grades))
        if bool((g >= 1).any()):
            ndcg.append(float(metrics.ndcg(s, g, k=5, gain="exponential")))
            ap.append(float(metrics.average_precision(s, g >= 1)))
            rr.append(float(metrics.reciprocal_rank(s, g >= 1)))
    wanted = {"NDCG@5": ndcg, "MAP": ap, "MRR": rr}
    for name, values in wanted.items():
        assert found[name] == pytest.approx(100 * sum(values) / len(values), rel=1e-5)
    assert found["validation NDCG@10"] == pytest.approx(measure(task.network, task.validation, config)["NDCG@10"])


def test_queries_without_anything_relevant_are_counted(tmp_path, capsys):
    """They are not measured: a user who compares numbers must know how many are."""
    lines = [f"{grade} qid:{query} 1:{item}" for query in range(4) for item, grade in enumerate((query % 2, 0, 0))]
    for part in ("train", "vali", "test"):
        (tmp_path / f"{part}.txt").write_text("\n".join(lines) + "\n")
    out = tmp_path / "out"
    assert cli("train", "ranker", "--data", tmp_path, "--out", out, *SMALL) == 0
    assert "tests on 12 items of 4 queries (2 with something relevant)" in capsys.readouterr().out
    assert cli("eval", out) == 0
    assert capsys.readouterr().out.startswith("tests on 12 items of 4 queries (2 with something relevant)")


@pytest.mark.parametrize("loss", ["ap", "listnet"])
def test_a_resumed_run_is_the_same(queries, tmp_path, monkeypatch, loss):
    more = [*SMALL, f"data.root={queries}"] + ([f"loss={loss}"] if loss != "ap" else [])
    plain, _ = run.run("ranker", more, out=str(tmp_path / "plain"))
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(KeyboardInterrupt):
            run.run("ranker", more, out=str(tmp_path / "torn"))
    torn, _ = run.run("ranker", more, out=str(tmp_path / "torn"), resume=True)
    assert rows(torn) == rows(plain) and rows(torn, "evaluations") == rows(plain, "evaluations")
    for name in ("last", "best"):
        assert same_weights(torn / f"{name}.safetensors", plain / f"{name}.safetensors")
    less = tmp_path / "less.txt"
    lines = queries.read_text().split("\n")
    less.write_text("\n".join(lines[: len(lines) // 2]))
    with pytest.raises(UserError, match=r"was started on other data: \d+ training queries, now \d+;"):
        run.run("ranker", [*more, f"data.root={less}"], out=str(torn), resume=True)


def test_every_query_is_seen_once_an_epoch(queries):
    _, config = recipes.load("ranker", [*SMALL, f"data.root={queries}", "batch.queries=5"])
    task = RankerTask(config, torch.device("cpu"))
    seen = torch.cat([task.queries_at(step) for step in range(2 * task.steps_per_epoch)])
    first, second = (part.tolist() for part in seen.chunk(2))
    assert len(set(first)) == len(first) > len(task.train) - 5
    assert first != second and len(set(second)) == len(second)


@pytest.mark.parametrize("scale", ["query", "log", "none"])
def test_scales_are_kept_with_the_weights(queries, tmp_path, scale):
    folder, (result,) = run.run(
        "ranker", [*SMALL, f"data.root={queries}", f"model.scale={scale}"], out=str(tmp_path / "a")
    )
    _, last = recipes.of_checkpoint(folder / "last.safetensors")
    config, network = last.config, rebuild(last)
    found = measure(network, prepared(read(config.data).test, config, torch.device("cpu")), config)
    assert found["MAP"] == pytest.approx(result.last["MAP"])


def test_a_checkpoint_on_other_features(queries, tmp_path):
    folder, _ = run.run("ranker", [*SMALL, f"data.root={queries}"], out=str(tmp_path / "a"))
    other = tmp_path / "other.txt"
    other.write_text(queries.read_text().replace(" 5:", " 6:"))
    told = cli("eval", folder / "best.safetensors", "--data", other)
    assert told == "rankgrad: --data: expected the 5 features of the checkpoint, only one of them has 6"


def test_another_file_is_evaluated_whole(queries, tmp_path, capsys):
    """The file of the run, moved or not, has training queries: only its test queries are measured."""
    folder, (result,) = run.run("ranker", [*SMALL, f"data.root={queries}"], out=str(tmp_path / "a"))
    moved, other = tmp_path / "moved.txt", tmp_path / "other.txt"
    moved.write_text(queries.read_text())
    other.write_text(
        "".join(f"{grade} qid:{qid} 1:{grade} 2:1 3:0 4:0 5:0\n" for qid in (7, 8) for grade in (0, 2))
    )
    capsys.readouterr()
    for data in ([], ["--data", moved]):
        assert cli("eval", folder, *data) == 0
        said = capsys.readouterr().out
        assert "of 12 queries" in said and "all of" not in said and f"MAP {result.best['MAP']:.1f}" in said
    assert cli("eval", folder, "--data", other) == 0
    assert f"tests on 4 items of 2 queries, all of {other} (it is not the file" in capsys.readouterr().out


@pytest.mark.parametrize("same", [True, False])
def test_a_checkpoint_of_before_knows_its_file_by_the_path(queries, tmp_path, same):
    folder, _ = run.run("ranker", [*SMALL, f"data.root={queries}"], out=str(tmp_path / "a"))
    task, saved = recipes.of_checkpoint(folder / "best.safetensors")
    metadata = {key: value for key, value in saved.metadata.items() if key != "queries"}
    other = queries if same else tmp_path / "moved.txt"
    other.write_text(queries.read_text())
    config = saved.config.model_copy(update={"data": saved.config.data.model_copy(update={"root": str(other)})})
    found = task.evaluate_checkpoint(saved._replace(config=config, metadata=metadata), torch.device("cpu"))
    tested = measure(rebuild(saved), prepared(read(saved.config.data).test, config, torch.device("cpu")), config)
    assert (found == tested) == same


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("0 qid:1 1:1\n0 qid:2 1:1\n0 qid:3 1:1\n", [], "expected train queries with an item of a grade of at"),
        ("2 qid:1 1:1\n2 qid:2 1:1\n2 qid:3 1:1\n", [], "expected training queries with items of different gra"),
        ("1 qid:1 1:1\n", [], "expected 3 queries at least, to train on and to split off for test and validation"),
        ("1 qid:1 1:1\nx qid:1 1:1\n", [], "line 2: expected a grade, received 'x'"),
        ("1 qid:1 1:1\n", ["test_share=0.5", "validation_share=0.5"], "must leave queries to train on"),
        ("1 qid:1 1:1\n", ["loss=lambdarnk"], "loss: unknown name 'lambdarnk', did you mean 'lambdarank'?"),
    ],
)
def test_wrong_data_is_a_line_and_leaves_nothing(tmp_path, text, settings, message):
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text(text)
    told = cli("train", "ranker", "--data", path, "--out", out, *settings)
    assert message in told and told.startswith("rankgrad: ") and "\n" not in told
    assert not out.exists()


def cells_of(page, label):
    """The numbers of a row of the table of results."""
    cells = re.search(rf"<td>{label}</td>(.*?)</tr>", page).group(1)
    return re.findall("<td>([^<]*)</td>", cells)


def test_baselines_are_trained_and_reported_beside_the_run(queries, tmp_path, capsys):
    """A baseline is what a run of its own with that loss gives; LightGBM's figures follow from its scores."""
    out = tmp_path / "run"
    settings = [*SMALL[:-1], "evaluate_first=false"]
    assert cli("train", "ranker", "--data", queries, "--out", out, *settings) == 0
    told, page = capsys.readouterr().out, (out / "report.html").read_text()
    names = ("validation NDCG@10", "NDCG@1", "NDCG@5", "NDCG@10", "MAP", "MRR")
    for name, label in (("lambdarank", "LambdaRank"), ("listnet", "ListNet"), ("ranknet", "RankNet")):
        alone, (result,) = run.run(
            "ranker", [*settings, f"data.root={queries}", f"loss={name}", "baselines=[]"], out=str(tmp_path / name)
        )
        assert rows(alone) == rows(out / "baselines" / name)
        row = rf"{label}, best evaluation \(epoch {result.best['epoch']:.0f}\)"
        assert cells_of(page, row) == [f"{result.best[key]:.1f}" for key in names]
        assert f"{label}: validation NDCG@10 {result.best['validation NDCG@10']:.1f}" in told
    trees = json.loads((out / "baselines/lightgbm/result.json").read_text())["best"]
    assert cells_of(page, rf"LightGBM lambdarank, best evaluation \({trees['epoch']:.0f} trees\)") == [
        f"{trees[key]:.1f}" for key in names
    ]
    assert trees["NDCG@10"] > 85  # random scores give 70


def test_a_finished_baseline_is_not_trained_again(queries, tmp_path, monkeypatch, capsys):
    settings = [*SMALL[:-1], f"data.root={queries}", "baselines=[listnet,ranknet]"]
    plain, _ = run.run("ranker", settings, out=str(tmp_path / "plain"))
    steps = len(rows(plain))
    with monkeypatch.context() as patch:
        stop_after(patch, 2 * steps + 2)  # the run, ListNet, and two steps of RankNet
        with pytest.raises(KeyboardInterrupt):
            run.run("ranker", settings, out=str(tmp_path / "torn"))
    torn = tmp_path / "torn"
    before = (torn / "baselines/listnet/result.json").stat().st_mtime_ns
    assert len(rows(torn / "baselines/ranknet")) == 2
    with monkeypatch.context() as patch:
        stop_after(patch, steps - 2)
        run.run("ranker", settings, out=str(torn), resume=True)
    assert (torn / "baselines/listnet/result.json").stat().st_mtime_ns == before
    assert rows(torn / "baselines/ranknet") == rows(plain / "baselines/ranknet")
    with monkeypatch.context() as patch:
        stop_after(patch, 0)  # others may be left out, or added, afterwards
        run.run("ranker", [*settings, "baselines=[]"], out=str(torn), resume=True)
    assert "ListNet" not in (torn / "report.html").read_text()


def test_a_baseline_that_cannot_be_trained_is_a_line(queries, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    settings = [*SMALL[:-1], f"data.root={queries}", "baselines=[lightgbm]"]
    folder, _ = run.run("ranker", settings, out=str(tmp_path / "run"))
    assert (
        "baseline lightgbm: left out, lightgbm is not installed (pip install lightgbm)" in capsys.readouterr().out
    )
    assert (folder / "report.html").is_file() and not (folder / "baselines").exists()
    own, _ = run.run("ranker", [*settings[:-1], "loss=listnet", "baselines=[listnet]"], out=str(tmp_path / "own"))
    assert not (own / "baselines").exists()


def test_lightgbm_takes_any_grades(queries, tmp_path):
    """Its own labels are integers up to 30."""
    text = re.sub("^2 ", "40.5 ", queries.read_text(), flags=re.MULTILINE)
    queries.write_text(text)
    settings = [*SMALL[:-1], f"data.root={queries}", "epochs=1", "gain=linear", "baselines=[lightgbm]"]
    folder, _ = run.run("ranker", settings, out=str(tmp_path / "run"))
    assert json.loads((folder / "baselines/lightgbm/result.json").read_text())["best"]["NDCG@10"] > 70
