# SPDX-License-Identifier: Apache-2.0
"""For the same ranks every stage and every placement gives the same bits; one rank with the whole batch, nearly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import jobs
from .crew import TIMEOUT_SECONDS, Crew

PLACES = ("device", "cpu", "nvme")


def fields(stage: int, parameters: str, states: str, folder: Path, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"stage": stage, "parameters": parameters, "optimizer_states": states}
    if "nvme" in (parameters, states):
        found["nvme"] = str(folder / "nvme")
    return found | more


def placements(folder: Path, **more: Any) -> list[dict[str, Any]]:
    """Each stage with each placement that makes sense for it."""
    below = [fields(stage, "device", states, folder, **more) for stage in (0, 1, 2) for states in PLACES]
    return below + [fields(3, parameters, states, folder, **more) for parameters in PLACES for states in PLACES]


def same_on_all(crew: Crew, cases: list[dict[str, Any]], **arguments: Any) -> list[dict[str, Any]]:
    """Run every case; weights and norms are the same on all ranks and in all cases, losses in all cases."""
    first: list[dict[str, Any]] | None = None
    for case in cases:
        found = crew.do("train", fields=case, **arguments)
        first = first or found
        assert len({one["weights"] for one in found}) == 1, case
        assert found == first, case
    assert first is not None
    assert all(loss == loss for one in first for step in one["losses"] for loss in step)
    return first


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow, id="fp32"), pytest.param({"dtype": "bf16"}, id="bf16")]
)
def test_stages_and_placements_on_two_ranks(pair: Crew, tmp_path: Path, options: dict[str, Any]) -> None:
    same_on_all(pair, placements(tmp_path, max_grad_norm=1.0, **options), steps=3)


def test_stages_and_placements_on_four_ranks(four: Crew, tmp_path: Path) -> None:
    """Sums of four depend on their order: it is that of the ranks, whatever the stage."""
    chosen = [case for case in placements(tmp_path, max_grad_norm=1.0) if case["optimizer_states"] == "cpu"]
    same_on_all(four, chosen, steps=3)


@pytest.mark.parametrize("syncs", [False, True], ids=["no_sync", "every backward"])
def test_accumulation(four: Crew, tmp_path: Path, syncs: bool) -> None:
    cases = [
        fields(0, "device", "device", tmp_path),
        fields(1, "device", "cpu", tmp_path),
        fields(2, "device", "nvme", tmp_path),
        fields(3, "cpu", "cpu", tmp_path),
        fields(3, "nvme", "nvme", tmp_path),
    ]
    same_on_all(four, [case | {"dtype": "bf16"} for case in cases], micro=3, syncs=syncs, steps=2)


@pytest.mark.parametrize("model", ["gpt2", "frozen", "marked"])
def test_tied_and_frozen_weights_and_a_marked_list(pair: Crew, tmp_path: Path, model: str) -> None:
    """GPT-2 ties its input and output embeddings, across units."""
    cases = [fields(0, "device", "device", tmp_path), fields(2, "device", "cpu", tmp_path)]
    cases += [fields(3, "nvme", "cpu", tmp_path), fields(3, "cpu", "nvme", tmp_path)]
    same_on_all(pair, cases, model=model, steps=3)


def test_updates_in_backward(pair: Crew, tmp_path: Path) -> None:
    cases = [
        fields(stage, "device", "cpu", tmp_path, update=update, dtype="bf16")
        for stage in (0, 1, 2, 3)
        for update in ("step", "backward")
    ]
    cases += [fields(3, "nvme", "nvme", tmp_path, update="backward", dtype="bf16")]
    same_on_all(pair, cases, steps=3)


@pytest.mark.parametrize("state_format", ["split", "bf16", "8bit"])
def test_state_formats(pair: Crew, tmp_path: Path, state_format: str) -> None:
    """Stochastic rounding takes its bits by the parameter's element: no stage, and so no cut among ranks, shows."""
    options = {"dtype": "bf16", "state_format": state_format, "max_grad_norm": 1.0}
    cases = [
        fields(0, "device", "device", tmp_path, **options),
        fields(1, "device", "cpu", tmp_path, **options),
        fields(2, "device", "nvme", tmp_path, **options),
        fields(3, "cpu", "cpu", tmp_path, **options),
        fields(3, "nvme", "nvme", tmp_path, **options),
    ]
    on_cpu = same_on_all(pair, cases, steps=3)
    apart = [fields(3, "device", "cpu", tmp_path, **options), fields(3, "cpu", "device", tmp_path, **options)]
    assert same_on_all(pair, apart, steps=3, accelerator="deferred") == on_cpu


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_device_that_does_nothing_until_waited_for(pair: Crew, tmp_path: Path, seed: int) -> None:
    """The deferred accelerator: a missing wait computes with NaN."""
    cases = [
        fields(stage, parameters, states, tmp_path, max_grad_norm=1.0)
        for stage, parameters, states in (
            (0, "device", "cpu"),
            (1, "device", "device"),
            (2, "device", "cpu"),
            (3, "device", "device"),
            (3, "device", "cpu"),
            (3, "cpu", "device"),
            (3, "cpu", "cpu"),
            (3, "nvme", "nvme"),
        )
    ]
    found = same_on_all(pair, cases, accelerator="deferred", seed=seed, steps=3)
    plain = pair.do("train", fields=fields(0, "device", "device", tmp_path, max_grad_norm=1.0), steps=3)
    assert found == plain


