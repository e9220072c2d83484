"""torch.compile(fullgraph=True), torch.func.vmap, opcheck and other surroundings of a call, each with backward."""

import gc
import weakref
from typing import ClassVar

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import rankgrad
from rankgrad import metrics, surrogates
from rankgrad.engine import ops, rank_ops
from rankgrad.engine.forms import weight_tables
from rankgrad.engine.request import Request

SCORES = torch.randn(4, 3, 11, generator=torch.Generator().manual_seed(0))
RELEVANCE = torch.rand(4, 3, 11, generator=torch.Generator().manual_seed(1)) < 0.3
MASK = torch.rand(4, 3, 11, generator=torch.Generator().manual_seed(2)) < 0.8
FUNCTIONS = {
    "rank": lambda s, r, m: (rankgrad.rank(s, lam=0.7, mask=m) * (1 + r)).sum(),
    "rank_loss": lambda s, r, m: rankgrad.rank_loss(lambda k: (k * r).sum(-1) ** 2, s, lam=0.1, mask=m),
    "recall": lambda s, r, m: rankgrad.recall_loss(s, r, lam=7.0, margin=0.1, mask=m),
    "recall callable": lambda s, r, m: rankgrad.recall_loss(s, r, lam=3.0, weight=torch.sqrt, mask=m),
    "recall weights": lambda s, r, m: rankgrad.recall_loss(
        s, r, lam=3.0, weight=torch.tensor([0.5, 0.3, 0.2]), mask=m
    ),
    "ap": lambda s, r, m: rankgrad.average_precision_loss(s, r, lam=7.0, mask=m),
    "ap none": lambda s, r, m: (
        rankgrad.average_precision_loss(s, r, lam=7.0, mask=m, reduction="none").square().sum()
    ),
    "map": lambda s, r, m: rankgrad.mean_average_precision_loss(s[0], r[0], lam=70.0, mask=m[0]),
    "map window": lambda s, r, m: rankgrad.mean_average_precision_loss(s[0], r[0], window=3.0, mask=m[0]),
    "pooled": lambda s, r, m: rankgrad.pooled_average_precision_loss(s[0], r[0], lam=7.0, mask=m[0]),
    "ndcg": lambda s, r, m: rankgrad.ndcg_loss(s, r, lam=9.0, mask=m),
    "spearman": lambda s, r, m: rankgrad.spearman_loss(s, target_ranks=1 + r.float().cumsum(-1), lam=0.7, mask=m),
}
PER_ELEMENT = [name for name in FUNCTIONS if name not in ("map", "map window", "pooled")]


def value_and_grad(fn):
    x = SCORES.clone().requires_grad_()
    value = fn(x, RELEVANCE, MASK)
    value.sum().backward()
    return value.detach(), x.grad


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compile_fullgraph(name):
    torch._dynamo.reset()
    expected = value_and_grad(FUNCTIONS[name])
    got = value_and_grad(torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1])
    assert expected[1].abs().sum() > 0
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")(SCORES, RELEVANCE, MASK),
            expected[0],
        )


@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "transposed"])
def test_compile_with_inductor(turned):
    """It relies on the strides that the ops promise, also where those of the scores are others."""
    torch._dynamo.reset()

    def every(scores, relevance, mask):
        lists = (scores, relevance, mask)
        if turned:
            lists = tuple(one.transpose(1, 2) for one in lists)
        return sum(function(*lists).sum() for function in FUNCTIONS.values())

    def measured(scores, relevance, mask):
        flat = [one[0].T if turned else one[0] for one in (scores, relevance, mask)]
        found = metrics.mean_average_precision(*flat[:2], mask=flat[2])
        return found + sum(
            metric(*flat[:2], mask=flat[2]) for metric in (metrics.reciprocal_rank, metrics.map_at_r)
        )

    expected = value_and_grad(every)
    got = value_and_grad(torch.compile(every, fullgraph=True))
    torch.testing.assert_close(got, expected)
    lists = (SCORES, RELEVANCE, MASK)
    torch.testing.assert_close(torch.compile(measured, fullgraph=True)(*lists), measured(*lists))


def test_compiled_module_with_memory():
    torch._dynamo.reset()
    eager, compiled = rankgrad.RecallLoss(memory=2), rankgrad.RecallLoss(memory=2)
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for step in range(5):
        torch.manual_seed(step)
        embeddings, labels = torch.randn(8, 4), torch.randint(3, (8,))
        a, b = embeddings.clone().requires_grad_(), embeddings.clone().requires_grad_()
        x, y = eager(a, labels), run(b, labels)
        x.backward()
        y.backward()
        torch.testing.assert_close(y, x)
        torch.testing.assert_close(b.grad, a.grad)


