"""Files that were damaged: cut off, bits flipped, bytes put in, other encodings, other sizes. A command that reads
them works, or ends in one line.

``RANKGRAD_FUZZ_FILES`` says how many mutants of each file (12 in ``make test``), ``RANKGRAD_FUZZ_SEED`` which.
"""

import os
import random
import shutil
import zlib
from contextlib import suppress

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import csv as pyarrow_csv
from pyarrow import parquet

import text_files
from rankgrad.lab.cli import main
from rankgrad.lab.detection import data as detection
from rankgrad.lab.detection.config import Data as DetectionData
from rankgrad.lab.detection.task import SceneSource
from rankgrad.lab.figures import batch_bias
from rankgrad.lab.ranker import data as ranker
from rankgrad.lab.ranker.config import Data as RankerData
from rankgrad.lab.recipes import run
from rankgrad.lab.retrieval.images import data as retrieval
from rankgrad.lab.retrieval.images.config import Data, View
from rankgrad.lab.retrieval.images.source import ImageSource
from rankgrad.lab.text import data as texts
from rankgrad.lab.text.config import Data as TextData
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.use import index

import images
import scenes

MUTANTS = int(os.environ.get("RANKGRAD_FUZZ_FILES", "12"))
SEED = int(os.environ.get("RANKGRAD_FUZZ_SEED", "0"))
CPU = torch.device("cpu")
INSERTED = [
    b"\x00",
    b"\xff\xfe",
    b"\n",
    b",",
    b"{",
    b"[[[[",
    b"*a",
    b"&a ",
    b"1e999",
    b"nan",
    b"-1",
    b"9" * 400,
    b"../",
    b"\x1b[2J",
]


def mutated(content, draw):
    """One to three faults."""
    content = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        kind = draw.randrange(7)
        at = draw.randrange(len(content)) if content else 0
        if kind == 0:
            del content[at:]
        elif kind == 1 and content:
            content[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            content[at:at] = draw.choice(INSERTED)
        elif kind == 3:
            del content[at : at + draw.randint(1, 20)]
        elif kind == 4:
            content += content[at:]
        elif kind == 5:
            digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
            if digits:
                place = draw.choice(digits)
                content[place : place + 1] = draw.choice([b"99999999999", b"0", b"-3", b"x", b"1e400"])
        else:
            try:
                content = bytearray(
                    content.decode().encode(draw.choice(["utf-16", "utf-32", "utf-8-sig", "cp037"]))
                )
            except UnicodeError:
                continue
    return bytes(content)


def seeds(name):
    return [(n, random.Random(zlib.crc32(f"{SEED} {name} {n}".encode()))) for n in range(MUTANTS)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    settings = ["epochs=1", "save_minutes=0", "device=cpu"]
    return run.run("digits", settings, out=str(tmp_path_factory.mktemp("runs") / "a"))[0]


def ends_in_a_line(*arguments):
    """Run a command: it succeeds or shows one message; every other exception is a fault of ours."""
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    code = caught.value.code
    assert code == 0 or (isinstance(code, str) and code.startswith("rankgrad: ")), code
    assert code == 0 or (len(code) < 3000 and code.isprintable())
    return code


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "machine.json", "result.json", "steps.csv", "evaluations.csv", "examples.json", "data.json"],
)
def test_reports_of_damaged_runs(trained, tmp_path, name):
    copy = shutil.copytree(trained, tmp_path / "run")
    whole = (trained / name).read_bytes()
    for _, draw in seeds(name):
        (copy / name).write_bytes(mutated(whole, draw))
        ends_in_a_line("report", copy)


