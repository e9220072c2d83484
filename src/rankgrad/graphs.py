"""A loss whose launches are recorded once and then replayed: on a GPU, its Python runs only the first times.

A ranking loss of a batch is a few dozen small launches. The GPU has done them in a tenth of a millisecond; Python
needs ten times as long to launch them. A CUDA graph launches them all at once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from rankgrad import distributed
from rankgrad.engine.precision import compute_dtype
from rankgrad.engine.slopes import without_saved_tensor_hooks

#: Calls of one kind that run as usual before it is recorded: kernels get compiled, and a memory takes its shape.
CALLS_BEFORE = 3
#: Kinds of calls that are kept recorded; the oldest makes room for another.
MOST_RECORDINGS = 16
#: What a setting of a loss may be (NumPy's numbers are among them).
_SETTINGS = (type(None), bool, int, float, str, np.number)
#: Attributes that every Module has, apart from its training mode: they are no settings of a loss.
_NO_SETTINGS = frozenset(vars(nn.Module())) - {"training"}

#: The setting for the precision of matrix products. After its new name was used, torch raises where the old one is
#: read.
_MATMUL = "fp32_precision" if hasattr(torch.backends.cuda.matmul, "fp32_precision") else "allow_tf32"


class _RecordedModule:
    """A Module of the loss as it was when recorded: its settings, what it holds, and where its tensors are."""

    def __init__(self, module: nn.Module) -> None:
        self.own = vars(module)
        self.names = frozenset(self.own)
        given = [name for name in self.own if name not in _NO_SETTINGS]
        self.settings = [name for name in given if isinstance(self.own[name], _SETTINGS)]
        self.others = [name for name in given if not isinstance(self.own[name], _SETTINGS)]
        self.values = [self.own[name] for name in self.settings]
        self.objects = [self.own[name] for name in self.others]
        self.held = self._held()
        self.tensors = [one for one in self.held if isinstance(one, Tensor)]
        self.places = self._places()

    def _held(self) -> list[Any]:
        own = self.own
        return [*own["_modules"].values(), *own["_parameters"].values(), *own["_buffers"].values()]

    def _places(self) -> list[Any]:
        return [(one.data_ptr(), one.shape, one.dtype, one.requires_grad) for one in self.tensors]

    def holds_the_same(self) -> bool:
        """The same parts and tensors, in the same places. (Every call compares them: little Python.)"""
        held = self._held()
        return (
            len(held) == len(self.held)
            and all(map(operator.is_, held, self.held))
            and self._places() == self.places
        )

    def unchanged(self) -> bool:
        """The same settings besides; functions and the like must be the very same."""
        own = self.own
        return (
            own.keys() == self.names
            and [own[name] for name in self.settings] == self.values
            and all(map(operator.is_, [own[name] for name in self.others], self.objects))
            and self.holds_the_same()
        )


def _signature(inputs: tuple[Any, ...], names: tuple[str, ...]) -> Any:
    """What a recording depends on beside the loss."""
    modes = torch.is_autocast_enabled("cuda"), getattr(torch.backends.cuda.matmul, _MATMUL)
    signature = tuple(
        (value.shape, value.dtype, value.device, value.requires_grad) if isinstance(value, Tensor) else value
        for value in inputs
    )
    try:
        hash(signature)
    except TypeError:  # a list could change between two calls and still be equal to itself
        kinds = ", ".join(type(value).__name__ for value in inputs)
        raise TypeError(f"inputs: expected tensors and values that cannot change, received {kinds}") from None
    return names, modes, signature


class _Recording:
    """Loss and gradients of one kind of call, as a graph over tensors that stay where they are."""

    def __init__(self, loss: nn.Module, inputs: tuple[Any, ...], names: tuple[str, ...]) -> None:
        self.loss, self.names, self.calls = loss, names, 0
        self.signature = _signature(inputs, names)
        self.parts = [_RecordedModule(module) for module in loss.modules()]
        self.places = [_place_of(value) if isinstance(value, Tensor) else value for value in inputs]
        # The parameters under other handles: autograd's state of the originals belongs to another stream.
        self.originals = [one for one in loss.parameters() if one.requires_grad]
        self.parameters = {
            name: one.detach().requires_grad_() for name, one in loss.named_parameters() if one.requires_grad
        }
        self.wanted = [place for place in self.places if isinstance(place, Tensor) and place.requires_grad]
        self.wanted += self.parameters.values()
        self.replay: Callable[[], None] | None = None
        self.results: list[Tensor | None] = []

    def fits(self, loss: nn.Module, signature: Any) -> bool:
        """Whether a call of this signature is what was recorded, with the loss as it is now."""
        return self.signature == signature and self.loss is loss and all(part.unchanged() for part in self.parts)

    def run_once(self) -> list[Tensor | None]:
        """The loss at the places, and its gradients at an upstream gradient of one."""
        plain = len(self.places) - len(self.names)
        named = dict(zip(self.names, self.places[plain:], strict=True))
        with torch.enable_grad(), without_saved_tensor_hooks():
            value: Tensor = torch.func.functional_call(
                self.loss, self.parameters, tuple(self.places[:plain]), named
            )
            return [value.detach(), *torch.autograd.grad(value, self.wanted, allow_unused=True)]

    def record(self) -> tuple[Callable[[], None], list[Tensor | None]]:
        """A function that runs once more what :meth:`run_once` does, and the tensors it writes."""
        device, graph = self.wanted[0].device, torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, to pin memory for the next batch for example.
        recording = torch.cuda.graph(graph, stream=_stream(device), capture_error_mode="thread_local")
        with torch.cuda.device(device), recording:
            results = self.run_once()
        return graph.replay, results

    def run(self, inputs: Sequence[Any]) -> list[Tensor | None]:
        """The loss at these inputs and its gradients: computed in the first calls, then recorded, then replayed.

        Called without grad mode, as in the forward of an autograd function.
        """
        for place, value in zip(self.places, inputs, strict=True):
            if isinstance(place, Tensor):
                place.copy_(value)
        self.calls += 1
        if self.calls <= CALLS_BEFORE:
            return self.run_once()
        if self.replay is None:
            self.replay, self.results = self.record()
        self.replay()
        # The next replay writes over the results, and the caller may still hold them.
        return [None if one is None else one.clone() for one in self.results]


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Where to record. torch's own stream for it belongs to the device that was recorded on first."""
    return torch.cuda.Stream(device)


