"""Settings of a retrieval run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from rankgrad.lab.training.config import Count, NonNegative, Positive, RunConfig, Section

Fraction = Annotated[float, Field(gt=0, le=1)]


class Data(Section):
    """Which images, and how they are read."""

    name: Literal["digits", "folder", "cub", "sop", "inshop"]
    root: str | None = None
    counts: Literal["protocol", "any"] = "protocol"  # refuse a data set of another size than the official one
    broken: Literal["refuse", "skip"] = "refuse"  # files that are missing or cannot be decoded
    cache: Literal["ram", "device", "none"] = "ram"  # where decoded images stay
    workers: Count = 8  # threads that decode
    test_share: Annotated[float, Field(gt=0, le=1)] = 0.5  # folder: share of the classes to test on, 1 for eval
    split_seed: Annotated[int, Field(ge=0)] = 0  # folder: which classes
    hold_out: Annotated[float, Field(ge=0, lt=1)] = 0.0  # test on this share of the *training* classes instead


class View(Section):
    """From a decoded image to what the network sees."""

    resize: Count = 256
    shape: Literal["short", "square"] = "short"  # short side to `resize`, or both sides
    crop: Count = 224
    augment: Literal["resized_crop", "crop", "none"] = "resized_crop"
    scale: Fraction = 0.2  # resized_crop: smallest share of the area
    flip: bool = True


class Batch(Section):
    """How batches are drawn."""

    size: Count = 128
    per_class: Count = 4
    sampler: Literal["classes", "superlabels"] = "classes"
    batches_per_pair: Count = 10  # superlabels


class Model(Section):
    """The network."""

    backbone: str = "resnet50"
    weights: str = "library"  # library, none, or a safetensors file
    embedding: Count = 512
    batch_norm: Literal["frozen", "train"] = "frozen"


class Named(Section):
    """A loss or miner by name, with its own arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    def arguments(self) -> dict[str, object]:
        """Everything but the name."""
        return dict(self.model_extra or {})


class Config(RunConfig):
    """All settings of a retrieval run."""

    task: Literal["retrieval"]
    data: Data
    view: View = View()
    batch: Batch = Batch()
    model: Model = Model()
    loss: Named
    miner: Named | None = None
    embedding_lr: Positive = 10.0  # times optim.lr, for the embedding layer
    proxy_lr: Positive = 100.0  # times optim.lr, for parameters of the loss
    recall_at: tuple[Count, ...] = (1, 2, 4, 8)
    target: NonNegative | None = None  # R@1 to expect, for the report

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.batch.size % self.batch.per_class:
            raise ValueError(
                f"batch.size = {self.batch.size} must be a multiple of batch.per_class = {self.batch.per_class}"
            )
        if self.batch.sampler == "superlabels" and self.batch.size % (2 * self.batch.per_class):
            raise ValueError(
                f"batch.size = {self.batch.size} must be a multiple of 2 * batch.per_class for super-labels"
            )
        if self.view.crop > self.view.resize:
            raise ValueError(f"view.crop = {self.view.crop} must not exceed view.resize = {self.view.resize}")
        if 1 not in self.recall_at:
            raise ValueError(
                f"recall_at must have 1, R@1 chooses the best checkpoint; received {list(self.recall_at)}"
            )
        if self.miner is not None and not self.loss.name.startswith("pml:"):
            raise ValueError("miner is for losses of pytorch-metric-learning (loss=pml:...)")
        return self
