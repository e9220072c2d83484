"""The ranking loss in detectors with heads, predictors or losses of a user's own, and under autocast."""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.ops import sigmoid_focal_loss

import rankgrad
from rankgrad.detection import RegionLoss, plain, ranking_loss, use_ranking_loss

from detectors import CLASSES, batch, detections, detector, losses_of, same


class OwnLoss(nn.Module):
    """A user's loss with a tensor that is elsewhere."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(3, device="meta"))

    def _apply(self, fn, recurse=True):  # what every .to(...) comes to
        self.scale = torch.full((3,), 2.0)
        return self

    def forward(self, class_logits, labels):
        return self.scale.mean() * nn.functional.cross_entropy(class_logits, labels)


@pytest.mark.parametrize("wrap", [lambda loss: loss, rankgrad.graphed])
def test_a_users_own_loss(monkeypatch, wrap):
    """It follows the logits and gets logits and labels, nothing else, also where it may be replayed."""
    monkeypatch.setattr(rankgrad.graphs.Graphed, "replays", lambda self, *inputs: True)
    model = use_ranking_loss(detector(box_batch_size_per_image=100), wrap(OwnLoss()))
    found = losses_of(model)["loss_classifier"]
    torch.testing.assert_close(found, 2 * losses_of(detector(box_batch_size_per_image=100))["loss_classifier"])


class Renamed(RoIHeads):
    """A user's own heads."""


@pytest.mark.parametrize("heads", [RoIHeads, Renamed])
def test_copies_and_pickles(heads):
    model = detector()
    model.roi_heads.__class__ = heads
    use_ranking_loss(model, memory=1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert ranking_loss(twin) is not ranking_loss(model)
        assert same(detections(twin), detections(model))
        losses_of(twin)
        assert ranking_loss(twin).ranking.memory.rows
        assert type(plain(twin).roi_heads) is heads
    assert not ranking_loss(model).ranking.memory.rows


def test_a_users_own_heads():
    class Heads(RoIHeads):
        def forward(self, *args, **kwargs):
            result, losses = super().forward(*args, **kwargs)
            return result, {f"mine_{name}": value for name, value in losses.items()} | losses

    model = detector()
    model.roi_heads.__class__ = Heads
    use_ranking_loss(model)
    assert "mine_loss_box_reg" in losses_of(model)
    plain(model)
    assert type(model.roi_heads) is Heads


class OwnForward(RoIHeads):
    """Heads whose training forward is the user's own; ``take`` makes losses of the regions' features."""

    def forward(self, features, proposals, image_shapes, targets=None):
        if not self.training:
            return super().forward(features, proposals, image_shapes, targets)
        proposals, _, labels, regression = self.select_training_samples(proposals, targets)
        return [], self.take(
            self.box_head(self.box_roi_pool(features, proposals, image_shapes)), labels, regression
        )


class Focal(OwnForward):
    def take(self, features, labels, regression):
        logits, deltas = self.box_predictor(features)
        _, boxes = fastrcnn_loss(logits, deltas, labels, regression)
        wanted = F.one_hot(torch.cat(labels), logits.shape[1]).float()
        return {"loss_classifier": sigmoid_focal_loss(logits, wanted).mean(), "loss_box_reg": boxes}


class MoreLosses(OwnForward):
    """Others made of the logits and the losses, the classifier's twice as heavy."""

    def take(self, features, labels, regression):
        logits, deltas = self.box_predictor(features)
        classes, boxes = fastrcnn_loss(logits, deltas, labels, regression)
        soft = F.cross_entropy(logits, logits.detach().softmax(1))
        return {"loss_classifier": 2 * classes, "loss_box_reg": boxes, "soft": soft, "sum": classes + boxes}


class Checkpointed(OwnForward):
    """The predictor's output is not what the loss gets, but what a checkpoint makes of it."""

    def take(self, features, labels, regression):
        logits, deltas = checkpoint(self.box_predictor, features, use_reentrant=True)
        classes, boxes = fastrcnn_loss(logits, deltas, labels, regression)
        return {"loss_classifier": classes, "loss_box_reg": boxes}


class OwnAutocast(OwnForward):
    def take(self, features, labels, regression):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, deltas = self.box_predictor(features)
            assert torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False):
            classes, boxes = fastrcnn_loss(logits, deltas.float(), labels, regression)
        return {"loss_classifier": classes, "loss_box_reg": boxes}


