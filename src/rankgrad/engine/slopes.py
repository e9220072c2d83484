"""Values of a given function and their slopes, also under autograd's saved-tensor hooks."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def value_and_slope(fn: Callable[[Tensor], Tensor], at: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """What ``fn`` returns, attached to the graph of its own parameters, and its slope at ``at``, detached.

    Args:
        fn: Made of differentiable torch operations.
        at: Where value and slope are taken.
        upstream: The gradient arriving at the values, in their shape.
    """
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if transformed or not _saved_tensors_are_hooked():
        values, slope_of = torch.func.vjp(fn, at)  # type: ignore[misc]
        return values, slope_of(upstream)[0].detach()
    with torch.enable_grad(), without_saved_tensor_hooks():  # torch.func.vjp refuses to work under hooks
        place = at.detach().requires_grad_()
        values = fn(place)
        if not values.requires_grad:
            return values, torch.zeros_like(at)
        (slope,) = torch.autograd.grad(values, place, upstream, materialize_grads=True)
    return fn(at), slope


def without_saved_tensor_hooks() -> contextlib.AbstractContextManager[Any]:
    """Let autograd save tensors as they are, for a graph whose backward pass follows at once.

    With the hooks of a checkpoint everything before would be computed again, and with those of save_on_cpu the
    device would be waited for.
    """
    if not _saved_tensors_are_hooked():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)


def _saved_tensors_are_hooked() -> bool:
    """Whether saved-tensor hooks are active, as in a checkpoint or in save_on_cpu."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:
        return True
