"""torchvision's RoI heads with another loss at the classifier and other scores at test time.

Only three seams of ``RoIHeads`` are used, all there since torchvision 0.3: ``box_predictor`` gives the class
logits, ``F.cross_entropy`` is taken of them in training, ``postprocess_detections`` turns them into detections.
torchvision's own ``forward`` runs as it is.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.roi_heads import RoIHeads

from rankgrad.cuda_graphs import Graphed
from rankgrad.detection.inference import detections_of
from rankgrad.detection.region_loss import RegionLoss, padded

#: Attributes that hold what the drop-in needs. They are no submodules: the state_dict stays torchvision's.
LOSS, REPLAYED, SCORES = "region_loss", "replayed_loss", "region_scores"


#: Stands where torchvision's cross entropy would be, until our loss is there.
_TO_COME = torch.tensor(torch.nan, device="cpu")


class ClassLogits(Tensor):
    """Class logits that note the labels of which their cross entropy is taken, and have none themselves.

    All else is done with them as with any tensor.
    """

    labels: list[Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.cross_entropy:
            args[0].labels.append(args[1])
            return _TO_COME
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class RankingHeads:
    """The part that goes in front of ``RoIHeads`` in the order of classes."""

    training: bool
    box_predictor: nn.Module
    fg_bg_sampler: Any

    def forward(self, features: Any, proposals: list[Tensor], *rest: Any, **named: Any) -> Any:
        """As in torchvision, with our loss under ``loss_classifier``.

        It is taken last: the box loss makes Python wait for the GPU, which should not have our launches before it.
        """
        logits: list[Tensor] = []
        labels: list[Tensor] = []
        device = proposals[0].device.type
        autocast = torch.is_autocast_enabled(device)

        def begin(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            if not autocast:
                return inputs
            # bf16 keeps 8 bits: thousands of regions fall onto a few values, and ties rank as badly as they can
            torch.set_autocast_enabled(device, False)
            return tuple(value.float() if isinstance(value, Tensor) else value for value in inputs)

        def end(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            torch.set_autocast_enabled(device, autocast)
            if not self.training:
                return output
            logits.append(output[0])
            noting = output[0].as_subclass(ClassLogits)
            noting.labels = labels
            return noting, *output[1:]

        predictor = self.box_predictor
        try:
            with predictor.register_forward_pre_hook(begin), predictor.register_forward_hook(end):
                result, losses = super().forward(features, proposals, *rest, **named)  # type: ignore[misc]
        finally:
            torch.set_autocast_enabled(device, autocast)
        if self.training:
            if not any(value is _TO_COME for value in losses.values()):
                kind = original(type(self)).__name__
                raise TypeError(
                    f"model: expected roi_heads with a loss F.cross_entropy(class_logits, labels), received {kind}"
                )
            loss = self._loss(logits[0], labels[0], len(proposals) * self.fg_bg_sampler.batch_size_per_image)
            losses = {name: loss if value is _TO_COME else value for name, value in losses.items()}
        return result, losses

    def _loss(self, class_logits: Tensor, labels: Tensor, regions: int) -> Tensor:
        """The given loss. Where it is recorded and replayed, all batches get so many regions."""
        inputs: tuple[Tensor, ...] = (class_logits, labels)
        loss: nn.Module = self.__dict__[LOSS]
        replayed: nn.Module = self.__dict__[REPLAYED]
        if not loss.training:
            loss.train()
        if type(loss) is RegionLoss:
            loss.ranking.memory.follow(class_logits.device)
            if len(labels) < regions and cast(Graphed, replayed).replays(*inputs):
                inputs = padded(class_logits, labels, regions)
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


class RankingRoIHeads(RankingHeads, RoIHeads):  # type: ignore[misc]
    """torchvision's own heads with the exchange; a class of the module, so that a model can be pickled."""


_MADE: dict[type, type] = {RoIHeads: RankingRoIHeads}


def exchanged(kind: type) -> type:
    """The class of heads with the exchange, for heads of this class (torchvision's, or a user's subclass)."""
    if kind not in _MADE:
        _MADE[kind] = type(f"Ranking{kind.__name__}", (RankingHeads, kind), {})
    return _MADE[kind]


def original(kind: type) -> type:
    """The class of heads before the exchange."""
    return next(plain for plain, made in _MADE.items() if made is kind)
