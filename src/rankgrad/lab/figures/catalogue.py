"""The figures by name."""

from __future__ import annotations

import importlib

from rankgrad.lab.figures.drawing import Drawing, FigureInputs

#: Name -> a line on it. The module has the same name, and a function ``draw(inputs)``.
FIGURES = {
    "landscape": "a rank-based loss over a plane of scores, and what every method makes of it",
    "gradients": "what each method's gradient does to one list of scores",
    "batch-bias": "mAP of small batches against the data set's, with and without memory",
    "margin": "scores of relevant and irrelevant pairs during training, without a margin and with one",
    "ablations": "memory, margin and lambda, from the result tables",
    "retrieval-examples": "queries of a run and their nearest images",
    "cold-start": "a classifier trained from random weights: which losses make progress",
    "complexity": "time against list length, from the numbers of `rankgrad bench complexity --json`",
}


def make(name: str, inputs: FigureInputs) -> list[Drawing]:
    """Draw one figure (some come in two versions)."""
    module = importlib.import_module(f"rankgrad.lab.figures.{name.replace('-', '_')}")
    drawings: list[Drawing] = module.draw(inputs)
    return drawings
