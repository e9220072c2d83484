"""Detection on a GPU: the same images, suppression and losses as on the CPU; a recorded loss; a training run."""

import pytest
import torch
from test_detection_batched import random_boxes
from test_detection_data import random_images

from rankgrad import graphed
from rankgrad.detection import RegionLoss, use_ranking_loss
from rankgrad.detection.inference import detections_of
from rankgrad.detection.region_loss import padded
from rankgrad.lab.detection import model
from rankgrad.lab.detection.batches import canvas
from rankgrad.lab.detection.config import Model, View
from rankgrad.lab.detection.proposals import suppressed
from rankgrad.lab.recipes import run
from rankgrad.lab.training import optim
from rankgrad.lab.vision.images import PackedImages

import scenes
from scenes import SMALL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def network(regions, short=600, long=1000, **options):
    """A detector of two classes on the CPU, the same in every call."""
    settings = Model(weights="none", **options), View(short=short, long=long)
    net, _ = model.build(*settings, regions=regions, classes=["a", "b"], seed=0)
    return net


def test_the_canvas():
    images, flips = PackedImages.of(random_images()), torch.tensor([True, False, True, False])
    view = View(short=60, long=100)
    here, there = canvas(images, flips, view), canvas(images.to(torch.device("cuda")), flips, view)
    assert here.sizes == there.sizes
    torch.testing.assert_close(here.images, there.images.cpu(), atol=1e-4, rtol=0)


def test_suppression():
    boxes = random_boxes(6, 300, spread=50)
    alive = torch.rand(6, 300) < 0.9
    here, there = suppressed(boxes, alive, 0.5), suppressed(boxes.cuda(), alive.cuda(), 0.5)
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("scores", ["odds", "softmax"])
def test_detections(scores):
    net = network(16, backbone="tiny", pyramid=16, hidden=32)
    generator = torch.Generator().manual_seed(0)
    proposals = [random_boxes(50, seed=1), random_boxes(20, seed=2)]
    logits = torch.randn(70, 3, generator=generator)
    regression = torch.randn(70, 12, generator=generator)
    sizes = [(90, 100), (96, 80)]
    here = detections_of(net.roi_heads, logits, regression, proposals, sizes, scores)
    there = detections_of(
        net.roi_heads, logits.cuda(), regression.cuda(), [p.cuda() for p in proposals], sizes, scores
    )
    for a, b in zip(here, there, strict=True):
        for key in a:
            torch.testing.assert_close(a[key], b[key].cpu(), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("options", [{"form": "ap"}, {}, {"lam": None, "window": 1.0, "cross_entropy": 0}])
@pytest.mark.parametrize("memory", [0, 3])
def test_a_recorded_loss_is_the_loss(options, memory):
    """That of the CPU: losses and gradients with memory, different numbers of regions, and after a reset."""
    eager, recorded = (
        RegionLoss(**options, memory=memory).cuda(),
        graphed(RegionLoss(**options, memory=memory).cuda()),
    )
    here = RegionLoss(**options, memory=memory)
    generator = torch.Generator().manual_seed(0)
    replayed = []
    for step in range(16):
        count = 64 if step < 6 else int(torch.randint(20, 65, (1,), generator=generator))
        logits = torch.randn(count, 6, generator=generator).cuda()
        labels = torch.randint(0, 6, (count,), generator=generator).cuda()
        values, gradients = [], []
        for loss in (here, eager, recorded):
            x, given = (one.to("cpu" if loss is here else "cuda") for one in (logits, labels))
            x = x.clone().requires_grad_()
            inputs = padded(x, given, 64) if loss is recorded and count < 64 else (x, given)
            value = loss(*inputs)
            (3 * value).backward()
            values.append(value.detach().cuda())
            gradients.append(x.grad.cuda())
        for value, gradient in zip(values[1:], gradients[1:], strict=True):
            torch.testing.assert_close(value, values[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-7)
        replayed.append(any(one.replay is not None for one in recorded._recordings))
        if step == 8:
            here.reset()
            eager.reset()
            recorded.loss.reset()
    assert replayed[5] and replayed[-1]  # before the reset, and anew after it


@pytest.mark.parametrize("ranked", [None, 1.0])
def test_a_step_in_half_precision(ranked):
    net = network(64, 128, 256, backbone="resnet18", proposals=200)
    net.rpn.ranking_weight = ranked
    net = net.cuda().to(memory_format=torch.channels_last).train()
    images = torch.randn(2, 3, 128, 160, device="cuda").contiguous(memory_format=torch.channels_last)
    boxes = torch.tensor([[10.0, 10.0, 60.0, 70.0]], device="cuda")
    targets = [{"boxes": boxes, "labels": torch.tensor([1], device="cuda")}] * 2
    with optim.autocast("bf16", torch.device("cuda")):
        losses = net(images, [(128, 160)] * 2, targets)
    sum(losses.values()).backward()
    assert all(bool(v.isfinite()) for v in losses.values())
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None)


def test_a_run(tmp_path):
    root = scenes.voc_set(tmp_path / "data", train=24, test=8)
    settings = [s for s in SMALL if not s.startswith(("device", "precision"))]
    settings += [f"data.root={root}", "precision=bf16", "epochs=25", "milestones=[22]", "cache=device"]
    _, (result,) = run.run("voc", [*settings, "evaluate_every=25"], out=str(tmp_path / "a"))
    assert result.last["AP50 odds"] > 50


def test_a_memory_that_was_loaded_on_the_cpu_follows_the_logits():
    first, second = (RegionLoss(memory=2) for _ in range(2))
    net = network(32, 64, 96, backbone="tiny", pyramid=16, hidden=16, proposals=60)
    net = net.cuda().train()
    images = torch.randn(2, 3, 64, 64, device="cuda")
    targets = [{"boxes": torch.tensor([[5.0, 5.0, 40.0, 50.0]]).cuda(), "labels": torch.tensor([1]).cuda()}] * 2
    for loss in (first, second):
        if loss is second:
            saved = {name: value.cpu() for name, value in first.state_dict().items()}
            second.load_state_dict(saved)
        use_ranking_loss(net, loss)
        sum(net(images, [(64, 64)] * 2, targets).values()).backward()
        assert loss.ranking.memory.exists.is_cuda
