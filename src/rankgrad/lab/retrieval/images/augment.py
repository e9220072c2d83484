"""Crops of a whole batch in one pass on the device: boxes are drawn, then cut, resized and flipped together.

The boxes are drawn on the CPU for the *global* batch from one seeded generator, so they depend neither on the
device nor on the number of processes; the pixels never leave the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rankgrad.lab.retrieval.images.config import View
from rankgrad.lab.vision.images import PackedImages, like_sizes, mean_and_std, sent, whole

_TRIES = 10


def centre_boxes(height: Tensor, width: Tensor, crop: int) -> Tensor:
    """The square in the middle: ``[N, 4]`` as left, top, right, bottom in pixels."""
    top, left = ((height - crop) / 2.0).round(), ((width - crop) / 2.0).round()
    return torch.stack([left, top, left + crop, top + crop], dim=1).float()


def random_boxes(height: Tensor, width: Tensor, crop: int, generator: torch.Generator) -> Tensor:
    """A square of fixed size anywhere (the paper's way)."""
    place = torch.rand(2, len(height), generator=generator)
    top = (place[0] * (height - crop + 1)).floor()
    left = (place[1] * (width - crop + 1)).floor()
    return torch.stack([left, top, left + crop, top + crop], dim=1).float()


def resized_boxes(height: Tensor, width: Tensor, smallest: float, generator: torch.Generator) -> Tensor:
    """Boxes of random area and aspect ratio, as torchvision's RandomResizedCrop draws them, all at once.

    The area is uniform in [``smallest``, 1] of the image's, the ratio log-uniform in [3/4, 4/3]; of ten tries
    the first that fits inside is taken, and if none does the largest box in the middle that obeys the ratio.
    """
    n = len(height)
    draws = torch.rand(4, _TRIES, n, generator=generator)
    area = height * width * (smallest + (1 - smallest) * draws[0])
    ratio = torch.exp(torch.log(torch.tensor(4 / 3)) * (2 * draws[1] - 1))
    wide, high = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (wide >= 1) & (high >= 1) & (wide <= width) & (high <= height)
    first = fits.int().argmax(0)
    wide, high, x, y = (t.gather(0, first[None])[0] for t in (wide, high, draws[2], draws[3]))

    none = ~fits.any(0)
    wide = torch.where(none, torch.minimum(width.float(), (height * 4 / 3).round()), wide)
    high = torch.where(none, torch.minimum(height.float(), (width * 4 / 3).round()), high)
    left = torch.where(none, ((width - wide) / 2).round(), (x * (width - wide + 1)).floor())
    top = torch.where(none, ((height - high) / 2).round(), (y * (height - high + 1)).floor())
    return torch.stack([left, top, left + wide, top + high], dim=1).float()


def training_boxes(height: Tensor, width: Tensor, view: View, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Boxes ``[N, 4]`` and which images to mirror ``[N]``, for images of these sizes."""
    crop = view.crop
    assert crop is not None and view.scale is not None  # of a view that is complete
    if view.augment == "resized_crop":
        boxes = resized_boxes(height, width, view.scale, generator)
    elif view.augment == "crop":
        boxes = random_boxes(height, width, crop, generator)
    else:
        boxes = centre_boxes(height, width, crop)
    flips = torch.rand(len(height), generator=generator) < (0.5 if view.flip else 0.0)
    return boxes, flips


def crops(
    images: PackedImages, boxes: Tensor, flips: Tensor | None, view: View, side: int | None = None
) -> Tensor:
    """Cut boxes out of images and bring them to ``side x side``, normalised by mean and standard deviation.

    Args:
        images: N images.
        boxes: ``[N, 4]`` in pixels.
        flips: ``[N]`` bool, or None.
        view: Side, mean and standard deviation of the result: nothing left out.
        side: Another side than the view's, in pixels.

    Returns:
        ``[N, 3, side, side]`` float32 where the pixels are, channels last in memory on a GPU.
    """
    from torchvision.ops import roi_align

    device, side = images.pixels.device, side or view.crop
    groups, parts = like_sizes(images), []
    for rows in groups:
        pixels = whole(images.rows(rows)).permute(0, 3, 1, 2).float().contiguous()
        numbered = sent(torch.cat([torch.arange(len(rows)).unsqueeze(1).float(), boxes[rows]], dim=1), device)
        # Aligned RoIAlign averages as many samples as a target pixel covers: anti-aliased, exact at scale 1.
        parts.append(roi_align(pixels, numbered, (side, side), aligned=True))
    out: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)[sent(torch.cat(groups).argsort(), device)]
    if flips is not None:
        out = torch.where(sent(flips, device)[:, None, None, None], out.flip(3), out)
    assert view.mean is not None and view.std is not None
    mean, std = mean_and_std(device, view.mean, view.std)
    out = (out / 255 - mean) / std
    return out.contiguous(memory_format=torch.channels_last) if device.type == "cuda" else out
