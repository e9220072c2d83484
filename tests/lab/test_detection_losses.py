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


@pytest.mark.parametrize("boxes", [["boxes=giou", "box_weight=10"], ["box_weight=3"]])
@pytest.mark.parametrize("loss", ["ranking", "cross_entropy"])
def test_box_losses(root, boxes, loss):
    """Beside torchvision's smooth L1 on the same regions: only the loss of the boxes changes."""
    found = []
    for changed in ([], boxes):
        _, config = recipes.load("voc", [*SMALL[:-1], f"data.root={root}", f"loss={loss}", *changed])
        torch.manual_seed(0)
        task = DetectionTask(config, torch.device("cpu"))
        task.network.train()
        torch.manual_seed(0)
        value = task.batch_loss(task.network, 0)
        value.backward()
        layer = task.network.roi_heads.box_predictor
        gradients = layer.cls_score.weight.grad, layer.bbox_pred.weight.grad
        assert all(bool(g.isfinite().all()) and float(g.abs().sum()) > 0 for g in gradients)
        found.append((dict(task.parts), gradients))
    (before, (classes, plain)), (after, (same, other)) = found
    for part in ("loss_classifier", "loss_objectness", "loss_rpn_box_reg"):
        assert torch.equal(before[part], after[part]), part
    assert torch.equal(classes, same)
    if boxes == ["box_weight=3"]:
        torch.testing.assert_close(other, 3 * plain)
    else:
        assert not torch.equal(other, plain)


def test_the_giou_of_a_run_is_that_of_its_regions(root, monkeypatch):
    """Weight times the loss of what the heads sampled and the predictor said."""
    _, config = recipes.load("voc", [*SMALL, f"data.root={root}", "boxes=giou", "box_weight=10"])
    task = DetectionTask(config, torch.device("cpu"))
    heads, seen = task.network.train().roi_heads, {}
    heads.box_predictor.register_forward_hook(lambda module, inputs, output: seen.update(said=output[1]))
    choose = type(heads).select_training_samples

    def look(self, *given):
        seen["sampled"] = choose(self, *given)
        return seen["sampled"]

    monkeypatch.setattr(type(heads), "select_training_samples", look)
    task.batch_loss(task.network, 0)
    regions, _, labels, targets = (torch.cat(part) for part in seen["sampled"])
    total = 0.0
    for row, label in enumerate(labels.tolist()):
        if label:
            own = seen["said"][row, 4 * label : 4 * label + 4].unsqueeze(0)
            region = regions[row : row + 1]
            box, there = (heads.box_coder.decode_single(one, region) for one in (own, targets[row : row + 1]))
            total += float(generalized_box_iou_loss(box, there).detach())
    assert float(task.parts["loss_box_reg"]) == pytest.approx(10 * total / len(labels), rel=1e-4)
    assert "_taken" not in vars(heads)
