"""A classifier trained from random weights: which losses make progress."""

from __future__ import annotations

from rankgrad.lab.detection.cold_start import cold_start
from rankgrad.lab.figures import style
from rankgrad.lab.figures.drawing import Drawing, FigureInputs

STEPS = 150
#: Which losses are drawn, of :data:`rankgrad.lab.detection.cold_start.FORMS`.
LOOKS = {
    "AP": style.RED,
    "log AP": style.BLUE,
    "recall log": style.SKY,
    "cross entropy": style.BLACK,
    "cross entropy + AP": style.RED,
    "cross entropy + log AP": style.BLUE,
}

CAPTION = """A linear classifier from its first random weights, on made-up regions of which 12 % show one of 20
classes, 4,096 regions a step with a memory of 3 batches: the situation of a detector's classifier. Left: mAP on
new regions. Right: size of the gradient at the class logits, over that of cross entropy (CE) at the same logits.
All losses have the same learning rate; dashed: with cross entropy. What to see: the AP loss as published makes
no progress. Its slope is smallest where ranks are worst, so that Algorithm 1 passes hardly any item at first. Its
log form and the recall loss have the same ranks and the same optimum but keep a slope there; beside cross entropy
AP starts too."""


def draw(inputs: FigureInputs) -> list[Drawing]:
    """Curves of mAP and of the gradient."""
    inputs.tell(f"training {len(LOOKS)} linear classifiers, some twenty seconds")
    curves = cold_start(tuple(LOOKS), steps=STEPS)
    with style.applied():
        figure = style.sheet(7.6, 3.5)
        left, right = figure.subplots(1, 2)
        for name, curve in curves.items():
            dash = "--" if name.startswith("cross entropy") else "-"
            ratio = [a / b for a, b in zip(curve.gradient, curve.cross_entropy_gradient, strict=True)]
            left.plot(curve.steps, curve.mean_average_precision, color=LOOKS[name], ls=dash)
            right.plot(curve.steps, ratio, color=LOOKS[name], ls=dash)
        style.letter(left, "mAP on new regions, %")
        style.letter(right, "gradient / cross entropy's")
        left.set_ylim(0, 100)
        for axes in (left, right):
            axes.set_xlabel("step")
            axes.set_xlim(0, STEPS)
            axes.set_xticks(range(0, STEPS + 1, 50))
            axes.grid(True, axis="y")
        right.set_yscale("log")
        ends = {name: curve.mean_average_precision[-1] for name, curve in curves.items()}
        for (name, height), place in zip(ends.items(), style.apart(list(ends.values()), 8, 2, 98), strict=True):
            told = f"{name.replace('cross entropy', 'CE')} {height:.0f}"
            left.text(STEPS * 1.02, place, told, color=LOOKS[name], va="center", fontsize=8)
    return [Drawing("cold-start", figure, CAPTION)]
