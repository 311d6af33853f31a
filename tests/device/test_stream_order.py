# SPDX-License-Identifier: Apache-2.0
"""The order that the CUDA accelerator and the engine ask of streams and threads leaves no race; see `played_cuda`.

And the detector is one: with any of the orders taken out, the same training races.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import _native
from offload.device import cuda
from offload.device.accelerator import UnitMemory
from offload.device.cuda import CudaAccelerator
from offload.device.pending import Pending
from offload.step.speculation import Speculation
from offload.step.updates.update import Updates
from offload.tiers.memory import HostMemory
from tests.acceptance.chosen import choosing
from tests.acceptance.models import Stack, stack, vector_batches
from tests.crosses import in_turn
from tests.device import played_cuda
from tests.device.played_cuda import PlayedAccelerator, Race, Stream, Watch, play
from tests.devices import before_each_copy, gradient_buffers, records_stay_home, says_it_has
from tests.inside import layout_of
from tests.small_sizes import small

PLACES = ("device", "cpu", "nvme")
OFTEN = {("cpu", "cpu"), ("cpu", "device"), ("device", "cpu"), ("nvme", "nvme")}
EVERY = [
    pytest.param(*pair, id="+".join(pair), marks=[] if pair in OFTEN else [pytest.mark.slow])
    for pair in itertools.product(PLACES, PLACES)
]


def train(
    nvme: Path, parameters: str, states: str, update: str = "step", side_stream: bool = False, width: int = 16, **fields: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two steps of two micro-batches each, with a forward between backward and step, and one after it.

    Nothing of it makes the host wait for the device, but what the engine does.
    """
    model: Stack = stack(width=width, blocks=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"parameters": parameters, "optimizer_states": states, "nvme": str(nvme), "update": update, "dtype": "bf16"}
    results: list[torch.Tensor] = []
    with Watch():
        engine = offload.initialize(model, optimizer, config | {"max_grad_norm": 0.5} | fields)
    chosen = played_cuda.stream(Stream("the user's own")) if side_stream else contextlib.nullcontext()
    with engine, chosen, Watch():
        batches = iter(vector_batches(4, width))
        for _ in range(2):
            for last in (False, True):
                x, y = next(batches)
                with contextlib.nullcontext() if last else engine.no_sync():
                    loss = torch.nn.functional.mse_loss(model(x).float(), y)
                    engine.backward(loss)
                results.append(loss.detach())
            if update == "step":
                engine.clip_grad_norm_(0.5)  # waits for the gradients, so that the step need not
                with torch.no_grad():
                    results.append(model(x).float().sum())
            engine.step()
            engine.optimizer.zero_grad()
            with torch.no_grad():
                results.append(model(x).float().sum())
        assert not played_cuda._detector.unregistered
        return [result.item() for result in results], engine.state_dict()


