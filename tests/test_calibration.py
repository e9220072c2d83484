"""A scale for scores that were only ranked: the logistic map, and its place in the classifier's weights."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression

from rankgrad.detection import calibrate, class_log_odds, plain, use_ranking_loss
from rankgrad.detection.calibration import fit_scale

from detectors import batch, detections, detector, losses_of


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (40.0, 0.01), (-3.0, 100.0)])
def test_the_fit_is_scikit_learns(shift, scale):
    generator = torch.Generator().manual_seed(0)
    relevance = torch.rand(5000, generator=generator) < 0.05
    scores = torch.randn(5000, generator=generator) + 1.5 * relevance
    slope, offset = fit_scale(scale * scores + shift, relevance)
    # Platt's targets as weights: the same likelihood
    n, p = len(relevance), int(relevance.sum())
    high, low = (p + 1) / (p + 2), 1 / (n - p + 2)
    weight = torch.where(relevance, high, low).double()
    x = torch.cat([scores, scores]).numpy()[:, None]
    y = torch.cat([torch.ones(n), torch.zeros(n)]).numpy()
    fitted = LogisticRegression(C=1e12, tol=1e-10, max_iter=1000).fit(
        x, y, torch.cat([weight, 1 - weight]).numpy()
    )
    torch.testing.assert_close(slope * scale, float(fitted.coef_[0, 0]), rtol=1e-3, atol=0)
    torch.testing.assert_close(offset + slope * shift, float(fitted.intercept_[0]), rtol=1e-3, atol=1e-3)


def test_separable_scores_have_a_finite_slope():
    scores = torch.cat([torch.linspace(0, 1, 50), torch.linspace(2, 3, 20)])
    slope, offset = fit_scale(scores, torch.arange(70) >= 50)
    assert 0 < slope < 1e4
    assert -1e4 < offset < 0


def test_what_cannot_be_fitted():
    with pytest.raises(ValueError, match="relevance: expected relevant and irrelevant"):
        fit_scale(torch.rand(5), torch.zeros(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="scores: expected relevant items that score higher"):
        fit_scale(torch.arange(10.0), torch.arange(10) < 5)
    with pytest.raises(ValueError, match="scores: expected scores that differ"):
        fit_scale(torch.full((10,), 3.0), torch.arange(10) < 5)


def ranked(rank):
    model = use_ranking_loss(detector(box_score_thresh=0.0), ranked=rank, cross_entropy=0, memory=2, form="log_ap")
    optimizer = torch.optim.SGD(model.roi_heads.parameters(), 0.05)
    for seed in range(20):
        optimizer.zero_grad()
        losses_of(model, seed=seed)["loss_classifier"].backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("rank", ["odds", "logits"])
def test_the_order_stays_and_the_threshold_gets_a_meaning(rank):
    model = ranked(rank)
    scores, relevance, mask = model.roi_heads.region_loss.ranking.memory.candidates()
    seen = []
    hook = model.roi_heads.box_predictor.register_forward_hook(lambda m, i, out: seen.append(out[0]))
    before = detections(model)
    calibrate(model)
    after = detections(model)
    hook.remove()
    old, new = class_log_odds(seen[0], rank).flatten(), class_log_odds(seen[1], rank).flatten()
    slope, offset = fit_scale(scores[mask], relevance[mask])
    torch.testing.assert_close(new, slope * old + offset, rtol=1e-4, atol=1e-4)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a["labels"], b["labels"])
        torch.testing.assert_close(a["boxes"], b["boxes"])
    # on the regions it was fitted on, the mean probability is the share of relevant pairs
    probability = (slope * scores[mask] + offset).sigmoid()
    assert float(probability.mean()) == pytest.approx(float(relevance[mask].float().mean()), rel=0.05)
    torch.testing.assert_close(seen[1][:, 0], torch.zeros(len(seen[1])))
    assert len(plain(model).eval()(batch()[0])) == 2


def test_twice_is_once():
    model = ranked("odds")
    calibrate(model)
    layer = model.roi_heads.box_predictor.cls_score
    before = layer.weight.detach().clone(), layer.bias.detach().clone()
    calibrate(model)
    torch.testing.assert_close((layer.weight, layer.bias), before, rtol=1e-3, atol=1e-3)


def test_what_cannot_be_calibrated():
    with pytest.raises(ValueError, match="a memory with regions"):
        calibrate(use_ranking_loss(detector(), cross_entropy=0))
    with pytest.raises(ValueError, match="scored by what its loss ranks, 'odds', received 'softmax'"):
        calibrate(use_ranking_loss(detector()))
    with pytest.raises(ValueError, match="scored by what its loss ranks, 'logits', received 'odds'"):
        calibrate(use_ranking_loss(detector(), cross_entropy=0, ranked="logits", scores="odds"))
    with pytest.raises(ValueError, match="ranks odds or logits"):
        calibrate(use_ranking_loss(detector(), ranked="softmax"))
    with pytest.raises(ValueError, match="a model with a ranking loss"):
        calibrate(detector())
