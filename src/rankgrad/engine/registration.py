"""How a function becomes an op of torch: opaque to torch.compile, with a fake kernel and a vmap rule.

Values are checked inside the ops, so that the checks hold under torch.compile and vmap as well.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from rankgrad import _check

_F = TypeVar("_F", bound=Callable[..., Any])


def op(fn: Callable[..., Any]) -> Any:
    """Make ``torch.ops.rankgrad.<name>`` of a function.

    What torch.library.custom_op does, without its check of every call for outputs that alias inputs, which
    costs more than the launches of a small loss (0.2 ms a call).
    """
    short = fn.__name__.lstrip("_")
    name = f"rankgrad::{short}"
    torch.library.define(name, torch.library.infer_schema(fn, mutates_args=()))
    torch.library.impl(name, "default")(fn)
    return getattr(torch.ops.rankgrad, short).default


def op_on(*records: Any) -> Callable[[Callable[..., Any]], Any]:
    """:func:`op` of a function of ``*fields``: the fields of NamedTuples, one record behind the other."""

    def register(fn: Callable[..., Any]) -> Any:
        # Without defaults: torch leaves out arguments that are equal to them, and a vmap rule finds others in
        # their place.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        fields = [
            inspect.Parameter(name, kind, annotation=annotation)
            for record in records
            for name, annotation in get_type_hints(record).items()
        ]
        returned = inspect.signature(fn).return_annotation
        fn.__signature__ = inspect.Signature(fields, return_annotation=returned)  # type: ignore[attr-defined]
        return op(fn)

    return register


def records_of(fields: Sequence[Any], *records: Any) -> list[Any]:
    """The records that :func:`op_on` has taken apart."""
    found, at = [], 0
    for record in records:
        found.append(record(*fields[at : at + len(record._fields)]))
        at += len(record._fields)
    return found


def fake_of(name: str) -> Callable[[_F], _F]:
    """Register the shapes and dtypes an op returns."""
    register: Callable[[_F], _F] = torch.library.register_fake(f"rankgrad::{name}")
    return register


def _fold(info: Any, in_dims: Sequence[int | None], args: Sequence[Any]) -> list[Any]:
    """Merge the batch dimension of vmap into the first dimension of every tensor argument."""
    folded = []
    for arg, dim in zip(args, in_dims, strict=True):
        if isinstance(arg, Tensor):
            batched = arg.unsqueeze(0).expand(info.batch_size, *arg.shape) if dim is None else arg.movedim(dim, 0)
            arg = batched.reshape(batched.shape[0] * batched.shape[1], *batched.shape[2:])
        folded.append(arg)
    return folded


def _unfold(info: Any, out: Tensor) -> Tensor:
    return out.reshape(info.batch_size, out.shape[0] // info.batch_size, *out.shape[1:])


def vmap_over_calls(op: Callable[..., Any], whole: Sequence[int] = ()) -> Callable[..., Any]:
    """A vmap rule that makes each element of the batch its own call.

    ``whole`` are the positions of tensor arguments that belong to all calls and cannot be batched.
    """

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        for at in whole:
            if in_dims[at] is not None:
                raise ValueError("weight: expected the same weights for every element of torch.vmap")
        kept = {at: args[at] for at in whole}
        folded = _fold(info, in_dims, [None if at in kept else arg for at, arg in enumerate(args)])
        out = op(*[kept.get(at, arg) for at, arg in enumerate(folded)])
        if isinstance(out, Tensor):
            return _unfold(info, out), 0
        return tuple(_unfold(info, one) for one in out), (0,) * len(out)

    return rule


def is_plain_call(tensor: Tensor) -> bool:
    """True in plain eager mode: no torch.compile, no torch.func, no dispatch mode, no subclass of Tensor.

    Then a call need not pass through torch's dispatcher, which costs more than the launches of a small loss.
    """
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def waits_for_checks(scores: Tensor, check_finite: bool) -> bool:
    """Values are checked on the CPU always, elsewhere (where it waits) with ``check_finite`` alone."""
    return check_finite or scores.device.type == "cpu"


def check_nan(per_list: Tensor, tables: Tensor | None = None) -> None:
    """Raise where an engine has marked a list by NaN: one of its scores is NaN, or W is at one of its counts."""
    if bool(per_list.isnan().any()):
        if tables is not None and bool(tables.isnan().any()):
            raise ValueError("weight: expected numbers, received NaN (as W at a count, or its slope)")
        raise _check.NotANumberError(
            "scores: expected no NaN, received some (in scores, or NaN or infinity in embeddings they come from)"
        )
