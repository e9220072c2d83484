"""Settings of a run on texts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rankgrad.lab.retrieval.config import Batch, Named, RetrievalConfig
from rankgrad.lab.training.config import Count, Section

Fraction = Annotated[float, Field(gt=0, lt=1)]


class Data(Section):
    """Which texts, and what their columns are called."""

    root: str | None = None  # a .csv, .tsv or .jsonl file (--data)
    test: str | None = None  # a file of the same columns to test on; without one a part of `root` is kept apart
    kind: Literal["auto", "labels", "pairs", "graded"] = "auto"  # auto: by the columns there are
    text: str = "text"  # labels: the column of the texts
    label: str = "label"  # labels: the column of their labels
    anchor: str = "anchor"  # pairs: the column of the first texts
    positive: str = "positive"  # pairs: the column of the texts that belong to them
    query: str = "query"  # graded: the column of the queries
    document: str = "document"  # graded: the column of the documents
    grade: str = "grade"  # graded: the column of the grades, numbers >= 0
    longest: Count = 100_000  # characters; a longer text is an error
    test_share: Fraction | None = None  # kept apart: of the labels (half of them), pairs or queries (a fifth)
    split_seed: Annotated[int, Field(ge=0)] = 0  # which of them


class Model(Section):
    """The network."""

    name: str | None = None  # the folder of a sentence-transformers model
    max_length: Count | None = None  # tokens of a text that are read; without it the model's own


class Config(RetrievalConfig):
    """All settings of a run on texts."""

    task: Literal["text"]
    data: Data = Data()
    model: Model = Model()
    batch: Batch = Batch(size=64, per_class=4)
    loss: Named = Named(name="auto")  # auto: pair for labels and pairs, ndcg for graded lists
