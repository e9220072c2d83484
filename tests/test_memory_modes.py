"""Memory in inference mode, after a reset, compiled, and from meta tensors."""

import copy

import pytest
import torch

import rankgrad

from cases import batch


def test_a_memory_that_follows_in_inference_mode_can_be_trained_with():
    memory = rankgrad.ScoreMemory(2)
    memory.push(torch.rand(3, 2), torch.zeros(3, 2))
    here = memory.scores
    memory.follow(torch.device("cpu"))
    assert memory.scores is here
    with torch.inference_mode():
        memory.follow(torch.device("meta"))
    assert all(one.is_meta and not one.is_inference() for one in memory.buffers())


FED = {
    "embeddings": (lambda: rankgrad.RecallLoss(memory=2), lambda x: torch.arange(12) % 4),
    "scores": (lambda: rankgrad.ClassRankingLoss(memory=2), lambda x: x > 0.8),
}


def losses_of_steps(loss, targets, steps):
    """Loss and gradient of training steps."""
    found = []
    for seed in steps:
        x = batch(seed=seed, dtype=torch.float32)[0].requires_grad_()
        value = loss(x, targets(x.detach()))
        value.backward()
        found.append((value.detach(), x.grad))
    return found


def reset(loss, make):
    loss.reset()
    return loss


def load(loss, make):
    other = make()
    other.load_state_dict(loss.state_dict())
    return other


@pytest.mark.parametrize("kind", FED)
@pytest.mark.parametrize(
    "do", [lambda loss, make: make(), reset, load, lambda loss, make: copy.deepcopy(loss)],
    ids=["make", "reset", "load", "deepcopy"],
)  # fmt: skip
def test_a_memory_from_inference_mode_can_be_trained_with(kind, do):
    """Validation hooks of trainers run in it."""
    make, targets = FED[kind]
    results = []
    for inference in (False, True):
        loss = make()
        losses_of_steps(loss, targets, range(3))
        with torch.inference_mode(inference):
            loss = do(loss, make)
        results.append(losses_of_steps(loss, targets, range(3, 6)))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_compiled_loss_goes_on_after_a_reset_in_inference_mode():
    torch._dynamo.reset()
    make, targets = FED["embeddings"]
    loss = make()
    run = torch.compile(loss, backend="eager", fullgraph=True)
    losses_of_steps(run, targets, range(3))
    with torch.inference_mode():
        loss.reset()
    found = losses_of_steps(run, targets, range(3, 6))
    torch.testing.assert_close(found, losses_of_steps(make(), targets, range(3, 6)))


@pytest.mark.parametrize("kind", FED)
def test_a_memory_brought_to_life_from_meta_is_empty(kind):
    make, targets = FED[kind]
    with torch.device("meta"):
        loss = make()
    loss.to_empty(device="cpu")
    loss.memory.position.fill_(2**40)  # what to_empty may leave
    torch.testing.assert_close(
        losses_of_steps(loss, targets, range(4)), losses_of_steps(make(), targets, range(4)), rtol=0, atol=0
    )
