# SPDX-License-Identifier: Apache-2.0
"""Parameters frozen, unfrozen, added to the optimizer in the middle of a run: as in PyTorch, to the bit in every placement."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offload
from offload.checkpoint.carry_over import passing_checkpoint
from offload.checkpoint.format.leftovers import PREFIX
from offload.ranks.group import Alone, NoMeeting
from tests.drives import drives_from
from tests.scratch_files import scratch_files
from tests.tiers.faulty_io import FaultyBackend
from tests.warm import WarmProcess

from .models import (
    ADAM_OPTIONS,
    IN_MEMORY,
    IN_PLACE_IN_BACKWARD,
    ON_CPU,
    ON_CPU_IN_PLACE,
    ON_NVME,
    ON_NVME_IN_PLACE,
    Setup,
    Tied,
    adamw,
    stack,
    vector_batches,
)
from .runs import Run, assert_close, assert_same_bits, one_step, refused, run_engine, run_plain, simple_loop

SETUPS = (
    ON_CPU,
    ON_CPU_IN_PLACE,
    ON_NVME,
    ON_NVME_IN_PLACE,
    IN_PLACE_IN_BACKWARD,
    Setup("device", "nvme"),
    Setup("device", "cpu", "deferred"),
)
anywhere = pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.name)
few = pytest.mark.parametrize("setup", (ON_CPU, ON_NVME_IN_PLACE), ids=lambda s: s.name)


def all_of(model: nn.Module) -> torch.optim.Optimizer:
    """Over frozen parameters too."""
    return torch.optim.AdamW(model.parameters(), **ADAM_OPTIONS)


def trained_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], **ADAM_OPTIONS)


def partly_frozen() -> Any:
    model = stack()
    model.inlet.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    return model


def toggling(run: Run) -> list[float]:
    """Staged unfreezing, freezing and back, with evaluations and accumulation between."""
    model, losses = run.model, []
    for step, (x, y) in enumerate(vector_batches(8)):
        if step == 2:
            model.blocks[1].requires_grad_(True)
        if step == 3:
            model.outlet.weight.requires_grad_(False)
        if step == 4:
            model.blocks[0].up.requires_grad_(True)
            model.inlet.bias.requires_grad_(True)
        if step == 6:
            model.outlet.weight.requires_grad_(True)
            model.blocks[1].requires_grad_(False)
        with torch.no_grad():
            losses.append(model(y).sum().item())
        with run.no_sync():
            (F.mse_loss(model(y), x) / 2).backward()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adding(run: Run) -> list[float]:
    """A group is added for what is unfrozen, and one for what was the user's own; then its learning rate falls."""
    model, losses = run.model, []
    for step, (x, y) in enumerate(vector_batches(6)):
        if step == 2:
            model.blocks[1].requires_grad_(True)
            run.optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 2e-2})
        if step == 4:
            run.optimizer.add_param_group({"params": [model.inlet.weight], "weight_decay": 0.0})
            model.inlet.weight.requires_grad_(True)
            run.optimizer.param_groups[1]["lr"] = 1e-3
        loss = F.mse_loss(model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def frozen_between(run: Run) -> list[float]:
    """What is frozen between a forward and its backward gets nothing of that; what came before stays."""
    model, losses = run.model, []
    chosen = [model.blocks[1].up.bias, model.blocks[2].up.weight]  # the second is shared
    for x, y in vector_batches(4):
        loss = F.mse_loss(model(x), y)
        with run.no_sync():
            F.mse_loss(model(y), x).backward()
        for one in chosen:
            one.requires_grad_(False)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        for one in chosen:
            one.requires_grad_(True)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("make", "loop"), [(all_of, toggling), (trained_of, adding)], ids=["toggled", "added"])
@anywhere
def test_in_the_middle_of_a_run(opened: Any, setup: Setup, make: Any, loop: Any) -> None:
    plain, model, in_memory = (partly_frozen() for _ in range(3))
    found = run_engine(opened(model, make(model), setup), loop)
    assert_close(found, run_plain(plain, make(plain), loop))
    assert_same_bits(found, run_engine(opened(in_memory, make(in_memory), IN_MEMORY), loop))


