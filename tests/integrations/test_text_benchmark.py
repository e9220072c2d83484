"""The comparison of losses on texts, with a tiny model and invented texts: every loss runs, the table says all."""

import json
import sys

import pytest

pytest.importorskip("sentence_transformers", reason="pip install 'rankgrad[sentence-transformers]'")

from benchmarks import text

import texts


def test_every_method_is_tried_as_often():
    for grid in (text.CLASSES, text.GRADED):
        assert len({len(settings) for settings in grid}) == 1
        assert all(len({one.method for one in settings}) == 1 for settings in grid)
        assert all(len(set(settings)) == len(settings) for settings in grid)


def test_the_table(tmp_path, monkeypatch, capsys):
    texts.bi_encoder(tmp_path / "bert").save(str(tmp_path / "model"))
    banking, sts = tmp_path / "banking77", tmp_path / "stsb"
    banking.mkdir(), sts.mkdir()
    for seed, part in enumerate(("train", "test")):
        rows = [f"{words},intent{i % 77}" for i, words in enumerate(texts.sentences(77 * 5, seed))]
        (banking / f"{part}.csv").write_text("\n".join(["text,category", *rows]))
    for seed, part in enumerate(("train", "dev", "test")):
        pairs = zip(texts.sentences(70, 2 * seed), texts.sentences(70, 2 * seed + 1), strict=True)
        rows = ["\t".join(["genre", "file", "year", "0", f"{i % 6}", *pair]) for i, pair in enumerate(pairs)]
        (sts / f"sts-{part}.csv").write_text("\n".join(rows))
    options = ["--model", str(tmp_path / "model"), "--banking77", str(banking), "--stsb", str(sts)]
    options += ["--out", str(tmp_path / "out"), "--workers", "1", "--seconds", "0", "--steps", "2", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", ["text.py", *options])
    monkeypatch.setattr(text, "CLASSES", [settings[:1] for settings in text.CLASSES])
    monkeypatch.setattr(text, "GRADED", [settings[:1] for settings in text.GRADED])
    monkeypatch.setattr(text, "ProcessPoolExecutor", Here)
    text.main()
    written = (tmp_path / "out" / "table.md").read_text()
    assert written.strip() in capsys.readouterr().out
    methods = [settings[0].method for grid in (text.CLASSES, text.GRADED) for settings in grid]
    assert [line.split(" | ")[0][2:] for line in written.splitlines() if "±" in line and line[0] == "|"] == methods
    assert "of 1 tried" in written and written.count("| none |") == 2
    assert json.loads((tmp_path / "out" / "runs.json").read_text())["finals"].keys() == set(methods)


class Here:
    """A pool that runs everything in this process, at once."""

    def __init__(self, workers, context, initializer, arguments):
        initializer(*arguments)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, **kwargs):
        from concurrent.futures import Future

        done = Future()
        done.set_result(function(**kwargs))
        return done
