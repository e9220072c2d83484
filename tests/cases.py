"""Inputs that every engine must treat as the reference does: skewed, tied, masked, odd, empty of relevance."""

import torch

from rankgrad.engine import reference

KINDS = ["random", "ties", "equal", "sorted", "reversed", "one gap", "infinities", "outlier"]
SHARES = [0.0, 0.01, 0.3, 1.0]
FORMS = ["ap", "log_ap", "log", "loglog", "weights"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WEIGHTS = torch.tensor([0.5, 0.25, 0.125, 0.0, 0.0625])


def make(kind, shape, share, *, dtype=torch.float32, masked=False, seed=0, device="cpu"):
    """Scores, relevance, mask of shape ``[calls, lists, n]``."""
    g = torch.Generator(device).manual_seed(seed)
    scores = torch.randn(shape, generator=g, device=device)
    relevance = torch.rand(shape, generator=g, device=device) < share
    mask = torch.rand(shape, generator=g, device=device) < 0.8 if masked else None
    if kind == "ties":
        scores = (scores * 4).round() / 4
    elif kind == "equal":
        scores = torch.full_like(scores, 0.25)
    elif kind in ("sorted", "reversed"):
        scores = scores.sort(-1, descending=kind == "reversed").values
    elif kind == "one gap":  # every irrelevant item between the same two relevant ones
        scores = torch.where(relevance, scores, 1e-6 * scores)
    elif kind == "infinities":
        scores[..., ::7], scores[..., 1::7] = -0.0, 0.0
        scores[..., 3::9], scores[..., 4::9] = torch.inf, -torch.inf
    elif kind == "outlier":
        scores[..., :1], scores[..., 1:2] = 1e30, -1e38
    return scores.to(dtype), relevance, mask


def assert_equal_to_reference(engine, scores, relevance, mask, form, *, lam, margin, **hint):
    """Integers equal, losses to rounding; returns the total of the absolute rank changes."""
    weights = WEIGHTS.to(scores.device) if form == "weights" else None
    arguments = (scores, relevance, mask, weights, form, lam, margin)
    expected = reference.list_losses(*arguments, True)
    got = engine.list_losses(*arguments, True, **hint)
    for name, a, b in zip(("losses", "changes", "items", "lists"), got, expected, strict=True):
        assert a.shape == b.shape, name
        assert a.dtype == b.dtype, name
    torch.testing.assert_close(got[0], expected[0], rtol=1e-12, atol=1e-13)
    for name, a, b in zip(("changes", "items", "lists"), got[1:], expected[1:], strict=True):
        assert torch.equal(a, b), f"{name}: {(a != b).sum().item()} of {a.numel()} differ"
    more = 3 * expected[3] + 1  # lists that count elsewhere
    got_share = engine.list_losses(*arguments, True, lists=more, **hint)
    for a, b in zip(got_share[1:], reference.list_losses(*arguments, True, lists=more)[1:], strict=True):
        assert torch.equal(a, b)
    value, nothing, _, _ = engine.list_losses(*arguments, False, **hint)
    assert torch.equal(value, got[0])
    assert nothing.shape[-1] == 0
    return expected[1].abs().sum().item()


def assert_steps_equal_to_reference(engine, scores, relevance, mask, *, margin):
    """The two steps by themselves, with steps of any size and sign."""
    expected = reference.relevant_ranks(scores, relevance, mask, margin)
    got = engine.relevant_ranks(scores, relevance, mask, margin)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    steps = torch.randn(scores.shape, device=scores.device, dtype=torch.float32)
    position = expected[1]
    changes = reference.rank_changes(scores, relevance, mask, margin, position, steps)
    assert torch.equal(engine.rank_changes(scores, relevance, mask, margin, position, steps), changes)