@anywhere
def test_between_a_forward_and_its_backward(opened: Any, setup: Setup) -> None:
    runs = []
    for where in (None, IN_MEMORY, setup):
        torch.manual_seed(1)
        model = Tied()
        runs.append(
            run_plain(model, all_of(model), frozen_between)
            if where is None
            else run_engine(opened(model, all_of(model), where), frozen_between)
        )
    assert_close(runs[1], runs[0])
    assert_same_bits(runs[2], runs[1])


@pytest.mark.parametrize("fields", [{"dtype": "bf16"}, {"dtype": "bf16", "state_format": "split"}], ids=["bf16", "split"])
@few
def test_masters_and_moments_stay(opened: Any, setup: Setup, fields: dict[str, Any]) -> None:
    """Of what is trained all along nothing shows that something else was unfrozen."""

    def loop(run: Run) -> list[float]:
        losses = []
        for step, (x, y) in enumerate(vector_batches(5)):
            if step == 2:
                run.model.inlet.requires_grad_(True)  # on no gradient's way to the outlet
            loss = F.mse_loss(run.model(x.bfloat16()).float(), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    found = []
    for where in (setup, IN_MEMORY):
        model = partly_frozen()
        found.append(run_engine(opened(model, all_of(model), where, **fields), loop))
    assert_same_bits(*found)


@pytest.mark.parametrize("kept", [False, True], ids=["frozen again", "as it is"])
@few
def test_a_checkpoint_after_it(opened: Any, tmp_path: Path, setup: Setup, kept: bool) -> None:
    """Loads in the same engine, and in one of a run that begins again with what was frozen at first."""
    model = partly_frozen()
    engine = opened(model, all_of(model), setup)
    run = Run(model, engine.optimizer, engine)
    one_step(run, 1)
    model.blocks[1].requires_grad_(True)
    one_step(run, 2)
    model.blocks[1].requires_grad_(kept)
    engine.save_checkpoint(tmp_path / "saved")
    one_step(run, 3)
    model.blocks[1].requires_grad_(True)
    one_step(run, 4)
    expected = run.weights()
    engine.load_checkpoint(tmp_path / "saved")
    model.blocks[1].requires_grad_(kept)
    one_step(run, 3)
    model.blocks[1].requires_grad_(True)
    one_step(run, 4)
    assert_same_bits(run.weights(), expected)

    again = partly_frozen()
    other = opened(again, all_of(again), setup)
    other.load_checkpoint(tmp_path / "saved")
    run = Run(again, other.optimizer, other)
    again.blocks[1].requires_grad_(kept)
    one_step(run, 3)
    again.blocks[1].requires_grad_(True)
    one_step(run, 4)
    assert_same_bits(run.weights(), expected)


@few
def test_what_comes_at_the_wrong_time_is_told(opened: Any, setup: Setup) -> None:
    """And changes nothing: with gradients at hand, through an old graph, in another model, beyond the budget."""
    model = partly_frozen()
    engine = opened(model, all_of(model), setup)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    x, y = vector_batches(1)[0]
    before = run.weights()
    F.mse_loss(model(x), y).backward()
    model.inlet.requires_grad_(True)
    with refused(offload.UsageError, "inlet", "between optimizer.step()"):
        model(x)
    model.inlet.requires_grad_(False)
    engine.zero_grad()
    old = F.mse_loss(model(x), y)
    model.inlet.requires_grad_(True)
    model(x)
    assert_same_bits(run.weights(), before)
    with refused(offload.UsageError, "forward again"):
        old.backward()
    one_step(run)
    model.blocks[0].requires_grad_(True)
    model.blocks[0].up.weight.grad = torch.ones(48, 16)
    with refused(offload.UsageError, "blocks.0.up.weight", "next forward"):
        engine.step()
    model.blocks[0].up.weight.grad = None
    one_step(run)
    assert not torch.equal(run.weights()["blocks.0.up.weight"], before["blocks.0.up.weight"])


@anywhere
@pytest.mark.parametrize("collected", [False, True])
def test_a_graph_from_before_says_what_came_between(opened: Any, setup: Setup, collected: bool) -> None:
    """Whether Python has collected what recorded it or not."""
    model = partly_frozen()
    engine = opened(model, trained_of(model), setup)
    (x, y), *_ = vector_batches(1)
    before = F.mse_loss(model(x), y)
    engine.optimizer.add_param_group({"params": list(model.blocks[1].requires_grad_(True).parameters())})
    one_step(Run(model, engine.optimizer, engine))
    if collected:
        gc.collect()
    with pytest.raises(offload.UsageError, match=r"unfrozen or added to the optimizer.*run the forward again"):
        before.backward()
    engine.zero_grad()
    one_step(Run(model, engine.optimizer, engine))
    engine.close()


def test_a_graph_of_an_engine_that_is_gone_says_so(tmp_path: Path) -> None:
    model = stack()
    engine = offload.initialize(model, adamw(model), ON_CPU.fields(tmp_path))
    (x, y), *_ = vector_batches(1)
    loss = F.mse_loss(model(x), y)
    engine.close()
    del engine
    gc.collect()
    with pytest.raises(offload.UsageError, match=r"engine (is gone|was closed)"):
        loss.backward()


@pytest.mark.filterwarnings("error:module forward hook")  # in which PyTorch silences what fails behind an error
def test_no_room_for_more(opened: Any) -> None:
    model = partly_frozen()
    engine = opened(model, all_of(model), ON_CPU_IN_PLACE)
    planned = sum(line["nbytes"] for line in engine.stats()["planned"] if line["tier"] == "cpu")
    engine.close()
    model = partly_frozen()
    engine = opened(model, all_of(model), Setup("cpu", "cpu"), cpu_memory=planned + 4096)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    before = run.weights()
    model.requires_grad_(True)
    with pytest.raises(offload.BudgetError):
        one_step(run)
    assert_same_bits(run.weights(), before)
    model.inlet.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    one_step(run)


class Crowded(FaultyBackend):
    """A drive to which no memory can be registered any more."""

    def register_memory(self, address: int, nbytes: int) -> Any:
        raise OSError(errno.ENOMEM, "no memory for the drive")


@pytest.mark.parametrize("made_again", [True, False], ids=["as it was", "not at all"])
@pytest.mark.parametrize("setup", (ON_NVME, ON_NVME_IN_PLACE), ids=lambda s: s.name)
def test_what_was_made_of_parts_that_fail_is_given_back(
    opened: Any, nvme: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup, made_again: bool
) -> None:
    """The room on the drive and the threads, also while somebody still holds the error."""
    drives_from(monkeypatch, FaultyBackend)
    model = partly_frozen()
    engine = opened(model, all_of(model), setup)
    run = Run(model, engine.optimizer, engine)
    one_step(run)
    before = run.weights()

    files, threads = len(scratch_files(nvme)), threading.active_count()
    drives = iter([Crowded(), FaultyBackend() if made_again else Crowded()])
    with monkeypatch.context() as patch:
        drives_from(patch, lambda: next(drives))
        model.requires_grad_(True)
        with pytest.raises(offload.BudgetError, match="no memory for the drive") as error:
            one_step(run)
    assert len(scratch_files(nvme)) == (files if made_again else 0) and threading.active_count() <= threads
    if made_again:
        assert_same_bits(run.weights(), before)
        one_step(run)
    assert files and error.value.__traceback__ is not None


@pytest.mark.parametrize("removed", [False, True])
def test_the_folder_given_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = partly_frozen()
    with offload.initialize(model, all_of(model), ON_NVME.fields(Path("scratch"))) as engine:
        run = Run(model, engine.optimizer, engine)
        one_step(run, 0)
        monkeypatch.chdir(tmp_path / "elsewhere")
        if removed:
            (tmp_path / "scratch").rmdir()
        model.inlet.requires_grad_(True)
        one_step(run, 1)
        assert not any(Path().iterdir()) and (tmp_path / "scratch").is_dir()


@pytest.mark.parametrize("setup", (ON_CPU, ON_NVME, ON_NVME_IN_PLACE), ids=lambda s: s.name)
def test_what_is_frozen_throughout_leaves_when_its_forward_ends(opened: Any, setup: Setup) -> None:
    """Backward never reaches it: it is not kept for the model's whole forward and backward."""

    def trunk_frozen() -> Any:
        model = stack(blocks=6)
        model.inlet.requires_grad_(False)
        model.blocks.requires_grad_(False)
        return model

    model = trunk_frozen()
    engine = opened(model, adamw(model), setup)
    run_engine(engine, simple_loop(3))
    (planned,) = (line["nbytes"] for line in engine.stats()["planned"] if line["purpose"] == "parameters in use")
    assert 0 < engine.stats()["resident_peak_nbytes"] <= planned


class Parcel:
    """What PyTorch does not look into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Carried(nn.Module):
    """Its blocks, of which the second is frozen, get a parcel and give one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Opening() for _ in range(4))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parcel = Parcel(x)
        for block in self.blocks:
            parcel = block(parcel)
        return parcel.x


