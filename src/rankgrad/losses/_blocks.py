"""Losses of queries against candidates in blocks of queries: no matrix of all similarities is ever there.

The similarities of a block are computed, ranked, turned into the gradient of the scores and at once into its share
of the gradients of queries and candidates, and dropped. A ranking loss is linear in what arrives from above, so
backward has nothing left to do but one multiplication: three products of matrices for a batch, two against a
memory (which has no gradient), one without a gradient. Where the spread of the scores is asked for and there is
more than one block, it comes first and costs one product more. Memory: O((Q + N) d + block x N).
"""

# No `from __future__ import annotations`: torch reads the annotations to make the ops' schemas.
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankgrad.engine import ops
from rankgrad.engine.precision import without_autocast
from rankgrad.engine.registration import fake_of, is_plain_call, op
from rankgrad.engine.request import Answer, Request
from rankgrad.engine.spread import merged, moments, spread_of
from rankgrad.pairs import Lookup


def block_rows(candidates: int) -> int:
    """How many queries are ranked at a time: by the number of candidates alone.

    2^24 similarities fill a device. With more candidates the rows of a block are what makes a product efficient:
    up to 1,024 while they stay below 2^26 similarities, and 128 at least, for each block reads all candidates.
    """
    many = max(candidates, 1)
    return max((1 << 24) // many, min(1024, (1 << 26) // many), 128)


class Asked(NamedTuple):
    """What is asked of every list: the fields of a request that do not depend on the scores."""

    form: str
    reach: str
    strength: float
    margin: float
    margin_is_share: bool
    max_relevant: int | None

    @property
    def needs_spread(self) -> bool:
        """Whether anything is a share of the spread."""
        return self.margin_is_share or self.reach == "share"


def _blocks(lookup: Lookup) -> Iterator[tuple[slice, Lookup]]:
    rows = block_rows(len(lookup.candidates))
    for start in range(0, max(len(lookup.queries), 1), rows):
        part = slice(start, start + rows)
        own = None if lookup.own is None else lookup.own[part]
        yield part, lookup._replace(queries=lookup.queries[part], labels=lookup.labels[part], own=own)


def _survey(lookup: Lookup, with_spread: bool) -> tuple[Tensor, Tensor]:
    counting = torch.zeros((), dtype=torch.int64, device=lookup.labels.device)
    parts = []
    for _, block in _blocks(lookup):
        if with_spread:
            scores, relevance, mask = block.pairs()
            parts.append(moments(scores.unsqueeze(0), None if mask is None else mask.unsqueeze(0))[0])
        else:
            relevance, mask = block.relevance_and_mask()
        counting += (relevance if mask is None else relevance & mask).any(-1).sum()
    return counting, merged(torch.stack(parts)) if parts else counting.double().expand(4).clone()


@op
def _survey_op(
    queries: Tensor,
    labels: Tensor,
    own: Tensor | None,
    candidates: Tensor,
    candidate_labels: Tensor,
    rows: Tensor,
    valid: Tensor | None,
    with_spread: bool,
) -> tuple[Tensor, Tensor]:
    return _survey(Lookup(queries, labels, own, candidates, candidate_labels, rows, valid), with_spread)


@fake_of("survey_op")
def _(
    queries: Tensor,
    labels: Tensor,
    own: Tensor | None,
    candidates: Tensor,
    candidate_labels: Tensor,
    rows: Tensor,
    valid: Tensor | None,
    with_spread: bool,
) -> tuple[Tensor, Tensor]:
    return labels.new_empty((), dtype=torch.int64), queries.new_empty(4, dtype=torch.float64)


def survey(lookup: Lookup, with_spread: bool) -> tuple[Tensor, Tensor]:
    """How many lists count, and the moments ``[4]`` of their scores (if wanted), for a mean over several calls."""
    detached = lookup._replace(queries=lookup.queries.detach(), candidates=lookup.candidates.detach())
    if is_plain_call(lookup.queries):
        return _survey(detached, with_spread)
    counting, spread = _survey_op(*detached, with_spread)
    return counting, spread


def _evaluate(
    lookup: Lookup,
    among_themselves: bool,
    tables: Tensor | None,
    lists: Tensor | None,
    spread: Tensor | None,
    asked: Asked,
    of_queries: bool,
    of_candidates: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and its gradients with respect to queries and candidates (empty where not wanted).

    ``among_themselves``: the candidates are the queries, and the gradient of both is that of the queries.
    """
    queries, candidates = lookup.queries, lookup.candidates
    several = len(queries) > block_rows(len(candidates))
    without_spread = asked.needs_spread and spread is None
    if several and (lists is None or without_spread):
        counting, parts = _survey(lookup, without_spread)
        lists = counting if lists is None else lists
        spread = spread_of(parts.unsqueeze(0), queries.dtype) if without_spread else spread
    make = torch.zeros_like if several else torch.empty_like
    grad_queries = make(queries) if of_queries else queries.new_empty(0)
    grad_candidates = make(candidates) if of_candidates else queries.new_empty(0)
    losses, one = [], torch.ones(1, device=queries.device)
    for part, block in _blocks(lookup):
        scores, relevance, mask = block.pairs()
        request = Request(
            scores.unsqueeze(0),
            relevance.unsqueeze(0),
            None if mask is None else mask.unsqueeze(0),
            tables=tables,
            spread=None if spread is None else spread.double().reshape(1),
            lists=None if lists is None else lists.reshape(1),
            with_gradient=of_queries or of_candidates,
            **asked._asdict(),
        )
        answer = ops.evaluate(request)
        losses.append(answer.losses)
        if not request.with_gradient:
            continue
        del scores, relevance, mask, request
        gradient = _scaled(answer, one, queries.dtype)[0]
        with without_autocast(queries.device.type):
            if of_queries:
                _add(grad_queries[part], gradient, candidates, several)
                if among_themselves:
                    grad_queries.addmm_(gradient.T, block.queries)
            if of_candidates:
                _add(grad_candidates, gradient.T, block.queries, several)
    loss = queries.new_empty(1)
    ops.reduce_into(torch.cat(losses, 1), answer.lists, "mean", loss)
    return loss.reshape(()), grad_queries, grad_candidates


def _add(into: Tensor, left: Tensor, right: Tensor, several: bool) -> None:
    """A product into memory that holds others' shares already, or nothing yet."""
    if several:
        into.addmm_(left, right)
    else:
        torch.mm(left, right, out=into)


def _scaled(answer: Answer, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the scores at an upstream gradient of one, in the memory of the answer's where it fits."""
    fits = answer.gradient.dtype.itemsize == dtype.itemsize and answer.gradient.is_contiguous()
    out = answer.gradient.view(dtype) if fits else torch.empty_like(answer.gradient, dtype=dtype)
    ops.scale(answer, upstream, "mean", out)
    return out


@op
def _lookup_loss(
    queries: Tensor,
    labels: Tensor,
    own: Tensor | None,
    candidates: Tensor | None,
    candidate_labels: Tensor,
    rows: Tensor,
    valid: Tensor | None,
    tables: Tensor | None,
    lists: Tensor | None,
    spread: Tensor | None,
    form: str,
    reach: str,
    strength: float,
    margin: float,
    margin_is_share: bool,
    max_relevant: int | None,
    of_queries: bool,
    of_candidates: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`_evaluate` with all fields by themselves; ``candidates`` None: the queries."""
    among = candidates is None
    lookup = Lookup(
        queries, labels, own, queries if candidates is None else candidates, candidate_labels, rows, valid
    )
    asked = Asked(form, reach, strength, margin, margin_is_share, max_relevant)
    return _evaluate(lookup, among, tables, lists, spread, asked, of_queries, of_candidates)


@fake_of("lookup_loss")
def _(
    queries: Tensor,
    labels: Tensor,
    own: Tensor | None,
    candidates: Tensor | None,
    candidate_labels: Tensor,
    rows: Tensor,
    valid: Tensor | None,
    tables: Tensor | None,
    lists: Tensor | None,
    spread: Tensor | None,
    form: str,
    reach: str,
    strength: float,
    margin: float,
    margin_is_share: bool,
    max_relevant: int | None,
    of_queries: bool,
    of_candidates: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        queries.new_empty(()),
        queries.new_empty(queries.shape if of_queries else 0),
        queries.new_empty(candidates.shape if of_candidates and candidates is not None else 0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.arguments = len(inputs)


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None] * ctx.arguments
    if upstream is not None:
        for at, gradient in zip((0, 3), ctx.saved_tensors, strict=True):
            if ctx.needs_input_grad[at]:
                grads[at] = gradient * upstream
    return tuple(grads)


torch.library.register_autograd("rankgrad::lookup_loss", _backward, setup_context=_setup)


class _LookupLoss(torch.autograd.Function):
    """The op :func:`_lookup_loss` for an eager call, without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, candidates: Tensor | None, lookup: Lookup, *arguments: Any) -> Tensor:
        loss, *gradients = _evaluate(lookup, candidates is None, *arguments)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            gradient * upstream if needed else None
            for gradient, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        ]
        return *grads, *[None] * (len(ctx.needs_input_grad) - 2)


def lookup_loss(
    lookup: Lookup, tables: Tensor | None, lists: Tensor | None, spread: Tensor | None, asked: Asked
) -> Tensor:
    """Mean loss of the lists of all queries, differentiable with respect to queries and candidates.

    Args:
        lookup: Queries and candidates.
        tables: As in :class:`rankgrad.engine.request.Request`.
        lists: How many lists count, a scalar tensor, where other calls have some of them.
        spread: The spread of all scores, likewise.
        asked: What is asked.
    """
    queries = lookup.queries
    candidates = None if lookup.candidates is queries else lookup.candidates
    wanted = ops.gradient_wanted(queries), candidates is not None and ops.gradient_wanted(candidates)
    if is_plain_call(queries):
        detached = lookup._replace(queries=queries.detach(), candidates=lookup.candidates.detach())
        return _LookupLoss.apply(  # type: ignore[no-any-return]
            queries, candidates, detached, tables, lists, spread, asked, *wanted
        )
    own, rows = lookup.own, lookup.rows
    fields = (queries, lookup.labels, own, candidates, lookup.candidate_labels, rows, lookup.valid)
    loss: Tensor = _lookup_loss(*fields, tables, lists, spread, *asked, *wanted)[0]
    return loss
