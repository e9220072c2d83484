"""Pixels in memory: images are decoded by content and kept as one flat row of bytes in RAM or on the device.

Images differ in size, so a set of them is ragged: all pixels in one ``[pixels, 3]`` uint8 tensor, with the
begin, height and width of each. Batches are cut out of it on the device.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rankgrad.lab.training import machine
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.decoding import upright

if TYPE_CHECKING:
    from typing import TypeAlias

    from PIL import Image

    #: A file, an image of Pillow's, or a decoded image, ``[H, W, 3]`` uint8.
    Source: TypeAlias = Path | Image.Image | Tensor

_PORTABLE = (".ppm", ".pgm", ".pnm")
#: How names of images end, in small letters or capitals.
SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".bmp", ".tif", ".tiff", ".gif", *_PORTABLE)

#: Mean and deviation of ImageNet's images, which pretrained networks expect.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


#: Images that are read before the next ones are begun.
_AT_A_TIME = 256

#: Pixels of a group of images side by side; 23 bytes each while a batch is made.
_SIDE_BY_SIDE = 2**26

#: More threads do not help, and a system has only so many.
MOST_WORKERS = 64


@dataclass(frozen=True)
class PackedImages:
    """Images of any size: ``pixels [P, 3]`` uint8, and ``begin``, ``height``, ``width`` of each (``[N]``).

    The pixels may be on any device; the rest stays on the CPU, so that reading a size never waits for a GPU.
    """

    pixels: Tensor
    begin: Tensor
    height: Tensor
    width: Tensor

    @staticmethod
    def of(images: Sequence[Tensor], *, pinned: bool = False) -> PackedImages:
        """From ``[H, W, 3]`` uint8 tensors; ``pinned`` memory travels to a GPU while the CPU goes on."""
        height = torch.tensor([p.shape[0] for p in images], dtype=torch.int64)
        width = torch.tensor([p.shape[1] for p in images], dtype=torch.int64)
        ends = (height * width).cumsum(0)
        pixels = torch.empty(int(ends[-1]) if len(ends) else 0, 3, dtype=torch.uint8, pin_memory=pinned)
        into = pixels.numpy()  # NumPy copies in this thread; torch would wake one for every core, hundreds a batch
        for image, end in zip(images, ends.tolist(), strict=True):
            rows = image.reshape(-1, 3).numpy()
            into[end - len(rows) : end] = rows
        return PackedImages(pixels, ends - height * width, height, width)

    @staticmethod
    def joined(parts: list[PackedImages]) -> PackedImages:
        """One set of several, which are taken out of the list: never all of them in memory twice."""
        begin, height, width = (
            torch.cat([torch.empty(0, dtype=torch.int64), *(getattr(part, name) for part in parts)])
            for name in ("begin", "height", "width")
        )
        pixels = torch.empty(int((height * width).sum()), 3, dtype=torch.uint8)
        first, row = 0, 0
        while parts:
            part = parts.pop(0)
            pixels[first : first + len(part.pixels)] = part.pixels
            begin[row : row + len(part)] += first
            first, row = first + len(part.pixels), row + len(part)
        return PackedImages(pixels, begin, height, width)

    def __len__(self) -> int:
        return len(self.begin)

    def to(self, device: torch.device) -> PackedImages:
        """The pixels on a device."""
        return PackedImages(self.pixels.to(device, non_blocking=True), self.begin, self.height, self.width)

    def rows(self, index: Tensor) -> PackedImages:
        """Some of the images, sharing the pixels."""
        return PackedImages(self.pixels, self.begin[index], self.height[index], self.width[index])

    def image(self, row: int) -> Tensor:
        """One image, ``[H, W, 3]``."""
        begin, height, width = (int(t[row]) for t in (self.begin, self.height, self.width))
        return self.pixels[begin : begin + height * width].reshape(height, width, 3)

    def packed(self, index: Tensor, *, pinned: bool = False) -> PackedImages:
        """Some of the images with only their pixels, ready to travel."""
        return PackedImages.of([self.image(row) for row in index.tolist()], pinned=pinned)


def decode(source: Path | Image.Image, longest: int) -> Tensor:
    """An image as ``[H, W, 3]`` uint8, upright; one twice as long as ``longest`` or more is reduced.

    The content says the format, not the name.
    """

    def enough(width: int, height: int) -> tuple[int, int]:
        share = min(1.0, longest / max(width, height))
        return math.ceil(width * share), math.ceil(height * share)

    def pixels(image: Image.Image) -> Tensor:
        factor = max(image.size) // longest
        return torch.from_numpy(np.array(image.reduce(factor) if factor > 1 else image))

    return upright(source, enough, pixels)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor on the device; the CPU does not wait until the device gets to it."""
    return tensor.to(device, non_blocking=True)


