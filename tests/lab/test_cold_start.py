"""AP makes no progress where ranks are bad; the log form, the recall weights and a blend start by themselves."""

import pytest

from rankgrad.lab.figures.cold_start import FORMS, cold_start

SMALL = {"items": 600, "inputs": 24, "classes": 6, "distance": 5.0, "memory": 2}
NAMES = tuple(name for name in FORMS if name != "AP x 30")


@pytest.fixture(scope="module")
def curves():
    return cold_start(NAMES, steps=60, every=20, **SMALL)


def test_all_forms_start_from_the_same_place(curves):
    assert set(curves) == set(NAMES) < set(FORMS)
    assert all(curve.steps == [0, 20, 40, 60] for curve in curves.values())
    assert all(curve.mean_average_precision[0] < 5 for curve in curves.values())


def test_ap_does_not_start(curves):
    assert curves["AP"].mean_average_precision[-1] < 5
    share = [a / b for a, b in zip(curves["AP"].gradient, curves["AP"].cross_entropy_gradient, strict=True)]
    assert max(share) < 0.3  # of cross entropy's gradient


@pytest.mark.parametrize("name", ["log AP", "recall log", "cross entropy + AP", "cross entropy + log AP"])
def test_the_others_do(curves, name):
    assert curves[name].mean_average_precision[-1] > 40


def test_a_blend_is_ahead_of_cross_entropy(curves):
    reached = {name: curve.mean_average_precision[-1] for name, curve in curves.items()}
    assert reached["cross entropy + log AP"] > reached["cross entropy"] + 5


def test_it_is_the_same_every_time(curves):
    again = cold_start(("AP",), steps=20, every=20, **SMALL)
    assert again["AP"].gradient == curves["AP"].gradient[:2]
