"""Files that never end, or that need far more memory than they have bytes: refused in one line, by their name."""

import json
import os
import re
from pathlib import Path

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from rankgrad.lab.detection import coco
from rankgrad.lab.detection import report as detection_report
from rankgrad.lab.ranker import data as ranker
from rankgrad.lab.ranker import report as ranker_report
from rankgrad.lab.ranker.config import Data as RankerData
from rankgrad.lab.retrieval.images.config import Data
from rankgrad.lab.retrieval.images.data import folder
from rankgrad.lab.sodeep import files as sorters
from rankgrad.lab.text import data as texts
from rankgrad.lab.text.config import Data as TextData
from rankgrad.lab.training import log, machine, reading, run_files
from rankgrad.lab.training.errors import UserError, meaning_of
from rankgrad.lab.use import index, page
from rankgrad.lab.vision import decoding, folders
from rankgrad.lab.vision.images import Store

import images
from runs import message_of

CPU = torch.device("cpu")


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# Files without an end. A test that reads one waits for ever: pytest's timeout ends it.


def test_pipes_and_devices_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in (
        (tmp_path / "pipe", "a pipe"),
        (tmp_path, "a folder"),
        (Path("/dev/zero"), "a device"),
    ):
        with pytest.raises(UserError, match=f"^X: {path}: expected a file, found {kind}$"):
            reading.read(path, argument="X")
    written(tmp_path / "large", b"12345")
    with pytest.raises(UserError, match=r"large has 5 bytes, expected at most 4$"):
        reading.read(tmp_path / "large", 4)
    assert reading.read(tmp_path / "large", 5) == b"12345"


def test_folders_with_pipes_devices_and_loops(tmp_path):
    root = images.folder_set(tmp_path / "data")
    expected = folder.read(Data(name="folder", root=str(root))).train.names
    os.mkfifo(root / "class0" / "pipe.jpg")
    (root / "class0" / "zero.jpg").symlink_to("/dev/zero")
    (root / "class0" / "itself.jpg").symlink_to(root / "class0" / "itself.jpg")
    (root / "class0" / "above").symlink_to(root)
    (root / "class0" / "folder.jpg").mkdir()
    assert folder.read(Data(name="folder", root=str(root))).train.names == expected


def test_links_to_folders(tmp_path):
    """Classes may be links, in training and in `embed`; what is linked inside of a class is reported."""
    root = images.folder_set(tmp_path / "data")
    linked = tmp_path / "linked"
    linked.mkdir()
    for one in root.iterdir():
        (linked / one.name).symlink_to(one)
    (root / "class0" / "more").symlink_to(root / "class1")
    (linked / "above").symlink_to(tmp_path)
    found = folders.images_in(linked, linked=True)
    assert len(found) == 36 and found[0] == linked / "class0" / "0.png"
    (linked / "above").unlink()
    read = folder.read(Data(name="folder", root=str(linked), test_share=1))
    assert [linked / name for name in read.query.names] == found
    assert read.note == "not used: 1 link to folders inside of classes (more)"
    both = tmp_path / "both"
    (both / "test").mkdir(parents=True)
    (both / "test" / "class1").symlink_to(root / "class1")
    linked.rename(both / "train")
    assert [one.name for one in folder.parts_of(both)[:2]] == ["train", "test"]


@pytest.mark.parametrize("ending", ["csv", "txt", "parquet"])
def test_rankers_and_annotations_read_no_pipe(tmp_path, ending):
    os.mkfifo(tmp_path / f"a.{ending}")
    with pytest.raises(UserError, match=rf"a\.{ending}: expected a file, found a pipe"):
        ranker.read(RankerData(root=str(tmp_path / f"a.{ending}")))
    (tmp_path / "train").mkdir()
    os.mkfifo(tmp_path / "train" / "_annotations.coco.json")
    with pytest.raises(UserError, match=r"_annotations\.coco\.json: expected a file, found a pipe"):
        coco.read_split(tmp_path, "train")


# Files of few bytes that would take gigabytes.


