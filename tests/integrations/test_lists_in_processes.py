"""Graded lists, pairs and positives on two processes: value and gradient are those of one with the whole batch."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rankgrad

pytest.importorskip("sentence_transformers", reason="pip install 'rankgrad[sentence-transformers]'")
from rankgrad.integrations.sentence_transformers import (
    CachedRankingLoss,
    CrossEncoderRankingLoss,
    RankingLoss,
)

import processes
import texts

pytestmark = pytest.mark.slow
PARTS = (slice(0, 5), slice(5, None))  # processes have different numbers of queries
COLUMNS = [texts.sentences(8, seed) for seed in range(3)]
GRADES = torch.tensor([[0, 2], [1, 0], [3, 1], [0, 0], [2, -1], [1, 1], [0, 1], [2, 0]])
NUMBERS = torch.rand(8, generator=torch.Generator().manual_seed(0))
LISTS = [texts.sentences(many, seed=10 + at) for at, many in enumerate((5, 2, 4, 3, 3, 7, 2, 4))]
AP = partial(rankgrad.average_precision_loss, lam=2.0)

#: How many columns, the labels, and the loss.
KINDS = {
    "graded": (3, GRADES, RankingLoss),
    "graded, each its own": (3, GRADES, partial(RankingLoss, in_batch=False)),
    "cached": (3, GRADES, partial(CachedRankingLoss, mini_batch_size=4)),
    "pairs": (2, NUMBERS, RankingLoss),
    "positives": (3, None, partial(RankingLoss, loss=AP)),
    "positives, default": (3, None, RankingLoss),
}


def gradient(model, value):
    model.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def found(folder, part, distributed):
    """Value and gradient of every kind; of several processes the mean of the gradients, as DDP makes it."""
    results = {}
    model = texts.bi_encoder(Path(folder) / "bert", dropout=0.0)
    for name, (columns, labels, make) in KINDS.items():
        loss = make(model, distributed=distributed)
        given = [model.preprocess(column[part]) for column in COLUMNS[:columns]]
        value = loss(given, None if labels is None else labels[part])
        results[name] = value.detach(), gradient(model, value)
    reranker = texts.cross_encoder(Path(folder) / "reranker")
    grades = [torch.arange(len(one)) % 3 for one in LISTS][part]
    loss = CrossEncoderRankingLoss(reranker, mini_batch_size=0, distributed=distributed)
    value = loss([COLUMNS[0][part], LISTS[part]], grades)
    results["cross-encoder"] = value.detach(), gradient(reranker, value)
    if distributed:
        for _, mean in results.values():
            dist.all_reduce(mean)
            mean /= 2
    return results


def process(rank, folder):
    dist.init_process_group("gloo")
    return found(folder, PARTS[rank], distributed=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lists")
    alone = found(folder, slice(None), distributed=False)  # makes the models, too
    return alone, processes.two(process, folder)


@pytest.mark.parametrize("kind", [*KINDS, "cross-encoder"])
def test_two_processes_are_one(runs, kind):
    alone, both = runs
    value, wanted = alone[kind]
    assert wanted.abs().max() > 0.01
    for one in both:
        torch.testing.assert_close(one[kind][0], value)
        # Texts of a smaller batch are padded less: the same embeddings up to rounding.
        torch.testing.assert_close(one[kind][1], wanted, rtol=1e-3, atol=1e-4)
