"""Settings that all retrieval runs have, whatever is embedded."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rankgrad.lab.training.config import Count, Many, NonNegative, Positive, RunConfig, Section
from rankgrad.lab.training.named import Named
from rankgrad.parameters import PROXY_LR

#: A learning rate for networks that start from scratch.
SCRATCH_LR = 3e-3
#: A learning rate; before 0.2 the one of proxies was a multiple, in the thousands.
Rate = Annotated[float, Field(gt=0, le=1)]


class Batch(Section):
    """How batches are drawn."""

    size: Many = 128  # items in a batch, of all processes; fewer where there are too few classes
    per_class: Many = 4  # items of a class in a batch; of pairs of texts always 2
    sampler: Literal["classes", "superlabels"] = "classes"  # superlabels: a batch from two super-labels
    batches_per_pair: Count = 10  # superlabels: batches from each pair of super-labels in an epoch


class RetrievalConfig(RunConfig):
    """What every retrieval run has. A kind of input adds its data, its network and how it is shown to it."""

    evaluate_first: bool = True  # whether to evaluate before training as well, to warn if R@1 falls
    batch: Batch = Batch()
    loss: Named  # what is minimised
    miner: Named | None = None  # a miner of pytorch-metric-learning, for its losses
    embedding_lr: Positive = 1.0  # learning rate of the layers behind the backbone, times optim.lr
    proxy_lr: Rate = PROXY_LR  # learning rate of the loss's own parameters (proxies), scheduled alike
    head_epochs: NonNegative = 1.0  # epochs at the start that train the head alone, at most half of `epochs`
    recall_at: tuple[Count, ...] = (1, 2, 4, 8)  # the K of R@K
    target: NonNegative | None = None  # R@1 to expect, for the report

    @model_validator(mode="after")
    def _batches_fit(self) -> RetrievalConfig:
        if self.batch.size % self.batch.per_class:
            raise ValueError(
                f"batch.size = {self.batch.size} must be a multiple of batch.per_class = {self.batch.per_class}"
            )
        if self.batch.sampler == "superlabels" and self.batch.size % (2 * self.batch.per_class):
            raise ValueError(
                f"batch.size = {self.batch.size} must be a multiple of 2 * batch.per_class for super-labels"
            )
        if 1 not in self.recall_at:
            raise ValueError(
                f"recall_at must have 1, R@1 chooses the best checkpoint; received {list(self.recall_at)}"
            )
        if self.miner is not None and not self.loss.name.startswith("pml:"):
            raise ValueError("miner is for losses of pytorch-metric-learning (loss=pml:...)")
        return self
