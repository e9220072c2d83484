"""The ranking loss in stock torchvision detectors: in, trained, saved, and out again."""

import copy
import io
import pickle
import subprocess
import sys
import types
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchvision.models.detection import FasterRCNN, KeypointRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import MultiScaleRoIAlign, generalized_box_iou_loss, sigmoid_focal_loss

import rankgrad
from rankgrad.detection import (
    RegionLoss,
    class_log_odds,
    class_scores,
    inference,
    plain,
    ranking_loss,
    use_ranking_loss,
)
from rankgrad.detection.boxes import decoded
from rankgrad.detection.inference import detections_of
from rankgrad.detection.objectness import objectness_loss
from rankgrad.detection.region_loss import padded

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


@pytest.mark.parametrize("kind", [FasterRCNN, MaskRCNN, KeypointRCNN])
@pytest.mark.parametrize("head", ["v1", "v2"])
@pytest.mark.parametrize("half", [False, True])
def test_only_the_classifiers_loss_changes(kind, head, half):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        before = losses_of(detector(kind, head), kind)
        model = use_ranking_loss(detector(kind, head), memory=0)
        after = losses_of(model, kind)
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]) == (name != "loss_classifier"), name
    sum(after.values()).backward()
    gradient = model.roi_heads.box_predictor.cls_score.weight.grad
    assert bool(gradient.isfinite().all()) and float(gradient.abs().sum()) > 0


def test_the_loss_is_that_of_the_sampled_regions():
    seen = {}

    class Spy(RegionLoss):
        def forward(self, class_logits, labels, mask=None):
            seen.update(logits=class_logits, labels=labels)
            return super().forward(class_logits, labels, mask)

    model = use_ranking_loss(detector(), Spy(memory=0, ranking_weight=0.5, cross_entropy=2.0, form="log_ap"))
    loss = losses_of(model)["loss_classifier"]
    plain_loss = losses_of(detector())["loss_classifier"]
    torch.testing.assert_close(F.cross_entropy(seen["logits"], seen["labels"]), plain_loss)
    assert seen["labels"].unique().tolist() == [0, 1, 3]
    odds = seen["logits"][:, 1:] - seen["logits"][:, :1]
    relevance = F.one_hot(seen["labels"], 1 + CLASSES)[:, 1:].bool()
    ranking = rankgrad.ClassRankingLoss(lam=0.5, margin=0.15)(odds, relevance)
    torch.testing.assert_close(loss, 2 * plain_loss + 0.5 * ranking)


@pytest.mark.parametrize("options", [{"rpn": True}, {"boxes": True}, {"rpn": True, "boxes": True}])
@pytest.mark.parametrize("kind", [FasterRCNN, MaskRCNN])
def test_objectness_and_boxes_if_asked_for(options, kind):
    """Each changes its own loss and no other; the same weights fit, and :func:`plain` takes all of it back."""
    changed = {"rpn": "loss_objectness", "boxes": "loss_box_reg"}
    before = losses_of(detector(kind), kind)
    model = use_ranking_loss(detector(kind), memory=0, **options)
    after = losses_of(model, kind)
    wanted = {"loss_classifier", *(changed[name] for name in options)}
    assert {name for name in before if not torch.equal(before[name], after[name])} == wanted
    assert model.state_dict().keys() == detector(kind).state_dict().keys()
    sum(after.values()).backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(losses_of(again, kind), after)
    restored = losses_of(plain(model), kind)
    assert all(torch.equal(before[name], restored[name]) for name in before)
    assert type(model.rpn) is RegionProposalNetwork and type(model.roi_heads) is RoIHeads
    assert not {"giou_boxes", "region_loss"} & vars(model.roi_heads).keys()


def test_objectness_is_that_of_all_anchors():
    """The loss of the objectness and the labels that torchvision gives all anchors; no random choice."""
    model, seen = use_ranking_loss(detector(), memory=0, rpn=True), {}
    ours = type(model.rpn).compute_loss

    def look(self, objectness, deltas, labels, targets):
        seen.update(objectness=objectness, labels=labels)
        return ours(self, objectness, deltas, labels, targets)

    model.rpn.compute_loss = types.MethodType(look, model.rpn)
    value = losses_of(model)["loss_objectness"]
    kind = torch.stack(seen["labels"])
    assert kind.shape[0] == 2 and set(kind.unique().tolist()) == {-1, 0, 1} and not (kind[1] == 1).any()
    torch.testing.assert_close(value, objectness_loss(seen["objectness"].reshape(kind.shape), kind))


