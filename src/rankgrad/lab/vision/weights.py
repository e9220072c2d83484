"""Pretrained weights of a backbone from a file, whichever convolution of a ResNet block has the stride."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from rankgrad.lab.training.checkpoint import read_tensors
from rankgrad.lab.training.errors import UserError


@contextmanager
def fetching(name: str) -> Iterator[None]:
    """Around a library's call that may fetch pretrained weights: says what to do where it cannot."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"model.weights: the library's weights of {name} cannot be fetched ({error}); give a safetensors "
            "file, or none"
        ) from None


def stride_in_1x1(backbone: nn.Module) -> None:
    """Move the stride of a ResNet's downsampling blocks from the 3x3 to the first 1x1 convolution (Keras)."""
    moved = 0
    for block in backbone.modules():
        first, second = getattr(block, "conv1", None), getattr(block, "conv2", None)
        if not (isinstance(first, nn.Conv2d) and isinstance(second, nn.Conv2d) and hasattr(block, "conv3")):
            continue
        if first.kernel_size == (1, 1) and second.stride == (2, 2):
            first.stride, second.stride = (2, 2), (1, 1)
            moved += 1
    if not moved:
        raise UserError(
            "model.weights: the file says stride_in_1x1, which only ResNets with bottleneck blocks have"
        )


def load_file(backbone: nn.Module, path: Path) -> bool:
    """Weights of the backbone from a safetensors file; returns whether its stride sits on the 1x1 convolutions."""
    if not path.is_file():
        raise UserError(
            f"model.weights: expected library, none or a safetensors file, found no file {str(path)!r}"
        )
    tensors, notes = read_tensors(path, "model.weights")
    wanted = backbone.state_dict()
    missing = [n for n in wanted if n not in tensors and not n.endswith("num_batches_tracked")]
    if missing:
        shown = ", ".join(missing[:4])
        raise UserError(
            f"model.weights: {path} lacks {len(missing)} of {len(wanted)} tensors of the backbone: {shown}"
        )
    for name, tensor in tensors.items():
        if name in wanted and tensor.shape != wanted[name].shape:
            shapes = f"{list(wanted[name].shape)}, received {list(tensor.shape)}"
            raise UserError(f"model.weights: {path}: {name} expected in shape {shapes}")
    backbone.load_state_dict({n: t for n, t in tensors.items() if n in wanted}, strict=False)
    moved = str(notes.get("stride_in_1x1", "")).lower() == "true"
    if moved:
        stride_in_1x1(backbone)
    return moved
