"""Losses inside sentence-transformers: the library's values and gradients, cached and inside other losses."""

import importlib
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import rankgrad

st = pytest.importorskip("sentence_transformers", reason="pip install 'rankgrad[sentence-transformers]'")
datasets = pytest.importorskip("datasets", reason="pip install 'rankgrad[sentence-transformers]'")

from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from rankgrad.integrations.sentence_transformers import CachedRankingLoss, CrossEncoderRankingLoss, RankingLoss

import texts

NDCG = partial(rankgrad.ndcg_loss, lam=2.0)
SPEARMAN = partial(rankgrad.spearman_loss, lam=1.0)
AP = partial(rankgrad.average_precision_loss, lam=2.0)


def features(model, *columns):
    return [model.preprocess(column) for column in columns]


def embeddings(model, column):
    return model(model.preprocess(column))["sentence_embedding"]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def inputs(kind):
    """(columns, labels, loss) of every row of the table in the docstring."""
    one, two, three = (texts.sentences(8, seed) for seed in range(3))
    grades = torch.tensor([[0, 2], [1, 0], [3, 1], [0, 0], [2, -1], [1, 1], [0, 1], [2, 0]])
    return {
        "classes": ((one,), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), rankgrad.RecallLoss(lam=2.0)),
        "positives": ((one, two), None, rankgrad.AveragePrecisionLoss(lam=2.0, margin=0.05)),
        "negatives": ((one, two, three), None, AP),
        "grades": ((one, two, three), grades, NDCG),
        "pairs": ((one, two), torch.rand(8, generator=torch.Generator().manual_seed(0)), SPEARMAN),
    }[kind]


def expected(model, kind):
    """The same from the library's functions."""
    columns, labels, loss = inputs(kind)
    unit = [torch.nn.functional.normalize(embeddings(model, column), dim=-1) for column in columns]
    if kind == "classes":
        return loss(embeddings(model, columns[0]), labels)
    if kind == "pairs":
        return loss(torch.stack([a @ b for a, b in zip(*unit, strict=True)]), labels)
    scores = torch.cat([unit[0] @ column.T for column in unit[1:]], 1)
    relevance = torch.zeros(scores.shape, dtype=torch.bool)
    relevance[range(8), range(8)] = True
    return rankgrad.average_precision_loss(scores, relevance, lam=2.0, margin=0.05 if kind == "positives" else 0)


@pytest.mark.parametrize("kind", ["classes", "positives", "negatives", "pairs"])
def test_every_kind_of_columns(model, kind):
    columns, labels, loss = inputs(kind)
    value = RankingLoss(model, loss)(features(model, *columns), labels)
    found, wanted = gradients(model, value), gradients(model, expected(model, kind))
    assert sum(g.abs().sum() for g in wanted) > 0
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("in_batch", [True, False])
def test_graded_lists(model, in_batch):
    """Value and gradient of lists of different lengths; one query has no grade above 0 and does not count."""
    columns, labels, _ = inputs("grades")
    value = RankingLoss(model, NDCG, in_batch=in_batch)(features(model, *columns), labels)
    unit = [torch.nn.functional.normalize(embeddings(model, column), dim=-1) for column in columns]
    lists = []
    for i in range(8):
        scores, grades = [], []
        for j in range(8) if in_batch else [i]:
            for column in range(2):
                if labels[j, column] >= 0:
                    scores.append(unit[0][i] @ unit[1 + column][j])
                    grades.append(labels[i, column] if i == j else 0)
        if max(grades) > 0:
            lists.append((torch.stack(scores), torch.tensor(grades)))
    assert len(lists) == 7
    wanted = sum(rankgrad.ndcg_loss(s, g, lam=2.0 / 7) for s, g in lists) / 7  # lambda is divided by the lists
    torch.testing.assert_close(value.double(), wanted.double())
    torch.testing.assert_close(gradients(model, value), gradients(model, wanted))


