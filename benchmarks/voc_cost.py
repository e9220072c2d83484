"""What the ranking loss adds to a training step of the detector; called by `benchmarks/voc.py --cost`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from rankgrad import graphed
from rankgrad.detection import RegionLoss, use_ranking_loss
from rankgrad.detection.config import Model, View
from rankgrad.detection.drop_in import plain
from rankgrad.detection.model import build
from rankgrad.training import machine, optim
from rankgrad.training.config import Optim

PICTURES, REGIONS, CLASSES, MEMORY = 8, 512, 20, 7
TURNS = 4


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


def measure(side: tuple[int, int] = (384, 480), backbone: str = "resnet50", times: int = 15) -> str:
    """Time whole training steps with both losses, in turns, and the losses alone; a text with the numbers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = "bf16" if device.type == "cuda" else "fp32"
    classes = [str(i) for i in range(CLASSES)]
    network, _ = build(
        Model(backbone=backbone, weights="none"),
        View(short=360, long=720),
        regions=REGIONS,
        classes=classes,
        seed=0,
    )
    network = network.to(device, memory_format=torch.channels_last).train()
    optimizer = optim.make_optimizer(
        [{"params": [p for p in network.parameters() if p.requires_grad]}],
        Optim(name="sgd", lr=1e-4, weight_decay=1e-4),
    )
    pictures = torch.randn(PICTURES, 3, *side, device=device).contiguous(memory_format=torch.channels_last)
    sizes = [side] * PICTURES
    targets = []
    for number in range(PICTURES):
        corner = torch.rand(4, 2, generator=torch.Generator().manual_seed(number)) * torch.tensor(side[::-1]) * 0.5
        boxes = torch.cat([corner, corner + 0.3 * min(side)], dim=1).to(device)
        targets.append({"boxes": boxes, "labels": torch.randint(1, CLASSES + 1, (4,), device=device)})
    ranking = RegionLoss(memory=MEMORY)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with optim.autocast(precision, device):
            total = torch.stack([v.float() for v in network(pictures, sizes, targets).values()]).sum()
        total.backward()
        optimizer.step()

    steps: dict[str, list[float]] = {"cross entropy": [], "ranking": []}
    for _ in range(TURNS):  # in turns, so that both see the same machine
        for name, found in steps.items():
            plain(network) if name == "cross entropy" else use_ranking_loss(network, ranking)
            for _ in range(MEMORY + 5):  # the memory is full, and the loss recorded
                step()
            found += [_milliseconds(step, device) for _ in range(times)]

    logits = torch.randn(PICTURES * REGIONS, 1 + CLASSES, device=device, requires_grad=True)
    labels = torch.randint(1, CLASSES + 1, (len(logits),), device=device)
    labels = labels.where(torch.rand(len(logits), device=device) < 0.25, 0)
    alone: dict[str, list[float]] = {}
    losses: dict[str, Callable[..., Tensor]] = {
        "cross entropy": F.cross_entropy,
        "ranking": graphed(RegionLoss(memory=MEMORY)),
        "ranking, not recorded": RegionLoss(memory=MEMORY),
    }
    for name, loss in losses.items():
        for _ in range(MEMORY + 5):
            loss(logits, labels).backward()
        alone[name] = [
            _milliseconds(lambda loss=loss: loss(logits, labels).backward(), device)  # type: ignore[misc]
            for _ in range(TURNS * times)
        ]
    about = machine.describe(device)
    lines = [
        f"# What the ranking loss adds to a training step: {PICTURES} pictures x {REGIONS} regions x {CLASSES} "
        f"classes, memory {MEMORY}",
        "",
        f"{about['hardware']}. {about['versions']}. {about['started']}. Faster R-CNN {backbone} FPN, {precision}, "
        f"{side[0]} x {side[1]} pixels; median of {TURNS * times}; forward, backward and update.",
        "",
        "| classifier's loss | step, ms | more, % | loss alone, ms | more, % of the step with cross entropy |",
        "|---|---|---|---|---|",
    ]
    base = statistics.median(steps["cross entropy"])
    none = statistics.median(alone["cross entropy"])
    for name, found in alone.items():
        step_cells = "- | - |"
        if name in steps:
            took = statistics.median(steps[name])
            step_cells = f"{took:.2f} | {100 * (took - base) / base:.2f} |"
        by_itself = statistics.median(found)
        lines.append(f"| {name} | {step_cells} {by_itself:.3f} | {100 * (by_itself - none) / base:.2f} |")
    return "\n".join([*lines, ""])
