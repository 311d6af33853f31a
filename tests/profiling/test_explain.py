# SPDX-License-Identifier: Apache-2.0
"""What a trace is read as: on traces made by hand, of which the answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload.cli.main import main
from offload.device.recording import COMPUTE, D2H, H2D, MAIN, NVME_READ, NVME_WRITE, lane_row
from offload.profiling.explanation import explain
from offload.profiling.trace_events import Event, Trace, as_json, read_trace, write_trace

UPDATES, FETCHES = lane_row("update"), lane_row("fetch")
FACTS: dict[str, Any] = {
    "rank": 0,
    "world_size": 1,
    "steps": 1,
    "duration_ns": 10_000_000_000,
    "computes_on_host": False,
    "unified": False,
    "dtypes": ["bfloat16"],
    "settings": {"nvme": ["/mnt/a"], "state_format": "fp32", "update": "step", "prefetch": 1},
    "planned": [{"tier": "nvme", "purpose": "optimizer states", "nbytes": 40 << 30}],
}


def op(row: str, kind: str, name: str, unit: str, start: float, end: float, nbytes: int = 0, awaits: Any = ()) -> Event:
    return Event(row, kind, name, unit, round(start * 1e9), round(end * 1e9), nbytes, tuple(awaits))


def wait(what: str, unit: str, start: float, end: float, awaits: Any) -> list[Event]:
    return [op(row, "wait", what, unit, start, end, awaits=awaits) for row in (MAIN, COMPUTE)]


def use(name: str, unit: str, start: float, end: float) -> list[Event]:
    return [op(row, "use", name, unit, start, end) for row in (MAIN, COMPUTE)]


def trace_of(*events: Event, **facts: Any) -> Trace:
    return Trace(tuple(sorted(events, key=lambda event: (event.start_ns, -event.end_ns))), {**FACTS, **facts})


def test_a_wait_is_followed_from_lane_to_lane_to_the_link() -> None:
    """Forward waits for a unit, that for its update, that for its record; then for Adam, then for H2D."""
    found = explain(
        trace_of(
            *use("forward", "a", 0, 2),
            *wait("fetch", "b", 2, 8, (H2D, FETCHES, NVME_READ)),
            *use("forward", "b", 8, 10),
            op(FETCHES, "work", "fetch", "b", 1, 8),
            op(UPDATES, "work", "update", "b", 1, 6),
            op(UPDATES, "wait", "read records", "b", 1, 5, awaits=(NVME_READ,)),
            op(UPDATES, "work", "adam", "b", 5, 6),
            op(NVME_READ, "transfer", "optimizer-states", "b", 0, 5, 5 << 30),
            op(H2D, "transfer", "copy", "b", 6, 7.5, 3 << 30),
        )
    )
    assert found.step_seconds == 10 and found.compute_seconds == pytest.approx(4)
    read, adam, h2d, host = (found.work[name] for name in (NVME_READ, "CPU Adam", H2D, "host"))
    assert (read.busy_seconds, read.exposed_seconds, read.hidden) == pytest.approx((5, 3, 0.4))
    assert (adam.busy_seconds, adam.exposed_seconds, adam.hidden) == pytest.approx((1, 1, 0))
    assert (h2d.exposed_seconds, host.exposed_seconds) == pytest.approx((1.5, 0.5))
    assert read.bytes_per_second == pytest.approx(2**30)
    assert found.bottleneck == NVME_READ and found.waits[0].unit == "b" and found.waits[0].on == NVME_READ
    assert sum(one.seconds for one in found.waits) == pytest.approx(6)


def test_what_moves_under_compute_is_hidden_and_compute_is_the_bottleneck() -> None:
    found = explain(
        trace_of(
            *use("forward", "a", 0, 5), *use("backward", "a", 5, 10), op(NVME_READ, "transfer", "parameters", "a", 1, 9, 8)
        )
    )
    assert found.work[NVME_READ].hidden == 1.0 and found.bottleneck == "compute" and not found.advice
    assert found.phases == {"forward": 5.0, "backward": 5.0}
    assert (found.floor_of, found.floor_seconds) == ("compute", 10.0)


def test_compute_is_the_bottleneck_where_it_stands_still_for_less_than_a_tenth() -> None:
    """What saves time all the same is advised."""
    events = (op(MAIN, "work", "zero_grad", "", 9.2, 10), *use("forward", "a", 0, 9.2))
    found = explain(trace_of(*events))
    assert found.work["host"].exposed_seconds == pytest.approx(0.8) and found.bottleneck == "compute"


def test_the_bytes_of_the_unit_in_question_come_before_others() -> None:
    found = explain(
        trace_of(
            *wait("fetch", "b", 0, 10, (H2D, FETCHES, NVME_READ)),
            op(H2D, "transfer", "copy", "c", 0, 10, 1),
            op(NVME_READ, "transfer", "parameters", "b", 0, 4, 1),
        )
    )
    assert {one.on: one.seconds for one in found.waits} == {NVME_READ: 4.0, H2D: 6.0}


def test_time_outside_of_the_model_is_the_loops() -> None:
    found = explain(trace_of(*use("forward", "a", 0, 4)))
    assert found.bottleneck == "outside of the model" and found.work["outside of the model"].exposed_seconds == 6
    assert "loading of data" in found.advice[0].why


def test_on_a_cpu_the_engines_own_work_is_no_compute() -> None:
    events = (*use("backward", "a", 0, 10), op(MAIN, "work", "gradients", "a", 4, 6))
    assert explain(trace_of(*events, computes_on_host=True)).compute_seconds == 8
    assert explain(trace_of(*events)).compute_seconds == 10  # of a device they tell nothing


def bound_by_the_drive(**facts: Any) -> Trace:
    """2 s of compute; the drive works 8 s for the forward, and rests in backward."""
    return trace_of(
        *wait("update", "a", 0, 8, (UPDATES,)),
        *use("forward", "a", 8, 9),
        *use("backward", "a", 9, 10),
        op(UPDATES, "wait", "read records", "a", 0, 8, awaits=(NVME_READ,)),
        op(NVME_READ, "transfer", "optimizer-states", "a", 0, 8, 8 << 30),
        op(NVME_WRITE, "transfer", "optimizer-states", "a", 0, 8, 8 << 30),
        **facts,
    )


def test_advice_follows_from_the_numbers() -> None:
    """16 GiB in 8 s: a GiB kept in memory is read and written no more, 1 s less."""
    found = {one.change.split(":")[0]: one for one in explain(bound_by_the_drive()).advice}
    memory = found["cpu_memory"]
    assert memory.change == "cpu_memory: 8.0 GiB more" and memory.saves_seconds == pytest.approx(8) and "1.00 s" in memory.why
    assert found["nvme"].change == "nvme: 2 drives instead of 1" and found["nvme"].saves_seconds == pytest.approx(4)
    assert found['update="backward"'].saves_seconds == pytest.approx(1)
    assert found['state_format="8bit"'].saves_seconds == pytest.approx(8)  # of 40 s it would save 27; 8 are waited for
    assert found['state_format="split"'].saves_seconds == pytest.approx(40 / 6)
    assert found["a batch 4 times as large, where memory has room for its activations"].saves_seconds is None
    saved = [one.saves_seconds or 0.0 for one in explain(bound_by_the_drive()).advice]
    assert saved == sorted(saved, reverse=True)


def test_updates_in_host_memory_wait_for_room_to_undo_them() -> None:
    """Of 4 s of CPU Adam that forward waits for, 3 s are those of a backward in which it does nothing."""

    def advised(*planned: tuple[str, int], **settings: Any) -> list[str]:
        events = (
            *wait("update", "a", 0, 4, (UPDATES,)), op(UPDATES, "work", "update", "a", 0, 4),
            op(UPDATES, "work", "adam", "a", 0, 4), *use("forward", "a", 4, 7), *use("backward", "a", 7, 10),
        )  # fmt: skip
        lines = [{"tier": "cpu", "purpose": purpose, "nbytes": nbytes} for purpose, nbytes in planned]
        facts = {"settings": FACTS["settings"] | settings, "planned": lines}
        found = [one for one in explain(trace_of(*events, **facts)).advice if one.change == 'update="backward"']
        assert all(one.saves_seconds == pytest.approx(3) for one in found)
        return [one.why for one in found]

    states = ("optimizer states", 3 << 30)
    (why,) = advised(states, update="auto")
    assert "3.0 GiB more of host memory" in why
    assert not advised(states, ("room to undo updates", 1 << 30), update="auto")
    assert not advised(states, update="backward")
    assert "host memory" not in advised(("parameters", 3 << 30))[0] and advised(states)


def test_updates_on_a_drive_that_has_no_room_to_undo_them() -> None:
    def advised(update: str, *planned: tuple[str, int], ranks: int = 1) -> list[str]:
        lines = [{"tier": "nvme", "purpose": purpose, "nbytes": nbytes} for purpose, nbytes in planned]
        facts = {"settings": FACTS["settings"] | {"update": update}, "planned": lines, "world_size": ranks}
        return [one.why for one in explain(bound_by_the_drive(**facts)).advice if one.change == 'update="backward"']

    states = ("optimizer states", 40 << 30)
    (why,) = advised("auto", states)
    assert "40.0 GiB of the drive" in why and "two checkpoints" in why
    assert not advised("auto", states, ("room to undo updates", 1 << 30))
    assert not advised("backward", states) and not advised("auto", states, ranks=2)
    assert "checkpoints" not in advised("step", states)[0]


def test_advice_names_nothing_that_is_so_already() -> None:
    settings = {"nvme": ["/mnt/a", "/mnt/b"], "state_format": "8bit", "update": "backward", "prefetch": 1}
    changes = [one.change for one in explain(bound_by_the_drive(settings=settings)).advice]
    assert "nvme: 3 drives instead of 2" in changes
    assert not any("state_format" in change or "backward" in change for change in changes)
    changes = [one.change for one in explain(bound_by_the_drive(dtypes=["float32"])).advice]
    assert not any("state_format" in change for change in changes)


def test_links_have_advice_too() -> None:
    found = explain(
        trace_of(
            *wait("fetch", "a", 0, 3, (H2D,)),
            op(H2D, "transfer", "copy", "a", 0, 3, 3 << 30),
            *wait("gradients", "", 3, 5, (D2H,)),
            op(D2H, "transfer", "copy", "a", 3, 5, 1 << 30),
            *use("forward", "a", 5, 10),
        )
    )
    changes = [one.change for one in found.advice]
    assert "prefetch=2" in changes and any(change.startswith("device_memory") for change in changes)


def test_written_and_read_again(tmp_path: Path) -> None:
    """Transfers in flight at once are drawn one after the other, and read as they were."""
    overlapping = [op(NVME_READ, "transfer", "parameters", f"{index}", index, index + 3, 7) for index in range(4)]
    crossing = [op(MAIN, "use", "backward", "a", 0, 6), op(MAIN, "use", "backward", "b", 4, 9)]
    trace = trace_of(*overlapping, *crossing, *wait("fetch", "a", 9, 10, (H2D, NVME_READ)))
    path = tmp_path / "trace.json"
    write_trace(trace, path)
    assert sorted(read_trace(path).events, key=repr) == sorted(trace.events, key=repr)
    drawn = [one for one in as_json(trace)["traceEvents"] if one["ph"] == "X" and one["args"]["row"] == NVME_READ]
    assert [(one["ts"], one["dur"]) for one in drawn] == [(0, 3e6), (3e6, 1e6), (4e6, 1e6), (5e6, 1e6)]
    rows = [one["args"]["name"] for one in as_json(trace)["traceEvents"] if one["name"] == "thread_name"]
    assert rows == [MAIN, f"{MAIN} (2)", COMPUTE, NVME_READ]
    assert [child.name for child in tmp_path.iterdir()] == ["trace.json"]


def test_an_interrupt_leaves_no_half_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", interrupted)
        write_trace(trace_of(*use("forward", "a", 0, 1)), tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


def test_waits_that_are_too_short_to_be_listed_have_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    write_trace(trace_of(*wait("fetch", "b", 0, 1e-5, (H2D,)), *use("forward", "a", 1e-5, 10)), path)
    assert main(["explain", str(path)]) == 0
    assert "stood still" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no trace: it is no JSON"),
        ("[]", "is no trace. Expected: what engine.profile"),
        ('{"traceEvents": []}', "is another program's trace"),
        ('{"traceEvents": [], "otherData": {"offload_trace": 99}}', "format 99; this version reads 1"),
        ('{"traceEvents": [{"ph": "X"}], "otherData": {"offload_trace": 1}}', "is a damaged trace"),
        ('{"otherData": {"offload_trace": 1}}', "is a damaged trace"),
        ('{"traceEvents": [], "otherData": {"offload_trace": 1, "duration_ns": 0, "steps": 1}}', "it lasted no time"),
        ('{"traceEvents": [], "otherData": {"offload_trace": 1, "duration_ns": 1, "steps": 1}}', "it does not say its dtypes"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_trace_of_ours_is_one_error(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_text(content)
    assert main(["explain", str(path)]) == 2
    told = capsys.readouterr().err
    assert message in told and str(path) in told and told.count("\n") == 1


def test_the_command_prints_a_page_or_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    write_trace(bound_by_the_drive(), path)
    assert main(["explain", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["bottleneck"] == NVME_READ and found["work"][NVME_READ]["hidden"] == 0.0
    assert found["advice"][0].keys() == {"change", "why", "saves_seconds"}
    assert main(["explain", str(path)]) == 0
    page = capsys.readouterr().out
    for part in ("10.00 s a step", "bottleneck: NVMe read", "Compute stood still", "cpu_memory: 8.0 GiB more"):
        assert part in page
