"""The public functions against the oracles, on lists that are drawn: ties, masks, infinities, every setting.

``RANKGRAD_FUZZ_CALLS`` says how many calls of each kind (600 in ``make test``), ``RANKGRAD_FUZZ_SEED`` which.
"""

import math
import os

import numpy as np
import pytest
import torch

import rankgrad
from rankgrad import metrics
from rankgrad.engine import dispatch
from rankgrad.reach import MARGIN_SHARE, WINDOW_SHARE

import oracles

CALLS = int(os.environ.get("RANKGRAD_FUZZ_CALLS", "600"))
SEED = int(os.environ.get("RANKGRAD_FUZZ_SEED", "0"))
GRID = np.array([-2.0, -1.0, -0.5, -0.25, -0.0, 0.0, 0.25, 0.5, 1.0, 3.0])
TOLERANCE = {np.float32: {"rtol": 2e-5, "atol": 2e-6}, np.float64: {"rtol": 1e-11, "atol": 1e-12}}


def draws(kind):
    """A generator for every call, its own: a failure names the call, and can be repeated alone."""
    for call in range(CALLS):
        yield call, np.random.default_rng([SEED, sum(map(ord, kind)), call])


def drawn_lists(draw, dtype, *, infinities=False):
    """Scores, relevance and mask (or None) of ``[rows, n]``."""
    rows, n = int(draw.integers(1, 5)), int(draw.integers(1, 10))
    kind = draw.integers(4)
    if kind == 0:
        scores = draw.choice(GRID, (rows, n))
    elif kind == 1:
        scores = draw.normal(size=(rows, n)) * 10.0 ** draw.integers(-3, 4)
    elif kind == 2:
        scores = np.round(draw.normal(size=(rows, n)) * 2) / 4
    else:
        scores = np.full((rows, n), draw.choice(GRID))
    if infinities and draw.random() < 0.2:
        scores[draw.random((rows, n)) < 0.2] = draw.choice([np.inf, -np.inf])
    relevance = draw.random((rows, n)) < draw.choice([0.0, 0.2, 0.5, 1.0])
    mask = draw.random((rows, n)) < draw.choice([0.3, 0.8]) if draw.random() < 0.5 else None
    return scores.astype(dtype), relevance, mask


def tensors(scores, relevance, mask, draw):
    """The same as tensors, now and then not contiguous, with relevance of any type."""
    score, relevant = torch.tensor(scores), torch.tensor(relevance)
    if draw.random() < 0.3:
        score = score.T.contiguous().T
    kind = [torch.bool, torch.uint8, torch.int64, score.dtype][draw.integers(4)]
    return score.requires_grad_(), relevant.to(kind), None if mask is None else torch.tensor(mask)


def called(form, score, relevant, **options):
    """The loss of this library for a form of the oracles."""
    if form in ("ap", "log_ap"):
        return rankgrad.average_precision_loss(score, relevant, log=form == "log_ap", **options)
    weight = torch.tensor(form) if isinstance(form, list) else form
    return rankgrad.recall_loss(score, relevant, weight=weight, **options)


@pytest.fixture(params=[dispatch.SMALL_ON_CPU, 0], ids=["torch", "numba"])
def _engines(request, monkeypatch):
    """Plain torch, which short lists get, and the kernels of long ones."""
    monkeypatch.setattr(dispatch, "SMALL_ON_CPU", request.param)


