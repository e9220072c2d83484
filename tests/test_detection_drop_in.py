"""The ranking loss in stock torchvision detectors: in, trained, saved, and out again."""

import copy
import io
import pickle
import subprocess
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.detection import FasterRCNN, KeypointRCNN, MaskRCNN
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import generalized_box_iou_loss

import rankgrad
from rankgrad.detection import RegionLoss, plain, ranking_loss, use_ranking_loss
from rankgrad.detection.boxes import decoded
from rankgrad.detection.objectness import objectness_loss
from rankgrad.detection.region_loss import padded

from detectors import CLASSES, detections, detector, losses_of, same


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
