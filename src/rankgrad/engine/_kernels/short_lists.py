"""Triton kernels for many short lists: one program a list, its relevant items a group at a time against the row.

A group is the next ROWS relevant items by index, held in registers; one sweep over the row compares all its
items with all of the group. Few relevant items, as in retrieval, are one group (of FEW or ROWS), and the row
stays in the cache. More of them are several groups (``short_groups``).

A sweep counts in every lane by itself, ``[ROWS, BLOCK]``, and adds the lanes up when it is over: a sum over the
block in every step would make all warps wait for each other. Items are read as ``[1, BLOCK]``, so that they stay in
the lane that has read them: expanding ``[BLOCK]`` sends them through shared memory. They are fetched a step ahead,
so that the next ones are on their way while these are compared.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.forms_gpu import item_terms, pulled, pushed, units
from rankgrad.engine._kernels.short_groups import several_groups, several_groups_by_window
from rankgrad.engine._kernels.words import (
    LAM,
    divisor_of,
    factor_of,
    fetch_items,
    half_margin,
    split_items,
    strength_of,
    times,
)


@triton.jit
def count_items(
    relevance, mask, counts, items, first_group, n, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Relevant and existing items of each list, and where its relevant items are, if they are ROWS at most.

    Nothing is summed over the block in a step: whoever finds a relevant item takes the next free place, and the places
    are put in order in the end. The counter is this program's alone, so that no fence is needed around it.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    group = first_group + row * ROWS
    tl.store(counts + row, 0)  # places that are taken
    tl.debug_barrier()
    relevant = tl.zeros([BLOCK], tl.int32)
    existing = tl.zeros([BLOCK], tl.int32)
    last = tl.zeros([BLOCK], tl.int32)  # the place that this lane took last
    for block in range(0, tl.cdiv(n, BLOCK)):
        at = block * BLOCK + lane
        exists = at < n
        if MASKED:
            exists = exists & (tl.load(mask + row * n + at, mask=at < n, other=0) != 0)
        found = exists & (tl.load(relevance + row * n + at, mask=at < n, other=0) != 0)
        relevant += found.to(tl.int32)
        existing += exists.to(tl.int32)
        found = found & (last < ROWS)  # else the group is full, and this lane knows
        counter = counts + row + tl.zeros([BLOCK], tl.int64)
        place = tl.atomic_add(counter, 1, mask=found, sem="relaxed", scope="cta")
        tl.store(group + place, at.to(tl.int32), mask=found & (place < ROWS))
        last = tl.where(found, place, last)
    p = tl.sum(relevant)
    tl.store(items + row, tl.sum(existing))
    tl.debug_barrier()  # every place that is taken has been written
    in_use = tl.arange(0, ROWS) < p
    index = tl.load(group + tl.arange(0, ROWS), mask=in_use, other=0)
    before = tl.sum((in_use[None, :] & (index[None, :] < index[:, None])).to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(group + before, index, mask=in_use)
    tl.store(counts + row, p)


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
def _own_ranks(score, index, in_use, ROWS: tl.constexpr):
    """Ranks of a group among itself."""
    better = (score[None, :] > score[:, None]) | (
        (score[None, :] == score[:, None]) & (index[None, :] < index[:, None])
    )
    return 1 + tl.sum((in_use[None, :] & better).to(tl.int32), 1)


@triton.jit
def _added_up(counts, room, ROWS: tl.constexpr):
    """The lanes' counts, ``[ROWS, BLOCK]``, as ``[ROWS]``, by way of memory: without it every lane would keep all ROWS
    of what is computed of them in float64, and few programs would have registers enough."""
    tl.debug_barrier()  # what the list before left there has been read
    tl.store(room + tl.arange(0, ROWS), tl.sum(counts, 1))
    tl.debug_barrier()
    return tl.load(room + tl.arange(0, ROWS))


@triton.jit
def _one_group(
    scores, relevance, mask, group, room, tables, losses, changes, row, n, half, strength, divisor, n_tables, p,
    FORM: tl.constexpr, REACH: tl.constexpr, WRITE: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A list whose relevant items are all in one group: two sweeps over the row.

    By lambda ``strength`` is the step of a slope of 1, by window the window. ``room`` is for two sums over the lanes,
    and for what an irrelevant item gets between any two places among the group.
    """
    in_use = tl.arange(0, ROWS) < p
    index = tl.load(group + tl.arange(0, ROWS), mask=in_use, other=0)
    score = tl.load(scores + index, mask=in_use, other=0.0).to(tl.float32) - half
    lane = tl.arange(0, BLOCK)[None, :]
    counts = tl.zeros([ROWS, BLOCK], tl.int32)
    nan = tl.zeros([1, BLOCK], tl.int32)
    kept, grade, exists = fetch_items(scores, relevance, mask, lane, lane < n, MASKED)
    for block in range(0, tl.cdiv(n, BLOCK)):
        at = block * BLOCK + lane
        value, relevant, irrelevant = split_items(kept, grade, exists, half)
        kept, grade, exists = fetch_items(scores, relevance, mask, at + BLOCK, at + BLOCK < n, MASKED)
        nan = nan | ((value != value) & (relevant | irrelevant)).to(tl.int32)
        counts += (irrelevant & (value >= score[:, None])).to(tl.int32)
    above = _added_up(counts, room, ROWS)
    pushes = room + 2 * ROWS
    counts = tl.zeros([ROWS, BLOCK], tl.int32)
    own = _own_ranks(score, index, in_use, ROWS)
    term, slope = item_terms(FORM, tables, n_tables, above, own)
    loss = tl.sum(tl.where(in_use, term, 0.0)) / tl.maximum(p, 1).to(tl.float64)
    loss = tl.where(tl.max(nan) > 0, float("nan"), loss)
    tl.store(losses + row, loss)
    if WRITE:
        if REACH == LAM:
            moved = score + (strength * slope).to(tl.float32)
            new = _own_ranks(moved, index, in_use, ROWS)
            score = tl.where(in_use, score, float("inf"))  # items that are not there pass no other
            moved = tl.where(in_use, moved, float("inf"))
            kept, grade, exists = fetch_items(scores, relevance, mask, lane, lane < n, MASKED)
            for block in range(0, tl.cdiv(n, BLOCK)):
                at = block * BLOCK + lane
                value, _, irrelevant = split_items(kept, grade, exists, half)
                kept, grade, exists = fetch_items(scores, relevance, mask, at + BLOCK, at + BLOCK < n, MASKED)
                lower = value >= moved[:, None]
                counts += (irrelevant & lower).to(tl.int32)
                passed = tl.sum((value >= score[:, None]).to(tl.int32) - lower.to(tl.int32), 0, keep_dims=True)
                tl.store(changes + at, tl.where(irrelevant, passed, 0), mask=at < n)
            result = new + _added_up(counts, room + ROWS, ROWS) - above - own
        else:
            slope = tl.where(in_use & (above > 0), slope, 0.0)
            count = tl.maximum(p, 1).to(tl.float64)
            many, one = units(tl.max(tl.abs(slope)), tl.maximum(p, 1))
            here = (slope * many).to(tl.int64)
            slot = tl.arange(0, 2 * ROWS)
            up_to = tl.sum(tl.where(own[None, :] <= slot[:, None], here[None, :], 0), 1)  # slopes up to each rank
            between = pushed(up_to[:, None] - up_to[None, :], one, count)  # [place after, place before]
            factor = factor_of(divisor, loss != loss, SCALED)
            nothing = (0.0 * factor).to(tl.int32, bitcast=True)  # not 0 where the loss is NaN
            tl.store(pushes + slot[:, None] * (2 * ROWS) + slot[None, :], times(between, factor))
            tl.debug_barrier()
            risen = tl.where(in_use, score + strength.to(tl.float32), float("-inf"))
            score = tl.where(in_use, score, float("-inf"))  # items that are not there stand above no other
            kept, grade, exists = fetch_items(scores, relevance, mask, lane, lane < n, MASKED)
            for block in range(0, tl.cdiv(n, BLOCK)):
                at = block * BLOCK + lane
                value, _, irrelevant = split_items(kept, grade, exists, half)
                kept, grade, exists = fetch_items(scores, relevance, mask, at + BLOCK, at + BLOCK < n, MASKED)
                higher = value < risen[:, None]
                counts += (irrelevant & ~higher).to(tl.int32)
                # both places of an item in one number: they are 16 at most
                both = (value < score[:, None]).to(tl.int32) + (higher.to(tl.int32) << 16)
                both = tl.sum(both, 0, keep_dims=True)
                low, high = both & 0xFFFF, both >> 16
                moved = irrelevant & (low != high)
                push = tl.load(pushes + high * (2 * ROWS) + low, mask=moved, other=nothing)
                tl.store(changes + at, push, mask=at < n)
            result = times(pulled(slope, above - _added_up(counts, room + ROWS, ROWS), count), factor)
        tl.debug_barrier()
        tl.store(changes + index, result, mask=in_use)


