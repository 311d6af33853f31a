# SPDX-License-Identifier: Apache-2.0
"""The tables of `plan`: what lies where, the smallest budgets that work, and what other placements would take."""

from __future__ import annotations

from typing import Any

from offload.cli.plans.outline import Outline
from offload.cli.text import format_nbytes, table
from offload.errors import ConfigError
from offload.forecast import Forecast
from offload.planning.budget import TIERS
from offload.planning.deciding import PAIRINGS


def tables_of(outline: Outline, found: Forecast, stage: int) -> list[str]:
    """Of the placement that the forecast ran with; where nothing could be run, of what there is instead. `outline`: of the same
    configuration, on the same machine."""
    if not found.planned:
        return [_alternatives_table(outline, {})]
    return [
        _planned_table(found, outline.parameter_numel, stage),
        _smallest_table(outline, found.ranks),
        _alternatives_table(outline, found.placement),
    ]


def _planned_table(found: Forecast, parameter_numel: int, stage: int) -> str:
    lines = sorted(found.planned, key=lambda line: TIERS.index(line["tier"]))

    def row(tier: str, purpose: str, nbytes: int) -> tuple[str, ...]:
        return tier, purpose, format_nbytes(nbytes), f"{nbytes / parameter_numel:.2f}", f"{nbytes}"

    rows = [row(line["tier"], line["purpose"], line["nbytes"]) for line in lines]
    for tier in TIERS:
        total = sum(line["nbytes"] for line in lines if line["tier"] == tier)
        if total:
            rows.append(row(tier, "TOTAL", total))
    whose = "" if found.ranks == 1 else f" ({found.ranks} ranks, stage {stage}; bytes are those of one rank)"
    title = f"What the engine holds where, at most{whose}"
    return f"{title}\n{table(('tier', 'purpose', 'size', 'B/parameter', 'bytes'), rows, left_columns=(0, 1))}"


def _smallest_table(outline: Outline, rank_count: int) -> str:
    placement, rows = outline.placement(), []
    for field in ("device_memory", "cpu_memory"):
        smallest = outline.smallest_nbytes(placement, field)
        if smallest is not None:
            rows.append((f"--{field.replace('_', '-')}", format_nbytes(smallest), f"{smallest}"))
    if not rows:
        return "This placement holds nothing that a budget bounds."
    whose = "" if rank_count == 1 else f" (--cpu-memory: of all {rank_count} ranks together)"
    return f"Smallest budgets with which these tiers work{whose}\n" + table(("", "size", "bytes"), rows)


def _alternatives_table(outline: Outline, chosen: dict[str, Any]) -> str:
    rows = []
    for parameters, states in PAIRINGS:
        try:
            other = outline.placement(parameters, states)
        except ConfigError:
            continue  # below stage 3 parameters stay on the devices of all ranks
        is_chosen = (parameters, states) == (chosen.get("parameters"), chosen.get("optimizer_states"))
        totals = [other.plan.total_nbytes(tier) for tier in TIERS]
        rows.append(
            ("*" if is_chosen else "", parameters, states, *(format_nbytes(total) if total else "-" for total in totals))
        )
    header = ("", "parameters", "optimizer states", *TIERS)
    marked = " (* the one above)" if chosen else ""
    return f"Placements, without budgets{marked}\n" + table(header, rows, left_columns=(0, 1, 2))