@functools.lru_cache
def in_memory(**options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What `train` gives on the cpu accelerator."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as nvme:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        return train(Path(nvme), "device", "device", **options)


def test_the_cores_are_there_for_the_pool_beside_a_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU computes the model, threads that spin would be in its way."""
    monkeypatch.setattr(_native, "_device_computes", False)
    monkeypatch.setenv("OFFLOAD_ACCELERATOR", "cpu")
    for on_device in (False, True):
        if on_device:
            play(monkeypatch)
        model = stack(width=16, blocks=1)
        offload.initialize(model, torch.optim.AdamW(model.parameters())).close()
        assert _native._device_computes == on_device


@pytest.mark.parametrize("room", ["ample", "none"])
@pytest.mark.parametrize("update", ["step", pytest.param("backward", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("parameters", "states"), EVERY)
def test_no_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, states: str, update: str, room: str) -> None:
    """`room`: on the device, for units that stay and for sums of micro-batches."""
    expected = in_memory(update=update)
    detector = play(monkeypatch)
    if room == "none":
        says_it_has(monkeypatch, 0, CudaAccelerator)
    losses, weights = train(tmp_path, parameters, states, update)
    assert losses == expected[0] and all(torch.equal(weights[name], expected[1][name]) for name in weights)
    assert len(detector.operations) > 500, "the detector saw nothing"


@pytest.mark.parametrize(("parameters", "states"), [("cpu", "cpu"), ("device", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")])
def test_no_race_where_updates_begin_in_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, states: str
) -> None:
    """At once, since no norm is needed for them."""
    options = {"update": "backward", "max_grad_norm": None}
    expected = in_memory(**options)
    begun: list[int] = []
    enqueue = Updates.enqueue
    monkeypatch.setattr(
        Updates, "enqueue", lambda self, unit, chunks: (begun.append(unit.early is not None), enqueue(self, unit, chunks))[1]
    )
    play(monkeypatch)
    losses, weights = train(tmp_path, parameters, states, **options)
    assert any(begun), "none began early"
    assert losses == expected[0] and all(torch.equal(weights[name], expected[1][name]) for name in weights)


@pytest.mark.parametrize("state_format", ["fp32", "split"])
@pytest.mark.parametrize(("parameters", "states"), [("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme")])
def test_no_race_where_updates_are_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, states: str, state_format: str
) -> None:
    """The norm clips, and what new values had come to the device is emptied; autograd runs backward in a thread of its own."""
    options: dict[str, Any] = {"update": "backward", "max_grad_norm": 1e-3, "state_format": state_format}
    expected = in_memory(**options)
    small(monkeypatch, quiet_steps=0)
    applied: list[bool] = []
    take_back = Speculation._take_back

    def noted(speculation: Speculation, unit: Any, early: Any) -> None:
        applied.extend(update.applied for update in early.updates)
        take_back(speculation, unit, early)

    monkeypatch.setattr(Speculation, "_take_back", noted)
    play(monkeypatch)
    played_cuda.backward_elsewhere(monkeypatch)
    losses, weights = train(tmp_path, parameters, states, side_stream=True, **options)
    assert any(applied), "nothing was undone"
    assert losses == expected[0] and all(torch.equal(weights[name], expected[1][name]) for name in weights)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("places", ["cpu", "nvme"])
def test_sums_of_micro_batches_leave_the_device_for_memory_that_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: str, update: str
) -> None:
    """Each chunk's in one copy, which holds nobody up."""
    expected = in_memory(update=update)
    play(monkeypatch)
    records_stay_home(monkeypatch)
    left: list[torch.dtype] = []
    before_each_copy(monkeypatch, CudaAccelerator, "copy_out", lambda destination, source: left.append(source.dtype))
    losses, weights = train(tmp_path, places, places, update)
    assert losses == expected[0] and all(torch.equal(weights[name], expected[1][name]) for name in weights)
    assert torch.float32 in left, "no sum was on the device"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("parameters", "states"), EVERY)
def test_no_race_on_a_stream_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, states: str, seed: int
) -> None:
    play(monkeypatch, seed)
    train(tmp_path, parameters, states, side_stream=True)


MIXED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "parameters and gradients": ("cpu", "cpu", {"parameters": {1, 3}, "gradients": {2, 3}}),
    "updated on both": ("nvme", "nvme", {"parameters": {1, 2}, "gradients": {1, 2, 4}, "records": {1}}),
    "some stay for a step": ("cpu", "nvme", {"gradients": {2}, "records": {2}, "parameters": {2}, "spare_nbytes": 1 << 20}),
}


UPDATED_ON_HOST = [("cpu", "cpu"), ("device", "cpu"), ("cpu", "nvme"), ("nvme", "cpu"), ("nvme", "nvme")]
PARTS = [("cpu", "device"), ("nvme", "device"), ("device", "cpu"), ("device", "nvme"), ("cpu", "cpu"), ("nvme", "nvme")]


@pytest.mark.parametrize("state_format", ["split", "bf16", "8bit"])
@pytest.mark.parametrize(("parameters", "states"), PARTS)
def test_no_race_where_parameters_are_a_part_of_their_masters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, states: str, state_format: str
) -> None:
    """An update reads the old values, which lie elsewhere."""
    expected = in_memory(state_format=state_format)
    play(monkeypatch)
    losses, weights = train(tmp_path, parameters, states, state_format=state_format)
    assert losses == expected[0] and all(torch.equal(weights[name], expected[1][name]) for name in weights)