@triton.jit
def _all_nan(changes, n, BLOCK: tl.constexpr):
    for block in range(0, tl.cdiv(n, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        nan = tl.full([BLOCK], float("nan"), tl.float32)
        tl.store(changes + at, nan.to(tl.int32, bitcast=True), mask=at < n)


@triton.jit
def _strength_of_list(reach, existing, counting, p, REACH: tl.constexpr):
    """By lambda the step of a slope of 1, by window the window."""
    if REACH == LAM:
        lam_list = reach * existing.to(tl.float64) / tl.maximum(counting, 1).to(tl.float64)
        return lam_list / tl.maximum(p, 1).to(tl.float64)
    else:
        return reach


@triton.jit(do_not_specialize=["half_bits", "reach_bits", "n_tables"])
def rank_sparse_lists(
    scores, relevance, mask, counts, items, first_group, lists, divisor, spread, tables, losses, changes, room,
    rows, n, slots, per_call, n_tables, half_bits, reach_bits,
    FORM: tl.constexpr, REACH: tl.constexpr, MARGIN_SHARE: tl.constexpr, WRITE: tl.constexpr, SCALED: tl.constexpr,
    MASKED: tl.constexpr, FEW: tl.constexpr, ROWS: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Loss of each list of up to ROWS relevant items and (WRITE) the gradient of each of its items.

    A program takes every so many-th list. Blocks are of BLOCK items against FEW relevant ones, of NARROW against more.
    """
    room += tl.program_id(0).to(tl.int64) * (4 * ROWS * ROWS + 2 * ROWS)
    call = tl.full([], -1, tl.int64)
    counting = tl.full([], 1, tl.int64)  # lists of the call that count
    half = tl.full([], 0.0, tl.float32)
    reach = tl.full([], 1.0, tl.float64)
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
            half = half_margin(half_bits, spread, call, MARGIN_SHARE)
            reach = strength_of(reach_bits, spread, call, REACH)
        existing = tl.load(items + row)
        its_divisor = divisor_of(reach, existing, counting, REACH)
        tl.store(divisor + row, its_divisor)
        strength = _strength_of_list(reach, existing, counting, p, REACH)
        if p > slots:  # a wrong hint: there is no room for so many, and nothing must look like a result
            tl.store(losses + row, float("nan"))
            if WRITE and SCALED:
                _all_nan(changes + at, n, BLOCK)
        elif p <= FEW:
            _one_group(
                scores + at, relevance + at, mask + at, first_group + row * ROWS, room, tables, losses, changes + at,
                row, n, half, strength, its_divisor, n_tables, p, FORM, REACH, WRITE, SCALED, MASKED, FEW, BLOCK,
            )  # fmt: skip
        elif p <= ROWS:
            _one_group(
                scores + at, relevance + at, mask + at, first_group + row * ROWS, room, tables, losses, changes + at,
                row, n, half, strength, its_divisor, n_tables, p, FORM, REACH, WRITE, SCALED, MASKED, ROWS, NARROW,
            )  # fmt: skip


@triton.jit(do_not_specialize=["half_bits", "reach_bits", "n_tables"])
def rank_other_lists(
    scores, relevance, mask, counts, items, lists, spread, tables, losses, changes, ranks, rows, n, slots, room,
    per_call, n_tables, half_bits, reach_bits,
    FORM: tl.constexpr, REACH: tl.constexpr, MARGIN_SHARE: tl.constexpr, WRITE: tl.constexpr, SCALED: tl.constexpr,
    MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What :func:`rank_sparse_lists` leaves out: lists of more than ROWS relevant items.

    A kernel of its own, so that the registers it needs do not slow down the sparse lists. ``ranks`` has a row for each
    program.
    """
    ranks += tl.program_id(0).to(tl.int64) * room
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full([], 0, tl.int64) + number
        p = tl.load(counts + row)
        if (p > ROWS) & (p <= slots):
            at = row * n
            call = row // per_call
            half = half_margin(half_bits, spread, call, MARGIN_SHARE)
            reach = strength_of(reach_bits, spread, call, REACH)
            existing, counting = tl.load(items + row), tl.load(lists + call)
            strength = _strength_of_list(reach, existing, counting, p, REACH)
            if WRITE and REACH != LAM:
                several_groups_by_window(
                    scores + at, relevance + at, mask + at, tables, losses, changes + at, ranks, row, n, slots, half,
                    strength.to(tl.float32), divisor_of(reach, existing, counting, REACH), n_tables, p, FORM, SCALED,
                    MASKED, ROWS, BLOCK,
                )  # fmt: skip
            else:
                several_groups(
                    scores + at, relevance + at, mask + at, tables, losses, changes + at, ranks, row, n, half,
                    n_tables, p, strength, FORM, WRITE, MASKED, ROWS, BLOCK,
                )  # fmt: skip