@pytest.mark.usefixtures("_engines")
def test_losses_of_lists():
    for call, draw in draws("losses"):
        dtype = [np.float32, np.float64][draw.integers(2)]
        scores, relevance, mask = drawn_lists(draw, dtype)
        form = [*("ap", "log_ap", "log", "loglog"), [0.5, 0.25, 0.0, 1.0]][draw.integers(5)]
        reach = ["lam", "window", "auto"][draw.integers(3)]
        strength = float(draw.choice([0.05, 0.25, 1.0, 4.0, 30.0]))
        margin = [0.0, 0.0, 0.25, 0.5, "auto"][draw.integers(5)]
        options = {} if reach == "auto" else {reach: strength}
        score, relevant, exists = tensors(scores, relevance, mask, draw)
        spread = oracles.spread(scores, mask, dtype)
        width = MARGIN_SHARE * spread if margin == "auto" else margin
        arguments = {"margin": width, "mask": mask, "dtype": dtype}
        if reach == "lam":
            gradient = oracles.mean_loss_gradient(scores, relevance, form, strength, **arguments)
        else:
            window = strength if reach == "window" else WINDOW_SHARE * spread
            gradient = oracles.window_gradient(scores, relevance, form, window, **arguments)
        upstream, lists = float(draw.choice([1.0, -3.0, 0.125])), oracles.counting_lists(relevance, mask)
        each = np.array(
            [
                oracles.list_loss(s, r, form, width, None if mask is None else mask[k], dtype)
                for k, (s, r) in enumerate(zip(scores, relevance, strict=True))
            ]
        )
        reduction = ["mean", "sum", "none"][draw.integers(3)]
        about = f"call {call}: {form} {options} margin={margin} {reduction} {dtype.__name__}"
        loss = called(form, score, relevant, margin=margin, mask=exists, reduction=reduction, **options)
        expected = {"mean": each.sum() / max(lists, 1), "sum": each.sum(), "none": each}[reduction]
        np.testing.assert_allclose(loss.detach().numpy(), expected, **TOLERANCE[dtype], err_msg=about)
        (upstream * loss.sum()).backward()
        times = upstream * (1 if reduction == "mean" else max(lists, 1))
        largest = np.abs(gradient).max() or 1.0
        np.testing.assert_allclose(
            score.grad.numpy() / largest, times * gradient / largest, **TOLERANCE[dtype], err_msg=about
        )


def test_lists_of_any_length():
    """Items in one row with the number of their list: as each list alone."""
    for call, draw in draws("groups"):
        lengths = draw.integers(0, 7, size=draw.integers(1, 5))
        groups = draw.permutation(np.repeat(np.arange(len(lengths)), lengths))
        if not len(groups):
            continue
        scores, relevance = draw.choice(GRID, len(groups)), draw.random(len(groups)) < 0.4
        form, lam = ["ap", "log_ap", "log", "loglog"][draw.integers(4)], float(draw.choice([0.25, 1.0, 4.0]))
        score = torch.tensor(scores, requires_grad=True)
        options = {"groups": torch.tensor(groups), "num_groups": len(lengths), "lam": lam}
        loss = called(form, score, torch.tensor(relevance), **options)
        loss.backward()
        rows = [np.flatnonzero(groups == g) for g in range(len(lengths))]
        counting = sum(bool(relevance[row].any()) for row in rows)
        value, gradient = 0.0, np.zeros(len(groups))
        for row in rows:
            if relevance[row].any():
                value += oracles.list_loss(scores[row], relevance[row], form) / counting
                change = oracles.rank_changes(scores[row], relevance[row], form, lam, counting)
                gradient[row] = change / (lam * len(row))
        np.testing.assert_allclose(loss.item(), value, rtol=1e-12, atol=1e-12, err_msg=f"call {call}")
        np.testing.assert_allclose(score.grad, gradient, rtol=1e-12, atol=1e-12, err_msg=f"call {call}")


@pytest.mark.usefixtures("_engines")
def test_metrics():
    names = [
        "average_precision",
        "recall_at_k",
        "refined_recall_at_k",
        "precision_at_k",
        "map_at_r",
        "reciprocal_rank",
    ]
    for call, draw in draws("metrics"):
        scores, relevance, mask = drawn_lists(draw, np.float64, infinities=True)
        name, k = [*names, "ndcg"][draw.integers(7)], int(draw.integers(1, 12))
        score, relevant, exists = tensors(scores, relevance, mask, draw)
        options = {"k": k} if name.endswith("_k") else {}
        if name == "ndcg":
            relevance = relevance * draw.integers(0, 4, relevance.shape)
            relevant = torch.tensor(relevance)
            options = {"k": [None, k][draw.integers(2)], "gain": ["linear", "exponential"][draw.integers(2)]}
        each = []
        for row in range(len(scores)):
            one = None if mask is None else mask[row]
            if name == "ndcg":
                each.append(oracles.ndcg(scores[row], relevance[row], mask=one, **options))
            else:
                each.append(oracles.metric(name, scores[row], relevance[row], options.get("k"), one))
        found = getattr(metrics, name)(score, relevant, mask=exists, reduction="none", **options)
        about = f"call {call}: {name} {options}"
        np.testing.assert_allclose(found, [v or 0.0 for v in each], rtol=1e-12, atol=1e-12, err_msg=about)
        counted = [v for v in each if v is not None]
        mean = getattr(metrics, name)(score, relevant, mask=exists, **options)
        expected = math.fsum(counted) / max(len(counted), 1)
        np.testing.assert_allclose(float(mean), expected, rtol=1e-12, atol=1e-12, err_msg=about)


