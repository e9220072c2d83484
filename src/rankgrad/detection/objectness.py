"""The loss of a region proposal network's objectness: the anchors on objects before all others of their image."""

from __future__ import annotations

from torch import Tensor

from rankgrad import _check
from rankgrad.losses import average_precision_loss

#: The reach and the margin of a foreground anchor, in log-odds.
WINDOW, MARGIN = 1.0, 0.5


def objectness_loss(objectness: Tensor, kind: Tensor) -> Tensor:
    r"""The mean over images of :math:`-\log` of the precision at each foreground anchor.

    For a region proposal network, in place of cross entropy. Each image is one list, because proposals are
    chosen image by image. All anchors take part, without sampling; those that are neither foreground nor
    background are masked. An image without foreground does not count.

    Args:
        objectness: ``[images, anchors]`` log-odds.
        kind: ``[images, anchors]``: 1 foreground, 0 background, -1 neither.

    Returns:
        A scalar.

    Example:
        >>> from rankgrad.detection.objectness import objectness_loss
        >>> objectness = torch.randn(2, 1000, requires_grad=True)
        >>> objectness_loss(objectness, torch.randint(-1, 2, (2, 1000))).backward()
    """
    _check.floating("objectness", objectness, ndim=2)
    if _check.tensor("kind", kind).shape != objectness.shape:
        raise _check.fail("kind", f"the shape of objectness {list(objectness.shape)}", kind)
    return average_precision_loss(objectness, kind == 1, mask=kind >= 0, log=True, window=WINDOW, margin=MARGIN)
