"""Triton kernels for embeddings: rows of unit length, and which candidates are relevant to which query."""

# mypy: ignore-errors
import triton
import triton.language as tl

from rankgrad.engine._kernels.words import LARGEST


@triton.jit
def normalize_rows(rows, unit, lengths, width, shortest, BLOCK: tl.constexpr):
    """Every row divided by its length, or by ``shortest`` if that is more; and the lengths."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    values = tl.load(rows + row * width + at, mask=at < width, other=0.0)
    wide = values.to(tl.float64)  # squares of numbers beyond 1e19 are infinite in float32
    length = tl.sqrt(tl.sum(wide * wide))
    length = tl.where(length < float("inf"), tl.minimum(length, LARGEST), length).to(tl.float32)
    tl.store(unit + row * width + at, tl.div_rn(values, tl.maximum(length, shortest)), mask=at < width)
    tl.store(lengths + row, length)


@triton.jit
def normalize_rows_backward(grad, unit, lengths, out, width, least, BLOCK: tl.constexpr):
    """The part of the gradient across each row, over the row's length; rows shorter than ``least`` have less."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    arriving = tl.load(grad + row * width + at, mask=at < width, other=0.0)
    direction = tl.load(unit + row * width + at, mask=at < width, other=0.0)
    across = arriving - direction * tl.sum(arriving * direction)
    length = tl.load(lengths + row)
    factor = tl.minimum(tl.div_rn(1.0, length), tl.div_rn(tl.div_rn(length, least), least))
    tl.store(out + row * width + at, across * factor, mask=at < width)


@triton.jit
def flag_pairs(
    labels, own, candidate_labels, numbers, valid, relevance, mask, queries, candidates,
    OWN: tl.constexpr, VALID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Relevant: label equals label. Masked out: (OWN) a query's own number, (VALID) what is not valid."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    label = tl.load(labels + row, mask=row < queries, other=0)
    if OWN:
        number = tl.load(own + row, mask=row < queries, other=0)
    for block in range(tl.program_id(1), tl.cdiv(candidates, BLOCK), tl.num_programs(1)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = (row < queries)[:, None] & (at < candidates)[None, :]
        place = row.to(tl.int64)[:, None] * candidates + at[None, :]
        same = label[:, None] == tl.load(candidate_labels + at, mask=at < candidates, other=0)[None, :]
        tl.store(relevance + place, same.to(tl.uint8), mask=inside)
        exists = tl.full([ROWS, BLOCK], 1, tl.int1)
        if OWN:
            exists = exists & (number[:, None] != tl.load(numbers + at, mask=at < candidates, other=0)[None, :])
        if VALID:
            exists = exists & (tl.load(valid + at, mask=at < candidates, other=0) != 0)[None, :]
        if OWN or VALID:
            tl.store(mask + place, exists.to(tl.uint8), mask=inside)


@triton.jit
def count_lists(
    labels, own, candidate_labels, numbers, valid, lists, queries, candidates,
    OWN: tl.constexpr, VALID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many queries have a relevant candidate, added to ``lists``; as :func:`flag_pairs` has it, without flags."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    label = tl.load(labels + row, mask=row < queries, other=0)
    if OWN:
        number = tl.load(own + row, mask=row < queries, other=0)
    found = tl.zeros([ROWS, BLOCK], tl.int32)
    for block in range(0, tl.cdiv(candidates, BLOCK)):
        at = (block * BLOCK + tl.arange(0, BLOCK))[None, :]
        inside = at < candidates
        relevant = inside & (label == tl.load(candidate_labels + at, mask=inside, other=0))
        if OWN:
            relevant = relevant & (number != tl.load(numbers + at, mask=inside, other=0))
        if VALID:
            relevant = relevant & (tl.load(valid + at, mask=inside, other=0) != 0)
        found = found | relevant.to(tl.int32)
    some = tl.max(found, 1) & (tl.program_id(0) * ROWS + tl.arange(0, ROWS) < queries).to(tl.int32)
    tl.atomic_add(lists, tl.sum(some).to(tl.int64))
