"""Triton kernels for many short lists: one program a list, its relevant items a group at a time against the row.

A group is the next ROWS relevant items by index, held in registers; one sweep over the row compares all its
items with all of the group. Few relevant items, as in retrieval, are one group (of FEW or ROWS), and the row
stays in the cache.
What a list needs for later sweeps stands in its own row of ``changes``: a relevant item's moved score, as
bits, until its rank change replaces it. With more than one group the new ranks wait in the program's row of
``ranks`` (16 bits, one less than the rank: lists are no longer than 65,536) until all groups are done.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.words import as_float64, item_terms, read_items, span


@triton.jit
def count_items(
    relevance, mask, counts, items, first_group, n, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Relevant and existing items of each list, and where its first ROWS relevant items are."""
    row = tl.program_id(0).to(tl.int64)
    relevant = 0
    existing = 0
    for block in range(0, tl.cdiv(n, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        exists = at < n
        if MASKED:
            exists = exists & (tl.load(mask + row * n + at, mask=at < n, other=0) != 0)
        found = (exists & (tl.load(relevance + row * n + at, mask=at < n, other=0) != 0)).to(tl.int32)
        here = tl.sum(found)
        if (here > 0) & (relevant < ROWS):
            number = relevant + tl.cumsum(found, 0) - 1
            tl.store(first_group + row * ROWS + number, at.to(tl.int32), mask=(found > 0) & (number < ROWS))
        relevant += here
        existing += tl.sum(exists.to(tl.int32))
    tl.store(counts + row, relevant)
    tl.store(items + row, existing)


@triton.jit
def _counting_lists(counts, call, per_call):
    """How many lists of the call have something relevant."""
    total = tl.full([], 0, tl.int64)
    for start in range(0, per_call, 1024):
        at = start + tl.arange(0, 1024)
        found = tl.load(counts + call * per_call + at, mask=at < per_call, other=0)
        total += tl.sum((found > 0).to(tl.int64))
    return total


@triton.jit
def _group(
    scores, relevance, mask, changes, n, half, first, MOVED: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores, indices and (MOVED) moved scores of the relevant items ``first`` to ``first + ROWS``."""
    number = first + tl.arange(0, ROWS)
    score = tl.full([ROWS], float("-inf"), tl.float32)
    index = tl.zeros([ROWS], tl.int32)
    moved = tl.full([ROWS], float("-inf"), tl.float32)
    seen = 0
    for block in range(0, tl.cdiv(n, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        value, relevant, _ = read_items(scores, relevance, mask, at, at < n, half, MASKED)
        here = tl.sum(relevant.to(tl.int32))
        if (seen + here > first) & (seen < first + ROWS):
            place = seen + tl.cumsum(relevant.to(tl.int32), 0) - 1
            chosen = relevant[None, :] & (place[None, :] == number[:, None])
            score = tl.maximum(score, tl.max(tl.where(chosen, value[None, :], float("-inf")), 1))
            index += tl.sum(tl.where(chosen, at[None, :].to(tl.int32), 0), 1)
            if MOVED:
                bits = tl.load(changes + at, mask=relevant, other=0).to(tl.float32, bitcast=True)
                moved = tl.maximum(moved, tl.max(tl.where(chosen, bits[None, :], float("-inf")), 1))
        seen += here
    return score, index, moved


@triton.jit
def _rank(
    scores, relevance, mask, n, half, score, index, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Irrelevant items at or above each of a group, and its rank among the relevant items."""
    above = tl.zeros([ROWS], tl.int32)
    own = tl.full([ROWS], 1, tl.int32)
    for block in range(0, tl.cdiv(n, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        value, relevant, irrelevant = read_items(scores, relevance, mask, at, at < n, half, MASKED)
        above += tl.sum((irrelevant[None, :] & (value[None, :] >= score[:, None])).to(tl.int32), 1)
        better = (value[None, :] > score[:, None]) | (
            (value[None, :] == score[:, None]) & (at[None, :] < index[:, None])
        )
        own += tl.sum((relevant[None, :] & better).to(tl.int32), 1)
    return above, own


@triton.jit
def _own_ranks(score, index, in_use, ROWS: tl.constexpr):
    """Ranks of a group among itself."""
    better = (score[None, :] > score[:, None]) | (
        (score[None, :] == score[:, None]) & (index[None, :] < index[:, None])
    )
    return 1 + tl.sum((in_use[None, :] & better).to(tl.int32), 1)


@triton.jit
def _one_group(
    scores, relevance, mask, group, weights, losses, changes, row, n, half, n_weights, p, per_list,
    FORM: tl.constexpr, WRITE: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A list whose relevant items are all in one group: two sweeps over the row, nothing kept between them."""
    in_use = tl.arange(0, ROWS) < p
    index = tl.load(group + tl.arange(0, ROWS), mask=in_use, other=0)
    score = tl.load(scores + index, mask=in_use, other=0.0).to(tl.float32) - half
    above = tl.zeros([ROWS], tl.int32)
    nan = tl.zeros([BLOCK], tl.int32)
    for block in range(0, tl.cdiv(n, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        value, relevant, irrelevant = read_items(scores, relevance, mask, at, at < n, half, MASKED)
        nan = nan | ((value != value) & (relevant | irrelevant)).to(tl.int32)
        above += tl.sum((irrelevant[None, :] & (value[None, :] >= score[:, None])).to(tl.int32), 1)
    own = _own_ranks(score, index, in_use, ROWS)
    term, slope = item_terms(FORM, weights, n_weights, above, own)
    loss = tl.sum(tl.where(in_use, term, 0.0)) / tl.maximum(p, 1).to(tl.float64)
    tl.store(losses + row, tl.where(tl.max(nan) > 0, float("nan"), loss))
    if WRITE:
        moved = score + (per_list * slope).to(tl.float32)
        new = _own_ranks(moved, index, in_use, ROWS)
        score = tl.where(in_use, score, float("inf"))  # items that are not there pass nobody
        moved = tl.where(in_use, moved, float("inf"))
        for block in range(0, tl.cdiv(n, BLOCK)):
            at = block * BLOCK + tl.arange(0, BLOCK)
            value, _, irrelevant = read_items(scores, relevance, mask, at, at < n, half, MASKED)
            lower = value[None, :] >= moved[:, None]
            new += tl.sum((irrelevant[None, :] & lower).to(tl.int32), 1)
            passed = tl.sum((value[None, :] >= score[:, None]).to(tl.int32) - lower.to(tl.int32), 0)
            tl.store(changes + at, tl.where(irrelevant, passed, 0), mask=at < n)
        tl.debug_barrier()
        tl.store(changes + index, new - above - own, mask=in_use)


@triton.jit
def _several_groups(
    scores, relevance, mask, weights, losses, changes, ranks, row, n, half, n_weights, p, per_list,
    FORM: tl.constexpr, WRITE: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A list with more relevant items than a group has: sweeps over the row for each group, three times."""
    loss = tl.full([], 0.0, tl.float64)
    for first in range(0, p, ROWS):
        score, index, _ = _group(scores, relevance, mask, changes, n, half, first, False, MASKED, ROWS, BLOCK)
        above, own = _rank(scores, relevance, mask, n, half, score, index, MASKED, ROWS, BLOCK)
        in_use = first + tl.arange(0, ROWS) < p
        value, slope = item_terms(FORM, weights, n_weights, above, own)
        loss += tl.sum(tl.where(in_use, value, 0.0))
        if WRITE:
            moved = score + (per_list * slope).to(tl.float32)
            tl.store(changes + index, moved.to(tl.int32, bitcast=True), mask=in_use)
    nan = 0
    for block in range(0, tl.cdiv(n, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        value, relevant, irrelevant = read_items(scores, relevance, mask, at, at < n, half, MASKED)
        nan += tl.sum(((value != value) & (relevant | irrelevant)).to(tl.int32))
        if WRITE:
            tl.store(changes + at, 0, mask=(at < n) & ~relevant)
    loss = loss / tl.maximum(p, 1).to(tl.float64)
    loss = tl.where(nan > 0, float("nan"), loss)
    tl.store(losses + row, loss)

    if WRITE:
        tl.debug_barrier()
        for first in range(0, p, ROWS):
            score, index, moved = _group(
                scores, relevance, mask, changes, n, half, first, True, MASKED, ROWS, BLOCK
            )
            in_use = first + tl.arange(0, ROWS) < p
            new = tl.full([ROWS], 1, tl.int32)
            for block in range(0, tl.cdiv(n, BLOCK)):
                at = block * BLOCK + tl.arange(0, BLOCK)
                value, relevant, irrelevant = read_items(scores, relevance, mask, at, at < n, half, MASKED)
                change = tl.load(changes + at, mask=relevant | irrelevant, other=0)
                other_moved = change.to(tl.float32, bitcast=True)
                passed = (moved[:, None] > value[None, :]).to(tl.int32) - (score[:, None] > value[None, :]).to(
                    tl.int32
                )
                passed = tl.sum(tl.where(in_use[:, None], passed, 0), 0)
                tl.store(changes + at, change + passed, mask=irrelevant)
                before = at[None, :] < index[:, None]
                new += tl.sum(
                    (
                        (irrelevant[None, :] & (value[None, :] >= moved[:, None]))
                        | (relevant[None, :] & (other_moved[None, :] > moved[:, None]))
                        | (relevant[None, :] & (other_moved[None, :] == moved[:, None]) & before)
                    ).to(tl.int32),
                    1,
                )
            tl.store(ranks + index, (new - 1).to(tl.uint16), mask=in_use)
        tl.debug_barrier()
        for first in range(0, p, ROWS):
            score, index, _ = _group(scores, relevance, mask, changes, n, half, first, False, MASKED, ROWS, BLOCK)
            above, own = _rank(scores, relevance, mask, n, half, score, index, MASKED, ROWS, BLOCK)
            in_use = first + tl.arange(0, ROWS) < p
            new = tl.load(ranks + index, mask=in_use, other=0).to(tl.int32) + 1
            tl.store(changes + index, new - above - own, mask=in_use)
        tl.debug_barrier()  # the program's next list writes to the same ranks


@triton.jit(do_not_specialize=["lam_bits", "n_weights"])
def rank_lists(
    scores, relevance, mask, counts, items, first_group, lists, weights, losses, changes, ranks, rows, n, half,
    lam_bits, n_weights, per_call, FORM: tl.constexpr, WRITE: tl.constexpr, MASKED: tl.constexpr,
    FEW: tl.constexpr, ROWS: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss of each list and (WRITE) the rank change of each of its items; a program takes every so many-th list.

    ``ranks`` has a row for each program.
    """
    ranks += tl.program_id(0).to(tl.int64) * n
    call = tl.full([], -1, tl.int64)
    counting = tl.full([], 1, tl.int64)  # lists of the call that count
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full([], 0, tl.int64) + number
        at = row * n
        p = tl.load(counts + row)
        if row // per_call != call:
            call = row // per_call
            if GIVEN:
                counting = tl.load(lists + call).to(tl.int64)
            else:
                counting = _counting_lists(counts, call, per_call)
                tl.store(lists + call, counting)
            counting = tl.maximum(counting, 1)
        lam_list = as_float64(lam_bits) * tl.load(items + row).to(tl.float64) / counting.to(tl.float64)
        per_list = lam_list / tl.maximum(p, 1).to(tl.float64)
        if p <= FEW:
            _one_group(
                scores + at, relevance + at, mask + at, first_group + row * ROWS, weights, losses, changes + at,
                row, n, half, n_weights, p, per_list, FORM, WRITE, MASKED, FEW, BLOCK,
            )  # fmt: skip
        elif p <= ROWS:
            _one_group(
                scores + at, relevance + at, mask + at, first_group + row * ROWS, weights, losses, changes + at,
                row, n, half, n_weights, p, per_list, FORM, WRITE, MASKED, ROWS, BLOCK,
            )  # fmt: skip
        else:
            _several_groups(
                scores + at, relevance + at, mask + at, weights, losses, changes + at, ranks, row, n, half,
                n_weights, p, per_list, FORM, WRITE, MASKED, ROWS, BLOCK,
            )  # fmt: skip


@triton.jit
def reduce_losses(losses, lists, out, per_call, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Sum (or mean over the lists that count) of each call's list losses, always in the same order."""
    call = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, per_call, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(losses + call * per_call + at, mask=at < per_call, other=0.0)
    result = tl.sum(total)
    if MEAN:
        result = result / tl.maximum(tl.load(lists + call), 1).to(tl.float64)
    tl.store(out + call, result)


@triton.jit
def scale_changes(
    changes,
    upstream,
    losses,
    divisor,
    lists,
    out,
    n,
    per_call,
    REDUCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """An answer's gradient times ``upstream / divisor``, rounded once to the dtype of ``out``.

    REDUCTION: 0 mean, 1 sum, 2 none. ``out`` may be the memory of ``changes``.
    """
    row = tl.program_id(0).to(tl.int64)
    call = row // per_call
    factor = tl.load(upstream + (row if REDUCTION == 2 else call)).to(tl.float64)
    if REDUCTION != 0:
        factor = factor * tl.load(lists + call).to(tl.float64)
    factor = factor / tl.load(divisor + row)
    loss = tl.load(losses + row)
    # a list whose loss is NaN must not send a harmless-looking gradient
    factor = tl.where(loss == loss, factor, float("nan")).to(tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(n, BLOCK), tl.num_programs(1)):
        at = span(block, BLOCK)
        value = tl.load(changes + row * n + at, mask=at < n, other=0).to(tl.float32) * factor
        tl.store(out + row * n + at, value, mask=at < n)
