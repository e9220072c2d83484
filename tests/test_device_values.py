"""No loss reads a value back from its device or mixes devices: shown without a GPU, with tensors without values.

A fake tensor of torch has shape, dtype and device. Reading a value of it, which on a GPU would wait for the
device, raises; so does an operation on tensors of two devices. What runs inside the engine's ops, backward, and
losses over all ranks, which take a gradient in their forward pass, are left to the tests marked ``gpu``.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import rankgrad
from rankgrad.detection import RegionLoss

EMBEDDINGS = {
    "recall": lambda: rankgrad.RecallLoss(),
    "recall, lam, memory": lambda: rankgrad.RecallLoss(lam=0.2, margin=0.02, memory=2),
    "recall, W": lambda: rankgrad.RecallLoss(weight=[1.0, 0.5, 0.2]),
    "AP": lambda: rankgrad.AveragePrecisionLoss(),
    "AP, memory": lambda: rankgrad.AveragePrecisionLoss(memory=2),
    "pairs": lambda: rankgrad.PairRankingLoss(memory=2),
    "proxies": lambda: rankgrad.ProxyRankingLoss(6, 8),
    "proxies, weight": lambda: rankgrad.ProxyRankingLoss(6, 8, pairs=0.5),
}
CLASSES = {"classes": {}, "classes, memory": {"memory": 2}, "classes, window": {"lam": None, "window": 1.0}}
REGIONS = {"regions": {}, "regions, memory": {"memory": 2}}


@pytest.fixture
def device():
    """A device whose tensors have no values."""
    with FakeTensorMode(), torch.device("cuda") as made:
        yield made


def is_a_loss_there(loss):
    assert loss.shape == () and loss.device.type == "cuda" and loss.requires_grad


@pytest.mark.parametrize("name", EMBEDDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_embeddings(name, dtype, device):
    loss = EMBEDDINGS[name]()
    embeddings = torch.empty(12, 8, dtype=dtype, requires_grad=True)
    labels, items = torch.empty(2, 12, dtype=torch.int64)
    is_a_loss_there(loss(embeddings, labels))
    is_a_loss_there(loss(embeddings, labels, items=items))  # now with a memory


@pytest.mark.parametrize("name", CLASSES)
def test_losses_of_classes(name, device):
    loss = rankgrad.ClassRankingLoss(**CLASSES[name])
    for _ in range(2):
        is_a_loss_there(loss(torch.empty(30, 4, requires_grad=True), torch.empty(30, 4, dtype=torch.bool)))


@pytest.mark.parametrize("name", REGIONS)
def test_losses_of_regions(name, device):
    loss = RegionLoss(**REGIONS[name])
    for _ in range(2):
        logits, labels = torch.empty(30, 4, requires_grad=True), torch.empty(30, dtype=torch.int64)
        is_a_loss_there(loss(logits, labels))


def test_a_value_cannot_be_read_here(device):
    with pytest.raises(DataDependentOutputException):
        float(torch.empty(3).sum())
    with pytest.raises(RuntimeError, match="device"):
        torch.empty(3) + torch.empty(3, device="cpu")