@pytest.mark.parametrize("name", PER_ELEMENT)
def test_vmap_is_a_loop_of_calls(name):
    """Each element is a call of its own, with its own L; no gate on requires_grad may eat the gradient."""
    fn = FUNCTIONS[name]
    if name == "recall weights":
        weights = torch.tensor([0.5, 0.3, 0.2])
        fn = lambda s, r, m: rankgrad.recall_loss(s, r, lam=3.0, weight=weights, mask=m)  # noqa: E731
    upstream = torch.tensor([1.0, 2.0, -1.0, 0.5])
    x, y = SCORES.clone().requires_grad_(), SCORES.clone().requires_grad_()
    mapped = torch.func.vmap(fn)(x, RELEVANCE, MASK)
    looped = torch.stack([fn(y[k], RELEVANCE[k], MASK[k]) for k in range(4)])
    torch.testing.assert_close(mapped, looped)
    (mapped * upstream).sum().backward()
    (looped * upstream).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["rank", "ap", "recall callable", "rank_loss"])
def test_vmap_without_gradient_and_of_nothing(name):
    with torch.no_grad():
        mapped = torch.func.vmap(FUNCTIONS[name])(SCORES, RELEVANCE, MASK)
        looped = torch.stack([FUNCTIONS[name](SCORES[k], RELEVANCE[k], MASK[k]) for k in range(4)])
    torch.testing.assert_close(mapped, looped)
    empty = torch.zeros(4, 3, 0)
    torch.func.vmap(lambda s, r, m: rankgrad.average_precision_loss(s, r, lam=1.0, mask=m))(
        empty, empty, empty > 0
    )


def test_compile_with_a_changing_lam_and_dynamic_shapes():
    torch._dynamo.reset()

    def fn(s, r, lam):
        return rankgrad.average_precision_loss(s, r, lam=lam, margin=0.1)

    run = torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager")
    for lam in (7.0, 8.5, 70.0):
        a, b = SCORES.clone().requires_grad_(), SCORES.clone().requires_grad_()
        fn(a, RELEVANCE, lam).backward()
        run(b, RELEVANCE, lam).backward()
        assert torch.equal(a.grad, b.grad)


def test_vmap_over_scores_only_and_nested():
    x, y = SCORES.clone().requires_grad_(), SCORES.clone().requires_grad_()

    def fn(s):
        return rankgrad.average_precision_loss(s, RELEVANCE[0, 0], lam=0.7)

    torch.func.vmap(torch.func.vmap(fn))(x).sum().backward()
    torch.stack([fn(row) for row in y.reshape(-1, 11)]).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_vmap_other_dimensions():
    x, y = SCORES.clone().requires_grad_(), SCORES.clone().requires_grad_()
    fn = FUNCTIONS["ap"]
    torch.func.vmap(fn, in_dims=1)(x, RELEVANCE, MASK).sum().backward()
    torch.stack([fn(y[:, k], RELEVANCE[:, k], MASK[:, k]) for k in range(3)]).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_nan_is_reported_when_compiled_and_vmapped():
    bad = SCORES.clone()
    bad[1, 2, 3] = torch.nan
    mask = torch.ones_like(MASK)
    torch._dynamo.reset()
    for run in (
        torch.compile(FUNCTIONS["ap"], fullgraph=True, backend="aot_eager"),
        torch.func.vmap(FUNCTIONS["ap"]),
    ):
        with pytest.raises(ValueError, match="scores: expected no NaN"):
            run(bad, RELEVANCE, mask)


def op_calls():
    x = SCORES.clone()
    grad_x = SCORES.clone().requires_grad_()
    rows, exists = grad_x[0], MASK[0]
    asked = Request(x, RELEVANCE, MASK, strength=0.7, margin=0.1)
    answer = ops.evaluate_op(*asked)
    tables = weight_tables(torch.rand(4))
    flat, offsets = SCORES.reshape(len(x), -1), torch.arange(0, 34, 11).expand(len(x), -1).contiguous()
    return {
        "ranks": (rank_ops.ranks, (x[0], exists, None, "average")),
        "rank": (rank_ops.rank, (rows, exists, 0.7, "ordinal")),
        "rank_backward": (
            rank_ops.rank_backward,
            (torch.randn(3, 11), x[0], rank_ops.ranks(x[0], None, None, "min"), None, 0.7, "min"),
        ),
        "standings": (ops.standings, asked),
        "evaluate": (ops.evaluate_op, asked._replace(tables=tables, form="tables", max_relevant=11)),
        "evaluate, no gradient": (
            ops.evaluate_op,
            asked._replace(scores=x.half(), mask=None, form="log", with_gradient=False, check_finite=True),
        ),
        "evaluate, window": (ops.evaluate_op, asked._replace(reach="window", scores=x.double())),
        "evaluate, automatic": (ops.evaluate_op, asked._replace(reach="share", margin_is_share=True)),
        "evaluate, ragged": (
            ops.evaluate_op,
            Request(flat, RELEVANCE.reshape(flat.shape), None, offsets, lists=torch.full((len(x),), 7)),
        ),
        "reduce_lists": (ops.reduce_lists, (grad_x, *answer, None, "mean")),
        "reduce_lists, none": (ops.reduce_lists, (grad_x, *answer, None, "none")),
        "reduce_lists_backward": (
            ops.reduce_lists_backward,
            (torch.randn(4), *answer, None, "sum", torch.float16),
        ),
    }


