"""Which engine runs: decided by the tensor alone, never by the machine or a value."""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from types import ModuleType

from torch import Tensor

from rankgrad.engine import cpu, cuda, reference
from rankgrad.engine.request import Request

#: With fewer scores than this, plain torch takes a millisecond or two: less than loading Numba's kernels, which
#: takes half a second, and 15 s on the first use of all, when they are compiled.
SMALL_ON_CPU = 1 << 13


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be used: it may be installed without a C compiler or a writable cache folder."""
    try:
        import triton

        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # import and driver errors are of many types
        missing = isinstance(error, ModuleNotFoundError) and error.name == "triton"
        lacking = "is not installed" if missing else f"cannot be used here ({error})"
        warnings.warn(f"rankgrad: Triton {lacking}; using the slower sorts of torch on the GPU", stacklevel=2)
        return False
    return True


_forced: list[ModuleType] = []


@contextlib.contextmanager
def forced(engine: ModuleType) -> Iterator[None]:
    """Use one engine for everything inside, to compare with it (not for code that torch.compile has traced)."""
    _forced.append(engine)
    try:
        yield
    finally:
        _forced.pop()


def large_on_cpu(scores: Tensor) -> bool:
    """Whether scores are on the CPU, and many enough for Numba's kernels; False where an engine is forced."""
    return not _forced and scores.device.type == "cpu" and scores.numel() >= SMALL_ON_CPU


def engine_for(request: Request) -> ModuleType:
    """The engine for a request."""
    if _forced:
        return _forced[-1]
    device = request.scores.device.type
    if large_on_cpu(request.scores) and cpu.supports(request):
        return cpu
    if device == "cuda" and cuda.supports(request) and has_triton():
        return cuda
    return reference
