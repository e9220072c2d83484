"""Argument checks. One message style: the argument's name, what was expected, what was received."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")
TIES = ("ordinal", "min", "max", "average")


_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # narrower ones hold no useful gradient


class NotANumberError(ValueError):
    """Scores or embeddings are NaN."""


def _received(value: object) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{'an' if dtype.startswith('int') else 'a'} {dtype} tensor of shape {list(value.shape)}"
    if isinstance(value, torch.nn.Module):  # its repr has a line for each submodule
        return f"a {type(value).__name__}"
    if isinstance(value, np.ndarray):
        kind = str(value.dtype)
        return f"{'an' if kind.startswith(('int', 'object')) else 'a'} {kind} array of shape {list(value.shape)}"
    text = repr(value)
    return f"{text if len(text) < 200 else text[:200] + '...'} ({type(value).__name__})"


def fail(name: str, expected: str, value: object) -> ValueError:
    """The ValueError for an argument with a bad value, for the caller to raise."""
    return ValueError(f"{name}: expected {expected}, received {_received(value)}")


def tensor(name: str, value: object) -> Tensor:
    """Require a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, received {_received(value)}")
    return value


def floating(name: str, value: object, *, ndim: int | None = None) -> Tensor:
    """Require a floating-point tensor of at least one dimension (or of exactly ``ndim``)."""
    value = tensor(name, value)
    if value.dtype not in _FLOATS:
        raise TypeError(f"{name}: expected floating-point numbers of 16 bits or more, received {_received(value)}")
    if value.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, received {_received(value)} ({value.layout})")
    if ndim is not None and value.ndim != ndim:
        raise fail(name, f"{ndim} dimensions", value)
    if value.ndim == 0:
        raise fail(name, "at least one dimension (the candidates)", value)
    if value.device.type == "mps":
        raise ValueError(
            f"{name}: expected on a device with float64 (a CPU or CUDA), received on mps; pass {name}.cpu()"
        )
    return value