@pytest.mark.parametrize("name", op_calls())
def test_opcheck(name):
    op, args = op_calls()[name]
    torch.library.opcheck(op, args)


SURROGATES = {
    "smoothap": lambda s, r, m: surrogates.smoothap_loss(s, r, mask=m),
    "smoothap rank": lambda s, r, m: (surrogates.smoothap_rank(s, mask=m) * r).sum(),
    "fastap rank": lambda s, r, m: (surrogates.fastap_rank(s, mask=m) * r).sum(),
    "permutahedron rank": lambda s, r, m: (surrogates.permutahedron_rank(s, mask=m) * r).sum(),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *SURROGATES])
def test_a_mask_from_inference_mode(name):
    fn = {**FUNCTIONS, **SURROGATES}[name]
    with torch.inference_mode():
        mask = MASK.clone()
    got = value_and_grad(lambda s, r, m: fn(s, r, mask))
    torch.testing.assert_close(got, value_and_grad(fn), rtol=0, atol=0)


def checkpointed(fn, *args):
    return checkpoint(fn, *args, use_reentrant=False)


def saved_on_the_cpu(fn, *args):
    with torch.autograd.graph.save_on_cpu():
        return fn(*args)


@pytest.mark.parametrize("run", [checkpointed, saved_on_the_cpu])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_hooks_on_saved_tensors(name, run):
    got = value_and_grad(lambda *args: run(FUNCTIONS[name], *args))
    torch.testing.assert_close(got, value_and_grad(FUNCTIONS[name]), rtol=0, atol=0)


class Marked(torch.autograd.Function):
    """The identity; its marks live as long as the graphs it is in."""

    marks: ClassVar = weakref.WeakSet()

    @staticmethod
    def forward(ctx, x):
        ctx.mark = type("Mark", (), {})()
        Marked.marks.add(ctx.mark)
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        return upstream


@pytest.mark.parametrize("run", [checkpointed, saved_on_the_cpu])
def test_nothing_is_kept_under_hooks_on_saved_tensors(run):
    """An operation that saves its own output, as exp does, keeps itself alive if that is packed as it is."""

    def weight(counts):
        return 1 - torch.exp(-Marked.apply(counts))

    def loss(scores):
        return rankgrad.recall_loss(scores, RELEVANCE, lam=0.3, weight=weight)

    run(loss, SCORES.clone().requires_grad_()).backward()
    assert not run(loss, SCORES.clone()).requires_grad  # no more than without hooks
    gc.collect()
    assert not Marked.marks


@pytest.mark.parametrize("run", [checkpointed, saved_on_the_cpu])
@pytest.mark.parametrize(
    "value",
    [
        lambda k, w: (k * w).square().sum(-1),
        lambda k, w: w.square().sum().expand(k.shape[:-1]),  # says nothing about the ranks
        lambda k, w: k.detach().sum(-1),  # about nothing at all
    ],
)
def test_parameters_of_a_function_under_hooks_on_saved_tensors(value, run):
    """They get their gradient once, by backward: not in forward, when the slopes are taken."""
    results = []
    for by in (run, lambda fn, *args: fn(*args)):
        scores = SCORES.clone().requires_grad_()
        weight = torch.linspace(0.5, 2.0, 11).requires_grad_()
        loss = by(lambda s, w: rankgrad.rank_loss(lambda k: value(k, w), s, lam=0.1), scores, weight)
        assert weight.grad is None
        loss.backward()
        results.append((loss.detach(), scores.grad, 0 if weight.grad is None else weight.grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"lam": 7.0}, {"lam": 0.3, "weight": torch.log1p}, {"window": 0.3}])
@pytest.mark.parametrize("keep", [True, False])
def test_a_batch_of_gradients(options, keep):
    x = SCORES[0].clone().requires_grad_()

    def losses():
        return rankgrad.recall_loss(x, RELEVANCE[0], mask=MASK[0], reduction="none", **options)

    expected = torch.stack([torch.autograd.grad(losses()[k], x)[0] for k in range(3)])
    (by_autograd,) = torch.autograd.grad(losses(), x, torch.eye(3), is_grads_batched=True, retain_graph=keep)
    value = losses()
    by_vmap = torch.func.vmap(lambda upstream: torch.autograd.grad(value, x, upstream, retain_graph=keep)[0])
    torch.testing.assert_close(by_autograd, expected)
    torch.testing.assert_close(by_vmap(torch.eye(3)), expected)
    assert expected.abs().sum() > 0


@pytest.mark.parametrize("name", ["ndcg_loss", "spearman_loss", "recall_loss"])
def test_losses_of_tensors_without_values(name):
    """As tools that plan memory run a model."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        grades = torch.rand(2, 9) if name == "spearman_loss" else torch.randint(2, (2, 9))
        assert getattr(rankgrad, name)(torch.rand(2, 9), grades).shape == ()
