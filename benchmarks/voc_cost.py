"""What the ranking loss adds to a training step of the detector; called by `benchmarks/voc.py --cost`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from rankgrad.detection import RegionLoss, use_ranking_loss
from rankgrad.detection.config import Model, View
from rankgrad.detection.drop_in import plain
from rankgrad.detection.model import build
from rankgrad.training import machine, optim
from rankgrad.training.config import Optim

PICTURES, REGIONS, CLASSES, MEMORY = 8, 512, 20, 7


def _milliseconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Wall time of one call, the device waited for: the median of some."""
    took = []
    for _ in range(times):
        _wait(device)
        begin = time.perf_counter()
        run()
        _wait(device)
        took.append(1000 * (time.perf_counter() - begin))
    return statistics.median(took)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(side: tuple[int, int] = (384, 480), backbone: str = "resnet50", times: int = 60) -> str:
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
    losses = {"cross entropy": None, "ranking": RegionLoss(memory=MEMORY)}
    if device.type == "cuda":
        losses["ranking, recorded"] = RegionLoss(memory=MEMORY, graph=PICTURES * REGIONS)

    def step(loss: RegionLoss | None) -> None:
        plain(network) if loss is None else use_ranking_loss(network, loss)
        optimizer.zero_grad(set_to_none=True)
        with optim.autocast(precision, device):
            total = torch.stack([v.float() for v in network(pictures, sizes, targets).values()]).sum()
        total.backward()
        optimizer.step()

    for _ in range(MEMORY + 3):
        for loss in losses.values():
            step(loss)
    steps: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(times):  # in turns, so that both see the same machine
        for name, loss in losses.items():
            steps[name].append(_milliseconds(lambda loss=loss: step(loss), device, 1))  # type: ignore[misc]
    medians = {name: statistics.median(found) for name, found in steps.items()}

    logits = torch.randn(PICTURES * REGIONS, 1 + CLASSES, device=device, requires_grad=True)
    labels = torch.randint(1, CLASSES + 1, (len(logits),), device=device)
    labels = labels.where(torch.rand(len(logits), device=device) < 0.25, 0)
    alone = {"cross entropy": _milliseconds(lambda: F.cross_entropy(logits, labels).backward(), device, times)}
    for name, loss in losses.items():
        if loss is not None:
            loss.reset()
            for _ in range(MEMORY + 3):
                loss(logits, labels).backward()
            alone[name] = _milliseconds(lambda loss=loss: loss(logits, labels).backward(), device, times)  # type: ignore[misc]
    about = machine.describe(device)
    lines = [
        f"# What the ranking loss adds to a training step: {PICTURES} pictures x {REGIONS} regions x {CLASSES} "
        f"classes, memory {MEMORY}",
        "",
        f"{about['hardware']}. {about['versions']}. {about['started']}. Faster R-CNN {backbone} FPN, {precision}, "
        f"{side[0]} x {side[1]} pixels; median of {times}; forward, backward and update.",
        "",
        "| classifier's loss | step, ms | more, % | loss alone, ms | more, % of the step with cross entropy |",
        "|---|---|---|---|---|",
    ]
    base = medians["cross entropy"]
    for name in losses:
        more = [100 * (found[name] - found["cross entropy"]) / base for found in (medians, alone)]
        lines.append(f"| {name} | {medians[name]:.2f} | {more[0]:.2f} | {alone[name]:.3f} | {more[1]:.2f} |")
    return "\n".join([*lines, ""])