def test_prefetch_and_budgets(pair: Crew, tmp_path: Path) -> None:
    cases = [fields(3, "cpu", "cpu", tmp_path, prefetch=count) for count in (0, 1, 3)]
    cases.append(fields(3, "nvme", "nvme", tmp_path, cpu_memory="64MiB"))
    same_on_all(pair, cases, steps=3)


def test_against_one_rank_with_the_whole_batch(pair: Crew, tmp_path: Path) -> None:
    """Nothing but the order of the sums differs: fp32 weights after four steps."""
    case = fields(3, "cpu", "cpu", tmp_path, max_grad_norm=1.0)
    ours = pair.do("weights_after", fields=case)
    alone = jobs.train_alone({"parameters": "cpu", "optimizer_states": "cpu", "max_grad_norm": 1.0}, world=2)
    for step, (whole,) in enumerate(alone["losses"]):
        assert sum(one["losses"][step][0] for one in ours) / 2 == pytest.approx(whole, rel=1e-5)
    for name, values in alone["weights"].items():
        theirs = pair_flat(ours[0]["weights"][name])
        # Adam divides by the root of the second moment: a gradient that is only rounding is scaled up to a step of lr.
        differences = [abs(one - other) for one, other in zip(pair_flat(values), theirs, strict=True)]
        assert max(differences) <= 4 * 1e-3, name
        assert sorted(differences)[int(0.99 * len(differences))] <= 2e-6, name


def pair_flat(values: Any) -> list[float]:
    if isinstance(values, float):
        return [values]
    return [one for row in values for one in pair_flat(row)]


def test_hybrid_sharding(fresh: type[Crew], tmp_path: Path) -> None:
    """Two rows of two: shards within a row, copies across. The average is over all four.

    A crew of its own: PyTorch keeps the groups of a mesh, each with a thread that wakes up a hundred times in a second."""
    four = fresh(4, seconds=TIMEOUT_SECONDS)
    for mesh in ([2, 2], [4], [1, 4]):
        found = [
            four.do("train", fields=fields(stage, "device", "cpu", tmp_path, max_grad_norm=1.0), mesh=mesh, steps=3)
            for stage in (0, 1, 2, 3)
        ]
        assert all(one == found[0] for one in found), mesh
        assert len({one["weights"] for one in found[0]}) == 1, mesh
        if mesh == [4]:
            assert found[0] == four.do("train", fields=fields(3, "nvme", "nvme", tmp_path, max_grad_norm=1.0), steps=3)


def test_averages_in_the_compute_dtype(pair: Crew, tmp_path: Path) -> None:
    """By choice: other bits than in fp32, and the same in every stage."""
    cases = [fields(stage, "device", "cpu", tmp_path, dtype="bf16") for stage in (0, 2, 3)]
    usual = same_on_all(pair, cases, steps=3)
    rounded = same_on_all(pair, cases, steps=3, average="compute")
    assert usual != rounded


def test_sums_of_micro_batches_on_the_device(pair: Crew, tmp_path: Path) -> None:
    """Averages are added up there, and cross once to where the host updates."""
    for dtype in ("fp32", "bf16"):
        options = {"dtype": dtype, "max_grad_norm": 1.0}
        cases = [
            fields(stage, "cpu" if stage == 3 else "device", "cpu", tmp_path, device_memory="700KiB", **options)
            for stage in (0, 1, 2, 3)
        ]
        run = {"steps": 2, "micro": 3, "syncs": True}
        found = same_on_all(pair, cases, accelerator="deferred", sums_on_device=True, **run)
        assert found == pair.do("train", fields=fields(0, "device", "device", tmp_path, **options), **run)


def test_a_part_of_the_states_on_the_device(pair: Crew, tmp_path: Path) -> None:
    """Parameters, gradients or records of some units, as far as the budget reaches; fp32 records then differ in kind."""
    for dtype in ("fp32", "bf16"):
        cases = [
            fields(stage, parameters, states, tmp_path, device_memory=memory, dtype=dtype, max_grad_norm=1.0)
            for stage, parameters, states, sizes in (
                (0, "device", "cpu", ("1MiB",)),
                (2, "device", "nvme", ("1MiB",)),
                (3, "cpu", "cpu", ("600KiB", "800KiB", "64MiB")),
                (3, "nvme", "nvme", ("800KiB",)),
            )
            for memory in sizes
        ]
        found = same_on_all(pair, cases, accelerator="deferred", steps=3)
        plain = fields(0, "device", "device", tmp_path, max_grad_norm=1.0, dtype=dtype)
        assert found == pair.do("train", fields=plain, steps=3)
