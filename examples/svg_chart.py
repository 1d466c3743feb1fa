"""Curves as inline SVG, for a self-contained page. The page defines the colours: --s0, --s1, ..."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 300, 56, 150, 14, 44
LABEL_GAP = 17


def line_chart(x_name: str, xs: Sequence[float], curves: Mapping[str, Sequence[float]], *, form: str) -> str:
    """Draw curves over common `xs`, each labelled at its end. `form` formats values, such as ".3f"."""
    x_ticks = [tick for tick in _ticks(0, max(xs)) if tick <= max(xs)]
    y_ticks = _ticks(min(map(min, curves.values())), max(map(max, curves.values())))

    def x_of(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / max(xs)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    for tick in x_ticks:
        parts.append(
            f'<text x="{x_of(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_short(tick)}</text>'
        )
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{html.escape(x_name)}</text>')
    labels = _apart([y_of(ys[-1]) for ys in curves.values()])
    for number, ((name, ys), label_y) in enumerate(zip(curves.items(), labels, strict=True)):
        colour = f"var(--s{number})"
        points = [(x_of(x), y_of(y)) for x, y in zip(xs, ys, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="curve" style="stroke:{colour}" points="{line}"/>')
        for (x, y), at, value in zip(points, xs, ys, strict=True):
            said = html.escape(f"{name}: {value:{form}} at {at:,.0f} {x_name}")
            parts.append(
                f'<circle class="dot" style="fill:{colour}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{said}</title></circle>'
            )
        end = points[-1][0] + 12
        parts.append(
            f'<text class="name" x="{end:.1f}" y="{label_y + 4:.1f}">{html.escape(name)} {ys[-1]:{form}}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that enclose low and high."""
    span = (high - low) or abs(high) or 1.0
    rough = span / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)] or [low, low + step]


def _short(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:.4g}"


def _apart(positions: Sequence[float]) -> list[float]:
    """Move `positions` down just enough that their labels do not overlap."""
    moved = list(positions)
    order = sorted(range(len(moved)), key=moved.__getitem__)
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + LABEL_GAP)
    return moved
