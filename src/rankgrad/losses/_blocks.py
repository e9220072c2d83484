"""Losses of queries against candidates in blocks of queries: no matrix of all similarities is ever there.

The similarities of a block are computed, ranked, turned into the gradient of the scores and at once into its share
of the gradients of queries and candidates, and dropped. These losses are linear in the upstream gradient, so
backward has nothing left to do but one multiplication: three products of matrices for a batch, two against a
memory (which has no gradient), one without a gradient. What concerns the scores of all blocks, their spread or
how many of them a hinge acts on, comes first where there is more than one block, and costs one product more: the
same product of the same rows, so the same bits. Memory: O((Q + N) d + block x N).

A small batch is one block: its matrix is there, once, and no product is computed twice.
"""

# No `from __future__ import annotations`: torch reads the annotations to make the ops' schemas.
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankgrad.engine import ops
from rankgrad.engine.precision import without_autocast
from rankgrad.engine.registration import fake_of, is_plain_call, op_on, records_of
from rankgrad.engine.request import Request
from rankgrad.engine.spread import merged, moments, spread_of
from rankgrad.losses import _forces
from rankgrad.pairs import Lookup, Pairs


def block_rows(candidates: int) -> int:
    """How many queries are ranked at a time: by the number of candidates alone.

    Up to 8,192 candidates it is 2^24 similarities, so that a batch of 4,096 is one block. Each block reads all
    candidates and adds to all their gradients: with more candidates its rows are what makes that cheap beside the
    block itself, 512 and from 32,768 candidates a 64th of them, up to 2^26 similarities, but 128 at least.
    """
    if candidates <= 8192:
        return (1 << 24) // max(candidates, 1)
    return max(min(max(512, candidates // 64), (1 << 26) // candidates), 128)


class LossSpec(NamedTuple):
    """What is computed of every list: the fields of a request that do not depend on the scores, and the forces.

    ``forces`` names the function of :mod:`rankgrad.losses._forces`, ``"hinge"`` or ``"balanced"``; empty for none.
    The three fields behind it are its thresholds and its weight.
    """

    form: str
    reach: str
    strength: float
    margin: float = 0.0
    margin_is_share: bool = False
    max_relevant: int | None = None
    forces: str = ""
    upper: float = 0.0
    lower: float = 0.0
    weight: float = 1.0

    @property
    def needs_spread(self) -> bool:
        """Whether anything is a share of the spread."""
        return self.margin_is_share or self.reach == "share"

    def request(self, pairs: Pairs, stats: "GlobalStats", with_gradient: bool) -> Request:
        """The request for the lists of a block."""
        scores, relevance, mask = pairs
        spread, lists = stats.spread, stats.lists
        return Request(
            scores.detach().unsqueeze(0),
            relevance.unsqueeze(0),
            None if mask is None else mask.unsqueeze(0),
            tables=stats.tables,
            spread=None if spread is None else spread.double().reshape(1),
            lists=None if lists is None else lists.reshape(1),
            form=self.form,
            reach=self.reach,
            strength=self.strength,
            margin=self.margin,
            margin_is_share=self.margin_is_share,
            with_gradient=with_gradient,
            max_relevant=self.max_relevant,
        )

    def forces_on(self, pairs: Pairs, stats: "GlobalStats", lists: Tensor, queries: int) -> tuple[Tensor, Tensor]:
        """Value and gradient of the forces on a block's scores; balanced ones need ``lists`` and ``queries``."""
        arguments = (*pairs, self.upper, self.lower, self.weight)
        if self.forces == "hinge":
            return _forces.hinge(*arguments, stats.hinge_pairs)
        return _forces.balanced(*arguments, lists, queries)


class GlobalStats(NamedTuple):
    """What a loss needs to know of all calls and processes; None: it is computed from this call's scores alone.

    Attributes:
        tables: As in :class:`rankgrad.engine.request.Request`.
        lists: How many lists count, a scalar.
        spread: The spread of all scores, a scalar.
        hinge_pairs: How many pairs a hinge pulls and pushes, ``[2]``.
    """

    tables: Tensor | None = None
    lists: Tensor | None = None
    spread: Tensor | None = None
    hinge_pairs: Tensor | None = None


class GradientFlags(NamedTuple):
    """Which gradients are wanted. ``among``: the candidates are the queries, and both gradients are one."""

    among: bool
    of_queries: bool
    of_candidates: bool


class ListStats(NamedTuple):
    """Statistics of all lists of a lookup: how many count, moments ``[4]``, pairs of a hinge ``[2]``."""

    lists: Tensor
    moments: Tensor
    hinge_pairs: Tensor


def _blocks(lookup: Lookup) -> Iterator[tuple[slice, Lookup]]:
    rows = block_rows(len(lookup.candidates))
    if len(lookup.queries) <= rows:  # three slices less: in a small batch that counts
        yield slice(None), lookup
        return
    for start in range(0, len(lookup.queries), rows):
        part = slice(start, start + rows)
        ids = None if lookup.query_ids is None else lookup.query_ids[part]
        yield part, lookup._replace(queries=lookup.queries[part], labels=lookup.labels[part], query_ids=ids)


def _list_stats(lookup: Lookup, spec: LossSpec, of_scores: bool, lists: Tensor | None = None) -> ListStats:
    """``lists``: how many count, if that is known."""
    if lists is None:
        lists = lookup.counting_lists(block_rows(len(lookup.candidates)))
    spread, hinge = of_scores and spec.needs_spread, of_scores and spec.forces == "hinge"
    parts, hinge_pairs = [], lists.new_zeros(2)
    for _, block in _blocks(lookup) if spread or hinge else ():
        scores, _, mask = pairs = block.pairs()
        if spread:
            parts.append(moments(scores.unsqueeze(0), None if mask is None else mask.unsqueeze(0))[0])
        if hinge:
            hinge_pairs = hinge_pairs + _forces.hinge_pairs(*pairs, spec.upper, spec.lower)
    moments_of_all = merged(torch.stack(parts)) if parts else lists.new_zeros(4, dtype=torch.float64)
    return ListStats(lists, moments_of_all, hinge_pairs)


class _OfScores(NamedTuple):
    of_scores: bool


@op_on(Lookup, LossSpec, _OfScores)
def _list_stats_op(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    lookup, spec, (of_scores,) = records_of(fields, Lookup, LossSpec, _OfScores)
    return _list_stats(lookup, spec, of_scores)


@fake_of("list_stats_op")
def _(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    number = fields[1].new_empty((), dtype=torch.int64)
    return number, number.new_empty(4, dtype=torch.float64), number.new_empty(2)


def list_stats(lookup: Lookup, spec: LossSpec, of_scores: bool) -> ListStats:
    """What a mean over several calls needs of each; of the scores only if wanted."""
    detached = lookup._replace(queries=lookup.queries.detach(), candidates=lookup.candidates.detach())
    if is_plain_call(lookup.queries) or torch._C._are_functorch_transforms_active():
        return _list_stats(detached, spec, of_scores)
    return ListStats(*_list_stats_op(*detached, *spec, of_scores))


def _evaluate(
    lookup: Lookup, stats: GlobalStats, spec: LossSpec, wanted: GradientFlags
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and its gradients with respect to queries and candidates (empty where not wanted)."""
    queries, candidates = lookup.queries, lookup.candidates
    several = len(queries) > block_rows(len(candidates))
    without_spread = spec.needs_spread and stats.spread is None
    without_pairs = spec.forces == "hinge" and stats.hinge_pairs is None
    if several and (stats.lists is None or without_spread or without_pairs):
        found = _list_stats(lookup, spec, without_spread or without_pairs, stats.lists)
        stats = stats._replace(
            lists=found.lists,
            spread=spread_of(found.moments.unsqueeze(0), queries.dtype) if without_spread else stats.spread,
            hinge_pairs=found.hinge_pairs if without_pairs else stats.hinge_pairs,
        )
    make = torch.zeros_like if several else torch.empty_like
    grad_queries = make(queries) if wanted.of_queries else queries.new_empty(0)
    grad_candidates = make(candidates) if wanted.of_candidates else queries.new_empty(0)
    with_gradient = wanted.of_queries or wanted.of_candidates
    losses, values = [], []
    for part, block in _blocks(lookup):
        pairs = block.pairs()
        answer = ops.evaluate_mean(spec.request(pairs, stats, with_gradient))
        losses.append(answer.losses)
        gradient = answer.gradient[0]
        if spec.forces:
            value, force = spec.forces_on(pairs, stats, answer.lists, len(queries))
            values.append(value)
            if with_gradient:
                gradient += force
            del force
        del pairs
        if not with_gradient:
            continue
        with without_autocast(queries.device.type):
            if wanted.of_queries:
                _multiply_into(grad_queries[part], gradient, candidates, add=several)
                if wanted.among:
                    grad_queries.addmm_(gradient.T, block.queries)
            if wanted.of_candidates:
                _multiply_into(grad_candidates, gradient.T, block.queries, add=several)
    loss = queries.new_empty(())  # its own memory and no view: a caller may write `loss *= 0.5`
    of_lists = losses[0] if len(losses) == 1 else torch.cat(losses, 1)
    ops.reduce_into(of_lists, answer.lists, "mean", loss.view(1))
    for value in values:
        loss += value
    return loss, grad_queries, grad_candidates


def _multiply_into(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    """``left @ right`` into ``out``: added to what is there, or in its place."""
    if add:
        out.addmm_(left, right)
    else:
        torch.mm(left, right, out=out)


_RECORDS = (Lookup, GlobalStats, LossSpec, GradientFlags)
_DIFFERENTIABLE = [Lookup._fields.index(name) for name in ("queries", "candidates")]


@op_on(*_RECORDS)
def _lookup_loss(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`_evaluate` with all fields by themselves."""
    return _evaluate(*records_of(fields, *_RECORDS))


@fake_of("lookup_loss")
def _(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    lookup, _, _, wanted = records_of(fields, *_RECORDS)
    queries, candidates = lookup.queries, lookup.candidates
    return (
        queries.new_empty(()),
        queries.new_empty(queries.shape if wanted.of_queries else 0),
        queries.new_empty(candidates.shape if wanted.of_candidates else 0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    _, _, _, ctx.wanted = records_of(inputs, *_RECORDS)


def _gradients(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    wanted = ctx.wanted.of_queries, ctx.wanted.of_candidates
    return [
        one * upstream if is_wanted else None for one, is_wanted in zip(ctx.saved_tensors, wanted, strict=True)
    ]


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * sum(len(record._fields) for record in _RECORDS)
    if upstream is not None:
        for at, gradient in zip(_DIFFERENTIABLE, _gradients(ctx, upstream), strict=True):
            grads[at] = gradient
    return tuple(grads)


torch.library.register_autograd("rankgrad::lookup_loss", _backward, setup_context=_setup)


class _LookupLoss(torch.autograd.Function):
    """The op :func:`_lookup_loss` for an eager call, without torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        candidates: Tensor,
        lookup: Lookup,
        stats: GlobalStats,
        spec: LossSpec,
        wanted: GradientFlags,
    ) -> Tensor:
        loss, *gradients = _evaluate(lookup, stats, spec, wanted)
        ctx.save_for_backward(*gradients)
        ctx.wanted = wanted
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, upstream), None, None, None, None


def _by_whole_matrix(lookup: Lookup, stats: GlobalStats, spec: LossSpec) -> Tensor:
    """The loss inside transforms of torch.func: these take one product of matrices, not the op over blocks."""
    # The candidates are kept for backward, and a memory changes before.
    pairs = lookup._replace(candidates=lookup.candidates.clone()).pairs()
    request = spec.request(pairs, stats, ops.gradient_wanted(pairs.scores))
    loss = ops.list_loss(pairs.scores.unsqueeze(0), request, "mean", ())
    if spec.forces:
        detached = pairs._replace(scores=pairs.scores.detach())
        lists = stats.lists if stats.lists is not None else _list_stats(lookup, spec, of_scores=False).lists
        value, force = spec.forces_on(detached, stats, lists, len(lookup.queries))
        loss = loss + value.to(loss.dtype) + (force * (pairs.scores - detached.scores)).sum()
    return loss


def lookup_loss(lookup: Lookup, stats: GlobalStats, spec: LossSpec) -> Tensor:
    """Mean loss of the lists of all queries, differentiable with respect to queries and candidates."""
    queries, among = lookup.queries, lookup.candidates is lookup.queries
    if lookup.candidates.dtype != queries.dtype:
        lookup = lookup._replace(candidates=lookup.candidates.to(queries.dtype))
    if torch._C._are_functorch_transforms_active():
        return _by_whole_matrix(lookup, stats, spec)
    candidates = lookup.candidates
    wanted = GradientFlags(among, ops.gradient_wanted(queries), not among and ops.gradient_wanted(candidates))
    if is_plain_call(queries):
        detached = lookup._replace(queries=queries.detach(), candidates=candidates.detach())
        return _LookupLoss.apply(queries, candidates, detached, stats, spec, wanted)  # type: ignore[no-any-return]
    loss: Tensor = _lookup_loss(*lookup, *stats, *spec, *wanted)[0]
    return loss
