"""A request as the Triton kernels take it: tensors with one layout, numbers as bits, and room for the answer."""

import struct

import torch
from torch import Tensor

from rankgrad.engine.forms import code
from rankgrad.engine.launching import kinds
from rankgrad.engine.precision import count_dtype
from rankgrad.engine.request import REACHES, Answer, Request


def bits(value: float) -> int:
    """A float64 >= 0 as the bits of its negative.

    Triton would pass a float as float32, and an integer as 32 bits where it fits: the sign makes it 64 bits
    always, as a kernel that is compiled once must have it.
    """
    return int(struct.unpack("q", struct.pack("d", -value))[0])


def as_numbers(flags: Tensor) -> Tensor:
    """Bools as the bytes they are; numbers as they are."""
    return flags.contiguous().view(torch.uint8) if flags.dtype == torch.bool else flags.contiguous()


def room_for_gradient(request: Request) -> Tensor:
    """Memory for the gradient of an answer."""
    *lists, n = request.scores.shape
    dtype = torch.float32 if request.by_window else count_dtype(n)
    return torch.empty((*lists, n if request.with_gradient else 0), dtype=dtype, device=request.scores.device)


class Arguments:
    """What the kernels of all regimes are given.

    Where a request has no tensor for a pointer, it points to some other tensor. ``gradient`` is where the gradient
    goes, if that is allocated already.
    """

    def __init__(self, request: Request, gradient: Tensor | None = None) -> None:
        scores, device = request.scores, request.scores.device
        self.calls, self.per_call, self.n = scores.shape
        self.rows, self.device = self.calls * self.per_call, device
        self.scores, self.relevance = scores.contiguous(), as_numbers(request.relevance)
        self.masked = request.mask is not None
        self.mask = self.relevance if request.mask is None else as_numbers(request.mask)
        self.slots = min(self.n, request.max_relevant or self.n)
        self.form = code(request.form)
        self.reach, self.reach_bits = REACHES.index(request.reach), bits(request.strength)
        self.by_window = request.by_window
        self.margin_share, self.half_bits = request.margin_is_share, bits(request.margin / 2)
        self.with_gradient = request.with_gradient

        # Two allocations: outputs of an op must not be views of one memory, and inductor wants them aligned.
        self.losses, self.divisor = (
            torch.empty((self.calls, self.per_call), dtype=torch.float64, device=device) for _ in range(2)
        )
        self.lists_given = request.lists is not None
        self.lists = (
            torch.empty(self.calls, dtype=torch.int64, device=device)
            if request.lists is None
            else request.lists.contiguous()
        )
        self.gradient = room_for_gradient(request) if gradient is None else gradient
        # By window too the kernels keep integers in it, until the gradient replaces them.
        self.changes = self.gradient.view(torch.int32) if self.by_window else self.gradient
        self.tables = self.losses if request.tables is None else request.tables.contiguous()
        self.n_tables = 0 if request.tables is None else request.tables.shape[1]
        self.spread = self.losses
        if request.needs_spread:
            assert request.spread is not None
            self.spread = request.spread.contiguous()
        #: What Triton compiles for, of everything that comes from outside.
        self.key = (
            self.calls, self.per_call, self.n, self.slots, self.with_gradient, self.by_window,
            *kinds(self.scores, self.relevance, self.mask, self.tables, self.lists, self.spread, self.gradient),
        )  # fmt: skip

    def answer(self) -> Answer:
        """What the kernels have written."""
        return Answer(self.losses, self.gradient, self.divisor, self.lists)


class Evaluation:
    """One evaluation of a request: what a regime has launched before it comes to the gradient."""

    given: Arguments

    def by_lambda(self) -> None:
        """How far every rank moves, into the gradient."""
        raise NotImplementedError

    def by_window(self) -> None:
        """Sums of slopes, into the gradient."""
        raise NotImplementedError

    def answer(self) -> Answer:
        """The gradient, if it is wanted, and all that the kernels have written."""
        if self.given.with_gradient:
            if self.given.by_window:
                self.by_window()
            else:
                self.by_lambda()
        return self.given.answer()
