"""Retrieval as a task of the training loop, whatever is embedded: sampler, loss, evaluation and report."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankgrad import distributed
from rankgrad._check import NotANumberError
from rankgrad.lab.retrieval import batches, losses, watch
from rankgrad.lab.retrieval.config import SCRATCH_LR
from rankgrad.lab.retrieval.source import Draw, Source, Sources
from rankgrad.lab.training import log, optim
from rankgrad.lab.training.checkpoint import Checkpoint
from rankgrad.lab.training.errors import DataError, TrainingError, UserError
from rankgrad.lab.training.task import Task, check_batch_size
from rankgrad.metrics import RetrievalMetrics, retrieval_metrics

#: A run of fewer steps in all is reported.
FEW_STEPS = 50
#: Losses that rank the items of a batch alone.
_OF_PAIRS = ("recall", "ap", "pair")
#: Items that are embedded at a time.
AT_ONCE = 256

_NOTHING_TO_FIND = "--data: expected classes with two test items at least, found none"


def embed(
    network: nn.Module,
    source: Source,
    precision: str,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> Tensor:
    """Embeddings of all items of a source, not augmented, ``[N, dim]`` float32; processes share the work.

    ``progress`` is called with the number of items done so far.
    """
    network.eval()
    rows = torch.arange(len(source)).tensor_split(distributed.count())[distributed.process_index()]
    mine = rows.split(AT_ONCE)
    parts = []
    with torch.inference_mode(), optim.autocast(precision, source.device):
        for at, now in enumerate(mine):
            inputs = source.inputs(now, mine[at + 1] if at + 1 < len(mine) else None)
            parts.append(network(inputs).float())
            progress(sum(map(len, parts)))
    return distributed.gather(torch.cat(parts).clone())


class Evaluation(NamedTuple):
    """The metrics of each query, their summary in percent, and the embeddings of queries and gallery."""

    metrics: RetrievalMetrics
    summary: dict[str, float]
    queries: Tensor
    gallery: Tensor | None


class RetrievalTask(Task):
    """Train a network to embed items; see :class:`rankgrad.lab.training.task.Task`.

    A kind of input gives :meth:`sources`, :meth:`build` and :meth:`rebuild`: items as (inputs, labels, ids), and a
    network from inputs to embeddings ``[B, dim]`` whose ``backbone`` holds what is pretrained. All else is shared.

    Args:
        config: The settings.
        device: Where to train.
    """

    headline = "R@1"
    tie_break = "mAP@R"  # a small or easy test part has many evaluations of the same R@1
    same_shapes = True
    item: str  #: what an item is called, in the plural

    def __init__(self, config: Any, device: torch.device) -> None:
        self.config = config = self.completed(config)
        self.device = device
        # What can go wrong shows before the data is read, which may take long.
        self.check_loss(config)
        self.check(config)
        self.network, self._metadata = self.build(config)
        train, self.query, self.gallery = self.sources(config, device, train=True)
        assert train is not None
        train.items = train.items.renumbered()
        self.source = train
        labels = train.items.labels
        if train.items.classes() < 2 or int(labels.bincount().max()) < 2:
            found = f"{len(labels):,} {self.item} of {train.items.classes():,} classes"
            raise DataError(
                f"--data: expected classes to train on, two at least, and two {self.item} of one; found "
                f"{found}{self._other_split()}"
            )
        tested = self.query.items
        if self.gallery is None and tested.class_names and len(tested.alone()) == tested.classes():
            raise DataError(_NOTHING_TO_FIND)
        self.batch, fitted = batches.fitted(config.batch, train.items, distributed.count())
        check_batch_size(self.batch.size)
        self.sampler = batches.sampler_of(self.batch, train.items, config.seed)
        self.steps_per_epoch = len(self.sampler)
        self.items_per_step = self.batch.size
        self.tested_items: float = len(self.query) + len(self.gallery or ())
        self.parts: dict[str, Tensor] = {}
        self.network.to(device)
        if distributed.active() and device.type == "cuda" and not getattr(self.network, "freeze_batch_norm", True):
            # One batch, whatever the number of processes; torch has no such norm for CPUs.
            self.network = nn.SyncBatchNorm.convert_sync_batchnorm(self.network)
        if device.type == "cuda":
            self.network = self.network.to(memory_format=torch.channels_last)
        classes, size = int(labels.max()) + 1, self.network.embedding_size
        self.loss = self.build_loss(classes, size).to(device)
        self._watch = watch.Watch(
            watch.advice(config.loss.name, config.loss.arguments()), config.epochs * self.steps_per_epoch
        )
        self.notes = [
            self._counts(),
            self._length(),
            *self._warnings(),
            *([fitted] if fitted else []),
            *self._setting_warnings(),
        ]

    @classmethod
    def check_loss(cls, config: Any) -> None:
        """Whether there is such a loss, with such arguments."""
        losses.build(config.loss, config.miner, classes=4, embedding=4)

    @classmethod
    def loss_arguments(cls, config: Any) -> dict[str, tuple[Any, str]]:
        """From the signature and the docstring of the loss."""
        return losses.arguments_of(config.loss)

    def build_loss(self, classes: int, size: int) -> nn.Module:
        """A Module ``(embeddings, labels, ids) -> loss``; labels are 0 ... classes - 1."""
        return losses.build(self.config.loss, self.config.miner, classes=classes, embedding=size)

    @classmethod
    def check(cls, config: Any) -> None:
        """Whether the data is where the settings say, before anything is built or read."""

    @classmethod
    def pretrained(cls, config: Any) -> bool:
        """Whether the backbone is pretrained, so that gradients of an untrained head could harm it."""
        return True

    @classmethod
    @abstractmethod
    def sources(cls, config: Any, device: torch.device, *, train: bool) -> Sources:
        """The items of these settings; without ``train`` only those to test on."""

    @classmethod
    @abstractmethod
    def build(cls, config: Any) -> tuple[Any, dict[str, Any]]:
        """The network to train, and what a checkpoint must hold to build it again."""

    @classmethod
    @abstractmethod
    def rebuild(cls, checkpoint: Checkpoint) -> Any:
        """The network of a checkpoint."""

    def _counts(self) -> str:
        def of(source: Source) -> str:
            classes = source.items.classes()
            return f"{len(source):,} {self.item} of {classes:,} {'class' if classes == 1 else 'classes'}"

        counts = f"trains on {of(self.source)}, tests on {of(self.query)}"
        return counts if self.gallery is None else f"{counts}, which search {len(self.gallery):,} {self.item}"

    def _length(self) -> str:
        network = "a pretrained network" if self.pretrained(self.config) else "a network from scratch"
        epochs, steps = log.counted(self.config.epochs, "epoch"), log.counted(self.steps_per_epoch, "step")
        return f"trains {network}: {epochs} x {steps}, lr={self.config.optim.lr:g}"

    def _warnings(self) -> list[str]:
        """Warnings about data and network: classes of a single item, or on both sides of the split."""
        warnings = self._single_items("training", self.source, "relevant to no other item")
        if self.gallery is None:
            warnings += self._single_items("test", self.query, "not used as a query")
            if self.query.items.classes() == 1:
                of_one = f"all test {self.item} are of one class, so every retrieved one is relevant"
                warnings.append(of_one + self._other_split())
        return warnings + self._trained_on(self.source.items.class_names, self.query)

    @classmethod
    def _trained_on(cls, classes: Sequence[str], query: Source) -> list[str]:
        """A warning about test classes that have names of training classes, if there are any."""
        tested = set(query.items.renumbered().class_names)
        if not (both := len(tested.intersection(classes))):
            return []
        return [
            f"{both:,} of {len(tested):,} test classes are training classes too, by their names: the result does "
            f"not show how {cls.item} of new classes are found"
        ]

    def _single_items(self, part: str, source: Source, why: str) -> list[str]:
        """A warning about classes with a single item, if there are any; ``why`` they do not help."""
        alone = source.items.alone()
        if not alone:
            return []
        names = source.items.class_names
        shown = ", ".join(names[label] if names else str(label) for label in alone[:5])
        more = ", ..." if len(alone) > 5 else ""
        classes = f"{part} class" if len(alone) == 1 else f"{part} classes"
        return [f"{len(alone)} {classes} with a single item ({why}): {shown}{more}{self._other_split()}"]

    def _other_split(self) -> str:
        """How classes come to train or to test, where these settings choose them."""
        return ""

    def _setting_warnings(self) -> list[str]:
        """Warnings about settings: too few steps, or a network from scratch with the rate of a pretrained one."""
        steps, rate = self.config.epochs * self.steps_per_epoch, self.config.optim.lr
        warnings = []
        if steps < FEW_STEPS and self.config.epochs > 1:  # one epoch is a trial
            enough = -(-2 * FEW_STEPS // self.steps_per_epoch)
            begin = f"epochs={self.config.epochs} is {steps} steps in all"
            warnings.append(f"{begin}, which may be too few: try epochs={enough}")
        remembers = self.config.loss.arguments().get("memory")
        if self.batch.per_class == 1 and self.config.loss.name in _OF_PAIRS and not remembers:
            begin = "per_class=1: no item has another one of its class in a batch"
            warnings.append(f"{begin}, so loss={self.config.loss.name} has nothing to rank: try per_class=4")
        if rate < SCRATCH_LR / 30 and not self.pretrained(self.config):
            begin = f"lr={rate:g} is a learning rate for pretrained networks"
            warnings.append(f"{begin}, and this one starts from scratch (weights=none): try lr={SCRATCH_LR:g}")
        return warnings

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The backbone, the layers behind it and the loss's own parameters, each at its own rate."""
        backbone = [p for p in self.network.backbone.parameters() if p.requires_grad]
        known = {id(p) for p in self.network.backbone.parameters()}
        head = [p for p in self.network.parameters() if id(p) not in known]
        proxies = list(self.loss.parameters())
        waits = self.pretrained(self.config) and (head or proxies)
        begin = min(self.config.head_epochs, self.config.epochs / 2) if waits else 0.0
        return [
            {"params": backbone, "begin": begin},
            {"params": head, "scale": self.config.embedding_lr},
            {"params": proxies, "scale": self.config.proxy_lr / self.config.optim.lr, "weight_decay": 0.0},
        ]

    def batch_loss(self, network: nn.Module, step: int) -> Tensor:
        """Embed this process's part of a batch, and rank it against the whole."""
        everyone = self.sampler.at(step)
        mine, following = distributed.share(everyone), distributed.share(self.sampler.at(step + 1))
        draw = Draw.of(self.config.seed, step, len(everyone))
        inputs, labels, ids = self.source.batch(mine, following, draw)
        embeddings = network(inputs)
        parts = self.parts = {"spread": watch.spread(embeddings), "zero_gradients": watch.unknown(self.device)}
        if self.device.type == "cpu" and not bool(embeddings.isfinite().all()):
            lost: Tensor = embeddings.sum() * torch.nan  # the loop stops, with a message
            return lost
        if embeddings.requires_grad:
            embeddings.register_hook(lambda gradient: parts.update(zero_gradients=watch.zero_share(gradient)))
        loss: Tensor = self.loss(embeddings, labels, ids)
        return loss

    def watch(self, rows: Sequence[Mapping[str, float]]) -> list[str]:
        """Stop a run whose embeddings collapsed; say once where hardly any of them gets a gradient."""
        return self._watch.read(rows)

    @classmethod
    def evaluate_network(
        cls, network: nn.Module, sources: Sources, config: Any, progress: Callable[[int], None] = lambda done: None
    ) -> Evaluation:
        """Embed queries and gallery, and measure them."""
        queries = embed(network, sources.query, config.precision, progress=progress)
        done, gallery = len(queries), None
        if sources.gallery is not None:
            gallery = embed(network, sources.gallery, config.precision, progress=lambda n: progress(done + n))
        try:
            return Evaluation(*cls.measure(queries, gallery, sources, config), queries, gallery)
        except NotANumberError as error:
            what = f"{error}: the network produced NaN or infinite embeddings"
            raise TrainingError(what, "Try a lower lr, optim.clip, or precision=fp32.") from None

    @classmethod
    def measure(
        cls, queries: Tensor, gallery: Tensor | None, sources: Sources, config: Any
    ) -> tuple[RetrievalMetrics, dict[str, float]]:
        """Metrics of each query, ranked exactly, and their summary in percent."""
        labels, candidates = sources.query.items.labels.to(queries.device), None
        if sources.gallery is not None:
            candidates = sources.gallery.items.labels.to(queries.device)
        found = retrieval_metrics(queries, labels, gallery, candidates)
        return found, found.summary(config.recall_at)

    def evaluate(self) -> dict[str, float]:
        """R@K, mAP@R and AP in percent."""
        return self.evaluate_network(self.network, Sources(None, self.query, self.gallery), self.config).summary

    def relevant(self, query: int, other: int) -> bool:
        """Whether a test item belongs to a query: row numbers of the queries and of the gallery."""
        others = self.query if self.gallery is None else self.gallery
        return bool(self.query.items.labels[query] == others.items.labels[other])

    def metadata(self) -> dict[str, Any]:
        """What the network needs to be built again, and the names of the classes it was trained on."""
        named = self.query.items.class_names  # graded texts have none: there the training part's are its queries
        return {**self._metadata, "training_classes": list(self.source.items.class_names) if named else []}

    def describe(self) -> dict[str, Any]:
        """What the report says about the data."""
        counts = {"training items": len(self.source), "training classes": self.source.items.classes()}
        counts |= {"queries": len(self.query), "test classes": self.query.items.classes()}
        if self.gallery is not None:
            counts["gallery items"] = len(self.gallery)
        parts = (self.source, self.query, *([] if self.gallery is None else [self.gallery]))
        digest = hashlib.sha256(b"".join(part.items.digest() for part in parts)).hexdigest()
        data = {"counts": counts, "batch": self.batch.size, "items": digest, "notes": self.notes}
        return {**data, "headline": self.headline, "advice": self._advice()}

    def _advice(self) -> str:
        """What to try where training made the network worse."""
        if self.pretrained(self.config):
            return "try a lower lr"
        return f"try a {'higher' if self.config.optim.lr < SCRATCH_LR else 'lower'} lr, or more epochs"

    def finish(self, folder: Path) -> None:
        """Write the examples of the report."""
        from rankgrad.lab.retrieval.report import write_examples

        sources = Sources(None, self.query, self.gallery)
        found = self.evaluate_network(self.network, sources, self.config)
        if distributed.process_index() == 0:
            write_examples(folder, found.metrics, found.queries, found.gallery, sources, self.relevant)

    @classmethod
    def evaluate_checkpoint(cls, checkpoint: Checkpoint, device: torch.device) -> dict[str, float]:
        """The metrics of a checkpoint on its data set's test items."""
        config = cls.completed(checkpoint.config)
        network = cls.rebuild(checkpoint._replace(config=config)).to(device)
        sources = cls.sources(config, device, train=False)
        many = len(sources.query) + (len(sources.gallery) if sources.gallery else 0)
        with log.progress("embedding", many, 0, show=True) as bar:
            if sources.query.items.class_names:  # neither pairs nor graded texts have classes
                bar.say(f"tests on {len(sources.query):,} {cls.item} of {sources.query.items.classes():,} classes")
                for warning in cls._trained_on(checkpoint.metadata.get("training_classes", ()), sources.query):
                    bar.say(warning)
            found = cls.evaluate_network(network, sources, config, bar.advance)
        if not bool((found.metrics.first > 0).any()):
            raise UserError(_NOTHING_TO_FIND)
        return found.summary

    @classmethod
    def report_sections(cls, run: Path, config: Any, beside: Sequence[Path]) -> list[tuple[str, str]]:
        """The result beside published ones and other runs', and examples."""
        from rankgrad.lab.retrieval.report import sections

        return sections(run, config, beside, *cls.published(config))

    @classmethod
    def published(cls, config: Any) -> tuple[list[tuple[str, list[float | None]]], str]:
        """Published rows ``(method, R@K for K in config.recall_at)`` to stand beside a run's, and a note."""
        return [], ""