@pytest.mark.parametrize("kind", ["classes", "positives", "negatives", "grades", "pairs"])
def test_the_defaults_have_a_gradient(model, kind):
    columns, labels, _ = inputs(kind)
    if kind == "pairs":  # one list: of 8 pairs it often has none
        columns, labels = [texts.sentences(32, seed) for seed in range(2)], torch.linspace(0, 1, 32)
    assert any(g.abs().sum() > 0 for g in gradients(model, RankingLoss(model)(features(model, *columns), labels)))


@pytest.mark.parametrize("kind", ["classes", "positives", "negatives", "grades", "pairs"])
def test_cached_gradients_are_equal(folder, kind):
    """With dropout, which the second pass has to draw again; any upstream gradient."""
    model = texts.bi_encoder(folder.with_name("dropout"), dropout=0.2).train()
    columns, labels, loss = inputs(kind)
    torch.manual_seed(3)
    cached = CachedRankingLoss(model, loss, mini_batch_size=8)
    found = gradients(model, 0.3 * cached(features(model, *columns), labels))
    torch.manual_seed(3)
    wanted = gradients(model, 0.3 * RankingLoss(model, loss)(features(model, *columns), labels))
    torch.testing.assert_close(found, wanted)
    model.eval()  # parts of a batch are padded less: the same embeddings up to rounding
    small = CachedRankingLoss(model, loss, mini_batch_size=3)
    found = gradients(model, small(features(model, *columns), labels))
    torch.testing.assert_close(
        found, gradients(model, RankingLoss(model, loss)(features(model, *columns), labels)), rtol=1e-3, atol=1e-6
    )


def test_cached_gradients_of_proxies(model):
    columns, labels, _ = inputs("classes")
    proxies = rankgrad.ProxyRankingLoss(4, 16)
    (0.25 * RankingLoss(model, proxies)(features(model, *columns), labels)).backward()
    wanted, proxies.proxies.grad = proxies.proxies.grad, None
    (0.25 * CachedRankingLoss(model, proxies, mini_batch_size=8)(features(model, *columns), labels)).backward()
    torch.testing.assert_close(proxies.proxies.grad, wanted)
    assert wanted.abs().sum() > 0


@pytest.mark.parametrize("kind", [RankingLoss, partial(CachedRankingLoss, mini_batch_size=8)])
def test_inside_matryoshka(model, kind):
    """The sum over dimensions, with a memory of its own for each."""
    columns, labels, _ = inputs("classes")
    loss = kind(model, rankgrad.RecallLoss(lam=2.0, memory=2))
    nested = MatryoshkaLoss(model, loss, [16, 8, 4])
    apart = {size: rankgrad.RecallLoss(lam=2.0, memory=2) for size in (16, 8, 4)}
    for _ in range(3):
        found = nested(features(model, *columns), labels)
        rows = embeddings(model, columns[0])
        wanted = sum(one(rows[:, :size], labels) for size, one in apart.items())
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(gradients(model, found), gradients(model, wanted), rtol=1e-4, atol=1e-6)
    assert loss.loss.memory.rows and set(loss.by_size) == {"8", "4"}
    again = RankingLoss(model, rankgrad.RecallLoss(lam=2.0, memory=2))
    again.load_state_dict(loss.state_dict())
    torch.testing.assert_close(dict(again.by_size.state_dict()), dict(loss.by_size.state_dict()))


@pytest.mark.parametrize("kind", [RankingLoss, partial(CachedRankingLoss, mini_batch_size=8)])
def test_proxies_inside_matryoshka(model, kind):
    """The leading numbers of the proxies serve shorter embeddings; each dimension's gradient has its weight."""
    columns, labels, _ = inputs("classes")
    proxies = rankgrad.ProxyRankingLoss(6, 16)
    nested = MatryoshkaLoss(model, kind(model, proxies), [16, 8], matryoshka_weights=[1, 0.5])
    found = nested(features(model, *columns), labels)
    own = gradients(model, found)
    at_proxies, proxies.proxies.grad = proxies.proxies.grad, None
    short = rankgrad.ProxyRankingLoss(6, 8)
    with torch.no_grad():
        short.proxies.copy_(proxies.proxies[:, :8])
    rows = embeddings(model, columns[0])
    wanted = proxies(rows, labels) + 0.5 * short(rows[:, :8], labels)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(own, gradients(model, wanted), rtol=1e-4, atol=1e-6)
    expected_there = proxies.proxies.grad.clone()
    expected_there[:, :8] += short.proxies.grad
    torch.testing.assert_close(at_proxies, expected_there)
    with pytest.raises(ValueError, match=r"^embeddings: expected rows of length 8, as the proxies"):
        RankingLoss(model, short)(features(model, *columns), labels)


