"""The recipes' network of a detector, beside torchvision's."""

from urllib.error import URLError

import pytest
import torch
from torchvision.models.detection import FasterRCNN
from torchvision.ops import FrozenBatchNorm2d

from rankgrad.lab.detection import model
from rankgrad.lab.detection.config import Model, View
from rankgrad.lab.training.errors import UserError


def test_where_the_weights_cannot_be_fetched(monkeypatch):
    def fetch(*args, **kwargs):
        raise URLError("no route")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", fetch)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)
    with pytest.raises(
        UserError, match=r"^model\.weights: the library's weights of resnet18 cannot be fetched .*no route"
    ):
        model.build(Model(backbone="resnet18"), View(), regions=8, classes=["a"], seed=0)


def test_the_first_batch_decides_nothing():
    """torchvision guesses the scales of its pooling once, from the height of the first images: 40 of 64 rows."""
    net, _ = model.build(Model(backbone="tiny", weights="none"), View(), regions=8, classes=["a"], seed=0)
    net.eval()
    low, square = torch.randn(1, 3, 64, 128), torch.randn(1, 3, 128, 128)
    with torch.no_grad():
        before = net.regions(square, [(128, 128)])
        again, _ = model.build(Model(backbone="tiny", weights="none"), View(), regions=8, classes=["a"], seed=0)
        again.eval()
        again.regions(low, [(40, 128)])
        after = again.regions(square, [(128, 128)])
    torch.testing.assert_close(after[:2], before[:2], rtol=0, atol=0)
    theirs = FasterRCNN(net.backbone, 2).roi_heads.box_roi_pool
    theirs(net.backbone(square), [torch.tensor([[0.0, 0, 9, 9]])], [(128, 128)])
    ours = net.roi_heads.box_roi_pool
    assert ours.scales == theirs.scales and vars(ours.map_levels) == vars(theirs.map_levels)


def test_anchors_of_many_shapes(monkeypatch):
    """Kept while there is room; the oldest goes first."""
    monkeypatch.setattr(model, "_SHAPES", 2)
    net, _ = model.build(Model(backbone="tiny", weights="none"), View(), regions=8, classes=["a"], seed=0)
    with torch.no_grad():
        for side in (32, 64, 96, 64):
            net.eval().regions(torch.randn(1, 3, side, 64), [(side, 64)])
    assert [key[0][0] for key in net.rpn.anchor_generator._made] == [64, 96]


def test_frozen_norms_are_torchvisions():
    ours, theirs = model.FrozenNorm(5), FrozenBatchNorm2d(5)
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = torch.rand(5) + 0.5
        for norm in (ours, theirs):
            getattr(norm, name).copy_(value)
    x = torch.randn(2, 5, 4, 4, requires_grad=True)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    half = ours(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), theirs(x), atol=0.05, rtol=0.02)
    half.float().sum().backward()
    assert x.grad is not None


def test_boxes_stay_float32_in_half_precision():
    """Under autocast torchvision would round anchors and proposals to 8 bits; here they are whole pixels apart."""
    small = Model(backbone="tiny", weights="none", pyramid=16, hidden=32, proposals=40)
    network, _ = model.build(small, View(short=64, long=96), regions=16, classes=["a", "b"], seed=0)
    network.eval()
    images = torch.randn(1, 3, 288, 288)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits, regression, proposals = network.regions(images, [(288, 288)])
    assert {logits.dtype, regression.dtype, proposals[0].dtype} == {torch.float32}
    assert not torch.equal(proposals[0], proposals[0].bfloat16().float())
