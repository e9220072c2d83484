"""Settings of data sets of images, whatever is learned from them."""

from __future__ import annotations

from typing import Literal

from rankgrad.lab.training.config import Count, Section


class ImageData(Section):
    """Which images, and how they are read. A task says which data sets it knows, and adds settings of its own."""

    name: str  # the data set, see `rankgrad ls`
    root: str | None = None  # the folder of the data set (--data)
    counts: Literal["protocol", "any"] = "protocol"  # protocol: refuse a data set that has not the official size
    broken: Literal["refuse", "skip"] = "refuse"  # what to do with files that are missing or cannot be read
    cache: Literal["ram", "device", "none"] = "ram"  # where decoded images are kept
    workers: Count = 8  # threads that decode images
