"""Settings of a detection run."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rankgrad.lab.training.config import Many, NonNegative, Positive, RunConfig, Section, Side, Width, shown
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.vision.config import ImageData

Factor = Annotated[float, Field(gt=0, le=16)]

#: Settings of 0.2 before its release, and the values that turned them off: a run's file has all settings.
_REMOVED = {
    ("loss", "thresholds"): False,
    ("loss", "order_weight"): 0,
    ("boxes", "by_score"): False,
    ("boxes", "balanced"): False,
}


class Data(ImageData):
    """Which images and boxes, and how they are read."""

    name: Literal["voc07", "voc0712", "voc", "coco"]  # the data set, see `rankgrad ls`
    train: str = "trainval"  # voc: the list in ImageSets/Main to train on; coco: how the annotations' name begins
    test: str = "test"  # the same for the test images
    test_limit: Annotated[int, Field(ge=0)] = 0  # test on the first so many images only; 0: all


class View(Section):
    """From a decoded image to the input of the network."""

    short: Side = 600  # pixels of the shorter side
    long: Side = 1000  # at most so many pixels of the longer side
    flip: bool = True  # whether half of the training images are mirrored
    jitter: tuple[Factor, Factor] = (1.0, 1.0)  # multi-scale training: range of the factor on a batch's size

    def longest(self) -> int:
        """The longest side of an image that enters a network of these settings."""
        return max(1, math.ceil(self.long * max(self.jitter[1], 1.0)))

    @model_validator(mode="after")
    def _in_order(self) -> View:
        if self.jitter[0] > self.jitter[1]:
            raise ValueError(f"jitter: expected the smaller factor first, received {list(self.jitter)}")
        return self


class Batch(Section):
    """How batches are drawn: images of like shape together."""

    size: Many = 8  # images in a batch, of all processes
    regions: Many = 512  # regions of an image sampled for the classifier
    test_size: Many = 16  # images at a time in evaluation


class Model(Section):
    """The network: Faster R-CNN with a feature pyramid."""

    backbone: str = "resnet50"  # a ResNet of torchvision, resnext101_32x4d, or tiny
    weights: str = "library"  # library (download), none, or a safetensors file
    trainable: Annotated[int, Field(ge=0, le=5)] = 3  # layers of the backbone that are trained, from the last
    pyramid: Width = 256  # channels of the feature pyramid
    hidden: Width = 1024  # width of the region classifier's two layers
    proposals: Many = 1000  # regions the RPN keeps of an image
    detections: Many = 100  # largest number of detections in an image
    score_threshold: NonNegative = 0.05  # lowest score of a detection
    nms_threshold: Positive = 0.5  # boxes of a class with a larger IoU suppress each other


class Boxes(Section):
    """The loss of the region head's boxes."""

    name: Literal["smooth_l1", "giou"] = "smooth_l1"  # of encoded boxes as in torchvision, or of decoded boxes
    box_weight: Positive = 1.0  # weight of this loss; mmdetection gives GIoU 10


class Rpn(Section):
    """The loss of the objectness of anchors, from which the regions are chosen."""

    name: Literal["cross_entropy", "ranking"] = "cross_entropy"  # of sampled anchors, or of all in an image
    rpn_weight: Positive = 1.0  # weight of the ranking loss

    @model_validator(mode="after")
    def _fit(self) -> Rpn:
        if self.name == "cross_entropy" and self.rpn_weight != 1:
            raise ValueError(f"rpn_weight: expected the loss ranking, received {self.name}")
        return self


