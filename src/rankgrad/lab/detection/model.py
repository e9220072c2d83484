"""The network: torchvision's Faster R-CNN with a feature pyramid, fed with batches, careful in half precision.

Its weights have torchvision's names: a checkpoint loads into a stock ``FasterRCNN`` of the same backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.poolers import initLevelMapper

from rankgrad.lab.detection.config import Model, View
from rankgrad.lab.detection.proposals import BatchedHeads, BatchedProposals
from rankgrad.lab.training.checkpoint import fill
from rankgrad.lab.training.config import nearest
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.frozen_norm import Folded, fold_frozen_norms
from rankgrad.lab.vision.weights import fetching, load_file, stride_in_1x1

_SHAPES = 512  # of batches whose anchors are kept: 2 MB each at 608 x 800
_LAYERS = ("layer4", "layer3", "layer2", "layer1", "conv1")

#: Networks that torchvision does not have under a name.
_MADE: dict[str, dict[str, Any]] = {
    "resnext101_32x4d": {"block": resnet.Bottleneck, "layers": [3, 4, 23, 3], "groups": 32, "width_per_group": 4},
    "tiny": {"block": resnet.BasicBlock, "layers": [1, 1, 1, 1]},  # for quick experiments on a CPU
}


class FrozenNorm(FrozenBatchNorm2d):  # type: ignore[misc]
    """Frozen batch norm in the precision of its input; torchvision's own makes float32 of bf16."""

    def forward(self, x: Tensor) -> Tensor:
        """The same affine map, one pass over the data."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class FoldedFrozenNorm(Folded, FrozenNorm):
    """A frozen batch norm folded into the convolution before it."""


class FloatHead(RPNHead):  # type: ignore[misc]
    """The RPN's head; its box regression is float32, so that boxes are not rounded to 8 bits."""

    def forward(self, features: list[Tensor]) -> Any:
        """Objectness and box regression of each level."""
        objectness, regression = super().forward(features)
        return [level.float() for level in objectness], [level.float() for level in regression]


