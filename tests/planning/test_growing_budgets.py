# SPDX-License-Identifier: Apache-2.0
"""What a step moves as budgets grow: never more, until it is nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from offload.device.accelerator import Accelerator
from offload.device.cpu import CpuAccelerator
from offload.device.deferred import DeferredAccelerator
from offload.layout import ParameterSpec, build_layout
from offload.planning.budget import Tier
from offload.planning.deciding import PAIRINGS
from offload.planning.use_trace import Expected, Use
from tests.planning.test_deciding import DTYPES, SHARES, decision, least, models, moved, require_within


def transformer(width: int, layers: int, vocabulary: int, dtype: str, *, tied: bool, chunk_numel: int) -> Any:
    """Layout and order of use."""
    sizes = [[width], [vocabulary * width], *([*[width * width] * 12, width, width] for _ in range(layers))]
    if not tied:
        sizes.append([vocabulary * width])
    units, index = [], 0
    for number, numels in enumerate(sizes):
        specs = [ParameterSpec(index + position, numel, dtype, DTYPES[dtype], True) for position, numel in enumerate(numels)]
        units.append((f"unit {number}", specs))
        index += len(specs)
    uses = [Use(1, read_in_backward=False), *map(Use, range(2, layers + 2)), Use(1 if tied else layers + 2)]
    return build_layout(units, chunk_numel=chunk_numel), Expected.of(0, uses)


CASES: tuple[tuple[tuple[int, int, int], tuple[Tier, Tier], float | None, dict[str, Any], tuple[str, bool]], ...] = (
    ((64, 4, 32000), ("nvme", "nvme"), 2.5, {"state_format": "8bit"}, ("bfloat16", True)),
    ((128, 6, 32000), ("nvme", "nvme"), 2.5, {"state_format": "8bit", "update": "step"}, ("bfloat16", True)),
    ((128, 16, 5000), ("nvme", "nvme"), 1.3, {}, ("float32", True)),
    ((128, 6, 5000), ("device", "nvme"), 2.5, {"state_format": "8bit"}, ("bfloat16", False)),
    ((256, 8, 1000), ("cpu", "cpu"), None, {"state_format": "split"}, ("bfloat16", False)),
    ((512, 12, 32000), ("cpu", "nvme"), None, {}, ("bfloat16", True)),
    ((512, 12, 32000), ("cpu", "cpu"), None, {}, ("float32", False)),
)
"""Width, layers, vocabulary; tiers; host memory in times the least; fields; dtype and whether tied, of the quick tests."""
KINDS = list(itertools.product(sorted(DTYPES), (False, True)))


@pytest.mark.parametrize(
    ("case", "kind"),
    [pytest.param(*both, marks=() if both[0][-1] == both[1] else pytest.mark.slow) for both in itertools.product(CASES, KINDS)],
)
def test_what_a_transformer_moves_falls_steadily(case: Any, kind: tuple[str, bool]) -> None:
    """From the least that it takes to everything, with units fetched ahead: bytes over the slowest link first."""
    shape, pair, in_memory, fields, _ = case
    dtype, tied = kind
    if dtype == "float32":
        fields = {name: value for name, value in fields.items() if name != "state_format"}
    model = transformer(*shape, dtype, tied=tied, chunk_numel=1 << 16)
    accelerator = DeferredAccelerator()
    if in_memory is not None:
        fields = fields | {"cpu_memory": int(in_memory * least(model, accelerator, pair, "cpu_memory", **fields))}
    smallest = least(model, accelerator, pair, "device_memory", **fields)
    all_of_it = decision(model, accelerator, ("device", "device"), **{**fields, "cpu_memory": None, "device_memory": 1 << 40})
    largest, points, found = all_of_it.decide().with_sums().plan.total_nbytes("device"), 16, []
    for point in range(points + 1):
        budget = smallest + (largest - smallest) * point // points
        decided = decision(model, accelerator, pair, device_memory=budget, **fields)
        placement = decided.decide()
        require_within(decided, placement)
        found.append(moved(decided, placement))
    assert found == sorted(found, reverse=True) and any(found[0]) and not any(found[-1])


@settings(max_examples=60, deadline=None)
@given(models(), st.sampled_from(PAIRINGS), st.lists(SHARES, min_size=2, max_size=5), st.booleans())
def test_more_device_memory_never_moves_more(
    model: Any, pair: tuple[Tier, Tier], shares: list[float], accumulates: bool
) -> None:
    accelerator, before = DeferredAccelerator(), None
    smallest = least(model, accelerator, pair, "device_memory", prefetch=0, accumulates=accumulates)
    for share in sorted(shares):
        decided = decision(model, accelerator, pair, accumulates, device_memory=int(share * smallest), prefetch=0)
        placement = decided.decide()
        require_within(decided, placement)
        now = moved(decided, placement)
        assert before is None or now <= before
        before = now


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("unified", [True, False])
def test_more_host_memory_never_moves_more_over_nvme(unified: bool, dtype: str, accumulates: bool) -> None:
    """Also where it just holds all gradients: parameters that it keeps instead save more."""
    specs = [ParameterSpec(number, 16 * 4096, dtype, DTYPES[dtype], True, 0) for number in range(8)]
    layout = build_layout([("(root)", []), *((f"unit {one.index}", [one]) for one in specs)], chunk_numel=4096)
    model = layout, Expected.of(0, [Use(number) for number in range(1, 9)])
    accelerator: Accelerator = CpuAccelerator() if unified else DeferredAccelerator()
    pair: tuple[Tier, Tier] = ("nvme", "cpu")
    smallest = least(model, accelerator, pair, "cpu_memory", accumulates=accumulates)
    generous = decision(model, accelerator, pair, accumulates, cpu_memory=1 << 40).decide()
    most, points = generous.with_sums().plan.total_nbytes("cpu"), 40
    over_nvme = []
    for point in range(points + 1):
        decided = decision(model, accelerator, pair, accumulates, cpu_memory=smallest + (most - smallest) * point // points)
        placement = decided.decide()
        require_within(decided, placement)
        over_nvme.append(moved(decided, placement)[0])
    assert over_nvme == sorted(over_nvme, reverse=True) and over_nvme[0] > over_nvme[-1] == 0


def test_what_is_frozen_stays_where_what_is_trained_would_need_a_master() -> None:
    """fp32 parameters that are their own masters move more over NVMe once they lie on the device: room for the first of them
    takes nothing from what is frozen."""
    units = [((3, 0),), ((3, 0), (3, 1)), ((13, 1),), ((8, 0), (4, 1)), ((2, 0), (5, 1)), ((6, 1),)]
    specs, index = [], 0
    for number, parameters in enumerate(units):
        made = [
            ParameterSpec(index + n, count * 4096, "float32", 4, bool(trained), 0)
            for n, (count, trained) in enumerate(parameters)
        ]
        specs.append((f"unit {number}", made))
        index += len(made)
    model = build_layout(specs, chunk_numel=4096), Expected.of(0, [Use(number) for number in range(1, len(units))])
    accelerator, pair = DeferredAccelerator(), ("cpu", "nvme")
    smallest = least(model, accelerator, pair, "device_memory", prefetch=0)
    found = []
    for share in (1.0, 1.1, 1.25, 1.5):
        decided = decision(model, accelerator, pair, device_memory=int(share * smallest), prefetch=0)
        found.append(moved(decided, decided.decide()))
    assert found == sorted(found, reverse=True) and found[-1] < found[0]


@settings(max_examples=30, deadline=None)
@given(models(), st.sampled_from(PAIRINGS))
def test_with_room_for_everything_nothing_moves(model: Any, pair: tuple[Tier, Tier]) -> None:
    decided = decision(model, DeferredAccelerator(), pair, device_memory=1 << 40)
    assert not any(moved(decided, decided.decide()))
    decided = decision(model, CpuAccelerator(), pair, cpu_memory=1 << 40)
    assert not any(moved(decided, decided.decide()))
