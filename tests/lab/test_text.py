"""The task text: the same sampler, loss, evaluation and report as for images, on three kinds of files."""

import json
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers")

import text_files as texts
from rankgrad.lab import recipes
from rankgrad.lab.recipes import run
from rankgrad.lab.text import data, graded
from rankgrad.lab.text.config import Data
from rankgrad.lab.text.model import TextEmbedder
from rankgrad.lab.text.task import AUTO, TextTask
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.named import Named
from rankgrad.lab.use import exporting, load
from rankgrad.metrics import ndcg

from runs import cli, rows, same_weights, stop_after

SMALL = ["epochs=2", "batch.size=16", "per_class=4", "device=cpu", "lr=2e-3", "save_minutes=0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return texts.tiny_model(tmp_path_factory.mktemp("model"))


MAKE = {"labels": texts.labelled, "pairs": texts.pairs, "graded": texts.graded}


@pytest.mark.parametrize("kind", list(MAKE))
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_files(tmp_path, kind, suffix):
    path = MAKE[kind](tmp_path / f"data{suffix}")
    settings = Data(root=str(path))
    assert data.kind_of(settings) == kind
    if kind == "graded":
        train, test = data.read_graded(settings)
        assert (len(train.queries), len(test.queries), len(test.documents)) == (16, 4, 16)
        assert not set(train.queries) & set(test.queries)
        return
    splits = data.read(settings, kind)
    if kind == "labels":
        assert (splits.train.classes(), splits.query.classes(), splits.gallery) == (4, 4, None)
        assert not set(splits.train.sources) & set(splits.query.sources)
        return
    assert (len(splits.train), len(splits.query), len(splits.gallery)) == (64, 8, 8)
    assert all(text.endswith("anchor") for text in splits.query.sources)
    assert sorted(splits.query.labels.tolist()) == sorted(splits.gallery.labels.tolist())


def test_pairs_that_share_a_text_belong_together(tmp_path):
    linked = [("a", "b"), ("c", "b"), ("d", "e"), ("f", "g")]
    (items, anchors, _) = data._paired([list(column) for column in zip(*linked, strict=True)])
    label = dict(zip(items.sources, items.labels.tolist(), strict=True))
    assert label["a"] == label["b"] == label["c"] and len(set(label.values())) == 3
    assert list(anchors.sources) == ["a", "c", "d", "f"]
    assert len(data._paired([["a", "b"], ["b", "c"]])) == 1  # b would find itself: all search each other


def test_the_loss_of_auto(tmp_path):
    """What is given with it counts; lambda in place of all that goes with a window."""
    given = [f"data.root={texts.labelled(tmp_path / 'data.csv')}"]
    for more, expected in (
        ([], AUTO),
        (["loss.window=0.2"], AUTO | {"window": 0.2}),
        (["loss.lam=0.3"], {"lam": 0.3}),
    ):
        loss = TextTask.completed(recipes.load("text", [*given, *more])[1]).loss
        assert (loss.name, loss.arguments()) == ("ap", expected)


@pytest.mark.parametrize("kind", list(MAKE))
def test_a_run_and_its_report(tmp_path, kind, model, capsys):
    path = MAKE[kind](tmp_path / "data.csv")
    out = tmp_path / "run"
    assert cli("train", "text", "--data", path, f"model={model}", *SMALL, "epochs=6", "--out", out) == 0
    said = capsys.readouterr().out
    assert {"labels": "trains on 32 texts of 4 classes, tests on 32 texts of 4 classes",
            "pairs": "which search 8 texts",
            "graded": "4 queries that search 16 documents"}[kind] in said  # fmt: skip
    assert ("batches of 8 pairs" in said) == (kind == "pairs")  # whatever per_class is
    before, *_, after = rows(out, "evaluations")
    headline = "NDCG@10" if kind == "graded" else "R@1"
    assert headline in before and (kind != "labels" or float(after["mAP@R"]) > float(before["mAP@R"]))
    loss = [float(row["loss"]) for row in rows(out)]
    assert sum(loss[-4:]) < sum(loss[:4])
    page = (out / "report.html").read_text()
    assert "this run, before training" in page and 'class="text"' in page and "spread of the embeddings" in page
    examples = json.loads((out / "examples.json").read_text())
    assert any(item["right"] for example in examples["examples"] for item in example["nearest"])
    assert cli("eval", out / "best.safetensors") == 0
    best = json.loads((out / "result.json").read_text())["best"]
    assert f"{headline} {best[headline]:.1f}" in capsys.readouterr().out


def test_the_trained_model_is_there_for_sentence_transformers(tmp_path, model):
    from sentence_transformers import SentenceTransformer

    path = texts.labelled(tmp_path / "data.csv")
    folder, _ = run.run("text", [f"data.root={path}", f"model={model}", *SMALL], out=str(tmp_path / "run"))
    trained, start = SentenceTransformer(str(folder / "model"), device="cpu"), SentenceTransformer(str(model))
    embedded = [torch.tensor(one.encode(["word1 word2"])) for one in (trained, start)]
    assert not torch.allclose(*embedded, atol=1e-3)
    task, best = recipes.of_checkpoint(folder / "best.safetensors")
    network = task.rebuild(best).eval()
    torch.testing.assert_close(network(["word1 word2"]), embedded[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", list(MAKE))
def test_resume_is_exact(tmp_path, monkeypatch, kind, model):
    path = MAKE[kind](tmp_path / "data.csv")
    settings = [f"data.root={path}", f"model={model}", *SMALL]
    whole, _ = run.run("text", settings, out=str(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            run.run("text", settings, out=str(tmp_path / "cut"))
    cut, _ = run.run("text", settings, out=str(tmp_path / "cut"), resume=True)
    assert len(rows(whole)) > 3 and rows(cut) == rows(whole)
    assert rows(cut, "evaluations") == rows(whole, "evaluations")
    assert same_weights(cut / "last.safetensors", whole / "last.safetensors")


def judged(query, document, grade):
    return data.Judgements(["p", "q"], ["x", "y", "z"], *map(torch.tensor, (query, document, grade)))


def test_grades_are_looked_up():
    lists = judged([0, 1, 1], [2, 0, 2], [1.0, 2.0, 3.0])
    found = lists.grades(torch.tensor([1, 0]), torch.tensor([0, 1, 2, 0]))
    assert found.tolist() == [[2, 0, 3, 2], [0, 0, 1, 0]]
    assert lists.take(torch.tensor([1])).documents == ["x", "z"]


def test_the_graded_loss_ranks_the_documents_of_a_batch():
    lists = judged([0, 1, 1], [2, 0, 2], [1.0, 2.0, 3.0])
    # Both queries have their document last; a loss that is 0 would have no gradient.
    embeddings = torch.tensor([[1.0, 0, 0], [0, 1, 0], [-1, -1, 1], [0, 0.1, 1], [-1, -1, 1], [1, 1, 0]])
    embeddings.requires_grad_()
    ids = torch.tensor([0, 1, 2, 0, 2, 1])  # two queries, documents z x z y: z is there twice
    loss = graded.GradedLoss(Named(name="ndcg", lam=10.0, margin=0.0), lists, 2)
    found = loss(embeddings, ids, ids)
    unit = torch.nn.functional.normalize(embeddings.detach(), dim=1)
    scores = unit[:2] @ unit[[2, 3, 5]].T
    expected = 1 - ndcg(scores, torch.tensor([[1.0, 0, 0], [3, 2, 0]]))
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    found.backward()
    assert embeddings.grad[[0, 1, 2, 3]].abs().sum() > 0 and not embeddings.grad[4].any()


def test_measures_of_graded_lists():
    """Against the library's metrics on the whole matrix."""
    lists = data.Judgements(
        ["p", "q", "r"],
        ["x", "y", "z"],
        torch.tensor([0, 1, 1, 2]),
        torch.tensor([2, 0, 2, 1]),
        torch.tensor([1.0, 2.0, 3.0, 0.0]),
    )
    queries, documents = torch.randn(3, 4), torch.randn(3, 4)
    metrics, summary = graded.measure(queries, documents, lists, (1, 2), at_once=2)
    scores = torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(documents).T
    grades = torch.tensor([[0.0, 0, 1], [2, 0, 3], [0, 0, 0]])
    assert summary["NDCG@10"] == pytest.approx(100 * ndcg(scores, grades, k=10).item(), abs=1e-4)
    first = [min((s.argsort(descending=True) == d).nonzero().item() + 1 for d in relevant)
             for s, relevant in zip(scores[:2], ([2], [0, 2]), strict=True)]  # fmt: skip
    assert metrics.first.tolist() == [*first, 0]
    assert summary["R@1"] == pytest.approx(100 * sum(rank == 1 for rank in first) / 2)


def bad(tmp_path, columns, rows_, name="data.csv"):
    return texts.table(tmp_path / name, columns, rows_)


FINE = [("a b", "x"), ("c d", "y")] * 4


@pytest.mark.parametrize(
    ("columns", "content", "message"),
    [
        (
            ("sentence", "label"),
            FINE,
            r"expected the columns text,label or anchor.*found sentence,label",
        ),
        (("text", "category"), FINE, r"found text,category; say data.label=category"),
        (("text", "label"), [*FINE, ("  ", "x")], r"line 10: the text is empty"),
        (("text", "label"), [*FINE, ("e", "")], r"line 10: the label is empty"),
        (
            ("text", "label"),
            [*FINE, ("e " * 500_000, "x")],
            r"the text has 999,999 characters, more than data\.",
        ),
        (("text", "label"), [("a", "x"), ("b", "x")], r"expected two different labels at least, found one"),
        (("text", "label"), [], r"data.csv has no rows"),
        (("anchor", "positive"), [("a", "a"), ("b", "c")], r"expected two different texts in a pair"),
        (
            ("query", "document", "grade"),
            [("a", "b", "good")],
            r"line 2: expected a grade from 0 to 100, received .good",
        ),
        (
            ("query", "document", "grade"),
            [("a", "b", "-1")],
            r"line 2: expected a grade from 0 to 100, received '-1'",
        ),
        (("query", "document", "grade"), [("a", "b", "-1")], r"expected a grade from 0 to 100, received '-1'"),
        (
            ("query", "document", "grade"),
            [("a", "b", "1e308")],
            r"expected a grade from 0 to 100, received '1e308'",
        ),
        (("query", "document", "grade"), [("a", "b", "1"), ("a", "b", "2")], r"a document with two grades"),
        (("query", "document", "grade"), [("a", "b", "1"), ("a", "c", "2")], r"two queries at least, found 1"),
    ],
)
def test_bad_files_are_one_line_and_write_nothing(tmp_path, columns, content, message, model):
    path, out = bad(tmp_path, columns, content), tmp_path / "run"
    with pytest.raises(UserError, match=message) as caught:
        run.run("text", [f"data.root={path}", f"model={model}", *SMALL], out=str(out))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert not out.exists()


def test_files_that_are_none(tmp_path, model):
    (tmp_path / "a.csv").write_bytes(b"text,label\ncaf\xe9,x\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 1}\nhello\n')
    (tmp_path / "a.xlsx").write_text("")
    for name, message in (
        ("a.csv", "is not UTF-8"),
        ("a.jsonl", "line 2: invalid JSON"),
        ("a.xlsx", "expected a file named .csv or .tsv or .jsonl"),
        ("none.csv", "found no file"),
    ):
        told = cli("train", "text", "--data", tmp_path / name, f"model={model}", "--out", tmp_path / "run")
        assert message in told and told.startswith("rankgrad: --data: "), told
    assert cli("train", "text").startswith("rankgrad: --data: the task text needs a file")
    assert not (tmp_path / "run").exists()


def test_losses_of_graded_lists_are_checked(tmp_path, model):
    path = texts.graded(tmp_path / "data.csv")
    for settings, message in (
        (["loss=proxy"], "loss: unknown name 'proxy' for graded lists"),
        (["loss.lamm=3"], "loss.lamm: unknown argument of ndcg_loss, did you mean 'lam'?"),
        (["loss.lam=-3"], "loss: lam: expected"),
    ):
        assert message in cli("train", "text", "--data", path, f"model={model}", *settings)


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """A run whose first model is gone."""
    moved = tmp_path_factory.mktemp("moved") / "model"
    shutil.copytree(model, moved)
    path = texts.labelled(tmp_path_factory.mktemp("data") / "data.csv")
    out = tmp_path_factory.mktemp("runs") / "text"
    folder, _ = run.run("text", [f"data.root={path}", f"model={moved}", *SMALL], out=str(out))
    before = load(folder).embed(["word1 word2", "word3"])
    shutil.rmtree(moved)
    return folder, before, path


def test_a_run_needs_nothing_but_its_folder(finished, capsys):
    folder, before, path = finished
    assert torch.equal(load(folder).embed(["word1 word2", "word3"]), before)
    assert cli("eval", folder) == 0
    best = json.loads((folder / "result.json").read_text())["best"]
    assert f"R@1 {best['R@1']:.1f}" in capsys.readouterr().out
    told = cli("eval", folder, "--data", path, "model=./not/there")
    assert told.startswith("rankgrad: model: './not/there' is neither the folder")


def test_what_is_no_text_is_named(finished):
    network = load(finished[0])
    for given, message in (
        ("hello", "TEXTS: expected a list of texts, received the text 'hello'"),
        ([], "TEXTS: expected texts, received none"),
        (["a", " "], "TEXTS: expected texts that are not empty, number 1 is ' '"),
        (["a", 3], "TEXTS: expected texts that are not empty, number 1 is 3"),
        ([None], "TEXTS: expected texts that are not empty, number 0 is None"),
    ):
        with pytest.raises(UserError) as caught:
            network.embed(given)
        assert str(caught.value) == message


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".txt"])
def test_texts_of_files_are_embedded(finished, tmp_path, capsys, suffix):
    folder, before, _ = finished
    path, out = tmp_path / f"a{suffix}", tmp_path / "e.npz"
    if suffix == ".txt":
        path.write_text("word1 word2\n\nword3\n")
    else:
        texts.table(path, ("number", "text"), [("1", "word1 word2"), ("2", "word3")])
    assert cli("embed", folder, path, "--out", out) == 0
    found = np.load(out)
    assert found["names"].tolist() == ["word1 word2", "word3"]
    assert np.allclose(found["embeddings"], before.numpy(), atol=1e-6)
    said = capsys.readouterr().out
    assert "2 embeddings of length 16" in said and (suffix == ".txt" or "2 texts of the column 'text'" in said)


def test_texts_that_cannot_be_embedded(finished, tmp_path):
    folder = finished[0]
    both = texts.table(tmp_path / "both.csv", ("query", "document"), [("a", "b")])
    for name, content, message in (
        ("a.csv", "title\nword1\n", "TEXTS: a.csv: expected one column of texts, found title; --column NAME says"),
        ("b.csv", "text\nword1\n  \n", "TEXTS: b.csv line 3: the text is empty"),
        ("c.jsonl", "hello\n", "TEXTS: c.jsonl line 1: invalid JSON"),
        ("d.csv", "text\n", "TEXTS: no texts in "),
        ("e.txt", "\n", "TEXTS: no texts in "),
    ):
        (tmp_path / name).write_text(content)
        assert cli("embed", folder, tmp_path / name, "--out", tmp_path / "o").startswith(f"rankgrad: {message}")
    assert "expected one column of texts, found query,document" in cli("embed", folder, both)
    assert cli("embed", folder, both, "--column", "document", "--out", tmp_path / "o.npz") == 0
    assert np.load(tmp_path / "o.npz")["names"].tolist() == ["b"]
    assert cli("embed", folder, tmp_path / "no.txt") == f"rankgrad: TEXTS: no such file '{tmp_path / 'no.txt'}'"


@pytest.mark.parametrize("form", ["onnx", "torch-export"])
def test_export(finished, tmp_path, capsys, form):
    """Read again by other means, with its tokenizer, for more and longer texts than were traced."""
    from transformers import AutoTokenizer

    folder = finished[0]
    out = tmp_path / f"text{exporting.ENDINGS[form]}"
    assert cli("export", folder, "--to", form, "--out", out) == 0
    said = capsys.readouterr().out
    assert "same outputs as the network" in said and "input_ids [N, tokens] int64, at most 16 tokens" in said
    given = [texts.sentence(label, 0) for label in range(7)] + ["word1", "word1 " * 40]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokens = tokenizer(given, padding=True, truncation=True, max_length=16, return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    assert inputs["input_ids"].shape == (9, 16)
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(out)
        found = torch.from_numpy(session.run(None, {name: value.numpy() for name, value in inputs.items()})[0])
    else:
        found = torch.export.load(out).module()(*inputs.values())
    assert torch.allclose(found, load(folder).embed(given), atol=1e-5)


def test_the_best_epoch_is_said_to_be_chosen_on_the_test_part(tmp_path, model, capsys):
    path, out = texts.graded(tmp_path / "data.csv"), tmp_path / "run"
    assert cli("train", "text", "--data", path, f"model={model}", *SMALL, "--out", out) == 0
    assert ", by NDCG@10 on the test part)" in capsys.readouterr().out
    page = (out / "report.html").read_text()
    best = json.loads((out / "result.json").read_text())["best"]
    assert "the one with the highest NDCG@10 on the test items themselves" in page
    assert f"best evaluation (epoch {best['epoch']:.0f})</td><td>{best['NDCG@10']:.1f}</td>" in page


@pytest.mark.parametrize("kind", ["labels", "graded"])
def test_a_network_that_breaks_between_loss_and_evaluation(tmp_path, model, monkeypatch, kind):
    """The step had a finite loss, and its update made the weights NaN: one line, no traceback."""
    monkeypatch.setattr(TextEmbedder, "forward", lambda self, texts: torch.full((len(texts), 8), torch.nan))
    path = MAKE[kind](tmp_path / "data.csv")
    told = cli("train", "text", "--data", path, f"model={model}", *SMALL, "--out", tmp_path / "run")
    assert told.endswith(
        "the network produced NaN or infinite embeddings. Try a lower lr, optim.clip, or precision=fp32."
    )
