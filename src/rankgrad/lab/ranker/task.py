"""Learning to rank as a task of the training loop."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankgrad import distributed
from rankgrad.lab.ranker import data, losses, model
from rankgrad.lab.ranker.config import Config, Data
from rankgrad.lab.ranker.data import Queries, QuerySplits
from rankgrad.lab.ranker.trained import TrainedRanker
from rankgrad.lab.training.checkpoint import Checkpoint, fill, write_text
from rankgrad.lab.training.errors import TrainingError, UserError, printable
from rankgrad.lab.training.reuse import read_once
from rankgrad.lab.training.task import Task
from rankgrad.metrics import average_precision, ndcg, reciprocal_rank

#: Items that are scored at a time.
AT_ONCE = 2**18


@read_once
def read(config: Data) -> QuerySplits:
    """The data set; read once for all seeds of a command."""
    return data.read(config)


def prepared(queries: Queries, config: Config, device: torch.device) -> Queries:
    """Queries on the device, scaled by query where the settings say so."""
    queries = queries.to(device)
    return model.within_query(queries) if config.model.scale == "query" else queries


class RankerTask(Task):
    """Train a network that scores the items of queries; see :class:`rankgrad.lab.training.task.Task`.

    Every evaluation judges the validation queries, which choose the best checkpoint, and the test queries, which
    choose nothing.

    Args:
        config: The settings.
        device: Where to train.
    """

    config_class = Config
    same_shapes = False

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.headline = f"validation NDCG@{config.ndcg_at[-1]}"
        if distributed.count() > 1:
            raise UserError(f"ranker: trains in one process, there are {distributed.count()}")
        self.loss = losses.build(config.loss, config.relevant).to(device)
        split = read(config.data)
        self.names, self.digest = split.names, split.digest
        for part in ("train", "validation", "test"):
            _require_relevant(part, getattr(split, part), config.relevant)
        train = prepared(split.train, config, device)
        self.validation, self.test = (prepared(part, config, device) for part in (split.validation, split.test))
        self.network = model.build(len(split.names), config.model, config.seed).to(device)
        if config.model.scale in ("feature", "log"):
            self.network.fit_scale(train.features)
        # A query whose items all have one grade has no order to learn.
        self.train = train.take((_spans(train) > 0).nonzero().flatten())
        if not len(self.train):
            raise UserError("--data: expected training queries with items of different grades, found none")
        self.batch = min(config.batch.queries, len(self.train))
        self.steps_per_epoch = len(self.train) // self.batch
        self.items_per_step = round(self.batch * len(self.train.grades) / len(self.train))
        self.tested_items = len(self.validation.grades) + len(self.test.grades)
        self.parts: dict[str, Tensor] = {}
        counts = (_counts(part, config.relevant) for part in (split.train, split.validation, split.test))
        self.notes = ["trains on {}, validates on {}, tests on {}".format(*counts)]

    def parameter_groups(self) -> list[dict[str, Any]]:
        """All parameters at one rate; biases without weight decay."""
        parameters = list(self.network.parameters())
        return [
            {"params": [p for p in parameters if p.ndim > 1]},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]

    def queries_at(self, step: int) -> Tensor:
        """Which training queries the batch of a step has: each epoch in an order of its own."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.config.seed, epoch]).permutation(len(self.train))
        return torch.from_numpy(order[within * self.batch : (within + 1) * self.batch]).to(self.device)

    def batch_loss(self, network: nn.Module, step: int) -> Tensor:
        """Score the items of a batch of queries, and rank them."""
        batch = self.train.take(self.queries_at(step))
        scores = network(batch.features)
        if self.device.type == "cpu" and not bool(scores.isfinite().all()):
            lost: Tensor = scores.sum() * torch.nan  # the loop stops, with a message
            return lost
        loss: Tensor = self.loss(scores, batch.grades, batch.groups)
        return loss

    def evaluate(self) -> dict[str, float]:
        """In percent: NDCG of the validation queries; NDCG@k, MAP and MRR of the test queries."""
        return {
            self.headline: self.measure("validation")[f"NDCG@{self.config.ndcg_at[-1]}"],
            **self.measure("test"),
        }

    def measure(self, part: str) -> dict[str, float]:
        """NDCG@k, MAP and MRR in percent, of the ``validation`` or the ``test`` queries."""
        return measure(self.network, {"validation": self.validation, "test": self.test}[part], self.config)

    def describe(self) -> dict[str, Any]:
        """How much data there is, and what chooses the best checkpoint."""
        parts = {"training": self.train, "validation": self.validation, "test": self.test}
        counts = {f"{name} queries": len(part) for name, part in parts.items()}
        digest = hashlib.sha256()
        for part in parts.values():
            digest.update(part.grades.cpu().numpy().tobytes())
        return {"counts": counts, "items": digest.hexdigest(), "notes": self.notes, "headline": self.headline}

    def metadata(self) -> dict[str, Any]:
        """The features, in their order, and which queries were split."""
        return {"features": self.names, "queries": self.digest}

    def finish(self, folder: Path) -> None:
        """Write what the report shows of single queries, and train the baselines."""
        from rankgrad.lab.ranker import comparison
        from rankgrad.lab.ranker.report import examples

        scores = score(self.network, self.test)
        write_text(folder / "queries.json", json.dumps(examples(self.test, scores, self.config)))
        comparison.train(self, folder)

    @classmethod
    def loss_arguments(cls, config: Any) -> dict[str, tuple[Any, str]]:
        """From the signature and the docstring of the loss."""
        return losses.arguments_of(config.loss)

    @classmethod
    def listing(cls) -> dict[str, dict[str, str]]:
        """Losses, a line each."""
        ours = {name: line for name, (_, _, line) in losses.OURS.items()}
        return {"loss": ours | {name: f"baseline: {line}" for name, (_, line) in losses.BASELINES.items()}}

    @classmethod
    def evaluate_checkpoint(cls, checkpoint: Checkpoint, device: torch.device) -> dict[str, float]:
        """The metrics of a checkpoint on the test queries of its data set, or on all queries of another file."""
        config, _, metadata = checkpoint
        known = metadata.get("queries")
        if known is None and config.data.root != metadata["config"]["data"]["root"]:  # of an older version
            known = ""
        split = data.read(config.data, known)
        if split.names != metadata["features"]:
            odd = sorted(set(split.names) ^ set(metadata["features"]))
            difference = f"only one of them has {', '.join(odd[:5])}" if odd else "they are in another order"
            raise UserError(
                f"--data: expected the {len(metadata['features'])} features of the checkpoint, {difference}"
            )
        _require_relevant("test", split.test, config.relevant)
        whole = "" if len(split.train) else f", all of {config.data.root} (it is not the file of the run)"
        print(printable(f"tests on {_counts(split.test, config.relevant)}{whole}"))
        network = rebuild(checkpoint).to(device)
        return measure(network, prepared(split.test, config, device), config)

    @classmethod
    def trained(cls, checkpoint: Checkpoint, device: torch.device) -> TrainedRanker:
        """From features to scores."""
        return TrainedRanker(checkpoint.config, rebuild(checkpoint), device, checkpoint.metadata["features"])

    @classmethod
    def report_sections(cls, run: Path, config: Config, beside: Sequence[Path]) -> list[tuple[str, str]]:
        """The result before and after training beside baselines and other runs, and single queries."""
        from rankgrad.lab.ranker.report import sections

        return sections(run, config, beside)


