"""The CPU engine: which lists go where, and why.

Numba kernels for float32, float16 and bfloat16 scores, in threads of our own; lists of equal length or ragged:

many lists, or short ones
    Each list is one thread's work, from gathering its relevant items to its gradient (``lists_cpu.one_list``):
    nothing is shared, and a short list stays in the cache.
few lists of 65,536 items and more, fewer than threads
    One by one, all threads at work on each (:class:`_Together`): the steps of ``one_list`` in chunks. Where a
    quarter or more of the items is relevant, the others are sorted too and merged, instead of each being searched
    for among so many.

What is left for the sorts of the reference: float64 scores (a 64-bit key and an index make no word, and words are
what the kernels sort), calls with fewer scores than ``dispatch.SMALL_ON_CPU`` (loading the kernels takes longer),
lists of 2^31 items and more, and everything where Numba is not installed.
"""

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankgrad.engine.forms import code
from rankgrad.engine.layouts import layout_of
from rankgrad.engine.precision import count_dtype
from rankgrad.engine.request import Answer, Request

_LONG = 1 << 16  # lists at least this long are gone through one by one when there are fewer lists than threads
_SHARED = 1 << 18  # from this length on all threads work on one list: starting them takes 0.1 ms each time
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what the kernels read
_DENSE = 4  # one relevant item in so many, or more: sort the irrelevant items too, and merge


@functools.cache
def _numba_kernels() -> SimpleNamespace | None:
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
        from rankgrad.engine._kernels import lists_cpu, placing_cpu, words_cpu
    # a NumPy it does not support; no folder for its cache; NUMBA_NUM_THREADS=0
    except (ImportError, RuntimeError, ValueError) as reason:
        warnings.warn(
            f"rankgrad: Numba is installed but cannot be used ({reason}); using the slower sorts of "
            "torch. If it cannot cache functions, set NUMBA_CACHE_DIR to a folder it may write to",
            stacklevel=2,
        )
        return None
    modules: tuple[ModuleType, ...] = (words_cpu, placing_cpu, lists_cpu)
    return SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})


def supports(request: Request) -> bool:
    """Whether the kernels take a request: a 32-bit key and a 32-bit index make a word."""
    # The gradient by a window takes the memory of 32-bit places.
    longest = 2**31 if request.by_window else 2**32
    return request.scores.shape[-1] < longest and reads(request.scores.dtype)


def reads(dtype: torch.dtype) -> bool:
    """Whether there are kernels for scores of a dtype."""
    return dtype in _DTYPES and _numba_kernels() is not None


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


def _flat(scores: Tensor) -> Any:
    """Scores as NumPy has them: float32, or the bits of 16."""
    scores = scores.detach().contiguous().view(-1)
    return (scores if scores.dtype == torch.float32 else scores.view(torch.uint16)).numpy()


def _flags(flags: Tensor | None) -> Any:
    """Bools as the bytes they are; nothing for None."""
    if flags is None:
        return np.empty(0, np.uint8)
    return flags.contiguous().view(-1).view(torch.uint8).numpy()


class _Lists:
    """The lists of all calls, one behind the other, as the kernels take them."""

    def __init__(self, request: Request) -> None:
        scores, n = request.scores, request.scores.shape[-1]
        calls, per_call = request.shape
        flags = _flags(request.relevance), _flags(request.mask)
        self.arrays = _flat(scores), _decoding(scores.dtype), *flags, request.mask is not None
        if request.offsets is None:
            self.offsets = np.arange(calls * per_call + 1, dtype=np.int64) * n
        else:
            begins = request.offsets + torch.arange(calls, device=scores.device).unsqueeze(-1) * n
            self.offsets = torch.cat([begins[:, :-1].reshape(-1), begins[-1:, -1]]).numpy()
        self.halves = _of_each(request.half_margin(), calls, per_call, np.float32)
        self.threads = torch.get_num_threads()
        # Whether to go through the lists one by one, rather than to give each thread some lists.
        self.long = request.offsets is None and n >= _LONG and calls * per_call < max(self.threads, 2)
        # In how many parts to cut a list.
        self.chunks = self.threads if self.long and n >= _SHARED else 1

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, at: int) -> tuple[Any, ...]:
        scores, decode, relevance, mask, masked = self.arrays
        part = slice(self.offsets[at], self.offsets[at + 1])
        return scores[part], decode, relevance[part], mask[part], masked, self.halves[at]