def test_boxes_are_those_of_sampled_regions():
    model, seen = use_ranking_loss(detector(), memory=0, boxes=True), {}
    model.roi_heads.box_predictor.register_forward_hook(lambda module, inputs, out: seen.update(boxes=out[1]))
    ours = type(model.roi_heads).select_training_samples

    def look(self, *given):
        seen["sampled"] = ours(self, *given)
        return seen["sampled"]

    model.roi_heads.select_training_samples = types.MethodType(look, model.roi_heads)
    value = losses_of(model)["loss_box_reg"]
    regions, _, labels, targets = seen["sampled"]
    together = torch.cat(labels)
    boxes, objects = decoded(model.roi_heads.box_coder, seen["boxes"], regions, together, torch.cat(targets))
    front = together > 0
    wanted = 10 * generalized_box_iou_loss(boxes[front], objects[front], reduction="sum") / len(together)
    torch.testing.assert_close(value, wanted)


def test_proposals_of_a_ranked_rpn_do_not_depend_on_the_origin_of_scores():
    """The sigmoid of scores from 17 on is 1: the stock network would mix up the levels."""
    net = use_ranking_loss(detector(rpn_post_nms_top_n_test=20), rpn=True).rpn.eval()
    generator = torch.Generator().manual_seed(2)
    corner = torch.rand(2, 60, 2, generator=generator) * 60
    boxes = torch.cat([corner, corner + 5 + 30 * torch.rand(2, 60, 2, generator=generator)], 2)
    objectness = torch.randn(2, 60, generator=generator)
    found = [net.filter_proposals(boxes, objectness + up, [(90, 90)] * 2, [40, 20])[0] for up in (0, 40)]
    for low, high in zip(*found, strict=True):
        assert torch.equal(low, high) and len(low) == 20


def test_what_is_no_region_proposal_network():
    model = detector()
    model.rpn = nn.Identity()
    with pytest.raises(ValueError, match=r"^rpn: expected a model with torchvision's region proposal network"):
        use_ranking_loss(model, rpn=True)
    assert type(model.roi_heads) is RoIHeads