@pytest.mark.parametrize("mixed", MIXED)
def test_no_race_where_routes_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: str) -> None:
    expected = in_memory()
    play(monkeypatch)
    parameters, states, choice = MIXED[mixed]
    for side_stream in (False, True):
        with choosing(**choice):
            losses, weights = train(tmp_path, parameters, states, side_stream=side_stream)
        assert losses == expected[0] and all(torch.equal(weights[name], expected[1][name]) for name in weights)


@pytest.mark.parametrize(("parameters", "states"), [("cpu", "cpu"), ("nvme", "nvme")])
def test_no_race_where_backward_has_a_thread_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, states: str
) -> None:
    """As on a GPU, where autograd runs it and with it the hooks."""
    expected = in_memory()
    play(monkeypatch)
    played_cuda.backward_elsewhere(monkeypatch)
    losses, weights = train(tmp_path, parameters, states, side_stream=True)
    assert losses == expected[0] and all(torch.equal(weights[name], expected[1][name]) for name in weights)


def test_no_race_with_few_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient waits for its device buffer, on the device."""
    play(monkeypatch)
    gradient_buffers(monkeypatch, lambda _: 1)
    train(tmp_path, "cpu", "cpu")


def train_while_records_visit(nvme: Path, places: tuple[str, str], micro_batches: int) -> Any:
    """What saves is on a stream of its own, and makes it wait for nothing."""
    model: Stack = stack(blocks=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"parameters": places[0], "optimizer_states": places[1], "nvme": str(nvme), "dtype": "bf16", "max_grad_norm": 0.5}
    losses, another = list[torch.Tensor](), Stream("another")
    with Watch():
        engine = offload.initialize(model, optimizer, config | {"update": "step"})
    with engine, Watch():
        batches = iter(vector_batches(8 * micro_batches))
        for number in range(8):
            for count in range(micro_batches):
                x, y = next(batches)
                with contextlib.nullcontext() if count == micro_batches - 1 else engine.no_sync():
                    loss = torch.nn.functional.mse_loss(model(x).float(), y)
                    engine.backward(loss)
                losses.append(loss.detach())
            engine.step()
            engine.optimizer.zero_grad()
            if number in (3, 6):
                with played_cuda.stream(another):
                    engine.save_checkpoint(nvme / f"saved{number}", wait=number == 6)
        return [loss.item() for loss in losses], engine.state_dict(), engine.stats()["visiting_peak_nbytes"]


@pytest.mark.parametrize(
    ("parameters", "states", "micro_batches", "elsewhere"), in_turn(UPDATED_ON_HOST, [1, 2], [False, True, True])
)
def test_no_race_where_records_visit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, states: str, micro_batches: int, elsewhere: bool
) -> None:
    """`elsewhere`: backward runs in a thread of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_ACCELERATOR", "cpu")
        (tmp_path / "expected").mkdir()
        expected = train_while_records_visit(tmp_path / "expected", ("device", "device"), micro_batches)
    play(monkeypatch)
    if elsewhere:
        played_cuda.backward_elsewhere(monkeypatch)
    losses, weights, visiting_nbytes = train_while_records_visit(tmp_path, (parameters, states), micro_batches)
    assert visiting_nbytes > 0, "nothing visited"
    assert losses == expected[0] and all(torch.equal(weights[name], expected[1][name]) for name in weights)


class Unordered(PlayedAccelerator):
    """A unit's memory is filled beside earlier compute."""

    def unit_memory(self, nbytes: int) -> UnitMemory:
        return _Unordered(nbytes, self.device, self._fetch)


class _Unordered(cuda._StreamOrderedMemory):
    def _after_compute(self) -> None:
        pass


class Unjoined(PlayedAccelerator):
    def join(self, pending: Pending) -> None:
        pass


class CopyingAtOnce(PlayedAccelerator):
    def copy_in_after_compute(self) -> None:
        pass


