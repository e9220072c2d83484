"""What a detector with the ranking loss finds: scores, log-odds, suppression of boxes."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankgrad.detection import class_log_odds, class_scores, inference, use_ranking_loss
from rankgrad.detection.inference import detections_of

from detectors import CLASSES, detections, detector, same


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


def test_scores_of_detections_have_a_gradient():
    """As torchvision's: for saliency, attacks, distillation."""
    for scores in ("softmax", "odds"):
        model = use_ranking_loss(detector(), scores=scores).eval()
        found = torch.cat([one["scores"] for one in model([torch.rand(3, 64, 64)])])
        assert len(found) and found.requires_grad
