"""The adapter for pytorch-metric-learning: our gradients; its miners, reducers, distances, memory, wrappers."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

pml = pytest.importorskip("pytorch_metric_learning", reason="pip install 'rankgrad[pytorch-metric-learning]'")
from pytorch_metric_learning import distances, miners, reducers
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

import rankgrad
from rankgrad.integrations.pytorch_metric_learning import CrossBatchMemory, RankingLoss

import processes

RECALL = partial(rankgrad.recall_loss, lam=2.0, margin=0.1, weight="log")
AP = partial(rankgrad.average_precision_loss, window=0.3, margin=0.1)


def batch(seed=0, many=12):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(many) // 3
    labels[-1] = 99  # a query with nothing relevant
    return torch.randn(many, 6, generator=generator, dtype=torch.float64, requires_grad=True), labels


def gradient(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(
    ("function", "module"),
    [
        (RECALL, lambda: rankgrad.RecallLoss(lam=2.0, margin=0.1, weight="log")),
        (AP, lambda: rankgrad.AveragePrecisionLoss(window=0.3, margin=0.1)),
    ],
)
def test_value_and_gradient_are_ours(function, module):
    x, labels = batch()
    ours, theirs = module()(x, labels), RankingLoss(function)(x, labels)
    torch.testing.assert_close(theirs, ours)
    wanted = gradient(3 * ours, x)
    torch.testing.assert_close(gradient(3 * theirs, x), wanted)
    assert wanted[0].abs().sum() > 0
    refs, ref_labels = batch(1, 15)
    ours, theirs = module()(x, labels, refs, ref_labels), RankingLoss(function)(x, labels, None, refs, ref_labels)
    torch.testing.assert_close(theirs, ours)
    torch.testing.assert_close(gradient(theirs, x, refs), gradient(ours, x, refs))


def test_the_defaults_are_those_of_our_module():
    x, labels = batch()
    ours, theirs = rankgrad.AveragePrecisionLoss()(x, labels), RankingLoss()(x, labels)
    torch.testing.assert_close(theirs, ours)
    torch.testing.assert_close(gradient(theirs, x), gradient(ours, x))
    for module in (rankgrad.AveragePrecisionLoss(), rankgrad.NDCGLoss()):
        kind = type(module).__name__
        with pytest.raises(ValueError, match=rf"^loss: expected a function loss\(.*no Module, received a {kind}"):
            RankingLoss(module)


@pytest.mark.parametrize("miner", [miners.MultiSimilarityMiner(), miners.TripletMarginMiner(margin=0.3)])
def test_a_miner_is_a_mask(miner):
    x, labels = batch()
    chosen = miner(x.detach(), labels)
    loss = RankingLoss(RECALL)(x, labels, chosen)
    a, p, b, n = chosen if len(chosen) == 4 else (chosen[0], chosen[1], chosen[0], chosen[2])
    relevance = torch.zeros(12, 12, dtype=torch.bool)
    mask = relevance.clone()
    for i, j in zip(a.tolist(), p.tolist(), strict=True):
        relevance[i, j] = mask[i, j] = True
    for i, j in zip(b.tolist(), n.tolist(), strict=True):
        mask[i, j] = True
    assert mask.sum() < 12 * 11
    rows = nn.functional.normalize(x, dim=1)
    wanted = RECALL(rows @ rows.T, relevance, mask=mask)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradient(loss, x), gradient(wanted, x))
    torch.testing.assert_close(RankingLoss(RECALL)(x, None, chosen), loss)


def test_reducers_see_the_queries_that_count():
    x, labels = batch()
    each = RankingLoss(RECALL, reducer=reducers.DoNothingReducer())(x, labels)["loss"]
    assert each["reduction_type"] == "element"
    assert each["indices"].tolist() == [i for i in range(12) if (labels == labels[i]).sum() > 1]
    summed = RankingLoss(RECALL, reducer=reducers.SumReducer())(x, labels)
    torch.testing.assert_close(summed, each["losses"].sum())
    per_class = RankingLoss(RECALL, reducer=reducers.ClassWeightedReducer(torch.full((100,), 2.0).double()))(
        x, labels
    )
    torch.testing.assert_close(per_class, 2 * each["losses"].mean())


def test_distances_are_ranked_from_the_nearest():
    x, labels = batch()
    loss = RankingLoss(RECALL, distance=distances.LpDistance(normalize_embeddings=False))(x, labels)
    relevance = (labels.unsqueeze(1) == labels).fill_diagonal_(False)
    mask = ~torch.eye(12, dtype=torch.bool)
    torch.testing.assert_close(loss, RECALL(-torch.cdist(x, x).detach(), relevance, mask=mask))
    assert gradient(loss, x)[0].abs().sum() > 0


def test_nothing_relevant_and_narrow_numbers():
    x, _ = batch()
    loss = RankingLoss(RECALL)(x, torch.arange(12))
    assert loss == 0 and not gradient(loss, x)[0].any()
    x, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        narrow = RankingLoss(RECALL)(x.detach().float(), labels)
    torch.testing.assert_close(narrow, RankingLoss(RECALL)(x.detach().float(), labels))
    with pytest.raises(ValueError, match=r"^loss: expected a function loss.*received 'ap'"):
        RankingLoss("ap")
    with pytest.raises(ValueError, match=r"^loss: expected to return the losses of 12 lists"):
        RankingLoss(lambda scores, relevance, mask, reduction: scores.mean())(*batch())


def test_cross_batch_memory():
    memory = CrossBatchMemory(RankingLoss(RECALL), embedding_size=6, memory_size=24)
    for seed in range(3):
        x, labels = batch(seed)
        loss = memory(x, labels)
        old = memory.embedding_memory[: 12 * (seed + 1)], memory.label_memory[: 12 * (seed + 1)]
        at = (12 * seed + torch.arange(12)) % 24
        wanted = rankgrad.RecallLoss(lam=2.0, margin=0.1, weight="log")(x, labels, *old, at)
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(gradient(loss, x), gradient(wanted, x))
    assert "NTXentLoss" in CrossBatchMemory.supported_losses()


def trained(rank=None, wrap=lambda loss: loss):
    """Gradients of a linear layer, alone or as one of two processes."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 4).double()
    network = layer if rank is None else nn.parallel.DistributedDataParallel(layer)
    part = slice(None) if rank is None else (slice(0, 6), slice(6, None))[rank]
    x, labels = batch()
    value = wrap(RankingLoss(RECALL))(network(x.detach()[part]), labels[part])
    value.backward()
    return [p.grad for p in layer.parameters()]


def in_a_process(rank, folder):
    dist.init_process_group("gloo")
    return trained(rank, DistributedLossWrapper)


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    wanted = trained()
    for found in processes.two(in_a_process, tmp_path):
        torch.testing.assert_close(found, wanted)
