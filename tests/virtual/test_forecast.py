# SPDX-License-Identifier: Apache-2.0
"""A forecast is the engine's own run: the bytes of a real one, the same each time, and never faster than what bounds it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import offload
from offload.cli.main import main
from offload.cli.plans.forecast import Work, forecast, training_loop
from offload.cli.plans.on_machine import Seen
from offload.device.deferred import DeferredAccelerator
from offload.device.virtual.description import Machine, described, read_machine
from offload.device.virtual.machine import CALLS, VirtualMachine
from offload.device.virtual.operations import CountedOperations, fused_attention
from offload.forecast import Forecast, Loop, simulate
from tests.crosses import in_pairs
from tests.devices import before_each_copy, records_stay_home
from tests.inside import parts_of, units_of

WORK = Work(batch=2, sequence=16, micro_batches=1, checkpointing=False)
MACHINE, UNIFIED = read_machine("rtx4090"), read_machine("gb10")
CASES = {
    "cpu": {"parameters": "cpu", "optimizer_states": "cpu"},
    "records on nvme": {"parameters": "cpu", "optimizer_states": "nvme"},
    "nvme": {"parameters": "nvme", "optimizer_states": "nvme"},
}
PLACES: dict[str, dict[str, Any]] = {
    **CASES,
    "parameters on device": {"parameters": "device", "optimizer_states": "nvme"},
    "a part kept": CASES["nvme"] | {"cpu_memory": "9MiB"},
}
SLOW = dataclasses.replace(
    MACHINE, name="slow", flops=1e9, launch_seconds=1e-9, call_seconds=1e-9, nvme_read=7e7, nvme_write=5e7, nvme_both=9e7
)
"""Where the device is what is waited for."""


def tiny() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, vocab_size=256
    )
    config.use_cache = False
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def foretold(work: Work = WORK, machine: Any = MACHINE, trace: Path | None = None, **fields: Any) -> Forecast:
    """`trace`: a file, which makes it run every micro-batch."""
    with torch.device("meta"):
        model = tiny()
    return forecast(model, adamw(model), offload.Config(dtype="bf16", nvme=".", **fields), machine, work, trace)


def really_moved(folder: Path, micro_batches: int, accelerator: str, **fields: Any) -> dict[str, int]:
    """By link, the bytes of one step on that accelerator, after three others: by how much more than those move four."""
    three, four = (totals(folder, micro_batches, accelerator, steps, fields) for steps in (3, 4))
    return {link: four[link] - three[link] for link in four}


def totals(folder: Path, micro_batches: int, accelerator: str, steps: int, fields: dict[str, Any]) -> dict[str, int]:
    """Of so many steps, when all that they began is done. Nothing goes to the CPU and back."""
    moved = {"h2d": 0, "d2h": 0}

    def count(link: str, nbytes: int) -> None:
        moved[link] += nbytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", accelerator)
        if accelerator == "deferred":
            patch.setenv("OFFLOAD_DEVICE_NBYTES", str(int(MACHINE.device_nbytes)))
        before_each_copy(patch, DeferredAccelerator, "copy_in", lambda destination, source: count("h2d", source.nbytes))
        before_each_copy(patch, DeferredAccelerator, "copy_out", lambda destination, source: count("d2h", source.nbytes))
        on_nvme = moved_on_nvme(folder, micro_batches, steps, fields)
    return moved | on_nvme


def moved_on_nvme(folder: Path, micro_batches: int, steps: int, fields: dict[str, Any]) -> dict[str, int]:
    model = tiny()
    tokens = torch.zeros(WORK.batch, WORK.sequence, dtype=torch.long)
    config = offload.Config(dtype="bf16", nvme=str(folder), **fields).expecting(micro_batches)
    with offload.initialize(model, adamw(model), config) as engine:
        for _ in range(steps):
            for _ in range(micro_batches):
                engine.backward(model(input_ids=tokens, labels=tokens).loss)
            engine.step()
            engine.zero_grad()
        parts = parts_of(engine)
        parts.residency.finish_updates()
        assert parts.records is not None
        parts.records.settle_writes()
        parts.parameter_store.settle_writes()
        io = engine.stats()["io"]
        read, written = (io.read_nbytes, io.written_nbytes) if io is not None else (0, 0)
        return {"nvme_read": read, "nvme_write": written}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_bytes_moved_are_those_of_a_real_run(
    case: str, micro_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records_stay_home(monkeypatch)
    fields = CASES[case]
    real = really_moved(tmp_path, micro_batches, "deferred", **fields)
    found = foretold(dataclasses.replace(WORK, micro_batches=micro_batches), **fields)
    assert found.moved_nbytes == real
    assert real["h2d"] > 0


@pytest.mark.parametrize("case", CASES)
def test_of_records_that_visit_the_device_a_forecast_says_that_nothing_moves(case: str) -> None:
    """But sums of squares, for the norm (tests/acceptance/test_records_on_device.py shows the same of a real run)."""
    found = foretold(**CASES[case])
    squares = found.moved_nbytes.pop("d2h")
    assert 0 < squares < 1000 and not any(found.moved_nbytes.values())
    assert 12 * sum(parameter.numel() for parameter in tiny().parameters()) < found.peak_nbytes["device"]


@pytest.mark.parametrize("case", CASES)
def test_on_the_cores_nothing_is_copied_and_the_drive_moves_what_a_real_run_moves(case: str, tmp_path: Path) -> None:
    # An update that begins in backward has the unit's memory until it is over: what is still there then is a matter of time.
    fields = CASES[case] | {"update": "step"}
    real = really_moved(tmp_path, 1, "cpu", **fields)
    found = foretold(machine=dataclasses.replace(UNIFIED, kind="cpu"), **fields)
    assert found.moved_nbytes == real and real["h2d"] == real["d2h"] == 0
    assert found.step_seconds >= found.floor_seconds > 0


@pytest.mark.parametrize("machine", [MACHINE, UNIFIED], ids=["rtx4090", "gb10"])
@pytest.mark.parametrize("case", CASES)
def test_of_many_micro_batches_a_few_tell_what_all_take(case: str, machine: Any, tmp_path: Path) -> None:
    """To the byte, and in time but for rounding."""
    work = dataclasses.replace(WORK, micro_batches=12)
    few, few_steps = looked_at(work, machine, **CASES[case])
    every, steps = looked_at(work, machine, tmp_path / "trace.json", **CASES[case])
    assert len(few_steps[-1]) < len(steps[-1]) == work.micro_batches, "some are left out, unless all are asked for"
    assert few == foretold(work, machine, **CASES[case])
    assert few.moved_nbytes == every.moved_nbytes and few.peak_nbytes == every.peak_nbytes
    assert few.floors == pytest.approx(every.floors, rel=1e-6)
    assert few.step_seconds == pytest.approx(every.step_seconds, rel=1e-3)


# What is left out is the micro-batches' matter, and what begins early and when the update's, on either kind of machine.
@pytest.mark.parametrize(
    ("machine", "case", "micro_batches", "update"),
    in_pairs((MACHINE, UNIFIED, SLOW), PLACES, (3, 4, 8), ("auto", "backward")),
)
def test_updates_begin_in_the_last_micro_batch_and_all_is_as_if_each_ran(
    machine: Machine, case: str, micro_batches: int, update: str, tmp_path: Path
) -> None:
    work = dataclasses.replace(WORK, micro_batches=micro_batches, checkpointing=True)
    fields = PLACES[case] | {"update": update, "max_grad_norm": 1.0}
    few, few_steps = looked_at(work, machine, **fields)
    every, steps = looked_at(work, machine, tmp_path / "trace.json", **fields)
    begins = any(line["purpose"] == "room to undo updates" for line in few.planned)
    begun_in = {tuple(one) for one in (*few_steps, *steps)}
    assert all(not any(before) for *before, _ in begun_in) and any(last for *_, last in begun_in) == begins
    assert [len(one) for one in steps] == [*(len(one) for one in steps[:-1]), micro_batches]
    assert few.moved_nbytes == every.moved_nbytes and few.peak_nbytes == every.peak_nbytes
    assert few.step_seconds == pytest.approx(every.step_seconds, rel=1e-9)
    assert few.floors == pytest.approx(every.floors, rel=1e-9)


def looked_at(work: Work, machine: Machine, trace: Path | None = None, **fields: Any) -> tuple[Forecast, list[list[bool]]]:
    """As `foretold`; and by step and micro-batch that was run, whether updates were under way after it. None is undone."""
    steps: list[list[bool]] = []
    with torch.device("meta"):
        model = tiny()
    loop = training_loop(model, adamw(model), offload.Config(dtype="bf16", nvme=".", **fields), work)

    def begin() -> offload.Engine:
        steps.append([])
        return loop.begin()

    def micro_batch(engine: offload.Engine) -> None:
        loop.micro_batch(engine)
        steps[-1].append(any(unit.early is not None for unit in units_of(engine)))

    def end(engine: offload.Engine) -> None:
        loop.end(engine)
        assert engine.stats()["undone_steps"] == 0
        steps.append([])

    watched = Loop(begin, micro_batch, end)
    found = simulate(VirtualMachine(machine), watched, tokens=work.tokens, micro_batches=work.micro_batches, trace=trace)
    return found, steps[:-1]


class NoEngine:
    """Of a loop that gives the machine its work by itself."""

    def stats(self) -> dict[str, Any]:
        nothing = {"host_peak_nbytes": 0, "resident_peak_nbytes": 0, "visiting_peak_nbytes": 0}
        return nothing | {"planned": [], "placement": {}, "decision": None}

    def profile(self, path: Path, steps: int) -> None:
        """It has nothing to tell."""

    def close(self) -> None:
        pass


def test_micro_batches_that_differ_are_all_run() -> None:
    """Each on as many tokens as have come so far."""
    runs, of_steps = list[None](), [0]
    virtual = VirtualMachine(MACHINE)

    def micro_batch(_: NoEngine) -> None:
        runs.append(None)
        virtual.launch(1e12 * len(runs), 0)

    loop = Loop(NoEngine, micro_batch, lambda _: of_steps.append(len(runs)))
    found = simulate(virtual, loop, tokens=1, micro_batches=12)
    before, end = of_steps[-2:]
    assert end - before == 12 and found.step_seconds >= sum(range(before + 1, end + 1)) * 1e12 / MACHINE.flops


def waited_for(micro_batches: int, growth: float, trace: Path | None = None) -> tuple[Forecast, int]:
    """Of a loop that waits for the device after each micro-batch, whose steps grow by that share of the first; and how many
    steps were run. `trace`: as of `foretold`."""
    virtual, ends = VirtualMachine(MACHINE), list[None]()

    def micro_batch(_: NoEngine) -> None:
        virtual.launch(1e12 * (1 + growth * len(ends)), 0)
        virtual.compute.last.wait()

    loop = Loop(NoEngine, micro_batch, lambda _: ends.append(None))
    return simulate(virtual, loop, tokens=1, micro_batches=micro_batches, trace=trace), len(ends)


@pytest.mark.parametrize("micro_batches", [2, 3, 24])
def test_a_step_that_repeats_the_one_before_is_the_last(micro_batches: int, tmp_path: Path) -> None:
    found, step_count = waited_for(micro_batches, growth=0.0)
    later, all_count = waited_for(micro_batches, growth=0.0, trace=tmp_path / "trace.json")
    assert (step_count, all_count) == (2, 3)
    assert found.step_seconds == pytest.approx(later.step_seconds)
    assert found.step_seconds >= micro_batches * 1e12 / MACHINE.flops
    assert found.floors == pytest.approx(later.floors) and found.moved_nbytes == later.moved_nbytes


def test_a_step_that_takes_longer_than_the_one_before_is_not() -> None:
    found, step_count = waited_for(24, growth=1e-4)
    assert step_count == 3 and found.step_seconds >= 24 * (1 + 2e-4) * 1e12 / MACHINE.flops


@pytest.mark.parametrize("case", CASES)
def test_where_device_and_host_have_one_memory_nothing_is_staged(case: str) -> None:
    found = foretold(machine=UNIFIED, **CASES[case])
    beside = foretold(**CASES[case])
    assert found.moved_nbytes["h2d"] == found.moved_nbytes["d2h"] == found.peak_nbytes["device"] == 0 < found.peak_nbytes["cpu"]
    assert found.peak_nbytes["cpu"] < beside.peak_nbytes["cpu"] + beside.peak_nbytes["device"]


def test_budgets_clipping_and_spilled_gradients_end_too() -> None:
    budget = {"device_memory": "1MiB", "cpu_memory": "8MiB", "max_grad_norm": 1.0}
    for fields in ({"update": "step"}, {"update": "backward"}):
        found = foretold(dataclasses.replace(WORK, micro_batches=2), **CASES["nvme"], **budget, **fields)
        assert found.fits and found.peak_nbytes["cpu"] <= 8 * 2**20


@pytest.mark.parametrize("case", CASES)
def test_the_same_each_time_and_not_below_the_floor(case: str) -> None:
    first, second = foretold(**CASES[case]), foretold(**CASES[case])
    assert first == second
    assert first.step_seconds >= first.floor_seconds > 0
    assert first.fits and first.peak_nbytes["device"] > 0


def on_a_drive(rate: float, case: str) -> Forecast:
    return foretold(machine=dataclasses.replace(MACHINE, nvme_read=rate, nvme_both=rate), **CASES[case])


def test_what_is_faster_helps_where_it_binds_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    records_stay_home(monkeypatch)
    slow, fast = on_a_drive(1e8, "nvme"), on_a_drive(1e9, "nvme")
    assert slow.bottleneck == "NVMe"
    assert fast.step_seconds < 0.5 * slow.step_seconds
    assert on_a_drive(1e8, "cpu").step_seconds == on_a_drive(1e9, "cpu").step_seconds


def test_activations_count_and_checkpointing_saves_them() -> None:
    long = dataclasses.replace(WORK, sequence=512)
    whole, checkpointed = (
        foretold(dataclasses.replace(long, checkpointing=on), **CASES["cpu"]).peak_nbytes["device"] for on in (False, True)
    )
    assert whole > foretold(**CASES["cpu"]).peak_nbytes["device"]
    assert checkpointed < whole
    little_less = foretold(long, machine=dataclasses.replace(MACHINE, device_nbytes=whole - 1), **CASES["cpu"])
    assert little_less.fits and little_less.peak_nbytes["device"] < whole  # fewer units stay between their uses
    small = foretold(long, machine=dataclasses.replace(MACHINE, device_nbytes=whole // 2), **CASES["cpu"])
    assert not small.fits and "device" in small.reason


def test_described_machines_say_where_their_numbers_come_from() -> None:
    assert {"rtx3090", "rtx4090", "rtx5090", "a100", "h100", "h200", "gb10"} <= set(described())
    for name in described():
        assert read_machine(name).name == name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "no JSON object"),
        ("{", "cannot be read as a machine"),
        ('{"name": "x", "flop": 1}', "has no 'flop'"),
        ('{"name": "x", "h2d": "fast"}', "expected a number above 0"),
    ],
)
def test_files_that_describe_no_machine_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(offload.ConfigError, match=message):
        read_machine(str(path))
    with pytest.raises(offload.ConfigError, match="there is no machine 'rtx'"):
        read_machine("rtx")


def test_memory_that_is_taken_as_it_is_written_counts_from_then_on() -> None:
    machine = VirtualMachine(UNIFIED)
    with machine.running(), CountedOperations(machine):
        memory = machine.host_memory(1000)
        assert memory is not None and machine.memory.nbytes == 1000
        machine.takes_as_written(memory)
        assert (machine.memory.nbytes, machine.unwritten_nbytes) == (0, 1000)
        for _ in range(2):
            memory[200:600].fill_(1)
        assert (machine.memory.nbytes, machine.unwritten_nbytes) == (400, 600)
        del memory
        assert (machine.memory.nbytes, machine.unwritten_nbytes) == (0, 0)


@pytest.mark.parametrize(("kind", "ranks"), [("gpu", "1"), ("cpu", "1"), ("cpu", "4")])
def test_the_largest_batch_that_is_told_fits_and_is_below_one_that_does_not(
    kind: str, ranks: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ranks that compute on host memory share it."""
    path = tmp_path / "own.json"
    described = "rtx4090" if kind == "gpu" else "gb10"
    path.write_text((Path(offload.__file__).parent / f"device/virtual/machines/{described}.json").read_text())
    content = json.loads(path.read_text()) | {"kind": kind}
    content["device_nbytes" if kind == "gpu" else "cpu_nbytes"]["value"] = 2**28
    path.write_text(json.dumps(content))

    def planned(batch: int) -> dict[str, Any]:
        shape = ["--hidden", "64", "--layers", "2", "--vocabulary", "256", "--dtype", "bf16", "--sequence", "128"]
        main(["plan", *shape, "--machine", str(path), "--ranks", ranks, "--batch", str(batch), "--json"])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    largest = planned(8)["largest"]["batch"]
    assert largest > 8
    assert planned(largest)["fits"]
    beyond = planned(2 * largest)
    assert not beyond["fits"] and beyond["largest"]["batch"] < 2 * largest


