"""What an engine receives (:class:`Request`) and returns (:class:`Answer`)."""

# No `from __future__ import annotations`: torch reads the annotations to make the schema of an op.
from typing import NamedTuple

import torch
from torch import Tensor

from rankgrad.engine.precision import compute_dtype

#: How far above its score a relevant item is compared: Algorithm 1 with a lambda, a fixed window of score, or a
#: window that is a share of the spread of the scores.
REACHES = ("lam", "window", "share")


class Request(NamedTuple):
    """Lists, a form of loss and a reach. One call has its own number of lists that count, and its own spread.

    The fields are the arguments of the op ``rankgrad::evaluate``, in this order.

    Attributes:
        scores: ``[calls, lists, n]``; ragged lists: ``[calls, N]`` with ``offsets``. Detached.
        relevance: The same shape; bool, or numbers that are 0 and 1 (bool when an engine sees it).
        mask: bool of the same shape, False = no such item; None if all exist.
        offsets: None, or where ragged lists begin and end, int64 ``[calls, lists + 1]`` from 0 to N.
        tables: For the form ``"tables"``: W(c) and its slope for c = 0 ... K - 1, float64 ``[2, K]``; beyond, the
            last value and slope hold.
        spread: Spread of the scores, float64 ``[calls]``, where other processes or blocks hold some of them; None:
            of these.
        lists: How many lists count, int64 ``[calls]``, where other processes or blocks hold some of them; None: of
            these.
        form: A name in :data:`rankgrad.engine.forms.FORMS`.
        reach: One of :data:`REACHES`.
        strength: Lambda, the window, or the share.
        margin: Score margin, a number or (``margin_is_share``) a share of the spread.
        margin_is_share: Whether ``margin`` is in units of the spread.
        with_gradient: Whether the gradient is wanted too.
        check_finite: Wait for the device and raise where a value is not allowed (a CPU always does).
        max_relevant: A bound on the relevant items of a list.
        scaled: Whether the gradient is to be that of the mean at an upstream gradient of one; only where an engine
            saves a pass over the gradient so, see :func:`rankgrad.engine.cuda.scales_at_once`.
    """

    scores: Tensor
    relevance: Tensor
    mask: Tensor | None = None
    offsets: Tensor | None = None
    tables: Tensor | None = None
    spread: Tensor | None = None
    lists: Tensor | None = None
    form: str = "ap"
    reach: str = "lam"
    strength: float = 1.0
    margin: float = 0.0
    margin_is_share: bool = False
    with_gradient: bool = True
    check_finite: bool = False
    max_relevant: int | None = None
    scaled: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Calls, and lists of each."""
        calls, per_call = self.scores.shape[:2]
        return calls, per_call if self.offsets is None else self.offsets.shape[1] - 1

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return compute_dtype(self.scores.dtype)

    @property
    def by_window(self) -> bool:
        """Whether the reach is a window, given or a share of the spread."""
        return self.reach != "lam"

    @property
    def needs_spread(self) -> bool:
        """Whether anything is a share of the spread."""
        return self.margin_is_share or self.reach == "share"

    def half_margin(self) -> float | Tensor:
        """By how much scores are shifted: a number, or ``[calls]`` in the compute dtype."""
        if not self.margin_is_share:
            return self.margin / 2
        assert self.spread is not None
        return (self.spread * (self.margin / 2)).to(self.dtype)

    def window(self) -> float | Tensor:
        """The window: a number, or float64 ``[calls]`` rounded to the compute dtype."""
        if self.reach == "window":
            return self.strength
        assert self.spread is not None and self.reach == "share"
        return (self.spread * self.strength).to(self.dtype).double()


class Answer(NamedTuple):
    """Loss of every list, and its gradient up to a factor.

    Attributes:
        losses: float64 ``[calls, lists]``; NaN where a score is NaN, or the hint ``max_relevant`` wrong.
        gradient: In the shape of the scores (an empty last dimension if not wanted). By lambda: how far Algorithm
            1 moves every item's rank, integers. By window: sums of slopes, in the compute dtype. With
            ``scaled``: the gradient of the mean itself, with no factor left to multiply by.
        divisor: What the gradient of the mean is divided by, float64 ``[calls, lists]``: lambda times a list's
            items, or the window times the number of lists.
        lists: How many lists count, int64 ``[calls]``.
    """

    losses: Tensor
    gradient: Tensor
    divisor: Tensor
    lists: Tensor
