"""Retrieval of images: the task ``retrieval``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rankgrad import distributed
from rankgrad.lab.retrieval import losses
from rankgrad.lab.retrieval.images import data, model, rates
from rankgrad.lab.retrieval.images.config import Config, Data, View
from rankgrad.lab.retrieval.images.data import folder
from rankgrad.lab.retrieval.images.paper import TABLES
from rankgrad.lab.retrieval.images.pooling import Pool
from rankgrad.lab.retrieval.images.source import ImageSource
from rankgrad.lab.retrieval.images.trained import TrainedImageEmbedder
from rankgrad.lab.retrieval.source import Sources
from rankgrad.lab.retrieval.splits import FEW, Items, by_classes
from rankgrad.lab.retrieval.task import RetrievalTask
from rankgrad.lab.training import log
from rankgrad.lab.training.checkpoint import Checkpoint
from rankgrad.lab.training.reuse import read_once
from rankgrad.lab.training.task import Training
from rankgrad.lab.vision import kinds
from rankgrad.lab.vision.folders import root_of
from rankgrad.lab.vision.images import leave_out


@read_once
def read_sources(config: Data, view: View, device: torch.device, *, train: bool) -> Sources:
    """Training images (if wanted), queries and gallery; read once for all seeds of a command."""
    splits = data.read(config)
    wanted = (splits.train if train else None, splits.query, splits.gallery)
    total = sum(len(items) for items in wanted if items is not None)
    show = distributed.process_index() == 0 and isinstance(splits.query.sources[0], Path)
    with log.progress("reading images", total, 0, show=show) as bar:
        done = 0

        def read(items: Items | None) -> ImageSource | None:
            nonlocal done
            if items is None:
                return None
            source = ImageSource(items, config, view, device, lambda count: bar.advance(done + count))
            done += len(items)
            return source

        training, query, gallery = read(wanted[0]), read(wanted[1]), read(wanted[2])
        stores = [None if source is None else source.store for source in (training, query, gallery)]
        for line in (splits.note, leave_out(stores, total, config.broken)):
            if line:
                bar.say(line)
    assert query is not None
    return Sources(training, query, gallery)


class ImageTask(RetrievalTask):
    """Train an embedding network on images."""

    config_class = Config
    item = "images"

    @classmethod
    def check(cls, config: Config) -> None:
        """Whether there is a folder, for data that needs one."""
        if config.data.name != "digits":
            root_of(config.data)

    @classmethod
    def pretrained(cls, config: Config) -> bool:
        """Whether there are weights to begin with."""
        return config.model.weights != "none"

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        view = self.config.view
        self.tested_items *= (view.test_crop / view.crop) ** 2

    def _counts(self) -> str:
        of_these = ", held out of the training classes (data.hold_out)" if self.config.data.hold_out else ""
        return super()._counts() + of_these

    def _length(self) -> str:
        view, parts = self.config.view, [super()._length()]
        tested = "" if view.test_crop == view.crop else f", tested at {view.test_crop} (view.test_crop)"
        parts.append(f"crops of {view.crop} pixels{tested}")
        if not view.flip and self.config.data.name == "folder":
            parts.append("not mirrored (view.flip)")
        return ", ".join(parts)

    def _other_split(self) -> str:
        config = self.config.data
        chosen = config.name == "folder" and not folder.parts_of(root_of(config))
        chosen = chosen and len(self.query.items.class_names) >= FEW
        return "; data.test_share and data.split_seed choose the classes to test on" if chosen else ""

    def _warnings(self) -> list[str]:
        warnings = super()._warnings()
        if self.config.model.pooling == "auto" and not any(
            isinstance(one, Pool) for one in self.network.modules()
        ):
            warnings.append(f"{self.config.model.backbone} keeps its own pooling, which avg+max cannot replace")
        return warnings

    @classmethod
    def sources(cls, config: Config, device: torch.device, *, train: bool) -> Sources:
        """Images as the backbone expects them; held-out classes of images that this command has read already."""
        data = config.data
        read = read_sources.kept(data.model_copy(update={"hold_out": 0.0}), config.view, device, train=True)
        if not (data.hold_out and read):
            return read_sources(data, config.view, device, train=train)
        whole = read.train
        assert isinstance(whole, ImageSource)
        inside, outside = by_classes(whole.items.labels, data.hold_out, data.split_seed)
        return Sources(whole.take(inside), whole.take(outside), None)

    @classmethod
    def completed(cls, config: Config) -> Config:
        """With the size, mean and standard deviation of the images the backbone was trained on.

        What no training has fixed follows from the user's images: an untrained network does not see them enlarged,
        and drawings are not mirrored.
        """
        view = config.view
        sized = view.resize or view.crop or cls.pretrained(config)
        some = [] if sized and view.flip is not None else data.sample(config.data)
        if some and not sized:
            view = view.model_copy(update={"resize": kinds.working_size(some)})
        if view.flip is None:
            view = view.model_copy(update={"flip": not kinds.are_drawings(some)})
        return config.model_copy(update={"view": model.complete_view(view, config.model)})

    @classmethod
    def chosen(
        cls, config: Config, device: torch.device, train: Training, print_note: Callable[[str], None]
    ) -> tuple[Config, list[str]]:
        """The learning rate, where there are several to try and images enough to compare them."""
        if len(config.rates) < 2:
            return (config.with_rate(config.rates[0]) if config.rates else config), []
        lr = config.optim.lr
        # The run's own task is made first, which reads all images: what is wrong with it shows before the trials.
        whole = cls(config.with_rate(lr), device)
        if not rates.enough(whole.source.items):
            return config.with_rate(lr), [f"lr={lr:g}: too few training images to compare rates ({rates.ENOUGH})"]
        for note in whole.notes:
            if note != whole._length():  # which has a rate
                print_note(note)
        print_note(rates.plan(config.rates, lr))
        del whole
        rate, told = rates.choose(config, train)
        return config.with_rate(rate), [told]

    @classmethod
    def as_chosen(cls, config: Config, before: Config) -> Config:
        """With the learning rate of that run, instead of trying any."""
        return config.with_rate(before.optim.lr) if config.rates else config

    @classmethod
    def build(cls, config: Config) -> tuple[model.Embedder, dict[str, Any]]:
        """A network of torchvision or timm with an embedding layer."""
        assert config.view.crop is not None
        return model.build(config.model, config.view.crop, config.seed)

    @classmethod
    def rebuild(cls, checkpoint: Checkpoint) -> model.Embedder:
        """The network of a checkpoint."""
        config, weights, metadata = checkpoint
        return model.rebuild(config.model, config.view.crop, metadata, weights)

    @classmethod
    def trained(cls, checkpoint: Checkpoint, device: torch.device) -> TrainedImageEmbedder:
        """From image files to embeddings."""
        config = cls.completed(checkpoint.config)
        return TrainedImageEmbedder(config, cls.rebuild(checkpoint._replace(config=config)), device)

    @classmethod
    def listing(cls) -> dict[str, dict[str, str]]:
        """Losses and data sets, a line each."""
        others = {
            "pml:NAME": "any loss of pytorch-metric-learning, e.g. pml:FastAPLoss",
            "surrogate:NAME": "a baseline of rankgrad.surrogates, e.g. surrogate:smoothap",
        }
        return {
            "loss": {name: told for name, (_, told) in losses.OURS.items()} | others,
            "data set": {name: told for name, (_, told) in data.READERS.items()},
        }

    @classmethod
    def published(cls, config: Config) -> tuple[list[tuple[str, list[float | None]]], str]:
        """The paper's rows of this data set."""
        known, rows = TABLES.get(config.data.name, ([], []))
        if not rows:
            return [], ""
        note = "The paper reports the best evaluation on the test classes, mean of three runs."
        if config.data.counts == "any":
            note += " The size of the data set was not checked: the rows may not compare."
        if config.data.hold_out:
            note += " Tested on held-out training classes: not comparable with the rows of the paper."
        columns = [known.index(k) if k in known else None for k in config.recall_at]
        return [(name, [None if c is None else numbers[c] for c in columns]) for name, numbers in rows], note
