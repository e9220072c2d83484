"""The table of losses: every row's settings are valid, and the runner writes what it measured."""

import multiprocessing
import os
import sys
import zipfile

import pytest
import torch
from benchmarks import cub, embeddings, last_block, memory, queue, side_by_side, spearman

from rankgrad.lab import recipes
from rankgrad.lab.retrieval import losses
from rankgrad.lab.retrieval.images import model
from rankgrad.lab.training.errors import UserError

import images


@pytest.mark.parametrize("name", list(cub.ROWS))
def test_rows_are_valid(name):
    _, config = recipes.load("cub", cub.ROWS[name].split())
    losses.build(config.loss, config.miner, classes=4, embedding=8)


def test_the_table(tmp_path, monkeypatch, capsys):
    root = images.cub_set(tmp_path / "data")
    small = [
        "backbone=tiny",
        "pooling=own",
        "precision=fp32",
        "embedding=8",
        "batch.size=6",
        "per_class=2",
        "view.resize=16",
    ]
    small += ["view.crop=12", "data.counts=any", "device=cpu"]
    options = ["--data", str(root), "--weights", "none", "--out", str(tmp_path / "out"), "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["cub.py", *options, "--seeds", "2", "--rows", "^recall log$|FastAP", *small])
    cub.main()
    written = (tmp_path / "out" / "table.md").read_text()
    assert written in capsys.readouterr().out
    rows = [line.split(" | ")[0] for line in written.splitlines() if "±" in line and line.startswith("|")]
    assert rows == ["| recall log", "| FastAP"]
    assert str(root) not in written


def test_losses_on_cached_images(tmp_path, monkeypatch, capsys):
    root = images.cub_set(tmp_path / "data", classes=(1, 2, 3, 4, 101))
    monkeypatch.setattr(last_block, "EPOCHS", 2)
    small = [
        "backbone=resnet18",
        "view.resize=40",
        "view.crop=32",
        "view.test_crop=32",
        "embedding=8",
        "batch.size=8",
    ]
    options = ["--weights", "none", "--out", str(tmp_path / "out"), "--rates", "1e-4", "1e-3", "--most", "3"]
    options += ["--rows", "^AP$|^ProxyRanking", "--set", *small]
    monkeypatch.setattr(sys, "argv", ["last_block.py", f"cub={root}", *options])
    last_block.main()
    first = (tmp_path / "out" / "table.md").read_text()
    rows = [line.split(" | ") for line in first.splitlines() if line.startswith("| ") and "±" in line]
    assert [row[0] for row in rows] == ["| ProxyRanking (default)", "| AP"] and len(rows[0]) == 3
    assert "view 2 of 2: 6 images" in capsys.readouterr().out
    last_block.main()  # with what was computed the first time
    assert "view" not in capsys.readouterr().out
    again = (tmp_path / "out" / "table.md").read_text()
    assert again.splitlines()[4:] == first.splitlines()[4:]


def test_the_parts_of_a_network_are_the_network():
    """And only the last block and the head learn."""
    config = recipes.load("folder", ["backbone=resnet18", "weights=none", "crop=32", "resize=32", "data.root=x"])[
        1
    ]
    whole, (body, tail) = model.build(config.model, 32, config.seed)[0].eval(), last_block.cut(config)
    batch = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(tail.eval()(body(batch)), whole(batch))
    assert {name.split(".")[1] for name, _ in tail.network.named_parameters()} <= {"0", "weight", "bias"}


@pytest.mark.parametrize("row", list(embeddings.ROWS))
def test_rows_of_the_table_of_embeddings(row, tmp_path):
    for name, data in embeddings.SETS.items():
        for settings in embeddings.tries(tmp_path, name, row).values():
            _, config = recipes.load(data.recipe, [*data.settings.split(), *settings.split()])
            losses.build(config.loss, config.miner, classes=4, embedding=8)
    tried = embeddings.tries(tmp_path, "omniglot", row).values()
    rates = [recipes.load("folder", text.split())[1].optim.lr for text in tried]
    assert sorted(set(rates)) == pytest.approx([3e-4, 9e-4, 3e-3])


def test_the_data_of_the_table(tmp_path):
    """Classes that are trained on are not judged on."""
    for label in (1, 2, 50, 51, 52, 102):
        for k in range(2):
            images.image(tmp_path / "flowers" / "valid" / str(label) / f"{k}.png", label, k)
    (tmp_path / "omniglot").mkdir()
    for number, alphabets in ((1, ("Greek", "Korean")), (2, ("Greek", "Sanskrit", "Tagalog"))):
        with zipfile.ZipFile(tmp_path / "omniglot" / f"images_background_small{number}.zip", "w") as pack:
            for alphabet in alphabets:
                inside = f"images_background_small{number}/{alphabet}/character01/0001_01.png"
                pack.write(tmp_path / "flowers/valid/1/0.png", inside)
    words = [f"{name}={tmp_path / name}" for name in ("flowers", "omniglot")]
    args = embeddings.parsed([*words, "--weights", "none", "--out", str(tmp_path / "out")])
    found = {
        name: {part: {path.name for path in (folder / part).iterdir()} for part in ("train", "test")}
        for name, folder in args.data.items()
    }
    assert found == {
        "flowers": {"train": {"001", "002", "050", "051"}, "test": {"052", "102"}},
        "omniglot": {
            "train": {"Greek character01", "Korean character01"},
            "test": {"Sanskrit character01", "Tagalog character01"},
        },
    }
    stands = ["flowers, folder as it stands", "omniglot, folder as it stands"]
    jobs = embeddings.jobs_of(args)
    assert len(jobs) == 2 * (3 * len(embeddings.ROWS) + 3)  # rates of each, and seeds of the recipe
    assert [(job.row, job.seed) for job in jobs[-6:]] == [(row, seed) for seed in range(3) for row in stands]
    link = args.data["flowers"] / "train" / "001" / "0.png"
    link.unlink()
    (link.parent / "1.png").unlink()
    (link.parent / "1.png").symlink_to("/another/machine")
    embeddings.parsed([*words, "--out", str(tmp_path / "out")])  # of a copy without its links
    assert link.is_file() and (link.parent / "1.png").is_file()
    with pytest.raises(SystemExit):
        embeddings.parsed([f"birds={tmp_path}"])


def test_the_table_of_embeddings(tmp_path, monkeypatch, capsys):
    """Chosen on held-out classes, then tested with seeds; what is finished stays."""
    images.cub_set(tmp_path / "cub", classes=(1, 2, 3, 4, 101, 102))
    monkeypatch.setattr(embeddings, "RATES", (1e-4,))
    small = ["backbone=tiny", "precision=fp32", "embedding=8", "batch.size=4", "per_class=2", "view.resize=16"]
    small += ["view.crop=12", "data.counts=any", "device=cpu", "compile=false"]
    words = [f"cub={tmp_path / 'cub'}", "--weights", "none", "--out", str(tmp_path / "out"), "--epochs", "1"]
    words += ["--seeds", "2", "--rows", "^SmoothAP|folder", "--set", *small]
    monkeypatch.setattr(sys, "argv", ["embeddings.py", *words])
    embeddings.main()
    written = (tmp_path / "out" / "table.md").read_text()
    assert written in capsys.readouterr().out and str(tmp_path) not in written
    rows = [line.split(" | ")[0] for line in written.splitlines() if line.startswith("| ") and "±" in line]
    assert rows == ["| SmoothAP", "| folder as it stands"]
    args = embeddings.parsed(words)
    assert embeddings.jobs_of(args) == []
    left = {path.name for path in args.out.rglob("*") if path.suffix in (".pt", ".safetensors")}
    assert left == set()  # of finished runs, hundreds of them
    runs = list(embeddings.tries(args.out, "cub", "SmoothAP"))
    assert [run.rsplit(" ", 1)[1] for run in runs] == ["x1", "x10"]
    result = side_by_side.folder_of(args.out, runs[0], 0) / "result.json"
    result.unlink()
    assert [job.row for job in embeddings.jobs_of(args)] == runs[:1]  # the faster head follows when it is known
    assert embeddings.best(args.out, "cub", "SmoothAP") is None
    (result.parent / "failed.txt").write_text("loss: nan at step 3")
    assert embeddings.score(args.out, runs[0]) == (0, 0) and "failed" in embeddings.table(args)
    assert embeddings.best(args.out, "cub", "SmoothAP").endswith("embedding_lr=10")


def test_the_recipe_as_it_stands(tmp_path):
    """Nothing is set but data and weights, and the classes to train on are CUB's."""
    images.cub_set(tmp_path / "cub", classes=(1, 2, 101))
    words = [f"cub={tmp_path / 'cub'}", "--weights", "none", "--out", str(tmp_path / "out"), "--rows", "folder"]
    args = embeddings.parsed(words)
    (job, *_) = embeddings.jobs_of(args)
    assert job.recipe == "folder"
    assert job.settings == (f"data.root={args.data['cub']}", "weights=none", "seed=0")
    found = {part: {path.name for path in (args.data["cub"] / part).iterdir()} for part in ("train", "test")}
    assert {len(names) for names in found.values()} == {1, 2} and len(found["train"]) == 2


def test_a_run_that_fails_counts_as_nothing_and_is_not_repeated(tmp_path, capsys):
    """The loss becomes NaN: the row has a result, 0, which enters the mean; what a signal stopped goes on."""
    images.cub_set(tmp_path / "cub", classes=(1, 2, 3, 4, 101, 102))
    words = [f"cub={tmp_path / 'cub'}", "--weights", "none", "--out", str(tmp_path / "out"), "--rows", "^FastAP"]
    small = ["backbone=tiny", "precision=fp32", "embedding=8", "batch.size=4", "per_class=2", "view.resize=16"]
    small += ["view.crop=12", "data.counts=any", "device=cpu", "compile=false", "weight_decay=1e20"]
    args = embeddings.parsed([*words, "--epochs", "9", "--set", *small])
    (job, *_) = [one for one in embeddings.jobs_of(args) if "1e-05" in one.row]
    ours, theirs = multiprocessing.Pipe()
    for given in (job, None):
        ours.send(given)
    side_by_side._work(theirs, 1)
    said = (job.folder / "failed.txt").read_text()
    assert said.startswith("loss: nan at step ") and f"failed: {said}" in capsys.readouterr().out
    assert job not in embeddings.jobs_of(args) and embeddings.score(args.out, job.row) == (0, 0)
    for seed, finished in enumerate((True, False, True)):
        folder = side_by_side.folder_of(args.out, "cub, FastAP", seed)
        folder.mkdir(parents=True)
        name, text = ("result.json", '{"last": {"R@1": 60, "mAP@R": 30}}') if finished else ("failed.txt", said)
        (folder / name).write_text(text)
    assert "| FastAP | 2, 1 failed | 40.0 ± 34.6 | 20.0 ± 17.3 |" in embeddings.table(args)


def test_what_is_chosen_comes_before_what_is_tested(tmp_path, monkeypatch):
    """Of the rates the best, of the heads the better one; then all losses with the first seed, then the others."""
    words = [
        f"cub={images.cub_set(tmp_path / 'cub')}",
        "--weights",
        "none",
        "--out",
        str(tmp_path / "out"),
        "--seeds",
        "2",
    ]
    args = embeddings.parsed([*words, "--rows", "^AP$|^FastAP"])
    found = {}
    monkeypatch.setattr(embeddings, "score", lambda out, run: found.get(run))
    asked = [job.row for job in embeddings.jobs_of(args)]
    assert len(asked) == 6 and all(run.endswith("x1") for run in asked)
    found |= {run: (50 + 9 * ("3e-05" in run), 9.0) for run in asked}
    heads = [f"cub held out, {row}, 3e-05 x10" for row in ("AP", "FastAP")]
    assert [job.row for job in embeddings.jobs_of(args)] == heads
    found |= {heads[0]: (58.0, 99.0), heads[1]: (60.0, 1.0)}  # R@1 decides
    jobs = embeddings.jobs_of(args)
    assert [(job.row, job.seed) for job in jobs] == [(f"cub, {r}", k) for k in (0, 1) for r in ("AP", "FastAP")]
    assert "embedding_lr=1" in jobs[0].settings and "embedding_lr=10" in jobs[1].settings
    assert all("lr=3e-05" in job.settings and "epochs=15" in job.settings for job in jobs)
    args.tested = "^AP$"
    assert [(job.row, job.seed) for job in embeddings.jobs_of(args)] == [("cub, AP", 0), ("cub, AP", 1)]


def _ended(jobs, threads):
    """A worker that writes what a run leaves, and dies in the second job."""
    while (job := jobs.recv()) is not None:
        job.folder.mkdir(parents=True)
        (job.folder / "state.pt").write_text("")
        if job.seed == 1:
            os._exit(3)
        (job.folder / "result.json").write_text("{}")
        jobs.send("ended")


def test_jobs_that_follow_from_others(tmp_path, monkeypatch, capsys):
    """Each is done once, as soon as it can be; a process that dies takes no other job with it."""
    monkeypatch.setattr(side_by_side, "_work", _ended)
    fork = multiprocessing.get_context("fork")  # no second import of torch
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: fork)
    jobs = [side_by_side.Job("row", seed, "cub", (), tmp_path / str(seed)) for seed in range(4)]

    def further():
        return [job for job in jobs if job.seed == 0 or jobs[job.seed - 1].folder.is_dir()]

    side_by_side.train(jobs[:1], parallel=2, mps=False, minutes=1, further=further, keep=False)
    assert [job.folder.is_dir() for job in jobs] == [True] * 4
    assert [(job.folder / "state.pt").exists() for job in jobs] == [False, True, False, False]
    assert "row, seed 1: its process died" in capsys.readouterr().out


