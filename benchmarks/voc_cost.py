"""What the ranking loss adds to a training step of the detector; called by `benchmarks/voc.py --cost`."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d

from rankgrad import graphed
from rankgrad.detection import RegionLoss, ranking_loss, use_ranking_loss
from rankgrad.lab.detection.config import Model, View
from rankgrad.lab.detection.model import Detector, build
from rankgrad.lab.training import machine, optim
from rankgrad.lab.training.config import Optim

IMAGES, REGIONS, CLASSES, MEMORY = 8, 512, 20, 7


class Case(NamedTuple):
    """A detector whose steps are timed."""

    backbone: str
    canvas: tuple[int, int]
    stock: bool  # torchvision's own, with the drop-in; or the recipes'
    times: int  # steps with each loss


#: The recipe's images (short side 600) in its detector and in torchvision's, which says what the recipes' own
#: proposals and matching gain; the benchmark's small images (360).
CASES = (
    Case("resnet50", (608, 800), stock=False, times=150),
    Case("resnet50", (608, 800), stock=True, times=100),
    Case("resnet50", (384, 480), stock=False, times=100),
)
#: How many parts of a measurement are compared with each other.
STRETCHES = 10
#: Cross entropy twice: what the second takes more than the first is the noise of the differences.
LOSSES = ("cross entropy", "cross entropy again", "ranking")
#: In the recipes' detector alone: the objectness of all anchors is ranked too.
RPN_RANKED = "ranking, RPN ranked"


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, the device waited for."""
    _wait(device)
    begin = time.perf_counter()
    run()
    _wait(device)
    return 1000 * (time.perf_counter() - begin)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _ours(case: Case) -> Detector:
    view = View(short=min(case.canvas), long=max(case.canvas))
    classes = [str(i) for i in range(CLASSES)]
    model = Model(backbone=case.backbone, weights="none")
    return build(model, view, regions=REGIONS, classes=classes, seed=0)[0]


def _stock(case: Case) -> FasterRCNN:
    """As ``fasterrcnn_resnet50_fpn`` makes it around pretrained weights, without them."""
    torch.manual_seed(0)
    backbone = resnet_fpn_backbone(
        backbone_name=case.backbone, weights=None, norm_layer=FrozenBatchNorm2d, trainable_layers=3
    )
    short, long = min(case.canvas), max(case.canvas)
    return FasterRCNN(backbone, 1 + CLASSES, min_size=short, max_size=long, box_batch_size_per_image=REGIONS)


class _Training:
    """A detector with made-up images that takes steps with one loss or the other.

    One network for all: two with the same loss differ by as much, in where their tensors lie, as two losses do.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.device, self.precision = device, "bf16" if device.type == "cuda" else "fp32"
        self.case, side = case, case.canvas
        network = _stock(case) if case.stock else _ours(case)
        self.network = network.to(device, memory_format=torch.channels_last).train()
        # A trained RPN proposes all the regions that are sampled, a quarter of them foreground. Of a random one's
        # fewer stay apart, and few overlap an object: so they may overlap each other, and a small overlap counts.
        network.rpn.nms_thresh = 0.98
        network.roi_heads.proposal_matcher = Matcher(0.015, 0.015, allow_low_quality_matches=False)
        self.names = LOSSES if case.stock else (*LOSSES, RPN_RANKED)
        # what the heads of each loss have that others have not: their class, and the loss with its memory
        self.heads: dict[str, tuple[type, dict[str, Any]]] = dict.fromkeys(
            LOSSES[:2], (type(network.roi_heads), {})
        )
        use_ranking_loss(self.network, memory=MEMORY)
        ranking = type(network.roi_heads), dict(vars(network.roi_heads))
        self.heads |= dict.fromkeys((LOSSES[2], RPN_RANKED), ranking)
        self._use("ranking")
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        # so small a rate that the weights stay: the same regions are proposed in every step
        self.optimizer = optim.make_optimizer([{"params": trained}], Optim(name="sgd", lr=1e-12))
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(IMAGES, 3, *side, generator=draw).to(device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.targets = []
        for _ in range(IMAGES):
            corner = torch.rand(4, 2, generator=draw) * torch.tensor(side[::-1]) * 0.5
            boxes = torch.cat([corner, corner + 0.1 * min(side)], dim=1).to(device)
            labels = torch.randint(1, CLASSES + 1, (4,), generator=draw).to(device)
            self.targets.append({"boxes": boxes, "labels": labels})

    def losses(self) -> dict[str, Tensor]:
        """Forward."""
        if self.case.stock:
            return self.network(list(self.images), self.targets)  # type: ignore[no-any-return]
        sizes = [self.case.canvas] * IMAGES
        return self.network(self.images, sizes, self.targets)  # type: ignore[no-any-return]

    def regions(self) -> str:
        """How many regions were sampled, and how many of them foreground, in the batches of the memory."""
        self._use("ranking")
        _, relevant, there = ranking_loss(self.network).ranking.memory.candidates()
        regions, foreground = int(there.any(1).sum()), int(relevant.any(1).sum())
        return f"{regions / MEMORY / IMAGES:.0f} regions an image, {100 * foreground / regions:.0f} % foreground"

    def step(self, loss: str, number: int) -> float:
        """Forward, backward and update; milliseconds."""
        self._use(loss)
        torch.manual_seed(number)
        return _milliseconds(self._step, self.device)

    def _use(self, loss: str) -> None:
        kind, held = self.heads[loss]
        self.network.roi_heads.__class__ = kind
        vars(self.network.roi_heads).update(held)
        if not self.case.stock:
            self.network.rpn.ranking_weight = 1.0 if loss == RPN_RANKED else None

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with optim.autocast(self.precision, self.device):
            total = torch.stack([value.float() for value in self.losses().values()]).sum()
        total.backward()
        self.optimizer.step()


def _steps(training: _Training, times: int) -> dict[str, list[float]]:
    """Times of steps with each loss in turns, with the same random regions."""
    found: dict[str, list[float]] = {name: [] for name in training.names}
    gc.collect()
    gc.freeze()  # what is allocated now stays: a collection in the middle of a step has little to visit
    try:
        for number in range(MEMORY + 8 + times):
            for name in training.names if number % 2 else reversed(training.names):
                took = training.step(name, number)
                if number >= MEMORY + 8:  # the memory is full, and the loss recorded
                    found[name].append(took)
    finally:
        gc.unfreeze()
    return found


def _kernels(training: _Training, loss: str, steps: int = 5) -> float:
    """Milliseconds a step in which the GPU computes; the host's pauses between kernels do not count."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(steps):
            training.step(loss, number)
    return float(sum(event.self_device_time_total for event in profiler.key_averages())) / 1000 / steps


