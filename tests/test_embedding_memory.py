"""Remembered embeddings make lists of their own: against loops, and the law that drift lowers no loss."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import rankgrad

import oracles

REACHES = [{"lam": 5.0}, {"window": 0.3}]
LOSSES = [
    (lambda **k: rankgrad.RecallLoss(weight="loglog", **k), "loglog"),
    (lambda **k: rankgrad.AveragePrecisionLoss(**k), "ap"),
    (lambda **k: rankgrad.AveragePrecisionLoss(log=True, **k), "log_ap"),
]


def batch(n, seed, dim=6, classes=4):
    g = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(n, dim, generator=g, dtype=torch.float64)
    return embeddings, torch.randint(classes, (n,), generator=g), torch.randint(20, (n,), generator=g)


@pytest.mark.parametrize("reach", REACHES, ids=lambda reach: next(iter(reach)))
@pytest.mark.parametrize(("make", "form"), LOSSES)
def test_memory_equals_the_loops(make, form, reach):
    """Batch sizes vary, so that padding must not be seen; items are given in some steps only."""
    loss = make(memory=2, margin=0.1, **reach)
    seen = []
    for step, n in enumerate([12, 7, 15, 15, 3, 9]):
        embeddings, labels, items = batch(n, step)
        items = None if step in (1, 4) else items
        x = embeddings.clone().requires_grad_()
        found = loss(x, labels, items=items)
        found.backward()
        y = embeddings.clone().requires_grad_()
        unit = F.normalize(y, dim=1)
        rows = unit.detach().numpy()
        numbers = None if items is None else items.tolist()
        old = [row for past in seen[-2:] for row in past]
        value, grad = oracles.embedding_loss(
            rows, labels.tolist(), form, margin=0.1, items=numbers, memory=old, **reach
        )
        assert found.item() == pytest.approx(value, rel=1e-12)
        unit.backward(torch.from_numpy(grad))
        torch.testing.assert_close(x.grad, y.grad)
        assert (x.grad != 0).any()
        seen.append(list(zip(rows, labels.tolist(), numbers or [-1] * n, strict=True)))


@pytest.mark.parametrize(("make", "form"), LOSSES)
def test_drift_of_the_fresh_embeddings_does_not_lower_the_loss(make, form):
    """One more coordinate d for the fresh, 0 for the remembered: ranks within each list stay, and so the loss."""
    values = []
    for drift in (0.0, 0.5, 3.0):
        loss = make(memory=3, margin=0.0, window=0.3)
        for step in range(4):
            embeddings, labels, items = batch(10, step)
            more = torch.full((10, 1), drift if step == 3 else 0.0, dtype=torch.float64)
            rows = torch.cat([F.normalize(embeddings, dim=1), more], 1).requires_grad_()
            value = loss(rows, labels, items=items)
        values.append(value.item())
        assert loss.memory.valid.sum() == 30
    assert values[1:] == pytest.approx([values[0]] * 2, rel=1e-12)
    assert values[0] > 0


def test_no_query_meets_an_older_copy_of_itself():
    """Copies of the queries, of their class, are all there is in the memory: no remembered list counts."""
    embeddings, labels, _ = batch(8, 0)
    items = torch.arange(8)
    without, loss = (rankgrad.RecallLoss(lam=0.2, margin=0.02, memory=size) for size in (0, 2))
    labels = torch.arange(8) // 2
    loss(embeddings.requires_grad_(), labels, items=items)
    expected = without(embeddings, labels, items=items)
    labels_of_nobody = labels + torch.tensor([0, 90] * 4)  # of each class one row is left: the query's own copy
    loss.memory.labels.copy_(labels_of_nobody.expand(2, -1))
    half = loss(embeddings, labels, items=items)
    counting = 8 + 4  # the odd queries have a partner among the old rows
    assert half.item() != expected.item()
    assert oracles_value(embeddings, labels, items, labels_of_nobody)[1] == counting
    assert half.item() == pytest.approx(oracles_value(embeddings, labels, items, labels_of_nobody)[0], rel=1e-12)


def oracles_value(embeddings, labels, items, old_labels):
    rows = F.normalize(embeddings.detach(), dim=1).numpy()
    memory = list(zip(rows, old_labels.tolist(), items.tolist(), strict=True))
    lists = oracles.lists_of_a_batch(rows, labels.tolist(), items.tolist(), memory)
    value, _ = oracles.embedding_loss(
        rows, labels.tolist(), "loglog", lam=0.2, margin=0.02, items=items.tolist(), memory=memory
    )
    return value, sum(any(relevance) for _, _, relevance in lists)


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "frozen", "eval"])
def test_evaluation_batches_do_not_enter(how):
    """Trainers may call eval() of the network and leave the loss in training mode."""
    loss = rankgrad.RecallLoss(memory=3)
    embeddings, labels, items = batch(6, 0)
    loss(embeddings.clone().requires_grad_(), labels, items=items)
    before = copy.deepcopy(loss.state_dict())
    if how == "frozen":
        loss(embeddings, labels, items=items)
    elif how == "eval":
        loss.eval()(embeddings.clone().requires_grad_(), labels, items=items)
    else:
        with getattr(torch, how)():
            loss(embeddings.clone().requires_grad_(), labels, items=items)
    assert all(torch.equal(before[name], now) for name, now in loss.state_dict().items())


def test_state_without_item_numbers_loads():
    """Saved before item numbers were remembered: nothing is excluded."""
    loss, old = rankgrad.RecallLoss(memory=2), rankgrad.RecallLoss(memory=2)
    for step in range(3):
        embeddings, labels, items = batch(6, step)
        loss(embeddings.clone().requires_grad_(), labels, items=items)
    state = loss.state_dict()
    del state["memory.items"]
    old.load_state_dict(state)
    assert (old.memory.items == -1).all() and torch.equal(old.memory.embeddings, loss.memory.embeddings)
    assert "memory.items" not in state
    embeddings, labels, _ = batch(6, 3)
    assert torch.equal(old(embeddings, labels), loss(embeddings, labels))


def test_the_hint_bounds_each_list():
    """Three partners in the batch and four in the memory: 4 is enough, 3 is not."""
    labels = torch.zeros(4, dtype=torch.int64)
    for most in (4, 3):
        loss = rankgrad.RecallLoss(lam=0.2, memory=1, max_relevant=most)
        loss(batch(4, 0)[0].requires_grad_(), labels)
        if most == 4:
            assert loss(batch(4, 1)[0], labels).isfinite()
        else:
            with pytest.raises(ValueError, match=r"^max_relevant: expected at least 4"):
                loss(batch(4, 1)[0], labels)


def test_the_oracle_is_the_mean_of_all_lists_that_count():
    """By hand: two rows of a class, one alone; the memory has a partner for the one alone."""
    units = np.eye(3)
    value, _ = oracles.embedding_loss(
        units, [0, 0, 1], "log", window=1.0, memory=[(units[0], 1, -1), (units[2], 0, -1)]
    )
    # Fresh lists of rows 0 and 1: all scores 0, one irrelevant item ties with the relevant one and wins: log 2.
    # Remembered lists: row 0 meets its class at 0 below 1, row 1 at a tie, row 2 meets its class at 0 below 1.
    assert value == pytest.approx(np.log(2))
