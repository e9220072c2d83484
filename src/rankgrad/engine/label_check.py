"""Labels that name no class, found inside an op: the check holds under torch.compile, and no GPU is waited for."""

# No `from __future__ import annotations`: torch reads the annotations to make the op's schema.
import torch
from torch import Tensor

from rankgrad import _check
from rankgrad.engine.registration import fake_of, op


@op
def unknown_labels(labels: Tensor, classes: int) -> Tensor:
    """0, or NaN where a label is not one of 0 ... classes - 1: an error on the CPU, a float32 scalar elsewhere."""
    unknown = (labels < 0) | (labels >= classes)
    if labels.device.type == "cpu":
        if bool(unknown.any()):
            raise _check.fail("labels", f"0 to {classes - 1} (num_classes - 1)", labels[unknown][0].item())
        return torch.zeros(())
    return torch.where(unknown.any(), torch.nan, 0.0)


@fake_of("unknown_labels")
def _(labels: Tensor, classes: int) -> Tensor:
    return labels.new_empty((), dtype=torch.float32)
