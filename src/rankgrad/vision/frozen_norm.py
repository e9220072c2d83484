"""Frozen batch norms carried by the convolutions before them: the same function with less memory traffic.

A frozen norm multiplies each channel by a number and adds another. Multiplied into the convolution's weights,
which are small, it needs no pass over the activations, neither forward nor backward (a fifth more pictures a
second in a compiled ResNet-50 on an H200). Where its own scale and shift go on learning, the product is made anew
in every step; what is constant is kept (a detector's norms are: a fifth of the launches of a training step).
Parameters and buffers keep their names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn


class _Kept(NamedTuple):
    """What does not change from step to step."""

    made_of: tuple[Any, ...]  # addresses of tensors, and how often they were written to
    held: list[Tensor]  # these tensors, so that nobody else gets their addresses
    scale: Tensor
    shift: Tensor
    weight: Tensor | None  # where it is not trained


class _CarryingConv(nn.Conv2d):
    """A convolution that does the work of the frozen norm behind it."""

    carried: tuple[Any]  # in a tuple: the norm stays a module of its own place only
    kept: _Kept | None

    def forward(self, input: Tensor) -> Tensor:
        kept = self._constants(input.device.type)
        if kept is None:
            scale, shift = self._scale_and_shift()
            weight = self._scaled(scale)
        else:
            shift = kept.shift
            weight = self._scaled(kept.scale) if kept.weight is None else kept.weight
        return F.conv2d(input, weight, shift, self.stride, self.padding, self.dilation, self.groups)

    def _scale_and_shift(self) -> tuple[Tensor, Tensor]:
        """Of the norm, with the convolution's own bias in it."""
        norm = self.carried[0]
        scale = torch.rsqrt(norm.running_var + norm.eps)
        if norm.weight is not None:
            scale = scale * norm.weight
        shift = -norm.running_mean * scale
        if norm.bias is not None:
            shift = shift + norm.bias
        if self.bias is not None:
            shift = shift + self.bias * scale
        return scale, shift

    def _scaled(self, scale: Tensor) -> Tensor:
        return self.weight * scale[:, None, None, None]

    def _constants(self, device: str) -> _Kept | None:
        """Scale, shift and, if it is not trained, the product; None where they change in every step, or where
        nobody should look (a compiler sees to it)."""
        norm = self.carried[0]
        sources = (norm.running_mean, norm.running_var, norm.weight, norm.bias, self.bias)
        tensors = [one for one in sources if one is not None]
        if torch.compiler.is_compiling() or any(one.requires_grad for one in tensors):
            return None
        if not self.weight.requires_grad:
            tensors.append(self.weight)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        try:
            made_of = (dtype, *((one.data_ptr(), one._version) for one in tensors))
        except RuntimeError:  # tensors of torch.func or inference mode, which have none of it
            return None
        if self.kept is None or self.kept.made_of != made_of:
            self.kept = self._keep(made_of, tensors)
        return self.kept

    @torch.no_grad()
    @torch.inference_mode(False)
    def _keep(self, made_of: tuple[Any, ...], tensors: list[Tensor]) -> _Kept:
        """In the precision that the convolution is computed in, so that nobody casts them in every step."""
        scale, shift = self._scale_and_shift()
        weight = None if self.weight.requires_grad else self._scaled(scale)
        dtype = made_of[0]
        if dtype is not None:
            shift, weight = shift.to(dtype), None if weight is None else weight.to(dtype)
        return _Kept(made_of, [one.detach() for one in tensors], scale, shift, weight)

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its own."""
        return {**self.__dict__, "kept": None}


class _Carried:
    """In front of a norm's class: its work is done elsewhere."""

    def forward(self, input: Tensor) -> Tensor:
        return input


class _CarriedBatchNorm(_Carried, nn.BatchNorm2d):
    """A class of the module, so that a network can be pickled."""


_CARRIED: dict[type, type] = {nn.BatchNorm2d: _CarriedBatchNorm}


class _Tracer(fx.Tracer):
    """Calls of norms stay calls, also of those that torch.fx would look into."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, self.norm) or super().is_leaf_module(m, module_qualified_name)


def carry_frozen_norms(network: nn.Module, norm: type[nn.Module] = nn.BatchNorm2d) -> int:
    """Let convolutions carry the frozen norms that directly follow them, in place; returns how many.

    Only where each of the two is called once and nobody else sees the convolution's output. A network that
    torch.fx cannot trace stays as it is.

    Args:
        network: Whose norms, all of them, are and stay frozen.
        norm: Their class, with what ``nn.BatchNorm2d`` has of parameters and statistics.
    """
    try:
        graph = _Tracer(norm).trace(network)
    except Exception:  # tracing fails in as many ways as there are networks: speed is lost, nothing else
        return 0
    modules = dict(network.named_modules())
    calls = [node for node in graph.nodes if node.op == "call_module"]
    times = {target: sum(node.target == target for node in calls) for target in {node.target for node in calls}}
    carried = 0
    for node in calls:
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        behind, conv = modules[str(node.target)], modules[str(before.target)]
        plain = type(behind) is norm and type(conv) is nn.Conv2d and conv.padding_mode == "zeros"
        known = getattr(behind, "running_var", None) is not None
        if plain and known and times[node.target] == times[before.target] == 1:
            _pair(conv, behind)
            carried += 1
    return carried


def _pair(conv: Any, norm: Any) -> None:
    # Another class for the same objects: parameters, buffers, hooks and names stay what they are.
    kind = type(norm)
    if kind not in _CARRIED:
        _CARRIED[kind] = type(f"Carried{kind.__name__}", (_Carried, kind), {})
    conv.__class__, norm.__class__ = _CarryingConv, _CARRIED[kind]
    conv.carried, conv.kept = (norm,), None
