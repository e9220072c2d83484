"""The losses as Modules: values and gradients by the oracle, with memory too, defaults, and what is refused."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import rankgrad
from rankgrad.detection import RegionLoss
from rankgrad.losses import proxy_ranking

import oracles
from cases import batch


def expected_loss(form, lam, margin, queries, labels, candidates, candidate_labels, own=None):
    """Value and gradient with respect to the similarity matrix, by the oracle."""
    scores = (F.normalize(queries, dim=1) @ F.normalize(candidates, dim=1).T).numpy()
    relevance = (labels[:, None] == candidate_labels[None]).numpy()
    mask = np.ones(scores.shape, bool)
    if own is not None:
        mask[np.arange(len(own)), own] = False
    value = oracles.mean_loss(scores, relevance, form, margin, mask)
    return value, oracles.mean_loss_gradient(scores, relevance, form, lam, margin, mask)


MODULES = [
    (lambda **k: rankgrad.RecallLoss(lam=5.0, margin=0.1, weight="loglog", **k), "loglog"),
    (lambda **k: rankgrad.RecallLoss(lam=5.0, margin=0.1, weight="log", **k), "log"),
    (lambda **k: rankgrad.AveragePrecisionLoss(lam=5.0, margin=0.1, **k), "ap"),
    (lambda **k: rankgrad.AveragePrecisionLoss(lam=5.0, margin=0.1, log=True, **k), "log_ap"),
]


@pytest.mark.parametrize(("make", "form"), MODULES)
def test_embedding_losses_equal_the_oracle(make, form):
    embeddings, labels = batch()
    x = embeddings.clone().requires_grad_()
    loss = make()(x, labels)
    value, grad = expected_loss(form, 5.0, 0.1, embeddings, labels, embeddings, labels, np.arange(12))
    assert math.isclose(loss.item(), value, rel_tol=1e-12)
    loss.backward()
    y = embeddings.clone().requires_grad_()
    unit = F.normalize(y, dim=1)
    (unit @ unit.T).backward(torch.from_numpy(grad))
    torch.testing.assert_close(x.grad, y.grad)
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize(("make", "form"), MODULES)
def test_references_replace_the_batch(make, form):
    embeddings, labels = batch()
    refs, ref_labels = batch(20, seed=1)
    refs[3] = embeddings[0]
    index = torch.randperm(20)[:12]
    for own in (None, index):
        r = refs.clone().requires_grad_()
        loss = make()(embeddings, labels, r, ref_labels, query_index=own)
        value, _ = expected_loss(
            form, 5.0, 0.1, embeddings, labels, refs, ref_labels, None if own is None else own.numpy()
        )
        assert math.isclose(loss.item(), value, rel_tol=1e-12)
        loss.backward()
        assert r.grad.abs().sum() > 0


def test_repr_says_what_was_set():
    text = repr(rankgrad.RecallLoss(lam=0.3, margin=0.1, weight="log", memory=3))
    for word in ("lam=0.3", "margin=0.1", "'log'", "size=3"):
        assert word in text
    assert "log=True" in repr(rankgrad.AveragePrecisionLoss(log=True))
    assert "form='log_ap'" in repr(rankgrad.ClassRankingLoss(form="log_ap"))
    assert "3 weights" in repr(rankgrad.RecallLoss(weight=torch.ones(3)))


def test_defaults():
    """Nothing to choose: reach and margin from the spread of the scores, for cosines and logits alike."""
    recall, ap, classes = rankgrad.RecallLoss(), rankgrad.AveragePrecisionLoss(), rankgrad.ClassRankingLoss()
    for loss in (recall, ap, classes):
        assert (loss.lam, loss.window, loss.margin, loss.memory.size) == (None, None, "auto", 0)
    assert (recall.weight, ap.log) == ("loglog", False)
    assert (classes.map_weight, classes.pooled_weight, classes.form) == (2, 1, "log_ap")
    paper = RegionLoss()  # a detector's logits have a scale, so its values are numbers
    assert (paper.ranking.lam, paper.ranking.margin, paper.ranking.memory.size) == (0.5, 0.15, 7)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_class_ranking_serves_logits_of_any_scale(scale):
    """Logits times k have the same loss, and a gradient divided by k."""
    logits, relevance = torch.randn(64, 5, dtype=torch.float64), torch.rand(64, 5) < 0.2
    plain, scaled = logits.clone().requires_grad_(), (logits * scale).requires_grad_()
    loss = rankgrad.ClassRankingLoss()
    values = [loss(x, relevance) for x in (plain, scaled)]
    for value in values:
        value.backward()
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(plain.grad, scaled.grad * scale)
    assert float(plain.grad.abs().sum()) > 0


@pytest.mark.parametrize("form", ["ap", "log_ap", "log", "loglog"])
@pytest.mark.parametrize("masked", [False, True])
def test_class_ranking_loss_equals_the_oracle_with_memory(form, masked):
    rng = np.random.default_rng(0)
    loss = rankgrad.ClassRankingLoss(lam=0.4, margin=0.2, memory=2, map_weight=2, pooled_weight=1, form=form)
    seen = []
    for n in (6, 9, 4, 7):
        scores, relevance = rng.normal(size=(n, 3)), rng.random((n, 3)) < 0.3
        mask = rng.random((n, 3)) < 0.8 if masked else np.ones((n, 3), bool)
        x = torch.from_numpy(scores).requires_grad_()
        out = loss(x, torch.from_numpy(relevance), torch.from_numpy(mask) if masked else None)
        out.backward()
        s, r, m = (
            np.concatenate([now, *(old[k] for old in seen[-2:])])
            for k, now in enumerate((scores, relevance, mask))
        )
        flat = [a.reshape(1, -1) for a in (s, r, m)]
        value = 2 * oracles.mean_loss(s.T, r.T, form, 0.2, m.T) + oracles.mean_loss(
            flat[0], flat[1], form, 0.2, flat[2]
        )
        assert math.isclose(out.item(), value / 3, rel_tol=1e-12)
        grad = 2 * oracles.mean_loss_gradient(s.T, r.T, form, 0.4, 0.2, m.T).T
        grad = grad + oracles.mean_loss_gradient(flat[0], flat[1], form, 0.4, 0.2, flat[2]).reshape(s.shape)
        np.testing.assert_allclose(x.grad.numpy(), grad[:n] / 3, rtol=1e-12)
        seen.append((scores, relevance, mask))


def test_class_ranking_without_any_positive():
    loss = rankgrad.ClassRankingLoss()
    scores = torch.randn(10, 4, requires_grad=True)
    for relevance in (torch.zeros(10, 4), torch.zeros(10, 4, dtype=torch.bool)):
        out = loss(scores, relevance)
        out.backward()
        assert out == 0
        assert (scores.grad == 0).all()


def test_classes_of_one_item_and_any_sizes():
    """A query without a partner does not count; class sizes need not be equal."""
    embeddings, _ = batch(7, dtype=torch.float32)
    loss = rankgrad.RecallLoss(margin=0.0)
    alone = loss(embeddings.requires_grad_(), torch.arange(7))
    alone.backward()
    assert alone == 0
    assert (embeddings.grad == 0).all()
    assert loss(embeddings, torch.tensor([0, 0, 0, 0, 1, 1, 2])) > 0


def test_normalised_once_in_float32_under_autocast():
    embeddings, labels = batch(64, 32, dtype=torch.float32)
    loss = rankgrad.AveragePrecisionLoss()
    plain = loss(embeddings, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(embeddings, labels), plain)
    torch.testing.assert_close(loss(embeddings * 7, labels), plain)
    pairs = rankgrad.retrieval_pairs(embeddings.bfloat16(), labels)
    assert pairs.scores.dtype == torch.float32
    assert len(pairs.scores.unique()) > 1500


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wrong", [-1, 4])
def test_labels_of_no_class(compiled, wrong):
    """An error on the CPU in every mode; on a GPU a NaN loss (test_losses_gpu.py)."""
    torch._dynamo.reset()
    loss = rankgrad.ProxyRankingLoss(4, 6)
    run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    embeddings, labels = batch(dtype=torch.float32)
    assert run(embeddings, labels).isfinite()
    labels[5] = wrong
    with pytest.raises(ValueError, match=rf"labels: expected 0 to 3 \(num_classes - 1\), received {wrong}"):
        run(embeddings, labels)


def test_a_label_of_no_class_leaves_no_gradient_that_looks_sound(monkeypatch):
    """What a GPU does, where asking would wait for the device: its answer is NaN, and so is all that follows."""
    monkeypatch.setattr(proxy_ranking, "unknown_labels", lambda labels, classes: torch.tensor(torch.nan))
    loss = rankgrad.ProxyRankingLoss(4, 6)
    embeddings, labels = batch(dtype=torch.float32)
    x = embeddings.requires_grad_()
    value = loss(x, labels)
    value.backward()
    assert value.isnan() and x.grad.isnan().all() and loss.proxies.grad.isnan().any()


def test_ties_of_the_pooled_list_go_by_item():
    """Equal scores, as half precision has many: no class comes before another, and a batch before the memory."""
    generator = torch.Generator().manual_seed(0)
    loss = rankgrad.ClassRankingLoss(lam=0.5, margin=0.15, map_weight=0, memory=1, form="ap")
    batches = [
        (torch.randint(0, 4, (40, 5), generator=generator).double(), torch.rand(40, 5, generator=generator) < 0.2)
        for _ in range(2)
    ]
    loss(*batches[0])
    x = batches[1][0].requires_grad_()
    loss(x, batches[1][1]).backward()
    together, relevance = (
        torch.cat([now, old]).flatten() for now, old in zip(batches[1], batches[0], strict=True)
    )
    y = together.detach().requires_grad_()
    rankgrad.average_precision_loss(y, relevance, lam=0.5, margin=0.15).backward()
    assert torch.equal(x.grad, y.grad.reshape(80, 5)[:40]) and bool((x.grad != 0).any())


@pytest.mark.parametrize(
    "make",
    [
        lambda: rankgrad.RecallLoss(memory=2),
        lambda: rankgrad.AveragePrecisionLoss(window=0.1),
        lambda: rankgrad.ProxyRankingLoss(4, 6),
        lambda: RegionLoss(memory=2),
    ],
)
def test_a_loss_of_meta_tensors(make):
    """Shapes without numbers, to plan memory or to trace."""
    loss = make().to("meta")
    for _ in range(2):
        x = torch.empty(12, 6, device="meta", requires_grad=True)
        value = loss(x, torch.empty(12, dtype=torch.int64, device="meta"))
        value.backward()
        assert value.is_meta and value.shape == ()
        assert x.grad.is_meta and x.grad.shape == x.shape


@pytest.mark.parametrize(
    "loss",
    [
        rankgrad.RecallLoss(),
        rankgrad.AveragePrecisionLoss(memory=2),
        rankgrad.PairRankingLoss(),
        rankgrad.ProxyRankingLoss(4, 8),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_the_loss_of_a_module_may_be_changed_in_place(loss):
    """As Hugging Face's Trainer does under gradient accumulation."""
    x, labels = torch.randn(12, 8), torch.arange(12) % 4
    gradients = []
    for change in (False, True):
        embeddings = x.clone().requires_grad_()
        loss.reset() if hasattr(loss, "reset") else None
        value = loss(embeddings, labels)
        if change:
            value *= 0.5
            value += 1
        value.backward()
        gradients.append(embeddings.grad)
    torch.testing.assert_close(gradients[1], gradients[0] / 2)
    assert gradients[0].abs().max() > 0


