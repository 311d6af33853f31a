# SPDX-License-Identifier: Apache-2.0
"""What the tables of `benchmarks/render.py` are written with."""

from __future__ import annotations

from collections.abc import Iterable


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def table(columns: str, rows: Iterable[str]) -> str:
    """`columns` and each of `rows`: "| a | b |"."""
    rule = "|---" * (columns.count("|") - 1) + "|"
    return "\n".join([columns, rule, *rows]) + "\n"