@pytest.mark.parametrize(("value", "bytes_each"), [("1,", 32), ("[1],", 160), ('{"a":1},', 512)])
def test_json_is_refused_by_the_memory_it_needs(monkeypatch, value, bytes_each):
    content = "[" + value * 100 + "0]"
    monkeypatch.setattr(reading, "MOST", 100 * bytes_each + 200)
    run_files.checked_json(content, list, "a.json")
    monkeypatch.setattr(reading, "MOST", 100 * bytes_each - 200)
    with pytest.raises(UserError, match=r"^a\.json: its values need .* GB of memory"):
        run_files.checked_json(content, list, "a.json")


def test_numbers_of_features_that_no_table_has(tmp_path):
    path = written(tmp_path / "a.txt", "1 qid:1 1:1\n0 qid:1 2147483646:1\n")
    with pytest.raises(UserError, match=r"a\.txt: 2 rows of 2,147,483,646 dense features need .* GB of memory"):
        ranker.read(RankerData(root=str(path)))


def test_tables_of_very_many_columns(tmp_path):
    names = ",".join(f"f{n}" for n in range(60_000))
    for path in (written(tmp_path / "a.csv", f"{names}\n"), tmp_path / "a.parquet"):
        if path.suffix == ".parquet":
            parquet.write_table(pyarrow.table({f"f{n}": [0] for n in range(50_001)}), path)
        with pytest.raises(UserError, match=rf"{path.name}: expected up to 50,000 columns, found \d\d,\d\d\d"):
            ranker.read(RankerData(root=str(path)))


def test_a_value_that_parquet_keeps_once_and_every_row_has(tmp_path, monkeypatch):
    """A file of some kilobytes: 6,000 rows with the same name of 10,000 characters."""
    rows = 6_000
    table = {"query": pyarrow.array(["q" * 10_000] * rows), "label": [1.0] * rows, "a": [1.0] * rows}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    monkeypatch.setattr(reading, "MOST", 50_000_000)
    with pytest.raises(UserError, match=r"a\.parquet: its rows need .* GB of memory"):
        ranker.read(RankerData(root=str(tmp_path / "a.parquet")))
    monkeypatch.setattr(reading, "MOST", 100_000_000)  # the table fits
    with pytest.raises(UserError, match="expected 3 queries at least"):
        ranker.read(RankerData(root=str(tmp_path / "a.parquet")))


