"""The engine's kernels on a CUDA device against the reference: PYTHONPATH=src python3 -m pytest -m gpu"""

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
        given = embeddings.Labels(labels, own, others, torch.arange(700, device="cuda"), exists)
        copied = embeddings.Labels(*(one if one is None else one.cpu() for one in given))
        expected = embeddings.relevance_and_mask(copied)
        for got, right in zip(embeddings.relevance_and_mask(given), expected, strict=True):
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


def test_dispatch():
    for dtype, engine in ((torch.float32, cuda), (torch.float16, cuda), (torch.float64, reference)):
        scores, relevance, _ = make("random", (1, 2, 8), 0.5, dtype=dtype, device="cuda")
        for reach in ("lam", "window", "share"):
            asked = request(scores, relevance, None, "ap", **reaching(reach, lam=1.0))
            assert dispatch.engine_for(asked) is engine
