"""Values of a given function and their slopes, wherever a loss is called."""

from collections.abc import Callable

import torch
from torch import Tensor


def value_and_slope(fn: Callable[[Tensor], Tensor], at: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """What ``fn`` returns, hanging on whatever else it was made of, and its slope at ``at``, detached.

    Args:
        fn: Made of differentiable torch operations.
        at: Where to ask.
        upstream: The gradient arriving at the values, in their shape.
    """
    transformed = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if not transformed and saved_tensors_are_hooked():
        return _past_the_hooks(fn, at, upstream)
    values, slope_of = torch.func.vjp(fn, at)  # type: ignore[misc]
    return values, slope_of(upstream)[0].detach()


def saved_tensors_are_hooked() -> bool:
    """Whether autograd calls somebody for what it saves, as in a checkpoint or in save_on_cpu.

    torch.func.vjp refuses to work there, and a CUDA graph cannot be recorded.
    """
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:
        return True


def _past_the_hooks(fn: Callable[[Tensor], Tensor], at: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """By a graph of our own, used here and now: a checkpoint would have to compute it again, and again."""
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        place = at.detach().requires_grad_()
        values = fn(place)
    if not values.requires_grad:
        return values, torch.zeros_like(at)
    (slope,) = torch.autograd.grad(values, place, upstream, retain_graph=True, materialize_grads=True)
    return values, slope


def _as_it_is(saved: Tensor) -> Tensor:
    return saved
