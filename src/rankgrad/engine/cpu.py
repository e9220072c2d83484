"""The CPU engine: Numba kernels in threads."""

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankgrad.engine import reference
from rankgrad.engine.forms import code
from rankgrad.engine.precision import count_dtype
from rankgrad.engine.request import Answer, Request

_LONG = 1 << 16  # lists at least this long are gone through one by one when there are fewer lists than threads
_SHARED = 1 << 18  # and from this length on by all threads: waking them takes a tenth of a millisecond each time
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what the kernels read
_DENSE = 4  # one relevant item in so many, or more: sort the irrelevant items too, and merge


@functools.cache
def _numba_kernels() -> ModuleType | None:
    if importlib.util.find_spec("numba") is None:
        warnings.warn(
            "rankgrad: Numba is not installed; using the slower sorts of torch (pip install numba)",
            stacklevel=2,
        )
        return None
    try:
        import numba

        if vars(numba.config)["DISABLE_JIT"]:  # as Python they would take minutes
            return None
        from rankgrad.engine._kernels import stream_cpu
    except (ImportError, RuntimeError) as reason:  # another NumPy than it wants; no place for its cache
        warnings.warn(
            f"rankgrad: Numba is installed but cannot be used ({reason}); using the slower sorts of "
            "torch. If it cannot cache functions, set NUMBA_CACHE_DIR to a folder it may write to",
            stacklevel=2,
        )
        return None
    return stream_cpu


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rankgrad")


if hasattr(os, "register_at_fork"):  # a forked process has the pool but not its threads: it would wait forever
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _each(chunks: int, run: Callable[[int], Any]) -> list[Any]:
    """Run all chunks, each in a thread: the first in this one."""
    if chunks == 1:
        return [run(0)]
    others = [_pool(chunks - 1).submit(run, chunk) for chunk in range(1, chunks)]
    return [run(0), *(other.result() for other in others)]


@functools.cache
def _decoding(dtype: torch.dtype) -> Any:
    """The values of all 16-bit patterns."""
    if dtype == torch.float32:
        return np.empty(0, np.float32)
    return torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.uint16).view(dtype).float().numpy()


def _in_large_pages(*shape: int, dtype: torch.dtype) -> Tensor:
    """Room in large pages, for which NumPy asks and torch does not: page faults were a fifth of a call."""
    return torch.from_numpy(np.empty(shape, np.int32 if dtype == torch.int32 else np.int64))


class _Rows:
    """The lists of all calls as rows of NumPy arrays, in the form the kernels take."""

    def __init__(self, scores: Tensor, relevance: Tensor, mask: Tensor | None, margin: float) -> None:
        n = scores.shape[-1]
        self.decode = _decoding(scores.dtype)
        rows = scores.detach().contiguous().reshape(-1, n)
        self.scores = (rows if scores.dtype == torch.float32 else rows.view(torch.uint16)).numpy()
        self.relevance = relevance.contiguous().reshape(-1, n).view(torch.uint8).numpy()
        self.masked = mask is not None
        exists = relevance.new_empty(len(rows), 0) if mask is None else mask.contiguous().reshape(-1, n)
        self.mask = exists.view(torch.uint8).numpy()
        self.half = np.float32(margin / 2)
        self.threads = torch.get_num_threads()

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def long(self) -> bool:
        """Whether to go through the lists one by one, rather than to give each thread some lists."""
        return self.scores.shape[1] >= _LONG and len(self) < max(self.threads, 2)

    @property
    def chunks(self) -> int:
        """In how many parts to cut a list."""
        return self.threads if self.long and self.scores.shape[1] >= _SHARED else 1

    def all(self) -> tuple[Any, ...]:
        return self.scores, self.decode, self.relevance, self.mask, self.masked, self.half

    def row(self, at: int) -> tuple[Any, ...]:
        return self.scores[at], self.decode, self.relevance[at], self.mask[at], self.masked, self.half