def rebuild(checkpoint: Checkpoint) -> model.Ranker:
    """The network of a checkpoint."""
    network = model.Ranker(len(checkpoint.metadata["features"]), checkpoint.config.model)
    fill(network, checkpoint.weights)
    return network


def score(network: nn.Module, queries: Queries) -> Tensor:
    """The score of every item, ``[N]``."""
    network.eval()
    with torch.inference_mode():
        return torch.cat([network(part) for part in queries.features.split(AT_ONCE)])


def measure(network: nn.Module, queries: Queries, config: Config) -> dict[str, float]:
    """NDCG@k, MAP and MRR in percent, mean over the queries with something relevant."""
    scores = score(network, queries)
    if not bool(scores.isfinite().all()):
        raise TrainingError(
            "the network produced scores that are NaN or infinite", "Try a lower lr or optim.clip."
        )
    return figures(scores, queries, config)


def figures(scores: Tensor, queries: Queries, config: Config) -> dict[str, float]:
    """The same for scores ``[N]`` of any origin."""
    grades, groups = queries.grades, queries.groups
    found = {f"NDCG@{k}": ndcg(scores, grades, k=k, gain=config.gain, groups=groups) for k in config.ndcg_at}
    relevance = grades >= config.relevant
    found["MAP"] = average_precision(scores, relevance, groups=groups)
    found["MRR"] = reciprocal_rank(scores, relevance, groups=groups)
    return {name: 100 * float(value) for name, value in found.items()}


def _spans(queries: Queries) -> Tensor:
    """The highest grade of each query less its lowest."""
    empty = queries.grades.new_zeros(len(queries))
    high = empty.scatter_reduce(0, queries.groups, queries.grades, "amax", include_self=False)
    return high - empty.scatter_reduce(0, queries.groups, queries.grades, "amin", include_self=False)


def _counts(queries: Queries, relevant: float) -> str:
    """How many items and queries there are; only queries with something relevant are measured."""
    some = int(queries.groups[queries.grades >= relevant].unique().numel())
    fewer = "" if some == len(queries) else f" ({some:,} with something relevant)"
    return f"{len(queries.grades):,} items of {len(queries):,} queries{fewer}"


def _require_relevant(part: str, queries: Queries, relevant: float) -> None:
    if not bool((queries.grades >= relevant).any()):
        highest = float(queries.grades.max())
        raise UserError(
            f"--data: expected {part} queries with an item of a grade of at least {relevant:g} (the setting "
            f"relevant), the highest grade there is {highest:g}"
        )
