"""The mAP within a small batch is not the data set's: how far off it is, and how a memory reduces that."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankgrad import metrics
from rankgrad.lab.figures import style
from rankgrad.lab.figures.drawing import Drawing, FigureInputs
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.reading import check_memory, size_of
from rankgrad.pairs import retrieval_pairs

MEMORIES = (0, 3, 7)
_CHUNK = 2**24  # scores that are computed at a time
_MOST = 2**17  # items: all of them are ranked for each

CAPTION = """mAP within a batch of {data}, its items as queries and as candidates, against the size of the
batch. Lines are the mean over random batches, bands one standard deviation; the dashed line is the mAP of all
{n:,} items, which training should improve. What to see: a small batch is optimistic, because few wrong
items are there to stand ahead of a right one, and noisy. Memory (the last batches as further candidates) brings
the mean nearer to the data set's: a batch with a memory of 3 has the bias of a batch four times as large."""


def draw(inputs: FigureInputs) -> list[Drawing]:
    """From ``--embeddings`` or ``--run``, or from scikit-learn's digits as they are."""
    embeddings, labels, name = _embeddings(inputs)
    n = len(labels)
    sizes = [2**k for k in range(4, 20) if 2**k * 2 <= n]
    truth = whole(embeddings, labels)
    if math.isnan(truth):
        raise UserError(f"no two items of {name} have the same label: there is nothing to find")
    with style.applied():
        figure = style.sheet(5.8, 3.7)
        axes = figure.subplots()
        axes.axhline(truth, color=style.BLACK, lw=1.1, ls="--")
        beside = axes.get_yaxis_transform()
        axes.text(1.01, truth, f"all {n:,}\nitems: {truth:.3f}", transform=beside, va="center", fontsize=8)
        looks = zip(MEMORIES, (style.RED, style.BLUE, style.GREEN), ("o", "s", "^"), strict=True)
        for memory, colour, marker in looks:
            fits = [size for size in sizes if size * (memory + 1) <= n]
            found = [estimates(embeddings, labels, size, memory).numpy() for size in fits]
            mean, deviation = (np.array([each(one) for one in found]) for each in (np.nanmean, np.nanstd))
            label = f"memory of {memory} batches" if memory else "no memory"
            axes.plot(fits, mean, color=colour, marker=marker, ms=4, label=label)
            upper = np.minimum(mean + deviation, 1)  # there is no mAP above
            axes.fill_between(fits, mean - deviation, upper, color=colour, alpha=0.15, lw=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("batch size")
        axes.set_ylabel("mAP within a batch")
        axes.grid(True, axis="y")
        axes.legend(loc="upper right")
    return [Drawing("batch-bias", figure, CAPTION.format(data=name, n=n))]


def estimates(embeddings: Tensor, labels: Tensor, size: int, memory: int) -> Tensor:
    """mAP of random batches, ``[batches]``: ``size`` queries, ``memory`` more batches as candidates."""
    generator = torch.Generator().manual_seed(1000 * size + memory)
    found = []
    for _ in range(drawn(size)):
        rows = torch.randperm(len(labels), generator=generator)[: size * (memory + 1)]
        found.append(_mean_ap(embeddings, labels, rows[:size], rows))
    return torch.stack(found)


def drawn(size: int) -> int:
    """How many batches: small ones scatter more and cost less."""
    return max(40, min(600, 16_000 // size))


def whole(embeddings: Tensor, labels: Tensor) -> float:
    """mAP of all items, each against all others."""
    rows = torch.arange(len(labels))
    every = _average_precisions(embeddings, labels, rows, rows)
    return float(every[every >= 0].mean())


def _mean_ap(embeddings: Tensor, labels: Tensor, queries: Tensor, candidates: Tensor) -> Tensor:
    """Mean over queries with something relevant; NaN if there is none: such a batch has no mAP."""
    found = _average_precisions(embeddings, labels, queries, candidates)
    return found[found >= 0].mean()


def _average_precisions(embeddings: Tensor, labels: Tensor, queries: Tensor, candidates: Tensor) -> Tensor:
    """AP of each query; -1 where nothing is relevant. The queries are the first candidates or their own rows."""
    place = torch.full((len(labels),), -1).index_put((candidates,), torch.arange(len(candidates)))
    parts = []
    for some in queries.split(max(1, _CHUNK // len(candidates))):
        scores, relevance, mask = retrieval_pairs(
            embeddings[some], labels[some], embeddings[candidates], labels[candidates], place[some]
        )
        assert mask is not None
        found = metrics.average_precision(scores, relevance, mask=mask, reduction="none")
        parts.append(found.where((relevance & mask).any(-1), -1.0))
    return torch.cat(parts)


def _embeddings(inputs: FigureInputs) -> tuple[Tensor, Tensor, str]:
    if inputs.embeddings is not None:
        return *_from_file(inputs.embeddings), str(inputs.embeddings.name)
    if inputs.run is not None:
        return *_from_run(inputs.run), f"the test images of the run {inputs.run.name!r}"
    from sklearn.datasets import load_digits

    pixels, target = load_digits(return_X_y=True)
    features = torch.tensor(pixels, dtype=torch.float32)
    return features - features.mean(0), torch.tensor(target), "scikit-learn's digits (centred pixels)"


def _from_file(path: Path) -> tuple[Tensor, Tensor]:
    """``labels``, or the folder of each of the ``names`` that ``rankgrad embed`` writes."""
    if not path.is_file():
        raise UserError(f"--embeddings: no such file {str(path)!r}")
    found = _arrays(path)
    if "embeddings" not in found or not {"labels", "names"} & set(found):
        raise UserError(f"--embeddings: expected `embeddings` and `labels` (or `names`) in {str(path)!r}")
    embeddings, kind = found["embeddings"], "labels" if "labels" in found else "names"
    numeric = embeddings.ndim == 2 and embeddings.dtype.kind in "fiu"
    with np.errstate(over="ignore"):
        rows = torch.tensor(embeddings.astype(np.float32) if numeric else torch.nan)
    if not bool(rows.isfinite().all()):
        received = f"{embeddings.dtype} of shape {list(embeddings.shape)}"
        raise UserError(f"--embeddings: {path}: expected finite `embeddings` [N, dim], received {received}")
    if found[kind].shape != (len(embeddings),):
        shape = list(found[kind].shape)
        raise UserError(f"--embeddings: {path}: expected `{kind}` of {len(embeddings)} items, received {shape}")
    if len(embeddings) > _MOST:
        raise UserError(f"--embeddings: {path}: expected up to {_MOST:,} items, received {len(embeddings):,}")
    kinds = found["labels"] if kind == "labels" else [Path(str(name)).parent.name for name in found["names"]]
    numbers = np.unique(np.asarray(kinds), return_inverse=True)[1]
    return rows, torch.tensor(numbers)


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an ``.npz`` that are used, if they are in proportion to it: zeros take no place there."""
    size = size_of(path, argument="--embeddings")
    try:
        with zipfile.ZipFile(path) as file:
            unpacked = sum(one.file_size for one in file.infolist())
        check_memory(3 * unpacked, f"--embeddings: {path}", "its arrays", size)
        with np.load(path) as found:
            return {name: np.asarray(found[name]) for name in ("embeddings", "labels", "names") if name in found}
    except UserError:
        raise
    except (OSError, ValueError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"--embeddings: {path}: expected an .npz of arrays ({error})") from None


def _from_run(run: Path) -> tuple[Tensor, Tensor]:
    from rankgrad.lab import recipes
    from rankgrad.lab.retrieval.task import RetrievalTask, embed
    from rankgrad.lab.training import machine

    task, checkpoint = recipes.of_checkpoint(run / "best.safetensors")
    config = checkpoint.config
    if not issubclass(task, RetrievalTask):
        raise UserError(f"--run: expected a run that trains embeddings, received one of the task {config.task!r}")
    config = task.completed(config)
    device = machine.device_of(config.device)
    network = task.rebuild(checkpoint._replace(config=config)).to(device)
    _, query, _ = task.sources(config, device, train=False)
    return embed(network, query, config.precision).cpu(), query.items.labels