@pytest.mark.parametrize("queries", [[b"\xff"] * 3, [{"x": 1}] * 3])
def test_queries_that_are_no_texts(tmp_path, queries):
    parquet.write_table(
        pyarrow.table({"query": queries, "label": [1] * 3, "a": [1.0] * 3}), tmp_path / "a.parquet"
    )
    with pytest.raises(UserError, match=r"a\.parquet: "):
        ranker.read(RankerData(root=str(tmp_path / "a.parquet")))


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_texts_in_a_line_without_an_end(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(texts, "_LINE", 1000)
    row = {"csv": "text,label\nabc,1\n", "jsonl": '{"text": "abc", "label": 1}\n'}[ending]
    path = written(tmp_path / f"a.{ending}", row + "x" * 5000)
    with pytest.raises(UserError, match=rf"a\.{ending} line \d: expected fewer than 1,000 characters"):
        texts.read(TextData(root=str(path)), "labels")


def test_texts_that_need_more_than_their_file(tmp_path, monkeypatch):
    path = written(tmp_path / "a.csv", "text,label\n" + "ab,cd\n" * 1000)
    monkeypatch.setattr(reading, "MOST", 50_000)
    with pytest.raises(UserError, match=r"a\.csv: its texts need .* GB of memory"):
        texts.read(TextData(root=str(path)), "labels")


def test_a_large_file_may_take_eight_times_its_size():
    reading.check_memory(8 * reading.MOST, "a", "rows", size=reading.MOST)
    with pytest.raises(UserError, match=r"^a: rows need 34\.4 GB of memory, expected at most 34\.4$"):
        reading.check_memory(8 * reading.MOST + 1, "a", "rows", size=reading.MOST)


# Images.


@pytest.mark.parametrize(("options", "side"), [({"progressive": True}, 400), ({}, 400), ({"kind": "PNG"}, 400)])
def test_all_of_a_jpeg_counts_whatever_fraction_is_read(tmp_path, monkeypatch, options, side):
    """Progressive JPEGs are in memory as coefficients: eight of 13,300 x 13,300 took 11.4 GB."""
    kind = options.pop("kind", "JPEG")
    Image.new("RGB", (side, side)).save(tmp_path / "a.jpg", kind, **options)
    asked = []

    class Asked(decoding.Budget):
        def of(self, size):
            asked.append(size)
            return super().of(size)

    monkeypatch.setattr(decoding, "BUDGET", Asked(2**40))
    found = decoding.upright(tmp_path / "a.jpg", lambda *size: (50, 50), lambda image: image.size)
    header = 48 * (tmp_path / "a.jpg").stat().st_size  # at most
    assert asked[0] == header and 0 <= asked[1] - side * side * (8 if kind == "JPEG" else 16) <= header
    assert found == ((50, 50) if kind == "JPEG" else (side, side))  # an eighth of it is read


@pytest.mark.parametrize("cache", ["ram", "none"])
def test_decoded_images_that_do_not_fit_in_memory(monkeypatch, cache):
    monkeypatch.setattr(machine, "available_bytes", lambda device: 30_000)
    sources = [torch.zeros(32, 32, 3, dtype=torch.uint8)] * 300  # 3,072 bytes each

    def store(many):
        names = [str(n) for n in range(many)]
        return Store(sources[:many], names, lambda s: s, cache=cache, workers=2, device=CPU)

    assert len(store(8).kept) == 8
    if cache == "ram":
        with pytest.raises(UserError, match=r"decoded images need more than .* data\.cache=none"):
            store(300)
    else:
        monkeypatch.setattr("rankgrad.lab.vision.images._AT_A_TIME", 4)
        assert len(store(300).kept) == 300


def test_pages_and_drawings_read_what_training_reads(tmp_path):
    with (tmp_path / "a.jpg").open("wb") as file:
        Image.new("RGB", (20, 20)).save(file, "EPS")  # which Pillow would hand to Ghostscript
    assert page._thumbnail(tmp_path / "a.jpg") == ""
    Image.new("RGB", (900, 20)).save(tmp_path / "b.png")
    assert page._thumbnail(tmp_path / "b.png") == ""
    Image.new("RGB", (90, 20)).save(tmp_path / "c.png")
    assert page._thumbnail(tmp_path / "c.png").startswith("data:image/jpeg;base64,")


# Files of runs of every task.


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (detection_report.Detections, {}),
        (detection_report.Detections, {"threshold": "x", "scores": "", "right": 1, "examples": [], "hardest": []}),
        (detection_report.Detections, {"threshold": 0, "scores": "", "right": 1, "examples": [{}], "hardest": []}),
        (detection_report.ByClass, {"softmax": {}}),
        (detection_report.ByClass, {"softmax": {"AP50": {"cat": "x"}}, "odds": {"AP50": {}}}),
        (ranker_report.RankedQueries, {"highest": -1, "hardest": [], "easiest": []}),
        (ranker_report.RankedQueries, {"highest": 1, "hardest": [{"query": 1}], "easiest": []}),
        (index.Notes, {"names": 3}),
        (run_files.DataNotes, {"headline": 3}),
        (run_files.DataNotes, []),
    ],
)
def test_files_of_runs_are_read_by_models(tmp_path, kind, content):
    path = written(tmp_path / "a.json", json.dumps(content))
    with pytest.raises(UserError, match=rf"^{path}: "):
        run_files.read_json_if_there(path, kind)
    assert run_files.read_json_if_there(tmp_path / "nothing", kind) is None


