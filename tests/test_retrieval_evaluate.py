"""Exact retrieval metrics against the plain metrics and an independent count, whatever the chunks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rankgrad
from rankgrad.metrics import retrieval_metrics


def plain(embeddings, labels, gallery=None, gallery_labels=None, ks=(1, 2, 4)):
    scores, relevance, mask = rankgrad.retrieval_pairs(embeddings, labels, gallery, gallery_labels)
    metrics = rankgrad.metrics
    out = {f"R@{k}": metrics.recall_at_k(scores, relevance, k=k, mask=mask) for k in ks}
    out["mAP@R"] = metrics.map_at_r(scores, relevance, mask=mask)
    out["AP"] = metrics.average_precision(scores, relevance, mask=mask)
    return {name: 100 * value.item() for name, value in out.items()}


@given(
    st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 6), st.integers(1, 50), st.booleans(), st.booleans()
)
def test_equal_to_the_plain_metrics_in_any_chunks(seed, n, classes, chunk, with_gallery, ties):
    g = torch.Generator().manual_seed(seed)

    def draw(many):
        if ties:  # unit vectors of halves: every product is exact, many are equal
            return torch.randint(0, 2, (many, 4), generator=g).double() - 0.5
        return torch.randn(many, 4, generator=g, dtype=torch.float64)

    queries, labels = draw(n), torch.randint(classes, (n,), generator=g)
    more = (draw(23), torch.randint(classes, (23,), generator=g)) if with_gallery else ()
    found = retrieval_metrics(queries, labels, *more, chunk=chunk, queries_at_once=7).summary([1, 2, 4])
    assert found == pytest.approx(plain(queries, labels, *more), abs=1e-9)


def test_r_at_k_by_hand():
    """Each query's nearest other items, counted in a loop."""
    embeddings, labels = torch.randn(60, 4), torch.randint(8, (60,))
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    found = retrieval_metrics(embeddings, labels).summary([1, 2, 4, 8])
    for k in (1, 2, 4, 8):
        hits = 0
        for i in range(60):
            others = [j for j in range(60) if j != i]
            best = sorted(others, key=lambda j: -float(unit[i] @ unit[j]))[:k]
            hits += any(labels[j] == labels[i] for j in best)
        assert found[f"R@{k}"] == pytest.approx(100 * hits / 60)


def test_a_collapsed_model_gets_the_worst_value():
    labels = torch.arange(10).repeat_interleave(4)
    found = retrieval_metrics(torch.ones(40, 8), labels, chunk=9).summary([1, 36])
    assert found["R@1"] == found["R@36"] == 0
    assert retrieval_metrics(torch.ones(40, 8), labels).first.unique().tolist() == [37]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("apart", [1, 2, 3, 5])
def test_equal_rows_tie_wherever_they_stand(apart, dtype):
    """The relevant rows are alone in the last chunk: a narrow product of matrices is rounded differently."""
    row = torch.randn(1, 100, generator=torch.Generator().manual_seed(0), dtype=dtype)
    gallery, labels = row.repeat(256 + apart, 1), torch.zeros(256 + apart, dtype=torch.int64)
    labels[256:] = 1
    for chunk in (1, 7, 256, 1 << 14):
        found = retrieval_metrics(row.repeat(8, 1), torch.ones(8).long(), gallery, labels, chunk=chunk)
        assert (found.first == 257).all() and not found.map_at_r.any()


def test_what_is_more_than_rounding_is_no_tie():
    angle = torch.tensor([0.0, 0.01, 0.0105, 0.0106])  # cosines with the first: 1 - 5.00e-5, 5.51e-5, 5.62e-5
    found = retrieval_metrics(torch.stack([angle.cos(), angle.sin()], 1), torch.tensor([0, 1, 0, 1]))
    assert found.first[0] == 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["embeddings", "gallery"])
def test_what_is_no_number_is_refused(name, value):
    parts = {"embeddings": torch.randn(6, 4), "gallery": torch.randn(6, 4)}
    parts[name][2, 1] = value
    labels = torch.arange(3).repeat(2)
    with pytest.raises(ValueError, match=f"^{name}: expected finite numbers"):
        retrieval_metrics(parts["embeddings"], labels, parts["gallery"], labels)


def test_queries_with_nothing_relevant_do_not_count():
    found = retrieval_metrics(torch.eye(3), torch.tensor([0, 0, 1]))
    assert found.first.tolist() == [2, 2, 0]  # the two tie with the third
    assert found.summary([1, 2]) == {"R@1": 0.0, "R@2": 100.0, "mAP@R": 0.0, "AP": 50.0}
    assert retrieval_metrics(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)).summary([1])["R@1"] == 0


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"^labels"):
        retrieval_metrics(torch.eye(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^gallery_labels"):
        retrieval_metrics(torch.eye(3), torch.zeros(3, dtype=torch.int64), torch.eye(3))
    with pytest.raises(ValueError, match=r"^chunk"):
        retrieval_metrics(torch.eye(3), torch.zeros(3, dtype=torch.int64), chunk=0)
