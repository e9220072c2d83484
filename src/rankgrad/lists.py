"""How a call gives its lists: as ``[..., n]``, or as one dimension with ``groups``, the id of each item's list."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.engine.layouts import Ragged, Rows


class Lists:
    """The lists of one call, and how its tensors are put into the engine's layout and taken back.

    Args:
        scores: ``[..., n]``, or ``[N]`` with ``groups``.
        groups: int64 ids ``[N]`` in any order, or None; each id is a list.
        num_groups: How many lists there are; ids are then 0 ... num_groups - 1, and one without items is an empty
            list.
        by_list: Whether the caller wants a result for each list, so that their number must be known.
    """

    def __init__(self, scores: Tensor, groups: Any, num_groups: Any = None, *, by_list: bool = False) -> None:
        self.offsets: Tensor | None = None
        self._order: Tensor | None = None
        self._odd: Tensor | None = None
        if groups is None:
            if num_groups is not None:
                raise _check.fail("num_groups", "None without groups", num_groups)
            self.shape: tuple[int, ...] = tuple(scores.shape[:-1])
            self._put_shape: tuple[int, ...] = (1, math.prod(self.shape), scores.shape[-1])
            self._take_shape = tuple(scores.shape)
            self.layout: Rows | Ragged = Rows()
            return
        groups = _read(groups, scores)
        self._put_shape, self._take_shape = (1, scores.shape[0]), (scores.shape[0],)
        readable = _check.readable(groups)
        if not (readable and bool((groups[1:] >= groups[:-1]).all())):
            groups, self._order = torch.sort(groups, stable=True)
        if num_groups is not None:
            number = _check.count("num_groups", num_groups, at_least=0, at_most=_check.MANY)
            offsets = self._numbered(groups, number, readable)
        elif readable:
            sizes = torch.unique_consecutive(groups, return_counts=True)[1]
            offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        elif by_list:
            raise ValueError(
                'num_groups: expected the number of groups (reduction="none" on a GPU or compiled), received None'
            )
        else:
            offsets = _of_unknown_number(groups)
        self.offsets = offsets.unsqueeze(0)
        self.shape = (offsets.shape[0] - 1,)
        self.layout = Ragged(self.offsets, scores.shape[0])

    def _numbered(self, groups: Tensor, number: int, readable: bool) -> Tensor:
        """Offsets of lists 0 ... number - 1."""
        odd = (groups < 0) | (groups >= number)
        if readable:
            if bool(odd.any()):
                raise _check.fail("groups", f"ids from 0 to {number - 1} (num_groups - 1)", int(groups[odd][0]))
        else:
            self._odd = odd
            groups = groups.clamp(0, max(number - 1, 0))
        return torch.searchsorted(groups, torch.arange(number + 1, device=groups.device))

    def put(self, tensor: Tensor) -> Tensor:
        """Into the layout: ``[1, lists, n]``, or ``[1, N]`` list by list. Differentiable."""
        if self._order is not None:
            tensor = tensor.gather(0, self._order)
        if self._odd is not None and tensor.is_floating_point():  # ids that do not exist: the loss is NaN
            tensor = tensor.masked_fill(self._odd, torch.nan)
        return tensor.reshape(self._put_shape)

    def put_optional(self, tensor: Tensor | None) -> Tensor | None:
        """:meth:`put`, or None."""
        return None if tensor is None else self.put(tensor)

    def take(self, tensor: Tensor) -> Tensor:
        """What is in the layout, in the order and shape of the caller's scores. Differentiable."""
        tensor = tensor.reshape(self._take_shape)
        if self._order is None:
            return tensor
        return torch.zeros_like(tensor).scatter(0, self._order, tensor)


def _read(value: object, scores: Tensor) -> Tensor:
    groups = _check.tensor("groups", value)
    if groups.is_floating_point() or groups.is_complex() or groups.dtype == torch.bool:
        raise _check.fail("groups", "integer ids", groups)
    if scores.ndim != 1:
        raise _check.fail("scores", "one dimension, as groups are given", scores)
    if groups.shape != scores.shape:
        raise _check.fail("groups", f"one id per score, shape {list(scores.shape)}", groups)
    _check.same_device("groups", groups, "scores", scores)
    return groups.detach().long()


def _of_unknown_number(groups: Tensor) -> Tensor:
    """Offsets of as many lists as there are items, the last of them empty: their number is on the device only."""
    n = groups.shape[0]
    index = torch.arange(n, device=groups.device)
    first = torch.nn.functional.pad(groups[1:] != groups[:-1], (1, 0), value=True)[:n]
    number = first.cumsum(0) - 1
    offsets = torch.full((n + 2,), n, dtype=torch.int64, device=groups.device)
    return offsets.scatter(0, number.where(first, n + 1), index)[: n + 1]
