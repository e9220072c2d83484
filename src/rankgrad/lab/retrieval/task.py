"""Retrieval as a task of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankgrad import distributed
from rankgrad.engine.registration import NotANumberError
from rankgrad.lab.retrieval import augment, data, losses, model
from rankgrad.lab.retrieval.config import Config, Data, View
from rankgrad.lab.retrieval.data.splits import Images
from rankgrad.lab.retrieval.images import ImageSource
from rankgrad.lab.training import log, optim
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.task import Task
from rankgrad.lab.vision.images import leave_out, sent
from rankgrad.metrics import RetrievalMetrics, retrieval_metrics
from rankgrad.samplers import ClassSampler, SuperLabelSampler


@lru_cache(maxsize=1)
def read_sources(
    config: Data, view: View, device: torch.device, *, train: bool
) -> tuple[ImageSource | None, ImageSource, ImageSource | None]:
    """Training images (if wanted), queries and gallery; kept, so that restarts need not read again."""
    splits = data.read(config)
    wanted = (splits.train if train else None, splits.query, splits.gallery)
    total = sum(len(images) for images in wanted if images is not None)
    show = distributed.rank() == 0 and isinstance(splits.query.sources[0], Path)
    with log.progress("reading images", total, 0, show=show) as bar:
        done = 0

        def read(images: Images | None) -> ImageSource | None:
            nonlocal done
            if images is None:
                return None
            source = ImageSource(images, config, view, device, lambda count: bar.advance(done + count))
            done += len(images)
            return source

        training, query, gallery = sources = [read(images) for images in wanted]
        if skipped := leave_out(sources, total, config.broken):
            bar.say(skipped)
    assert query is not None
    return training, query, gallery


def embed(
    network: nn.Module,
    source: ImageSource,
    view: View,
    precision: str,
    *,
    batch: int = 256,
    progress: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """Embeddings of all images of a source, centre crop, ``[N, dim]`` float32; processes share the work.

    ``progress`` is called with the number of images done so far.
    """
    network.eval()
    rows = torch.arange(len(source.images))
    mine = rows.tensor_split(distributed.count())[distributed.rank()].split(batch)
    parts = []
    with torch.inference_mode(), optim.autocast(precision, source.device):
        for at, now in enumerate(mine):
            images = source.fetch(now, mine[at + 1] if at + 1 < len(mine) else None)
            boxes = augment.centre_boxes(images.height, images.width, view.crop)
            parts.append(network(augment.crops(images, boxes, None, view.crop)).float())
            progress(sum(map(len, parts)))
    return distributed.gather(torch.cat(parts).clone())


class RetrievalTask(Task):
    """Train an embedding network on images; see :class:`rankgrad.lab.training.task.Task`.

    Args:
        config: The settings.
        device: Where to train.
    """

    config_class = Config
    headline = "R@1"
    same_shapes = True

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        losses.build(config.loss, config.miner, classes=4, embedding=4)  # wrong arguments show before data is read
        train, self.query, self.gallery = read_sources(config.data, config.view, device, train=True)
        assert train is not None
        self.source = train
        classes, self.labels = train.images.labels.unique(return_inverse=True)
        if len(classes) < 2 or int(self.labels.bincount().max()) < 2:
            found = f"{len(self.labels):,} images of {len(classes):,} classes"
            raise UserError(
                f"--data: expected classes to train on, two at least, and two images of one; found {found}"
            )
        if config.batch.size % distributed.count():
            several = f"a multiple of the {distributed.count()} processes"
            raise UserError(f"batch.size: expected {several}, received {config.batch.size}")
        self.sampler = self._sampler()
        self.steps_per_epoch = len(self.sampler)
        self.items_per_step = config.batch.size
        self.parts: dict[str, Tensor] = {}
        self.network, self._notes = model.build(config.model, config.view.crop, config.seed)
        self.network.to(device)
        if device.type == "cuda":
            self.network = self.network.to(memory_format=torch.channels_last)
        self.loss = losses.build(
            config.loss, config.miner, classes=int(self.labels.max()) + 1, embedding=config.model.embedding
        ).to(device)

    def _sampler(self) -> ClassSampler | SuperLabelSampler:
        batch, images = self.config.batch, self.source.images
        try:
            if batch.sampler == "classes":
                return ClassSampler(self.labels, size=batch.size, per_class=batch.per_class, seed=self.config.seed)
            if images.super_labels is None:
                raise UserError(f"batch.sampler: {self.config.data.name} has no super-labels, use classes")
            return SuperLabelSampler(
                self.labels,
                images.super_labels,
                size=batch.size,
                per_class=batch.per_class,
                batches_per_pair=batch.batches_per_pair,
                seed=self.config.seed,
            )
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"batch.{error}") from None

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The backbone, the embedding layer and the loss's own parameters, each at its own rate."""
        return [
            {"params": list(self.network.backbone.parameters())},
            {"params": list(self.network.embedding.parameters()), "scale": self.config.embedding_lr},
            {"params": list(self.loss.parameters()), "scale": self.config.proxy_lr, "weight_decay": 0.0},
        ]

    def batch_loss(self, network: nn.Module, step: int) -> Tensor:
        """Augment and embed this process's part of a batch, and rank it against the whole."""
        view = self.config.view
        everyone = self.sampler.at(step)
        mine = distributed.share(everyone)
        images = self.source.fetch(mine, distributed.share(self.sampler.at(step + 1)))
        seed = np.random.SeedSequence([self.config.seed, step, 1]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed >> np.uint64(1)))
        boxes, flips = self._boxes(images.height, images.width, len(everyone), generator)
        embeddings = network(augment.crops(images, boxes, flips, view.crop))
        if self.device.type == "cpu" and not bool(embeddings.isfinite().all()):
            lost: Tensor = embeddings.sum() * torch.nan  # the loop stops, with a message
            return lost
        labels, items = sent(self.labels[mine], self.device), sent(mine, self.device)
        loss: Tensor = self.loss(embeddings, labels, items)
        return loss

    def _boxes(
        self, height: Tensor, width: Tensor, everyone: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """This process's part of the boxes of the global batch: the same whatever the number of processes."""
        if not distributed.active():
            return augment.training_boxes(height, width, self.config.view, generator)
        whole = torch.full((2, everyone), self.config.view.resize)
        part = slice(distributed.rank() * len(height), (distributed.rank() + 1) * len(height))
        whole[:, part] = torch.stack([height, width])
        boxes, flips = augment.training_boxes(whole[0], whole[1], self.config.view, generator)
        return boxes[part], flips[part]

    def measure(self) -> tuple[RetrievalMetrics, Tensor, Tensor | None]:
        """Where every query's relevant items stand, and the embeddings of queries and gallery."""
        return measure(self.network, self.query, self.gallery, self.config)

    def evaluate(self) -> dict[str, float]:
        """R@K, mAP@R and AP in percent."""
        return self.measure()[0].summary(self.config.recall_at)

    def metadata(self) -> dict[str, Any]:
        """What the network needs to be built again."""
        return self._notes

    def finish(self, folder: Path) -> None:
        """Write the examples of the report."""
        from rankgrad.lab.retrieval.report import write_examples

        found, queries, gallery = self.measure()
        if distributed.rank() == 0:
            write_examples(folder, found, queries, gallery, self.query, self.gallery)

    @classmethod
    def listing(cls) -> dict[str, dict[str, str]]:
        """Losses and data sets, a line each."""
        others = {"pml:NAME": "any loss of pytorch-metric-learning, e.g. pml:FastAPLoss"}
        return {
            "loss": {name: told for name, (_, told) in losses.OURS.items()} | others,
            "data set": {name: told for name, (_, told) in data.READERS.items()},
        }

    @classmethod
    def evaluate_checkpoint(
        cls, config: Config, weights: dict[str, Tensor], notes: dict[str, Any], device: torch.device
    ) -> dict[str, float]:
        """The metrics of a checkpoint on its data set's test images."""
        network = model.rebuild(config.model, config.view.crop, notes, weights).to(device)
        _, query, gallery = read_sources(config.data, config.view, device, train=False)
        many = len(query.images) + (len(gallery.images) if gallery else 0)
        with log.progress("embedding", many, 0, show=True) as bar:
            found, _, _ = measure(network, query, gallery, config, bar.advance)
        if not bool((found.first > 0).any()):
            raise UserError("--data: expected classes with two test images at least, found no image to look for")
        return found.summary(config.recall_at)

    @classmethod
    def report_sections(cls, run: Path, config: Config, beside: Sequence[Path]) -> list[tuple[str, str]]:
        """The result beside the paper's and other runs', and examples."""
        from rankgrad.lab.retrieval.report import sections

        return sections(run, config, beside)


def measure(
    network: nn.Module,
    query: ImageSource,
    gallery: ImageSource | None,
    config: Config,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[RetrievalMetrics, Tensor, Tensor | None]:
    """Embed queries and gallery, and rank them exactly."""
    queries = embed(network, query, config.view, config.precision, progress=progress)
    labels = query.images.labels.to(queries.device)
    others: tuple[Tensor, ...] = ()
    if gallery is not None:
        candidates = embed(
            network, gallery, config.view, config.precision, progress=lambda done: progress(len(queries) + done)
        )
        others = candidates, gallery.images.labels.to(queries.device)
    try:
        found = retrieval_metrics(queries, labels, *others)
    except NotANumberError as error:
        raise UserError(f"{error}: the network produced NaN or infinite embeddings") from None
    return found, queries, others[0] if others else None
