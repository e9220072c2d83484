"""The paper's table of detection: AP50 on VOC 2007 test, beside which a report shows its own."""

from __future__ import annotations

#: (data set, backbone) -> AP50 with cross entropy and with the paper's loss.
TABLE = {
    ("voc07", "resnet50"): (74.2, 75.7),
    ("voc0712", "resnet50"): (80.4, 81.4),
    ("voc0712", "resnet101"): (82.4, 82.9),
    ("voc0712", "resnext101_32x4d"): (83.2, 83.6),
}