def _of_each(value: float | Tensor, calls: int, per_call: int, dtype: Any) -> Any:
    """A number of all calls, or of each, for every list."""
    if isinstance(value, Tensor):
        return value.repeat_interleave(per_call).numpy().astype(dtype)
    return np.full(calls * per_call, value, dtype)


class _Together:
    """One long list, all threads at work on it: the steps of the kernel ``one_list``, each in chunks.

    The order of the steps is written in ``one_list`` alone. For many lists it is compiled and calls the steps of
    one thread; here the same code runs as Python and calls these.
    """

    def __init__(self, kernels: Any, out: Any, chunks: int) -> None:
        self.kernels, self.out, self.chunks = kernels, out, chunks
        self._others: Any = None
        self._bad = False

    def one_list(self, *given: Any) -> float:
        """The kernel's own code with the steps of this class."""
        steps = {"sorted_words": self.sorted_words, "sort_words": self.sort_words, "place_all": self.place_all}
        code: FunctionType = self.kernels.one_list.py_func
        # Not kept: it refers to this object, whose arrays would wait for the garbage collector.
        run = FunctionType(code.__code__, code.__globals__ | steps)
        return float(run(*given))

    def sorted_words(self, row: tuple[Any, ...]) -> tuple[Any, Any, int]:
        kernels, chunks = self.kernels, self.chunks
        counts = np.empty((chunks, 2), np.int64)
        for chunk in range(chunks):  # quicker than waking a thread
            kernels.count_items(*row[2:5], counts, chunk)
        p, items = (int(total) for total in counts.sum(0))
        others = items - p if p * _DENSE > items else 0
        words, spare = np.empty(p, np.uint64), np.empty(max(p, others, 1), np.uint64)
        _each(chunks, lambda chunk: kernels.gather_words(row, counts, words, chunk))
        if others:  # so many relevant items: sort the others too, and merge
            self._others = found = np.empty(others, np.uint64)
            bad = _each(chunks, lambda chunk: kernels.gather_others(row, counts, found, self.out, chunk))
            self._bad = any(bad)
            self.sort_words(found, spare)
        self.sort_words(words, spare)
        return words, spare, items

    def sort_words(self, words: Any, spare: Any) -> None:
        kernels, chunks = self.kernels, self.chunks
        source, target = words, spare[: len(words)]
        if chunks == 1 or len(words) < _LONG:
            kernels.sort_words(source, target)
            return
        counts = np.empty((chunks, 256), np.int64)
        for shift in (np.uint64(32 + 8 * digit) for digit in range(4)):
            _each(chunks, functools.partial(kernels.count_digits, source, shift, counts))
            if kernels.start_digits(counts, len(source)):
                _each(chunks, functools.partial(kernels.move_by_digit, source, target, shift, counts))
                source, target = target, source
        if source is not words:
            words[:] = source
        kernels.order_ties(words)

    def place_all(self, row: Any, words: Any, spare: Any, out: Any, moved: tuple[Any, ...]) -> tuple[Any, bool]:
        kernels, p, chunks = self.kernels, len(words), self.chunks
        if self._others is not None:
            # By a window the earlier counts, which are kept in the spare room, are still needed.
            above = np.empty(p, out.dtype) if moved[0] == kernels.SUMS else spare.view(out.dtype)[:p]
            _each(chunks, lambda chunk: kernels.merge(words, self._others, out, moved, above, chunk, chunks))
            return above, self._bad
        levels, table, best, scale = kernels.prepare(words, spare, len(row[2]), out)
        cells = levels, table, np.float32(best), np.float32(scale)  # Numba hands out Python's doubles
        counts = kernels.no_counts(chunks, p, table)
        bad = _each(chunks, lambda chunk: kernels.stream(row, cells, out, moved, counts, chunk))
        return kernels.sum_counts(counts), any(bad)