def test_several_tables_in_one_queue(tmp_path, monkeypatch, capsys):
    """The runs of the first table come first, tables are written after every run, and mistakes cost no time."""
    images.cub_set(tmp_path / "cub", classes=(1, 2, 3, 4, 101, 102))
    boxes = f"voc --data D --out {tmp_path / 'voc'} --rows '^cross entropy$' --seeds 2"
    pairs = f"embeddings cub={tmp_path / 'cub'} --out {tmp_path / 'pairs'} --rows ^SmoothAP --weights none"

    def train(jobs, *, parallel, further, **how):
        assert (tuple(jobs), parallel) == ((), 3)
        asked.extend((job.row, job.seed) for job in further())
        assert "| loss |" in (tmp_path / "voc" / "table.md").read_text()

    asked = []
    monkeypatch.setattr(queue.side_by_side, "train", train)
    monkeypatch.setattr(sys, "argv", ["queue.py", "--parallel", "3", boxes, pairs])
    queue.main()
    rates = [f"cub held out, SmoothAP, {rate} x1" for rate in ("1e-05", "3e-05", "0.0001")]
    assert asked == [("cross entropy", 0), ("cross entropy", 1), *((rate, 0) for rate in rates)]
    shown = capsys.readouterr().out
    assert shown.index("Pascal VOC") < shown.index("Losses on embeddings")
    monkeypatch.setattr(sys, "argv", ["queue.py", "--list", boxes])
    queue.main()
    assert capsys.readouterr().out.startswith("cross entropy, seed 0: rankgrad train voc07 data.root=D ")
    for wrong, told in (
        ("vok --data D", "^COMMAND: expected one of voc, embeddings"),
        ("", "^COMMAND: expected one of voc, embeddings first, received ''$"),
        ("voc 'x", "^COMMAND: No closing quotation"),
        (f"{boxes} --rows x0x", "^--rows: no row matches 'x0x'; there are cross entropy"),
        (f"{pairs} --rows x0x", "^--rows: no row matches 'x0x'; there are ProxyRanking"),
        (f"{boxes} --rows (", "^--rows: expected a regular expression, received '\\('"),
        (pairs.replace("cub=", "flowers="), "^flowers: expected images in folders named by class numbers"),
        (f"{boxes} --parallel 0", "2"),
    ):
        monkeypatch.setattr(sys, "argv", ["queue.py", "--list", wrong])
        with pytest.raises(SystemExit, match=told):
            side_by_side.without_traceback(queue.main)


def test_a_folder_that_is_not_there(monkeypatch, capsys):
    for table, words in ((spearman, ["--data", "none"]), (memory, ["--data", "none"])):
        monkeypatch.setattr(sys, "argv", ["table.py", *words])
        with pytest.raises(SystemExit):
            table.main()
        assert "--data: no such folder 'none'" in capsys.readouterr().err


def test_images_of_another_source_are_refused(tmp_path):
    """A table would else mix runs of both."""
    for name in ("a", "b"):
        images.cub_set(tmp_path / name, classes=(1, 2, 101, 102))
    for _ in range(2):
        made = embeddings.prepared("cub", tmp_path / "a", tmp_path / "out")
    with pytest.raises(UserError, match=r"^--out: .*cub has the images of .*/a; give another folder for .*/b$"):
        embeddings.prepared("cub", tmp_path / "b", tmp_path / "out")
    (tmp_path / "a").rename(tmp_path / "c")  # links that do not open, as in a copy on another machine
    embeddings.prepared("cub", tmp_path / "c", tmp_path / "out")
    assert {path.resolve().relative_to(tmp_path).parts[0] for path in made.glob("*/*/*")} == {"c"}
