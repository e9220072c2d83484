"""The automatic reach and margin (SPEC section 3) against loops and laws, for every loss."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given

import rankgrad
from rankgrad import reach
from rankgrad.engine import zero_gradients
from rankgrad.losses import spearman

import oracles
from strategies import forms, lists
from test_losses import as_torch, value_and_grad

torch.manual_seed(0)
SCORES = torch.randn(4, 30, dtype=torch.float64)
RELEVANCE = torch.rand(4, 30) < 0.3
GRADES = torch.randint(0, 4, (4, 30))
LOSSES = {
    "recall": lambda s, **k: rankgrad.recall_loss(s, RELEVANCE, **k),
    "ap": lambda s, **k: rankgrad.average_precision_loss(s, RELEVANCE, **k),
    "map": lambda s, **k: rankgrad.mean_average_precision_loss(s, RELEVANCE, **k),
    "pooled": lambda s, **k: rankgrad.pooled_average_precision_loss(s, RELEVANCE, **k),
    "ndcg": lambda s, **k: rankgrad.ndcg_loss(s, GRADES, **k),
    "ndcg at 5": lambda s, **k: rankgrad.ndcg_loss(s, GRADES, k=5, **k),
    "spearman": lambda s, **k: rankgrad.spearman_loss(s, GRADES, **k),
    "class": lambda s, **k: rankgrad.ClassRankingLoss(memory=0, **({"margin": 0.0} | k))(s, RELEVANCE),
}
OF_RANKS = {
    **{name: LOSSES[name] for name in ("ndcg", "ndcg at 5", "spearman")},
    "own": lambda s, **k: rankgrad.rank_loss(lambda r: (r.log() * GRADES).sum(-1), s, **k),
}


def gradient(loss, scores, **given):
    x = scores.clone().requires_grad_()
    value = loss(x, **given)
    value.backward()
    return value.detach(), x.grad


@given(lists(infinities=True), forms)
def test_the_window_is_the_spread_of_the_scores(data, form):
    scores, relevance, mask = data
    x, rel = torch.from_numpy(scores), torch.from_numpy(relevance)
    window = reach.WINDOW_SHARE * oracles.spread(scores, mask)
    _, grad = value_and_grad(form, x, rel, mask=as_torch(mask))
    # The spread is the same to rounding only: a window a little wider or narrower is as good.
    candidates = [
        oracles.window_gradient(scores, relevance, form, w, 0.0, mask) for w in (window, window * (1 + 1e-14))
    ]
    assert any(np.allclose(grad.numpy(), one, rtol=1e-9, atol=1e-13) for one in candidates)


@given(lists())
def test_the_margin_auto_is_a_share_of_the_spread(data):
    scores, relevance, mask = data
    x, rel = torch.from_numpy(scores), torch.from_numpy(relevance)
    margin = reach.MARGIN_SHARE * oracles.spread(scores, mask)
    found, _ = value_and_grad("log_ap", x, rel, mask=as_torch(mask), margin="auto")
    values = [oracles.mean_loss(scores, relevance, "log_ap", m, mask) for m in (margin, margin * (1 - 1e-14))]
    assert any(math.isclose(found, value, abs_tol=1e-12) for value in values)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("margin", [0.0, "auto"])
def test_shifting_changes_nothing_and_scaling_divides_the_gradient(name, margin):
    scores = (SCORES * 64).round() / 64  # a grid on which shifts and scales by powers of two are exact
    value, grad = gradient(LOSSES[name], scores, margin=margin)
    assert grad.abs().sum() > 0
    for shift, scale in ((8.0, 1.0), (0.0, 16.0), (0.0, 2.0**-20)):
        other, moved = gradient(LOSSES[name], scores * scale + shift, margin=margin)
        torch.testing.assert_close(other, value)
        torch.testing.assert_close(moved * scale, grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_a_given_window_is_not_the_automatic_one(name):
    _, auto = gradient(LOSSES[name], SCORES)
    share = spearman.WINDOW_SHARE if name == "spearman" else reach.WINDOW_SHARE
    same = share * oracles.spread(SCORES.numpy())
    _, given = gradient(LOSSES[name], SCORES, window=same)
    torch.testing.assert_close(given, auto, rtol=1e-9, atol=1e-12)
    _, other = gradient(LOSSES[name], SCORES, window=same / 7)
    assert not torch.allclose(other, auto, rtol=1e-3)
    with pytest.raises(ValueError, match="lam, window: expected one of them"):
        LOSSES[name](SCORES, lam=1.0, window=1.0)


def test_the_spread_may_be_given_where_others_have_some_of_the_scores():
    spread = torch.tensor(0.37)
    _, given = gradient(LOSSES["ap"], SCORES, spread=spread)
    _, window = gradient(LOSSES["ap"], SCORES, window=0.37 * reach.WINDOW_SHARE)
    torch.testing.assert_close(given, window, rtol=1e-6, atol=1e-9)


def test_spread_of_blocks_is_that_of_all():
    from rankgrad.engine import spread

    scores = 1e4 + torch.randn(3, 1000)
    scores[0, 5], scores[1, 7] = torch.inf, torch.nan
    mask = torch.rand(3, 1000) < 0.9
    parts = torch.stack([spread.moments(scores[None, k], mask[None, k])[0] for k in range(3)])
    together = spread.spread_of(spread.moments(scores[None], mask[None])[None], torch.float32)[0]
    torch.testing.assert_close(spread.spread_of(parts, torch.float32), together, rtol=1e-12, atol=0)
    expected = oracles.spread(scores.numpy(), mask.numpy(), np.float32)
    assert math.isclose(together, expected, rel_tol=1e-12)
    nearly = torch.full((1, 50), -3.0)
    assert spread.spread_of(spread.moments(nearly)[None], torch.float32)[0] == 1  # equal scores have no scale
    nearly[0, 7] = torch.nextafter(nearly[0, 7], torch.tensor(0.0))
    assert math.isclose(spread.spread_of(spread.moments(nearly)[None], torch.float32)[0], 3e-6, rel_tol=1e-6)
    small = torch.tensor([[0.0, 1e-44]])
    assert spread.spread_of(spread.moments(small)[None], torch.float32)[0] == torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("value", [0.0, 0.5, -7.3])
@pytest.mark.parametrize("name", LOSSES)
def test_a_layer_that_starts_at_zero_gets_a_gradient_it_can_learn_from(name, value):
    """All scores equal: with a floor of the smallest number it was 1e35, whose square no optimiser survives."""
    _, grad = gradient(LOSSES[name], torch.full_like(SCORES, value).float(), margin="auto")
    assert 0 < grad.abs().max() < 100


@pytest.mark.parametrize("name", ["ndcg", "ndcg at 5", "spearman"])
def test_a_window_of_all_ranks_is_one_lambda_for_each_list(name):
    """Against Algorithm 1 in loops, with the slopes of the formula."""
    _, grad = gradient(LOSSES[name], SCORES, window=0.4)
    for k in range(len(SCORES)):
        scores, grades = SCORES[k].numpy(), GRADES[k].numpy()
        ranks = oracles.ranks(scores, "average" if name == "spearman" else "ordinal")
        if name == "spearman":
            n = len(scores)
            slopes = 12 * (ranks - oracles.ranks(grades.astype(float), "average")) / (n * (n * n - 1))
        else:
            best = sorted(grades, reverse=True)[: 5 if name == "ndcg at 5" else None]
            ideal = sum(g / math.log2(1 + place) for place, g in enumerate(best, start=1))
            slopes = grades / ideal / (np.log(1 + ranks) ** 2 / math.log(2) * (1 + ranks))
        ties = "average" if name == "spearman" else "ordinal"
        expected = oracles.windowed_rank_gradient(scores, slopes, 0.4, len(SCORES), ties)
        np.testing.assert_allclose(grad[k].numpy(), expected, rtol=1e-9, atol=1e-12)


def test_margins_of_ndcg_and_spearman():
    grades, target = GRADES.double(), torch.rand(4, 30, dtype=torch.float64)
    shifted = SCORES - 0.3 * grades / grades.amax(-1, keepdim=True)
    assert rankgrad.ndcg_loss(SCORES, GRADES, margin=0.3) == rankgrad.ndcg_loss(shifted, GRADES)
    places = torch.stack([torch.from_numpy(oracles.ranks(t.numpy(), "average")) for t in target])
    shifted = SCORES - 0.3 * (30 - places) / 29
    assert rankgrad.spearman_loss(SCORES, target, margin=0.3) == rankgrad.spearman_loss(shifted, target)
    assert rankgrad.spearman_loss(SCORES, target_ranks=places) == rankgrad.spearman_loss(SCORES, target)


def test_ndcg_at_k_is_the_metric_and_teaches_items_beyond_k():
    value, grad = gradient(LOSSES["ndcg at 5"], SCORES)
    assert math.isclose(value, 1 - rankgrad.metrics.ndcg(SCORES, GRADES, k=5), rel_tol=1e-12)
    beyond = (rankgrad.rank(SCORES, lam=1.0) > 5) & (GRADES > 0)
    assert (grad[beyond] < 0).any()


@pytest.mark.parametrize("loss", ["ap", "recall"])
@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"margin": 1e39}, "margin"),
        ({"window": 1e39}, "window"),
        ({"window": 1e-320}, "window"),
        ({"lam": 10**400}, "lam"),
        ({"margin": 10**400}, "margin"),
        ({"margin": "large"}, "margin"),
    ],
)
def test_numbers_that_are_none_in_float32(loss, given, name):
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        LOSSES[loss](SCORES.float(), **given)
    if name != "lam" and not isinstance(given[name], str) and given[name] != 10**400:
        LOSSES[loss](SCORES, **({"margin": 1e39} if name == "margin" else {"window": 1e39}))


def test_weights_that_are_nan():
    with pytest.raises(ValueError, match=r"^weight: expected (finite )?numbers"):
        rankgrad.recall_loss(SCORES, RELEVANCE, weight=torch.tensor([1.0, torch.nan]))


def test_numpy_integers():
    one = np.int64(5)
    assert rankgrad.metrics.recall_at_k(SCORES, RELEVANCE, k=one) == rankgrad.metrics.recall_at_k(
        SCORES, RELEVANCE, k=5
    )
    rankgrad.average_precision_loss(SCORES, RELEVANCE, max_relevant=np.int32(30))
    rankgrad.ndcg_loss(SCORES, GRADES, k=one)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_may_be_changed_in_place(name):
    x = SCORES.clone().requires_grad_()
    expected = gradient(LOSSES[name], SCORES)
    loss = LOSSES[name](x)
    loss *= 0.5
    loss += 1
    loss /= 2
    loss.backward()
    torch.testing.assert_close(x.grad, expected[1] / 4)
    each = LOSSES["ap"](SCORES.clone().requires_grad_(), reduction="none")
    each *= 2


def test_modules_have_the_functions_defaults():
    for module, function in ((rankgrad.NDCGLoss(k=5), "ndcg at 5"), (rankgrad.SpearmanLoss(), "spearman")):
        assert module(SCORES, GRADES) == LOSSES[function](SCORES, margin=module.margin)
        assert "margin='auto'" in repr(module)
    with pytest.raises(ValueError, match="lam, window"):
        rankgrad.NDCGLoss(lam=1, window=1)


@pytest.mark.parametrize("name", ["ap", "ndcg", "spearman"])
@pytest.mark.parametrize("width", [30, 9000])
def test_compiled_and_vmapped_each_call_has_its_own_spread(name, width):
    """Also where a plain call goes to the kernels."""
    functions = {
        "ap": lambda s, t: rankgrad.average_precision_loss(s, t > 1, margin="auto"),
        "ndcg": lambda s, t: rankgrad.ndcg_loss(s, t, margin="auto"),
        "spearman": lambda s, t: rankgrad.spearman_loss(s, t, margin="auto"),
    }
    generator = torch.Generator().manual_seed(width)
    scores = torch.randn(2, 2, width, generator=generator) * torch.tensor([1.0, 50.0])[:, None, None]
    target = torch.randint(0, 4, scores.shape, generator=generator)
    loss = functions[name]
    x, y = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    separate = torch.stack([loss(*pair) for pair in zip(x, target, strict=True)])
    together = torch.func.vmap(loss)(y, target)
    torch.testing.assert_close(together, separate)
    (separate_grad,) = torch.autograd.grad(separate.sum(), x)
    torch.testing.assert_close(torch.autograd.grad(together.sum(), y)[0], separate_grad)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    z = scores[1].clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(compiled(z, target[1]), z)[0], separate_grad[1])


@pytest.fixture
def _nothing_seen(monkeypatch):
    monkeypatch.setattr(zero_gradients._Seen, "calls", 0)
    monkeypatch.setattr(zero_gradients._Seen, "warned", False)


@pytest.mark.usefixtures("_nothing_seen")
@pytest.mark.parametrize(
    ("given", "advice"),
    [({"window": 1e-9}, r"larger window \(received 1e-09\)"), ({"lam": 1e-9}, r"larger lam \(received 1e-09\)")],
)
@pytest.mark.parametrize("loss", [LOSSES["ap"], *OF_RANKS.values()], ids=["ap", *OF_RANKS])
def test_a_reach_that_is_too_short_is_said_once(loss, given, advice):
    with pytest.warns(UserWarning, match=rf"(3 of 3|4 of 4) lists with a loss have no gradient.*{advice}") as seen:
        [gradient(loss, SCORES, **given) for _ in range(20)]
    assert len(seen) == 1


@pytest.mark.usefixtures("_nothing_seen")
def test_no_warning_where_some_learn_nothing_is_left_or_no_gradient_is_wanted(recwarn):
    gradient(LOSSES["ap"], SCORES)
    mixed = SCORES.clone()
    mixed[1:] *= 1e12  # one list of four is within reach
    gradient(LOSSES["ap"], mixed, window=1.0)
    gradient(LOSSES["ap"], RELEVANCE.double(), window=1e-9)  # perfect
    LOSSES["ap"](SCORES, window=1e-9)
    x = SCORES[0].clone().requires_grad_()
    rankgrad.recall_loss(x, RELEVANCE[0], window=1e-9).backward()  # too few items to tell
    assert not recwarn.list


@pytest.mark.usefixtures("_nothing_seen")
def test_no_warning_of_losses_over_all_ranks_where_no_reach_would_help(recwarn):
    right = GRADES + 0.1 * SCORES.sigmoid()
    for loss in OF_RANKS.values():
        gradient(loss, SCORES)
        gradient(loss, right, window=1e-9)
    mixed = SCORES.clone()
    mixed[1:] *= 1e12  # one list of four is within reach
    gradient(LOSSES["ndcg"], mixed, window=1.0)
    assert not recwarn.list


@pytest.mark.usefixtures("_nothing_seen")
@pytest.mark.parametrize("weight", [torch.ones(3), lambda c: c.clamp(max=3.0)], ids=["given", "callable"])
def test_no_warning_of_a_weight_that_is_flat_where_items_stand(weight, recwarn):
    """Ten items behind twenty others: with weights for three ranks no reach would help."""
    scores, relevance = torch.linspace(1, 0, 30).repeat(4, 1), torch.arange(30).repeat(4, 1) >= 20
    value, grad = gradient(lambda s: rankgrad.recall_loss(s, relevance, weight=weight, window=9.0), scores)
    assert value > 0 and not grad.any() and not recwarn.list
    near = scores.clone()
    near[:, 20] = 0.95  # behind two others: too far for this window
    zero_gradients._Seen.calls = 0
    with pytest.warns(UserWarning, match=r"4 of 4 lists with a loss have no gradient.*larger window"):
        gradient(lambda s: rankgrad.recall_loss(s, relevance, weight=weight, window=1e-9), near)


@pytest.mark.usefixtures("_nothing_seen")
def test_groups_without_gradient():
    groups = torch.arange(120) % 4
    x = SCORES.flatten().requires_grad_()
    with pytest.warns(UserWarning, match="4 of 4 lists with a loss have no gradient"):
        rankgrad.recall_loss(x, RELEVANCE.flatten(), window=1e-9, groups=groups)


def test_spearman_learns_without_an_argument():
    """With a window of the whole spread all scores shrank to a point in a hundred steps."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 50, 20, 8, generator=generator)
    target = features[..., :3].sum(-1) + 0.3 * torch.randn(2, 50, 20, generator=generator)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer, loss = torch.optim.Adam(network.parameters(), 1e-2), rankgrad.SpearmanLoss()
    before = network(features[1]).std().item()
    for _ in range(300):
        optimizer.zero_grad()
        loss(network(features[0]).squeeze(-1), target[0]).backward()
        optimizer.step()
    scores = network(features[1]).squeeze(-1).detach()
    assert rankgrad.metrics.spearman(scores, target[1]) > 0.93
    assert scores.std().item() > before / 4
