"""Random numbers that follow from (seed, step) alone: a resumed run draws the same ones."""

from __future__ import annotations

import random

import numpy as np
import torch

from rankgrad import distributed


def seed_step(seed: int, step: int) -> None:
    """Seed every global generator for one step of this process."""
    mixed = _mixed(seed, step, distributed.process_index())
    torch.manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)


def step_generator(seed: int, step: int) -> torch.Generator:
    """A generator for one step that is the same in every process."""
    return torch.Generator().manual_seed(_mixed(seed, step, 1) >> 1)


def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
