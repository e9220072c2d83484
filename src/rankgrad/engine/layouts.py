"""How lists lie in tensors: as rows, ``[calls, lists, n]``, or ragged, ``[calls, N]`` with offsets.

What differs between the two is written here; whatever is made of these steps works for both.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from rankgrad.engine.request import Request


class Layout(ABC):
    """Sums, orders and ranks within lists.

    *Per item* is the shape of the scores, *per list* ``[calls, lists]``.
    """

    @abstractmethod
    def total(self, values: Tensor) -> Tensor:
        """Per item -> per list: the sum. The same bits every time."""

    @abstractmethod
    def largest(self, values: Tensor) -> Tensor:
        """Per item -> per list: the maximum, 0 at least."""

    @abstractmethod
    def per_item(self, values: Tensor) -> Tensor:
        """Per list -> a shape that broadcasts to per item."""

    @abstractmethod
    def cumulated(self, values: Tensor) -> Tensor:
        """Sums of everything up to and including an item, within its list."""

    def sorted_by(self, keys: list[Tensor]) -> Tensor:
        """The order of items within lists: by the last key, then by the one before it, then by index."""
        order = torch.argsort(keys[0], dim=-1, stable=True)
        for key in keys[1:]:
            order = order.gather(-1, torch.argsort(key.gather(-1, order), dim=-1, stable=True))
        return order

    @abstractmethod
    def places(self, order: Tensor) -> Tensor:
        """1, 2, 3, ... within every list."""

    def order(self, values: Tensor, relevant: Tensor, exists: Tensor) -> Tensor:
        """Best first; among ties irrelevant items first, then by index. Items that do not exist come last."""
        kind = relevant.to(torch.int8).masked_fill(~exists, 2)
        return self.sorted_by([kind, 0.0 - values.masked_fill(~exists, -torch.inf)])

    def ranks(self, order: Tensor) -> Tensor:
        """The place of every item in an order, from 1."""
        return torch.empty_like(order).scatter_(-1, order, self.places(order))

    def ranks_among(self, chosen: Tensor, order: Tensor) -> Tensor:
        """How many chosen items there are up to and including every item of an order."""
        found = self.cumulated(chosen.gather(-1, order).long())
        return torch.empty_like(order).scatter_(-1, order, found)

    def sums_above(self, values: Tensor, order: Tensor) -> Tensor:
        """The sum of the values of all items before every item of an order."""
        ordered = values.gather(-1, order)
        return torch.empty_like(values).scatter_(-1, order, self.cumulated(ordered) - ordered)


class Rows(Layout):
    """Lists along the last dimension, all of the same length."""

    def total(self, values: Tensor) -> Tensor:
        return values.sum(-1)

    def largest(self, values: Tensor) -> Tensor:
        return values.amax(-1) if values.shape[-1] else values.sum(-1)

    def per_item(self, values: Tensor) -> Tensor:
        return values.unsqueeze(-1)

    def cumulated(self, values: Tensor) -> Tensor:
        return values.cumsum(-1)

    def places(self, order: Tensor) -> Tensor:
        return torch.arange(1, order.shape[-1] + 1, device=order.device).expand(order.shape)


class Ragged(Layout):
    """Lists behind one another; offsets ``[calls, lists + 1]`` say where each begins and ends."""

    def __init__(self, offsets: Tensor, items: int) -> None:
        self.offsets = offsets
        self._index = torch.arange(items, device=offsets.device).expand(offsets.shape[0], items).contiguous()
        #: Which list every item is in, ``[calls, N]``.
        self.list_of = torch.searchsorted(offsets[:, 1:].contiguous(), self._index, right=True)

    def total(self, values: Tensor) -> Tensor:
        calls, lists = self.offsets.shape[0], self.offsets.shape[1] - 1
        if not values.is_floating_point():
            return values.new_zeros(calls, lists).scatter_add_(-1, self.list_of, values)
        # scatter_add of floats has another order every time on a GPU
        lengths = self.offsets.diff(dim=-1).reshape(-1)
        return torch.segment_reduce(values.reshape(-1), "sum", lengths=lengths, unsafe=True).reshape(calls, lists)

    def largest(self, values: Tensor) -> Tensor:
        zeros = values.new_zeros(self.offsets.shape[0], self.offsets.shape[1] - 1)
        return zeros.scatter_reduce_(-1, self.list_of, values, "amax")

    def per_item(self, values: Tensor) -> Tensor:
        return values.gather(-1, self.list_of)

    def cumulated(self, values: Tensor) -> Tensor:
        # Differences of sums over all lists: exact, as only integers are summed (they may wrap around).
        sums = torch.nn.functional.pad(values.cumsum(-1), (1, 0))
        return sums[:, 1:] - sums.gather(-1, self.offsets[:, :-1]).gather(-1, self.list_of)

    def sorted_by(self, keys: list[Tensor]) -> Tensor:
        return super().sorted_by([*keys, self.list_of])

    def places(self, order: Tensor) -> Tensor:
        return self._index - self.per_item(self.offsets[:, :-1]) + 1


def layout_of(request: Request) -> Rows | Ragged:
    """The layout of a request's lists."""
    if request.offsets is None:
        return Rows()
    return Ragged(request.offsets, request.scores.shape[-1])
