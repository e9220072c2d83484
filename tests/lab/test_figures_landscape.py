"""The landscape of a loss over a plane of scores, and its interpolation."""

import itertools

import numpy as np
import pytest
import torch

import rankgrad
from rankgrad.lab.figures import (
    landscape,
    style,
)

from drawings import assert_looks_like, assert_texts_apart, pixels, quiet, size, use_untrained_sorter


def by_brute_force(scores, weights, lam):
    """min over permutations of (y + lam g) . r / n, minus that of y . r / n, over lam."""
    n = len(scores)
    ranks = torch.tensor(list(itertools.permutations(range(1, n + 1))), dtype=torch.float64)
    return ((ranks @ (scores + lam * weights)).min() - (ranks @ scores).min()) / n / lam


def test_the_closed_form_is_the_difference_of_two_minima():
    generator = torch.Generator().manual_seed(3)
    for lam in (0.05, 0.5, 3.0):
        scores, weights = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        expected = by_brute_force(scores, weights, lam)
        torch.testing.assert_close(landscape.interpolated_values(scores, weights, lam), expected)


def test_its_gradient_is_the_one_of_rank():
    plane = landscape.random_plane()
    scores = plane.scores(torch.tensor([0.3], dtype=torch.float64), torch.tensor([-0.4], dtype=torch.float64))[
        0, 0
    ]
    for lam in landscape.LAMBDAS:
        leaf = scores.clone().requires_grad_()
        (rankgrad.rank(leaf, lam=lam, normalize=True) @ plane.weights).backward()
        nudge = 1e-7 * torch.eye(len(scores), dtype=torch.float64)
        ahead, behind = (
            landscape.interpolated_values(scores + sign * nudge, plane.weights, lam) for sign in (1, -1)
        )
        torch.testing.assert_close(leaf.grad, (ahead - behind) / 2e-7, atol=1e-6, rtol=1e-6)


@pytest.fixture(scope="module")
def plane_and_scores():
    line = torch.linspace(-1, 1, 61, dtype=torch.float64)
    plane = landscape.random_plane()
    return plane, plane.scores(line, line)


def test_a_small_lambda_gives_the_truth_away_from_jumps(plane_and_scores):
    plane, scores = plane_and_scores
    truth = landscape.true_values(scores, plane.weights)
    near = landscape.interpolated_values(scores, plane.weights, 1e-3)
    gaps = scores.sort(-1).values.diff(dim=-1).amin(-1)
    away = gaps > 2e-3 * plane.weights.abs().max()  # nothing can be passed
    assert 0.3 < away.double().mean() < 1
    torch.testing.assert_close(near[away], truth[away])
    assert not torch.allclose(near, truth)


@pytest.mark.parametrize("lam", landscape.LAMBDAS)
def test_the_interpolation_stays_within_its_bounds(plane_and_scores, lam):
    plane, scores = plane_and_scores
    truth = landscape.true_values(scores, plane.weights)
    found = landscape.interpolated_values(scores, plane.weights, lam)
    moved = landscape.true_values(scores + lam * plane.weights, plane.weights)
    assert (found <= truth + 1e-12).all() and (found >= moved - 1e-12).all()
    assert (found < truth - 1e-3).any()


@pytest.mark.parametrize("lam", landscape.LAMBDAS)
def test_the_interpolation_is_continuous_where_the_truth_jumps(lam):
    plane = landscape.random_plane()
    a = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    scores = plane.scores(a, torch.zeros(1, dtype=torch.float64))[0]
    truth = landscape.true_values(scores, plane.weights)
    found = landscape.interpolated_values(scores, plane.weights, lam)
    # |difference| <= sum over items of |change of score| (n - 1) / (n lam): the ranks differ by n - 1 at most
    steepest = plane.across.abs().sum() / lam
    assert found.diff().abs().max() <= steepest * (a[1] - a[0])
    assert truth.diff().abs().max() > 10 * found.diff().abs().max()


def test_rows_are_b_and_columns_are_a():
    plane = landscape.random_plane()
    a, b = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), torch.tensor([-1.0, 1.0], dtype=torch.float64)
    scores = plane.scores(a, b)
    assert scores.shape == (2, 3, 20)
    torch.testing.assert_close(scores[1, 2], plane.origin + 0.3 * plane.across + 1.0 * plane.up)


def test_the_map_has_a_to_the_right_and_b_upwards():
    """A surface that is 1 only at the largest a and the smallest b: light in the corner below right."""
    found = np.zeros((9, 9))
    found[0, -1] = 1
    with style.applied():
        figure = style.sheet(3, 3)
        axes = figure.subplots()
        landscape._map(axes, found, np.linspace(-1, 1, 9), landscape.Normalize(0, 1))
        axes.set_position((0, 0, 1, 1))
        figure.set_layout_engine("none")
    image = pixels(figure)
    assert image[-12, -12] > 0.7 > 0.4 > image[12, -12]


def test_the_landscape_is_drawn(monkeypatch):
    use_untrained_sorter(monkeypatch)
    monkeypatch.setattr(landscape, "_POINTS", 31)
    inputs, _ = quiet()
    surfaces, flat = landscape.draw(inputs)
    assert (surfaces.name, flat.name) == ("landscape", "landscape-flat")
    assert pixels(flat.figure).shape == size(flat.figure)
    assert_texts_apart(flat.figure)
    assert_texts_apart(surfaces.figure)
    titles = [axes.get_title() for axes in flat.figure.axes]
    assert (
        titles[0] == "true" and sum("lambda" in t for t in titles) == 4 and sum("bins" in t for t in titles) == 4
    )
    # the same values in both, one scale for all
    images = [axes.images[0] for axes in flat.figure.axes[:12]]
    assert len({image.norm for image in images}) == 1
    plane, line = landscape.random_plane(), torch.linspace(-1, 1, 31, dtype=torch.float64)
    expected = landscape.true_values(plane.scores(line, line), plane.weights)
    np.testing.assert_allclose(images[0].get_array(), expected)
    assert_looks_like(flat.figure, "landscape-flat")
