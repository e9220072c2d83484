"""Object detection trained for mAP: a drop-in for torchvision's detectors."""

from rankgrad.detection.calibration import calibrate
from rankgrad.detection.drop_in import plain, ranking_loss, use_ranking_loss
from rankgrad.detection.region_loss import RegionLoss, class_log_odds, class_scores

__all__ = [
    "RegionLoss",
    "calibrate",
    "class_log_odds",
    "class_scores",
    "plain",
    "ranking_loss",
    "use_ranking_loss",
]