class Loss(Section):
    """The region classifier's loss; see :class:`rankgrad.detection.RegionLoss` for all but the name."""

    name: Literal["ranking", "cross_entropy"] = "ranking"  # ranking: a ranking loss added to cross entropy
    form: Literal["ap", "log_ap", "log", "loglog"] = "log_ap"  # AP, its log form, or recall with these weights
    ranked: Literal["odds", "softmax", "logits"] = "odds"  # which class scores are ranked
    ranking_weight: Positive = 0.3  # weight of the ranking loss
    cross_entropy: NonNegative = 1.0  # weight of the cross entropy beside it
    lam: Positive | None = 0.5  # interpolation strength; null without a window: automatic reach
    window: Positive | None = None  # instead of lam: reach in units of the scores
    margin: NonNegative | Literal["auto"] = 0.15  # score margin; auto: a share of the spread of the scores
    memory: Annotated[int, Field(ge=0)] = 7  # past batches that are candidates too
    map_weight: NonNegative = 2.0  # weight of mAP: a list for each class
    pooled_weight: NonNegative = 1.0  # weight of pooled AP: one list of all (region, class) pairs

    @model_validator(mode="after")
    def _one_reach(self) -> Loss:
        if self.lam is not None and self.window is not None:
            raise ValueError(f"lam = {self.lam:g} and window = {self.window:g} exclude each other, say lam=null")
        return self

    def options(self) -> dict[str, Any]:
        """Arguments of the ranking loss."""
        return {key: value for key, value in self.model_dump().items() if key != "name"}


class Config(RunConfig):
    """All settings of a detection run."""

    task: Literal["detection"]
    data: Data
    view: View = View()
    batch: Batch = Batch()
    model: Model = Model()
    loss: Loss = Loss()
    boxes: Boxes = Boxes()
    rpn: Rpn = Rpn()
    scores: Literal["auto", "odds", "softmax", "logits"] = "auto"  # which scores choose the best checkpoint
    target: NonNegative | None = None  # AP50 to expect, for the report

    @classmethod
    def upgraded(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Before 0.2 ``loss.ranked`` was ``rank``, ``loss.ranking_weight`` ``weight``, and no lambda was 0.5.

        Settings that were removed are dropped if they were off.
        """
        settings = _without_removed(settings)
        loss = settings.get("loss")
        if not isinstance(loss, dict) or "rank" not in loss:
            return settings
        new = {"rank": "ranked", "weight": "ranking_weight"}
        loss = {new.get(key, key): value for key, value in loss.items()}
        if loss.get("lam") is None and loss.get("window") is None:
            loss["lam"] = 0.5
        return {**settings, "loss": loss}

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.compile:
            raise ValueError(
                "compile: a detector is not compiled, its batches have too many shapes; received true"
            )
        if self.view.short > self.view.long:
            raise ValueError(f"view.short = {self.view.short} must not exceed view.long = {self.view.long}")
        if self.loss.map_weight + self.loss.pooled_weight == 0:
            raise ValueError("loss.map_weight, loss.pooled_weight: one of them must be > 0, received 0 and 0")
        return self

    def protocol(self) -> str:
        """Whose average precisions are reported: ``"coco"`` or ``"voc"``."""
        return "coco" if self.data.name == "coco" else "voc"

    def scoring(self) -> str:
        """The scores that count: softmax where cross entropy is in the loss, else what is ranked."""
        if self.scores != "auto":
            return self.scores
        alone = self.loss.name == "ranking" and not self.loss.cross_entropy
        return self.loss.ranked if alone else "softmax"

    def scorings(self) -> tuple[str, ...]:
        """Every run is judged with softmax scores and with odds, and with what it ranks."""
        ranked = [self.loss.ranked] if self.loss.name == "ranking" else []
        return tuple(dict.fromkeys([self.scoring(), "softmax", "odds", *ranked]))


def _without_removed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that were removed; one that was on is an error."""
    for (name, key), off in _REMOVED.items():
        section = settings.get(name)
        if not isinstance(section, dict) or key not in section:
            continue
        if section[key] != off:
            raise UserError(
                f"{name}.{key}: expected {off}, received {shown(section[key])}; the setting was removed after "
                "commit bba2f19, which still loads such a run"
            )
        settings = {**settings, name: {other: value for other, value in section.items() if other != key}}
    return settings