class FloatAnchors(AnchorGenerator):  # type: ignore[misc]
    """Anchors in float32 whatever the features are. They follow from shapes alone, so some are kept."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._made: dict[Any, Tensor] = {}

    def forward(self, images: ImageList, features: list[Tensor]) -> list[Tensor]:
        """The anchors of each image."""
        key = (images.tensors.shape[2:], *(f.shape[2:] for f in features), features[0].device)
        if key not in self._made:
            if len(self._made) >= _SHAPES:
                del self._made[next(iter(self._made))]  # the oldest
            like = [f.new_empty((), dtype=torch.float32).expand(f.shape) for f in features]
            self._made[key] = super().forward(ImageList(images.tensors, images.image_sizes[:1]), like)[0]
        return [self._made[key]] * len(images.image_sizes)


class FloatPredictor(FastRCNNPredictor):  # type: ignore[misc]
    """Class logits and box regression in float32: ranks and boxes need more than the 8 bits of bf16."""

    def forward(self, features: Tensor) -> Any:
        """``[regions, 1 + classes]`` and ``[regions, 4 (1 + classes)]``."""
        with torch.autocast(features.device.type, enabled=False):
            return super().forward(features.float())


class Detector(FasterRCNN):  # type: ignore[misc]
    """Faster R-CNN on images that are resized and batched already (:mod:`rankgrad.lab.detection.batches`)."""

    def forward(
        self, images: Tensor, sizes: list[tuple[int, int]], targets: list[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The losses of a batch; boxes of the targets in pixels of the batch."""
        features = self.backbone(images)
        proposals, proposal_losses = self.rpn(ImageList(images, sizes), features, targets)
        _, losses = self.roi_heads(features, proposals, sizes, targets)
        return {**losses, **proposal_losses}

    def regions(self, images: Tensor, sizes: list[tuple[int, int]]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Class logits, box regression and proposals of a batch, from which detections are made."""
        features = self.backbone(images)
        proposals, _ = self.rpn(ImageList(images, sizes), features)
        pooled = self.roi_heads.box_roi_pool(features, proposals, sizes)
        logits, regression = self.roi_heads.box_predictor(self.roi_heads.box_head(pooled))
        return logits, regression, proposals


def _resnet(name: str, pretrained: bool) -> resnet.ResNet:
    known = [n for n in vars(resnet) if n.startswith(("resnet", "resnext", "wide_resnet"))] + list(_MADE)
    if name not in known:
        raise UserError(f"model.backbone: unknown name {name!r}{nearest(name, known)}")
    if name in _MADE:
        if pretrained:
            raise UserError(f"model.weights: torchvision has no weights of {name}; give a safetensors file")
        return resnet.ResNet(**_MADE[name], norm_layer=FrozenNorm)
    with fetching(name):
        return vars(resnet)[name](weights="DEFAULT" if pretrained else None, norm_layer=FrozenNorm)


def _pyramid(body: resnet.ResNet, config: Model) -> BackboneWithFPN:
    trained = [*_LAYERS[: config.trainable], *(["bn1"] if config.trainable == 5 else [])]
    for name, parameter in body.named_parameters():
        parameter.requires_grad_(any(name.startswith(layer) for layer in trained))
    fold_frozen_norms(body, FrozenNorm, FoldedFrozenNorm)
    channels = [body.inplanes // 8 * 2**level for level in range(4)]
    return BackboneWithFPN(body, {f"layer{i + 1}": str(i) for i in range(4)}, channels, config.pyramid)


def _detector(body: resnet.ResNet, config: Model, view: View, regions: int, classes: int) -> Detector:
    sizes = tuple((size,) for size in (32, 64, 128, 256, 512))
    anchors = FloatAnchors(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    network = Detector(
        _pyramid(body, config),
        min_size=view.short,
        max_size=view.long,
        rpn_anchor_generator=anchors,
        rpn_head=FloatHead(config.pyramid, anchors.num_anchors_per_location()[0]),
        rpn_pre_nms_top_n_train=config.proposals,
        rpn_pre_nms_top_n_test=config.proposals,
        rpn_post_nms_top_n_train=config.proposals,
        rpn_post_nms_top_n_test=config.proposals,
        box_head=TwoMLPHead(config.pyramid * 7 * 7, config.hidden),
        box_predictor=FloatPredictor(config.hidden, 1 + classes),
        box_batch_size_per_image=regions,
        box_positive_fraction=0.25,
        box_score_thresh=config.score_threshold,
        box_nms_thresh=config.nms_threshold,
        box_detections_per_img=config.detections,
    )
    network.rpn.__class__, network.roi_heads.__class__ = BatchedProposals, BatchedHeads
    # Otherwise torchvision guesses these from the first batch, and for good: from an image that is mostly padding
    # it guesses wrong, and a run that goes on would guess again.
    pool = network.roi_heads.box_roi_pool
    pool.scales, pool.map_levels = [1 / 4, 1 / 8, 1 / 16, 1 / 32], initLevelMapper(2, 5)
    return network


def backbone(config: Model) -> tuple[resnet.ResNet, bool]:
    """The ResNet with its weights, and whether its stride sits on the 1x1 convolutions."""
    body = _resnet(config.backbone, pretrained=config.weights == "library")
    body.fc = nn.Identity()
    moved = False
    if config.weights not in ("library", "none"):
        moved = load_file(body, Path(config.weights).expanduser())
    return body, moved


def build(
    config: Model, view: View, *, regions: int, classes: Sequence[str], seed: int
) -> tuple[Detector, dict[str, Any]]:
    """The network of these settings, and what a checkpoint must hold to build it without the weights' file."""
    torch.manual_seed(seed)
    body, moved = backbone(config)
    metadata = {"stride_in_1x1": moved, "classes": list(classes)}
    return _detector(body, config, view, regions, len(classes)), metadata


def rebuild(
    config: Model, view: View, *, regions: int, metadata: dict[str, Any], weights: dict[str, Tensor]
) -> Detector:
    """The network of a checkpoint."""
    body = _resnet(config.backbone, pretrained=False)
    body.fc = nn.Identity()
    if metadata.get("stride_in_1x1"):
        stride_in_1x1(body)
    network = _detector(body, config, view, regions, len(metadata["classes"]))
    fill(network, weights)
    return network
