"""Losses in blocks of queries: equal to the whole matrix, with few products and without its memory."""

import functools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rankgrad
from rankgrad.losses import _blocks
from rankgrad.losses._list_loss import loss_of_lists
from rankgrad.pairs import Lookup, unit_length

ROWS = 7
FORMS = {
    "recall": lambda **k: rankgrad.RecallLoss(**k),
    "weights": lambda **k: rankgrad.RecallLoss(weight=torch.tensor([1.0, 0.5, 0.25]), **k),
    "callable": lambda **k: rankgrad.RecallLoss(weight=torch.sqrt, **k),
    "ap": lambda **k: rankgrad.AveragePrecisionLoss(**k),
}
REACHES = {
    "lam": {"lam": 5.0, "margin": 0.05},
    "window": {"window": 0.3, "margin": 0.05},
    "automatic": {},
    "automatic margin": {"lam": 5.0, "margin": "auto"},
}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(_blocks, "block_rows", lambda candidates: ROWS)


def data(n=30, dim=8, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(n, dim, generator=g, dtype=dtype)
    return embeddings, torch.randint(6, (n,), generator=g), torch.randint(25, (n,), generator=g)


def by_the_matrix(loss, lookup):
    """The whole matrix of similarities, its loss, and autograd through the product."""
    scores, relevance, mask = lookup.pairs()
    options = {"lam": loss.lam, "window": loss.window, "margin": loss.margin, "mask": mask}
    return loss_of_lists(scores, relevance, form=loss.form, **options)


def gradients_of(make_value, *tensors):
    leaves = [one.clone().requires_grad_() for one in tensors]
    value = make_value(*leaves)
    (3 * value).backward()
    return value.detach(), *(one.grad for one in leaves)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [7, 30])
def test_a_batch_equals_the_matrix(monkeypatch, form, reach, rows):
    monkeypatch.setattr(_blocks, "block_rows", lambda candidates: rows)
    embeddings, labels, items = data()
    loss = FORMS[form](**REACHES[reach])
    found = gradients_of(lambda x: loss(x, labels, items=items), embeddings)

    def expected(x):
        unit = unit_length(x)
        return by_the_matrix(loss, Lookup(unit, labels, items, unit, labels, items))

    torch.testing.assert_close(found, gradients_of(expected, embeddings))
    assert (found[1] != 0).any()


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("form", FORMS)
def test_references_equal_the_matrix(small_blocks, form, reach):
    embeddings, labels, _ = data()
    refs, ref_labels, _ = data(41, seed=1)
    index = torch.randperm(41, generator=torch.Generator().manual_seed(2))[:30]
    loss = FORMS[form](**REACHES[reach])
    found = gradients_of(lambda x, r: loss(x, labels, r, ref_labels, index), embeddings, refs)

    def expected(x, r):
        lists = Lookup(unit_length(x), labels, index, unit_length(r), ref_labels, torch.arange(41))
        return by_the_matrix(loss, lists)

    torch.testing.assert_close(found, gradients_of(expected, embeddings, refs))
    frozen = refs.clone().requires_grad_()
    loss(embeddings, labels, frozen, ref_labels, index).backward()  # the gradient of the references alone
    torch.testing.assert_close(3 * frozen.grad, found[2])
    with torch.no_grad():
        assert torch.equal(loss(embeddings, labels, refs, ref_labels, index), found[0])


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_memory_in_blocks(monkeypatch, reach, dtype):
    """The same steps with blocks and with one block for all."""
    results = []
    for rows in (ROWS, 1000):
        monkeypatch.setattr(_blocks, "block_rows", lambda candidates, rows=rows: rows)
        loss, found = rankgrad.AveragePrecisionLoss(memory=2, **REACHES[reach]), []
        for step in range(4):
            embeddings, labels, items = data(seed=step, dtype=torch.float32)
            found += gradients_of(functools.partial(loss, labels=labels, items=items), embeddings.to(dtype))
        results.append(found)
    torch.testing.assert_close(*results)


