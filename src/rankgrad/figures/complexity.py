"""Time against list length for every method, log-log, from the numbers of ``rankgrad bench complexity --json``."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankgrad.figures import style

CAPTION = """Time of one call, forward and backward, against the length n of the list, 1 % of it relevant. Axes
are logarithmic, so a line is as steep as its exponent: the number behind each name, over its last three points.
Lines that end early could not go on; the legend says why. What to see: methods that compare pairs (dashed) grow
with the square of n and stop, those that sort or stream reach the longest lists."""

#: Colour, marker, width and line of each method, the same on every device; methods of pairs are dashed.
_LOOKS = {
    "ap": (style.BLUE, "o", 2.8, "-"),
    "recall": (style.SKY, "o", 1.8, "-"),
    "rambo": (style.BLACK, "s", 1.4, "-"),
    "mohapatra2018": (style.GREEN, "^", 1.4, "-"),
    "chen2019": (style.RED, "v", 1.4, "--"),
    "yue2007": (style.GREEN, "v", 1.4, "--"),
    "fastap": (style.ORANGE, "D", 1.4, "-"),
    "sodeep": (style.PINK, "P", 1.4, ":"),
    "sodeep_fixed": (style.PINK, "X", 1.4, "-"),
    "smoothap": (style.GREY, "s", 1.4, "--"),
    "permutahedron": (style.GREY, "D", 1.4, "-"),
}


def draw(numbers: dict[str, Any]) -> Figure:
    """One panel a device."""
    devices = numbers["devices"]
    with style.applied():
        figure = style.sheet(6.4, 4.2 * len(devices))
        panels = figure.subplots(len(devices), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (device, found) in zip(panels, devices.items(), strict=True):
            _panel(axes, found["curves"])
            machine = found["machine"].split(";")[0]
            style.letter(axes, f"{'GPU' if device == 'cuda' else 'CPU'}: {machine}")
        panels[-1].set_xlabel("n, items in the list (1 % relevant)")
    return figure


def _panel(axes: Axes, curves: list[dict[str, Any]]) -> None:
    for curve in sorted(curves, key=_reach):
        points = [(p["n"], p["seconds"]) for p in curve["points"] if p["seconds"]]
        if not points:
            continue
        colour, marker, width, line = _LOOKS[curve["name"]]
        steep = "" if curve["exponent"] is None else f": $n^{{{curve['exponent']:.2f}}}$"
        note = curve["points"][-1]["note"]
        ends = f", then {'fails' if note.startswith('fails') else note}" if note else ""
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            marker=marker,
            markersize=4,
            markeredgecolor="white",
            markeredgewidth=0.4,
            linewidth=width,
            linestyle=line,
            label=f"{curve['label']}{steep}{ends}",
            zorder=3 if curve["name"] == "ap" else 2,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, which="major")
    axes.set_axisbelow(True)
    axes.tick_params(labelbottom=True)
    axes.set_ylabel("seconds, forward + backward")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, handlelength=2.6, labelspacing=0.75)


def _reach(curve: dict[str, Any]) -> tuple[int, float]:
    """The order of the legend: what stops first, then what is slowest."""
    n, seconds = max(((p["n"], p["seconds"]) for p in curve["points"] if p["seconds"]), default=(0, 0.0))
    return n, -seconds