@pytest.mark.parametrize("form", ["ap", "log_ap"])
def test_padding_changes_nothing(form):
    """On a GPU batches are padded to one number of regions: the same losses, gradients and memory as without."""
    plain, filled = (RegionLoss(form=form, memory=2) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for count in (64, 40, 17, 64, 0, 33):
        logits = torch.randn(count, 6, generator=generator)
        labels = torch.randint(0, 6, (count,), generator=generator)
        one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        values = plain(one, labels), filled(*padded(other, labels, 64))
        torch.testing.assert_close(*values)
        for value in values:
            (3 * value).backward()
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("several", [False, True])
def test_regions_are_padded_where_the_loss_is_replayed(monkeypatch, several):
    """A graph needs one shape. Several processes record none, and would hang with a mask on one of them."""
    monkeypatch.setattr(rankgrad.graphs.Graphed, "replays", lambda self, *inputs: not several)
    model = use_ranking_loss(detector(box_batch_size_per_image=100), memory=2)
    seen = []
    ranking_loss(model).register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    found = losses_of(model)["loss_classifier"]
    rows = [len(one) for one in seen[0]]
    assert rows == [len(seen[0][0])] * (2 if several else 3) and (rows[0] == 200) == (not several)
    monkeypatch.undo()
    plainly = losses_of(use_ranking_loss(detector(box_batch_size_per_image=100), memory=2))["loss_classifier"]
    torch.testing.assert_close(found, plainly)


def test_where_all_regions_are_there_nothing_is_padded(monkeypatch):
    monkeypatch.setattr(rankgrad.graphs.Graphed, "replays", lambda self, *inputs: True)
    model = use_ranking_loss(detector(box_batch_size_per_image=4), memory=0)
    seen = []
    ranking_loss(model).register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    losses_of(model)
    assert [len(one) for one in seen[0]] == [8, 8]  # two images; no mask


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


def test_cross_entropy_alone_is_torchvisions_own():
    """A loss that is torchvision's gives torchvision's gradients, to the bit."""

    class CrossEntropy(nn.Module):
        def forward(self, class_logits, labels):
            return F.cross_entropy(class_logits, labels)

    models = detector(), use_ranking_loss(detector(), CrossEntropy())
    for model in models:
        sum(losses_of(model).values()).backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_in_and_out_again():
    model = detector()
    state, first = copy.deepcopy(model.state_dict()), detections(model)
    use_ranking_loss(model)
    assert model.state_dict().keys() == state.keys()
    assert isinstance(model.roi_heads, RoIHeads)
    assert same(detections(model), first)  # beside cross entropy a detection is scored by softmax, as ever
    use_ranking_loss(model, scores="odds")
    assert not same(detections(model), first)
    losses_of(model)
    losses_of(use_ranking_loss(model, memory=2))  # once more: the new options count
    assert ranking_loss(model).ranking.memory.size == 2
    plain(plain(model))
    assert type(model.roi_heads) is RoIHeads
    assert vars(model.roi_heads).keys() == vars(detector().roi_heads).keys()
    assert not model.roi_heads.box_predictor._forward_hooks
    assert same(detections(model), first)
    assert torch.equal(losses_of(model)["loss_classifier"], losses_of(detector())["loss_classifier"])


def test_weights_move_freely_and_the_memory_by_itself():
    model = use_ranking_loss(detector(), memory=2)
    losses_of(model)
    stock = detector()
    stock.load_state_dict(model.state_dict())
    use_ranking_loss(detector(), memory=2).load_state_dict(stock.state_dict())
    assert not any("memory" in name for name in model.state_dict())
    state = ranking_loss(model).state_dict()
    assert any("memory" in name for name in state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = use_ranking_loss(detector(), memory=2)
    ranking_loss(again).load_state_dict(torch.load(file))
    assert torch.equal(losses_of(again, seed=2)["loss_classifier"], losses_of(model, seed=2)["loss_classifier"])
    fresh = use_ranking_loss(detector(), memory=2)
    assert not torch.equal(
        losses_of(fresh, seed=2)["loss_classifier"], losses_of(model, seed=2)["loss_classifier"]
    )


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


def test_a_call_that_fails_changes_nothing():
    plainly, exchanged = detector(), use_ranking_loss(detector(), lam=0.7, memory=0)
    loss = ranking_loss(exchanged)
    for model in (plainly, exchanged):
        for mistake in ({"scores": "odd"}, {"loss": RegionLoss}, {"loss": F.cross_entropy}, {"loss": 0.5}):
            with pytest.raises(ValueError, match=f"^{next(iter(mistake))}: expected .*, received "):
                use_ranking_loss(model, **mistake)
    assert type(plainly.roi_heads) is RoIHeads and "region_loss" not in vars(plainly.roi_heads)
    assert ranking_loss(exchanged) is loss


def test_a_model_is_named_not_printed():
    with pytest.raises(
        ValueError, match=r"^model: expected a model with a ranking loss .*, received a FasterRCNN$"
    ):
        ranking_loss(detector())


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


def test_boxes_that_are_not_numbers_are_not_found():
    """As in torchvision, which finds a box of NaN too small."""
    model = detector().eval()
    proposals, sizes = [torch.tensor([[0.0, 0, 30, 30], [5, 5, 40, 40], [9, 9, 50, 60]])], [(64, 80)]
    logits, regression = torch.randn(3, 5), torch.zeros(3, 20)
    regression[1] = torch.nan
    heads = model.roi_heads
    with torch.no_grad():
        theirs = heads.postprocess_detections(logits, regression, proposals, sizes)
        (ours,) = detections_of(heads, logits, regression, proposals, sizes, "softmax")
    assert 0 < len(ours["scores"]) == len(theirs[1][0])
    torch.testing.assert_close(ours["scores"], theirs[1][0])


def test_a_validation_is_not_remembered():
    """torchvision gives losses in training mode alone, so they are validated there, without a gradient."""
    model = use_ranking_loss(detector(), memory=3).train()
    memory = ranking_loss(model).ranking.memory
    losses_of(model)
    before = [one.clone() for one in memory.buffers()]
    with torch.no_grad():
        validated = losses_of(model, seed=2)
    assert torch.isfinite(validated["loss_classifier"])
    assert all(torch.equal(a, b) for a, b in zip(before, memory.buffers(), strict=True))
    losses_of(model, seed=3)
    assert not all(torch.equal(a, b) for a, b in zip(before, memory.buffers(), strict=True))


@pytest.mark.parametrize("scores", ["softmax", "odds", "logits"])
def test_no_region_in_any_image(scores):
    """As with rpn_score_thresh in torchvision's MobileNet detector: nothing is found, and nothing fails."""
    model = detector()
    use_ranking_loss(model, scores=scores)
    heads = model.eval().roi_heads
    none, sizes = [torch.zeros(0, 4), torch.zeros(0, 4)], [(64, 80), (64, 80)]
    classes = heads.box_predictor.cls_score.out_features
    with torch.no_grad():
        found = heads.postprocess_detections(torch.zeros(0, classes), torch.zeros(0, 4 * classes), none, sizes)
    assert [[len(one) for one in kind] for kind in found] == [[0, 0]] * 3
    assert found[0][0].shape == (0, 4)


def test_a_compiled_detector():
    """torchvision's detectors compile in pieces; the exchange goes along."""
    found = []
    for wrap in (lambda model: model, lambda model: torch.compile(model, backend="eager")):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(losses_of(wrap(use_ranking_loss(detector(), memory=1))))
    torch.testing.assert_close(*found)


def test_evaluation_does_not_touch_the_memory():
    model = use_ranking_loss(detector())
    losses_of(model)
    before = copy.deepcopy(ranking_loss(model).state_dict())
    detections(model)
    after = ranking_loss(model).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_training_model_fills_the_memory():
    """The loss is no submodule: the heads tell it when they train."""
    loss = RegionLoss(memory=2).eval()
    losses_of(use_ranking_loss(detector(), loss))
    assert loss.ranking.memory.rows


@pytest.mark.parametrize("scores", ["odds", "softmax", "logits"])
def test_detections_are_torchvisions_with_other_scores(scores):
    """Threshold, suppression and number of detections behave; softmax equals torchvision to the bit."""
    model = use_ranking_loss(detector(box_detections_per_img=12, box_score_thresh=0.3), scores=scores)
    found = detections(model)
    stock = detections(detector(box_detections_per_img=12, box_score_thresh=0.3))
    if scores == "softmax":
        assert same(found, stock)
    else:
        assert not same(found, stock)
    for one in found:
        assert 0 < len(one["scores"]) <= 12
        assert bool((one["scores"] > 0.3).all()) and bool((one["scores"] <= 1).all())
        assert bool((one["scores"].diff() <= 0).all())


@pytest.mark.parametrize("together", [8192, 1])
@pytest.mark.parametrize("seed", range(4))
def test_our_suppression_is_torchvisions(seed, together, monkeypatch):
    """The same detections as torchvision's loop over images, from random logits; some images have nothing."""
    monkeypatch.setattr(inference, "_TOGETHER", together)
    generator = torch.Generator().manual_seed(seed)
    heads = detector(box_detections_per_img=20, box_score_thresh=0.2).roi_heads
    counts, shapes = [30, 0, 17], [(60, 80), (64, 64), (70, 50)]
    corner = torch.rand(sum(counts), 2, generator=generator) * 40
    boxes = torch.cat([corner, corner + 5 + 30 * torch.rand(sum(counts), 2, generator=generator)], dim=1)
    proposals = list(boxes.split(counts))
    logits = 2 * torch.randn(sum(counts), 1 + CLASSES, generator=generator)
    if seed == 3:
        logits[:, 0] = 50  # nothing anywhere
    regression = torch.randn(sum(counts), 4 * (1 + CLASSES), generator=generator)
    theirs = heads.postprocess_detections(logits, regression, proposals, shapes)
    ours = detections_of(heads, logits, regression, proposals, shapes, "softmax")
    for number, one in enumerate(ours):
        for key, value in zip(("boxes", "scores", "labels"), theirs, strict=True):
            torch.testing.assert_close(one[key], value[number])
    few = detections_of(heads, logits, regression, proposals, shapes, "softmax", candidates=5)
    assert all(len(one["scores"]) <= 5 for one in few)


def test_scores_and_log_odds():
    logits = 3 * torch.randn(50, 1 + CLASSES, dtype=torch.float64)
    exponentials = logits.exp()
    expected = {
        "softmax": exponentials / exponentials.sum(1, keepdim=True),
        "odds": exponentials / (exponentials + exponentials[:, :1]),
        "logits": exponentials / (1 + exponentials),
    }
    for scores, wanted in expected.items():
        torch.testing.assert_close(class_scores(logits, scores), wanted[:, 1:])
        torch.testing.assert_close(class_log_odds(logits, scores).sigmoid(), wanted[:, 1:])
    assert bool(class_log_odds(torch.tensor([[0.0, 500.0, -500.0]]), "softmax").isfinite().all())
    with pytest.raises(ValueError, match="scores: expected one of 'odds', 'softmax', 'logits'"):
        class_log_odds(logits, "odd")


def test_the_log_odds_of_softmax():
    """Each class against the sum of all others: values, gradients, ties, certain and many classes."""
    torch.manual_seed(0)
    logits = torch.randn(200, 6, dtype=torch.float64) * torch.logspace(-1, 2, 200).unsqueeze(1).double()
    logits[:20] = logits[:20].round()  # ties, of the largest too
    logits[20:25] = 0
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    others = [torch.cat([y[:, :c], y[:, c + 1 :]], 1).logsumexp(1) for c in range(6)]
    wanted = (y - torch.stack(others, 1))[:, 1:]
    found = class_log_odds(x, "softmax")
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(v, z, upstream)[0] for v, z in ((found, x), (wanted, y))))
    for scores in ("odds", "softmax"):
        assert torch.autograd.gradcheck(
            lambda z, scores=scores: class_log_odds(z, scores), x[-30:-20].detach().requires_grad_()
        )
    for half in (torch.bfloat16, torch.float16):  # two classes alike, and far away
        tied = torch.tensor([[-9.0, 2048.0, 2048.0]], dtype=half, requires_grad=True)
        value = class_log_odds(tied, "softmax")
        value.sum().backward()
        assert value.tolist() == [[0.0, 0.0]] and bool(tied.grad.isfinite().all())
    single = class_log_odds(logits.float(), "softmax")
    torch.testing.assert_close(single, wanted.detach().float(), rtol=1e-5, atol=1e-5)

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            self.numbers = max(self.numbers, out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    with Largest() as largest:
        class_log_odds(torch.randn(50, 400), "softmax")
    assert largest.numbers == 50 * 400  # not classes times classes


@pytest.mark.parametrize("rank", ["odds", "softmax", "logits"])
def test_softmax_scores_where_cross_entropy_trained_it_else_what_was_ranked(rank):
    def scored_by(**options):
        return use_ranking_loss(detector(), ranked=rank, **options).roi_heads.region_scores

    assert scored_by() == "softmax"
    assert scored_by(cross_entropy=0) == rank
    assert scored_by(cross_entropy=0, scores="odds") == "odds"

    class Another(nn.Module):
        scores = torch.zeros(3)  # no business of ours

    assert use_ranking_loss(detector(), Another()).roi_heads.region_scores == "softmax"


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


def test_scores_of_detections_have_a_gradient():
    """As torchvision's: for saliency, attacks, distillation."""
    for scores in ("softmax", "odds"):
        model = use_ranking_loss(detector(), scores=scores).eval()
        found = torch.cat([one["scores"] for one in model([torch.rand(3, 64, 64)])])
        assert len(found) and found.requires_grad


def test_without_torchvision():
    """The room can be imported and its losses used; the drop-in says what to install."""
    code = (
        "import sys; sys.modules['torchvision'] = None\n"
        "import rankgrad.detection as d\n"
        "d.RegionLoss()\n"
        "try: d.use_ranking_loss(d.RegionLoss())\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "torchvision is not installed: pip install torchvision\n"


def test_what_is_not_a_detector():
    with pytest.raises(ValueError, match="model: expected a torchvision detector"):
        use_ranking_loss(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="received both"):
        use_ranking_loss(detector(), RegionLoss(), lam=2.0)
    with pytest.raises(ValueError, match="model: expected a model with a ranking loss"):
        ranking_loss(detector())
    with pytest.raises(ValueError, match="scores: expected one of"):
        use_ranking_loss(detector(), scores="probability")
    assert plain(nn.Linear(2, 2)) is not None
