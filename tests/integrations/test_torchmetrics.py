"""Metric classes: equal to scikit-learn and SciPy by query, over batches and processes; faster than their like."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, ndcg_score

pytest.importorskip("torchmetrics", reason="pip install 'rankgrad[torchmetrics]'")
from torchmetrics import MetricCollection

from rankgrad import metrics
from rankgrad.integrations import torchmetrics as ours

import processes


def queries(binary, seed=0):
    """Scores, targets and query numbers of 30 queries of 1 to 40 items, and one of 500; shuffled."""
    rng = np.random.default_rng(seed)
    sizes = [*rng.integers(1, 40, 30), 500]
    indexes = np.repeat(rng.permutation(10**6)[: len(sizes)] - 500, sizes)
    order = rng.permutation(len(indexes))
    scores = rng.permutation(len(indexes)) / 100 - 5  # no ties, many of them negative
    target = rng.integers(0, 2 if binary else 4, len(indexes))
    target[indexes == indexes[0]] = 0  # a query with nothing relevant
    return tuple(torch.tensor(array[order]) for array in (scores, target, indexes))


def mean_over(one, scores, target, indexes, counts=lambda target: target.sum() > 0):
    groups = [(scores[indexes == q].numpy(), target[indexes == q].numpy()) for q in indexes.unique()]
    return np.mean([one(s, t) for s, t in groups if counts(t)])


def ranked(scores, target):
    return target[np.argsort(-scores)]


def refined(scores, target, k):
    return np.mean([sum((scores >= s) & (target == 0)) < k for s in scores[target == 1]])


def at_r(scores, target):
    best = ranked(scores, target)[: target.sum()]
    return sum(best[: i + 1].mean() for i in range(len(best)) if best[i]) / len(best)


def ndcg_of(scores, target, k=None):
    return ndcg_score([target], [scores], k=k) if len(target) > 1 else 1.0


BINARY = {
    "AP": (ours.AveragePrecision, lambda s, t: average_precision_score(t, s)),
    "MRR": (ours.ReciprocalRank, lambda s, t: 1 / (1 + ranked(s, t).argmax())),
    "R@3": (lambda **kw: ours.RecallAtK(3, **kw), lambda s, t: ranked(s, t)[:3].any()),
    "P@3": (lambda **kw: ours.PrecisionAtK(3, **kw), lambda s, t: ranked(s, t)[:3].sum() / 3),
    "refined": (lambda **kw: ours.RefinedRecallAtK(2, **kw), lambda s, t: refined(s, t, 2)),
    "mAP@R": (ours.MAPAtR, at_r),
}
GRADED = {
    "NDCG": (ours.NDCG, ndcg_of),
    "NDCG@5": (lambda **kw: ours.NDCG(5, **kw), lambda s, t: ndcg_of(s, t, 5)),
    "exponential": (lambda **kw: ours.NDCG(gain="exponential", **kw), lambda s, t: ndcg_of(s, 2**t - 1)),
}


def collected(metric, data, parts=3):
    for part in zip(*(column.chunk(parts) for column in data), strict=True):
        metric.update(*part)
    return metric.compute()


@pytest.mark.parametrize("name", [*BINARY, *GRADED])
def test_equal_by_query(name):
    make, one = (BINARY | GRADED)[name]
    data = queries(name in BINARY)
    assert collected(make(), data).item() == pytest.approx(mean_over(one, *data), abs=1e-9)
    wanted = mean_over(lambda s, t: one(s, t) if t.sum() else 0.0, *data, counts=lambda t: True)
    assert collected(make(empty_target_action="neg"), data).item() == pytest.approx(wanted, abs=1e-9)
    with pytest.raises(ValueError, match="something relevant for every query"):
        collected(make(empty_target_action="error"), data)


def test_spearman():
    data = queries(False)
    data = (data[0], data[1] + torch.rand(len(data[1])), data[2])
    wanted = mean_over(lambda s, t: spearmanr(s, t)[0], *data, counts=lambda t: len(t) > 1)
    assert collected(ours.Spearman(), data).item() == pytest.approx(wanted, abs=1e-9)


def test_classes_and_embeddings():
    torch.manual_seed(0)
    scores, relevance = torch.randn(60, 5), torch.rand(60, 5) < 0.3
    wanted = metrics.mean_average_precision(scores, relevance)
    assert torch.equal(collected(ours.MeanAveragePrecision(5), (scores, relevance)), wanted)
    rows, labels = torch.randn(50, 4), torch.randint(8, (50,))
    found = collected(ours.EmbeddingRetrieval(4, (1, 4)), (rows, labels))
    assert found == metrics.retrieval_metrics(rows, labels).summary([1, 4])


def test_nothing_and_reset():
    metric = ours.NDCG()
    assert metric.compute() == 0
    metric.update(torch.rand(4), torch.ones(4), torch.zeros(4, dtype=torch.long))
    assert metric.compute() == 1
    metric.reset()
    metric.update(torch.rand(4), torch.zeros(4), torch.zeros(4, dtype=torch.long))
    assert metric.compute() == 0


def test_bad_input_is_named():
    metric, scores, ones = ours.AveragePrecision(), torch.rand(4), torch.ones(4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^target: expected the shape of preds \[4\]"):
        metric.update(scores, ones[:3], ones)
    with pytest.raises(TypeError, match=r"^indexes: expected integers"):
        metric.update(scores, ones, scores)
    with pytest.raises(ValueError, match=r"^empty_target_action: expected one of"):
        ours.NDCG(empty_target_action="none")
    with pytest.raises(ValueError, match=r"^k: expected an integer >= 1"):
        ours.RecallAtK(0)


@pytest.mark.parametrize("name", [*BINARY, "mAP"])
def test_grades_are_refused_by_update(name):
    """In update, where the batch is at hand, and by the name of its argument."""
    scores, ones = torch.rand(4), torch.ones(4, dtype=torch.long)
    metric = ours.MeanAveragePrecision(1) if name == "mAP" else BINARY[name][0]()
    given = (scores[:, None], 2 * ones[:, None]) if name == "mAP" else (scores, 2 * ones, ones)
    with pytest.raises(ValueError, match=r"^target: expected bool, or 0 and 1.*, received 2"):
        metric.update(*given)


def test_numbers_that_are_none_are_refused_by_update():
    scores, ones = torch.rand(4), torch.ones(4, dtype=torch.long)
    for metric, wrong, message in (
        (ours.NDCG(), -1.0, r"^target: expected finite numbers >= 0, received -1"),
        (ours.NDCG(), torch.nan, r"^target: expected finite numbers >= 0, received nan"),
        (ours.ReciprocalRank(relevant_from=1), torch.nan, r"^target: expected finite numbers >= 0, received nan"),
        (ours.Spearman(), torch.nan, r"^target: expected numbers, received nan"),
    ):
        with pytest.raises(ValueError, match=message):
            metric.update(scores, torch.tensor([1, wrong, 1, 1]), ones)
    with pytest.raises(ValueError, match=r"^preds: expected numbers, received nan"):
        ours.NDCG().update(scores * torch.nan, ones, ones)
    ours.Spearman().update(scores, -scores, ones)


def test_a_collection_on_grades():
    """Two metrics that share their states, as a MetricCollection makes them: each reads the grades its own way."""
    scores, grades, ids = queries(False)
    both = MetricCollection({"NDCG": ours.NDCG(5), "MRR": ours.ReciprocalRank(relevant_from=2)})
    for part in zip(*(column.chunk(3) for column in (scores, grades, ids)), strict=True):
        both.update(*part)
    found = both.compute()
    assert len(both.compute_groups) == 1
    assert found["NDCG"] == collected(ours.NDCG(5), (scores, grades, ids))
    assert found["MRR"] == collected(ours.ReciprocalRank(), (scores, grades >= 2, ids))
    mixed = MetricCollection({"a": ours.NDCG(5), "b": ours.ReciprocalRank()})
    mixed.update(scores[:5], (grades[:5] > 0).long(), ids[:5])
    mixed.update(scores, grades, ids)  # only the update of the first is called
    with pytest.raises(ValueError, match=r"^target: expected bool, or 0 and 1"):
        mixed.compute()
    with pytest.raises(ValueError, match=r"^relevant_from: expected a finite number > 0"):
        ours.RecallAtK(1, relevant_from=0)


def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(50, 4, generator=generator), torch.randint(8, (50,), generator=generator)


def synced(rank, folder):
    dist.init_process_group("gloo")
    whole = queries(False)
    cut = (slice(0, 100), slice(100, None))[rank]  # queries lie on both, in different numbers
    return {
        "ndcg": collected(ours.NDCG(), [column[cut] for column in whole]),
        "one alone": (ours.NDCG() if rank else seen(ours.NDCG(), [whole[0].float(), *whole[1:]])).compute(),
        "embeddings": (ours.EmbeddingRetrieval(4) if rank else seen(ours.EmbeddingRetrieval(4), rows())).compute(),
    }


def seen(metric, data):
    metric.update(*data)
    return metric


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    wanted = collected(ours.NDCG(), queries(False))
    for found in processes.two(synced, tmp_path):
        torch.testing.assert_close(found["ndcg"], wanted)
        torch.testing.assert_close(found["one alone"], wanted)
        assert found["embeddings"] == metrics.retrieval_metrics(*rows()).summary([1])


@pytest.mark.slow
def test_faster_than_torchmetrics():
    """8,000 queries of 40: theirs takes seconds."""
    from torchmetrics.retrieval import RetrievalNormalizedDCG

    torch.manual_seed(0)
    data = torch.rand(8000, 40), torch.randint(3, (8000, 40)), torch.arange(8000).unsqueeze(1).expand(-1, 40)
    took = {}
    for name, make in (
        ("ours", ours.NDCG),
        ("theirs", lambda: RetrievalNormalizedDCG(empty_target_action="skip")),
    ):
        begin = time.process_time()
        value = seen(make(), data).compute()
        took[name] = time.process_time() - begin, float(value)
    assert took["ours"][1] == pytest.approx(took["theirs"][1], abs=1e-6)
    assert took["ours"][0] < took["theirs"][0] / 3
