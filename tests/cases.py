"""Inputs that every engine must treat as the reference does: skewed, tied, masked, odd, empty of relevance."""

import torch

from rankgrad.engine import forms, reference
from rankgrad.engine.request import Request

KINDS = ["random", "ties", "equal", "sorted", "reversed", "one gap", "infinities", "outlier"]
SHARES = [0.0, 0.01, 0.3, 1.0]
FORMS = list(forms.FORMS)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WEIGHTS = torch.tensor([0.5, 0.25, 0.125, 0.0, 0.0625])


def batch(n=12, dim=6, classes=4, seed=0, dtype=torch.float64):
    """Embeddings of shape ``[n, dim]`` and their labels."""
    g = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(n, dim, generator=g, dtype=dtype)
    return embeddings, torch.randint(classes, (n,), generator=g)


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


def request(scores, relevance, mask, form, **given):
    """A request for lists of any shape; weights for the form that needs them."""
    tables = forms.weight_tables(WEIGHTS.to(scores.device)) if form == "tables" else None
    return Request(scores, relevance, mask, tables=tables, form=form, **given)


def assert_answer_equal_to_reference(engine, scores, relevance, mask, form, **given):
    """Gradients equal to the bit, losses to rounding; returns the request without its hint, and both answers."""
    hint = {name: given.pop(name) for name in ("max_relevant",) if name in given}
    if "lam" in given:
        given |= {"reach": "lam", "strength": given.pop("lam")}
    asked = request(scores, relevance, mask, form, **given)
    expected = reference.evaluate(asked)
    got = engine.evaluate(asked._replace(**hint))
    for name in expected._fields:
        a, b = getattr(got, name), getattr(expected, name)
        assert a.shape == b.shape, name
        assert a.dtype == b.dtype, name
    torch.testing.assert_close(got.losses, expected.losses, rtol=1e-12, atol=1e-13)
    for name in ("gradient", "divisor", "lists"):
        a, b = getattr(got, name), getattr(expected, name)
        assert torch.equal(a, b), f"{name}: {(a != b).sum().item()} of {a.numel()} differ"
    return asked, got, expected


def assert_equal_to_reference(engine, scores, relevance, mask, form, **given):
    """So is the answer where lists count elsewhere, and the loss without a gradient; returns the total of its
    absolute values."""
    asked, got, expected = assert_answer_equal_to_reference(engine, scores, relevance, mask, form, **given)
    hint = {name: given[name] for name in ("max_relevant",) if name in given}
    elsewhere = asked._replace(lists=3 * expected.lists + 1)
    share, expected_share = engine.evaluate(elsewhere._replace(**hint)), reference.evaluate(elsewhere)
    assert torch.equal(share.gradient, expected_share.gradient)
    assert torch.equal(share.divisor, expected_share.divisor)
    value = engine.evaluate(asked._replace(with_gradient=False, **hint))
    assert torch.equal(value.losses, got.losses)
    assert value.gradient.shape[-1] == 0
    return expected.gradient.abs().sum().item()


def assert_standings_equal_to_reference(engine, scores, relevance, mask):
    """Where the relevant items stand, list by list in any order."""
    asked = request(scores, relevance, mask, "ap")
    for a, b in zip(engine.standings(asked), reference.standings(asked), strict=True):
        assert torch.equal(a.sort(-1).values, b.sort(-1).values)
