"""Files of queries: formats, splits, and faults told with their line."""

import numpy as np
import pytest
import torch

from rankgrad.lab.ranker import data, model
from rankgrad.lab.ranker.config import Data
from rankgrad.lab.training import reading
from rankgrad.lab.training.errors import UserError

LETOR = """# a comment
2 qid:7 1:0.5 3:1.5 # docid = a
0 qid:7 2:-1e-2

1 qid:3 1:1 2:2 3:3
0 qid:7 3:4
"""


def read(root, **settings):
    return data.read(Data(root=str(root), **settings))


def whole(split):
    """All queries of a split, by name: grades and features."""
    found = {}
    for part in (split.train, split.validation, split.test):
        for number, name in enumerate(part.ids):
            assert name not in found
            rows = part.groups == number
            found[name] = (part.grades[rows].tolist(), part.features[rows].tolist())
    return found


def three(text):
    """The same queries three times under other names, so that there is something to split."""
    return text + text.replace("qid:7", "qid:8").replace("qid:3", "qid:4")


def test_svmlight(tmp_path):
    (tmp_path / "a.txt").write_text(three(LETOR))
    split = read(tmp_path / "a.txt")
    assert split.names == ["1", "2", "3"]
    found = whole(split)
    assert set(found) == {"7", "3", "8", "4"}
    assert found["7"][0] == [2, 0, 0]
    assert np.allclose(found["7"][1], [[0.5, 0, 1.5], [0, -0.01, 0], [0, 0, 4]])
    assert found["3"] == ([1], [[1, 2, 3]])


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_tables(tmp_path, ending):
    import pyarrow
    from pyarrow import csv, parquet

    columns = {"q": ["b", "a", "b", "c", "d"], "y": [0, 1, 2.5, 1, 1], "f": [1, 2, 3, 4, 5], "g": [0.5] * 5}
    table = pyarrow.table({**columns, "title": ["x", "y", "z", "", "w"]})
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        parquet.write_table(table, path)
    else:
        csv.write_csv(table, path, csv.WriteOptions(delimiter="," if ending == "csv" else "\t"))
    split = read(path, query="q", label="y", ignore=["title"])
    assert split.names == ["f", "g"]
    assert whole(split)["b"] == ([0, 2.5], [[1, 0.5], [3, 0.5]])
    assert read(path, query="q", label="y", features=["g"]).names == ["g"]
    with pytest.raises(
        UserError, match=r"a\.\w+, (line 2|row 1), column title: expected a number, received 'x'; "
    ):
        read(path, query="q", label="y")


def test_files_of_parts(tmp_path):
    """The union of numbered features, in the order of their numbers; each part keeps its queries."""
    (tmp_path / "train.txt").write_text("1 qid:1 2:5\n0 qid:1 10:6\n")
    (tmp_path / "vali.txt").write_text("1 qid:1 3:7\n0 qid:1\n")
    (tmp_path / "test.txt").write_text("1 qid:2 2:1\n0 qid:2\n")
    (tmp_path / "notes.md").write_text("")
    split = read(tmp_path)
    assert split.names == [str(number) for number in range(2, 11)]
    assert split.train.features.tolist() == [[5] + [0] * 8, [0] * 8 + [6]]
    assert split.validation.features[0].tolist() == [0, 7] + [0] * 7
    (tmp_path / "test.txt").unlink()
    with pytest.raises(UserError, match="expected 2 queries at least, to train on and to split off for test; fou"):
        read(tmp_path)
    (tmp_path / "train.csv").write_text("query,label,f\n1,1,1\n")
    with pytest.raises(UserError, match=r"expected one file to train, found .*train\.csv and .*train\.txt"):
        read(tmp_path)