class Opening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, parcel: Parcel) -> Parcel:
        return Parcel(parcel.x + self.down(torch.tanh(self.up(parcel.x))))


@anywhere
def test_a_frozen_block_whose_gradients_come_and_go_unseen(opened: Any, setup: Setup) -> None:
    """Its weights are there when backward goes through it."""
    runs = []
    for where in (IN_MEMORY, setup):
        torch.manual_seed(1)
        model = Carried()
        runs.append(run_engine(opened(model, adamw(model), where), simple_loop(4)))
    assert_same_bits(runs[1], runs[0])


_KILLED = """
import mmap, os, signal, sys
import torch, offload
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
model[0].requires_grad_(False)
engine = offload.initialize(model, torch.optim.AdamW(model.parameters()), offload.Config(nvme=sys.argv[1]))
mmap.mmap = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
model[0].requires_grad_(True)
model(torch.ones(1, 4))
"""


def test_what_a_kill_leaves_while_parts_are_made_anew_the_next_start_removes(nvme: Path) -> None:
    killed = WarmProcess.run(["-c", _KILLED, str(nvme)], 120)
    assert killed.returncode == -signal.SIGKILL
    left = list(nvme.iterdir())
    assert len(left) == 1 and (left[0] / "state" / "MANIFEST.json").is_file()
    config = offload.Config(nvme=nvme)
    with passing_checkpoint(config, Alone(), NoMeeting()) as living:
        model = nn.Linear(4, 4)
        offload.initialize(model, torch.optim.AdamW(model.parameters()), config).close()
        assert list(nvme.iterdir()) == [living.parent]
    assert not list(nvme.iterdir())


