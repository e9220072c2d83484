"""Train a network to sort."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.engine.ranker import exact_ranks
from rankgrad.lab.sodeep.files import read, save
from rankgrad.surrogates.sodeep.networks import ARCHITECTURES, Sorter, filled

#: Steps between two calls of ``progress``.
_REPORT = 100


def synthetic_lists(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Training lists ``[rows, length]``: a mixture, by row, of the distributions the paper trains on.

    Uniform on [-1, 1]; normal; evenly spaced over a random range, shuffled; and normal around a random centre
    with a random, often small, spread. A quarter of the lists is shorter and filled up, as :func:`sodeep_rank`
    does.
    """

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ends = 2 * uniform(rows, 2) - 1
    evenly = ends[:, :1] + (ends[:, 1:] - ends[:, :1]) * torch.linspace(0, 1, length)
    evenly = evenly.gather(-1, uniform(rows, length).argsort(-1))
    narrow = 2 * uniform(rows, 1) - 1 + normal(rows, length) * 10 ** (-2 * uniform(rows, 1))
    kinds = torch.stack([2 * uniform(rows, length) - 1, normal(rows, length), evenly, narrow])
    kind = torch.randint(len(kinds), (rows,), generator=generator)
    lists = kinds[kind, torch.arange(rows)]
    size = torch.randint(1, length + 1, (rows, 1), generator=generator)
    whole = uniform(rows, 1) < 0.75
    return filled(lists, whole | (torch.arange(length) < size))


def train(
    length: int,
    *,
    architecture: str = "lstm",
    hidden: int | None = None,
    layers: int | None = None,
    steps: int = 3000,
    batch_size: int = 128,
    learning_rate: float = 1e-2,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Sorter:
    """Train a sorter for lists of up to ``length`` items; minutes on two cores for a few dozen items.

    Minimises the mean distance between its ranks and the true ones (L1, as in the paper) on ever new synthetic
    lists, with Adam and a learning rate that rises to the given one and falls to 0. The same arguments give the
    same weights on the same machine; the global random state is neither used nor changed.

    Args:
        length: The longest list.
        architecture: ``"lstm"`` or ``"cnn"``.
        hidden, layers: As in :class:`LSTMSorter` and :class:`CNNSorter`; None for their defaults.
        steps, batch_size, learning_rate: The training.
        seed: For the first weights and the lists.
        out: Where to save it: a ``.safetensors`` file, complete or not there at all. **If it exists already and
            was made with the same arguments, it is loaded instead**; made with others it is replaced.
        progress: Called with (step, mean error in ranks over the last steps) every 100 steps.

    Returns:
        The sorter, its weights frozen.

    Example:
        >>> from rankgrad.lab.sodeep import train
        >>> sorter = train(5, hidden=16, steps=20)
        >>> sorter.length
        5
    """
    _check.one_of("architecture", architecture, tuple(ARCHITECTURES))
    recipe: dict[str, Any] = {
        "architecture": architecture,
        "length": _check.count("length", length, at_least=1),
        "hidden": hidden,
        "layers": layers,
        "steps": _check.count("steps", steps, at_least=1),
        "batch_size": _check.count("batch_size", batch_size, at_least=1),
        "learning_rate": _check.positive("learning_rate", learning_rate),
        "seed": _check.count("seed", seed, at_least=0),
    }
    if out is not None and Path(out).exists():
        sorter, made_by = read(out)
        if made_by == recipe:
            return sorter
    sizes = {name: size for name, size in (("hidden", hidden), ("layers", layers)) if size is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sorter = ARCHITECTURES[architecture](length, **sizes)
    _fit(sorter, steps, batch_size, learning_rate, torch.Generator().manual_seed(seed), progress)
    sorter.requires_grad_(False)
    if out is not None:
        save(sorter, out, recipe=recipe)
    return sorter


def _fit(
    sorter: Sorter,
    steps: int,
    batch_size: int,
    learning_rate: float,
    generator: torch.Generator,
    progress: Callable[[int, float], None] | None,
) -> None:
    optimizer = torch.optim.Adam(sorter.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps + 1)
    recent = 0.0
    for step in range(1, steps + 1):
        scores = synthetic_lists(batch_size, sorter.length, generator)
        error = (sorter(scores) - exact_ranks(scores, None, "average") / sorter.length).abs().mean()
        optimizer.zero_grad()
        error.backward()
        torch.nn.utils.clip_grad_norm_(sorter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent += error.item() * sorter.length
        if progress is not None and step % _REPORT == 0:
            progress(step, recent / _REPORT)
        if step % _REPORT == 0:
            recent = 0.0
