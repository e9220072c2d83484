"""On a CUDA device: PYTHONPATH=src python3 -m pytest -m gpu tests/test_gpu.py"""

import itertools

import pytest
import torch

import rankgrad
from rankgrad.engine import cuda, dense, dispatch, embeddings, reference, short, spread
from rankgrad.pairs import unit_length

from cases import (
    DTYPES,
    FORMS,
    KINDS,
    SHARES,
    assert_equal_to_reference,
    assert_standings_equal_to_reference,
    make,
    request,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = {
    "retrieval": (1, 128, 512),
    "retrieval, odd": (2, 33, 2049),
    "wide": (1, 16, 65_536),
    "one list": (1, 1, 99_991),
    "few lists": (3, 2, 70_003),
}


def reaching(reach, calls=1, *, lam):
    """A reach of each kind: a lambda, a window, or window and margin as shares of each call's spread."""
    if reach == "lam":
        return {"reach": "lam", "strength": lam}
    if reach == "window":
        return {"reach": "window", "strength": 0.7}
    spread = torch.linspace(0.8, 1.3, calls, dtype=torch.float64, device="cuda")
    return {"reach": "share", "strength": 0.5, "margin": 0.3, "margin_is_share": True, "spread": spread}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", SHARES)
def test_equal_to_the_reference(shape, kind, share):
    if SHAPES[shape][2] == 65_536 and share > 0.01:
        pytest.skip("slow by design without a hint; see the dense test")
    for number, (form, masked) in enumerate(itertools.product(FORMS, (False, True))):
        data = make(
            kind, SHAPES[shape], share, dtype=DTYPES[number % 3], masked=masked, seed=number, device="cuda"
        )
        reach = reaching(("lam", "window", "share")[(number + number // 2) % 3], SHAPES[shape][0], lam=100.0)
        assert_equal_to_reference(cuda, *data, form, **{"margin": 0.25 * (number % 3), **reach})


@pytest.mark.parametrize("relevant", [3, 16])
@pytest.mark.parametrize("lists", [17, 600])
def test_long_lists_with_a_hint_of_few_relevant_items(lists, relevant):
    """Few lists by wide programs, many by narrow ones."""
    scores, relevance, mask = make("ties", (1, lists, 100_003), 0.0, masked=True, device="cuda")
    relevance[..., 5 : 100_000 : 100_000 // relevant] = True
    assert cuda.regime(request(scores, relevance, mask, "ap", max_relevant=16)) is short
    for reach in ("lam", "window", "share"):
        given = {"margin": 0.25, **reaching(reach, lam=100.0)}
        assert_equal_to_reference(cuda, scores, relevance, mask, "ap", max_relevant=16, **given)


def test_embeddings_of_more_dimensions():
    rows = torch.randn(4, 3, 16, device="cuda", requires_grad=True)
    unit = unit_length(rows)
    torch.testing.assert_close(unit, torch.nn.functional.normalize(rows, dim=-1))
    unit.sum().backward()
    assert rows.grad.shape == rows.shape


@pytest.mark.parametrize("shape", [(1, 3), (70, 512), (33, 4001)])
def test_embeddings_by_kernels(shape):
    rows, grad = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda")
    rows[0] = 0
    lengths = rows.double().norm(dim=1, keepdim=True)
    unit, found = embeddings.normalized(rows)
    torch.testing.assert_close(unit.double(), rows.double() / lengths.clamp(min=1e-12), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.double(), lengths, rtol=1e-6, atol=0)
    on_cpu = embeddings.normalized_backward(*(one.cpu().double() for one in (grad, unit, found)), 1e-6)
    torch.testing.assert_close(
        embeddings.normalized_backward(grad, unit, found, 1e-6).cpu().double(), on_cpu, rtol=1e-4, atol=1e-6
    )
    labels, numbers = torch.randint(5, shape[:1], device="cuda"), torch.arange(shape[0], device="cuda")
    others, valid = torch.randint(5, (700,), device="cuda"), torch.rand(700, device="cuda") < 0.5
    for own, exists in ((None, None), (numbers, None), (None, valid), (numbers, valid)):
        given = labels, own, others, torch.arange(700, device="cuda"), exists
        expected = embeddings.relevance_and_mask(*(one if one is None else one.cpu() for one in given))
        for got, right in zip(embeddings.relevance_and_mask(*given), expected, strict=True):
            assert got is None if right is None else torch.equal(got.cpu(), right)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_dense_hint(kind, share):
    data = make(kind, (1, 3, 30_011), share, masked=kind in ("ties", "sorted"), device="cuda")
    assert_equal_to_reference(cuda, *data, "ap", lam=10.0, margin=0.25, max_relevant=30_011)
    assert_equal_to_reference(dense, *data, "loglog", lam=10.0, margin=0.0)
    assert_equal_to_reference(cuda, *data, "ap", margin=0.25, max_relevant=30_011, **reaching("window", lam=10.0))
    assert_equal_to_reference(dense, *data, "log", **reaching("share", lam=10.0))


@pytest.mark.parametrize("share", [0.012, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("lists", [1, 2, 5])
def test_more_relevant_items_than_pairs_are_compared_for(share, lists):
    data = make("ties" if lists == 2 else "random", (1, lists, 1_000_003), share, device="cuda")
    assert_equal_to_reference(cuda, *data, "log", lam=100.0, margin=0.0)
    assert_equal_to_reference(cuda, *data, "log", **reaching("window", lam=100.0))


@pytest.mark.parametrize("reach", ["lam", "window"])
def test_so_many_relevant_items_that_each_round_of_their_sort_is_a_launch(reach):
    data = make("ties" if reach == "lam" else "random", (1, 1, 6_000_001), 0.4, device="cuda")
    assert_equal_to_reference(cuda, *data, "ap", **reaching(reach, lam=100.0))


def test_very_many_long_lists():
    """More lists than a grid's second axis has places for."""
    data = make("random", (1, 70_000, 40), 0.1, device="cuda")
    assert_equal_to_reference(cuda.long, *data, "ap", **reaching("window", lam=100.0))


@pytest.mark.parametrize(("shape", "hint"), [((1, 70_000), None), ((32, 512), None), ((1, 30_000), 30_000)])
def test_tensors_that_start_anywhere(shape, hint):
    """Kernels are compiled for aligned tensors where they are, and kept: other tensors need other kernels."""
    size = shape[0] * shape[1]
    for offset in (0, 1, 0, 3, 16):
        scores, relevance, _ = make("random", (size + 16,), 0.1, device="cuda")
        part = slice(offset, offset + size)
        for first, second in ((scores[part], relevance[:size]), (scores[:size], relevance[part])):
            data = (first.reshape(1, *shape), second.reshape(1, *shape), None)
            assert_equal_to_reference(cuda, *data, "ap", lam=10.0, margin=0.1, max_relevant=hint)


@pytest.mark.parametrize("masked", [False, True])
def test_the_two_steps_by_themselves(masked):
    for shape in ((1, 1, 50_021), (2, 20, 301)):
        assert_standings_equal_to_reference(cuda, *make("ties", shape, 0.05, masked=masked, device="cuda"))


REACHES = {"lam": {"lam": 5.0, "margin": 0.1}, "window": {"window": 0.7, "margin": 0.1}, "automatic": {}}


def loss(scores, relevance, **kwargs):
    given = kwargs.keys() & {"window", "lam"}
    reach = REACHES["lam"] if not given else {"margin": 0.1}
    return rankgrad.average_precision_loss(scores, relevance, **{**reach, **kwargs})


def loss_with(reach):
    """The AP loss with a reach of each kind."""
    return lambda scores, relevance: rankgrad.average_precision_loss(scores, relevance, **REACHES[reach])


SMALL = [(64, 200), (40_000,)]


@pytest.mark.parametrize("shape", SMALL)
def test_no_host_sync(shape):
    scores = torch.randn(shape, device="cuda", requires_grad=True)
    relevance = torch.rand(shape, device="cuda") < 0.05
    weights = torch.rand(5, device="cuda")
    module = rankgrad.RecallLoss(memory=2).cuda()
    embeddings, labels = (
        torch.randn(64, 32, device="cuda", requires_grad=True),
        torch.arange(64, device="cuda") // 4,
    )

    def step_with(reach):
        return lambda: loss_with(reach)(scores, relevance).backward()

    runs = [
        *[step_with(reach) for reach in REACHES],
        lambda: loss(scores, relevance, max_relevant=shape[-1]).backward(),
        lambda: loss(scores, relevance, window=0.7, max_relevant=shape[-1]).backward(),
        lambda: loss(scores, relevance.long(), window=0.7).backward(),
        lambda: loss(scores, relevance, margin="auto").backward(),
        lambda: rankgrad.recall_loss(scores, relevance, window=1.0, weight=torch.sqrt).backward(),
        lambda: rankgrad.recall_loss(scores, relevance, lam=1.0, weight=weights).backward(),
        lambda: rankgrad.recall_loss(scores, relevance, lam=1.0, weight=torch.sqrt).backward(),
        lambda: rankgrad.rank(scores, lam=1.0).sum().backward(),
        lambda: rankgrad.rank_loss(lambda r: r.square().mean(-1), scores, lam=1.0).backward(),
        lambda: module(embeddings, labels).backward(),
    ]
    for run in runs:
        run()  # compile the kernels, allocate
    torch.cuda.set_sync_debug_mode("error")
    try:
        for run in runs:
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("shape", SMALL)
def test_cuda_graph_replays_on_new_values(shape, reach):
    scores = torch.randn(shape, device="cuda", requires_grad=True)
    relevance = torch.rand(shape, device="cuda") < 0.05
    loss = loss_with(reach)

    def step():
        scores.grad = None
        value = loss(scores, relevance)
        value.backward()
        return value

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    scores.grad = None
    with torch.cuda.graph(graph):
        value = step()
    static_grad = scores.grad
    for seed in range(3):
        new_scores, new_relevance, _ = make("random", shape, 0.02 * (seed + 1), seed=seed, device="cuda")
        with torch.no_grad():
            scores.copy_(new_scores)
            relevance.copy_(new_relevance)
        graph.replay()
        other = new_scores.clone().requires_grad_()
        expected = loss(other, new_relevance)
        expected.backward()
        assert torch.equal(value, expected)
        assert torch.equal(static_grad, other.grad)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("shape", SMALL)
def test_compile_fullgraph(shape, reach):
    torch._dynamo.reset()
    loss = loss_with(reach)
    scores, relevance, _ = make("random", shape, 0.05, device="cuda")
    a, b = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    loss(a, relevance).backward()
    torch.compile(loss, fullgraph=True)(b, relevance).backward()
    assert torch.equal(a.grad, b.grad)
    assert a.grad.abs().sum() > 0


@pytest.mark.parametrize("reach", REACHES)
def test_vmap_makes_every_element_a_call(reach):
    scores, relevance, _ = make("random", (3, 20, 301), 0.05, device="cuda")
    scores *= torch.tensor([1.0, 2.0, 5.0], device="cuda")[:, None, None]
    together, alone = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    torch.vmap(loss_with(reach))(together, relevance).sum().backward()
    sum(loss_with(reach)(one, marked) for one, marked in zip(alone, relevance, strict=True)).backward()
    assert torch.equal(together.grad, alone.grad)
    assert alone.grad.abs().sum() > 0


def test_opcheck():
    scores, relevance, mask = make("random", (1, 20, 301), 0.1, masked=True, device="cuda")
    asked = request(scores, relevance, mask, "ap", strength=2.0, margin=0.1)
    torch.library.opcheck(rankgrad.engine.ops.evaluate_op, asked)
    leaf, answer = scores.clone().requires_grad_(), rankgrad.engine.ops.evaluate_op(*asked)
    torch.library.opcheck(rankgrad.engine.ops.reduce_lists, (leaf, *answer, None, "mean"))


@pytest.mark.parametrize("shape", SMALL)
def test_nan_makes_the_loss_and_gradient_nan_or_raises_if_asked(shape):
    scores, relevance, _ = make("random", shape, 0.05, device="cuda")
    scores.view(-1)[7] = torch.nan
    x = scores.clone().requires_grad_()
    value = loss(x, relevance)
    value.backward()
    assert value.isnan()
    assert x.grad.isnan().any()
    with pytest.raises(ValueError, match="scores: expected no NaN"):
        loss(scores, relevance, check_finite=True)
    mask = ~scores.isnan()
    assert loss(scores, relevance, mask=mask).isfinite()
    assert rankgrad.metrics.average_precision(scores, relevance, reduction="none").isnan().any()
    ranks = rankgrad.rank(scores, lam=1.0)
    assert ranks.isnan().any()


@pytest.mark.parametrize("shape", SMALL)
def test_relevance_that_is_neither_0_nor_1_makes_the_loss_nan(shape):
    scores, relevance, _ = make("random", shape, 0.05, device="cuda")
    for dtype in (torch.int64, torch.uint8, torch.float32):
        grades = relevance.to(dtype)
        for reach in REACHES:
            assert torch.equal(loss_with(reach)(scores, grades), loss_with(reach)(scores, relevance))
        grades.view(-1)[11] = 3
        assert loss(scores, grades).isnan()
        for some in (..., 0) if len(shape) > 1 else (...,):  # many lists, and the one of them that is wrong
            assert rankgrad.metrics.average_precision(scores[some], grades[some]).isnan()
        with pytest.raises(ValueError, match="relevance: expected only 0 and 1"):
            loss(scores, grades, check_finite=True)


@pytest.mark.parametrize("window", [None, 0.7])
def test_a_wrong_hint_for_short_lists(window):
    """p = 5 with a hint of 4, 20 with 16, 27 with 4: the loss is NaN, and other lists keep their values."""
    for relevant, hint in ((5, 4), (20, 16), (27, 4)):
        scores, relevance, _ = make("random", (64, 200), 0.0, device="cuda")
        relevance[:, :3] = True
        relevance[7, :relevant] = True
        given = {"window": window} if window else {}
        right = loss(scores, relevance, reduction="none", **given)
        wrong = loss(scores, relevance, reduction="none", max_relevant=hint, **given)
        assert wrong.isnan().nonzero().flatten().tolist() == [7]
        assert torch.equal(wrong[wrong.isfinite()], right[wrong.isfinite()])


def test_a_wrong_hint_is_never_a_wrong_result():
    scores, relevance, _ = make("random", (200_003,), 0.01, device="cuda")
    assert loss(scores, relevance, max_relevant=100).isnan()
    assert loss(scores, relevance, max_relevant=100, window=0.5).isnan()
    assert loss(scores, relevance, max_relevant=10_000) == loss(scores, relevance)


@pytest.mark.parametrize("reach", ["lam", "window", "share"])
@pytest.mark.parametrize("shape", [(1, 300_007), (256, 1024)])
def test_the_same_bit_for_bit(shape, reach):
    scores, relevance, _ = make("ties", (1, *shape), 0.1, device="cuda")
    asked = request(scores, relevance, None, "log_ap", **{"margin": 0.1, **reaching(reach, lam=5.0)})
    first = cuda.evaluate(asked)
    for _ in range(3):
        again = cuda.evaluate(asked)
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("n", [655_360, 100_000_000])
def test_fp16_under_a_grad_scaler_does_not_underflow(n):
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.randn(n, generator=generator, device="cuda").half()
    relevance = torch.rand(n, generator=generator, device="cuda") < 1000 / n
    x = torch.nn.Parameter(scores.clone())
    scaler = torch.amp.GradScaler("cuda", init_scale=65536.0)
    scaler.scale(rankgrad.average_precision_loss(x, relevance, lam=0.5, margin=0.5, log=True)).backward()
    y = scores.float().requires_grad_()
    (65536.0 * rankgrad.average_precision_loss(y, relevance, lam=0.5, margin=0.5, log=True)).backward()
    assert torch.equal(x.grad, y.grad.half())
    moved = y.grad != 0
    assert moved.any()
    # a half-precision gradient kept at upstream one would have lost them at n = 100M: 1 / (lam n) is below 2^-25
    if n > 10**8 - 1:
        assert ((y.grad[moved] / 65536).half() == 0).any()
    assert (x.grad[moved] != 0).all()


def test_beyond_2_to_the_31_items():
    """torch cannot sort that many: against direct counting with few relevant items."""
    n = 2**31 + 7
    scores = torch.empty(n, device="cuda", dtype=torch.float16)
    for start in range(0, n, 2**28):
        scores[start : start + 2**28].normal_()
    relevance = torch.zeros(n, dtype=torch.bool, device="cuda")
    index = torch.tensor([0, 5, 2**30, 2**31 - 1, 2**31, n - 1], device="cuda")
    relevance[index] = True
    lam = 1.0
    losses, changes, _, _ = cuda.evaluate(
        request(scores.view(1, 1, n), relevance.view(1, 1, n), None, "log", strength=lam, max_relevant=100)
    )
    value = scores[index].float()

    def above(level):
        total = torch.zeros((), dtype=torch.int64, device="cuda")
        for start in range(0, n, 2**28):
            part = slice(start, start + 2**28)
            total += ((scores[part].float() >= level) & ~relevance[part]).sum()
        return total

    c = torch.stack([above(v) for v in value]).double()
    torch.testing.assert_close(losses[0, 0], torch.log(1 + c).mean())
    moved = value + (lam * n / 6 / (1 + c)).float()
    new = torch.stack([above(v) for v in moved])
    own, new_own = (rankgrad.rank(v, lam=1.0).long() for v in (value, moved))
    assert torch.equal(changes[0, 0, index], new + new_own - c.long() - own)
    for j in (1, 2**31 + 1, n - 2):
        expected = (moved > scores[j].float()).sum() - (value > scores[j].float()).sum()
        assert changes[0, 0, j] == expected
    del changes
    with pytest.raises(ValueError, match="longer than the device can sort"):
        rankgrad.rank(scores, lam=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments(dtype):
    """In one pass, without a sync, and the same each time."""
    for shape, masked in (((1, 1, 3_000_001), False), ((2, 128, 512), True)):
        scores, _, mask = make("infinities", shape, 0.0, dtype=dtype, masked=masked, device="cuda")
        scores += 7
        expected = spread.moments(scores.double(), mask)
        found, width = cuda.moments(scores, mask)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)
        torch.testing.assert_close(width, spread.spread_of(expected[None], torch.float32), rtol=1e-11, atol=0)
        assert torch.equal(cuda.moments(scores, mask)[1], width)


@pytest.mark.parametrize("reach", REACHES)
def test_the_memory_of_a_long_list_is_the_gradient(reach):
    n = 20_000_000
    scores, relevance, _ = make("random", (n,), 0.001, device="cuda")
    scores.requires_grad_()
    rankgrad.average_precision_loss(scores, relevance, max_relevant=50_000, **REACHES[reach]).backward()
    scores.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rankgrad.average_precision_loss(scores, relevance, max_relevant=50_000, **REACHES[reach]).backward()
    assert torch.cuda.max_memory_allocated() - before < 1.3 * 4 * n


def test_dispatch():
    for dtype, engine in ((torch.float32, cuda), (torch.float16, cuda), (torch.float64, reference)):
        scores, relevance, _ = make("random", (1, 2, 8), 0.5, dtype=dtype, device="cuda")
        for reach in ("lam", "window", "share"):
            asked = request(scores, relevance, None, "ap", **reaching(reach, lam=1.0))
            assert dispatch.engine_for(asked) is engine


IN_BLOCKS = {
    "lam": lambda: rankgrad.AveragePrecisionLoss(lam=0.2, margin=0.02),
    "automatic": lambda: rankgrad.AveragePrecisionLoss(),
    "window, memory": lambda: rankgrad.AveragePrecisionLoss(window=0.1, memory=2),
    "hinge": lambda: rankgrad.PairRankingLoss(pull=0.6, push=0.1),
    "proxies": lambda: rankgrad.ProxyRankingLoss(24, 32),
}


@pytest.mark.parametrize("name", IN_BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_equal_the_matrix(monkeypatch, name, dtype):
    """Losses on embeddings by blocks of queries: the same value and gradient as in one block; none waits."""
    from rankgrad.losses import _blocks

    torch.manual_seed(0)
    batches = [torch.randn(96, 32, device="cuda", dtype=dtype) for _ in range(3)]
    labels = torch.arange(24, device="cuda").repeat(4)

    def run(rows):
        monkeypatch.setattr(_blocks, "block_rows", lambda candidates: rows)
        torch.manual_seed(1)
        loss = IN_BLOCKS[name]().cuda()
        out = []
        for number, batch in enumerate(batches):
            x = batch.clone().requires_grad_()
            torch.cuda.set_sync_debug_mode("error" if number else "default")  # after kernels are compiled
            try:
                value = loss(x, labels)
                value.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            out += [value.detach(), x.grad]
        return [*out, *(parameter.grad for parameter in loss.parameters())]

    tolerance = {"rtol": 2e-2, "atol": 2e-4} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    for several, one in zip(run(40), run(1 << 20), strict=True):
        torch.testing.assert_close(several, one, **tolerance)


@pytest.mark.parametrize("wrong", [-1, 24, 1 << 40])
def test_labels_of_no_class_give_nan(wrong):
    """Asking would wait for the device: loss and gradients are NaN instead."""
    loss = rankgrad.ProxyRankingLoss(24, 32).cuda()
    x = torch.randn(96, 32, device="cuda", requires_grad=True)
    labels = torch.arange(24, device="cuda").repeat(4)
    assert loss(x, labels).isfinite()
    labels[5] = wrong
    value = loss(x, labels)
    value.backward()
    assert value.isnan() and x.grad.isnan().all()