def test_a_weight_that_learns_is_refused_where_it_would_not():
    class Weight(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, counts):
            return torch.log1p(self.a * counts)

    weight, (x, labels) = Weight(), (torch.randn(12, 8), torch.arange(12) % 4)
    with pytest.raises(ValueError, match="weight: expected a W without parameters that learn"):
        rankgrad.RecallLoss(weight=weight)(x, labels)
    scores, relevance, mask = rankgrad.retrieval_pairs(x, labels)
    rankgrad.recall_loss(scores, relevance, mask=mask, weight=weight).backward()
    assert weight.a.grad > 0
    weight.requires_grad_(False)
    assert rankgrad.RecallLoss(weight=weight)(x, labels) > 0


@pytest.mark.parametrize(
    "loss",
    [
        rankgrad.RecallLoss(),
        rankgrad.AveragePrecisionLoss(),
        rankgrad.PairRankingLoss(),
        rankgrad.RecallLoss(memory=2),
        rankgrad.ProxyRankingLoss(4, 8),
    ],
    ids=lambda loss: str(loss)[:20],
)
def test_a_batch_without_rows(loss):
    """No list counts: the loss is 0, also where a memory has candidates."""
    embeddings, nothing = torch.zeros(0, 8, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    loss(torch.randn(6, 8, requires_grad=True), torch.arange(6) % 3)
    value = loss(embeddings, nothing)
    value.backward()
    assert value.item() == 0 and embeddings.grad.shape == (0, 8)
