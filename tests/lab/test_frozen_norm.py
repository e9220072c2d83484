"""Frozen batch norms folded into convolutions: the same function, the same gradients, the same names."""

import copy
import pickle

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import models

from rankgrad.lab.detection.config import Model, View
from rankgrad.lab.detection.model import FoldedFrozenNorm, FrozenNorm, build
from rankgrad.lab.vision.frozen_norm import fold_frozen_norms


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
    folded = copy.deepcopy(plain)
    assert fold_frozen_norms(folded) == sum(isinstance(m, nn.BatchNorm2d) for m in plain.modules())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    outputs = [network(images) for network in (plain, folded)]
    torch.testing.assert_close(*outputs)
    upstream = torch.randn_like(outputs[0])
    for output in outputs:
        output.backward(upstream)
    assert list(plain.state_dict()) == list(folded.state_dict())
    for (key, one), other in zip(plain.named_parameters(), folded.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, key=key: f"{key}: {text}")


def test_a_detector_s_norms_are_folded():
    network, _ = build(
        Model(backbone="tiny", weights="none", pyramid=16, hidden=16),
        View(short=64, long=64),
        regions=8,
        classes=["a"],
        seed=0,
    )
    norms = [module for module in network.modules() if isinstance(module, FrozenNorm)]
    assert norms and all(type(module) is FoldedFrozenNorm for module in norms)
    again = pickle.loads(pickle.dumps(network))
    assert [type(module) for module in again.modules()] == [type(module) for module in network.modules()]
    images = torch.rand(1, 3, 64, 64)
    torch.testing.assert_close(again.backbone(images), network.backbone(images))
    plain = with_random_norms(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), FrozenNorm(4)))
    folded = copy.deepcopy(plain)
    for network in (plain, folded):
        network[1].running_var.fill_(3.0)
        network[1].bias.fill_(0.5)
    assert fold_frozen_norms(folded, FrozenNorm, FoldedFrozenNorm) == 1
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(plain(images), folded(images))


def test_weights_loaded_later_and_copies_count():
    plain, other = (with_random_norms(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))) for _ in range(2))
    nn.init.normal_(other[1].weight)
    assert fold_frozen_norms(plain) == 1
    plain.load_state_dict(other.state_dict())
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    twin = copy.deepcopy(plain)
    nn.init.zeros_(twin[1].weight)
    torch.testing.assert_close(plain(images), other(images))
    torch.testing.assert_close(twin(images)[0, 0], twin(images)[1, 0])  # nothing of the image is left


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
    assert fold_frozen_norms(network) == 0
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(network.eval()(images), before(images))


class Calls(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def constant_norm(bias=True):
    """A convolution with a norm that has nothing to learn: plain, and folded."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, bias=bias), FrozenNorm(4)).double()
    for buffer in plain.buffers():
        buffer.uniform_(0.5, 2)
    folded = copy.deepcopy(plain)
    assert fold_frozen_norms(folded, FrozenNorm, FoldedFrozenNorm) == 1
    return plain, folded, torch.randn(2, 3, 8, 8, dtype=torch.float64)


def test_constants_are_not_made_in_every_step():
    plain, folded, images = constant_norm(bias=False)
    with Calls() as calls:
        found = folded(images)
    torch.testing.assert_close(found, plain(images))
    assert calls.names.count("mul") == 1 and "rsqrt" not in calls.names and "add" not in calls.names


def test_constants_follow_what_is_loaded_and_where_the_network_goes():
    plain, folded, images = constant_norm()
    state = {name: torch.rand_like(value) + 0.5 for name, value in plain.state_dict().items()}
    assert state.keys() == folded.state_dict().keys()
    twin = copy.deepcopy(folded)
    before = twin(images)
    for assign in (False, True):
        state = {name: value + 1 for name, value in state.items()}
        for network in (plain, folded):
            network.load_state_dict(state, assign=assign)
        torch.testing.assert_close(folded(images), plain(images))
    assert torch.equal(twin(images), before)  # a copy has its own
    twin.load_state_dict(state)
    torch.testing.assert_close(twin(images), plain(images))
    torch.testing.assert_close(folded.float()(images.float()), plain.float()(images.float()))


def test_all_that_learns_has_a_gradient():
    networks = constant_norm()
    images = networks[2]
    upstream = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    with torch.inference_mode():
        networks[1].load_state_dict(networks[0].state_dict())
        networks[1](images)
    for network in networks[:2]:
        network(images).backward(upstream)
    for one, other in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    traced = fx.symbolic_trace(networks[1])
    compiled = torch.compile(networks[1], backend="eager", fullgraph=True)
    for network in (traced, compiled):
        torch.testing.assert_close(network(images), networks[0](images))