def test_sorters_of_another_kind(tmp_path):
    from safetensors.torch import save_file

    about = {"architecture": "lstm", "length": 4, "hidden": 2, "layers": 1, "recipe": None}
    for change in ({"architecture": "x"}, {"length": 10**9}, {"layers": 0}, {"hidden": 3}):
        save_file({"a": torch.zeros(1)}, tmp_path / "a", {sorters._KEY: json.dumps(about | change)})
        with pytest.raises(ValueError, match=r"^path: .*/a"):
            sorters.load(tmp_path / "a")


# Settings and errors.


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("embedding=2147483647", "model.embedding: input should be less than or equal to 65536"),
        ("batch.size=9999999999", "batch.size: input should be less than or equal to 1048576"),
        ("resize=100000", "view.resize: input should be less than or equal to 4096"),
        ("seed=9223372036854775807", "seed: input should be less than or equal to 46116860"),
        ("lr=1e300", "optim.lr: input should be less than or equal to 1000000000000"),
        ("loss=recall loss.margin=1e39", "a setting of the loss (margin: expected a number up to 3.4e+38"),
        ("device=meta", "device: unknown value 'meta', say auto, cpu or cuda"),
        ("device=mps", "device: unknown value 'mps', say auto, cpu or cuda"),
    ],
)
def test_absurd_settings(tmp_path, setting, message):
    assert message in message_of(
        "train", "digits", "evaluate_first=false", *setting.split(), "--out", tmp_path / "a"
    )


def test_homes_that_are_not_there(tmp_path):
    assert "~" in message_of("train", "folder", "--data", "~nobody-of-this-name/x", "--out", tmp_path / "a")


def test_what_errors_of_torch_mean():
    for make, words in (
        (lambda: torch.empty(2**60), "out of memory; .*batch.size.*model"),
        (lambda: torch.empty(2**62, 2**62), "out of memory"),
        (lambda: [None] * 2**60, "out of memory"),
        (lambda: torch.zeros(1).add_(1, alpha=1e300), "too large for the network's precision"),
    ):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            make()
        assert re.search(words, meaning_of(caught.value))
    closed = RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    assert meaning_of(closed).startswith("another process of this run has ended")
    assert meaning_of(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None


def test_out_of_memory_is_one_line(tmp_path, monkeypatch):
    from rankgrad.lab.training.loop import Trainer

    monkeypatch.setattr(Trainer, "_train_step", lambda self, network: torch.empty(2**60))
    line = message_of("train", "digits", "evaluate_first=false", "--out", tmp_path / "a")
    assert line.startswith("rankgrad: out of memory; lower the batch size")


def test_tables_of_runs_are_refused_by_the_memory_they_need(tmp_path, monkeypatch):
    path = written(tmp_path / "steps.csv", "step,loss\n" + "1,2\n" * 1000)
    assert len(log.read_table(path)) == 1000
    monkeypatch.setattr(reading, "MOST", 300_000)
    with pytest.raises(UserError, match=r"steps\.csv: its rows need .* GB of memory"):
        log.read_table(path)


def test_a_table_is_not_read_behind_its_first_fault(tmp_path, monkeypatch):
    """60 MB of empty lines took 5.3 GB before the first of them was refused."""
    path = written(tmp_path / "steps.csv", "step,loss\n1,2\n" + "\n" * 100_000)
    seen, inner = [], log.csv.reader

    def reader(*args, **options):
        for row in inner(*args, **options):
            seen.append(row)
            yield row

    monkeypatch.setattr(log.csv, "reader", reader)
    with pytest.raises(UserError, match=r"steps\.csv line 3: expected 2 numbers, received ''"):
        log.read_table(path)
    assert len(seen) <= 4


def test_rows_that_parquet_keeps_once(tmp_path, monkeypatch):
    """Millions of equal rows are some kilobytes."""
    table = {"query": [1] * 100_000, "label": [1.0] * 100_000, "a": [1.0] * 100_000}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    monkeypatch.setattr(reading, "MOST", 11_900_000)
    with pytest.raises(UserError, match=r"a\.parquet: 100,000 rows need 0\.0 GB of memory"):
        ranker.read(RankerData(root=str(tmp_path / "a.parquet")))
