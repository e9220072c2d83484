"""Triton kernels that sort the words of relevant items: all pairs for few of them, merges of four runs for many.

All are launched, and p, known on the device only, says which of them does something. Axis 0 of the grid is the list.
Up to MANY words the rounds of merges are one launch; more of them get a launch each, with all the programs that
the device has room for.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.words import NO_WORD, STATE, span

PAIRS = tl.constexpr(8192)  # up to this many relevant items, comparing all pairs is the quicker sort
MANY = tl.constexpr(1 << 20)  # beyond this many, each round of merges is a launch of its own
WAYS = tl.constexpr(4)  # runs that are merged at once


@triton.jit
def rank_by_pairs(loose, words, state, slots, BLOCK: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p = tl.minimum(tl.load(state + row * STATE), slots)
    loose += row * slots
    words += row * slots
    if p <= PAIRS:
        for block in range(tl.program_id(1), tl.cdiv(p, BLOCK), tl.num_programs(1)):
            at = span(block, BLOCK)
            own = tl.load(loose + at, mask=at < p, other=NO_WORD)
            smaller = tl.zeros([BLOCK, TILE], tl.int32)
            for start in range(0, p, TILE):
                other_at = start + tl.arange(0, TILE)
                other = tl.load(loose + other_at, mask=other_at < p, other=NO_WORD)
                smaller += (other[None, :] < own[:, None]).to(tl.int32)
            tl.store(words + tl.sum(smaller, 1), own, mask=at < p)


@triton.jit
def _all_programs(barrier, times):
    """Wait until every program of this list has come here ``times`` times."""
    tl.debug_barrier()
    tl.atomic_add(barrier, 1)
    while tl.atomic_add(barrier, 0) < times * tl.num_programs(1):
        pass
    tl.debug_barrier()


@triton.jit
def _smaller(runs, word, low, high, steps, CACHE: tl.constexpr):
    """How many words of each sorted run are smaller than each ``word``, known to be ``low`` to ``high``."""
    while steps > 0:
        middle = (low + high) // 2
        open_ = low < high
        smaller = open_ & (tl.load(runs + middle, mask=open_, other=0, cache_modifier=CACHE) < word)
        low = tl.where(smaller, middle + 1, low)
        high = tl.where(open_ & ~smaller, middle, high)
        steps = steps // 2
    return low


@triton.jit
def _merge_runs(source, target, p, run, CACHE: tl.constexpr, PIECE: tl.constexpr):
    """Merge sorted runs, WAYS by WAYS.

    A word goes behind all smaller words of the runs that are merged. Between the first and last word of a piece
    there are few in each run, so a piece searches for its ends, then each word between them. Skewed data cost
    nothing: a search is at most log2 of a run.
    """
    for piece in range(tl.program_id(1), tl.cdiv(p, PIECE), tl.num_programs(1)):
        first = piece * tl.full([], PIECE, tl.int64)
        start = first // (run * WAYS) * (run * WAYS)
        starts = start + tl.arange(0, WAYS) * run
        lengths = tl.maximum(tl.minimum(p - starts, run), 0).to(tl.int32)
        runs = (source + starts)[:, None]
        ends = tl.where(tl.arange(0, 2) == 0, first, tl.minimum(first + PIECE, p) - 1)
        ends = tl.load(source + ends, cache_modifier=CACHE)
        none = tl.zeros([WAYS, 2], tl.int32)
        found = _smaller(runs, ends[None, :], none, none + lengths[:, None], run, CACHE)
        low = tl.min(found, 1)
        high = tl.max(found, 1)
        at = first + tl.arange(0, PIECE)
        word = tl.load(source + at, mask=at < p, other=NO_WORD, cache_modifier=CACHE)
        none = tl.zeros([WAYS, PIECE], tl.int32)
        low, high, widest = none + low[:, None], none + high[:, None], tl.max(high - low)
        before = _smaller(runs, word[None, :], low, high, widest, CACHE)
        tl.store(target + start + tl.sum(before.to(tl.int64), 0), word, mask=at < p)


@triton.jit
def _rounds(p, BLOCK: tl.constexpr):
    """How many rounds of merges make one run of p words in sorted blocks."""
    rounds = 0
    run = tl.full([], BLOCK, tl.int64)
    while run < p:
        run *= WAYS
        rounds += 1
    return rounds


@triton.jit
def _sort_blocks(loose, words, p, rounds, BLOCK: tl.constexpr):
    """Sort the blocks, into the buffer from which ``rounds`` rounds of merges, to and fro, end in ``words``."""
    target = words
    if rounds % 2 == 1:
        target = loose
    for block in range(tl.program_id(1), tl.cdiv(p, BLOCK), tl.num_programs(1)):
        at = span(block, BLOCK)
        word = tl.load(loose + at, mask=at < p, other=NO_WORD)
        tl.store(target + at, tl.sort(word), mask=at < p)


@triton.jit
def _merge_round(loose, words, p, run, left, CACHE: tl.constexpr, PIECE: tl.constexpr):
    """One round; ``left`` is how many there are with it."""
    if left % 2 == 1:
        _merge_runs(loose, words, p, run, CACHE, PIECE)
    else:
        _merge_runs(words, loose, p, run, CACHE, PIECE)


@triton.jit
def sort_by_merging(
    loose, words, state, slots, MOST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr
):
    """Sort blocks, then merge them in rounds, if there are PAIRS to MOST words.

    One launch, whose programs wait for each other between the rounds: how many there are is known on the
    device only, and launches that find nothing to do cost more than the waiting. Reads pass by the first cache, which
    may hold values from before other programs wrote.
    """
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    p = tl.minimum(tl.load(state), slots)
    loose += row * slots
    words += row * slots
    if (p > PAIRS) & (p <= MOST):
        rounds = _rounds(p, BLOCK)
        _sort_blocks(loose, words, p, rounds, BLOCK)
        run = tl.full([], BLOCK, tl.int64)
        for number in range(rounds):
            _all_programs(state + 3 + SECOND, number + 1)
            _merge_round(loose, words, p, run, rounds - number, ".cg", PIECE)
            run *= WAYS


@triton.jit(do_not_specialize=["number"])
def sort_step(loose, words, state, slots, number, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    """One step of the same for more than MANY words: sort the blocks (step 0), or merge for the ``number``-th time.

    What other programs wrote, they wrote in an earlier launch: reads go through the first cache.
    """
    row = tl.program_id(0).to(tl.int64)
    p = tl.minimum(tl.load(state + row * STATE), slots)
    loose += row * slots
    words += row * slots
    if p > MANY:
        rounds = _rounds(p, BLOCK)
        if number == 0:
            _sort_blocks(loose, words, p, rounds, BLOCK)
        elif number <= rounds:
            run = tl.full([], BLOCK, tl.int64)
            for _ in range(1, number):
                run *= WAYS
            _merge_round(loose, words, p, run, rounds - number + 1, "", PIECE)
