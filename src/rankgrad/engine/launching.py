"""How the Triton kernels are launched: with little work on the host.

Triton's own launch inspects the type and alignment of every argument each time, and every pointer twice: on
a slow host that takes longer than most kernels run. Here all that depends on shapes, dtypes and options alone
is worked out once and kept in a :class:`Plan`: where the parts of one workspace lie, and the kernels compiled
for it. A call then makes one allocation and hands out addresses.

Compiled kernels are called as Triton itself calls them, an interface without a promise of stability: with versions
that were not tested, every launch is Triton's own.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LINE = 256  # bytes; parts start at multiples of it
#: Triton's versions, first and last, whose compiled kernels are called as below.
_CALLED_DIRECTLY = (3, 6), (3, 9)


@functools.cache
def calls_directly(version: str) -> bool:
    """Whether compiled kernels of this Triton may be called without Triton's own launch."""
    number = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if _CALLED_DIRECTLY[0] <= number <= _CALLED_DIRECTLY[1]:
        return True
    first, last = (".".join(map(str, known)) for known in _CALLED_DIRECTLY)
    warnings.warn(
        f"rankgrad: the kernels of Triton {version} are launched by Triton itself, which costs more of the host's "
        f"time; known are versions {first} to {last}",
        stacklevel=2,
    )
    return False


@functools.cache
def processors_of(device: torch.device) -> int:
    """How many processors the device has; one where Triton is interpreted (programs run one after another)."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_its_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make a tensor's device the current one, on which kernels are launched."""
    if tensor.is_cuda and tensor.device.index != torch._C._cuda_getDevice():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


class Part(NamedTuple):
    """A piece of a workspace."""

    offset: int
    dtype: torch.dtype
    length: int


class Plan:
    """What all evaluations of one kind share. Its key must decide every number, type and alignment they use."""

    def __init__(self) -> None:
        self.size = 0
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def part(self, dtype: torch.dtype, length: int) -> Part:
        """Set aside room in the workspace."""
        part = Part(self.size, dtype, length)
        self.size += -(-length * dtype.itemsize // _LINE) * _LINE
        return part


def workspace(size: int, device: torch.device) -> Tensor:
    """Room for all parts of a plan, in bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


class Launcher:
    """One evaluation of a plan: its workspace, and the launching."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan = plan
        if plan.size:
            self._room = workspace(plan.size, device)
            self._address = self._room.data_ptr()
        self._stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0

    def view(self, part: Part) -> Tensor:
        """A part as a tensor."""
        end = part.offset + part.length * part.dtype.itemsize
        return self._room[part.offset : end].view(part.dtype)

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        *args: Any,
        warps: int = 4,
        together: bool = False,
        **constants: Any,
    ) -> None:
        """``kernel[grid](*args, **constants)``; the constants in the order of the kernel's signature.

        ``together``: all programs must run at once, or the launch fails.
        """
        key = (id(kernel), warps, *constants.values())
        compiled = self.plan.compiled.get(key)
        if compiled is None:
            args = tuple(self.view(arg) if type(arg) is Part else arg for arg in args)
            options = {"num_warps": warps, "launch_cooperative_grid": True} if together else {"num_warps": warps}
            compiled = first_launch(kernel, grid, args, constants, options)
            if compiled is not None and calls_directly(triton_version()):
                self.plan.compiled[key] = compiled
            return
        compiled.run(
            grid[0], grid[1], 1, self._stream, compiled.function, compiled.packed_metadata, None, None, None,
            *[
                arg if (kind := type(arg)) is int or kind is float
                else self._address + arg.offset if kind is Part
                else arg.data_ptr()
                for arg in args
            ],
            *constants.values(),
        )  # fmt: skip


def triton_version() -> str:
    """The version of Triton that is installed."""
    import triton

    return str(triton.__version__)


def first_launch(kernel: Any, grid: tuple[int, int], args: Sequence[Any], constants: Any, options: Any) -> Any:
    """By Triton, which compiles and returns the compiled kernel (None where it interprets)."""
    names = kernel.arg_names[len(args) :]
    assert names == [*constants], f"{kernel.__name__}: {names} were expected, not {[*constants]}"
    return kernel[grid](*args, **constants, **options)


def kinds(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What Triton compiles for of tensors that come from outside: their dtypes, and which are not aligned."""
    dtypes: list[Any] = []
    addresses = 0
    for tensor in tensors:
        if tensor is None:
            dtypes.append(None)
        else:
            dtypes.append(tensor.dtype)
            addresses |= tensor.data_ptr()
    if addresses % 16:
        dtypes.extend([tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors])
    return tuple(dtypes)
