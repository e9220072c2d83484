"""torchvision's RoI heads with another loss at the classifier and other scores at test time.

torchvision computes the classifier's loss in a function that ``RoIHeads.forward`` calls, not in a method, so
there is no method to override: its forward runs as it is, and its ``loss_classifier`` is replaced afterwards.
What the loss needs passes through three members that exist since torchvision 0.3: ``select_training_samples``
gives the label of each sampled region and the box of its object, ``box_predictor`` class logits and boxes, and
``postprocess_detections`` turns them into detections.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from rankgrad.detection.boxes import BOX_WEIGHT, sampled_giou_loss
from rankgrad.detection.exchange import Exchanged
from rankgrad.detection.inference import detections_of
from rankgrad.detection.region_loss import RegionLoss, padded
from rankgrad.graphs import Graphed

#: Attributes that hold what the drop-in needs. They are no submodules: the state_dict stays torchvision's.
LOSS, REPLAYED, SCORES, BOXES = "region_loss", "replayed_loss", "region_scores", "giou_boxes"


def in_float32(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """The output of a box predictor; class logits of half precision are computed again in float32.

    bf16 keeps 8 bits: thousands of regions fall onto a few values, and ties rank as badly as they can. The box
    regression is kept.
    """
    if output[0].dtype not in (torch.float16, torch.bfloat16) or not torch.is_autocast_enabled(
        output[0].device.type
    ):
        return output
    with torch.autocast(output[0].device.type, enabled=False):
        again = module.forward(*(value.float() if isinstance(value, Tensor) else value for value in inputs))
    return (again[0], *output[1:]) if type(output) is tuple else again


class RankingHeads(Exchanged):
    """RoI heads with our loss; mixed into the class of a model's heads, torchvision's or a user's."""

    training: bool
    box_predictor: nn.Module
    box_coder: Any
    fg_bg_sampler: Any

    def select_training_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As in torchvision; regions, labels and targets are kept for the loss."""
        samples = super().select_training_samples(*args, **kwargs)  # type: ignore[misc]
        self.__dict__["_sampled"] = samples
        return samples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As in torchvision, with our loss under ``loss_classifier`` and, if wanted, under ``loss_box_reg``."""
        seen: list[Any] = []

        def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            output = in_float32(module, inputs, output)
            seen.append(output)
            return output

        hook = self.box_predictor.register_forward_hook(keep)
        try:
            result, losses = super().forward(*args, **kwargs)  # type: ignore[misc]
            if self.training:
                logits, regression = seen[0][:2]
                regions, _, labels, targets = self.__dict__["_sampled"][:4]
                losses["loss_classifier"] = self._loss(logits, labels)
                if self.__dict__[BOXES]:
                    giou = sampled_giou_loss(self.box_coder, regression, regions, labels, targets)
                    losses["loss_box_reg"] = BOX_WEIGHT * giou
            return result, losses
        finally:
            self.__dict__.pop("_sampled", None)
            hook.remove()

    def _loss(self, class_logits: Tensor, labels: list[Tensor]) -> Tensor:
        """The given loss. Where it is recorded and replayed, batches get the same number of regions."""
        together = torch.cat(labels)
        inputs: tuple[Tensor, ...] = (class_logits, together)
        loss: nn.Module = self.__dict__[LOSS]
        replayed: nn.Module = self.__dict__[REPLAYED]
        # torchvision computes losses in training mode only. Without gradients this is validation, whose regions
        # must not enter the memory.
        if loss.training != torch.is_grad_enabled():
            loss.train(torch.is_grad_enabled())
        if type(loss) is RegionLoss:
            loss.ranking.memory.follow(class_logits.device)
            most = len(labels) * self.fg_bg_sampler.batch_size_per_image
            if len(together) < most and cast(Graphed, replayed).replays(*inputs):
                inputs = padded(class_logits, together, most)
        elif any(one.numel() and one.device != class_logits.device for one in loss.buffers()):
            loss.to(class_logits.device)
        return cast(Tensor, replayed(*inputs))

    def postprocess_detections(
        self, class_logits: Tensor, box_regression: Tensor, proposals: Any, image_shapes: Any
    ) -> Any:
        """As in torchvision for softmax scores; otherwise the same steps on the other scores."""
        scores: str = self.__dict__[SCORES]
        if scores == "softmax":
            return super().postprocess_detections(  # type: ignore[misc]
                class_logits, box_regression, proposals, image_shapes
            )
        found = detections_of(self, class_logits, box_regression, proposals, image_shapes, scores)
        return (
            [one["boxes"] for one in found],
            [one["scores"] for one in found],
            [one["labels"] for one in found],
        )