class _List:
    """One list, step by step, in chunks: what ``one_list`` of the kernels does in one go."""

    def __init__(self, kernels: Any, row: tuple[Any, ...], out: Any, chunks: int) -> None:
        self.kernels, self.row, self.out, self.chunks = kernels, row, out, chunks
        self._counts = out.dtype
        relevance, mask, masked = row[2:5]
        counts = np.empty((chunks, 2), np.int64)
        for chunk in range(chunks):  # quicker than waking a thread
            kernels.count_items(relevance, mask, masked, counts, chunk)
        p, self.items = (int(total) for total in counts.sum(0))
        others = self.items - p if p * _DENSE > self.items else 0
        self.words, self._spare = np.empty(p, np.uint64), np.empty(max(p, others, 1), np.uint64)
        _each(chunks, lambda chunk: kernels.gather_words(*row, counts, self.words, chunk))
        self._others = None
        if others:
            self._others = np.empty(others, np.uint64)
            nan = _each(chunks, lambda chunk: kernels.gather_others(*row, counts, self._others, out, chunk))
            self._others = self._sort(self._others)
        self.words = self._sort(self.words)
        self.above, self.nan = self._place(again=False)
        if others:
            self.nan = any(nan)

    def _sort(self, words: Any) -> Any:
        """Sorted words; the array may become the spare one, and the other way round."""
        if self.chunks == 1 or len(words) < _LONG:
            self.kernels.sort_words(words, self._spare[: len(words)])
            return words
        source, target = words, self._spare[: len(words)]
        counts = np.empty((self.chunks, 256), np.int64)
        for shift in (np.uint64(32 + 8 * digit) for digit in range(4)):
            digits = functools.partial(self.kernels.count_digits, source, shift, counts)
            _each(self.chunks, digits)
            if self.kernels.start_digits(counts, len(source)):
                _each(self.chunks, functools.partial(self.kernels.move_by_digit, source, target, shift, counts))
                source, target = target, source
        if source is not words:
            words[:] = source
        self.kernels.order_ties(words)
        return words

    def _place(self, *, again: bool) -> tuple[Any, bool]:
        if self._others is not None:
            above = self._spare.view(self._counts)[: len(self.words)]
            merge = self.kernels.merge
            _each(
                self.chunks,
                lambda chunk: merge(self.words, self._others, self.out, again, above, chunk, self.chunks),
            )
            return above, False
        n = len(self.row[2])
        levels, table, best, scale = self.kernels.prepare(self.words, self._spare, n, self.out)
        best, scale = np.float32(best), np.float32(scale)  # Numba hands out Python's doubles
        counts = self.kernels.no_counts(self.chunks, len(self.words), table)
        nan = _each(
            self.chunks,
            lambda chunk: self.kernels.stream(
                *self.row, levels, table, best, scale, self.out, again, counts, chunk
            ),
        )
        return self.kernels.sum_counts(counts), any(nan)

    def steps(self) -> Any:
        """Room for a score step of each slot: what sorting needs lies idle between the sorts."""
        p = len(self.words)
        return np.empty(p, np.float32) if self._counts == np.int64 else self._spare.view(np.float32)[p : 2 * p]

    def move(self, steps: Any) -> None:
        """Step two: ``out`` turns from places into rank changes."""
        if len(self.words) == 0:
            self.out[:] = 0
            return
        self.kernels.lift(self.words, self.above, steps, self.out)
        self.words = self._sort(self.words)
        above, _ = self._place(again=True)
        self.kernels.settle(self.words, above, self.out)


def supports(request: Request) -> bool:
    """Whether the kernels take a request: they may be missing, and a 32-bit key and a 32-bit index make a word."""
    return (
        request.scores.dtype in _DTYPES
        and request.scores.shape[-1] < 2**32
        and request.offsets is None
        and not request.by_window
        and not request.margin_is_share
        and _numba_kernels() is not None
    )


def standings(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Where the relevant items stand; see :func:`rankgrad.engine.reference.standings`."""
    return reference.standings(request)


def evaluate(request: Request) -> Answer:
    """Loss of every list and its gradient; see :class:`rankgrad.engine.request.Answer`."""
    kernels: Any = _numba_kernels()
    scores, mask, lists, lam = request.scores, request.mask, request.lists, request.strength
    calls, per_call, n = scores.shape
    rows = _Rows(scores, request.relevance, mask, request.margin)
    if lists is None:
        found = torch.empty(calls, per_call, dtype=torch.bool, device=scores.device)
        kernels.lists_with_relevant(rows.relevance, rows.mask, rows.masked, found.view(-1).numpy())
        lists = found.sum(-1)
    items = torch.full((calls, per_call), n, device=scores.device) if mask is None else mask.sum(-1)
    divisor = lam * items.clamp(min=1).double()
    changes = _in_large_pages(calls, per_call, n if request.with_gradient else 0, dtype=count_dtype(n))
    losses = torch.empty(calls, per_call, dtype=torch.float64, device=scores.device)
    tables = np.zeros((2, 1)) if request.tables is None else request.tables.numpy()
    out, into = changes.view(calls * per_call, -1).numpy(), losses.view(-1).numpy()
    counting = lists.repeat_interleave(per_call).numpy()
    arguments = (code(request.form), tables)
    if not rows.long:
        threads = min(rows.threads, max(1, len(rows)))
        run = functools.partial(kernels.some_lists, *rows.all(), *arguments, lam, counting, out, into)
        _each(threads, lambda chunk: run(chunk, threads))
        return Answer(losses, changes, divisor, lists)
    for at in range(len(rows)):
        one = _List(kernels, rows.row(at), out[at], rows.chunks)
        p = len(one.words)
        steps = one.steps()
        per_list = lam * one.items / max(int(counting[at]), 1) / max(p, 1)
        into[at] = np.nan if one.nan else kernels.terms(*arguments, one.above, per_list, steps)
        if request.with_gradient:
            one.move(steps)
    return Answer(losses, changes, divisor, lists)
