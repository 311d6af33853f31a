# SPDX-License-Identifier: Apache-2.0
"""Where within a step the host waits for the device: exactly where docs/gpu.md says. `torch.cuda` is played on the CPU."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import offload
from offload.device.arithmetic.optimizer_step import update
from offload.device.arithmetic.records import RecordFormat
from offload.device.arithmetic.rules import Hyper, Rule
from offload.device.arithmetic.segment import Segment, StateFormat
from offload.device.cpu import CpuAccelerator
from offload.device.deferred import DeferredAccelerator
from tests.acceptance.models import stack, vector_batches
from tests.device import played_cuda
from tests.device.played_cuda import Watch, play
from tests.devices import records_stay_home


@pytest.mark.parametrize("visits", [False, True])
@pytest.mark.parametrize(
    ("parameters", "states"),
    [("cpu", "cpu"), ("device", "cpu"), ("device", "device"), pytest.param("cpu", "device", marks=pytest.mark.slow)],
)
def test_the_thread_of_the_loop_waits_at_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, states: str, visits: bool
) -> None:
    """`visits`: and once for records that come to the device, if they may."""
    play(monkeypatch)
    if not visits:
        records_stay_home(monkeypatch)
    phase = ["start"]
    waits: Counter[str] = Counter()
    here = threading.get_ident()

    def counted(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def count(self: object) -> None:
            if threading.get_ident() == here:
                waits[phase[0]] += 1
            original(self)

        monkeypatch.setattr(kind, name, count)

    counted(played_cuda.Event, "synchronize")
    counted(played_cuda.Stream, "synchronize")  # what .item() and copies that block do
    model = stack(width=16, blocks=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"parameters": parameters, "optimizer_states": states, "dtype": "bf16", "max_grad_norm": 0.5}
    with offload.initialize(model, optimizer, config) as engine, Watch():
        for number, (x, y) in enumerate(vector_batches(5)):
            if visits and number == 3:
                assert ("forward" in waits) == (states == "cpu"), "what visits has come by now"
                waits.clear()
            phase[0] = "forward"
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
            phase[0] = "backward"
            engine.backward(loss)
            phase[0] = "step"
            engine.step()
            phase[0] = "zero_grad"
            engine.zero_grad()
        phase[0] = "end"
    del waits["start"], waits["end"]
    # Parameters that the device updates for a home on the host: the forward waits until they are there.
    expected = {"step", "forward"} if (parameters, states) == ("cpu", "device") else {"step"}
    assert set(waits) == expected, dict(waits)


def test_a_second_micro_batch_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Additions to what the host has are made by a lane."""
    play(monkeypatch)
    phase, here, waits = ["start"], threading.get_ident(), Counter[str]()
    original = played_cuda.Event.synchronize

    def count(self: played_cuda.Event) -> None:
        waits[phase[0]] += threading.get_ident() == here
        original(self)

    monkeypatch.setattr(played_cuda.Event, "synchronize", count)
    model = stack(width=16, blocks=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with offload.initialize(model, optimizer, {"parameters": "cpu", "optimizer_states": "cpu", "dtype": "bf16"}) as engine:
        for index, (x, y) in enumerate(vector_batches(3)):
            phase[0] = f"backward {index}"
            engine.backward(torch.nn.functional.mse_loss(model(x).float(), y))
        phase[0] = "step"
        engine.step()
    assert waits["step"] and not any(count for where, count in waits.items() if where.startswith("backward"))


@pytest.mark.parametrize("kind", [CpuAccelerator, DeferredAccelerator])
def test_what_waits_for_ranks_runs_on_a_thread_of_its_own(kind: Any) -> None:
    """A save's commit waits for the other ranks: on the thread that waits for its copies those would wait for it."""
    accelerator = kind()
    lane = accelerator.host_lane("checkpoint", waits_for_io=True, waits_for_ranks=True)
    threads: list[int] = []
    try:
        lane.submit(lambda: threads.append(threading.get_ident())).wait()
    finally:
        lane.close()
        accelerator.close()
    assert lane.runs_beside
    assert threads and threads[0] != threading.get_ident()


class _FromHost(TorchFunctionMode):
    """Notes every tensor that is made of numbers of the host's: to a GPU those go by a copy that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], torch.Tensor):
            self.made.append(f"{function.__name__}{args}")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", [Rule.ADAM, Rule.LION, Rule.ADAGRAD, Rule.SGD])
@pytest.mark.parametrize("state_format", list(StateFormat))
def test_an_update_of_torch_operations_brings_nothing_from_the_host(state_format: StateFormat, rule: Rule) -> None:
    """As it runs on a device, where only Adam with fp32 states has a kernel."""
    numel, meta = 1 << 10, torch.device("meta")
    hyper = Hyper(rule, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
    arrays = {
        name: torch.empty(count, dtype=dtype, device=meta)
        for name, dtype, count in RecordFormat(state_format, hyper.moments).arrays(numel)
    }
    grad, values = (torch.empty(numel, dtype=torch.bfloat16, device=meta) for _ in range(2))
    with _FromHost() as found:
        update([Segment(grad, arrays, values, hyper, step=2, state_format=state_format)])
    assert not found.made
