# SPDX-License-Identifier: Apache-2.0
"""Numbers and tables as a person reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_nbytes(nbytes: float) -> str:
    """Such as "1.15 GiB". Memory and files are counted in powers of 1024."""
    value, unit = float(nbytes), 0
    while abs(value) >= 1023.995 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.2f} {_BINARY[unit]}"


def format_rate(nbytes: float, seconds: float) -> str:
    """Such as "1.23 GB/s". Rates are counted in powers of 1000, as drives and memory are sold."""
    if seconds <= 0:
        return "-"
    rate = nbytes / seconds
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 or rate == 0 else f"{rate / 1e6:.1f} MB/s"


def format_seconds(seconds: float) -> str:
    """Such as "12.5 µs", "1.25 s" or "3 min 20 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def format_remaining(seconds: float) -> str:
    """Such as "45 s", "2 min 5 s" or "3 h 20 min": a guess has no hundredths."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def format_count(count: float) -> str:
    """Such as "308.9 M" or "999"."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return f"{count:g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left_columns: Sequence[int] = (0,)) -> str:
    """Aligned columns under a ruled header; those in `left_columns` flush left, the others right."""
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column in left_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  " + "  ".join(padded).rstrip()

    return "\n".join((line(header), line(["-" * width for width in widths]), *map(line, rows)))


def json_text(content: Any) -> str:
    """On one line; null for NaN and infinities, which JSON does not have."""
    return json.dumps(_json_values(content), allow_nan=False)


def _json_values(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _json_values(value) for key, value in content.items()}
    return list(map(_json_values, content)) if isinstance(content, (list, tuple)) else content
