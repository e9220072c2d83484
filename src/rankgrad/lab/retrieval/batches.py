"""Which rows form a batch: samplers from settings, fitted to data that is too small for them."""

from __future__ import annotations

from rankgrad.lab.retrieval.config import Batch
from rankgrad.lab.retrieval.splits import Items
from rankgrad.lab.training.errors import UserError
from rankgrad.samplers import ClassSampler, SuperLabelSampler

#: Batches that an epoch of a small data set has, where its classes have the items for it.
_STEPS = 5


def fitted(batch: Batch, items: Items) -> tuple[Batch, str]:
    """A batch that the classes can fill, and a note where it differs from the settings.

    A batch shows ``size / per_class`` classes. Where there are fewer, it shows all of them, and more items of each
    as far as most classes have enough of them for several batches: one batch an epoch would hardly train.
    """
    classes = items.classes()
    if batch.sampler != "classes" or batch.size // batch.per_class <= classes:
        return batch, ""
    typical = int(items.labels.bincount().float().quantile(0.5, interpolation="lower"))
    per_class = max(batch.per_class, min(batch.size // classes, typical // _STEPS))
    size = classes * per_class
    told = f"batches of {size}, all {classes} classes x {per_class}, instead of {batch.size}"
    return batch.model_copy(update={"size": size, "per_class": per_class}), told


def sampler_of(batch: Batch, items: Items, seed: int) -> ClassSampler | SuperLabelSampler:
    """The sampler of these settings."""
    try:
        if batch.sampler == "classes":
            return ClassSampler(items.labels, size=batch.size, per_class=batch.per_class, seed=seed)
        if items.super_labels is None:
            raise UserError("batch.sampler: the data set has no super-labels, use classes")
        return SuperLabelSampler(
            items.labels,
            items.super_labels,
            size=batch.size,
            per_class=batch.per_class,
            batches_per_pair=batch.batches_per_pair,
            seed=seed,
        )
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"batch.{error}") from None