def test_ranks():
    for call, draw in draws("ranks"):
        dtype = [np.float32, np.float64][draw.integers(2)]
        scores, _, mask = drawn_lists(draw, dtype)
        ties, lam = ["ordinal", "min", "max", "average"][draw.integers(4)], float(draw.choice([0.1, 1.0, 5.0]))
        score = torch.tensor(scores, requires_grad=True)
        upstream = draw.choice(GRID, scores.shape).astype(dtype)
        found = rankgrad.rank(score, lam=lam, ties=ties, mask=None if mask is None else torch.tensor(mask))
        found.backward(torch.tensor(upstream))
        for row in range(len(scores)):
            one = None if mask is None else mask[row]
            kept = slice(None) if one is None else one
            expected = oracles.ranks(scores[row], ties, one)
            np.testing.assert_array_equal(
                found[row].detach()[kept], expected[kept], err_msg=f"call {call}: {ties}"
            )
            if one is None or one.any():
                gradient = oracles.rank_gradient(scores[row], upstream[row], lam, ties, one)
                np.testing.assert_allclose(score.grad[row], gradient, **TOLERANCE[dtype], err_msg=f"call {call}")


HUGE = 10**400
WRONG = {
    "lam": [0, -1.0, math.nan, math.inf, -math.inf, "x", HUGE, [1.0]],
    "window": [0.0, -1, math.nan, math.inf, 1e39, 1e-320, HUGE, "x", [1.0]],
    "margin": [-1.0, math.nan, math.inf, 1e39, HUGE, "x", None],
    "reduction": ["avg", 3, None],
    "mask": [torch.ones(3, 7, dtype=torch.bool), torch.ones(2, 4), "x"],
    "relevance": [torch.ones(3, 4), torch.full((2, 4), 2), torch.full((2, 4), math.nan), "x"],
    "scores": [torch.ones(2, 4, dtype=torch.int64), torch.full((2, 4), math.nan), "x", torch.tensor(1.0)],
    "weight": [torch.tensor([1.0, math.nan]), torch.tensor([math.inf]), "x", torch.ones(2, 2)],
    "k": [0, -1, 1.5, "x", math.nan],
}


@pytest.mark.parametrize("argument", sorted(WRONG))
def test_wrong_arguments_are_named(argument):
    """Whatever is wrong: a ValueError or TypeError that begins with the argument's name."""
    functions = [rankgrad.average_precision_loss, rankgrad.recall_loss, rankgrad.spearman_loss, rankgrad.ndcg_loss]
    functions += [metrics.ndcg, metrics.recall_at_k, metrics.average_precision]
    seen = 0
    for value in WRONG[argument]:
        for function in functions:
            known = set(
                function.__code__.co_varnames[
                    : function.__code__.co_argcount + function.__code__.co_kwonlyargcount
                ]
            )
            if argument not in known or (function is rankgrad.spearman_loss and argument == "relevance"):
                continue
            given = {"scores": torch.rand(2, 4), argument: value}
            second = "target" if function is rankgrad.spearman_loss else "relevance"
            given.setdefault(second, torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]))
            if function is metrics.recall_at_k:
                given.setdefault("k", 1)
            if (
                function in (rankgrad.ndcg_loss, metrics.ndcg)
                and argument == "relevance"
                and value is WRONG["relevance"][1]
            ):
                continue  # 2 is a grade
            positional = [given.pop("scores"), given.pop(second)]
            with pytest.raises((ValueError, TypeError)) as caught:
                function(*positional, **given)
            message = str(caught.value)
            assert argument in message.partition(":")[0], f"{function.__name__}({argument}={value!r}): {message}"
            assert len(message) < 400, message
            seen += 1
    assert seen