class _Unawaited(cuda._EventPending):
    def wait(self) -> None:
        pass


class UnawaitedIn(PlayedAccelerator):
    """The host does not wait for copies to the device before it writes where they come from."""

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        super().copy_in(destination, source)
        return _Unawaited(self._fetch, source)


class UnawaitedOut(PlayedAccelerator):
    """Nor for those from it before it reads them."""

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
        super().copy_out(destination, source)
        return _Unawaited(self._drain, destination)


class NeverDone(PlayedAccelerator):
    def wait_for_all(self) -> None:
        pass


_TAKEN: dict[str, tuple[type[PlayedAccelerator], tuple[str, str]]] = {
    "fill": (Unordered, ("cpu", "cpu")),
    "join": (Unjoined, ("cpu", "cpu")),
    "copies into parameters": (CopyingAtOnce, ("device", "cpu")),
    "copies out of a store": (UnawaitedIn, ("cpu", "cpu")),
    "the host's wait": (UnawaitedOut, ("cpu", "cpu")),
    "the end of initialize": (NeverDone, ("device", "cpu")),
}


def race(nvme: Path, parameters: str, states: str, *, side_stream: bool = False) -> str:
    """What races in a training; "" if nothing does. Nothing of the engine outlives the call."""
    found = ""
    try:
        train(nvme, parameters, states, side_stream=side_stream)
    except (Race, offload.EngineFailedError) as error:
        found = str(error)
    gc.collect()
    return found


@pytest.mark.parametrize("taken", _TAKEN)
def test_an_order_taken_out_is_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str) -> None:
    kind, (parameters, states) = _TAKEN[taken]
    play(monkeypatch, kind=kind)
    assert "is not ordered after" in race(tmp_path, parameters, states, side_stream=kind is NeverDone)


def test_a_copy_out_that_does_not_wait_for_compute_is_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hasty(PlayedAccelerator):
        def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
            with played_cuda.stream(Stream("one that computes nothing")):
                return super().copy_out(destination, source)

    play(monkeypatch, kind=Hasty)
    assert "aten.copy_" in race(tmp_path, "device", "cpu")


def test_a_buffer_that_is_packed_while_it_leaves_is_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Pending] = []

    class Impatient(PlayedAccelerator):
        def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Pending:
            left.append(super().copy_out(destination, source))
            return left[-1]

        def join(self, pending: Pending) -> None:
            if pending not in left:
                super().join(pending)

    play(monkeypatch, kind=Impatient)
    gradient_buffers(monkeypatch, lambda _: 1)
    assert "ingest" in race(tmp_path, "cpu", "cpu")


def test_registered_memory_is_unregistered_when_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    detector = play(monkeypatch)
    accelerator = played_cuda.PlayedAccelerator()
    memory = HostMemory(10_000, "a test", register=accelerator.pin)
    address, kept = memory.tensor.data_ptr(), memory.tensor[:10]
    assert detector.registered == {address: 12_288}
    assert " dc " in _mapping_flags(address), "a fork would take pages along that the device has"
    memory.close()
    assert detector.registered, "a tensor still uses it"
    del kept
    assert not detector.registered


def _mapping_flags(address: int) -> str:
    """The VmFlags of the mapping that holds `address`, from /proc/self/smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        start, dash, rest = line.split(" ")[0].partition("-")
        if dash and not line.endswith("kB") and ":" not in start:
            inside = int(start, 16) <= address < int(rest, 16)
        elif inside and line.startswith("VmFlags:"):
            return line.removeprefix("VmFlags:") + " "
    raise AssertionError("no such mapping")


def test_memory_that_cannot_be_registered_is_said_once_and_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch)
    played_cuda.at_registration(monkeypatch, lambda address, nbytes: 2)
    with pytest.warns(RuntimeWarning, match="cudaHostRegister: error 2") as said:
        train(tmp_path, "cpu", "cpu")
    assert len(said) == 1


def test_records_that_cannot_be_registered_as_they_come_make_nothing_else_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They move once: what is fetched in every step goes on beside the program, and nothing is warned of."""
    play(monkeypatch)
    pin, beside, late = CudaAccelerator.pin, list[bool](), [False]
    played_cuda.at_registration(monkeypatch, lambda address, nbytes: 2 if late[0] else 0)

    def refused_late(device: CudaAccelerator, address: int, nbytes: int, *, is_written: bool = False) -> Any:
        late[0] = is_written
        found = pin(device, address, nbytes, is_written=is_written)
        beside.append(device.copies_beside)
        return found

    monkeypatch.setattr(CudaAccelerator, "pin", refused_late)
    with warnings.catch_warnings(), caplog.at_level("INFO", "offload.device.cuda"):
        warnings.simplefilter("error", RuntimeWarning)
        train(tmp_path, "cpu", "cpu")
    assert "copied unregistered (error 2" in caplog.text and all(beside)


