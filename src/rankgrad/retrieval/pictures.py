"""From files to pixels: decoded by content, resized, and kept as one flat row of bytes in RAM or on the device.

Pictures differ in size, so a set of them is ragged: all pixels in one ``[pixels, 3]`` uint8 tensor, with the
begin, height and width of each. Batches are cut out of it on the device (:mod:`rankgrad.retrieval.augment`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rankgrad.retrieval.config import Data, View
from rankgrad.retrieval.data.splits import Pictures
from rankgrad.training.errors import UserError


@dataclass(frozen=True)
class Ragged:
    """Pictures of any size: ``pixels [P, 3]`` uint8, and ``begin``, ``height``, ``width`` of each (``[N]``).

    The pixels may be on any device; the rest stays on the CPU, so that nobody waits for a GPU to know a size.
    """

    pixels: Tensor
    begin: Tensor
    height: Tensor
    width: Tensor

    @staticmethod
    def of(pictures: Sequence[Tensor], *, pinned: bool = False) -> Ragged:
        """From ``[H, W, 3]`` uint8 tensors; ``pinned`` memory travels to a GPU while the CPU goes on."""
        height = torch.tensor([p.shape[0] for p in pictures], dtype=torch.int64)
        width = torch.tensor([p.shape[1] for p in pictures], dtype=torch.int64)
        ends = (height * width).cumsum(0)
        pixels = torch.empty(int(ends[-1]) if len(ends) else 0, 3, dtype=torch.uint8, pin_memory=pinned)
        for picture, end in zip(pictures, ends.tolist(), strict=True):
            rows = picture.reshape(-1, 3)
            pixels[end - len(rows) : end] = rows
        return Ragged(pixels, ends - height * width, height, width)

    def __len__(self) -> int:
        return len(self.begin)

    def to(self, device: torch.device) -> Ragged:
        """The pixels on a device."""
        return Ragged(self.pixels.to(device, non_blocking=True), self.begin, self.height, self.width)

    def rows(self, index: Tensor) -> Ragged:
        """Some of the pictures, sharing the pixels."""
        return Ragged(self.pixels, self.begin[index], self.height[index], self.width[index])

    def picture(self, row: int) -> Tensor:
        """One picture, ``[H, W, 3]``."""
        begin, height, width = (int(t[row]) for t in (self.begin, self.height, self.width))
        return self.pixels[begin : begin + height * width].reshape(height, width, 3)

    def packed(self, index: Tensor, *, pinned: bool = False) -> Ragged:
        """Some of the pictures with only their pixels, ready to travel."""
        return Ragged.of([self.picture(row) for row in index.tolist()], pinned=pinned)


def decode(source: Path | Tensor, view: View) -> Tensor:
    """A picture as ``[H, W, 3]`` uint8 at its working size. The content says the format, not the name."""
    from PIL import Image

    if isinstance(source, Tensor):
        if view.shape == "short" and min(source.shape[:2]) == view.resize:
            return source
        picture = Image.fromarray(source.numpy())
    else:
        with Image.open(source) as file:
            file.draft(
                "RGB", (2 * view.resize, 2 * view.resize)
            )  # a JPEG far larger than needed is read at a fraction
            picture = file.convert("RGB")
    width, height = picture.size
    if view.shape == "square":
        size = (view.resize, view.resize)
    else:
        scale = view.resize / min(width, height)
        size = (max(view.resize, round(width * scale)), max(view.resize, round(height * scale)))
    if picture.size != size:
        picture = picture.resize(size, Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(picture))


def _try_decode(source: Path | Tensor, view: View) -> Tensor | str:
    """The picture, or what is wrong with the file."""
    if isinstance(source, Path) and not source.is_file():
        return "missing"
    try:
        return decode(source, view)
    except Exception as error:  # Pillow raises many kinds for broken files: all of them mean this file is broken
        return f"broken ({error})"


class Source:
    """The pictures of a split, ready to be cut into batches on a device.

    Args:
        pictures: What to read.
        config: Cache, threads, and whether broken files are skipped.
        view: Working size.
        device: Where batches are made.
        progress: Called with the number of pictures read so far.
    """

    def __init__(
        self,
        pictures: Pictures,
        config: Data,
        view: View,
        device: torch.device,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.view, self.device = view, device
        self._pool = ThreadPoolExecutor(config.workers)
        self._ahead: dict[tuple[int, ...], Callable[[], Ragged]] = {}
        kept, faults = [], []
        decoded: list[Tensor] = []
        for row, outcome in enumerate(self._decode_all(pictures.sources)):
            if isinstance(outcome, str):
                faults.append(f"{pictures.names[row]}: {outcome}")
            else:
                kept.append(row)
                if config.cache != "none":
                    decoded.append(outcome)
            progress(row + 1)
        self.faults = faults
        if faults and config.broken == "refuse":
            raise UserError(f"--data: {_listed(faults, len(pictures))}. data.broken=skip leaves them out.")
        self.pictures = pictures.take(torch.tensor(kept, dtype=torch.int64)) if faults else pictures
        self.cache = Ragged.of(decoded) if config.cache != "none" else None
        if self.cache is not None and config.cache == "device":
            self.cache = self.cache.to(device)
        self._on_device = config.cache == "device"

    def _decode_all(self, sources: Sequence[Path | Tensor]) -> Iterator[Tensor | str]:
        """All pictures in order, a few hundred at a time in flight."""
        for begin in range(0, len(sources), 256):
            yield from self._pool.map(lambda s: _try_decode(s, self.view), sources[begin : begin + 256])

    def fetch(self, rows: Tensor, following: Tensor | None = None) -> Ragged:
        """Pictures on the device; those of the ``following`` batch begin to be read meanwhile."""
        if self.cache is not None and self._on_device:
            return self.cache.rows(rows)
        ready = self._ahead.pop(tuple(rows.tolist()), None) or self._begin(rows)
        if following is not None:
            self._ahead[tuple(following.tolist())] = self._begin(following)
        return ready().to(self.device)

    def _begin(self, rows: Tensor) -> Callable[[], Ragged]:
        """Start to read pictures in the background; the call that waits for them is returned."""
        pinned = self.device.type == "cuda"
        if self.cache is not None:
            return self._pool.submit(self.cache.packed, rows, pinned=pinned).result
        reading = [self._pool.submit(_try_decode, self.pictures.sources[row], self.view) for row in rows.tolist()]
        waiting = list(zip(rows.tolist(), reading, strict=True))
        return lambda: Ragged.of([self._sound(row, future.result()) for row, future in waiting], pinned=pinned)

    def _sound(self, row: int, outcome: Tensor | str) -> Tensor:
        if isinstance(outcome, str):
            raise UserError(f"--data: {self.pictures.names[row]}: {outcome} while training")
        return outcome


def _listed(faults: list[str], many: int) -> str:
    shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
    return f"{len(faults)} of {many} pictures cannot be read: {shown}"