def moments(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The moments of each call's scores; see :func:`rankgrad.engine.spread.moments`."""
    kernels: Any = _numba_kernels()
    out = torch.empty(scores.shape[0], 4, dtype=torch.float64, device=scores.device)
    for call, row in enumerate(scores):
        flags = _flags(None if mask is None else mask[call])
        found = kernels.moments(_flat(row), _decoding(scores.dtype), flags, mask is not None)
        out[call] = torch.tensor(found, dtype=torch.float64, device=scores.device)
    return out


def standings(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Where the relevant items stand; see :func:`rankgrad.engine.reference.standings`."""
    kernels: Any = _numba_kernels()
    lists = _Lists(request)
    above = torch.zeros(request.scores.shape, dtype=torch.int64, device=request.scores.device)
    own = torch.zeros_like(above)
    poison = torch.empty(request.shape, dtype=torch.float64, device=above.device)
    outputs = [tensor.view(-1).numpy() for tensor in (above, own, poison)]
    threads = max(1, min(lists.threads, len(lists)))
    run = functools.partial(kernels.some_standings, lists.arrays, lists.offsets, lists.halves, *outputs)
    _each(threads, lambda chunk: run(chunk, threads))
    return above, own, poison


def evaluate(request: Request) -> Answer:
    """Loss of every list and its gradient; see :class:`rankgrad.engine.request.Answer`."""
    kernels: Any = _numba_kernels()
    scores, counting = request.scores, request.lists
    (calls, per_call), n, by_window = request.shape, request.scores.shape[-1], request.by_window
    lists = _Lists(request)
    if counting is None:
        found = torch.empty(calls, per_call, dtype=torch.bool, device=scores.device)
        kernels.lists_with_relevant(*lists.arrays[2:], lists.offsets, found.view(-1).numpy())
        counting = found.sum(-1)
    reach = request.window() if by_window else request.strength
    divisor = _divisor(request, reach, counting, lists.offsets)
    # Allocated by NumPy, which requests huge pages and torch does not: page faults took a fifth of a call.
    kind = np.int32 if count_dtype(n) == torch.int32 else np.int64
    out = np.empty((*scores.shape[:-1], n if request.with_gradient else 0), kind)
    gradient = torch.from_numpy(out.view(np.float32) if by_window else out)
    flat = out.reshape(-1)
    floats = flat.view(np.float32)
    losses = torch.empty(calls, per_call, dtype=torch.float64, device=scores.device)
    into = losses.view(-1).numpy()
    form, tables = code(request.form), np.zeros((2, 1)) if request.tables is None else request.tables.numpy()
    strengths = _of_each(reach, calls, per_call, np.float64)
    counted = counting.repeat_interleave(per_call).numpy()
    if not lists.long:
        threads = max(1, min(lists.threads, len(lists)))
        given = lists.arrays, lists.offsets, lists.halves, form, tables, by_window, strengths, counted
        run = functools.partial(kernels.some_lists, *given, flat, floats, into)
        _each(threads, lambda chunk: run(chunk, threads))
        return Answer(losses, gradient, divisor, counting)
    nothing = np.empty(0, np.int64)
    for at in range(len(lists)):
        part = slice(lists.offsets[at], lists.offsets[at + 1])
        into[at] = _Together(kernels, flat[part], lists.chunks).one_list(
            lists.row(at), form, tables, by_window, strengths[at], counted[at], flat[part], floats[part], nothing
        )
    return Answer(losses, gradient, divisor, counting)


def _divisor(request: Request, reach: float | Tensor, counting: Tensor, offsets: Any) -> Tensor:
    """What the gradient is divided by: the window times the lists that count, or lambda times a list's items."""
    if request.by_window:
        return (counting.clamp(min=1).double() * reach).unsqueeze(-1).repeat(1, request.shape[1])
    if request.mask is not None:
        items = layout_of(request).total(request.mask.long())
    else:
        items = torch.from_numpy(np.diff(offsets)).reshape(request.shape)
    return reach * items.clamp(min=1).double()
