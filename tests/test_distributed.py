"""Two processes and one with the whole batch: the same loss, the same gradients, the same memory, the same run."""

import copy
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import rankgrad
from rankgrad import distributed
from rankgrad.detection import RegionLoss
from rankgrad.lab import recipes
from rankgrad.lab.recipes import run
from rankgrad.lab.retrieval.images.model import tiny
from rankgrad.lab.training.log import read_table

import scenes

STEPS, BATCH, DIM = 4, 12, 6
TRAIN = [
    "epochs=2",
    "evaluate_first=false",
    "batch_norm=frozen",
    "device=cpu",
    "data.hold_out=0.4",
    "batch.size=24",
]
TRAIN += ["per_class=6", "view.resize=9", "view.augment=resized_crop", "view.flip=true", "save_minutes=0"]
DETECTOR = ["backbone=tiny", "weights=none", "pyramid=16", "hidden=32", "proposals=60", "batch.size=4"]
DETECTOR += ["regions=32", "view.short=64", "view.long=96", "precision=fp32", "epochs=1", "device=cpu"]
DETECTOR += ["loss.memory=1", "test_size=2", "detections=5", "warmup=1"]
# Slow: with frozen batch norms of random weights, embeddings collapse within so few steps otherwise.
RUNS = {"ours": [], "proxies": ["loss=pml:ProxyAnchorLoss"], "our proxies": ["loss=proxy"]}
TRAIN += ["lr=1e-4", "proxy_lr=0.001"]


def embedding_losses():
    return {
        "recall": rankgrad.RecallLoss(lam=5.0, margin=0.1, memory=2, distributed=True),
        "callable": rankgrad.RecallLoss(lam=5.0, weight=torch.sqrt, memory=1, distributed=True),
        "ap": rankgrad.AveragePrecisionLoss(lam=5.0, margin=0.1, memory=2, distributed=True),
        "log_ap": rankgrad.AveragePrecisionLoss(lam=5.0, log=True, distributed=True),
        "window": rankgrad.AveragePrecisionLoss(window=0.5, margin=0.1, memory=1, distributed=True),
        "hinge": rankgrad.PairRankingLoss(hinge=0.7, pull=0.6, push=0.1, distributed=True),
        "hinge, memory": rankgrad.PairRankingLoss(hinge=0.7, pull=0.6, push=0.1, memory=1, distributed=True),
    }


def batch(step):
    g = torch.Generator().manual_seed(step)
    x, labels = torch.randn(BATCH, DIM, generator=g, dtype=torch.float64), torch.randint(5, (BATCH,), generator=g)
    labels[-1] = 77  # a query with nothing relevant, on the last process only
    items = torch.randint(9, (BATCH,), generator=g)
    return x, labels, items


def on_embeddings(loss, part):
    """A few steps of a linear network: losses, gradients, memory."""
    torch.manual_seed(0)
    network = nn.Linear(DIM, 4).double()
    network = nn.parallel.DistributedDataParallel(network) if distributed.active() else network
    out = []
    for step in range(STEPS):
        x, labels, items = (t[part] for t in batch(step))
        network.zero_grad()
        value = loss(network(x), labels, items=items if step % 2 else None)
        (3 * value).backward()
        out += [value.detach(), *(p.grad.clone() for p in network.parameters())]
    return out, copy.deepcopy(loss.state_dict())


def on_classes(loss, part):
    """The detection loss; the processes have different numbers of items."""
    torch.manual_seed(0)
    network = nn.Linear(DIM, 3).double()
    network = nn.parallel.DistributedDataParallel(network) if distributed.active() else network
    out = []
    for step in range(STEPS):
        x, labels, _ = batch(step)
        relevance = labels.unsqueeze(1) == torch.arange(3)
        mask = torch.rand(BATCH, 3, generator=torch.Generator().manual_seed(step)) < 0.8
        network.zero_grad()
        value = loss(network(x[part]), relevance[part], mask[part] if step % 2 else None)
        value.backward()
        out += [value.detach(), *(p.grad.clone() for p in network.parameters())]
    return out, copy.deepcopy(loss.state_dict())


def on_regions(part):
    """The loss of a detector's regions: lists over all processes, cross entropy each process's own mean."""
    torch.manual_seed(0)
    network = nn.Linear(DIM, 1 + 5).double()
    network = nn.parallel.DistributedDataParallel(network) if distributed.active() else network
    loss = RegionLoss(lam=5.0, memory=2, distributed=True)
    out = []
    for step in range(STEPS):
        x, labels, _ = batch(step)
        network.zero_grad()
        loss(network(x[part]), labels[part] % 6).backward()
        out += [p.grad.clone() for p in network.parameters()]
    return out, copy.deepcopy(loss.state_dict())


def class_loss():
    return rankgrad.ClassRankingLoss(lam=5.0, memory=2, distributed=True)