@pytest.mark.parametrize("kind", [Focal, MoreLosses, Checkpointed, OwnAutocast])
def test_all_kinds_of_heads(kind):
    """The classifier's loss is exchanged, whatever they do; their other losses stay what they were."""
    seen = []
    models = []
    for _ in range(2):
        model = detector()
        model.roi_heads.__class__ = kind
        models.append(model)
    stock, model = models[0], use_ranking_loss(models[1], memory=0)
    ranking_loss(model).register_forward_pre_hook(lambda module, inputs: seen.extend(inputs))
    before, after = losses_of(stock), losses_of(model)
    logits, labels = seen
    assert logits.dtype == torch.float32 and not torch.equal(logits, logits.bfloat16().float())
    torch.testing.assert_close(after.pop("loss_classifier"), RegionLoss(memory=0)(logits, labels))
    before.pop("loss_classifier")
    torch.testing.assert_close(after, before)
    model.zero_grad()
    losses_of(model)["loss_classifier"].backward()
    assert float(model.roi_heads.box_predictor.cls_score.weight.grad.abs().sum()) > 0
    assert not model.roi_heads.box_predictor._forward_hooks


def test_a_backward_hook_of_the_predictor():
    """It makes other tensors of what comes out, after all hooks of the forward."""
    gradients = []
    for hooked in (False, True):
        model = use_ranking_loss(detector(), memory=0)
        if hooked:
            model.roi_heads.box_predictor.register_full_backward_hook(lambda *_: None)
        losses = losses_of(model)
        sum(losses.values()).backward()
        gradients.append([*losses.values(), model.roi_heads.box_predictor.cls_score.weight.grad])
    torch.testing.assert_close(*gradients)
    assert float(gradients[0][-1].abs().sum()) > 0


def test_half_precision_has_no_ties():
    """Under autocast the classifier runs in float32: bf16 would put the regions onto a few values."""
    seen = {}

    class Spy(RegionLoss):
        def forward(self, class_logits, labels, mask=None):
            seen.update(logits=class_logits)
            return super().forward(class_logits, labels, mask)

    model = use_ranking_loss(detector(), Spy())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = losses_of(model)
        assert torch.is_autocast_enabled("cpu")
    assert seen["logits"].dtype == torch.float32
    assert not torch.equal(seen["logits"], seen["logits"].bfloat16().float())
    sum(losses.values()).backward()
    assert float(model.roi_heads.box_predictor.cls_score.weight.grad.abs().sum()) > 0


def test_a_predictor_whose_output_has_names():
    class Said(NamedTuple):
        logits: torch.Tensor
        boxes: torch.Tensor

    class Predictor(FastRCNNPredictor):
        def forward(self, features):
            return Said(*super().forward(features))

    class Heads(OwnForward):
        def take(self, features, labels, regression):
            said = self.box_predictor(features)
            classes, boxes = fastrcnn_loss(said.logits, said.boxes.float(), labels, regression)
            return {"loss_classifier": classes, "loss_box_reg": boxes}

    model = detector(box_predictor=Predictor(16, 1 + CLASSES))
    model.roi_heads.__class__ = Heads
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert losses_of(use_ranking_loss(model))["loss_classifier"].requires_grad


def test_only_the_predictor_leaves_autocast():
    """What comes after it, the masks for example, runs as before; without autocast the precision stays."""
    seen = []
    model = use_ranking_loss(detector(MaskRCNN), memory=0)
    model.roi_heads.mask_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses_of(model, MaskRCNN)
    assert seen == [torch.bfloat16]
    model = use_ranking_loss(detector(), memory=0).double()
    ranking_loss(model).register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    images, targets = batch()
    targets = [{**one, "boxes": one["boxes"].double()} for one in targets]
    model.train()([image.double() for image in images], targets)
    assert seen[1:] == [torch.float64]


def test_class_logits_at_test_time_are_plain():
    seen = []

    class Heads(RoIHeads):
        def postprocess_detections(self, class_logits, *others):
            seen.append(type(class_logits))
            return super().postprocess_detections(class_logits, *others)

    model = detector()
    model.roi_heads.__class__ = Heads
    detections(use_ranking_loss(model))
    assert seen == [torch.Tensor]


def test_a_predictor_that_fails_keeps_no_hook():
    model = use_ranking_loss(detector())
    model.roi_heads.box_predictor = nn.Linear(3, 5)  # does not fit
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            losses_of(model)
        assert torch.is_autocast_enabled("cpu")
    assert not model.roi_heads.box_predictor._forward_hooks
