"""Batches of images and boxes: like shapes together; resized, mirrored and normalised at once on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rankgrad import _check
from rankgrad.lab.detection.config import View
from rankgrad.lab.vision.images import PackedImages, like_sizes, mean_and_std, sent, whole
from rankgrad.samplers import Batches, random_order

#: The largest stride of the feature pyramid: sides of a batch are multiples of it, as in torchvision.
STRIDE = 32


class AspectSampler(Batches):
    """Every image at most once an epoch, images of like shape in a batch, so that little of it is padding.

    Images are shuffled, sorted into groups of like width / height, and cut into batches; a batch may span two
    groups, the last images that fill no batch are left out (others in each epoch), and the batches are shuffled.

    Args:
        ratios: ``[N]`` width / height.
        size: Batch size.
        seed: Which epochs are drawn.
        edges: Where groups begin.
    """

    def __init__(
        self, ratios: Tensor, *, size: int, seed: int = 0, edges: tuple[float, ...] = (0.9, 1.2, 1.4, 1.6)
    ) -> None:
        super().__init__(size, seed)
        if len(ratios) < size:
            raise _check.fail("size", f"at most the {len(ratios)} images there are", size)
        self._group = torch.bucketize(ratios.float().cpu(), torch.tensor(edges, device="cpu"))

    def __len__(self) -> int:
        return len(self._group) // self.size

    def plan(self, epoch: int) -> Tensor:
        """All batches of an epoch, ``[batches, size]`` rows."""
        generator = self._generator(epoch)
        order = random_order(len(self._group), generator)
        order = order[: len(self) * self.size]
        order = order[self._group[order].argsort(stable=True)]
        batches = order.reshape(-1, self.size)
        return batches[random_order(len(batches), generator)]


@dataclass(frozen=True)
class Canvas:
    """Images as the network takes them.

    Args:
        images: ``[N, 3, H, W]``, normalised, 0 beyond an image's own size.
        sizes: (height, width) of each on the canvas.
        scales: ``[N, 2]`` (across, down): canvas pixels per pixel of the file.
    """

    images: Tensor
    sizes: list[tuple[int, int]]
    scales: Tensor


def target_sizes(height: Tensor, width: Tensor, view: View, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Height and width when the short side is ``view.short``, or the long one ``view.long`` if that is less.

    Both limits times ``factor``, and no side less than a pixel.
    """
    height, width = height.double(), width.double()
    short, long = torch.minimum(height, width), torch.maximum(height, width)
    scale = torch.minimum(view.short / short, view.long / long) * factor
    return (height * scale).floor().clamp(min=1).long(), (width * scale).floor().clamp(min=1).long()


def canvas(images: PackedImages, flips: Tensor | None, view: View, factor: float = 1.0) -> Canvas:
    """Resize, mirror and normalise images into one batch, as torchvision's detectors do it one by one.

    Bilinear without antialiasing and zeros as padding after normalising, like ``GeneralizedRCNNTransform``.

    Args:
        images: N images.
        flips: ``[N]`` bool, or None.
        view: The size to bring them to.
        factor: All sizes times this.
    """
    device = images.pixels.device
    high, wide = target_sizes(images.height, images.width, view, factor)
    rows, columns = (int(-(-side.max() // STRIDE) * STRIDE) for side in (high, wide))
    flips = torch.zeros(len(images), dtype=torch.bool) if flips is None else flips
    # Where each pixel of the canvas lies in its image: [N, rows] and [N, columns].
    y = (torch.arange(rows) + 0.5) * (images.height / high).unsqueeze(1) - 0.5
    x = torch.arange(columns).expand(len(images), -1)
    x = torch.where(flips.unsqueeze(1), wide.unsqueeze(1) - 1 - x, x)
    x = (x + 0.5) * (images.width / wide).unsqueeze(1) - 0.5
    y = y.clamp(min=0).minimum(images.height.unsqueeze(1) - 1)
    x = x.clamp(min=0).minimum(images.width.unsqueeze(1) - 1)
    # grid_sample's coordinates: -1 and 1 are the outer edges of the first and the last pixel.
    groups, parts = like_sizes(images), []
    for now in groups:
        source = whole(images.rows(now))
        grid_y = sent((2 * y[now] + 1) / source.shape[1] - 1, device)
        grid_x = sent((2 * x[now] + 1) / source.shape[2] - 1, device)
        grid = torch.stack(torch.broadcast_tensors(grid_x[:, None, :], grid_y[:, :, None]), dim=-1)
        pixels = source.permute(0, 3, 1, 2).float()
        parts.append(F.grid_sample(pixels, grid.float(), padding_mode="border", align_corners=False))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)[sent(torch.cat(groups).argsort(), device)]
    mean, std = mean_and_std(device)
    out = (out / 255 - mean) / std
    inside = [
        sent(torch.arange(side) < limit.unsqueeze(1), device) for side, limit in ((rows, high), (columns, wide))
    ]
    out = out * (inside[0][:, None, :, None] & inside[1][:, None, None, :])
    if device.type == "cuda":
        out = out.contiguous(memory_format=torch.channels_last)
    scales = torch.stack([wide / images.width, high / images.height], dim=1)
    return Canvas(out, list(zip(high.tolist(), wide.tolist(), strict=True)), scales)


def place_boxes(boxes: list[Tensor], view: Canvas, flips: Tensor | None) -> list[Tensor]:
    """Boxes in pixels of the files -> boxes on the canvas, ``[G, 4]`` each, on the CPU."""
    out = []
    for number, (box, (_, wide)) in enumerate(zip(boxes, view.sizes, strict=True)):
        box = box * view.scales[number].repeat(2)
        if flips is not None and bool(flips[number]):
            box = torch.stack([wide - box[:, 2], box[:, 1], wide - box[:, 0], box[:, 3]], dim=1)
        out.append(box.float())
    return out