def everything(rank, folder):
    """What both the one process and each of the two do; ``rank`` None: alone."""
    half = slice(None) if rank is None else (slice(0, 6), slice(6, None))[rank]
    uneven = slice(None) if rank is None else (slice(0, 9), slice(9, None))[rank]
    out = {name: on_embeddings(loss, half) for name, loss in embedding_losses().items()}
    out["classes"] = on_classes(class_loss(), uneven)
    out["regions"] = on_regions(half)
    for name, settings in RUNS.items():
        # From weights batch norms stay frozen; trained on CPUs, each process would have statistics of its own.
        weights = f"weights={Path(folder).parent}/tiny.safetensors"
        run.run("digits", [*TRAIN, weights, *settings], out=f"{folder}/{name}")
    if rank is not None:
        run.run("voc", [*DETECTOR, f"data.root={folder}/../scenes"], out=f"{folder}/voc")
    return out


def process(rank, port, folder):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    torch.set_num_threads(1)
    distributed.start(torch.device("cpu"))
    refused = None
    try:
        x, labels, _ = batch(0)
        rankgrad.RecallLoss(distributed=True)(x, labels, x, labels)
    except ValueError as error:
        refused = str(error)
    nothing = rankgrad.PairRankingLoss(distributed=True)(torch.zeros(0, DIM), torch.zeros(0, dtype=torch.int64))
    assert nothing == 0  # of empty batches
    norm = torch.nn.BatchNorm1d(3)
    norm(torch.randn(8, 3) + rank)
    mean = distributed.same_everywhere(norm.running_mean.clone())
    distributed.share_buffers(norm)
    assert torch.equal(norm.running_mean, mean)
    found = everything(rank, f"{folder}/two")
    told = distributed.same_everywhere(f"from {rank}")
    torch.save((found, refused, told), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    scenes.voc_set(folder / "scenes", train=8, test=5)
    save_file(tiny().state_dict(), folder / "tiny.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torch.multiprocessing.spawn(process, (port, str(folder)), nprocs=2)
    two = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return everything(None, f"{folder}/one"), two, folder


@pytest.mark.parametrize("name", [*embedding_losses(), "classes", "regions"])
def test_losses_gradients_and_memory(results, name):
    one, two, _ = results
    values, memory = one[name]
    assert sum(v.abs().sum() for v in values[1::3]) > 0
    for found, _, _ in two:
        torch.testing.assert_close(found[name][0], values)
        assert found[name][1].keys() == memory.keys()
        for key, expected in memory.items():
            torch.testing.assert_close(found[name][1][key], expected)


@pytest.mark.parametrize("name", list(RUNS))
def test_a_run(results, name):
    """Through augmentation, samplers, DDP, proxies, evaluation and checkpoints: the same losses and metrics."""
    _, _, folder = results
    for table in ("steps", "evaluations"):
        one, two = (read_table(folder / many / name / f"{table}.csv") for many in ("one", "two"))
        assert len(one) == len(two) > 0
        for a, b in zip(one, two, strict=True):
            assert a.keys() == b.keys()
            tolerance = {"rel": 2e-3, "abs": 1e-4} if table == "steps" else {"abs": 1.5}
            assert list(a.values()) == pytest.approx(list(b.values()), **tolerance)
    assert (folder / "two" / name / "report.html").is_file()


def test_a_detector(results):
    """Regions are sampled in each process; the test images are shared out and judged as in one process."""
    _, _, folder = results
    kind, last = recipes.of_checkpoint(folder / "two" / "voc" / "last.safetensors", [f"data.root={folder}/scenes"])
    expected = kind.evaluate_checkpoint(last, torch.device("cpu"))
    (row,) = read_table(folder / "two" / "voc" / "evaluations.csv")
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert len(read_table(folder / "two" / "voc" / "steps.csv")) == 2


def test_words_between_processes(results):
    _, two, _ = results
    for _, refused, told in two:
        assert refused.startswith("ref_embeddings: expected None in a distributed loss")
        assert told == "from 0"


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("form", ["log", "ap", torch.sqrt, torch.tensor([1.0, 0.5])])
def test_shares_of_a_mean(form, reduction):
    """Lists in two calls that know how many count in both: the sum and the gradients of one call with all."""
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(9, 20, generator=g, dtype=torch.float64)
    relevance = torch.rand(9, 20, generator=g) < 0.2
    relevance[7] = False  # does not count

    def loss(x, r, **more):
        if form == "ap":
            return rankgrad.average_precision_loss(x, r, lam=3.0, reduction=reduction, **more)
        return rankgrad.recall_loss(x, r, lam=3.0, weight=form, reduction=reduction, **more)

    whole, parts = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    expected = loss(whole, relevance).sum()
    expected.backward()
    found = sum(loss(parts[s], relevance[s], lists=torch.tensor(8)).sum() for s in (slice(0, 4), slice(4, None)))
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(parts.grad, whole.grad)
    assert whole.grad.abs().sum() > 0
    for wrong in (3, torch.tensor([1, 2]), torch.tensor(2.0)):
        with pytest.raises((TypeError, ValueError), match=r"^lists: expected"):
            loss(scores, relevance, lists=wrong)


def test_alone_everything_is_the_identity():
    x = torch.randn(3, 2)
    assert distributed.gather(x) is x and distributed.total(x) is x and distributed.share(x).shape == x.shape
    assert (distributed.count(), distributed.process_index(), distributed.same_everywhere("a")) == (1, 0, "a")
    assert distributed.start(torch.device("cpu")) == torch.device("cpu")
    distributed.wait()