@lru_cache
def mean_and_std(
    device: torch.device, mean: tuple[float, float, float] = MEAN, std: tuple[float, float, float] = STD
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation as ``[3, 1, 1]`` on a device; kept, for sending them would wait for it."""
    on_device = [torch.tensor(part, device=device)[:, None, None] for part in (mean, std)]
    return on_device[0], on_device[1]


def like_sizes(images: PackedImages) -> list[Tensor]:
    """Rows of images to lay side by side: groups of less than four times their own pixels, and not too large.

    A batch of photographs is one group; a wide image and a high one are two, neither padded to the other's side.
    """

    def split(rows: Tensor) -> list[Tensor]:
        sides = torch.stack([images.height[rows], images.width[rows]])
        largest, used = sides.amax(1), int(sides.prod(0).sum())
        padded = len(rows) * int(largest.prod())
        if len(rows) == 1 or padded <= min(4 * used, _SIDE_BY_SIDE):
            return [rows]
        if padded <= 4 * used:
            return [group for half in rows.tensor_split(2) for group in split(half)]
        # the side that wastes more has images of less than half of it: else it would not waste twice the pixels
        wasteful = int((largest / sides.float().mean(1)).argmax())
        large = 2 * sides[wasteful] > largest[wasteful]
        return split(rows[large]) + split(rows[~large])

    return split(torch.arange(len(images)))


def whole(images: PackedImages) -> Tensor:
    """Images side by side, ``[N, H, W, 3]`` bytes; beyond its edge an image repeats it."""
    device = images.pixels.device
    begin, height, width = (sent(t, device).unsqueeze(1) for t in (images.begin, images.height, images.width))
    y = torch.arange(int(images.height.max()), device=device)
    x = torch.arange(int(images.width.max()), device=device)
    y, x = torch.minimum(y, height - 1), torch.minimum(x, width - 1)
    return images.pixels[(begin + y * width).unsqueeze(2) + x.unsqueeze(1)]


class _Room:
    """Bytes of decoded images that all threads together may keep; more of them are an error."""

    def __init__(self, total: int) -> None:
        self.total, self._used = total, 0
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Keep so many bytes more."""
        with self._lock:
            self._used += size
            full = self._used > self.total
        if full:
            raise UserError(
                f"--data: the decoded images need more than {self.total / 1e9:,.1f} GB, nine tenths of the memory "
                "that is free; a smaller view (view.resize, view.long) needs less, data.cache=none keeps no images"
            )


class Store:
    """Images, ready to be cut into batches on a device; ``faults`` says which cannot be read.

    Args:
        sources: What to read: files, images of Pillow's, or decoded images.
        names: What to call each in messages.
        decode: From a source to ``[H, W, 3]`` uint8; any exception means the file is broken.
        cache: Where decoded images stay: ``ram``, ``device``, or ``none``.
        workers: Threads that decode.
        device: Where batches are made.
        progress: Called with the number of images read so far.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        names: Sequence[str],
        decode: Callable[[Source], Tensor],
        *,
        cache: str,
        workers: int,
        device: torch.device,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.device, self._decode = device, decode
        self._pool = ThreadPoolExecutor(min(workers, MOST_WORKERS))
        self._ahead: dict[tuple[int, ...], Callable[[], PackedImages]] = {}
        kept, shapes = [], []
        decoded: list[Tensor] = []
        parts: list[PackedImages] = []
        self.faults: list[str] = []
        room = _Room(9 * machine.available_bytes(torch.device("cpu")) // 10)
        for row, outcome in enumerate(self._decode_all(sources, room)):
            if isinstance(outcome, str):
                self.faults.append(f"{names[row]}: {outcome}")
            else:
                kept.append(row)
                shapes.append(outcome.shape[:2])
                if cache != "none":
                    decoded.append(outcome)
                else:
                    room.take(-outcome.numel())
            if len(decoded) == _AT_A_TIME:
                parts.append(PackedImages.of(decoded))
                decoded.clear()
            progress(row + 1)
        self.kept = torch.tensor(kept, dtype=torch.int64)  # rows of `sources` that can be read
        self.shapes = torch.tensor(shapes, dtype=torch.int64).reshape(-1, 2)  # height and width of each
        self._sources, self._names = [sources[row] for row in kept], [names[row] for row in kept]
        parts.append(PackedImages.of(decoded))
        decoded.clear()
        self.cache = PackedImages.joined(parts) if cache != "none" else None
        if self.cache is not None and cache == "device":
            self.cache = self.cache.to(device)
        self._on_device = cache == "device"

    def _try_decode(self, source: Source) -> Tensor | str:
        """The image, or what is wrong with the file."""
        try:
            if isinstance(source, Path) and not source.is_file():
                return "missing"
            return self._decode(source)
        except Exception as error:  # Pillow raises many kinds, all of which mean that this file is broken
            return f"broken ({error})"

    def _decode_all(self, sources: Sequence[Source], room: _Room) -> Iterator[Tensor | str]:
        """All images in order, a few hundred at a time in flight."""

        def counted(source: Source) -> Tensor | str:
            outcome = self._try_decode(source)
            if isinstance(outcome, Tensor):
                room.take(outcome.numel())
            return outcome

        for begin in range(0, len(sources), _AT_A_TIME):
            yield from self._pool.map(counted, sources[begin : begin + _AT_A_TIME])

    def take(self, rows: Tensor) -> Store:
        """Some of the images, sharing the pixels and the threads."""
        part = copy.copy(self)
        part._ahead, part.faults = {}, []
        part.kept, part.shapes = torch.arange(len(rows)), self.shapes[rows]
        part._sources = [self._sources[row] for row in rows.tolist()]
        part._names = [self._names[row] for row in rows.tolist()]
        part.cache = None if self.cache is None else self.cache.rows(rows)
        return part

    def image(self, row: int) -> Tensor:
        """One image, ``[H, W, 3]``."""
        if self.cache is not None:
            return self.cache.image(row)
        return self._sound(row, self._try_decode(self._sources[row]))

    def fetch(self, rows: Tensor, following: Tensor | None = None) -> PackedImages:
        """Images on the device; those of the ``following`` batch begin to be read meanwhile."""
        if self.cache is not None and self._on_device:
            return self.cache.rows(rows)
        ready = self._ahead.pop(tuple(rows.tolist()), None) or self._begin(rows)
        if following is not None:
            self._ahead[tuple(following.tolist())] = self._begin(following)
        return ready().to(self.device)

    def _begin(self, rows: Tensor) -> Callable[[], PackedImages]:
        """Start to read images in the background; the call that waits for them is returned."""
        pinned = self.device.type == "cuda"
        if self.cache is not None:
            return self._pool.submit(self.cache.packed, rows, pinned=pinned).result
        reading = [self._pool.submit(self._try_decode, self._sources[row]) for row in rows.tolist()]
        waiting = list(zip(rows.tolist(), reading, strict=True))
        return lambda: PackedImages.of(
            [self._sound(row, future.result()) for row, future in waiting], pinned=pinned
        )

    def _sound(self, row: int, outcome: Tensor | str) -> Tensor:
        if isinstance(outcome, str):
            raise UserError(f"--data: {self._names[row]}: {outcome} while training")
        return outcome


def leave_out(stores: Sequence[Store | None], many: int, broken: str) -> str:
    """A note on the images that are left out, empty if there are none; ``broken="refuse"`` makes them an error."""
    faults = [fault for store in stores if store is not None for fault in store.faults]
    if faults and broken == "refuse":
        raise UserError(f"--data: {listed(faults, many)}. data.broken=skip leaves them out.")
    return f"skipped {len(faults)} images: {'; '.join(faults[:5])}" if faults else ""


def listed(faults: list[str], many: int, what: str = "images") -> str:
    """``3 of 50 images cannot be read: ...``, naming the first of them."""
    shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
    return f"{len(faults)} of {many} {what} cannot be read: {shown}"
