"""A plot as SVG, without a library: lines with points over one axis each way. Deterministic, so that files compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 36, 52
COLOURS = ("#1f5fa8", "#c8511b", "#3a7d34", "#7a4fa0", "#888888")


@dataclass(frozen=True)
class Line:
    """One line: its name and its points (x, y), in order of x. `dashed`: a bound rather than a measurement."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def ticks(high: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to just above `high`."""
    if high <= 0:
        return [0.0, 1.0]
    raw = high / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    return [index * step for index in range(math.ceil(high / step - 1e-9) + 1)]


def svg(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> str:
    """The plot; both axes start at 0."""
    x_ticks = ticks(max(x for line in lines for x, _ in line.points))
    y_ticks = ticks(max(y for line in lines for _, y in line.points))

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / x_ticks[-1]
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / y_ticks[-1]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(16 {HEIGHT / 2:.1f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    for tick in x_ticks:
        x, y = place(tick, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{tick:g}</text>')
    for tick in y_ticks:
        x, y = place(0, tick)
        end = place(x_ticks[-1], tick)[0]
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{end:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for index, line in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        placed = [place(x, y) for x, y in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if not line.dashed:
            parts.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed)
        row = TOP + 14 + 16 * index
        parts.append(f'<path d="M{WIDTH - 200} {row - 4}h24" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{WIDTH - 170}" y="{row}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
