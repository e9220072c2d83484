"""Which rows form a batch: samplers from settings, fitted to data that is too small for them."""

from __future__ import annotations

from rankgrad.lab.retrieval.config import Batch
from rankgrad.lab.retrieval.splits import Items
from rankgrad.lab.training.errors import UserError
from rankgrad.samplers import ClassSampler, SuperLabelSampler

#: Batches that an epoch of a small data set has, where its classes have the items for it.
_STEPS = 5


def fitted(batch: Batch, items: Items, processes: int = 1) -> tuple[Batch, str]:
    """A batch that the classes can fill, and a note where it differs from the settings.

    A batch has ``size / per_class`` classes, and of each at most as many items as the median class has, because an
    item that is twice in a batch adds nothing. Where there are fewer classes it has all of them, and more items of
    each, as long as most classes have enough items for several batches in an epoch. A batch that differs from the
    settings can be divided among the processes.
    """
    if batch.sampler != "classes":
        return batch, ""
    classes = items.classes()
    typical = int(items.labels.bincount().float().quantile(0.5, interpolation="lower"))
    per_class = max(min(batch.per_class, typical), min(batch.per_class, 2))
    if batch.size // per_class > classes:
        per_class = max(per_class, min(batch.size // classes, typical // _STEPS))
    elif per_class == batch.per_class:
        return batch, ""
    many, per_class = _shared(min(classes, batch.size // per_class), per_class, processes)
    size, of = many * per_class, f"all {many}" if many == classes else f"{many}"
    given = f"{batch.size}, {batch.size // batch.per_class} classes x {batch.per_class}"
    note = f"batches of {size}, {of} classes x {per_class}, instead of {given}"
    return batch.model_copy(update={"size": size, "per_class": per_class}), note


def _shared(classes: int, per_class: int, processes: int) -> tuple[int, int]:
    """The largest batch of at most so many classes and items of each that can be shared among the processes."""
    found = [
        (many, each)
        for each in range(per_class, 0, -1)
        for many in range(classes, 0, -1)
        if many * each % processes == 0 and min(many, each) > 1
    ]
    return max(found, key=lambda one: one[0] * one[1], default=(classes, per_class))


def sampler_of(batch: Batch, items: Items, seed: int) -> ClassSampler | SuperLabelSampler:
    """The sampler of these settings."""
    try:
        if batch.sampler == "classes":
            return ClassSampler(items.labels, size=batch.size, per_class=batch.per_class, seed=seed)
        if items.super_labels is not None:
            return SuperLabelSampler(
                items.labels,
                items.super_labels,
                size=batch.size,
                per_class=batch.per_class,
                batches_per_pair=batch.batches_per_pair,
                seed=seed,
            )
    except ValueError as error:
        raise UserError(f"batch.{error}") from None
    raise UserError("batch.sampler: the data set has no super-labels, use classes")
