"""Files that figures are drawn from: broken, hostile or of another kind, told in one line that names them."""

import io
import json
import zipfile

import numpy as np
import pytest
import torch

from rankgrad.lab.figures import batch_bias
from rankgrad.lab.training import reading

from runs import cli


def figure(name, option, path):
    code = cli("figure", name, option, path, "--out", path.parent / "out")
    assert isinstance(code, str) and code.startswith("rankgrad: ") and code.isprintable()
    assert str(path) in code
    return code


def npz(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


GOOD = np.eye(40, 8, dtype=np.float32)
LABELS = np.arange(40) // 4


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"embeddings": GOOD}, "expected `embeddings` and `labels` (or `names`) in"),
        ({"embeddings": GOOD[0], "labels": LABELS}, "`embeddings` [N, dim], received float32 of shape [8]"),
        ({"embeddings": GOOD.astype(float) * 1e300, "labels": LABELS}, "expected finite `embeddings`"),
        ({"embeddings": GOOD.astype(str), "labels": LABELS}, "expected finite `embeddings`"),
        ({"embeddings": GOOD * np.nan, "labels": LABELS}, "expected finite `embeddings`"),
        ({"embeddings": GOOD, "labels": LABELS[:-1]}, "expected `labels` of 40 items, received [39]"),
        ({"embeddings": GOOD, "names": np.array("a/b")}, "expected `names` of 40 items, received []"),
        ({"embeddings": np.zeros((2**17 + 1, 1)), "labels": np.zeros(2**17 + 1)}, "expected up to 131,072 items"),
    ],
)  # fmt: skip
def test_embeddings_of_another_kind(tmp_path, arrays, message):
    code = figure("batch-bias", "--embeddings", npz(tmp_path / "a.npz", **arrays))
    assert message in code


def test_broken_embeddings(tmp_path):
    whole = npz(tmp_path / "whole.npz", embeddings=GOOD, labels=LABELS).read_bytes()
    path = tmp_path / "a.npz"
    objects = io.BytesIO()
    np.savez(objects, embeddings=np.array([{}], dtype=object), labels=LABELS)
    for content in (b"", b"x", whole[:100], whole[:-30], whole[:70] + b"xxxx" + whole[74:], objects.getvalue()):
        path.write_bytes(content)
        assert "expected an .npz of arrays (" in figure("batch-bias", "--embeddings", path)


def test_embeddings_that_are_zeros(tmp_path, monkeypatch):
    """Gigabytes of zeros take kilobytes in a file."""
    path = npz(tmp_path / "a.npz", embeddings=np.zeros((10_000, 100)), labels=np.zeros(10_000))
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(reading, "MOST", 20_000_000)
    assert "its arrays need 0.0 GB of memory" in figure("batch-bias", "--embeddings", path)


def test_a_zip_without_arrays(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("embeddings.npy", b"no array")
        file.writestr("labels.npy", b"no array")
    figure("batch-bias", "--embeddings", tmp_path / "a.npz")


def test_nothing_to_find(tmp_path):
    path = npz(tmp_path / "a.npz", embeddings=GOOD, labels=np.arange(40))
    assert cli("figure", "batch-bias", "--embeddings", path) == (
        "rankgrad: no two items of a.npz have the same label: there is nothing to find"
    )


def test_scores_are_computed_some_at_a_time(monkeypatch):
    embeddings, labels = torch.randn(100, 4), torch.arange(100) % 7
    together = batch_bias.whole(embeddings, labels)
    seen, inner = [], batch_bias.retrieval_pairs

    def pairs(*given):
        found = inner(*given)
        seen.append(found[0].numel())
        return found

    monkeypatch.setattr(batch_bias, "retrieval_pairs", pairs)
    monkeypatch.setattr(batch_bias, "_CHUNK", 900)
    assert batch_bias.whole(embeddings, labels) == pytest.approx(together, rel=1e-6)
    assert max(seen) == 900 and sum(seen) == 10_000


POINT = {"n": 10, "seconds": 0.1, "note": ""}
CURVE = {"name": "ap", "label": "AP", "exponent": 1.0, "points": [POINT]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "invalid JSON"),
        (b"\xff", "invalid JSON"),
        (b"[]", "input should be an object"),
        (b'{"devices": 3}', "devices: input should be"),
        (b'{"devices": {"cpu": {}}}', "devices.cpu.machine: field required"),
        ([{**CURVE, "name": "nothing"}], "devices.cpu.curves.0.name: name: unknown value 'nothing'"),
        ([{**CURVE, "exponent": float("nan")}], "devices.cpu.curves.0.exponent: input should be a finite number"),
        ([{**CURVE, "points": []}], "devices.cpu.curves.0.points: list should have at least 1 item"),
        ([{**CURVE, "points": [{**POINT, "seconds": float("inf")}]}], "points.0.seconds: input should be"),
        ([{**CURVE, "points": [{**POINT, "n": 0}]}], "points.0.n: input should be greater"),
    ],
)  # fmt: skip
def test_numbers_of_another_kind(tmp_path, content, message):
    path = tmp_path / "complexity.json"
    if not isinstance(content, bytes):
        content = json.dumps({"devices": {"cpu": {"machine": "here", "curves": content}}}).encode()
    path.write_bytes(content)
    assert message in figure("complexity", "--results", path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"| ap | 1.2.3 | 1 | 2 |", "could not convert string to float: '1.2.3'"),
        (b"| ap | 1 | 1 | many |", "invalid literal for int"),
        (b"| ap\xff | 1 | 1 | 2 |", "line 3: expected UTF-8"),
    ],
)
def test_tables_of_another_kind(tmp_path, row, message):
    path = tmp_path / "a.md"
    path.write_bytes(b"| loss | best R@1 | last R@1 | epochs |\n|---|---|---|---|\n" + row)
    assert message in figure("ablations", "--results", path)


QUERY = {"name": "q", "class": "c", "rank": 1, "nearest": []}


def test_devices_are_no_tables(tmp_path):
    """/dev/zero has no end: pytest's timeout ends a test that reads it."""
    assert cli("figure", "ablations", "--results", "/dev/zero") == (
        "rankgrad: --results: /dev/zero: expected a file, found a device"
    )
    assert "no numbers of" in cli("figure", "complexity", "--results", "/dev/zero")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{**QUERY, "text": "a"}], "expected a run of images"),
        ([{**QUERY, "image": "data:,eA=="}], "an image in examples.json is broken"),
        ([{}], "examples.0.name: field required"),
        (3, "examples: input should be a valid array"),
    ],
)  # fmt: skip
def test_examples_of_another_kind(tmp_path, content, message):
    (tmp_path / "examples.json").write_text(json.dumps({"examples": content, "hardest": []}))
    assert message in cli("figure", "retrieval-examples", "--run", tmp_path, "--out", tmp_path / "out")
