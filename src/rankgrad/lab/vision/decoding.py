"""Image files: opened by their content, judged by their header, and decoded within a budget of memory."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")

#: Formats that Pillow may read. (It supports formats that start other programs.)
FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")

#: The largest ratio of an image's sides. Brought to a short side of 256 a strip of 1 x 4,000 has 1,024,000 x 256.
LONGEST = 16

#: Bytes that decoding needs for a pixel at most (measured: WebP 16, all others 12 or fewer): Pillow's own 4, its
#: decoder's, a copy as RGB, one upright.
BYTES_PER_PIXEL = 16

#: A JPEG in several scans (a progressive one) is in memory as coefficients, whatever fraction of it is read: two
#: bytes each, of up to four colours.
COEFFICIENTS_PER_PIXEL = 8

#: Bytes that may be read before an image's pixels: colour profiles, texts, tags; of WebP and AVIF the whole file.
HEADER = 2**26

#: Bytes of memory that Pillow needs for a byte of them at most (measured: 46, 16-bit offsets of strips in TIFF).
BYTES_PER_HEADER_BYTE = 48

#: Bytes of a pixel in a file at most: four channels of 16 bits.
BYTES_IN_FILE = 8

_ORIENTATION = 0x0112  # the EXIF tag
_TURNED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height


class Budget:
    """A limit on the memory of all decoding threads: a thread waits until its share is free, or runs alone.

    Args:
        total: The limit in bytes.
    """

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Hold so many bytes."""
        size = min(size, self.total)
        with self._changed:
            self._changed.wait_for(lambda: self.used + size <= self.total)
            self.used += size
        try:
            yield
        finally:
            with self._changed:
                self.used -= size
                self._changed.notify_all()


#: Of all images that are decoded at a time, by any number of workers.
BUDGET = Budget(2 * 2**30)

#: Images of Pillow's that a program holds already are used one at a time: two workers may have the same one.
_IN_MEMORY = threading.Lock()


@lru_cache
def _formats() -> list[str]:
    """Those of :data:`FORMATS` that this Pillow reads."""
    from PIL import Image

    # Between this limit of Pillow's and twice it, where it refuses, BUDGET is the guard.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    warnings.filterwarnings("ignore", message="Palette images with Transparency")  # which is left out
    Image.init()
    # Larger than any block that malloc keeps for the thread that frees it: each worker would keep a large image.
    Image.core.set_block_size(2**26)  # type: ignore[attr-defined]
    return [name for name in FORMATS if name in Image.OPEN]


class _LimitedFile(io.BufferedReader):
    """A file that gives :data:`HEADER` bytes, and as many more as :meth:`allow` says.

    Its size says nothing: a file of a few kilobytes on the disk may have gigabytes, of zeros.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self._path, self._allowed = path, HEADER
        self.taken = 0  #: bytes that were read

    def __repr__(self) -> str:  # in Pillow's messages
        return repr(str(self._path))

    def allow(self, more: int) -> None:
        """Give so many bytes more."""
        self._allowed += more

    def read(self, size: int | None = -1, /) -> bytes:
        """As of any file."""
        left = self._allowed - self.taken
        content = super().read(left + 1 if size is None or not 0 <= size <= left else size)
        self.taken += len(content)
        if self.taken > self._allowed:  # no OSError: Pillow takes one for a tag that can be left out
            raise ValueError(f"expected at most {self._allowed:,} bytes of pixels and what stands before them")
        return content


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Image.Image, int]]:
    """An image whose header is fit to be decoded: a known format of 8 bits, not a strip, not too large.

    With it, the bytes of memory that its header may take.
    """
    from PIL import Image

    with _LimitedFile(path) as content, Image.open(content, formats=_formats()) as file:
        _check_header(file)
        content.allow(BYTES_IN_FILE * file.width * file.height)
        yield file, BYTES_PER_HEADER_BYTE * content.taken


def _check_header(file: Image.Image) -> None:
    if file.mode[0] in "IF":
        raise ValueError(f"expected 8 bits a channel, received Pillow's mode {file.mode}")
    width, height = file.size
    if max(width, height) > LONGEST * min(width, height):
        raise ValueError(f"{width} x {height} pixels: expected sides of a ratio up to {LONGEST}")


@contextmanager
def opened(path: Path) -> Iterator[tuple[Image.Image, int]]:
    """:func:`_opened` within :data:`BUDGET`, for what needs the header alone."""
    with BUDGET.of(BYTES_PER_HEADER_BYTE * min(path.stat().st_size, HEADER)), _opened(path) as file:
        yield file


def size_of(source: Path | Image.Image) -> tuple[int, int]:
    """Width and height of an image as it is shown (see :func:`upright`), from its header alone."""
    if not isinstance(source, Path):
        with _IN_MEMORY:
            return _size(source)
    with opened(source) as (file, _):
        return _size(file)


def _size(file: Image.Image) -> tuple[int, int]:
    width, height = file.size
    return (height, width) if _orientation(file) in _TURNED else (width, height)


def _orientation(file: Image.Image) -> int:
    """How the image is to be turned, from its header.

    Pillow turns a TIFF itself, and would decode a PNG to read what follows its pixels.
    """
    known = "exif" in file.info if file.format == "PNG" else file.format != "TIFF"
    found = file.getexif().get(_ORIENTATION, 1) if known else 1
    return found if isinstance(found, int) else 1


def upright(
    source: Path | Image.Image, enough: Callable[[int, int], tuple[int, int]], use: Callable[[Image.Image], T]
) -> T:
    """What ``use`` makes of an image as RGB, turned as its EXIF data say, all within :data:`BUDGET`.

    Args:
        source: The file, or an image of Pillow's, which is in memory already.
        enough: From the width and height in the file to those that need not be exceeded: a JPEG is read at a half,
            a quarter or an eighth of its size if that has both.
        use: It must not keep the image, nor change one that is in memory already.
    """
    if not isinstance(source, Path):
        with _IN_MEMORY:
            _check_header(source)
            return use(_rgb(source))
    with opened(source) as (file, header):
        needed = file.width * file.height * COEFFICIENTS_PER_PIXEL
        file.draft("RGB", enough(*file.size))
        needed = max(needed, file.width * file.height * BYTES_PER_PIXEL)
    with BUDGET.of(header + needed):
        return _used(source, enough, use)  # whose frame, and the image with it, is gone before the budget is free


def _used(path: Path, enough: Callable[[int, int], tuple[int, int]], use: Callable[[Image.Image], T]) -> T:
    with _opened(path) as (file, _):
        file.draft("RGB", enough(*file.size))
        return use(_rgb(file))


def _rgb(file: Image.Image) -> Image.Image:
    """The pixels as RGB, upright."""
    from PIL import Image

    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    turn = turns.get(_orientation(file))
    file.load()
    image: Image.Image = file if file.mode == "RGB" else file.convert("RGB")
    return image if turn is None else image.transpose(turn)
