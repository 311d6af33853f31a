# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG, without a library: lines over two axes, and bars. Deterministic, so that files compare.

One colour for one thing in all of them, from a set that colour-blind readers can tell apart (Okabe and Ito); what bounds is
dashed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

OFFLOAD, OFFLOAD_TOO, DEEPSPEED, FSDP2, PLAIN = "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#666666"
TRANSFERS, WRITES, ADAM = FSDP2, "#99D8C9", "#E69F00"
OTHERS = (OFFLOAD, ADAM, FSDP2, "#CC79A7", OFFLOAD_TOO, DEEPSPEED, PLAIN)
WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 210, 40, 52
_BAR, _GAP, _LABEL = 16, 14, 170


@dataclass(frozen=True)
class Line:
    """One line: its name and its points (x, y), in order of x. `dashed`: a bound rather than a measurement."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    colour: str = ""
    width: float = 2.0


def ticks(high: float, count: int = 5, low: float = 0.0) -> list[float]:
    """Round numbers from just below `low` to just above `high`."""
    if high <= low:
        return [low, low + 1.0]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def svg(title: str, x_label: str, y_label: str, lines: Sequence[Line], *, from_zero: bool = True) -> str:
    """The plot; both axes start at 0, or where the lines are."""
    every_x, every_y = ([point[axis] for line in lines for point in line.points] for axis in (0, 1))
    x_ticks = ticks(max(every_x), low=0.0 if from_zero else min(every_x))
    y_ticks = ticks(max(every_y), low=0.0 if from_zero else min(every_y))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + (WIDTH - LEFT - RIGHT) * across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up

    parts = [
        *_head(WIDTH, HEIGHT, title),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(16 {HEIGHT / 2:.1f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    for tick in x_ticks:
        x, y = place(tick, y_ticks[0])
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{tick:g}</text>')
    for tick in y_ticks:
        x, y = place(x_ticks[0], tick)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for index, line in enumerate(lines):
        colour = line.colour or OTHERS[index % len(OTHERS)]
        placed = [place(x, y) for x, y in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{line.width:g}"{dash}/>')
        if not line.dashed:
            parts.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed)
        row, column = TOP + 10 + 20 * index, WIDTH - RIGHT + 14
        parts.append(f'<path d="M{column} {row - 4}h24" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{column + 30}" y="{row}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


Groups = Mapping[str, Mapping[str, float]]
"""By the name of a group, the length of each of its bars by the bar's name."""


def bars(title: str, panels: Mapping[str, Groups], colours: Mapping[str, str], unit: str = "") -> str:
    """Horizontal bars in groups, a panel beside another for each quantity, with the numbers. Every panel has the same bars."""
    groups = next(iter(panels.values()))
    width = (WIDTH - _LABEL - 16) / len(panels)
    height = TOP + 24 + sum(_GAP + _BAR * len(group) for group in groups.values()) + 40
    parts = _head(WIDTH, height, title)
    for index, (name, content) in enumerate(panels.items()):
        left = _LABEL + index * width
        room = (width - 70) / max(value for group in content.values() for value in group.values())
        parts.append(f'<text x="{left:.1f}" y="{TOP + 8}" font-weight="bold">{escape(name)}</text>')
        top = TOP + 24
        for group_name, group in content.items():
            if index == 0:
                middle = top + _BAR * len(group) / 2 + 4
                parts.append(f'<text x="{_LABEL - 10}" y="{middle:.1f}" text-anchor="end">{escape(group_name)}</text>')
            for bar, value in group.items():
                length, number = max(1.0, value * room), f"{value:#.3g}".rstrip(".")
                parts.append(
                    f'<rect x="{left:.1f}" y="{top + 1}" width="{length:.1f}" height="{_BAR - 2}" fill="{colours[bar]}"/>'
                    f'<text x="{left + length + 5:.1f}" y="{top + _BAR - 4}" font-size="11">{number}{unit}</text>'
                )
                top += _BAR
            top += _GAP
    column = 16.0
    for bar in dict.fromkeys(bar for group in groups.values() for bar in group):
        parts.append(f'<rect x="{column:.1f}" y="{height - 26}" width="12" height="12" fill="{colours[bar]}"/>')
        parts.append(f'<text x="{column + 17:.1f}" y="{height - 16}">{escape(bar)}</text>')
        column += 40 + 6.6 * len(bar)
    return "\n".join([*parts, "</svg>"]) + "\n"


Shares = Mapping[str, Sequence[float]]
"""By what it is, a share of 0 to 1 for each moment."""


def lanes(title: str, x_label: str, seconds: float, rows: Mapping[str, Shares], colours: Mapping[str, str]) -> str:
    """A row for each thing, over time: as high as the share of each moment in which it was at work, one piece on another."""
    left, lane, gap = 110, 34, 12
    width = WIDTH - left - 16
    height = TOP + 14 + (lane + gap) * len(rows) + 70
    foot = TOP + 14 + (lane + gap) * len(rows)
    parts = _head(WIDTH, height, title)
    marks = [tick for tick in ticks(seconds) if tick <= seconds]
    for tick in marks:
        x = left + width * tick / seconds
        parts.append(f'<path d="M{x:.1f} {TOP}V{foot}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{foot + 14}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{left + width / 2:.1f}" y="{foot + 32}" text-anchor="middle">{escape(x_label)}</text>')
    for index, (row, content) in enumerate(rows.items()):
        base = TOP + 14 + (lane + gap) * index + lane
        parts.append(f'<text x="{left - 8}" y="{base - lane / 2 + 4:.1f}" text-anchor="end">{escape(row)}</text>')
        parts.append(f'<path d="M{left} {base}h{width}" stroke="#999999"/>')
        below = [0.0] * max(map(len, content.values()))
        for what, shares in content.items():
            above = [min(1.0, low + share) for low, share in zip(below, shares, strict=True)]
            parts.append(f'<path d="{_area(left, base, width, lane, below, above)}" fill="{colours[what]}"/>')
            below = above
    column = float(left)
    for what in dict.fromkeys(what for content in rows.values() for what in content):
        parts.append(f'<rect x="{column:.1f}" y="{height - 22}" width="12" height="12" fill="{colours[what]}"/>')
        parts.append(f'<text x="{column + 17:.1f}" y="{height - 12}">{escape(what)}</text>')
        column += 40 + 6.6 * len(what)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _area(left: float, base: float, width: float, lane: float, below: Sequence[float], above: Sequence[float]) -> str:
    """The path around steps between two heights, where they differ."""
    wide, found, index = width / len(above), "", 0
    while index < len(above):
        low, high, start = below[index], above[index], index
        while index < len(above) and (below[index], above[index]) == (low, high):
            index += 1
        if high > low:
            across = wide * (index - start)
            tall = lane * (high - low)
            found += f"M{left + wide * start:.1f} {base - lane * high:.1f}h{across:.1f}v{tall:.1f}h{-across:.1f}z"
    return found


def _head(width: int, height: int, title: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="16" y="22" font-size="15">{escape(title)}</text>',
    ]