def same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Require two tensors on one device."""
    if value.device != other.device:
        raise ValueError(
            f"{name}: expected on the device of {other_name} ({other.device}), received on {value.device}"
        )


def relevance(value: object, scores: Tensor) -> Tensor:
    """Require relevance or grades that fit the scores.

    Their values are checked where they are read: that they are 0 or 1 inside the op, grades by :func:`numbers_of`.
    """
    value = tensor("relevance", value)
    if value.is_complex():
        raise TypeError(f"relevance: expected bool, integer or float, received {_received(value)}")
    return like_scores("relevance", value, scores)


def class_lists(scores: object, flags: object, exists: object) -> tuple[Tensor, Tensor, Tensor | None]:
    """Require ``[items, classes]`` scores with relevance and mask that fit."""
    scores = floating("scores", scores, ndim=2)
    return scores, relevance(flags, scores), mask(exists, scores)


def like_scores(name: str, value: object, scores: Tensor) -> Tensor:
    """Require a tensor of the shape of the scores, on their device; returned without its gradient."""
    value = tensor(name, value)
    if value.shape != scores.shape:
        raise fail(name, f"the shape of scores {list(scores.shape)}", value)
    same_device(name, value, "scores", scores)
    return value.detach()


def spread(value: object, scores: Tensor) -> None:
    """Require one number for the scores of all lists, or None."""
    if value is None:
        return
    found = tensor("spread", value)
    if found.numel() != 1 or not found.is_floating_point():
        raise fail("spread", "one floating-point number", found)
    same_device("spread", found, "scores", scores)
    if readable(found) and not 0 < float(found) < math.inf:
        raise fail("spread", "a finite number > 0", float(found))


def readable(value: Tensor) -> bool:
    """Whether the values of a tensor can be read in Python, without waiting for a device or breaking a trace."""
    return (
        value.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0  # as of FakeTensorMode
    )


def numbers_of(
    name: str, value: Tensor, mask: Tensor | None = None, *, lowest: float = -math.inf, infinite: bool = False
) -> None:
    """Require finite values >= ``lowest`` (``infinite``: or infinite ones) of the items that exist.

    Only where values can be read without waiting for a device.
    """
    if not readable(value) or value.dtype == torch.bool:
        return
    fine = ~value.isnan() if infinite else value.isfinite()
    fine = fine & (value >= lowest) if lowest > -math.inf else fine
    fine = fine if mask is None else fine | ~mask
    if not bool(fine.all()):
        kind = "numbers" if infinite else "finite numbers"
        least = f" >= {lowest:g}" if lowest > -math.inf else ""
        raise fail(name, f"{kind}{least}", value[~fine][0].item())


def mask(value: object, scores: Tensor) -> Tensor | None:
    """Require a bool mask that broadcasts to the scores; returns it in their shape."""
    if value is None:
        return None
    value = tensor("mask", value)
    if value.dtype != torch.bool:
        raise TypeError(f"mask: expected a bool tensor (False = no such item), received {_received(value)}")
    same_device("mask", value, "scores", scores)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and value.is_inference():
        value = value.clone()  # autograd saves no tensor that was made in inference mode
    try:
        return value.expand(scores.shape)
    except RuntimeError:
        expected = f"a shape that broadcasts to the shape of scores {list(scores.shape)}"
        raise fail("mask", expected, value) from None


def per_row(name: str, value: object, embeddings_name: str, embeddings: Tensor) -> Tensor:
    """Require one integer (a label, an index) per row of the embeddings."""
    value = tensor(name, value)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name}: expected integers, received {_received(value)}")
    if value.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch does not compare them
        raise TypeError(f"{name}: expected int64, or fewer bits, received {_received(value)}; pass {name}.long()")
    if value.shape != embeddings.shape[:1]:
        raise fail(name, f"one per row of {embeddings_name}, shape {list(embeddings.shape[:1])}", value)
    same_device(name, value, embeddings_name, embeddings)
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, float):  # also what torch.compile makes of them
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_):  # integers, NumPy's
        try:
            return float(value)
        except OverflowError:
            raise fail(name, "a finite number", value) from None
    raise TypeError(f"{name}: expected a number, received {_received(value)}")


def lam(value: Any) -> float:
    """Require an interpolation strength: finite, > 0, and not so small that its inverse is no float32."""
    number = _number("lam", value)
    if not 1e-30 <= number < math.inf:  # plain comparisons: torch.compile can trace them for a changing lam
        raise fail("lam", "a finite number > 0 (and >= 1e-30)", value)
    return number


def finite(name: str, value: Any) -> float:
    """Require a finite number."""
    number = _number(name, value)
    if not -math.inf < number < math.inf:
        raise fail(name, "a finite number", value)
    return number


def positive(name: str, value: Any) -> float:
    """Require a finite number > 0."""
    number = _number(name, value)
    if not 0 < number < math.inf:
        raise fail(name, "a finite number > 0", value)
    return number


def non_negative(name: str, value: Any) -> float:
    """Require a finite number >= 0."""
    number = _number(name, value)
    if not 0 <= number < math.inf:
        raise fail(name, "a finite number >= 0", value)
    return number


#: Upper limit of the numbers of lists, classes and remembered batches.
MANY = 2**31 - 1


def count(name: str, value: Any, *, at_least: int, at_most: int = 2**63 - 1) -> int:
    """Require an integer, Python's or NumPy's, from ``at_least`` to ``at_most``: by default what int64 holds."""
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, received {_received(value)}")
    if value < at_least:
        raise fail(name, f"an integer >= {at_least}", value)
    if value > at_most:
        raise fail(name, f"an integer <= {at_most}", value)
    return value


def one_of(name: str, value: object, choices: Sequence[str]) -> str:
    """Require one of a few strings."""
    if not isinstance(value, str) or value not in choices:
        raise fail(name, "one of " + ", ".join(map(repr, choices)), value)
    return value
