"""Recorded losses: equal to the plain ones step by step, whatever happens to shapes and memory in between."""

import copy

import pytest
import torch

import rankgrad

from replays import batch, replay_on_the_cpu, replayed, taken

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def replays_on_the_cpu(monkeypatch):
    replay_on_the_cpu(monkeypatch)


LOSSES = {
    "recall with memory": lambda: rankgrad.RecallLoss(memory=2),
    "ap": lambda: rankgrad.AveragePrecisionLoss(lam=1.0, log=True),
    "window": lambda: rankgrad.AveragePrecisionLoss(window=0.2, memory=1),
    "proxies": lambda: rankgrad.ProxyRankingLoss(8, 16),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(LOSSES))
def test_equal_to_the_plain_loss(name, device, request):
    if device == "cpu":
        request.getfixturevalue("replays_on_the_cpu")
    torch.manual_seed(0)
    plain = LOSSES[name]().to(device)
    recorded = rankgrad.graphed(copy.deepcopy(plain))
    was_replayed = False
    for step in range(14):
        rows = 24 if step in (8, 9) else 40  # other batches in between
        if step == 11 and hasattr(plain, "memory"):
            plain.reset()
            recorded.reset()
        if step == 12:
            for one in (plain, recorded):
                one.train(False)
        one, other = (taken(loss, *batch(rows, step, device)) for loss in (plain, recorded))
        for left, right in zip(one, other, strict=True):
            torch.testing.assert_close(left, right)
        was_replayed = was_replayed or replayed(recorded)
    for left, right in zip(plain.state_dict().values(), recorded.loss.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right)
    assert was_replayed


@pytest.mark.parametrize("device", DEVICES)
def test_results_survive_the_next_replay_and_parameters_may_move(device, request):
    if device == "cpu":
        request.getfixturevalue("replays_on_the_cpu")
    loss = rankgrad.graphed(rankgrad.ProxyRankingLoss(8, 16).to(device))
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.5)
    plain = copy.deepcopy(loss.loss)
    other = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(8):
        for one, steps in ((loss, optimizer), (plain, other)):
            steps.zero_grad()
            first, second = batch(40, step, device), batch(40, step + 100, device)
            values = one(*first), one(*second)  # both before any backward
            (values[0] + 2 * values[1]).backward()
            one.seen = [first[0].grad, second[0].grad]
            steps.step()
        for left, right in zip(loss.seen, plain.seen, strict=True):
            torch.testing.assert_close(left, right)
        torch.testing.assert_close(loss.loss.proxies, plain.proxies)
    assert replayed(loss)


@pytest.mark.gpu
def test_half_precision_does_not_underflow():
    loss = rankgrad.graphed(rankgrad.RecallLoss())
    plain = rankgrad.RecallLoss()
    for step in range(6):
        embeddings, labels = batch(512, step, "cuda", torch.float16)
        twin = embeddings.detach().clone().requires_grad_()
        (65536 * 1e-4 * loss(embeddings, labels)).backward()
        (65536 * 1e-4 * plain(twin, labels)).backward()
        torch.testing.assert_close(embeddings.grad, twin.grad, rtol=2e-3, atol=1e-6)
    assert replayed(loss)


@pytest.mark.gpu
def test_class_scores_with_memory_and_no_host_sync():
    torch.manual_seed(0)
    plain = rankgrad.ClassRankingLoss(memory=3).cuda()
    recorded = rankgrad.graphed(copy.deepcopy(plain))
    for step in range(9):
        generator = torch.Generator().manual_seed(step)
        logits = torch.randn(200, 5, generator=generator).cuda()
        relevance = (torch.rand(200, 5, generator=generator) < 0.1).cuda()
        mask = (torch.rand(200, 5, generator=generator) < 0.9).cuda()
        one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        left = plain(one, relevance, mask)
        left.backward()
        if step == 8:
            torch.cuda.set_sync_debug_mode("error")
        try:
            right = recorded(other, relevance, mask)
            right.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(left, right)
        torch.testing.assert_close(one.grad, other.grad)
    assert replayed(recorded)


def test_without_a_gradient_and_by_name():
    loss = rankgrad.graphed(rankgrad.RecallLoss())
    embeddings, labels = batch(12, 0, "cpu")
    with torch.no_grad():
        assert torch.equal(loss(embeddings, labels), loss.loss(embeddings, labels))
    with pytest.raises(TypeError, match=r"loss: expected a torch\.nn\.Module, received function"):
        rankgrad.graphed(taken)


def test_settings_and_named_inputs_are_seen(replays_on_the_cpu):
    plain = rankgrad.RecallLoss(lam=0.5)
    recorded = rankgrad.graphed(copy.deepcopy(plain))
    for step in range(12):
        embeddings, labels = batch(24, step, "cpu")
        twin = embeddings.detach().clone().requires_grad_()
        items = torch.arange(24) // 2 if step % 2 else None
        for loss in (plain, recorded.loss):
            loss.lam = 0.5 if step < 8 else 5.0
        plain(embeddings, labels, items=items).backward()
        recorded(twin, labels, items=items).backward()
        torch.testing.assert_close(embeddings.grad, twin.grad)
    assert replayed(recorded)