class Counted(TorchDispatchMode):
    """Products of matrices, and the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, torch.Tensor):
                self.largest = max(self.largest, one.untyped_storage().nbytes())
        return out


SPECS = {
    "lam": _blocks.LossSpec("log", "lam", 5.0, 0.0, False, None),
    "window": _blocks.LossSpec("log", "window", 0.3, 0.0, False, None),
    "automatic": _blocks.LossSpec("log", "share", 1.0, 0.5, True, None),
    "hinge": _blocks.LossSpec("ap", "window", 0.3, forces="hinge", upper=0.9, lower=0.2, weight=0.7),
    "balanced": _blocks.LossSpec("log", "window", 0.3, forces="balanced", upper=0.1, lower=-0.1, weight=2.5),
}


@pytest.mark.parametrize("reach", SPECS)
@pytest.mark.parametrize(
    ("kind", "wanted", "products"),
    [
        ("batch", (True, False), 3),
        ("memory", (True, False), 2),
        ("references", (True, True), 3),
        ("batch", (False, False), 1),
    ],
)
def test_products_and_memory(monkeypatch, reach, kind, wanted, products):
    """Three products for a batch, two against a memory; nothing of the size of the matrix, nor near it."""
    queries, candidates, rows, dim = 600, 900, 20, 16
    monkeypatch.setattr(_blocks, "block_rows", lambda candidates: rows)
    rows_of = unit_length(data(queries, dim, dtype=torch.float32)[0])
    others = rows_of if kind == "batch" else unit_length(data(candidates, dim, seed=1, dtype=torch.float32)[0])
    labels, other_labels = torch.arange(queries) // 4, torch.arange(len(others)) // 4
    lookup = Lookup(rows_of, labels, torch.arange(queries), others, other_labels, torch.arange(len(others)))
    with Counted() as counted:
        _blocks._evaluate(
            lookup, _blocks.GlobalStats(), SPECS[reach], _blocks.GradientFlags(kind == "batch", *wanted)
        )
    blocks = queries // rows
    assert counted.products == blocks * (products + (reach in ("automatic", "hinge")))
    assert counted.largest <= max(8 * rows * (len(others) + 1), 4 * len(others) * dim)
    assert 8 * rows * len(others) < queries * len(others) / 2  # what would be seen of a matrix, even of bytes


@pytest.mark.parametrize("candidates", [1, 100, 2048, 16_384, 65_536, 10**6, 10**8])
def test_the_size_of_a_block(candidates):
    rows = _blocks.block_rows(candidates)
    assert rows >= 128
    assert rows == 128 or rows * candidates <= 1 << 26
    if candidates <= 4096:
        assert rows >= candidates  # a batch of a few thousand is one block


@pytest.mark.parametrize("form", ["ap", "callable", "hinge"])
def test_compiled(small_blocks, form):
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        loss, found = {**FORMS, "hinge": rankgrad.PairRankingLoss}[form](memory=1), []
        run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
        for step in range(3):
            embeddings, labels, items = data(seed=step)
            found += gradients_of(functools.partial(run, labels=labels, items=items), embeddings)
        results.append(found)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_opcheck(small_blocks, spec):
    embeddings, labels, items = data(20)
    refs, ref_labels, _ = data(23, seed=1)
    queries, others = (unit_length(one).detach().requires_grad_() for one in (embeddings, refs))
    batch = Lookup(queries, labels, items, queries, labels, items)
    against = Lookup(queries, labels, None, others, ref_labels, ref_labels, ref_labels > 1)
    for lookup, wanted in ((batch, (True, True, False)), (against, (False, True, True))):
        torch.library.opcheck(
            torch.ops.rankgrad.lookup_loss.default, (*lookup, *_blocks.GlobalStats(), *spec, *wanted)
        )
        detached = lookup._replace(queries=queries.detach(), candidates=lookup.candidates.detach())
        torch.library.opcheck(torch.ops.rankgrad.list_stats_op.default, (*detached, *spec, True))


def test_nan_and_nothing_relevant(small_blocks):
    embeddings, labels, _ = data()
    loss = rankgrad.RecallLoss()
    x = embeddings.clone().requires_grad_()
    value = loss(x, torch.arange(30))
    value.backward()
    assert value == 0 and (x.grad == 0).all()
    embeddings[20, 3] = math.nan
    with pytest.raises(ValueError, match="scores: expected no NaN"):
        loss(embeddings, labels)
    assert rankgrad.RecallLoss()(embeddings[:0], labels[:0]) == 0


BEYOND_RANKS = {
    "proxies": lambda: rankgrad.ProxyRankingLoss(6, 8, window=0.4, threshold=0.2, pairs=0.5),
    "hinge": lambda: rankgrad.PairRankingLoss(hinge=0.7, pull=0.6, push=0.1),
    "hinge, memory": lambda: rankgrad.PairRankingLoss(hinge=0.7, pull=0.6, push=0.1, memory=1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", BEYOND_RANKS)
def test_forces_in_blocks(monkeypatch, name, autocast, dtype):
    """Proxies and the hinge: value and all gradients are those of one block, which test_proxies checks."""
    results = []
    for rows in (ROWS, 2, 1000):
        monkeypatch.setattr(_blocks, "block_rows", lambda candidates, rows=rows: rows)
        torch.manual_seed(7)
        loss, found = BEYOND_RANKS[name](), []
        for step in range(3):
            embeddings, labels, items = data(seed=step, dtype=torch.float32)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found += gradients_of(functools.partial(loss, labels=labels, items=items), embeddings.to(dtype))
        results.append([*found, *(one.grad for one in loss.parameters())])
    assert all(one.isfinite().all() and one.any() for one in results[0])
    for several in results[:2]:
        torch.testing.assert_close(several, results[2])


@pytest.mark.parametrize("name", BEYOND_RANKS)
def test_forces_inside_transforms(name):
    """torch.func.vmap takes the matrix: values and gradients of one call after another."""
    torch.manual_seed(8)
    loss = BEYOND_RANKS[name]().eval()
    embeddings, labels, items = data(dtype=torch.float32)
    batches = torch.stack([embeddings, embeddings.flip(1)])
    if name == "proxies":
        loss.pairs = 0.0
        one = functools.partial(lookup_of_proxies, loss, labels)
    else:
        one = functools.partial(loss, labels=labels, items=items)
    x, y = (batches.clone().requires_grad_() for _ in range(2))
    values, expected = torch.func.vmap(one)(x), torch.stack([one(batch) for batch in y])
    torch.testing.assert_close(values, expected)
    values.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def lookup_of_proxies(loss, labels, embeddings):
    lists = Lookup(unit_length(loss.proxies), torch.arange(6), None, unit_length(embeddings), labels, labels)
    return _blocks.lookup_loss(lists, _blocks.GlobalStats(), loss.spec())


@pytest.mark.parametrize("reach", ["automatic", "hinge"])
def test_both_computations_of_a_block_have_the_same_bits(small_blocks, monkeypatch, reach):
    """What is counted first and what is ranked then are the same scores, in float32 too."""
    seen = []
    pairs = Lookup.pairs
    monkeypatch.setattr(Lookup, "pairs", lambda self: seen.append(pairs(self)) or seen[-1])
    embeddings, labels, items = data(dtype=torch.float32)
    queries = unit_length(embeddings).requires_grad_()
    lookup = Lookup(queries, labels, items, queries, labels, items)
    _blocks.lookup_loss(lookup, _blocks.GlobalStats(), SPECS[reach])
    blocks = -(-30 // ROWS)
    assert len(seen) == 2 * blocks
    for first, second in zip(seen[:blocks], seen[blocks:], strict=True):
        assert torch.equal(first.scores, second.scores)


def test_references_of_another_dtype():
    embeddings, labels, _ = data()
    refs, ref_labels, _ = data(41, seed=1)
    loss = rankgrad.RecallLoss()
    for left, right in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        found = gradients_of(lambda x, r: loss(x, labels, r, ref_labels), embeddings.to(left), refs.to(right))
        assert [one.dtype for one in found] == [left, left, right]


def test_no_queries_of_this_process():
    """Another process has some: these lists are none, and their candidates get no gradient from here."""
    candidates = unit_length(torch.randn(4, 8)).requires_grad_()
    labels, none = torch.tensor([0, 0, 1, 1]), torch.empty(0, dtype=torch.int64)
    queries = torch.empty(0, 8, requires_grad=True)
    lookup = Lookup(queries, none, none, candidates, labels, torch.arange(4))
    spec = rankgrad.RecallLoss(window=0.3).spec(torch.float32)
    loss = _blocks.lookup_loss(lookup, _blocks.GlobalStats(lists=torch.tensor(4)), spec)
    loss.backward()
    assert loss == 0 and queries.grad.shape == (0, 8) and not candidates.grad.any()
