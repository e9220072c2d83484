"""What every baseline method must obey, whatever its definition: one parametrisation over all of them."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given

import rankgrad
from rankgrad import surrogates
from rankgrad.lab.sodeep import train
from rankgrad.surrogates import sodeep

from strategies import lists

torch.manual_seed(0)
SORTER = sodeep.LSTMSorter(9, hidden=6).requires_grad_(False)
CNN = sodeep.CNNSorter(9, hidden=4, layers=2).requires_grad_(False)

LOSSES = {
    "fastap": surrogates.fastap_loss,
    "sodeep-lstm": functools.partial(surrogates.sodeep_loss, sorter=SORTER),
    "sodeep-cnn": functools.partial(surrogates.sodeep_loss, sorter=CNN),
    "chen2019": surrogates.chen2019_loss,
    "chen2019-interpolated": functools.partial(surrogates.chen2019_loss, interpolated=True),
    "yue2007": surrogates.yue2007_loss,
    "mohapatra2018": surrogates.mohapatra2018_loss,
    "smoothap": functools.partial(surrogates.smoothap_loss, temperature=0.2),
    "permutahedron": surrogates.permutahedron_loss,
}
RANKS = {
    "fastap": surrogates.fastap_rank,
    "sodeep-lstm": functools.partial(surrogates.sodeep_rank, sorter=SORTER),
    "sodeep-cnn": functools.partial(surrogates.sodeep_rank, sorter=CNN),
    "smoothap": functools.partial(surrogates.smoothap_rank, temperature=0.2),
    "permutahedron": surrogates.permutahedron_rank,
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
every_rank = pytest.mark.parametrize("rank", RANKS.values(), ids=RANKS)
#: Sorters are networks: they know neither shifts nor the order of the items in memory.
EXACT = {name: loss for name, loss in LOSSES.items() if "sodeep" not in name}
TIMED_WITH_HINT = [surrogates.chen2019_loss, surrogates.yue2007_loss, surrogates.mohapatra2018_loss]


def value_and_grad(loss, scores, relevance, upstream=1.0, **kwargs):
    x = scores.clone().requires_grad_()
    out = loss(x, relevance, **kwargs)
    (out * upstream).sum().backward()
    return out.detach(), x.grad


def close(a, b, tolerance=1e-6):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@every_loss
@given(lists(masked=False))
def test_masked_is_removed(loss, data):
    scores, relevance = torch.from_numpy(data[0]), torch.from_numpy(data[1])
    keep = torch.from_numpy(np.random.default_rng(0).random(scores.shape[1]) < 0.6)
    whole, grad = value_and_grad(loss, scores, relevance, mask=keep)
    short, short_grad = value_and_grad(loss, scores[:, keep], relevance[:, keep])
    close(whole, short)
    close(grad[:, keep], short_grad)
    assert (grad[:, ~keep] == 0).all()


@every_rank
@given(lists(masked=False))
def test_masked_is_removed_from_ranks(rank, data):
    scores = torch.from_numpy(data[0])
    keep = torch.from_numpy(np.random.default_rng(0).random(scores.shape[1]) < 0.6)
    weight = torch.linspace(-1, 1, scores.shape[1], dtype=torch.float64)
    whole, grad = value_and_grad(lambda s, _: rank(s, mask=keep), scores, None, weight)
    short, short_grad = value_and_grad(lambda s, _: rank(s), scores[:, keep], None, weight[keep])
    close(whole[:, keep], short)
    close(grad[:, keep], short_grad)
    assert (whole[:, ~keep] == keep.sum() + 1).all()
    assert (grad[:, ~keep] == 0).all()


@every_loss
def test_lists_do_not_see_each_other(loss):
    """A batch is its lists one by one; reductions; leading dimensions; an upstream gradient other than one."""
    scores = (torch.rand(2, 3, 9, dtype=torch.float64) * 2 - 1).round(decimals=1)
    relevance, mask = torch.rand(2, 3, 9) < 0.4, torch.rand(2, 3, 9) < 0.8
    relevance[1, 2] = False
    upstream = torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(2, 3)
    losses, grad = value_and_grad(loss, scores, relevance, upstream, mask=mask, reduction="none")
    assert losses.shape == (2, 3)
    for a in range(2):
        for b in range(3):
            one, one_grad = value_and_grad(loss, scores[a, b], relevance[a, b], mask=mask[a, b])
            close(losses[a, b], one)
            close(grad[a, b], one_grad * upstream[a, b])
    assert losses[1, 2] == 0
    counts = (relevance & mask).any(-1).sum()
    assert counts < 6
    total, total_grad = value_and_grad(loss, scores, relevance, 3.0, mask=mask, reduction="sum")
    mean, mean_grad = value_and_grad(loss, scores, relevance, mask=mask)
    close(total, losses.sum())
    close(mean, losses.sum() / counts)
    close(mean_grad * 3 * counts, total_grad)
    assert mean_grad.abs().sum() > 0


@every_loss
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (1,), (2, 1), (4,), (2, 3, 4)])
@pytest.mark.parametrize("fill", [False, True])
def test_nothing_and_everything_relevant(loss, shape, fill):
    scores = torch.randn(shape).round()
    out, grad = value_and_grad(loss, scores, torch.full(shape, fill))
    assert out.isfinite()
    assert grad.isfinite().all()
    if not fill or scores.numel() == 0:
        assert out == 0
        assert (grad == 0).all()
    none = loss(scores, torch.full(shape, fill), reduction="none")
    assert none.shape == shape[:-1]


@pytest.mark.parametrize("name", ["fastap", "chen2019", "yue2007", "mohapatra2018", "smoothap"])
def test_a_list_of_relevant_items_has_nothing_to_lose(name):
    scores = torch.rand(3, 6) * 2 - 1
    out, grad = value_and_grad(LOSSES[name], scores, torch.ones(3, 6, dtype=torch.bool))
    close(out, torch.tensor(0.0))
    close(grad, torch.zeros(3, 6), 1e-5)


@every_loss
def test_everything_masked(loss):
    scores, relevance = torch.randn(2, 5), torch.ones(2, 5, dtype=torch.bool)
    out, grad = value_and_grad(loss, scores, relevance, mask=torch.zeros(2, 5, dtype=torch.bool))
    assert out == 0
    assert (grad == 0).all()


@every_rank
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (1,), (2, 1), (2, 3, 4)])
def test_ranks_of_any_shape(rank, shape):
    x = torch.zeros(shape, requires_grad=True)
    ranks = rank(x)
    assert ranks.shape == shape
    ranks.sum().backward()
    assert ranks.isfinite().all()
    assert x.grad.isfinite().all()
    missing = rank(x, mask=torch.zeros(shape, dtype=torch.bool))
    assert (missing == 1).all()


@every_loss
def test_ties_huge_and_tiny_scores_stay_finite(loss):
    relevance = torch.rand(3, 9) < 0.4
    for scores in (torch.zeros(3, 9), torch.randn(3, 9) * 1e30, torch.randn(3, 9) * 1e-30):
        out, grad = value_and_grad(loss, scores, relevance)
        assert out.isfinite()
        assert grad.isfinite().all()


@pytest.mark.parametrize("name", EXACT)
@given(lists())
def test_permutation_equivariance(name, data):
    scores, relevance, mask = (None if part is None else torch.from_numpy(part) for part in data)
    # no ties: tied items of one kind may swap their gradients
    scores = scores + torch.arange(scores.shape[1]) / 1024
    order = torch.from_numpy(np.random.default_rng(0).permutation(scores.shape[1]))
    loss, grad = value_and_grad(EXACT[name], scores, relevance, mask=mask)
    moved_mask = None if mask is None else mask[:, order]
    moved, moved_grad = value_and_grad(EXACT[name], scores[:, order], relevance[:, order], mask=moved_mask)
    close(moved, loss, 1e-9)
    close(moved_grad, grad[:, order], 1e-9)


@pytest.mark.parametrize("name", ["chen2019", "chen2019-interpolated", "yue2007", "mohapatra2018", "smoothap"])
def test_the_gradient_of_differences_sums_to_zero(name):
    scores, relevance = torch.randn(4, 30, dtype=torch.float64), torch.rand(4, 30) < 0.3
    _, grad = value_and_grad(LOSSES[name], scores, relevance)
    close(grad.sum(-1), torch.zeros(4, dtype=torch.float64), 1e-12)
    assert (grad.abs().sum(-1) > 0).all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision_calculates_in_float32(loss, dtype):
    scores, relevance = (torch.rand(3, 9) * 2 - 1).to(dtype), torch.rand(3, 9) < 0.4
    out, grad = value_and_grad(loss, scores, relevance)
    assert out.dtype == torch.float32
    assert grad.dtype == dtype
    single, single_grad = value_and_grad(loss, scores.float(), relevance)
    assert torch.equal(out, single)
    assert torch.equal(grad, single_grad.to(dtype))


@every_loss
def test_relevance_dtypes_and_memory_layout(loss):
    scores, relevance = torch.rand(9, 3) * 2 - 1, torch.rand(9, 3) < 0.4
    expected = value_and_grad(loss, scores.T.contiguous(), relevance.T.contiguous())
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32):
        got = value_and_grad(loss, scores.T, relevance.T.to(dtype))
        close(got, expected)  # an LSTM may take another path for another layout


@every_loss
def test_no_gradient_asked_for_same_value(loss):
    scores, relevance = torch.rand(3, 9) * 2 - 1, torch.rand(3, 9) < 0.4
    expected, _ = value_and_grad(loss, scores, relevance)
    assert torch.equal(loss(scores, relevance), expected)
    with torch.no_grad():
        assert torch.equal(loss(scores.clone().requires_grad_(), relevance), expected)


@every_loss
def test_nan_behind_the_mask_is_ignored(loss):
    scores = torch.tensor([[0.5, torch.nan, 0.1], [0.2, -torch.inf, 0.3]])
    mask = torch.tensor([True, False, True])
    out, grad = value_and_grad(loss, scores, torch.tensor([[False, True, True]] * 2), mask=mask)
    assert out.isfinite()
    assert grad.isfinite().all()


# ------------------------------------------------------------------------------------------------- errors

S, R = torch.rand(3, 5), torch.zeros(3, 5, dtype=torch.bool)


@every_loss
@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"scores": [0.1]}, TypeError, "^scores: expected a tensor"),
        ({"scores": S.long()}, TypeError, "^scores: .*floating.*int64"),
        ({"scores": S[0, 0], "relevance": R[0, 0]}, ValueError, "^scores: expected at least one dimension"),
        ({"scores": S / 0}, ValueError, "^scores: expected finite scores"),
        ({"scores": S * torch.nan}, ValueError, "^scores: expected finite scores"),
        ({"relevance": R[:, :4]}, ValueError, r"^relevance: .*\[3, 5\].*\[3, 4\]"),
        ({"relevance": R.int() + 2}, ValueError, "^relevance: expected only 0 and 1"),
        ({"mask": torch.ones(3, 5)}, TypeError, "^mask: expected a bool tensor.*float32"),
        ({"mask": torch.ones(4, 5, dtype=torch.bool)}, ValueError, r"^mask: .*broadcast.*\[3, 5\].*\[4, 5\]"),
        ({"reduction": "avg"}, ValueError, "^reduction: .*'avg'"),
    ],
)
def test_wrong_arguments_are_named(loss, kwargs, error, message):
    scores, relevance = kwargs.get("scores", S), kwargs.get("relevance", R)
    rest = {k: v for k, v in kwargs.items() if k not in ("scores", "relevance")}
    with pytest.raises(error, match=message):
        loss(scores, relevance, **rest)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: surrogates.fastap_loss(S, R, bins=0), ValueError, "^bins: .*>= 1, received 0"),
        (lambda: surrogates.fastap_rank(S, bins=2.0), TypeError, "^bins: expected an integer"),
        (
            lambda: surrogates.fastap_rank(S, score_range=(1.0, 1.0)),
            ValueError,
            "^score_range: .*lowest < highest",
        ),
        (lambda: surrogates.fastap_rank(S, score_range=3), ValueError, "^score_range: .*pair"),
        (lambda: surrogates.fastap_rank(S, score_range=(0.0, math.inf)), ValueError, "^score_range: .*finite"),
        (lambda: surrogates.chen2019_loss(S, R, delta=0.0), ValueError, "^delta: .*> 0"),
        (lambda: surrogates.smoothap_loss(S, R, temperature=-1), ValueError, "^temperature: .*-1"),
        (lambda: surrogates.smoothap_rank(S, temperature=0), ValueError, "^temperature"),
        (lambda: surrogates.permutahedron_rank(S, epsilon=math.nan), ValueError, "^epsilon: .*nan"),
        (lambda: surrogates.sodeep_rank(S, sorter=3), TypeError, "^sorter: .*int"),
        (lambda: surrogates.sodeep_rank(torch.rand(10), sorter=SORTER), ValueError, "^scores: .*at most 9.*10"),
        (lambda: train(0), ValueError, "^length: .*>= 1"),
        (lambda: train(3, architecture="rnn"), ValueError, "^architecture: .*'lstm', 'cnn'.*'rnn'"),
        (lambda: train(3, steps=0), ValueError, "^steps"),
    ],
)
def test_other_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("loss", [*TIMED_WITH_HINT, surrogates.smoothap_loss])
def test_the_hint_changes_nothing_and_a_wrong_one_is_an_error(loss):
    scores, relevance = torch.randn(4, 12), torch.rand(4, 12) < 0.4
    expected = value_and_grad(loss, scores, relevance)
    most = int(relevance.sum(-1).max())
    for hint in (most, most + 2, 100):
        torch.testing.assert_close(value_and_grad(loss, scores, relevance, max_relevant=hint), expected)
    with pytest.raises(ValueError, match=f"^max_relevant: expected at least the {most} relevant.*{most - 1}"):
        loss(scores, relevance, max_relevant=most - 1)


# ----------------------------------------------------------------------------------------------- registry


def test_the_register_has_every_module_and_each_entry_runs():
    folder = Path(surrogates.__file__).parent
    modules = {path.stem for path in folder.iterdir() if not path.stem.startswith("_")}
    assert {name.removesuffix("_fixed") for name in surrogates.METHODS} == modules
    scores, relevance = torch.rand(2, 12) * 2 - 1, torch.rand(2, 12) < 0.4
    for name, method in surrogates.METHODS.items():
        arguments = method.arguments(scores)
        out, grad = value_and_grad(method.loss, scores, relevance, **arguments)
        assert out.isfinite() and grad.abs().sum() > 0, name
        assert method.complexity.startswith("O(") and method.citation[-4:].isdigit()
        if method.rank is not None:
            assert method.general
            assert method.rank(scores, **arguments).shape == scores.shape


@pytest.mark.parametrize("name", ["fastap", "smoothap", "permutahedron"])
def test_soft_ranks_of_scores_far_apart_are_the_ranks(name):
    scores = torch.stack([torch.randperm(20) for _ in range(5)]) / 10.0 - 1
    settings = {"fastap": {"bins": 20}, "smoothap": {"temperature": 0.001}, "permutahedron": {"epsilon": 0.05}}
    ranks = surrogates.METHODS[name].rank(scores, **settings[name])
    close(ranks, rankgrad.rank(scores, lam=1.0), 1e-4)
