# SPDX-License-Identifier: Apache-2.0
"""`engine.profile` writes what happened: each link and lane on a row, with bytes and units, and no number changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.device.recording import COMPUTE, D2H, H2D, LINKS, MAIN, NVME_READ, NVME_WRITE, Recording, lane_row
from offload.profiling.explanation import explain
from offload.profiling.trace_events import read_trace
from tests.device.played_cuda import play
from tests.inside import accelerator_of, parts_of, settle_writes

from .models import ALL_SETUPS, ON_CPU, ON_NVME, ON_NVME_IN_PLACE, Setup, adamw, stack, vector_batches
from .runs import Run, simple_loop


def stepper(engine: Any, model: Any) -> Callable[[int], None]:
    batches = vector_batches(64, 16)

    def steps(count: int) -> None:
        for _ in range(count):
            x, y = batches.pop()
            engine.backward(torch.nn.functional.mse_loss(model(x), y))
            engine.step()
            engine.zero_grad()

    return steps


def recorded(opened: Callable[..., Any], setup: Setup, path: Path, **fields: Any) -> tuple[Any, dict[str, Any]]:
    """The engine after two steps, and the file of the two that followed."""
    model = stack(width=16)
    engine = opened(model, adamw(model), setup, **fields)
    steps = stepper(engine, model)
    steps(2)
    engine.profile(path, steps=2)
    steps(2)
    return engine, json.loads(path.read_text())


def bytes_by_row(content: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for event in content["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == "transfer":
            found[event["args"]["row"]] = found.get(event["args"]["row"], 0) + event["args"]["bytes"]
    return found


@pytest.mark.parametrize("setup", ALL_SETUPS, ids=lambda setup: setup.name)
def test_no_bit_changes(opened: Callable[..., Any], setup: Setup, tmp_path: Path) -> None:
    found = []
    for path in (None, tmp_path / "trace.json"):
        model = stack()
        engine = opened(model, adamw(model), setup)
        if path is not None:
            engine.profile(path)
        run = Run(model, engine.optimizer, engine)
        found.append((simple_loop(steps=3)(run), run.weights()))
        engine.close()
    (losses, weights), (other_losses, other_weights) = found
    assert losses == other_losses and all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert read_trace(tmp_path / "trace.json").step_count == 3


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME, ON_NVME_IN_PLACE], ids=lambda setup: setup.name)
def test_the_file_is_of_chromes_format(opened: Callable[..., Any], setup: Setup, tmp_path: Path) -> None:
    """Complete events that nest or are apart on each row; every row has a name."""
    _, content = recorded(opened, setup, tmp_path / "trace.json")
    rows: dict[int, list[tuple[float, float]]] = {}
    names = {}
    for event in content["traceEvents"]:
        assert event["ph"] in ("M", "X") and event["pid"] == 0 and isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"]
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
        elif event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
    assert set(rows) == set(names) and MAIN in names.values() and COMPUTE in names.values()
    for intervals in rows.values():
        for index, (start, end) in enumerate(intervals):
            for other_start, other_end in intervals[:index]:
                apart = end <= other_start + 1e-6 or other_end <= start + 1e-6
                inside = other_start <= start + 1e-6 and end <= other_end + 1e-6
                around = start <= other_start + 1e-6 and other_end <= end + 1e-6
                assert apart or inside or around


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME, ON_NVME_IN_PLACE], ids=lambda setup: setup.name)
def test_bytes_are_those_of_the_counters(opened: Callable[..., Any], setup: Setup, tmp_path: Path) -> None:
    """Of transfers that were asked for meanwhile."""
    model = stack(width=16)
    engine = opened(model, adamw(model), setup)
    steps = stepper(engine, model)
    steps(2)
    accelerator = accelerator_of(engine)

    def counters() -> dict[str, int]:
        found = {}
        if setup.accelerator == "deferred":
            found = {H2D: accelerator.copied_in_nbytes, D2H: accelerator.copied_out_nbytes}
        if parts_of(engine).backend is not None:
            with engine.gathered([]):
                pass
            settle_writes(engine)
            io = engine.stats()["io"]
            found |= {NVME_READ: io.read_nbytes, NVME_WRITE: io.written_nbytes}
        return found

    before = counters()
    with engine.profile(tmp_path / "trace.json"):
        steps(2)
        after = counters()
    moved = {row: nbytes - before[row] for row, nbytes in after.items() if nbytes > before[row]}
    assert moved and bytes_by_row(json.loads((tmp_path / "trace.json").read_text())) == moved


@pytest.mark.parametrize("setup", [ON_CPU, ON_NVME], ids=lambda setup: setup.name)
def test_each_op_says_whose_it_is(opened: Callable[..., Any], setup: Setup, tmp_path: Path) -> None:
    engine, content = recorded(opened, setup, tmp_path / "trace.json")
    names = {unit["name"] for unit in engine.stats()["units"]}
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    used = {(event["args"]["op"], event["args"].get("unit")) for event in events if event["cat"] == "use"}
    assert {(op, name) for op in ("forward", "backward") for name in names if name.startswith("blocks")} <= used
    for event in events:
        if event["args"]["row"] in (NVME_READ, NVME_WRITE, H2D):
            assert event["args"]["unit"] in names
    updated = {event["args"]["unit"] for event in events if event["args"]["op"] == "adam"}
    assert updated <= names and len(updated) > 1
    waits = [event for event in events if event["cat"] == "wait"]
    assert waits and all(event["args"]["awaits"] for event in waits)


def test_a_block_a_count_or_the_end(opened: Callable[..., Any], tmp_path: Path) -> None:
    model = stack(width=16)
    engine = opened(model, adamw(model), ON_CPU)
    steps, paths = stepper(engine, model), [tmp_path / f"{index}.json" for index in range(3)]
    with engine.profile(paths[0]) as profile:
        assert profile.is_recording
        with pytest.raises(offload.UsageError, match=r"a profile is being recorded, for .*0\.json"):
            engine.profile(paths[1])
        steps(3)
        assert not paths[0].exists()
    assert read_trace(paths[0]).step_count == 3
    engine.profile(paths[1], steps=1)
    steps(1)
    assert read_trace(paths[1]).step_count == 1
    assert accelerator_of(engine).recorder.to is None
    engine.profile(paths[2], steps=9)
    steps(2)
    engine.close()
    assert read_trace(paths[2]).step_count == 2


def test_what_cannot_be_is_refused_before_anything(opened: Callable[..., Any], tmp_path: Path) -> None:
    model = stack(width=16)
    engine = opened(model, adamw(model), ON_CPU)
    for steps in (0, -1, 1.5, True):
        with pytest.raises(offload.UsageError, match="expected a whole number from 1 on"):
            engine.profile(tmp_path / "trace.json", steps=steps)
    for path in (tmp_path, tmp_path / "missing" / "trace.json"):
        with pytest.raises(offload.ConfigError, match="in a folder that exists"):
            engine.profile(path)
    assert accelerator_of(engine).recorder.to is None


def test_a_trace_that_cannot_be_written_keeps_nothing_open(opened: Callable[..., Any], tmp_path: Path) -> None:
    model = stack(width=16)
    engine = opened(model, adamw(model), ON_CPU)
    folder = tmp_path / "gone"
    folder.mkdir()
    engine.profile(folder / "trace.json")
    stepper(engine, model)(1)
    made = parts_of(engine).made
    assert made
    folder.rmdir()
    with pytest.raises(offload.StorageError, match="cannot write the profile to"):
        engine.close()
    assert not made and not any(module._forward_pre_hooks for module in model.modules())


def test_what_raises_meanwhile_leaves_a_trace_too(opened: Callable[..., Any], tmp_path: Path) -> None:
    model = stack(width=16)
    engine = opened(model, adamw(model), ON_CPU)
    steps = stepper(engine, model)
    steps(1)

    def fails(*_: Any) -> None:
        raise RuntimeError("boom")

    removed = model.blocks[1].register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="boom"), engine.profile(tmp_path / "trace.json"):
        steps(1)
    removed.remove()
    steps(1)
    assert read_trace(tmp_path / "trace.json").events


def test_parts_that_are_made_anew_end_it(opened: Callable[..., Any], tmp_path: Path) -> None:
    model = stack(width=16)
    model.blocks[0].requires_grad_(False)
    engine = opened(model, adamw(model), ON_CPU)
    steps = stepper(engine, model)
    steps(1)
    engine.profile(tmp_path / "trace.json")
    steps(1)
    model.blocks[0].requires_grad_(True)
    engine.optimizer.add_param_group({"params": list(model.blocks[0].parameters())})
    steps(1)
    assert read_trace(tmp_path / "trace.json").step_count == 1


def test_torch_profiler_is_told_while_it_listens(opened: Callable[..., Any]) -> None:
    model = stack(width=16)
    engine = opened(model, adamw(model), ON_NVME)
    steps = stepper(engine, model)
    steps(1)
    recorder = accelerator_of(engine).recorder
    assert recorder.to is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        steps(2)
    told = [event.name for event in profiler.events() if event.name.startswith("offload ")]
    for part in ("main thread: forward blocks.1", "main thread: backward blocks.1", "update lane: adam", "NVMe read", "H2D"):
        assert any(part in name for name in told), part
    steps(1)
    assert recorder.to is None


def test_nvtx_ranges_begin_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    open_ranges: dict[int, str] = {}
    seen: list[str] = []

    class Nvtx:
        @staticmethod
        def range_start(text: str) -> int:
            open_ranges[len(seen)] = text
            seen.append(text)
            return len(seen) - 1

        @staticmethod
        def range_end(number: int) -> None:
            del open_ranges[number]

    class Clock:
        def clock_ns(self) -> int:
            return 1

        def begin_stamps(self) -> None: ...

        def stamp(self) -> Callable[[], int]:
            return lambda: 1

        def settle_stamps(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "nvtx", Nvtx)
    recording = Recording(Clock(), keeps=True, emits_nvtx=True)
    with recording.span(lane_row("update"), "work", "adam", "blocks.0", nbytes=8):
        done = recording.use("forward", "blocks.1")
        assert len(open_ranges) == 2
        done()
    assert not open_ranges
    assert seen == ["offload update lane: adam blocks.0 (8 bytes)", "offload main thread: forward blocks.1"]


@pytest.mark.parametrize("places", [("cpu", "cpu"), ("nvme", "nvme")], ids="+".join)
def test_times_of_cuda_copies_are_events_on_their_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: tuple[str, str]
) -> None:
    """On the played GPU: the numbers are not a GPU's, what is recorded where is."""
    play(monkeypatch)
    model = stack(width=16)
    parameters, states = places
    config = {"parameters": parameters, "optimizer_states": states, "nvme": str(tmp_path)}
    with offload.initialize(model, adamw(model), config) as engine:
        steps = stepper(engine, model)
        steps(1)
        engine.profile(tmp_path / "trace.json", steps=3)  # the lane may be through with a step before the next begins
        steps(3)
    trace = read_trace(tmp_path / "trace.json")
    rows = {event.row for event in trace.events}
    assert {MAIN, COMPUTE, H2D, D2H, lane_row("fetch"), lane_row("update")} <= rows
    assert all(event.start_ns <= event.end_ns for event in trace.events)
    found = explain(trace)
    assert {H2D, D2H} <= set(found.work) and found.work[H2D].nbytes > 0
    assert all(0 <= one.hidden <= 1 for one in found.work.values() if one.hidden is not None)
    assert set(found.work) <= {*LINKS, "NVMe", "CPU Adam", "host", "outside of the model"}
