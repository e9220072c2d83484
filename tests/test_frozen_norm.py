"""Convolutions that carry frozen batch norms: the same function, the same gradients, the same names."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import models

from rankgrad.detection.config import Model, View
from rankgrad.detection.model import FrozenNorm, build
from rankgrad.vision.frozen_norm import carry_frozen_norms


def with_random_norms(network):
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.1)
    return network.double().eval()


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_the_same_values_gradients_and_names(name):
    plain = with_random_norms(models.get_model(name, weights=None))
    carrying = copy.deepcopy(plain)
    assert carry_frozen_norms(carrying) == sum(isinstance(m, nn.BatchNorm2d) for m in plain.modules())
    pictures = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    outputs = [network(pictures) for network in (plain, carrying)]
    torch.testing.assert_close(*outputs)
    upstream = torch.randn_like(outputs[0])
    for output in outputs:
        output.backward(upstream)
    assert list(plain.state_dict()) == list(carrying.state_dict())
    for (key, one), other in zip(plain.named_parameters(), carrying.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, key=key: f"{key}: {text}")


def test_a_detector_s_norms_are_carried():
    network, _ = build(
        Model(backbone="tiny", weights="none", pyramid=16, hidden=16),
        View(short=64, long=64),
        regions=8,
        classes=["a"],
        seed=0,
    )
    norms = [module for module in network.modules() if isinstance(module, FrozenNorm)]
    assert norms and all(type(module) is not FrozenNorm for module in norms)
    plain = with_random_norms(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), FrozenNorm(4)))
    carrying = copy.deepcopy(plain)
    for network in (plain, carrying):
        network[1].running_var.fill_(3.0)
        network[1].bias.fill_(0.5)
    assert carry_frozen_norms(carrying, FrozenNorm) == 1
    pictures = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(plain(pictures), carrying(pictures))


def test_weights_loaded_later_and_copies_count():
    plain, other = (with_random_norms(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))) for _ in range(2))
    nn.init.normal_(other[1].weight)
    assert carry_frozen_norms(plain) == 1
    plain.load_state_dict(other.state_dict())
    pictures = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    twin = copy.deepcopy(plain)
    nn.init.zeros_(twin[1].weight)
    torch.testing.assert_close(plain(pictures), other(pictures))
    torch.testing.assert_close(twin(pictures)[0, 0], twin(pictures)[1, 0])  # nothing of the picture is left


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x):
        seen = self.conv(x)
        return self.norm(seen) + seen


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(super().forward(x))


class Untraceable(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    "network",
    [
        Shared(),
        Twice(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)),
        Untraceable(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)),
        nn.Sequential(nn.Conv2d(3, 3, 1, padding=1, padding_mode="reflect"), nn.BatchNorm2d(3)),
        nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)),
        nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)),
    ],
)
def test_left_alone_where_it_would_be_wrong(network):
    before = copy.deepcopy(network).eval()
    assert carry_frozen_norms(network) == 0
    pictures = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(network.eval()(pictures), before(pictures))


class Calls(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def constant_norm(trained=False):
    """A convolution with a norm that does not learn, plain and carried."""
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), FrozenNorm(4)).requires_grad_(trained)
    torch.manual_seed(0)
    for name in ("weight", "bias", "running_mean", "running_var"):
        getattr(plain[1], name).uniform_(0.5, 2)
    plain[0].bias.requires_grad_(False)
    carrying = copy.deepcopy(plain)
    assert carry_frozen_norms(carrying, FrozenNorm) == 1
    return plain, carrying


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_what_is_constant_is_made_once(trained, half):
    plain, carrying = constant_norm(trained)
    pictures = torch.randn(2, 3, 8, 8)
    outputs = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=half), Calls() as calls:
            outputs.append(carrying(pictures))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    near = {"rtol": 0.03, "atol": 0.05} if half else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(outputs[0].float(), plain(pictures), **near)
    assert calls.names["rsqrt"] == calls.names["add"] == 0
    assert calls.names["mul"] == trained  # the weights, where they move
    assert calls.names["_to_copy"] == half * (1 + trained)  # the picture, and weights that move


@pytest.mark.parametrize("trained", [False, True])
def test_constants_that_change_are_seen(trained):
    plain, carrying = constant_norm(trained)
    pictures = torch.randn(2, 3, 8, 8)

    def same():
        torch.testing.assert_close(
            carrying(pictures.to(carrying[0].weight.dtype)), plain(pictures.to(plain[0].weight.dtype))
        )

    same()
    with torch.no_grad():
        for change in (
            lambda network: network[1].running_var.mul_(2),
            lambda network: network[1].bias.add_(1),
            lambda network: network[0].bias.add_(1),
            lambda network: network[0].weight.mul_(-1),
        ):
            for network in (plain, carrying):
                change(network)
            same()
    other = {name: torch.rand_like(value) + 0.5 for name, value in plain.state_dict().items()}
    for assign in (False, True):
        for network in (plain, carrying):
            network.load_state_dict({name: (1 + assign) * value for name, value in other.items()}, assign=assign)
        same()
    for network in (plain, carrying):
        network.double()
    same()
    for network in (plain, carrying):
        network[0].weight.requires_grad_(not trained)
    same()
    if not trained:
        upstream = torch.randn(2, 4, 6, 6, dtype=torch.float64)
        for network in (plain, carrying):
            network(pictures.double()).backward(upstream)
        torch.testing.assert_close(plain[0].weight.grad, carrying[0].weight.grad)


def test_constants_of_inference_mode_serve_training_and_copies_make_their_own():
    carrying = with_random_norms(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).requires_grad_(False)
    assert carry_frozen_norms(carrying) == 1
    pictures = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with torch.inference_mode():
        seen = carrying(pictures)
    x = pictures.clone().requires_grad_()
    carrying(x).sum().backward()
    assert torch.equal(carrying(pictures), seen.clone()) and bool(x.grad.abs().sum() > 0)
    assert carrying[0].kept is not None
    for twin in (copy.deepcopy(carrying), pickle.loads(pickle.dumps(carrying))):
        assert twin[0].kept is None
        twin[1].bias.zero_()
        assert not torch.equal(twin(pictures), seen.clone())
    assert torch.equal(carrying(pictures), seen.clone())
    compiled = torch.compile(carrying, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(pictures), seen.clone())