def _place_of(value: Tensor) -> Tensor:
    """A tensor to be recorded in place of an input.

    Half precision becomes float32, as in the losses: a gradient in fp16 would underflow before the factor of a
    GradScaler is applied.
    """
    dtype = compute_dtype(value.dtype) if value.is_floating_point() else value.dtype
    return value.detach().to(dtype, copy=True).requires_grad_(value.requires_grad)


class _Replay(torch.autograd.Function):
    """A recording as an autograd function. The gradient is computed in forward; backward scales it."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, inputs: Sequence[Any], *wanted: Tensor) -> Any:
        value, *gradients = recording.run(inputs)
        ctx.dtypes = [one.dtype for one in wanted]
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        gradients = [
            None if one is None else (one * upstream).to(dtype)
            for one, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, None, *gradients


class Graphed(nn.Module):
    """A loss Module that replays its launches on a GPU; see :func:`graphed`."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        self._recordings: list[_Recording] = []  # the oldest first

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """What the loss returns."""
        together = (*inputs, *named.values())
        if not self.replays(*together):
            return cast(Tensor, self.loss(*inputs, **named))
        recording = self._recording(together, tuple(named))
        wanted = [value for value in together if isinstance(value, Tensor) and value.requires_grad]
        return cast(Tensor, _Replay.apply(recording, together, *wanted, *recording.originals))

    def reset(self) -> None:
        """Empty the loss's memory, if it has one."""
        cast(Any, self.loss).reset()

    def _recording(self, inputs: tuple[Any, ...], names: tuple[str, ...]) -> _Recording:
        """The recording for a call like this one; the oldest makes room where there are too many."""
        signature = _signature(inputs, names)
        for recording in reversed(self._recordings):
            if recording.fits(self.loss, signature):
                return recording
        usable = [one for one in self._recordings if all(part.holds_the_same() for part in one.parts)]
        self._recordings = [*usable, _Recording(self.loss, inputs, names)][-MOST_RECORDINGS:]
        return self._recordings[-1]

    def __getstate__(self) -> dict[str, Any]:
        """A copy records anew: a graph belongs to its tensors."""
        return {**self.__dict__, "_recordings": []}

    def replays(self, *inputs: Any) -> bool:
        """Whether a call with these inputs is recorded and replayed; otherwise the loss runs as it always does."""
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        return (
            torch.is_grad_enabled()
            and any(value.requires_grad for value in tensors)
            and all(value.is_cuda for value in tensors)
            and not torch.compiler.is_compiling()
            and not torch.is_anomaly_enabled()  # it checks every gradient, and so waits for the device
            and not torch.cuda.is_current_stream_capturing()
            and not distributed.active()
        )


def graphed(loss: nn.Module) -> Graphed:
    """Let a loss Module of this library replay its launches as a CUDA graph.

    The first calls of a kind (shapes, dtypes, training or not) run as usual, then the loss and its gradient are
    recorded, and from then on a call copies its inputs, replays, and copies the results out. Memory and proxies
    work as before: they stay at the addresses the graph was recorded with, and moving them (``reset``,
    ``load_state_dict``, ``.to``) means a new recording. On a CPU, without a gradient, inside torch.compile, in
    anomaly mode or with several processes the loss runs as it always does.

    Use it where the loss is small and Python takes most of its time: batches up to a few thousand. The inputs and
    their gradients exist once more in memory.

    Args:
        loss: A Module which does the same work for inputs of the same shapes, and whose result is a scalar; all
            Modules of this library are such. Changed settings (``lam``, ``margin``, training or not), functions
            and parts are noticed. Inputs are tensors, or values that cannot change.

    Returns:
        A Module with the same call. Its state_dict holds the loss's under ``loss.``.

    Example:
        >>> loss = rankgrad.graphed(rankgrad.RecallLoss(memory=3))
        >>> embeddings = torch.randn(8, 16, requires_grad=True)
        >>> loss(embeddings, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])).backward()
    """
    if not isinstance(loss, nn.Module):
        raise TypeError(f"loss: expected a torch.nn.Module, received {type(loss).__name__}")
    return Graphed(loss)