def _more(steps: dict[str, list[float]], name: str) -> str:
    """How much longer these steps are than those with cross entropy.

    Steps are compared one by one. A host has slow moments, some of them long: of each of ten stretches the median
    counts, and their differences give the standard error of the mean.
    """
    base = steps["cross entropy"]
    more = [b - a for a, b in zip(base, steps[name], strict=True)]
    stretches = min(STRETCHES, len(more))
    ends = [round(number * len(more) / stretches) for number in range(stretches + 1)]
    medians = [statistics.median(more[begin:end]) for begin, end in itertools.pairwise(ends)]
    mean, error = statistics.fmean(medians), statistics.stdev(medians) / stretches**0.5
    share = 100 / statistics.median(base)
    return f"{mean:+.2f} ± {error:.2f} ({share * mean:+.1f} ± {share * error:.1f} %)"


def _more_kernels(kernels: dict[str, float], name: str) -> str:
    """The GPU's time in a step, and how much more it is than with cross entropy."""
    if not kernels:
        return " | "
    base, own = kernels["cross entropy"], kernels[name]
    more = "" if name == "cross entropy" else f"{own - base:+.2f} ({100 * (own / base - 1):+.2f} %)"
    return f"{own:.2f} | {more}"


def _alone(times: int, device: torch.device) -> dict[str, list[float]]:
    """Times of the losses by themselves, forward and backward."""
    logits = torch.randn(IMAGES * REGIONS, 1 + CLASSES, device=device, requires_grad=True)
    labels = torch.randint(1, CLASSES + 1, (len(logits),), device=device)
    labels = labels.where(torch.rand(len(logits), device=device) < 0.25, 0)
    losses: dict[str, Callable[..., Tensor]] = {
        "cross entropy": F.cross_entropy,
        "ranking": graphed(RegionLoss(memory=MEMORY)),
        "ranking, not recorded": RegionLoss(memory=MEMORY),
    }
    found = {}
    for name, loss in losses.items():
        calls = [
            _milliseconds(lambda loss=loss: loss(logits, labels).backward(), device)  # type: ignore[misc]
            for _ in range(MEMORY + 8 + times)
        ]
        found[name] = calls[MEMORY + 8 :]
    return found


def measure(cases: Sequence[Case] = CASES) -> str:
    """Time whole training steps with both losses, and the losses alone; a text with the numbers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = machine.describe(device)
    lines = [
        f"# What the ranking loss adds to a training step: {IMAGES} images x {REGIONS} regions x {CLASSES} "
        f"classes, memory {MEMORY}",
        "",
        f"{about['hardware']}. {about['versions']}. {about['started']}. Faster R-CNN with FPN, "
        "bf16 on a GPU; forward, backward and update; steps with each loss in turns, one network, same random "
        "regions. Medians; differences step by step (of ten stretches the medians: their mean and its standard "
        "error), and in the time that the GPU computes.",
        "",
        "| detector | canvas | loss | step, ms | more, ms | GPU kernels, ms | more kernels, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        training = _Training(case, device)
        steps = _steps(training, case.times)
        kernels = {name: _kernels(training, name) for name in training.names} if device.type == "cuda" else {}
        maker = "torchvision's" if case.stock else "the recipes'"
        of = f"{maker} {case.backbone}, {training.regions()}, {case.times} steps"
        for name in steps:
            told = "" if name == "cross entropy" else _more(steps, name)
            step = f"{statistics.median(steps[name]):.2f}"
            canvas = f"{case.canvas[0]} x {case.canvas[1]}"
            lines.append(f"| {of} | {canvas} | {name} | {step} | {told} | {_more_kernels(kernels, name)} |")
    lines += ["", "| loss alone, forward and backward | ms |", "|---|---|"]
    lines += [
        f"| {name} | {statistics.median(found):.3f} |" for name, found in _alone(cases[0].times, device).items()
    ]
    return "\n".join([*lines, ""])
