"""Small torchvision detectors with random weights, a batch for them, and what they give for it."""

import torch
from torch import nn
from torchvision.models.detection import FasterRCNN, KeypointRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign

CLASSES = 4


class Tiny(nn.Sequential):
    """A backbone with one feature map, in torchvision's terms."""

    out_channels = 8

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU()
        )


def detector(kind=FasterRCNN, head="v1", **options):
    torch.manual_seed(0)
    settings = {
        "min_size": 64,
        "max_size": 96,
        "rpn_anchor_generator": AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),)),
        "box_roi_pool": MultiScaleRoIAlign(["0"], 3, 2),
        "box_batch_size_per_image": 32,
        "box_predictor": FastRCNNPredictor(16, 1 + CLASSES),
        "rpn_post_nms_top_n_train": 60,
        "rpn_post_nms_top_n_test": 40,
        "box_score_thresh": 0.01,
    }
    if head == "v1":
        settings["box_head"] = nn.Sequential(nn.Flatten(), nn.Linear(8 * 9, 16), nn.ReLU())
    else:
        settings["box_head"] = FastRCNNConvFCHead((8, 3, 3), [8, 8], [16], norm_layer=nn.BatchNorm2d)
    if kind is MaskRCNN:
        settings["mask_roi_pool"] = MultiScaleRoIAlign(["0"], 4, 2)
        settings["mask_predictor"] = nn.Conv2d(8, 1 + CLASSES, 1)
        settings["mask_head"] = nn.Conv2d(8, 8, 3, padding=1)
    if kind is KeypointRCNN:
        settings["num_keypoints"] = 3
        settings["keypoint_roi_pool"] = MultiScaleRoIAlign(["0"], 14, 2)
    model = kind(Tiny(), **{**settings, **options})
    nn.init.normal_(model.roi_heads.box_predictor.cls_score.weight, std=2.0)  # scores that differ
    return model


def batch(kind=FasterRCNN):
    generator = torch.Generator().manual_seed(5)
    images = [torch.rand(3, 64, 80, generator=generator), torch.rand(3, 60, 66, generator=generator)]
    targets = []
    for image, boxes in zip(images, ([[4.0, 6, 30, 40], [20, 10, 60, 50]], []), strict=True):
        target = {
            "boxes": torch.tensor(boxes).reshape(-1, 4),
            "labels": torch.tensor([1, 3][: len(boxes)], dtype=torch.int64),
        }
        if kind is MaskRCNN:
            target["masks"] = torch.ones(len(boxes), *image.shape[1:], dtype=torch.uint8)
        if kind is KeypointRCNN:
            target["keypoints"] = torch.rand(len(boxes), 3, 3) * 20
        targets.append(target)
    return images, targets


def losses_of(model, kind=FasterRCNN, seed=1):
    images, targets = batch(kind)
    torch.manual_seed(seed)  # the same regions are sampled
    return model.train()(images, targets)


def detections(model):
    with torch.no_grad():
        return model.eval()(batch()[0])


def same(a, b):
    return all(torch.equal(x[k], y[k]) for x, y in zip(a, b, strict=True) for k in x)