@pytest.mark.parametrize("name", ["state.pt", "config.yaml", "machine.json", "steps.csv", "evaluations.csv"])
def test_damaged_runs_that_go_on(trained, tmp_path, name):
    """A damaged state is never used: the message names it."""
    for number, draw in seeds(f"resume {name}")[: max(3, MUTANTS // 4)]:
        copy = shutil.copytree(trained, tmp_path / f"{number}")
        whole = (trained / name).read_bytes()
        (copy / name).write_bytes(mutated(whole, draw))
        code = ends_in_a_line("train", copy, "--resume")
        if name == "state.pt" and (copy / name).read_bytes() != whole:
            assert f"{copy}/state.pt is damaged" in str(code)


def test_damaged_checkpoints(trained, tmp_path):
    whole = (trained / "best.safetensors").read_bytes()
    for _, draw in seeds("weights"):
        (tmp_path / "a.safetensors").write_bytes(changed := mutated(whole, draw))
        code = ends_in_a_line("eval", tmp_path / "a.safetensors")
        assert changed == whole or "a.safetensors" in str(code)


def read_retrieval(config):
    view = View(resize=16, crop=12, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    splits = retrieval.read(config)
    for items in (splits.train, splits.query, splits.gallery):
        if items is not None:
            ImageSource(items, config, view, CPU)


@pytest.mark.parametrize(
    ("name", "make", "place"),
    [
        ("cub", images.cub_set, "CUB_200_2011/images.txt"),
        ("cub", images.cub_set, "CUB_200_2011/image_class_labels.txt"),
        ("sop", images.sop_set, "Stanford_Online_Products/Ebay_train.txt"),
        ("inshop", images.inshop_set, "Eval/list_eval_partition.txt"),
        ("folder", images.folder_set, "class0/0.png"),
        ("cub", images.cub_set, "CUB_200_2011/images/001.Bird/Bird_0.jpg"),
        ("sop", images.sop_set, "Stanford_Online_Products/kind1_final/1_0.JPG"),
    ],
)
def test_damaged_retrieval_data(tmp_path, name, make, place):
    root = make(tmp_path / "data")
    counts = {} if name == "folder" else {"counts": "any"}
    config = Data(name=name, root=str(root), workers=2, **counts)
    read_retrieval(config)
    whole = (root / place).read_bytes()
    for _, draw in seeds(place):
        (root / place).write_bytes(mutated(whole, draw))
        with suppress(UserError):
            read_retrieval(config)


@pytest.mark.parametrize(
    "place",
    ["Annotations/000001.xml", "ImageSets/Main/trainval.txt", "JPEGImages/000001.jpg", "JPEGImages/000002.jpg"],
)
def test_damaged_detection_data(tmp_path, place):
    root = scenes.voc_set(tmp_path)
    config = DetectionData(name="voc", root=str(root), workers=2)
    whole = (root / place).read_bytes()
    for _, draw in seeds(place):
        (root / place).write_bytes(mutated(whole, draw))
        with suppress(UserError):
            made = detection.read(config)
            for part in (made.train, made.test):
                SceneSource(part, config, 1000, CPU, lambda done: None)


LETOR = "".join(f"{row % 3} qid:{query} 1:{row / 7:.3f} 3:-2\n" for query in range(6) for row in range(4))


@pytest.mark.parametrize("ending", ["txt", "csv", "tsv", "parquet"])
def test_damaged_queries(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    if ending == "txt":
        path.write_text(LETOR)
    else:
        columns = {"query": [f"q{n // 4}" for n in range(24)], "label": [n % 3 for n in range(24)]}
        table = pyarrow.table({**columns, "f": [n / 7 for n in range(24)]})
        if ending == "parquet":
            parquet.write_table(table, path)
        else:
            options = pyarrow_csv.WriteOptions(delimiter="\t" if ending == "tsv" else ",")
            pyarrow_csv.write_csv(table, path, options)
    config = RankerData(root=str(path))
    ranker.read(config)
    whole = path.read_bytes()
    for _, draw in seeds(path.name):
        path.write_bytes(mutated(whole, draw))
        with suppress(UserError):
            ranker.read(config)


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
@pytest.mark.parametrize("make", [text_files.labelled, text_files.pairs, text_files.graded])
def test_damaged_texts(tmp_path, make, ending):
    path = make(tmp_path / f"a.{ending}")
    config = TextData(root=str(path))

    def read():
        kind = texts.kind_of(config)
        return texts.read_graded(config) if kind == "graded" else texts.read(config, kind)

    read()
    whole = path.read_bytes()
    for _, draw in seeds(f"{make.__name__} {path.name}"):
        path.write_bytes(mutated(whole, draw))
        with suppress(UserError):
            read()


@pytest.mark.parametrize("compressed", [True, False])
def test_damaged_embeddings(tmp_path, compressed):
    path = tmp_path / "a.npz"
    save = np.savez_compressed if compressed else np.savez
    save(path, embeddings=np.eye(12, 4), labels=np.arange(12) // 3, names=np.array(["a/b"] * 12))
    batch_bias._from_file(path)
    whole = path.read_bytes()
    for _, draw in seeds(f"npz {compressed}"):
        path.write_bytes(mutated(whole, draw))
        with suppress(UserError):
            batch_bias._from_file(path)


@pytest.mark.parametrize("name", ["a.index", "a.index.json"])
def test_damaged_indices(trained, tmp_path, name):
    rows = np.eye(40, 16, dtype=np.float32)
    index.write(tmp_path / "a.index", rows, [f"{n}.png" for n in range(40)], trained / "best.safetensors", "image")
    index.read(tmp_path / "a.index").nearest(rows, 3)
    whole = (tmp_path / name).read_bytes()
    for _, draw in seeds(name):
        (tmp_path / name).write_bytes(changed := mutated(whole, draw))
        with suppress(UserError):
            index.read(tmp_path / "a.index").nearest(rows, 3)
            assert name != "a.index" or changed == whole


WORDS = [
    "0",
    "-1",
    "1e400",
    "nan",
    "null",
    "[]",
    "{}",
    "[1, 2]",
    "x",
    "true",
    "9" * 30,
    "1e-300",
    "''",
    "2020-13-45",
    "*a",
    "0x" + "f" * 99,
]
KEYS = [
    "seed", "epochs", "lr", "batch.size", "per_class", "embedding", "resize", "crop", "lam",
    "window", "margin", "memory", "weights", "backbone", "data.name", "data.root", "data.workers",
    "data.cache", "loss", "loss.name", "loss.weight", "optim", "milestones", "precision", "device",
    "save_minutes", "evaluate_every", "recall_at", "view.mean", "miner", "task", "test_share",
    "split_seed", "compile", "clip", "warmup", "target", "nothing",
]  # fmt: skip


@pytest.mark.parametrize("number", range(max(1, MUTANTS // 4)))
def test_settings(tmp_path, monkeypatch, number):
    """Random settings: the command says which is wrong, or trains a step."""
    from rankgrad.lab.training.loop import Trainer

    monkeypatch.setattr(Trainer, "_total", property(lambda self: 1))  # one step is enough
    draw = random.Random(zlib.crc32(f"{SEED} settings {number}".encode()))
    for n in range(8):
        given = [f"{draw.choice(KEYS)}={draw.choice(WORDS)}" for _ in range(draw.randint(1, 2))]
        ends_in_a_line(
            "train", "digits", "evaluate_first=false", "epochs=1", *given, "--out", tmp_path / f"{number} {n}"
        )