def test_evaluation_does_not_enter_the_memory(model):
    columns, labels, _ = inputs("classes")
    loss = RankingLoss(model, rankgrad.RecallLoss(lam=2.0, memory=2)).train()
    model.eval()
    loss(features(model, *columns), labels)
    model.train()
    with torch.no_grad():
        loss(features(model, *columns), labels)
    assert loss.loss.memory.rows == 0
    loss(features(model, *columns), labels)
    assert loss.loss.memory.rows > 0


@pytest.mark.parametrize("version", ["5.7.0", "6.1.0"])
def test_versions_that_are_too_old_are_refused(monkeypatch, version):
    monkeypatch.setattr(st, "__version__", version)
    monkeypatch.delitem(sys.modules, "rankgrad.integrations.sentence_transformers")
    with pytest.raises(ImportError, match=r"needs sentence-transformers 6\.2 or newer: pip install '.*>=6\.2'"):
        importlib.import_module("rankgrad.integrations.sentence_transformers")


def test_every_module_named_is_one_of_version_6():
    """Not a name of before 6, for which it keeps a finder that warns and will go."""
    assert st.__version__.startswith("6.")
    home, names = Path(st.__file__).parent, set()
    root = Path(__file__).parents[2]
    for path in (
        p for folder in ("src", "tests", "docs", "benchmarks", "examples") for p in (root / folder).rglob("*")
    ):
        if path.suffix not in (".py", ".md"):
            continue
        names |= set(
            re.findall(r"^\s*(?:>>> )?(?:from|import) sentence_transformers\.([\w.]+)", path.read_text(), re.M)
        )
    assert "sentence_transformer.modules" in names
    for name in names:
        place = home.joinpath(*name.split("."))
        assert place.is_dir() or place.with_suffix(".py").is_file(), name


# Cross-encoders


QUERIES = texts.sentences(3)
LISTS = [texts.sentences(n, seed=n) for n in (5, 2, 4)]
GRADES = [torch.tensor([0, 2, 1, 0, 0]), torch.tensor([1, 0]), torch.tensor([0.0, 0, 3, 1])]


@pytest.mark.parametrize("at_once", [None, 0, 4])
@pytest.mark.parametrize("name", ["ndcg", "ap", "recall"])
def test_lists_of_a_cross_encoder(reranker, name, at_once):
    grades = GRADES if name == "ndcg" else [(grade > 0).long() for grade in GRADES]
    function = {"ndcg": rankgrad.ndcg_loss, "ap": rankgrad.average_precision_loss, "recall": rankgrad.recall_loss}
    loss = CrossEncoderRankingLoss(reranker, partial(function[name], lam=3.0), mini_batch_size=at_once)
    value = loss([QUERIES, LISTS], grades)
    wanted = []
    for query, documents, grade in zip(QUERIES, LISTS, grades, strict=True):
        tokens = reranker.preprocess([(query, document) for document in documents])
        scores = reranker(tokens)["scores"].view(-1)
        wanted.append(function[name](scores, grade, lam=1.0))  # lambda is divided by the three lists
    wanted = torch.stack(wanted).mean()
    torch.testing.assert_close(value, wanted)
    found = gradients(reranker, value)
    torch.testing.assert_close(found, gradients(reranker, wanted), rtol=1e-3, atol=1e-6)


