"""The ranker's losses by name: baselines against loops, ours against the library, wrong arguments."""

import pytest
import torch

import rankgrad
from rankgrad.lab.ranker import baselines, losses
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.named import Named

import oracles_ranker as oracles

CASES = [
    (baselines.ranknet_loss, oracles.ranknet, {}),
    (baselines.ranknet_loss, oracles.ranknet, {"sigma": 2.5}),
    (baselines.lambdarank_loss, oracles.lambdarank, {}),
    (baselines.lambdarank_loss, oracles.lambdarank, {"sigma": 0.5, "k": 3}),
    (baselines.listnet_loss, oracles.listnet, {}),
    (baselines.approx_ndcg_loss, oracles.approx_ndcg, {}),
    (baselines.approx_ndcg_loss, oracles.approx_ndcg, {"temperature": 1.5}),
]


def batch(seed, sizes=(5, 1, 7, 3, 4)):
    """Queries of several sizes; the fourth has nothing relevant."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) * 3
    scores = torch.randn(len(groups), generator=generator, dtype=torch.float64)
    grades = torch.randint(0, 4, scores.shape, generator=generator).double()
    grades[groups == 9] = 0
    return scores, grades, groups


@pytest.mark.parametrize(("loss", "oracle", "arguments"), CASES)
def test_baselines_equal_loops(loss, oracle, arguments):
    for seed in range(4):
        scores, grades, groups = batch(seed)
        found = loss(scores, grades, groups, **arguments)
        assert float(found) == pytest.approx(oracle(scores, grades, groups, **arguments), rel=1e-5)


@pytest.mark.parametrize(("loss", "oracle", "arguments"), CASES)
def test_gradients_of_baselines(loss, oracle, arguments):
    """By differences of the loops: no score is near another, so the ranks that LambdaRank holds constant stay."""
    scores, grades, groups = batch(7)
    leaf = scores.clone().requires_grad_()
    loss(leaf, grades, groups, **arguments).backward()
    step = 1e-5
    for item in range(len(scores)):
        ends = []
        for side in (step, -step):
            moved = scores.clone()
            moved[item] += side
            ends.append(oracle(moved, grades, groups, **arguments))
        assert float(leaf.grad[item]) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("loss", [*losses.BASELINES, *losses.OURS])
def test_losses_learn_and_skip_queries_without_relevant_items(loss):
    arguments = {} if loss in losses.BASELINES else {"lam": 5.0}
    made = losses.build(Named(name=loss, **arguments), 1.0)
    scores, grades, groups = batch(3)
    leaf = scores.clone().requires_grad_()
    made(leaf, grades, groups).backward()
    assert bool(leaf.grad.isfinite().all()) and bool((leaf.grad != 0).any())
    if loss != "spearman":
        assert not leaf.grad[groups == 9].any()
    assert not leaf.grad[groups == 3].any()  # one item
    nothing = scores.clone().requires_grad_()
    made(nothing, torch.zeros_like(grades), groups).backward()
    assert bool(nothing.grad.isfinite().all())
    moved = scores - 0.5 * leaf.grad / leaf.grad.abs().max()
    assert float(made(moved, grades, groups)) <= float(made(scores, grades, groups))


def test_ours_are_the_library_on_each_query():
    scores, grades, groups = batch(5)
    own = [groups == number for number in groups.unique()]
    for threshold in (1.0, 2.0):
        wanted = [
            rankgrad.average_precision_loss(scores[q], grades[q] >= threshold, lam=2.0)
            for q in own
            if bool((grades[q] >= threshold).any())
        ]
        found = losses.build(Named(name="ap", lam=2.0, margin=0), threshold)(scores, grades, groups)
        assert float(found) == pytest.approx(float(torch.stack(wanted).mean()))
    wanted = [
        rankgrad.ndcg_loss(scores[q], grades[q], lam=2.0, gain="exponential") for q in own if bool(grades[q].any())
    ]
    found = losses.build(Named(name="ndcg", lam=2.0, gain="exponential", margin=0), 1.0)(scores, grades, groups)
    assert float(found) == pytest.approx(float(torch.stack(wanted).mean()))


@pytest.mark.parametrize("name", ["ap", "ndcg", "recall", "spearman"])
def test_ours_train_with_a_margin(name):
    """As the Modules do: without one NDCG on MQ2008 fell apart at a rate of 1e-2."""
    scores, grades, groups = batch(5)
    given, auto = losses.build(Named(name=name), 1.0), losses.build(Named(name=name, margin="auto"), 1.0)
    assert given(scores, grades, groups) == auto(scores, grades, groups)
    assert losses.arguments_of(Named(name=name))["loss.margin"][0] == "auto"


def test_spearman_is_of_the_grades():
    scores, grades = torch.tensor([0.3, 0.1, 0.2]), torch.tensor([2.0, 0.0, 1.0])
    made = losses.build(Named(name="spearman", lam=1.0, margin=0), 1.0)
    assert float(made(scores, grades, torch.zeros(3, dtype=torch.int64))) == 0
    assert float(made(-scores, grades, torch.zeros(3, dtype=torch.int64))) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "lambda"}, "loss: unknown name 'lambda', did you mean 'lambdarank'?"),
        ({"name": "ranknet", "sigm": 1}, "loss.sigm: unknown argument of ranknet, did you mean 'sigma'?"),
        ({"name": "ap", "mask": 1}, "loss.mask: unknown argument of ap"),
        ({"name": "ap", "window": -1}, "loss: ap: window: expected"),
        ({"name": "lambdarank", "k": 0}, "loss: lambdarank: k: expected an integer >= 1, received 0"),
        ({"name": "lambdarank", "sigma": float("nan")}, "loss: lambdarank: sigma: expected a finite number > 0"),
        ({"name": "ranknet", "sigma": -1}, "loss: ranknet: sigma: expected a finite number > 0, received -1"),
        ({"name": "approxndcg", "temperature": 0}, "loss: approxndcg: temperature: expected a finite number > 0"),
    ],
)
def test_wrong_arguments(given, message):
    with pytest.raises(UserError) as caught:
        losses.build(Named(**given), 1.0)
    assert str(caught.value).startswith(message)


def test_an_objective_of_lightgbm():
    """Near its own lambdarank (84.0); second derivatives of 1 instead give 66.1, no trees 18.5."""
    pytest.importorskip("lightgbm", reason="pip install 'rankgrad[ranker]'")
    from examples.lightgbm_objective import average_precision, train

    assert train(average_precision, trees=20) > 78
