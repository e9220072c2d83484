"""Parameter groups: every parameter once, each part at its rate."""

import pytest
import torch
from torch import nn

import rankgrad


def parts():
    network = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    return network, rankgrad.ProxyRankingLoss(2, 3)


def test_every_parameter_once_at_its_rate():
    network, loss = parts()
    network[0].bias.requires_grad_(False)
    groups = rankgrad.parameter_groups(network, loss, lr=1e-4, head=network[2], head_lr=1e-3, proxy_lr=0.02)
    optimizer = torch.optim.AdamW(groups, weight_decay=1e-2)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        ("network", 1e-4, 1e-2),
        ("head", 1e-3, 1e-2),
        ("loss", 0.02, 0.0),
    ]
    given = [id(one) for group in groups for one in group["params"]]
    trained = [one for one in [*network.parameters(), *loss.parameters()] if one.requires_grad]
    assert sorted(given) == sorted(map(id, trained))
    assert groups[1]["params"] == [network[2].weight, network[2].bias]


def test_groups_without_parameters_are_left_out():
    network, _ = parts()
    names = [g["name"] for g in rankgrad.parameter_groups(network, rankgrad.RecallLoss(), lr=1e-4)]
    assert names == ["network"]
    network.requires_grad_(False)
    assert [g["name"] for g in rankgrad.parameter_groups(network, lr=1.0, head=network[2])] == []


def test_a_loss_that_is_a_part_of_the_network():
    """As in a Lightning module: its proxies learn at their own rate, no parameter twice."""
    network, loss = parts()
    together = nn.ModuleDict({"inner": nn.ModuleList([network, loss])})
    groups = rankgrad.parameter_groups(together, loss, lr=1e-4, head=network[2])
    assert [(g["name"], g["lr"]) for g in groups] == [("network", 1e-4), ("head", 1e-4), ("loss", 0.04)]
    assert [len(g["params"]) for g in groups] == [4, 2, 1] and groups[2]["params"][0] is loss.proxies
    loss.network = network  # as losses of sentence-transformers hold their model
    assert [len(g["params"]) for g in rankgrad.parameter_groups(network, loss, lr=1e-4)] == [6, 1]
    assert [len(g["params"]) for g in rankgrad.parameter_groups(together, loss, lr=1e-4)] == [6, 1]


def test_wrong_arguments_are_named():
    network, loss = parts()
    for wrong, match in (
        ({"lr": 0.0}, "^lr: "),
        ({"lr": 1.0, "proxy_lr": -1}, "^proxy_lr: "),
        ({"lr": 1.0, "head_lr": 1.0}, "^head_lr: expected None without head"),
        ({"lr": 1.0, "head": nn.Linear(1, 1)}, "^head: expected a part of the network, received a Linear"),
    ):
        with pytest.raises(ValueError, match=match):
            rankgrad.parameter_groups(network, loss, **wrong)
    for given, match in (
        ((network.parameters(), loss), "^network: expected a torch.nn.Module, received generator"),
        ((None,), "^network: expected a torch.nn.Module, received NoneType"),
        ((network, 0.1), "^loss: expected a torch.nn.Module, received float"),
    ):
        with pytest.raises(TypeError, match=match):
            rankgrad.parameter_groups(*given, lr=1.0)
