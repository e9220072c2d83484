"""The losses of a detector's step, the regions and objects they are made of, and the size of their gradients."""

import pytest
import torch
from torchvision.ops import generalized_box_iou_loss

from rankgrad.detection.region_loss import padded
from rankgrad.lab import recipes
from rankgrad.lab.detection import batches
from rankgrad.lab.detection import task as task_module
from rankgrad.lab.detection.task import DetectionTask

from scenes import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")


def test_gradient_sizes_are_measured_right(root):
    _, config = recipes.load("voc", [*SMALL, f"data.root={root}", "loss.ranking_weight=1e-6"])
    task = DetectionTask(config, torch.device("cpu"))
    task.network.train()
    task.loss.train()
    task.batch_loss(task.network, 0).backward()
    # with next to no ranking the loss is cross entropy: what arrives must be what was foretold
    assert float(task.parts["logit_gradient"]) == pytest.approx(float(task.parts["logit_gradient_ce"]), rel=1e-3)


def test_regions_that_were_added_have_no_gradient_size(root):
    _, config = recipes.load("voc", [*SMALL, f"data.root={root}"])
    task = DetectionTask(config, torch.device("cpu"))
    logits, labels = torch.randn(20, 4, requires_grad=True), torch.randint(0, 4, (20,))
    sizes = []
    for inputs in ((logits, labels), padded(logits, labels, 32)):
        task._watch_ranking(task.loss, inputs)
        sizes.append(task.parts["logit_gradient_ce"])
    torch.testing.assert_close(*sizes)


def test_difficult_objects_are_no_targets(root):
    _, config = recipes.load("voc", [*SMALL, f"data.root={root}"])
    task = DetectionTask(config, torch.device("cpu"))
    there = [o for o in task.source.scenes.objects if bool(o.difficult.any())]
    assert there
    for whole, kept in zip(task.source.scenes.objects, task.objects, strict=True):
        assert torch.equal(kept.boxes, whole.boxes[~whole.difficult])
        assert len(kept.labels) == int((~whole.difficult).sum())


def test_batches_are_shown_at_many_sizes(root, monkeypatch):
    """With jitter: a factor for each batch, the same when the step is done again; mirroring is as without."""
    shown: dict[str, list[float]] = {}
    mirrored: dict[str, list[torch.Tensor]] = {}
    for jitter in ("[1,1]", "[0.5,1.5]"):

        def watched(images, flips, view, factor, jitter=jitter):
            shown.setdefault(jitter, []).append(factor)
            mirrored.setdefault(jitter, []).append(flips)
            return batches.canvas(images, flips, view, factor)

        monkeypatch.setattr(task_module, "canvas", watched)
        _, config = recipes.load("voc", [*SMALL, f"data.root={root}", f"view.jitter={jitter}"])
        task = DetectionTask(config, torch.device("cpu"))
        task.network.train()
        for step in (*range(12), 3):
            assert torch.isfinite(task.batch_loss(task.network, step))
    assert shown["[1,1]"] == [1.0] * 13
    factors = shown["[0.5,1.5]"]
    assert len(set(factors)) == 12 and factors[12] == factors[3]
    assert 0.5 <= min(factors) < 0.7 and 1.3 < max(factors) <= 1.5
    assert all(torch.equal(a, b) for a, b in zip(*mirrored.values(), strict=True))


BOX_LOSSES = {
    "giou": ["boxes=giou", "box_weight=10"],
    "by score": ["boxes=giou", "by_score=true"],
    "balanced": ["boxes=giou", "by_score=true", "balanced=true"],
    "balanced smooth L1": ["balanced=true"],
    "all": ["boxes=giou", "by_score=true", "balanced=true", "loss.thresholds=true", "loss.order_weight=0.2"],
}


