"""Line charts as inline SVG: no script, no image file, no plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

#: Lines and bars of every chart, in this order.
COLOURS = ("#2166ac", "#d6604d", "#4d9221", "#8073ac", "#b8860b", "#1b9e9e", "#666666", "#c51b7d")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 455, 280, 46, 34, 26
_TICKS = 5

Points = Sequence[tuple[float, float]]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two values, about :data:`_TICKS` of them."""
    span = high - low or 1.0
    step = 10 ** math.floor(math.log10(span / _TICKS))
    step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= _TICKS)
    first = math.ceil(low / step - 1e-9)
    return [float(round(i * step, 10)) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def smoothed(points: Points, share: float = 0.02) -> list[tuple[float, float]]:
    """Running mean over a share of the points."""
    window = max(1, round(share * len(points)))
    out, total = [], 0.0
    for i, (x, y) in enumerate(points):
        total += y - (points[i - window][1] if i >= window else 0.0)
        out.append((x, total / min(i + 1, window)))
    return out


def apart(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions of labels moved as little as needed to stand ``gap`` apart between ``low`` and ``high``."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    groups: list[list[float]] = []  # wanted positions of labels that touch each other
    for i in order:
        groups.append([positions[i]])
        while len(groups) > 1 and _bottom(groups[-1], gap, low, high) < _top(groups[-2], gap, low, high) + gap:
            last = groups.pop()
            groups[-1] += last
    placed = [_bottom(group, gap, low, high) + k * gap for group in groups for k in range(len(group))]
    out = [0.0] * len(positions)
    for i, value in zip(order, placed, strict=True):
        out[i] = value
    return out


def _bottom(group: Sequence[float], gap: float, low: float, high: float) -> float:
    spread = (len(group) - 1) * gap
    middle = sum(group) / len(group)
    return max(low, min(middle - spread / 2, high - spread))


def _top(group: Sequence[float], gap: float, low: float, high: float) -> float:
    return _bottom(group, gap, low, high) + (len(group) - 1) * gap


def chart(title: str, series: Mapping[str, Points], x_name: str, *, smooth: bool = False) -> str:
    """An SVG of one or more lines; with ``smooth`` the raw line stays, faint, behind its running mean."""
    points = [p for line in series.values() for p in line if math.isfinite(p[1])]
    if not points:
        return f"<p>{escape(title)}: nothing yet</p>"
    x_low, x_high = min(p[0] for p in points), max(p[0] for p in points)
    y_low, y_high = min(p[1] for p in points), max(p[1] for p in points)
    margin = max(64.0, *(12 + 7 * len(name) for name in series)) if len(series) > 1 else 64.0  # names of lines
    pad = 0.05 * (y_high - y_low) or max(abs(y_high) * 0.05, 0.5)
    y_low, y_high = y_low - pad, y_high + pad

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return (
            _LEFT + across * (_WIDTH - _LEFT - margin),
            _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _BOTTOM - _TOP),
        )

    def line(points: Points, colour: str, opacity: float) -> str:
        if len(points) == 1:
            x, y = place(*points[0])
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
        step = max(1, len(points) // 800)
        at = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in [*points[::step], points[-1]])
        return f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="1.6" opacity="{opacity}"/>'

    right, floor = _WIDTH - margin, _HEIGHT - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="16" style="font-weight:600">{escape(title)}</text>']
    for value in ticks(y_low, y_high):
        _, y = place(x_low, value)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e6ec"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in (v for v in ticks(x_low, x_high) if v.is_integer()):  # epochs and steps are whole
        x, _ = place(value, y_low)
        parts.append(f'<text x="{x:.1f}" y="{floor + 15}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(x_name)}</text>')
    ends: list[tuple[float, str, str]] = []
    for number, (name, found) in enumerate(series.items()):
        kept = [p for p in found if math.isfinite(p[1])]
        if not kept:
            continue
        colour = COLOURS[number % len(COLOURS)]
        if smooth:
            parts.append(line(kept, colour, 0.25))
            kept = smoothed(kept)
        parts.append(line(kept, colour, 1))
        ends.append((place(*kept[-1])[1] + 4, name, colour))
    if len(series) > 1:
        for (_, name, colour), y in zip(ends, apart([y for y, *_ in ends], 12, _TOP, floor + 4), strict=True):
            parts.append(f'<text x="{right + 6}" y="{y:.1f}" style="fill:{colour}">{escape(name)}</text>')
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg {size} role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
