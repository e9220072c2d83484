"""Time against list length for every method, log-log, from the numbers of ``rankgrad bench complexity --json``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import AfterValidator, Field
from typing_extensions import NotRequired, TypedDict

from rankgrad.lab.figures import style
from rankgrad.lab.figures.drawing import Drawing, FigureInputs
from rankgrad.lab.training.config import chosen
from rankgrad.lab.training.errors import UserError
from rankgrad.lab.training.run_files import Seconds, read_json

_DEFAULT = Path("benchmarks/results")

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


class _Point(TypedDict):
    n: Annotated[int, Field(ge=1)]
    seconds: Seconds | None
    note: str


class _Curve(TypedDict):
    name: Annotated[str, AfterValidator(lambda name: chosen("name", name, _LOOKS))]
    label: str
    exponent: Annotated[float, Field(allow_inf_nan=False)] | None
    points: Annotated[list[_Point], Field(min_length=1)]


class _Device(TypedDict):
    machine: str
    curves: list[_Curve]


class Numbers(TypedDict):
    """What ``rankgrad bench complexity --json`` writes, as far as it is drawn."""

    devices: NotRequired[dict[str, _Device]]


def draw(inputs: FigureInputs) -> list[Drawing]:
    """From ``--results``: a file, or a folder with files of several devices, the latest of each."""
    path = inputs.results or _DEFAULT
    files = sorted(path.glob("*complexity*.json")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UserError(f"--results: no numbers of `rankgrad bench complexity --json FILE` in {str(path)!r}")
    numbers = [read_json(file, Numbers) for file in files]
    devices = {place: found for one in numbers for place, found in one.get("devices", {}).items()}
    if not devices:
        raise UserError(f"--results: {str(files[0])!r} is not from `rankgrad bench complexity --json FILE`")
    return [Drawing("complexity", plot({"devices": dict(sorted(devices.items()))}), CAPTION)]


def plot(numbers: dict[str, Any]) -> Figure:
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
