"""Settings of a run on texts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rankgrad.lab.retrieval.config import Batch, RetrievalConfig
from rankgrad.lab.training.config import Count, Section
from rankgrad.lab.training.named import Named

Fraction = Annotated[float, Field(gt=0, lt=1)]


class Data(Section):
    """Which texts, and what their columns are called."""

    root: str | None = None  # a .csv, .tsv or .jsonl file (--data)
    test: str | None = None  # a file with the same columns to test on; not set: a part of `root`
    kind: Literal["auto", "labels", "pairs", "graded"] = "auto"  # auto: by the columns of the file
    text: str = "text"  # labels: the column of the texts
    label: str = "label"  # labels: the column of their labels
    anchor: str = "anchor"  # pairs: the column of the first texts
    positive: str = "positive"  # pairs: the column of the texts that belong to them
    query: str = "query"  # graded: the column of the queries
    document: str = "document"  # graded: the column of the documents
    grade: str = "grade"  # graded: the column of the grades, numbers >= 0
    longest: Count = 100_000  # largest length of a text in characters; a longer one is an error
    test_share: Fraction | None = None  # to test on: of the labels (default 1/2), pairs or queries (1/5)
    split_seed: Annotated[int, Field(ge=0)] = 0  # seed of the choice of test texts


class Model(Section):
    """The network."""

    name: str | None = None  # a sentence-transformers model: its folder, or its name on the Hugging Face hub
    max_length: Count | None = None  # tokens of a text that are read; not set: the model's own limit


class Config(RetrievalConfig):
    """All settings of a run on texts."""

    task: Literal["text"]
    data: Data = Data()
    model: Model = Model()
    batch: Batch = Batch(size=64, per_class=4)
    loss: Named = Named(name="auto")  # auto: ap (its log form) for labels and pairs, ndcg for graded lists
