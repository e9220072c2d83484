"""Object detection trained for mAP: a drop-in for torchvision's detectors, and what the recipes on VOC run."""

from rankgrad.detection.calibration import calibrate
from rankgrad.detection.drop_in import plain, ranking_loss, use_ranking_loss
from rankgrad.detection.mmdet import MMDetRankingLoss
from rankgrad.detection.region_loss import RegionLoss, class_log_odds, class_scores

__all__ = [
    "MMDetRankingLoss",
    "RegionLoss",
    "calibrate",
    "class_log_odds",
    "class_scores",
    "plain",
    "ranking_loss",
    "use_ranking_loss",
]
