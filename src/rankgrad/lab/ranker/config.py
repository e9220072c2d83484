"""Settings of a ranker's run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rankgrad.lab.training.config import Count, Many, NonNegative, Positive, RunConfig, Section, Width
from rankgrad.lab.training.named import Named

Baseline = Literal["lambdarank", "listnet", "ranknet", "approxndcg", "lightgbm"]
BASELINES: tuple[Baseline, ...] = ("lambdarank", "listnet", "ranknet", "lightgbm")
Share = Annotated[float, Field(gt=0, lt=1)]


class Data(Section):
    """Which queries, and how they are read."""

    root: str | None = None  # a file, or a folder with train, vali and test files
    query: str = "query"  # CSV and Parquet: the column that says which query a row belongs to
    label: str = "label"  # CSV and Parquet: the column of grades
    features: tuple[str, ...] = ()  # CSV and Parquet: the columns to score by; none given: all others
    ignore: tuple[str, ...] = ()  # CSV and Parquet: columns that are no features
    validation_share: Share = 0.2  # share of the queries to validate on, where there is no file for it
    test_share: Share = 0.2  # share of the queries to test on, where there is no file for it
    split_seed: Annotated[int, Field(ge=0)] = 0  # seed of the choice of these queries


class Model(Section):
    """A multi-layer perceptron from features to a score."""

    hidden: tuple[Width, ...] = (64, 32)  # width of each hidden layer; [] for a linear model
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.3  # dropout after each hidden layer
    scale: Literal["feature", "log", "query", "none"] = "feature"  # how features are scaled


class Batch(Section):
    """How batches are drawn."""

    queries: Many = 32  # queries in a batch


class Config(RunConfig):
    """All settings of a ranker's run."""

    task: Literal["ranker"]
    data: Data = Data()
    model: Model = Model()
    batch: Batch = Batch()
    loss: Named
    ndcg_at: tuple[Count, ...] = (1, 5, 10)  # the k of NDCG@k; the last one chooses the best checkpoint
    gain: Literal["linear", "exponential"] = "exponential"  # gain of NDCG: the grade, or 2^grade - 1
    relevant: Positive = 1.0  # lowest relevant grade, for MAP, MRR and losses of binary relevance
    baselines: tuple[Baseline, ...] = BASELINES  # trained after the run and reported beside it; [] for none
    target: NonNegative | None = None  # test NDCG to expect, for the report

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if not self.ndcg_at:
            raise ValueError("ndcg_at must have a cut-off, the last one chooses the best checkpoint")
        if self.data.validation_share + self.data.test_share >= 1:
            raise ValueError(
                f"data.validation_share = {self.data.validation_share} and data.test_share = "
                f"{self.data.test_share} must leave queries to train on"
            )
        return self
