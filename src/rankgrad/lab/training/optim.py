"""Optimiser, learning rate and precision, from settings. The rate is a function of the step: no state to save."""

from __future__ import annotations

import math
from typing import Any

import torch

from rankgrad.lab.training.config import Optim


def make_optimizer(groups: list[dict[str, Any]], config: Optim) -> torch.optim.Optimizer:
    """An optimiser over parameter groups.

    A group's ``scale`` multiplies the learning rate; a group with ``begin`` learns nothing in its first epochs.
    """
    groups = [{"scale": 1.0, "begin": 0.0, **group} for group in groups if group["params"]]
    if config.name == "sgd":
        # Not fused: where a GradScaler skips the first step, fused SGD goes on from uninitialised momentum.
        return torch.optim.SGD(groups, config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    fused = all(parameter.is_cuda for group in groups for parameter in group["params"])
    return kind(groups, config.lr, weight_decay=config.weight_decay, fused=fused or None)


def learning_rate(config: Optim, step: int, steps_per_epoch: int, epochs: int, begin: float = 0.0) -> float:
    """The rate of one step, counted from 0, for parameters that begin to learn after ``begin`` epochs."""
    rate = config.lr
    waited = step - math.ceil(begin * steps_per_epoch)
    if waited < 0:
        return 0.0
    if warmup := min(config.warmup, steps_per_epoch * epochs // 2):
        rate *= min(1.0, (waited + 1) / warmup)
    if config.schedule == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * step / (steps_per_epoch * epochs)))
    if config.schedule == "steps":
        rate *= config.decay ** sum(step >= milestone * steps_per_epoch for milestone in config.milestones)
    return rate


def schedule_warnings(config: Optim, steps_per_epoch: int, epochs: int) -> list[str]:
    """Warnings about a schedule that does not fit the length of the run: few images, or epochs set by hand."""
    warnings, steps = [], steps_per_epoch * epochs
    by_steps = config.schedule == "steps" and config.milestones
    enough = math.ceil(2 * config.warmup / steps_per_epoch)
    if epochs < enough:
        later = f" optim.milestones=[{round(0.75 * enough)}]" if by_steps else ""
        warnings.append(
            f"epochs={epochs} is {steps:,} steps in all, which may be too few: optim.warmup={config.warmup} is "
            f"cut to {steps // 2:,} steps; try epochs={enough}{later}"
        )
    elif by_steps and not max(config.milestones) < epochs <= 2 * max(config.milestones):
        last = f"{max(config.milestones):g}"
        warnings.append(
            f"optim.milestones end at epoch {last} of {epochs}, so the rate falls too early or never: try "
            f"optim.milestones=[{0.75 * epochs:g}]"
        )
    return warnings


def set_rates(
    optimizer: torch.optim.Optimizer, config: Optim, step: int, steps_per_epoch: int, epochs: int
) -> None:
    """Give every group its rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = group["scale"] * learning_rate(config, step, steps_per_epoch, epochs, group["begin"])


def hold_back(optimizer: torch.optim.Optimizer) -> None:
    """Drop the gradients of groups that do not learn yet: neither clipping nor the optimiser uses them."""
    for group in optimizer.param_groups:
        if group["lr"] == 0.0:
            for parameter in group["params"]:
                parameter.grad = None


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """The context for the forward pass."""
    if precision == "auto":  # most CPUs compute bf16 five to eight times slower than fp32
        precision = "fp32" if device.type == "cpu" else "bf16"
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
