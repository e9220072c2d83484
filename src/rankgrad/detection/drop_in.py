"""Replace the loss of a torchvision detector's region classifier, and restore the original one."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from rankgrad import _check
from rankgrad.detection import roi_heads
from rankgrad.detection.exchange import Exchanged, exchanged, original
from rankgrad.detection.region_loss import SCORES, RegionLoss
from rankgrad.detection.rpn import RankingProposals
from rankgrad.graphs import graphed

Model = TypeVar("Model", bound=nn.Module)


def use_ranking_loss(
    model: Model,
    loss: nn.Module | None = None,
    *,
    scores: str | None = None,
    rpn: bool = False,
    boxes: bool = False,
    **options: Any,
) -> Model:
    """Train a torchvision Faster R-CNN or Mask R-CNN for mAP: its region classifier gets a ranking loss.

    The model is changed in place: in training, ``loss_classifier`` is the given loss of the sampled regions' class
    logits. The losses of the RPN and of the boxes change only with ``rpn`` and ``boxes``, that of masks never. In
    ``model.eval()`` detections are scored by ``scores``, with torchvision's own score threshold, NMS and number of
    detections. :func:`plain` undoes it.

    Nothing is added to the model's ``state_dict``: weights are exchanged freely with a plain model's. The
    memory is state of the training, in ``ranking_loss(model).state_dict()``; save that too if training goes on.
    The loss is no submodule: ``model.to(...)`` does not move it, it moves to the device of the logits. On a GPU
    :class:`RegionLoss` is recorded and replayed (:func:`rankgrad.graphed`). Several GPUs train with
    DistributedDataParallel; the threads of nn.DataParallel would share one loss and its memory.

    Args:
        model: With ``roi_heads`` as torchvision's detectors have, any backbone and box head.
        loss: A Module ``(class_logits [regions, 1 + classes], labels [regions]) -> loss``; by default
            :class:`RegionLoss` with ``options``.
        scores: What scores a detection at test time, see :func:`class_log_odds`; by default
            :attr:`RegionLoss.scores`, and softmax with another loss.
        rpn: Whether objectness is ranked too, over all anchors of an image, instead of cross entropy on sampled
            ones (``loss_objectness``).
        boxes: Whether the heads' boxes are trained by GIoU on decoded boxes, times 10, instead of smooth L1 on
            encoded ones (``loss_box_reg``).
        options: Of :class:`RegionLoss`, e.g. ``lam``, ``margin``, ``memory``, ``form``.

    Returns:
        The model itself.

    Example:
        >>> from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
        >>> from rankgrad.detection import use_ranking_loss
        >>> model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=3)
        >>> model = use_ranking_loss(model, memory=3).train()
        >>> image, box = torch.rand(3, 64, 64), torch.tensor([[8.0, 8.0, 48.0, 48.0]])
        >>> losses = model([image], [{"boxes": box, "labels": torch.tensor([1])}])
        >>> losses["loss_classifier"].isfinite()
        tensor(True)
    """
    try:
        from torchvision.models.detection.roi_heads import RoIHeads
        from torchvision.models.detection.rpn import RegionProposalNetwork
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchvision":
            raise
        message = "torchvision is not installed: pip install torchvision"
        raise ModuleNotFoundError(message, name="torchvision") from None
    heads = getattr(model, "roi_heads", None)
    if not isinstance(heads, RoIHeads):
        raise _check.fail("model", "a torchvision detector with roi_heads (Faster R-CNN, Mask R-CNN)", model)
    if rpn and not isinstance(getattr(model, "rpn", None), RegionProposalNetwork):
        raise _check.fail("rpn", "a model with torchvision's region proposal network", model)
    if loss is not None and options:
        raise ValueError(f"loss: expected either a loss or options of RegionLoss, received both ({list(options)})")
    loss = RegionLoss(**options) if loss is None else loss
    if not isinstance(loss, nn.Module):
        raise _check.fail("loss", "a torch.nn.Module", loss)
    own = loss.scores if isinstance(loss, RegionLoss) else "softmax"
    scores = own if scores is None else _check.one_of("scores", scores, SCORES)
    plain(model)
    heads.__dict__[roi_heads.LOSS] = loss
    # Another loss may do what cannot be recorded as a CUDA graph.
    heads.__dict__[roi_heads.REPLAYED] = graphed(loss) if type(loss) is RegionLoss else loss
    heads.__dict__[roi_heads.SCORES] = scores
    heads.__dict__[roi_heads.BOXES] = bool(boxes)
    heads.__class__ = exchanged(type(heads), roi_heads.RankingHeads)
    if rpn:
        model.rpn.__class__ = exchanged(type(model.rpn), RankingProposals)
    return model


def ranking_loss(model: nn.Module) -> nn.Module:
    """The loss that :func:`use_ranking_loss` gave to a model, with its memory.

    Example:
        >>> from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
        >>> from rankgrad.detection import ranking_loss, use_ranking_loss
        >>> model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=3)
        >>> ranking_loss(use_ranking_loss(model, memory=3)).ranking.memory.size
        3
    """
    found = getattr(getattr(model, "roi_heads", None), roi_heads.LOSS, None)
    if not isinstance(found, nn.Module):
        raise _check.fail("model", "a model with a ranking loss (see use_ranking_loss)", model)
    return found


def plain(model: Model) -> Model:
    """Undo :func:`use_ranking_loss`, in place: the model is torchvision's own again.

    Example:
        >>> from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
        >>> from rankgrad.detection import plain, use_ranking_loss
        >>> model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=3)
        >>> type(plain(use_ranking_loss(model)).roi_heads).__name__
        'RoIHeads'
    """
    for part in (getattr(model, name, None) for name in ("roi_heads", "rpn")):
        if isinstance(part, Exchanged):
            part.__class__ = original(type(part))
            for name in (roi_heads.LOSS, roi_heads.REPLAYED, roi_heads.SCORES, roi_heads.BOXES):
                part.__dict__.pop(name, None)
    return model