@pytest.mark.parametrize("name", list(BOX_LOSSES))
@pytest.mark.parametrize("loss", ["ranking", "cross_entropy"])
def test_box_losses(root, name, loss):
    """Beside torchvision's smooth L1 on the same regions: only the loss of the boxes changes."""
    if name == "all" and loss == "cross_entropy":
        return
    settings = [*SMALL[:-1], f"data.root={root}"]
    found = {}
    for which in ("plain", name):
        changed = BOX_LOSSES[name] if which == name else [s for s in BOX_LOSSES[name] if s.startswith("loss.")]
        _, config = recipes.load("voc", [*settings, f"loss={loss}", *changed])
        torch.manual_seed(0)
        task = DetectionTask(config, torch.device("cpu"))
        task.network.train()
        torch.manual_seed(0)
        value = task.batch_loss(task.network, 0)
        value.backward()
        layer = task.network.roi_heads.box_predictor
        gradients = layer.cls_score.weight.grad, layer.bbox_pred.weight.grad
        assert all(bool(g.isfinite().all()) and float(g.abs().sum()) > 0 for g in gradients)
        found[which] = dict(task.parts), gradients
    (before, (classes, boxes)), (after, (same, other)) = found.values()
    for part in ("loss_classifier", "loss_objectness", "loss_rpn_box_reg"):
        assert torch.equal(before[part], after[part]), part
    assert torch.equal(classes, same)  # scores are weights without a gradient
    assert not torch.equal(boxes, other)
    if "balanced" in name or name == "all":
        torch.testing.assert_close(after["loss_box_reg"], 1 - torch.exp(-after["loss_classifier"]))
    if name == "balanced smooth L1":
        factor = (1 - torch.exp(-after["loss_classifier"])) / before["loss_box_reg"]
        torch.testing.assert_close(other, factor * boxes)


@pytest.mark.parametrize("scores", ["", "softmax", "odds", "logits"])
def test_the_giou_of_a_run_is_that_of_its_regions(root, monkeypatch, scores):
    """Weight times the loss of what the heads sampled and the predictor said, by the score that judges the run."""
    by = ["by_score=true", f"scores={scores}"] if scores else []
    _, config = recipes.load("voc", [*SMALL, f"data.root={root}", "boxes=giou", "box_weight=10", *by])
    task = DetectionTask(config, torch.device("cpu"))
    heads, seen = task.network.train().roi_heads, {}
    torch.nn.init.normal_(heads.box_predictor.cls_score.weight)  # scores that differ
    heads.box_predictor.register_forward_hook(
        lambda module, inputs, output: seen.update(logits=output[0].detach(), said=output[1])
    )
    choose = type(heads).select_training_samples

    def look(self, *given):
        seen["sampled"] = choose(self, *given)
        return seen["sampled"]

    monkeypatch.setattr(type(heads), "select_training_samples", look)
    task.batch_loss(task.network, 0)
    regions, _, labels, targets = (torch.cat(part) for part in seen["sampled"])
    front = [row for row, label in enumerate(labels.tolist()) if label]
    each = {
        "": lambda z, c: 1.0,
        "softmax": lambda z, c: float(z.softmax(0)[c]),
        "odds": lambda z, c: float((z[c] - z[0]).sigmoid()),
        "logits": lambda z, c: float(z[c].sigmoid()),
    }
    weight = {row: each[scores](seen["logits"][row], int(labels[row])) for row in front}
    mean = sum(weight.values()) / len(front)
    total = 0.0
    for row, label in enumerate(labels.tolist()):
        if label:
            own = seen["said"][row, 4 * label : 4 * label + 4].unsqueeze(0)
            region = regions[row : row + 1]
            box, there = (heads.box_coder.decode_single(one, region) for one in (own, targets[row : row + 1]))
            total += weight[row] / mean * float(generalized_box_iou_loss(box, there).detach())
    assert float(task.parts["loss_box_reg"]) == pytest.approx(10 * total / len(labels), rel=1e-4)
    assert "_taken" not in vars(heads)