def test_the_command_prints_one_object_or_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = {**json.loads((Path(offload.__file__).parent / "device/virtual/machines/rtx4090.json").read_text()), "name": "own"}
    path = tmp_path / "own.json"
    path.write_text(json.dumps(own))
    shape = ["--hidden", "64", "--layers", "2", "--vocabulary", "256", "--dtype", "bf16", "--sequence", "16"]
    assert main(["plan", *shape, "--machine", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True and found["step_seconds"] >= found["floor_seconds"]
    assert set(found["peak_nbytes"]) == {"device", "cpu", "nvme"}
    assert set(found["moved_nbytes"]) == set(found["hidden"]) == {"h2d", "d2h", "nvme_read", "nvme_write"}
    assert set(found["largest"]) == {"parameters", "batch", "sequence"} and found["days"] is None
    assert {line["what"] for line in found["buys"]} <= {
        "One more GiB of memory",
        "One more GiB of device memory",
        "One more drive",
    }
    assert all(line["floor_seconds_after"] <= line["floor_seconds_before"] for line in found["buys"])
    assert main(["plan", *shape, "--machine", "rtx4090", "--nvme-read", "1", "--tokens", "1e9"]) == 0
    page = capsys.readouterr().out
    assert "days for 1.0 G tokens" in page
    assert "It fits." in page and "tokens/s" in page
    own["device_nbytes"] = 1000
    path.write_text(json.dumps(own))
    assert main(["plan", *shape, "--machine", str(path)]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main(["plan", *shape, "--machine", str(path), "--parameters", "cpu", "--device-memory", "1", "--json"]) == 1
    refused = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert refused["fits"] is False and refused["step_seconds"] is None and "device_memory" in refused["reason"]


def test_this_machine_is_measured_and_written_down(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    assert main(["probe", "--nvme", str(tmp_path), "--seconds", "0.04", "--machine-file", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())
    machine = read_machine(str(path))
    assert machine.kind == ("gpu" if torch.cuda.is_available() else "cpu") and machine.call_seconds > 0
    shape = ["--hidden", "64", "--layers", "2", "--vocabulary", "256", "--sequence", "16", "--nvme", str(tmp_path)]
    assert main(["plan", *shape, "--machine", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["moved_nbytes"]["h2d"] == found["moved_nbytes"]["d2h"] == 0


def test_adapters_move_what_is_frozen_and_train_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["plan", "--hidden", "64", "--layers", "2", "--vocabulary", "256", "--dtype", "bf16", "--sequence", "16", "--json"]
    places = ["--machine", "rtx4090", "--parameters", "cpu", "--optimizer-states", "cpu", "--checkpointing", "full"]
    peaks = []
    for adapters in ([], ["--lora", "4"]):
        assert main([*shape, *places, *adapters]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_nbytes"]["cpu"])
    assert peaks[1] < peaks[0] / 2


def test_each_expert_that_a_layer_routes_to_has_its_share_of_the_tokens() -> None:
    virtual, rows = VirtualMachine(MACHINE), []
    with virtual.running(), CountedOperations(virtual):
        chosen = torch.zeros(4, 2, 16, dtype=torch.bool, device="meta")  # experts, choices, tokens
        assert len(chosen.sum(dim=(1, 2)).gt(0).nonzero()) == 4
        rows = [len(torch.where(chosen[index])[0]) for index in range(4)]
    assert rows == [8] * 4 and virtual.values_read == 5


def test_what_waiting_for_a_resource_costs_is_the_same_step_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same places, though a machine that had no such wait would be given others."""
    records_stay_home(monkeypatch)
    slow = dataclasses.replace(MACHINE, nvme_read=1e8, nvme_write=1e8, nvme_both=1e8)

    def run(machine: Any, unbound: tuple[str, ...] = ()) -> Forecast:
        with torch.device("meta"):
            model = tiny()
        config = offload.Config(dtype="bf16", nvme=".", **CASES["nvme"])
        return forecast(model, adamw(model), config, machine, WORK, unbound=unbound)

    bound, fast = run(slow), run(dataclasses.replace(slow, nvme_read=1e13, nvme_write=1e13, nvme_both=1e13))
    freed = run(slow, ("nvme_read", "nvme_write", "nvme_both"))
    assert bound.bottleneck == "NVMe" and freed.bottleneck != "NVMe"
    assert freed.planned == bound.planned and freed.moved_nbytes["h2d"] == bound.moved_nbytes["h2d"]
    assert freed.moved_nbytes["nvme_read"] > 0
    assert fast.step_seconds == pytest.approx(freed.step_seconds, rel=0.05) and freed.step_seconds < 0.5 * bound.step_seconds
    assert run(slow, (CALLS,)).step_seconds <= bound.step_seconds
    with pytest.raises(KeyError):
        run(slow, ("nvme",))


class Forgetful(CountedOperations):
    """Looks at each operation as if it were the first of its kind."""

    def _learn(self, *_: Any) -> None:
        self.operations = getattr(self, "operations", 0) + 1


def on_virtual(kind: type[CountedOperations], **fields: Any) -> tuple[CountedOperations, list[Any]]:
    """What two steps take of a machine whose operations are counted so."""
    virtual, found = VirtualMachine(MACHINE), list[Any]()
    with torch.device("meta"):
        model = tiny()
    work = dataclasses.replace(WORK, micro_batches=2, checkpointing=True)
    loop = training_loop(model, adamw(model), offload.Config(dtype="bf16", nvme=".", **fields), work)
    with virtual.running(), kind(virtual) as counted, fused_attention(), loop.begin() as engine:
        for _ in range(2):
            for _ in range(2):
                loop.micro_batch(engine)
            loop.end(engine)
            virtual.compute.last.wait()
            found += [virtual.simulation.now, virtual.compute_seconds, virtual.moved(), virtual.memory.peak_nbytes]
            found += [(one.moved, one.busy_seconds, one.hidden_seconds) for one in virtual.resources.values()]
        found.append(engine.stats()["host_peak_nbytes"])
    return counted, found


@pytest.mark.parametrize("fields", [CASES["cpu"], CASES["nvme"] | {"max_grad_norm": 1.0}], ids=["cpu", "nvme"])
def test_an_operation_that_was_seen_before_is_the_same_one(fields: dict[str, Any]) -> None:
    """Its results, its time and its memory: nothing is known by what it could differ in."""
    (counted, known), (forgetful, anew) = (on_virtual(kind, **fields) for kind in (CountedOperations, Forgetful))
    assert known == anew
    assert not forgetful._known and 0 < 4 * len(counted._known) < forgetful.operations  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.sum(-1),
        lambda x: x.t() @ x,
        lambda x: x.sort(dim=0),
        lambda x: (x * 2, x * 2.0, x * True, x.int() * 2, x.int() * 2.0),
        lambda x: torch.where(x > 0, x, 0.0).to(torch.bfloat16),
        lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
        lambda x: torch.cat([x, x.float()], dim=-1).softmax(-1),
        lambda x: x.expand(3, *x.shape).transpose(0, 1).contiguous(),
    ],
)
def test_what_is_known_of_operations_is_what_pytorch_says(operation: Any) -> None:
    def seen(values: torch.Tensor) -> list[Any]:
        result = operation(values)
        return [
            (one.shape, one.stride(), one.dtype, one.is_meta) for one in (result if isinstance(result, tuple) else (result,))
        ]

    inputs = [
        torch.empty(6, 5, device="meta"),
        torch.empty(6, 5, device="meta", dtype=torch.float64),
        torch.empty(2, 5, 1, device="meta")[..., 0],
    ]
    expected = [seen(one) for one in inputs]
    virtual = VirtualMachine(MACHINE)
    with virtual.running(), CountedOperations(virtual) as counted:
        assert [seen(one) for one in inputs * 3] == expected * 3
        assert counted._known


def test_what_follows_from_positions_alone_is_computed_and_not_assumed() -> None:
    """Of all else it is not known: values read from data, and memory that was written with them."""
    virtual = VirtualMachine(MACHINE)
    with virtual.running(), CountedOperations(virtual):
        for _ in range(2):  # the second time operations are known
            places = torch.arange(6, device="meta")
            packed = (torch.diff(places[None], prepend=places[None, :1] - 1) != 1).cumsum(-1)
            assert (packed[:, -1] == 0).all() and not (places > 6).any() and places.sum().item() == 15
            assert not torch.cat([places[:2], places[3:]]).eq(2).any()
        assert virtual.values_read == 0
        data = torch.empty(6, dtype=torch.long, device="meta")
        unknown = places + data, torch.empty_like(places), torch.rand_like(places.float())
        assert all((one > 60).any() for one in unknown)
        places += data
        assert (places > 60).any()
        assert virtual.values_read == 4


def test_the_note_on_values_stands_where_the_model_goes_on_by_what_it_computed() -> None:
    """A mask that is found to be a causal one is no such thing; which tokens an expert gets is."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256, **heads}
    routing = transformers.MixtralConfig(**shape, num_local_experts=4, experts_implementation="eager", use_cache=False)
    with torch.device("meta"):
        models = [tiny(), transformers.MixtralForCausalLM(routing).to(torch.bfloat16)]
    config, seen = offload.Config(dtype="bf16", nvme="."), Seen(MACHINE, None, None, WORK)
    dense, routed = (seen.notes(forecast(model, adamw(model), config, MACHINE, WORK)) for model in models)
    assert dense == [] and "looks at a value that it computed" in routed[0]


def test_where_what_the_model_computes_with_is_too_much_no_larger_one_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Drives would hold one, of adapters above all."""
    machine = json.loads((Path(offload.__file__).parent / "device/virtual/machines/rtx4090.json").read_text())
    path = tmp_path / "own.json"
    shape = ["--hidden", "64", "--layers", "2", "--vocabulary", "256", "--dtype", "bf16", "--sequence", "128", "--lora", "4"]
    found = []
    for device_nbytes in (2**30, 2**24):
        path.write_text(json.dumps({**machine, "device_nbytes": {"value": device_nbytes, "source": "made up"}}))
        main(["plan", *shape, "--machine", str(path), "--batch", "32", "--json"])
        found.append(json.loads(capsys.readouterr().out))
    fitting, too_large = found
    assert fitting["fits"] and fitting["largest"]["parameters"] > 1e9
    assert not too_large["fits"] and too_large["peak_nbytes"]["device"] > 2**24
    assert set(too_large["largest"]) == {"batch", "sequence"} and too_large["largest"]["batch"] < 32
