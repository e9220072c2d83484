"""Data sets in their official layouts: images, their classes, and which are queries and which the gallery."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rankgrad.lab.retrieval.images.config import Data
from rankgrad.lab.retrieval.images.data import benchmarks, digits, folder
from rankgrad.lab.retrieval.splits import RetrievalSplits, held_out

#: name -> (reader, what it needs)
READERS: dict[str, tuple[Callable[[Data], RetrievalSplits], str]] = {
    "digits": (digits.read, "scikit-learn's 8 x 8 digits, nothing to download; split by images"),
    "folder": (folder.read, "your own images: DIR/<class>/<image>; split by classes"),
    "cub": (benchmarks.read_cub, "CUB-200-2011: DIR/CUB_200_2011/images.txt"),
    "sop": (benchmarks.read_sop, "Stanford Online Products: DIR/Stanford_Online_Products/Ebay_train.txt"),
    "inshop": (benchmarks.read_inshop, "In-shop Clothes: DIR/Eval/list_eval_partition.txt and DIR/Img"),
}


def read(config: Data) -> RetrievalSplits:
    """The data set of these settings."""
    splits = READERS[config.name][0](config)
    if not config.hold_out or not len(splits.train):  # with test_share=1 all are to test
        return splits
    return held_out(splits, config.hold_out, config.split_seed)


def sample(config: Data) -> list[Path]:
    """Some of a user's own images, to see of what kind they are; of known data sets none."""
    return folder.sample(config) if config.name == "folder" else []