@few
@pytest.mark.parametrize(
    ("module", "name"),
    [(mmap, "mmap"), (os, "unlink")],
    ids=["memory is taken", "what passed is removed"],
)
def test_ctrl_c_waits_while_parts_are_made_anew(
    opened: Any, nvme: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup, module: Any, name: str
) -> None:
    """Then the forward that it came in is cut short, and nothing else."""
    real, weights = getattr(module, name), []
    monkeypatch.setattr(tempfile, "tempdir", str(nvme))

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # held from here on
            setattr(module, name, real)  # a second one would not be held
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **named)

    for interrupts in (False, True):
        engine = opened(model := partly_frozen(), all_of(model), setup)
        run = Run(model, engine.optimizer)
        one_step(run, seed=0)
        model.inlet.requires_grad_(True)
        if interrupts:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(module, name, interrupted)
                one_step(run, seed=1)
            assert not list(nvme.glob(f"{PREFIX}*"))
        one_step(run, seed=2)
        weights.append(engine.state_dict())
    assert_same_bits(weights[1], weights[0])


@few
@pytest.mark.parametrize("marked", [False, True], ids=["joined", "marked"])
def test_a_module_of_two_units_is_called_first(opened: Any, setup: Setup, marked: bool) -> None:
    """Its weight is another block's too, so that its call is a use of what both blocks share, besides its own unit."""

    def two_blocks() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
        model[1][0].weight = model[0][0].weight
        model[1][0].bias.requires_grad_(False)
        for block in model if marked else ():
            offload.unit(block[0])
        return model

    found = []
    for engine_setup in (IN_MEMORY, setup):
        model = two_blocks()
        engine = opened(model, all_of(model), engine_setup)
        for called in (model, model[0][0], model):
            x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_(True)
            called(x).square().sum().backward()
            engine.step()
            engine.zero_grad()
            model[1][0].bias.requires_grad_(True)
        found.append(engine.state_dict())
    assert_same_bits(*found)
