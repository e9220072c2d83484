"""The memory of past batches inside a loss: what enters, what is kept, what survives saving."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rankgrad

from cases import batch


def trained(n=12, seed=0):
    """A batch with a gradient: only such are remembered."""
    embeddings, labels = batch(n, seed=seed, dtype=torch.float32)
    return embeddings.requires_grad_(), labels


def test_items_of_few_bits():
    """What is remembered has no item; in 8 bits its mark would be item 255."""
    values = []
    for dtype in (torch.int64, torch.uint8):
        loss = rankgrad.RecallLoss(memory=2)
        items = torch.arange(244, 256).to(dtype)
        batches = [batch(seed=step) for step in range(3)]
        values.append([loss(x.requires_grad_(), labels, items=items).item() for x, labels in batches])
    assert values[0] == values[1]


def test_memory_fills_only_while_training_and_resets():
    loss = rankgrad.RecallLoss(memory=2)
    embeddings, labels = batch(dtype=torch.float32)
    fresh = loss(embeddings.requires_grad_(), labels)
    assert loss.memory.valid.sum() == 12
    loss.eval()
    loss(embeddings, labels)
    assert loss.memory.valid.sum() == 12
    loss.reset()
    assert loss.memory.valid.sum() == 0
    assert loss(embeddings, labels) == fresh


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 4))
def test_the_ring_holds_the_last_batches(sizes, size):
    memory = rankgrad.EmbeddingMemory(size)
    batches = [(torch.full((n, 2), float(k)), torch.full((n,), k)) for k, n in enumerate(sizes)]
    for embeddings, labels in batches:
        memory.push(embeddings, labels)
    embeddings, labels, _, valid = memory.candidates()
    kept = batches[len(batches) - size :] if size < len(batches) else batches
    expected = sorted(int(c) for _, kept_labels in kept for c in kept_labels) if size else []
    assert sorted(labels[valid].tolist()) == expected
    assert torch.equal(embeddings[valid].reshape(-1, 2)[:, 0] if size else torch.empty(0), labels[valid].float())


def test_memory_does_not_keep_the_graph_nor_break_backward():
    """The ring changes in place after the loss is taken; backward must not see that."""
    loss = rankgrad.RecallLoss(memory=1)
    for step in range(3):
        embeddings, labels = batch(seed=step, dtype=torch.float32)
        out = loss(embeddings.requires_grad_(), labels)
        loss.memory.push(torch.zeros(12, 6), labels)  # the memory changes before backward
        out.backward()
        assert embeddings.grad.isfinite().all()
    assert not loss.memory.embeddings.requires_grad


def test_state_dict_deepcopy_pickle_and_another_padding():
    for make, feed in (
        (lambda: rankgrad.RecallLoss(memory=2), lambda m, s, n: m(*trained(n, seed=s))),
        (
            lambda: rankgrad.ClassRankingLoss(memory=2),
            lambda m, s, n: m(batch(n, seed=s, dtype=torch.float32)[0], batch(n, seed=s)[0] > 1),
        ),
    ):
        loss = make()
        for step in range(3):
            feed(loss, step, 8)
        wide = make()
        feed(wide, 9, 11)  # padded to 11, then loaded with 8
        wide.load_state_dict(loss.state_dict())
        fresh = make()
        fresh.load_state_dict(loss.state_dict())
        copies = [wide, fresh, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))]
        for step, n in ((3, 8), (4, 13)):
            expected = feed(loss, step, n)
            for other in copies:
                assert torch.equal(feed(other, step, n), expected)
        with pytest.raises(ValueError, match=r"memory.*size 3.*size 2"):
            (
                rankgrad.RecallLoss(memory=3)
                if isinstance(loss, rankgrad.RecallLoss)
                else rankgrad.ClassRankingLoss(memory=3)
            ).load_state_dict(loss.state_dict())
        empty = make()
        empty.load_state_dict(make().state_dict())
        # As a writer leaves it that keeps one of several tensors with one address, 0 of those without memory.
        for keep in (0, 1):
            saved = make().state_dict()
            for name in [name for name in saved if name != "memory.position"][keep:]:
                del saved[name]
            for other in (make(), wide):
                other.load_state_dict(saved)
                assert torch.equal(feed(other, 3, 8), feed(make(), 3, 8))
        without = loss.state_dict()
        del without[next(name for name in without if not name.endswith(("labels", "position")))]
        with pytest.raises(RuntimeError, match="Missing key"):
            make().load_state_dict(without)


def test_to_moves_the_memory():
    loss = rankgrad.RecallLoss(memory=1, weight=torch.tensor([0.5, 0.25]))
    loss(*trained())
    loss.to("meta")
    assert {b.device.type for b in loss.buffers()} == {"meta"}
    half = rankgrad.RecallLoss(memory=1)
    half(*trained())
    half.half()
    assert half(*trained(seed=1)).isfinite()


def test_class_ranking_memory_fills_only_while_training():
    loss = rankgrad.ClassRankingLoss(memory=2).eval()
    loss(torch.randn(5, 3), torch.rand(5, 3) < 0.5)
    assert loss.memory.rows == 0
    loss.train()
    loss(torch.randn(5, 3), torch.rand(5, 3) < 0.5)
    assert loss.memory.rows > 0
    loss.reset()
    assert loss.memory.rows == 0
    assert loss.memory.position.item() == 0


def test_candidates_are_a_copy():
    memory = rankgrad.EmbeddingMemory(1)
    memory.push(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))
    embeddings, *_ = memory.candidates()
    memory.push(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
    assert (embeddings == 1).all()
    scores = rankgrad.ScoreMemory(1)
    scores.push(torch.ones(3, 2), torch.ones(3, 2))
    before = scores.candidates()
    assert [one.dtype for one in before] == [torch.float32, torch.bool, torch.bool]
    scores.push(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.bool))
    assert all((one == 1).all() for one in before)


def test_a_batch_with_nan_does_not_come_back():
    loss = rankgrad.RecallLoss(memory=2)
    embeddings, labels = batch(dtype=torch.float32)
    bad = embeddings.clone()
    bad[3] = torch.nan
    loss.memory.push(bad, labels)
    assert loss.memory.valid.sum() == 11
    x = embeddings.requires_grad_()
    loss(x, labels).backward()
    assert x.grad.isfinite().all()
    scores = rankgrad.ScoreMemory(1)
    scores.push(torch.tensor([[0.5, torch.nan]]), torch.zeros(1, 2))
    assert scores.candidates()[2].tolist() == [[True, False]]
    scores.push(torch.tensor([[0.5, torch.nan]]), torch.zeros(1, 2), torch.tensor([[False, True]]))
    assert scores.candidates()[2].tolist() == [[False, False]]


def test_inference_mode_between_training_steps():
    loss = rankgrad.RecallLoss(memory=1)
    embeddings, labels = batch(dtype=torch.float32)
    with torch.inference_mode():
        loss(embeddings, labels)
    loss(embeddings.clone().requires_grad_(), labels).backward()


def test_a_copy_made_in_inference_mode_loads():
    loss = rankgrad.RecallLoss(memory=1)
    embeddings, labels = trained()
    loss(embeddings, labels)
    with torch.inference_mode():
        twin = copy.deepcopy(loss)
    twin.load_state_dict(loss.state_dict())
    assert torch.equal(twin.memory.position, loss.memory.position)
    loss(embeddings, labels)


def test_labels_of_another_integer_type_do_not_wrap():
    loss = rankgrad.RecallLoss(memory=1, margin=0.0)
    embeddings, _ = trained(4)
    loss(embeddings, torch.tensor([256, 257, 258, 259]))
    assert loss(embeddings, torch.tensor([0, 1, 2, 3], dtype=torch.uint8)) == 0  # no item has a partner


def test_a_validation_loss_in_training_mode_is_not_remembered():
    """torchvision's detectors give their losses in training mode alone, so that is how a validation asks."""
    loss = rankgrad.ClassRankingLoss(memory=2)
    scores, relevance = torch.randn(4, 3), torch.rand(4, 3) < 0.5
    with torch.no_grad():
        loss(scores, relevance)
    assert loss.memory.rows == 0
    loss(scores, relevance)
    assert loss.memory.rows == 8