def test_splits_are_by_queries_and_by_seed(tmp_path):
    lines = [f"{row % 2} qid:{query} 1:{query}" for row in range(4) for query in range(50)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    split = read(tmp_path / "a.txt", test_share=0.3, validation_share=0.1)
    assert [len(part) for part in (split.train, split.validation, split.test)] == [30, 5, 15]
    assert len(whole(split)) == 50
    for part in (split.train, split.validation, split.test):
        assert part.features[:, 0].tolist() == [float(part.ids[g]) for g in part.groups.tolist()]
        assert part.sizes.tolist() == [4] * len(part)
    again = read(tmp_path / "a.txt", test_share=0.3, validation_share=0.1)
    other = read(tmp_path / "a.txt", test_share=0.3, validation_share=0.1, split_seed=1)
    assert again.test.ids == split.test.ids != other.test.ids


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 qid:1 1:2\nbad qid:1 1:2\n", "line 2: expected a grade, received 'bad'"),
        ("1 qid:1 1:2\n-1 qid:1 1:2\n", "line 2: expected a grade from 0 to 100, received -1"),
        ("1 qid:1 1:2\n1e30 qid:1 1:2\n", "line 2: expected a grade from 0 to 100, received 1e+30"),
        ("# x\n\nnan qid:1 1:2\n", "line 3: expected a grade, received nan"),
        ("1 qid:1 1:2\n1 1:2\n", "line 2: expected qid:NUMBER after the grade, received '1:2'"),
        ("1 qid:x 1:2\n", "line 1: expected qid:NUMBER after the grade, received 'qid:x'"),
        ("1 qid:1 1:2 2:nan\n", "line 1: expected a finite value of feature 2, received 'nan'"),
        ("1 qid:1 1:2 2:inf\n", "line 1: expected a finite value of feature 2, received 'inf'"),
        ("1 qid:1 1:2\n1 qid:1 a:2\n", "line 2: expected FEATURE:VALUE, received 'a:2'"),
        ("1 qid:1 1:x\n", "line 1: expected FEATURE:VALUE, received '1:x'"),
        ("1 qid:1 2:1 1:2\n", "line 1: expected features in ascending order, received 1 after 2"),
        ("1\n", "line 1: expected qid:NUMBER after the grade, received ''"),
    ],
)
def test_wrong_svmlight(tmp_path, text, message):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(UserError) as caught:
        read(tmp_path / "a.txt")
    assert str(caught.value) == f"{tmp_path / 'a.txt'}, {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("query,grade,f\n1,1,1\n", "data.label: no column 'label' in FILE; there are f, grade, query"),
        ("quary,label,f\n1,1,1\n", "data.query: no column 'query' in FILE, did you mean 'quary'?"),
        ("query,label,f\n1,1,1\n1,good,1\n", "FILE, line 3, column label: expected a grade, received 'good'"),
        (
            "query,label,f\n1,1,1\n1,-2,1\n",
            "FILE, line 3, column label: expected a grade from 0 to 100, received -2",
        ),
        (
            "query,label,f\n1,1,1\n1,101,1\n",
            "FILE, line 3, column label: expected a grade from 0 to 100, received 101",
        ),
        ("query,label,f\n1,1,1\n1,,1\n", "FILE, line 3, column label: expected a number, it is empty"),
        (
            "query,label,f\n1,1,1\n,1,1\n",
            "FILE, line 3, column query: expected the query of this row, it is empty",
        ),
        ("query,label,f\n1,1,\n", "FILE, line 2, column f: expected a number, it is empty"),
        ("query,label,f\n1,1,2\n1,1,nan\n", "FILE, line 3, column f: expected a finite number, received nan"),
        ("query,label,f\n1,1,2\n1,1,inf\n", "FILE, line 3, column f: expected a finite number, received inf"),
        ("query,label,f\n1,1,1\n1,1\n", "FILE: CSV parse error: Row #3: Expected 3 columns, got 2: 1,1"),
        ("query,label,f,f\n1,1,1,1\n", "FILE: expected columns of different names, f is there twice"),
        ("query,label\n1,1\n", "FILE: expected features, found none"),
        ("query,label,f\n", "FILE: expected queries, found no rows"),
        ("", "FILE: Empty CSV file"),
        (
            "query,label,f\n1,1,1\n",
            "--data: expected 3 queries at least, to train on and to split off for test and",
        ),
    ],
)
def test_wrong_tables(tmp_path, text, message):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value).startswith(message.replace("FILE", str(path)))


def test_wrong_files(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="a ranker needs data"):
        data.read(Data())
    with pytest.raises(UserError, match="no such file or folder"):
        read(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"no file train\.\* in"):
        read(tmp_path)
    (tmp_path / "a.docx").write_text("")
    with pytest.raises(UserError, match=r"unknown ending of .*a\.docx"):
        read(tmp_path / "a.docx")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match=r"a\.txt"):
        read(tmp_path / "a.txt")
    (tmp_path / "a.parquet").write_text("hello")
    with pytest.raises(UserError, match=r"a\.parquet: "):
        read(tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("1 qid:1 1:1 50:1\n" * 3)
    monkeypatch.setattr(reading, "MOST", 100)
    with pytest.raises(UserError, match=r"b\.txt: 3 rows of 50 dense features need .* GB of memory"):
        read(tmp_path / "b.txt")


def test_scaling():
    features = torch.tensor([[1.0, 5.0, 100.0], [3.0, 5.0, 0.0], [2.0, 5.0, 50.0], [8.0, 5.0, 50.0]])
    queries = data.Queries(features, torch.zeros(4), torch.tensor([0, 0, 1, 1]), ["a", "b"])
    scaled = model.within_query(queries).features
    assert scaled.tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0], [1, 0, 0]]
    seen = []
    for scale in ("feature", "log", "none"):
        network = model.build(3, model.Model(hidden=(), scale=scale), 0)
        network.layers = torch.nn.Sequential(torch.nn.Identity())
        if scale != "none":
            network.fit_scale(features)
        network.layers.register_forward_hook(lambda module, given, out: seen.append(out) or out[:, :1])
        network(features)
    values = features[:, [0, 2]]
    for found, wanted in zip(seen, (values, values.log1p()), strict=False):
        assert torch.allclose(found[:, [0, 2]].mean(0), torch.zeros(2), atol=1e-6)
        assert torch.allclose(found[:, [0, 2]], (wanted - wanted.mean(0)) / wanted.std(0, correction=0), atol=1e-5)
        assert not found[:, 1].any()  # it never changes
    assert torch.equal(seen[2], features)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_queries_are_told_apart_by_their_text(tmp_path, ending):
    """Not as the numbers that they look like, nor without the end that NumPy's texts cannot hold."""
    import pyarrow
    from pyarrow import parquet

    queries = ["7", "07", "007", "12345678901234567890", "12345678901234567891", "a", "a\0", "1e3", "1000"]
    path = tmp_path / f"a.{ending}"
    if ending == "csv":
        path.write_text("query,label,f\n" + "".join(f"{query},1,0\n{query},0,1\n" for query in queries))
    else:
        rows = {"query": [query for query in queries for _ in range(2)], "label": [1, 0] * 9, "f": [0, 1] * 9}
        parquet.write_table(pyarrow.table(rows), path)
    assert {name: grades for name, (grades, _) in whole(read(path)).items()} == {key: [1, 0] for key in queries}


def test_names_of_columns_that_are_no_utf8(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"query,label,f\xff\n1,1,1\n")
    with pytest.raises(UserError, match=r"a\.csv: .*can't decode byte 0xff"):
        read(tmp_path / "a.csv")