@pytest.mark.parametrize("share", [1.0, 0.6], ids=["room for two units", "little room"])
def test_chunks_that_leave_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Parameters of many chunks: packed in one launch, copied in one, added chunk by chunk; the bits are the same."""
    small(monkeypatch, chunk_numel=4096)
    expected = in_memory(width=96)
    play(monkeypatch)
    gradient_buffers(monkeypatch, lambda count: int(count * share))
    received: list[int] = []
    before_each_copy(monkeypatch, CudaAccelerator, "copy_out", lambda destination, _: received.append(destination.numel()))
    losses, weights = train(tmp_path, "cpu", "cpu", width=96)
    assert losses == expected[0] and all(torch.equal(weights[name], expected[1][name]) for name in weights)
    assert max(received) > 4096 * (3 if share == 1.0 else 1)


@pytest.mark.parametrize(("parameters", "states"), [("device", "device"), ("device", "cpu"), ("nvme", "device")])
@pytest.mark.parametrize("state_format", ["fp32", "split"])
def test_initialize_makes_the_next_chunk_under_the_last_ones_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, states: str, state_format: str
) -> None:
    """All that it brings to the device comes from registered memory, and no two chunks' copies are waited for in turn."""
    detector = play(monkeypatch)
    small(monkeypatch, chunk_numel=4096)
    seen: list[int] = []
    wait = played_cuda.Event.synchronize

    before_each_copy(monkeypatch, CudaAccelerator, "copy_in", lambda destination, source: seen.append(source.nbytes))
    monkeypatch.setattr(played_cuda.Event, "query", lambda self: False)
    monkeypatch.setattr(played_cuda.Event, "synchronize", lambda self: (seen.append(0), wait(self))[1])
    model = stack(width=64, blocks=3)
    expected = {name: value.bfloat16() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"parameters": parameters, "optimizer_states": states, "nvme": str(tmp_path), "dtype": "bf16"}
    with Watch(), offload.initialize(model, optimizer, config | {"state_format": state_format}) as engine:
        assert seen[0] and seen[1], "waited for the first copy before the second was made"
        per_parameter = 2 * (parameters == "device") + (4 if state_format == "fp32" else 2) * (states == "device")
        assert sum(seen) >= per_parameter * sum(value.numel() for value in expected.values())
        assert not detector.unregistered
        assert all(torch.equal(value.bfloat16(), expected[name]) for name, value in engine.state_dict().items())


def test_a_unit_comes_in_one_copy_for_each_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chunks it is cut into: on a fast link the call of a copy takes as long as a chunk's bytes."""
    play(monkeypatch)
    small(monkeypatch, chunk_numel=4096)
    copied: list[int] = []
    before_each_copy(monkeypatch, CudaAccelerator, "copy_in", lambda destination, source: copied.append(destination.nbytes))
    model = stack(width=64, blocks=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offload.initialize(model, optimizer, {"parameters": "cpu", "optimizer_states": "cpu"}) as engine:
        model(torch.zeros(2, 64))
        sizes = {flat.nbytes for unit in layout_of(engine).units for flat in unit.flats}
        assert max(sizes) > 4 * 4096 * 2, "not cut at all"
    assert copied and set(copied) <= sizes
