"""A batch shared by some of several processes, as beside tensor parallelism: as one process with all of it."""

import copy
import os
import socket

import pytest
import torch
import torch.distributed as dist

import rankgrad
from rankgrad.distributed import gather

MEMBERS, STEPS = (0, 2), 3
LOSSES = {
    "recall": lambda **more: rankgrad.RecallLoss(lam=5.0, memory=2, **more),
    "ap": lambda **more: rankgrad.AveragePrecisionLoss(window=0.3, memory=1, **more),
    "proxies": lambda **more: rankgrad.ProxyRankingLoss(3, 5, **more).double(),
}


def steps(loss, part):
    """Values and gradients of a few steps; the process has a part of each batch."""
    found = []
    for step in range(STEPS):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(9, 5, generator=g, dtype=torch.float64)[part].requires_grad_()
        labels, items = (torch.randint(many, (9,), generator=g)[part] for many in (3, 6))
        value = loss(x, labels, items=items)
        value.backward()
        found += [value.detach(), x.grad]
    return found


LISTS = {  # of scores, grades and groups
    "ap": lambda s, y, q: rankgrad.average_precision_loss(s, y > 1, groups=q, window=2.0),
    "ndcg": lambda s, y, q: rankgrad.ndcg_loss(s, y, groups=q, lam=100.0),
    "recall": lambda s, y, q: rankgrad.recall_loss(s, y > 1, groups=q, lam=30.0),
    "spearman": lambda s, y, q: rankgrad.spearman_loss(s, y, groups=q, window=1.0, margin="auto"),
}


def of_lists(name, part, group=None):
    """Value and gradient of six queries whose items lie anywhere; every process has a part of the items."""
    g = torch.Generator().manual_seed(7)
    scores = torch.randn(23, generator=g, dtype=torch.float64)[part].requires_grad_()
    grades, queries = (torch.randint(many, (23,), generator=g)[part] for many in (4, 6))
    value = LISTS[name](*(gather(tensor, group) for tensor in (scores, grades, queries)))
    value.backward()
    return value.detach(), scores.grad


def process(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=3)
    group = dist.new_group(list(MEMBERS))
    if rank in MEMBERS:
        part = (slice(0, 5), slice(5, None))[MEMBERS.index(rank)]
        found = {}
        for name, make in LOSSES.items():
            torch.manual_seed(0)
            loss = make(distributed=True, process_group=group)
            found[name] = steps(copy.deepcopy(loss), part)
            loss.load_state_dict(loss.state_dict())
        items = (slice(0, 14), slice(14, None))[MEMBERS.index(rank)]
        found["lists"] = {name: of_lists(name, items, group) for name in LISTS}
        torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()  # a process that leaves while others still connect makes them fail
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torch.multiprocessing.spawn(process, (port, str(folder)), nprocs=3)
    return [torch.load(folder / f"{rank}.pt") for rank in MEMBERS]


@pytest.mark.parametrize("name", LOSSES)
def test_two_of_three_processes_equal_one(found, name):
    torch.manual_seed(0)
    alone = steps(LOSSES[name](), slice(None))
    for step in range(STEPS):
        value, grad = alone[2 * step : 2 * step + 2]
        parts = [one[name][2 * step : 2 * step + 2] for one in found]
        for part in parts:
            torch.testing.assert_close(part[0], value)
        # Every process calls backward on the same total: DistributedDataParallel's mean undoes the factor of two.
        torch.testing.assert_close(torch.cat([part[1] for part in parts]) / 2, grad)
        assert (grad != 0).any()


@pytest.mark.parametrize("name", LISTS)
def test_lists_over_processes(found, name):
    """Scores are gathered before they are ranked, so that even a query on two processes is ranked once."""
    value, grad = of_lists(name, slice(None))
    parts = [one["lists"][name] for one in found]
    for part in parts:
        torch.testing.assert_close(part[0], value)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]) / 2, grad)
    assert (grad != 0).any()


def test_a_group_without_a_shared_batch():
    with pytest.raises(ValueError, match=r"^process_group: expected None without distributed=True"):
        rankgrad.RecallLoss(process_group=object())
