"""Retrieval of texts: the task ``text``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankgrad import distributed
from rankgrad.lab.retrieval import losses
from rankgrad.lab.retrieval.source import Sources
from rankgrad.lab.retrieval.splits import Items
from rankgrad.lab.retrieval.task import RetrievalTask
from rankgrad.lab.text import data, graded, model
from rankgrad.lab.text.config import Config
from rankgrad.lab.text.source import TextSource
from rankgrad.lab.text.trained import TrainedTextEmbedder
from rankgrad.lab.training.checkpoint import Checkpoint, fill
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.named import Named
from rankgrad.metrics import RetrievalMetrics

#: Arguments of the loss that ``auto`` means for labels and pairs: those that were chosen on BANKING77
#: (benchmarks/results, 2026-11-16-h200-text).
AUTO = {"log": True, "window": 0.4, "margin": 0.05}


class TextTask(RetrievalTask):
    """Fine-tune a sentence-transformers model."""

    config_class = Config
    item = "texts"
    same_shapes = False

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        if self.graded:
            self.headline = "NDCG@10"
            self.notes = [self._graded_counts(), *self.notes[1:]]

    def _length(self) -> str:
        pairs = f", batches of {self.batch.size // 2} pairs" if self.config.data.kind == "pairs" else ""
        return super()._length() + pairs

    @property
    def graded(self) -> bool:
        """Whether documents have grades."""
        return bool(self.config.data.kind == "graded")

    @classmethod
    def completed(cls, config: Config) -> Config:
        """With the kind of data that the file holds, and the loss for it."""
        kind = data.kind_of(config.data)
        loss = config.loss
        if loss.name == "auto":
            name, chosen = ("ndcg", {}) if kind == "graded" else ("ap", AUTO)
            given = loss.arguments()
            loss = Named(name=name, **({} if "lam" in given else chosen) | given)
        batch = config.batch.model_copy(update={"per_class": 2}) if kind == "pairs" else config.batch
        found = config.data.model_copy(update={"kind": kind})
        return config.model_copy(update={"data": found, "loss": loss, "batch": batch})

    @classmethod
    def located(cls, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        """With the model that a finished run has in its own folder: the first one may have moved."""
        own, section = folder / "model", settings.get("model")
        if not (own / "modules.json").is_file() or not isinstance(section, dict):
            return settings
        return {**settings, "model": {**section, "name": str(own)}}

    @classmethod
    def check(cls, config: Config) -> None:
        """Whether there are a file, and a model with weights."""
        data.file_of(config.data)
        model.check(config.model)
        if config.data.kind == "graded" and distributed.active():
            raise UserError("data.kind: graded lists train in one process, received several")

    @classmethod
    def check_loss(cls, config: Config) -> None:
        """Whether the loss fits the data."""
        if config.data.kind == "graded":
            graded.loss_of(config.loss)
        else:
            super().check_loss(config)

    @classmethod
    def sources(cls, config: Config, device: torch.device, *, train: bool) -> Sources:
        """The texts of the file; those to test on share no label, pair or query with those to train on."""
        if config.data.kind == "graded":
            lists, tested = data.read_graded(config.data)
            texts = [
                Items(part, torch.arange(len(part)), None, [text[:60] for text in part])
                for part in (tested.queries, tested.documents)
            ]
            query, gallery = (TextSource(items, device) for items in texts)
            query.judgements = tested
            return Sources(graded.GradedSource(lists, device) if train else None, query, gallery)
        splits = data.read(config.data, config.data.kind)
        wanted = (splits.train if train else None, splits.query, splits.gallery)
        training, query_, gallery_ = (None if items is None else TextSource(items, device) for items in wanted)
        assert query_ is not None
        return Sources(training, query_, gallery_)

    @classmethod
    def build(cls, config: Config) -> tuple[model.TextEmbedder, dict[str, Any]]:
        """The model of the folder."""
        return model.build(config.model, config.seed), {}

    @classmethod
    def rebuild(cls, checkpoint: Checkpoint) -> model.TextEmbedder:
        """The model of the folder, with the weights of a checkpoint."""
        network = model.build(checkpoint.config.model, checkpoint.config.seed)
        fill(network, checkpoint.weights)
        return network

    @classmethod
    def trained(cls, checkpoint: Checkpoint, device: torch.device) -> TrainedTextEmbedder:
        """From texts to embeddings."""
        return TrainedTextEmbedder(checkpoint.config, cls.rebuild(checkpoint), device)

    def build_loss(self, classes: int, size: int) -> nn.Module:
        """Of labels, or of graded lists."""
        if not self.graded:
            return super().build_loss(classes, size)
        assert isinstance(self.source, graded.GradedSource)
        queries = self.batch.size // self.batch.per_class
        return graded.GradedLoss(self.config.loss, self.source.judgements.to(self.device), queries)

    @classmethod
    def measure(
        cls, queries: Tensor, gallery: Tensor | None, sources: Sources, config: Config
    ) -> tuple[RetrievalMetrics, dict[str, float]]:
        """By labels, or by grades."""
        judgements = sources.query.judgements if isinstance(sources.query, TextSource) else None
        if judgements is None or gallery is None:
            return super().measure(queries, gallery, sources, config)
        return graded.measure(queries, gallery, judgements, config.recall_at)

    def relevant(self, query: int, other: int) -> bool:
        """Whether a test item belongs to a query."""
        if not self.graded:
            return super().relevant(query, other)
        assert isinstance(self.query, TextSource) and self.query.judgements is not None
        return bool(self.query.judgements.grades(torch.tensor([query]), torch.tensor([other])) > 0)

    def finish(self, folder: Path) -> None:
        """The examples of the report, and the model as sentence-transformers loads it."""
        super().finish(folder)
        if distributed.process_index() == 0:
            model.save(self.network, folder / "model")

    def _graded_counts(self) -> str:
        assert isinstance(self.source, graded.GradedSource) and self.gallery is not None
        lists = self.source.judgements
        training = f"trains on {len(lists.query):,} graded documents of {len(lists.queries):,} queries"
        return f"{training}, tests on {len(self.query):,} queries that search {len(self.gallery):,} documents"

    @classmethod
    def listing(cls) -> dict[str, dict[str, str]]:
        """Losses and kinds of data, a line each."""
        return {
            "loss": {name: line for name, (_, line) in losses.OURS.items()}
            | {
                "ndcg": "NDCG, for graded lists",
                "auto": "ap (its log form) for labels and pairs, ndcg for graded lists",
            },
            "data": {kind: f"a file with the columns {', '.join(roles)}" for kind, roles in data.KINDS.items()},
        }
