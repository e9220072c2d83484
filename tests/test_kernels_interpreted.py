"""The Triton kernels, interpreted on the CPU, against the reference.

Run in a process of its own: TRITON_INTERPRET=1 python -m pytest tests/test_kernels_interpreted.py
"""

import itertools
import os

import pytest
import torch

from rankgrad.engine import cuda, dense, embeddings, launching, long, reference, short, spread
from rankgrad.engine.request import Answer
from rankgrad.losses._list_loss import tables_of

from cases import (
    DTYPES,
    FORMS,
    KINDS,
    assert_answer_equal_to_reference,
    assert_equal_to_reference,
    assert_standings_equal_to_reference,
    make,
    request,
)

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (see `make test`)"
    ),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]
REGIMES = {"short": (short, (2, 1, 103)), "long": (long, (2, 1, 103)), "dense": (dense, (2, 1, 131))}
SPREADS = torch.tensor([0.9, 1.3], dtype=torch.float64)
REACHES = {
    "lam": {"reach": "lam", "strength": 40.0, "margin": 0.25},
    "window": {"reach": "window", "strength": 0.7, "margin": 0.25},
    "share": {"reach": "share", "strength": 0.5, "margin": 0.3, "margin_is_share": True, "spread": SPREADS},
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Few chunks and programs, as the interpreter runs programs one after another, and short blocks: several
    chunks a
    program for few relevant items, several blocks for many, and runs of equal scores that cross blocks."""
    monkeypatch.setattr(long, "_CHUNKS", 4)
    monkeypatch.setattr(long, "_TERMS_BLOCK", 16)
    monkeypatch.setattr(long, "_STREAMS", 2)
    monkeypatch.setattr(dense, "_BLOCK", 32)
    for plans in (cuda._plan, short._plan, long._plan, dense._plan):
        plans.cache_clear()


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_form_and_reach(regime, form, reach):
    """3 relevant items of a short list are one group, 40 several."""
    engine, shape = REGIMES[regime]
    number = 3 * FORMS.index(form) + [*REACHES].index(reach)
    kind = "ties" if number % 2 else "random"
    share = 0.4 if number % 2 or form == "tables" else 0.03  # weights end after five irrelevant items above
    data = make(kind, shape, share, dtype=DTYPES[number % 3], masked=number % 4 > 1, seed=number)
    assert assert_equal_to_reference(engine, *data, form, **REACHES[reach]) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_kind_of_scores(regime, kind):
    engine, shape = REGIMES[regime]
    number = KINDS.index(kind) + [*REGIMES].index(regime)
    data = make(kind, shape, (0.05, 0.7)[number % 2], dtype=DTYPES[number % 3], masked=number % 4 > 1, seed=number)
    for reach in ("lam", "window"):
        assert_answer_equal_to_reference(engine, *data, FORMS[number % 3], **REACHES[reach])


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("regime", REGIMES)
def test_nothing_and_everything_relevant(regime, share):
    engine, shape = REGIMES[regime]
    for reach in ("lam", "window"):
        data = make("ties", (1, 1, shape[-1] // 2), share)
        assert_answer_equal_to_reference(engine, *data, "ap", **REACHES[reach])


@pytest.mark.parametrize("regime", REGIMES)
def test_one_item(regime):
    engine, _ = REGIMES[regime]
    for reach, relevant in itertools.product(("lam", "window"), (False, True)):
        data = torch.zeros(2, 1, 1), torch.full((2, 1, 1), relevant), None
        assert_answer_equal_to_reference(engine, *data, "log", **REACHES[reach])


@pytest.mark.parametrize("relevant", [3, 12])
@pytest.mark.parametrize("reach", REACHES)
def test_short_lists_of_several_blocks(reach, relevant):
    """Every lane counts for itself, over all blocks; with few relevant items and with a whole group."""
    scores, relevance, _ = make("ties", (2, 1, 1100), 0.0, seed=relevant)
    relevance[..., 50 : 1050 : 1000 // relevant] = True
    mask = torch.rand(scores.shape) < 0.9
    assert assert_equal_to_reference(short, scores, relevance, mask, "ap", **REACHES[reach]) > 0


def test_sums_of_slopes_of_any_size():
    """Weights far from 1, one of them infinitely steep where nothing is above: units fit the list's own slopes."""
    scores, relevance, _ = make("random", (1, 1, 83), 0.3)
    counts = torch.arange(84, dtype=torch.float64)
    for values in (counts.sqrt() * 1e-30, counts**3 * 1e20):
        slopes = values.diff(prepend=values[:1])
        slopes[0] = torch.inf
        asked = request(scores, relevance, None, "ap", reach="window", strength=0.5)
        asked = asked._replace(form="tables", tables=torch.stack([values, slopes]))
        expected = reference.evaluate(asked)
        assert expected.gradient.abs().max() > 0
        for engine, _ in REGIMES.values():
            assert torch.equal(engine.evaluate(asked).gradient, expected.gradient)


@pytest.mark.parametrize(("kind", "share"), [("random", 0.9), ("ties", 0.3)])
@pytest.mark.parametrize("stepwise", [False, True])
def test_sorting_by_merges(kind, share, stepwise, monkeypatch):
    """With more relevant items than pairs are compared for: one round of merges, and two; in one launch, and in
    several."""
    from rankgrad.engine._kernels import sorting

    monkeypatch.setattr(sorting, "PAIRS", type(sorting.PAIRS)(8))
    if stepwise:
        monkeypatch.setattr(sorting, "MANY", type(sorting.MANY)(40))
        monkeypatch.setattr(long, "_STEPWISE", 100)
    monkeypatch.setattr(long, "_SORT_BLOCK", 16)
    monkeypatch.setattr(long, "_MERGE_PIECE", 8)
    data = make(kind, (1, 2, 151), share)
    assert_answer_equal_to_reference(long, *data, "log_ap", **REACHES["lam"])


@pytest.mark.parametrize("reach", ["lam", "share"])
def test_lists_that_there_is_no_room_for_take_turns(reach, monkeypatch):
    """Calls first, then the lists of a call; the number of lists that count is that of the whole call."""
    asked = request(*make("random", (2, 3, 40), 0.3, masked=True), "ap", **REACHES[reach])
    expected = long.evaluate(asked)
    for slots in (130, 90, 10):
        monkeypatch.setattr(long, "_MOST_SLOTS", slots)
        for name, one, other in zip(expected._fields, long.evaluate(asked), expected, strict=True):
            assert torch.equal(one, other), name
    value = long.evaluate(asked._replace(with_gradient=False))
    assert torch.equal(value.losses, expected.losses)
    assert value.gradient.shape == (2, 3, 0)


def test_a_device_with_room_for_fewer_programs_gets_fewer(monkeypatch):
    """The sort's programs wait for each other: a launch that does not fit is tried with fewer."""
    tried = []

    def launch(kernel, grid, *args, **options):
        tried.append(grid[1])
        assert options["together"]
        if grid[1] > 132:
            raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")

    run = long._LongEvaluation(request(*make("random", (1, 1, 40), 0.1), "ap"))
    monkeypatch.setattr(run.plan, "processors", 132)
    run.launch = launch
    try:
        run._merge((), most=99, again=False)
        run._merge((), most=99, again=True)
        assert tried == [264, 132, 132]
    finally:
        long._sorters.clear()


@pytest.mark.parametrize("masked", [False, True])
def test_standings(masked):
    assert_standings_equal_to_reference(cuda, *make("ties", (1, 2, 203), 0.2, masked=masked))


# ------------------------------------------------------------------- what must not look like a result


@pytest.fixture
def guarded(monkeypatch):
    """A function that says whether anything was written beside the parts of a workspace."""
    launchers, made, part = [], launching.Launcher.__init__, launching.Plan.part
    guard, beside = 8192, []

    def part_and_guard(self, dtype, length):
        room = part(self, dtype, length)
        end = room.offset + length * dtype.itemsize
        self.size += guard
        self.guards = [*getattr(self, "guards", []), (end, self.size)]
        return room

    def remember(self, plan, device):
        made(self, plan, device)
        launchers.append(self)

    def new_and_guard(self, *shape, dtype):
        size = torch.Size(shape).numel()
        room = torch.full((size + guard,), 77, dtype=torch.int64).to(dtype)
        beside.append(room[size:])
        return room[:size].view(shape)

    monkeypatch.setattr(launching.Plan, "part", part_and_guard)
    monkeypatch.setattr(launching.Launcher, "__init__", remember)
    monkeypatch.setattr(launching, "workspace", lambda size, device: torch.full((size,), 77, dtype=torch.uint8))
    monkeypatch.setattr(dense._DenseEvaluation, "new", new_and_guard)

    def intact():
        rooms = [one._room[start:end] for one in launchers for start, end in getattr(one.plan, "guards", [])]
        assert rooms or beside
        return all((room == 77).all() for room in [*rooms, *beside])

    yield intact
    for plans in (short._plan, long._plan, dense._plan):
        plans.cache_clear()


@pytest.mark.parametrize("reach", ["lam", "window"])
@pytest.mark.parametrize(
    ("regime", "relevant", "hint"),
    [("short", 27, 4), ("short", 5, 4), ("short", 20, 16), ("short", 60, 20), ("long", 27, 4), ("dense", 27, 4)],
)
def test_a_wrong_hint_gives_nan_and_writes_nothing_outside(regime, relevant, hint, reach, guarded):
    engine, _ = REGIMES[regime]
    scores, relevance, _ = make("random", (1, 2, 103), 0.0)
    relevance[0, 0, :relevant] = True
    relevance[0, 1, 3:5] = True
    asked = request(scores, relevance, None, "ap", **REACHES[reach])
    answer = engine.evaluate(asked._replace(max_relevant=hint))
    assert answer.losses.isnan().tolist() == [[True, False]]
    assert torch.equal(answer.losses[0, 1], engine.evaluate(asked).losses[0, 1])
    assert guarded()


@pytest.mark.parametrize("regime", REGIMES)
def test_a_nan_and_odd_relevance_give_nan(regime):
    engine, _ = REGIMES[regime]
    scores, relevance, _ = make("random", (1, 3, 103), 0.3)
    mask = torch.ones_like(relevance)
    mask[..., 7] = False
    scores[0, 0, 5], scores[0, :, 7] = torch.nan, torch.nan
    for reach, dtype in (("lam", torch.int8), ("window", torch.float32)):
        grades = relevance.to(dtype)
        grades[0, 1, 9], grades[0, :, 7] = -1, 2  # what does not exist may be anything
        asked = request(scores, grades, mask, "ap", **REACHES[reach])
        assert engine.evaluate(asked).losses.isnan().tolist() == [[True, True, False]]


@pytest.mark.parametrize(("regime", "reach"), [("short", "window"), ("long", "window"), ("dense", "lam")])
def test_missing_items_may_be_nan(regime, reach):
    engine, _ = REGIMES[regime]
    scores, relevance, mask = make("random", (1, 1, 83), 0.4, masked=True)
    scores[~mask] = torch.nan
    asked = request(scores, relevance, mask, "ap", **REACHES[reach])
    expected, answer = engine.evaluate(asked._replace(scores=scores.nan_to_num(0.0))), engine.evaluate(asked)
    assert torch.equal(answer.gradient, expected.gradient)
    torch.testing.assert_close(answer.losses, expected.losses, rtol=1e-14, atol=0)


# ------------------------------------------------------------------------------ around an evaluation


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_reduction_and_scaling(reduction, dtype):
    gradient = torch.randint(-9, 9, (2, 3, 70)).to(dtype)
    losses, divisor = torch.rand(2, 3, dtype=torch.float64), torch.tensor([[70, 60, 1], [0.1, 2, 3]]).double()
    losses[1, 1] = torch.nan
    lists, upstream = torch.tensor([3, 2]), torch.randn((2, 3) if reduction == "none" else (2,))
    if reduction != "none":
        expected = losses.sum(1) / (lists if reduction == "mean" else 1)
        got = torch.empty(2)
        cuda.reduce(losses, lists, reduction == "mean", got)
        torch.testing.assert_close(got, expected.float(), equal_nan=True)
    factor = upstream.double() if reduction == "none" else upstream.double()[:, None]
    factor = factor * (1 if reduction == "mean" else lists[:, None]) / divisor
    expected = gradient * (factor + 0 * losses).float()[..., None]
    out = gradient.view(torch.float32)  # in place
    cuda.scale(Answer(losses, gradient, divisor, lists), upstream, reduction, out)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("relevant", [3, 12, 40])
@pytest.mark.parametrize("hint", [None, 16])
def test_the_gradient_of_the_mean_at_once(relevant, hint):
    """As scaling afterwards, to the bit: lists with a NaN, a wrong hint, a tiny window, and nothing relevant."""
    for window in (0.7, 7e-40):
        scores, relevance, mask = make("random", (1, 6, 300), 0.0, masked=True)
        scores = scores * window
        relevance[:, :5, 3 : 3 + relevant] = True
        mask[:, :, :50] = True
        scores[0, 1, 2] = torch.nan
        asked = request(scores, relevance, mask, "ap", reach="window", strength=window, max_relevant=hint)
        afterwards, answer = short.evaluate(asked), short.evaluate(asked._replace(scaled=True))
        expected = torch.empty_like(scores)
        cuda.scale(afterwards, None, "mean", expected)
        torch.testing.assert_close(answer.losses, afterwards.losses, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(answer.gradient, expected, rtol=0, atol=0, equal_nan=True)
        wrong = relevant > (hint or relevant)
        assert answer.gradient[0].isnan().any(-1).tolist() == [wrong, True, wrong, wrong, wrong, False]
        assert wrong or answer.gradient[0, 0].abs().sum() > 0


@pytest.mark.parametrize("relevant", [3, 12, 40])
def test_a_weight_that_is_nan_makes_the_gradient_nan_at_once(relevant):
    """Not the scores but W is NaN at some counts: the loss is, and so is every gradient of the list."""
    scores, relevance, mask = make("random", (1, 6, 300), 0.0)
    relevance[..., 3 : 3 + relevant] = True
    tables = tables_of(lambda c: (c - 100).sqrt(), 300, scores.device, by_window=True, wanted=True)
    asked = request(scores, relevance, mask, "ap", reach="window", strength=0.7)._replace(
        form="tables", tables=tables
    )
    afterwards, answer = short.evaluate(asked), short.evaluate(asked._replace(scaled=True))
    assert afterwards.losses.isnan().any()
    expected = torch.empty_like(scores)
    cuda.scale(afterwards, None, "mean", expected)
    torch.testing.assert_close(answer.gradient, expected, rtol=0, atol=0, equal_nan=True)


def test_a_factor_beyond_float32_does_not_make_gradients_nan():
    """Scores of 1e-38 have a window as small; where nothing moves the gradient is 0, elsewhere finite."""
    answer = Answer(
        torch.zeros(1, 1, dtype=torch.float64),
        torch.tensor([[[0.0, 1e-3, -1e-3]]]),
        torch.full((1, 1), 1e-44, dtype=torch.float64),
        torch.ones(1, dtype=torch.int64),
    )
    for upstream in (None, torch.ones(1), torch.full((1,), torch.inf)):
        out = torch.empty(1, 1, 3)
        cuda.scale(answer, upstream, "mean", out)
        lost = upstream is not None and bool(upstream.isinf())
        assert out.isfinite().all() != lost
        assert lost or (out[0, 0, 0] == 0 and out[0, 0, 1] == -out[0, 0, 2] > 1e34)


@pytest.mark.parametrize("width", [3, 64, 100])
def test_rows_of_unit_length(width):
    rows = torch.randn(5, width) * torch.tensor([1.0, 1e-7, 1e4, 0.0, 1e30]).unsqueeze(1)
    grad = torch.randn(5, width)
    expected, lengths = embeddings.normalized(rows)
    unit, found = embeddings.launch_normalize(rows)
    torch.testing.assert_close(unit, expected)
    torch.testing.assert_close(found, lengths)
    torch.testing.assert_close(
        embeddings.launch_normalize_backward(grad, unit, lengths, 1e-6),
        embeddings.normalized_backward(grad, unit, lengths, 1e-6),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("valid", [None, torch.rand(700) < 0.5])
@pytest.mark.parametrize("own", [None, torch.tensor([0, 5, 699, 3, 3, 3, -1, 2, 690])])
def test_relevance_and_mask_by_labels(own, valid):
    labels, of_candidates, numbers = torch.arange(9) % 4, torch.randint(0, 5, (700,)), torch.arange(700)
    numbers[600:] = 3
    given = embeddings.Labels(labels, own, of_candidates, numbers, valid)
    (relevance, mask), expected = embeddings.launch_flags(given), embeddings.relevance_and_mask(given)
    assert torch.equal(relevance, expected[0])
    assert mask is None if expected[1] is None else torch.equal(mask, expected[1])


@pytest.mark.parametrize("valid", [None, torch.rand(700) < 0.5])
@pytest.mark.parametrize("own", [None, torch.tensor([0, 5, 699, 3, 3, 3, -1, 2, 690])])
def test_lists_that_count_by_labels(own, valid):
    labels, of_candidates, numbers = torch.arange(9), torch.randint(0, 5, (700,)), torch.arange(700)
    numbers[600:] = 3
    of_candidates[of_candidates == 3] = 9
    of_candidates[600:] = 3  # relevant to the fourth query alone, and its own number
    given = embeddings.Labels(labels, own, of_candidates, numbers, valid)
    expected = embeddings.counting_lists(given, rows=4)
    assert 3 <= int(expected) <= 5
    assert torch.equal(embeddings.launch_count_lists(given), expected)


@pytest.mark.parametrize(
    ("kind", "masked"),
    [("random", True), ("infinities", False), ("outlier", True), ("sorted", False), ("equal", True)],
)
def test_moments(kind, masked):
    scores, _, mask = make(kind, (2, 3, 5001), 0.0, masked=masked)
    scores[1] += 1e3
    expected = spread.moments(scores, mask)
    found, width = cuda.moments(scores, mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(width, spread.spread_of(expected.unsqueeze(0), torch.float32), rtol=1e-12, atol=0)


@pytest.mark.parametrize("masked", [False, True])
def test_moments_where_the_first_blocks_have_nothing_that_counts(masked):
    """Else deviations from 0 would be added, and equal scores would not look equal."""
    scores = torch.full((1, 1, 15_003), 0.7) if masked else 1e3 + 1e-2 * torch.randn(1, 1, 15_003)
    mask = torch.arange(15_003).expand(1, 1, -1) >= 8192  # the first block of each of the 8 programs
    scores, mask = (scores, mask) if masked else (scores.where(mask, -torch.inf), None)
    expected = spread.moments(scores, mask)
    _, width = cuda.moments(scores, mask)
    torch.testing.assert_close(width, spread.spread_of(expected.unsqueeze(0), torch.float32), rtol=1e-12, atol=0)