def test_texts_that_are_empty_or_long_and_lists_without_documents(model, reranker):
    """A text is cut at the model's length, an empty one is embedded, a query without documents does not count."""
    long = " ".join(texts.WORDS) * 8_000  # 1 MB
    columns = features(model, ["", "w1"], ["w1", long], ["w2", ""])
    value = RankingLoss(model)(columns, torch.tensor([[2, 0], [1, 0]]))
    assert all(torch.isfinite(g).all() for g in gradients(model, value))
    ranking = CrossEncoderRankingLoss(reranker)
    alone = ranking([["w1"], [["w2", long]]], [[1, 0]])
    torch.testing.assert_close(ranking([["w1", "w3"], [["w2", long], []]], [[1, 0], []]), alone)


def test_bad_input_is_named(model, reranker):
    one, two, three = (texts.sentences(4, seed) for seed in range(3))
    loss = RankingLoss(model)

    def refused(message, loss, labels, *columns):
        with pytest.raises(ValueError, match=message):
            loss(features(model, *columns), labels)

    refused(r"^label: expected one integer beside one column of texts, received None", loss, None, one)
    refused(r"^label: expected one integer beside one column", loss, torch.rand(4), one)
    refused(r"^label: expected 2 grades a query.*received .*\[4, 3\]", loss, torch.ones(4, 3), one, two, three)
    refused(r"^label: expected one number a pair, or 2 grades a query", loss, torch.ones(4), one, two, three)
    refused(r"^label: expected a tensor of numbers, lists of grades", loss, [[1, 0], [1]] * 2, one, two, three)
    refused(r"^label: expected a tensor of numbers.*'good'", loss, ["good"] * 4, one)
    refused(r"^sentence_features: expected at least one column", loss, torch.ones(4))
    recall = RankingLoss(model, rankgrad.RecallLoss(memory=2))
    refused(r"^memory: expected 0 for columns \(query, positive, negatives\), received 2", recall, None, one, two)
    refused(r"^loss: expected a list loss.*received a RecallLoss", recall, torch.rand(4), one, two)
    refused(
        r"^loss: expected RecallLoss, Av.* for classes", RankingLoss(model, NDCG), torch.tensor([0, 0, 1, 1]), one
    )
    with pytest.raises(ValueError, match=r"^loss: expected a rankgrad loss or a callable"):
        RankingLoss(model, "recall")
    with pytest.raises(ValueError, match=r"^model: expected a SentenceTransformer"):
        RankingLoss("all-MiniLM-L6-v2")
    ranking = CrossEncoderRankingLoss(reranker)
    with pytest.raises(
        ValueError, match=r"^labels: expected a list of grades for each query, of lengths \[5, 2, 4\]"
    ):
        ranking([QUERIES, LISTS], GRADES[:2])
    for grade, message in (
        (["good", "bad"], r"^labels: expected grades that are numbers, received"),
        ([1, None], r"^labels: expected grades that are numbers, received"),
        ([1, float("nan")], r"^labels: expected finite numbers >= 0, received nan"),
        ([1, -3], r"^labels: expected finite numbers >= 0, received -3 "),
    ):
        with pytest.raises(ValueError, match=message):
            ranking([["a"], [["b", "c"]]], [grade])
    nan, inf = torch.tensor([[1, 0], [1, float("nan")]]), torch.tensor([float("inf"), 1])
    refused(r"^label: expected finite numbers, received nan", loss, nan, one[:2], two[:2], three[:2])
    refused(r"^label: expected finite numbers, received inf", loss, inf, one[:2], two[:2])
    with pytest.raises(ValueError, match=r"^inputs: expected two columns"):
        ranking([QUERIES], GRADES)
    with pytest.raises(ValueError, match=r"^inputs: expected at least one document"):
        ranking([["a"], [[]]], [torch.zeros(0)])
    with pytest.raises(ValueError, match=r"^model: expected a CrossEncoder with num_labels=1"):
        CrossEncoderRankingLoss(model)
    with pytest.raises(ValueError, match=r"^distributed: expected False, and RecallLoss\(distributed=True\)"):
        RankingLoss(model, rankgrad.RecallLoss(), distributed=True)
