# SPDX-License-Identifier: Apache-2.0
"""The engine's sides of a program: in memory, which is followed through its own operations, and as drawn."""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import offload
from offload.config import with_internal_settings
from offload.device.deferred import DeferredAccelerator
from tests.inside import accelerator_of
from tests.small_sizes import small

from . import refusals
from .checkpoints import contents_of, position_of
from .drives import Drives
from .interruption import Interruption, leave_contexts
from .models import device, mark
from .playing import COUNTS, Boom, Facts, Outcome, Player
from .programs import Operation, Program, Setup

MEMORY = Setup()
_BUFFERS_NBYTES = 1 << 18
_LARGEST_STATE = 6
"""What lies on a device for good, in multiples of its parameters: those, gradients and their sums, masters and moments."""


def smallest(build_it: Any, field: str, fields: dict[str, Any]) -> int | None:
    """The smallest budget that can hold what must be there, as the refusal of one byte says it."""
    try:
        build_it(offload.Config(**{**fields, field: 1}))
    except offload.BudgetError as error:
        return error.smallest_nbytes
    return None


class EnginePlayer(Player):
    """Trains with an engine. `at_once`: the operations are this side's own to do; it has nothing to follow."""

    engine: offload.Engine

    def __init__(self, program: Program, folder: Path, ranks: tuple[int, ...], follow: list[Outcome] | None) -> None:
        super().__init__(program, folder, ranks, follow)
        self._patch = pytest.MonkeyPatch()
        self._beside: tuple[Any, int, int] | None = None
        self.drives = Drives(self._patch)
        self._interrupted = False
        self._more: dict[str, int] = {}
        """Budgets that an error asked for."""
        self._all_nbytes = self._crowd_nbytes = 0
        """Of all parameters, and buffers that come for each of them; what else is taken of the device's memory."""

    # ---- the engine ----------------------------------------------------------------------------------------------

    def start(self, setup: Setup, state: Mapping[str, torch.Tensor] | None = None) -> None:
        self._patch.undo()
        self._patch.setenv("OFFLOAD_ACCELERATOR", "cuda" if device().type == "cuda" else setup.accelerator)
        self._patch.setenv("OFFLOAD_SEED", str(setup.seed))
        small(self._patch, chunk_numel=4096, joined_numel=setup.joined)
        if setup.speculates:
            small(self._patch, quiet_steps=0)
        if setup.room is None or setup.on_device is not None:  # a budget may be more than such a device has
            self._patch.delenv("OFFLOAD_DEVICE_NBYTES", raising=False)
        else:
            on_device = _LARGEST_STATE if "device" in (setup.parameters, setup.states) else 0
            self._all_nbytes = _BUFFERS_NBYTES + 4 * sum(one.numel() for one in self.made(None)[0].parameters())
            self._patch.setenv("OFFLOAD_DEVICE_NBYTES", str(int((setup.room + on_device) * self._all_nbytes)))
        self.drives.connect(setup, self.ranks[0], self.program.ranks)
        config = self._expecting(offload.Config(**self._fields(setup)), setup)
        self.model, optimizer = self.made(state)
        mark(self.model, setup.marked)
        self._crowd_nbytes = 0
        self.engine = offload.initialize(self.model, optimizer, config)
        self.optimizer = self.engine.optimizer
        self._beside = None

    def _expecting(self, config: offload.Config, setup: Setup) -> offload.Config:
        return with_internal_settings(config.expecting(setup.expects), sums_are_narrow=self.program.model.narrow_sums)

    def _fields(self, setup: Setup) -> dict[str, Any]:
        spec = self.program.model
        fields: dict[str, Any] = {
            "parameters": setup.parameters,
            "optimizer_states": setup.states,
            "update": setup.update,
            "prefetch": setup.prefetch,
            "dtype": spec.dtype,
            "state_format": spec.state_format,
            "max_grad_norm": spec.max_grad_norm,
            "loss_scale": spec.loss_scale,
        }
        if "nvme" in (setup.parameters, setup.states):
            (self.folder / "nvme").mkdir(exist_ok=True)
            fields["nvme"] = str(self.folder / "nvme")

        def attempt(config: offload.Config) -> None:
            model, optimizer = self.made(None)
            mark(model, setup.marked)
            offload.initialize(model, optimizer, self._expecting(config, setup)).close()

        for field, factor in (("device_memory", setup.on_device), ("cpu_memory", setup.memory)):
            least = smallest(attempt, field, fields) if factor is not None else None
            if least is not None:
                fields[field] = int(least * factor)
        self._given = fields | self._more
        return self._given

    def end(self) -> None:
        self.graphs.clear()
        self._saved_beside(self.engine.close)

    def crowd(self, room: float | None) -> None:
        device = accelerator_of(self.engine)
        if isinstance(device, DeferredAccelerator) and (free := device.free_nbytes()) is not None:
            free += self._crowd_nbytes
            crowd_nbytes = max(free - int(room * self._all_nbytes), 0) if room is not None else 0
            device._memory.occupy(crowd_nbytes - self._crowd_nbytes)
            self._crowd_nbytes = crowd_nbytes

    # ---- verbs ---------------------------------------------------------------------------------------------------

    def backward(self, losses: list[torch.Tensor], how: str, **keywords: Any) -> None:
        if how == "engine" or self.program.model.dtype == "fp16":
            self.engine.backward(losses[0], **keywords)
        else:
            losses[0].backward(**keywords)

    def no_sync(self) -> Any:
        return self.engine.no_sync()

    def norm_of_step(self) -> float:
        norm = self.engine.grad_norm
        assert norm is not None
        return norm

    def clip(self, max_norm: float) -> float:
        return float(self.engine.clip_grad_norm_(max_norm))

    def gathered(self, parameters: list[nn.Parameter]) -> Any:
        return self.engine.gathered(parameters)

    def state(self) -> dict[str, torch.Tensor]:
        return self.engine.state_dict()

    def whole_state(self) -> dict[str, torch.Tensor]:
        stats = self.engine.stats()
        counts = torch.tensor([stats["steps"], stats["skipped_steps"], self.engine.loss_scale], dtype=torch.float64)
        return self.state() | {COUNTS: counts}

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.engine.load_state_dict(state)

    def exported(self) -> dict[str, torch.Tensor]:
        target = self.folder / f"export-{self.position}"
        self.engine.export(target, dtype="fp32")
        if self.program.ranks > 1:
            torch.distributed.barrier()
        found: dict[str, torch.Tensor] = {}
        for file in sorted(target.glob("*.safetensors")):
            found |= load_file(file)
        return found

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def path(self, number: int) -> Path:
        return self.folder / "checkpoints" / f"step-{number}"

    def save(self, number: int, beside: bool) -> None:
        def begin() -> Any:
            return self.engine.save_checkpoint(self.path(number), client_state={"position": self.position}, wait=not beside)

        save = self._saved_beside(begin)
        if beside:
            self._beside = (save, number, self.position)
        else:
            self.facts.saved[number] = [self.position]
            self.facts.sure.add(number)

    def _saved_beside(self, call: Any) -> Any:
        """What waits for a save beside training, which is there when the call returned."""
        result = call()
        if self._beside is not None:
            _, number, position = self._beside
            self._beside = None
            known = self.facts.saved[number]
            self.facts.saved[number] = known[known.index(position) :]
            self.facts.sure.add(number)
        return result

    def wait(self) -> None:
        if self._beside is not None:
            self._saved_beside(self._beside[0].wait)

    def load(self, number: int | None) -> int | None:
        if number is not None:
            state = self._saved_beside(lambda: self.engine.load_checkpoint(self.path(number)))
        else:
            state = self._saved_beside(self._newest)
        if state is None:
            assert not self.facts.sure or self.facts.damaged, "a checkpoint that was saved is not there"
            return None
        position: int = state["position"]
        numbers = [number] if number is not None else sorted(self.facts.saved, reverse=True)
        likely = next((self.facts.saved[one] for one in numbers if position in self.facts.saved[one]), None)
        assert likely is not None, f"loaded what was saved at {position}, expected one of {self.facts.saved}"
        return position

    def _newest(self) -> Any:
        """Where all are damaged, the user removes them, as the error says: there is none."""
        folder = self.folder / "checkpoints"
        try:
            return self.engine.resume_or_start(folder)
        except offload.CheckpointError as error:
            if not self.facts.damaged or self.program.ranks > 1 or "To start anew, name an empty folder" not in str(error):
                raise
            shutil.rmtree(folder)
            self.facts.saved.clear()
            self.facts.sure.clear()
            return None

    def load_at(self, position: int | None) -> int | None:
        raise AssertionError("what is drawn loads by number")

    # ---- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> Outcome:
        """What is left in the end: nothing but checkpoints, and what they hold."""
        damaged = [path.name for path in self._kept() if self._is_damaged(path)] if self.facts.damaged else []
        self._saved_beside(self.engine.close)
        self._patch.undo()
        first = 0 in self.ranks
        if self.program.ranks > 1:
            torch.distributed.barrier()
        left = [str(one) for one in (self.folder / "nvme").rglob("*")] if first and (self.folder / "nvme").exists() else []
        kept = {}
        for folder in self._kept() if first else []:
            if folder.name not in damaged:
                kept[folder.name] = (position_of(folder), contents_of(folder))
        return {"is": "ok", "value": {}, "left": left, "kept": kept}

    def _kept(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step-*"))

    def _is_damaged(self, folder: Path) -> bool:
        try:
            self.engine.load_checkpoint(folder)
        except offload.CheckpointError:
            return True
        return False


class DrawnPlayer(EnginePlayer):
    """As drawn: nothing is known of what comes, and everything that comes is judged by the table of refusals."""

    def __init__(self, program: Program, folder: Path, ranks: tuple[int, ...]) -> None:
        super().__init__(program, folder, ranks, None)
        self._began_before = 0
        """`began_count` before the operation."""

    def begin(self) -> Outcome:
        return self._faultless(lambda: self._began(0))

    def resumed(self, setup: int) -> Any:
        """Where the checkpoint has states of what is not trained here yet, its budgets may be too small: the user gives what
        the error says, and starts again."""
        try:
            while True:
                try:
                    return super().resumed(setup)
                except offload.BudgetError as error:
                    (field,) = re.findall(r"The smallest (\w+) that can is", str(error))
                    needed, given = error.smallest_nbytes, self._given[field]
                    assert needed is not None and needed > given, f"{given} bytes are enough, and yet: {error}"
                    self.end()
                    self._more[field] = needed
        finally:
            self._more = {}

    def _faultless(self, start: Any) -> Outcome:
        """Start; where the failing drive fails at once, without the fault again."""
        try:
            start()
        except offload.StorageError as error:
            if self.program.ranks > 1 or not self._is_of_the_drive(error):
                raise
            start()
        return {"is": "ok", "value": {}}

    def _is_of_the_drive(self, error: BaseException) -> bool:
        """Whether this tells of the drive's fault: once, but of a damaged checkpoint each time."""
        self.facts.damaged = self.facts.damaged or self.drives.damages_silently
        if self.facts.damaged and isinstance(error, offload.CheckpointError):
            return True
        if not self.drives.has_struck or self.drives.is_excused or not isinstance(error, offload.StorageError):
            return False
        self.drives.is_excused = True
        return True

    def take(self, operation: Operation) -> Outcome:
        if self.means_nothing(operation):
            return {"is": "nothing"}
        now = refusals.Circumstances(self.program, self.facts, self.graphs, operation, self.trained_now(), self.wanted_now())
        why = refusals.excluded(now)
        if why is not None:
            return {"is": "nothing", "why": why}
        moment = operation.moment(self.ranks[0], self.program.ranks)
        interruption, before = Interruption(moment), copy.deepcopy(self.facts)
        self._began_before = self.began_count
        try:
            with interruption:
                if operation.name == "resume":
                    self.end()
                    return {"is": "moved"}
                value = self.perform(operation)
            self.facts.damaged = self.facts.damaged or self.drives.damages_silently
            return {"is": "ok", "value": value}
        except BaseException as error:
            sys.setprofile(None)
            try:
                return self._after(operation, error, now, before, interruption.struck)
            except BaseException as second:
                died = self.died_of(second)
                if died is not None:
                    return died
                second.__context__ = error
                return {"is": "wrong", "says": "".join(traceback.format_exception(second))}

    def _after(self, operation: Operation, error: BaseException, now: Any, before: Facts, interrupted: bool) -> Outcome:
        self._interrupted = self._interrupted or interrupted
        if interrupted:
            leave_contexts()
        if (interrupted and isinstance(error, KeyboardInterrupt)) or self._is_of_the_drive(error) or self._was_swallowed(error):
            return self._settle(operation) if self.program.ranks == 1 else {"is": "died", "struck": True}
        died = self.died_of(error)
        if died is not None:
            return died
        own = bool(operation.values.get("fails")) or operation.values.get("fails_at", -1) >= 0
        if own and not interrupted and isinstance(error, (Boom, KeyboardInterrupt)):
            self.after_users_error(operation)
            return {"is": "raised", "class": type(error).__name__}
        refusal = now.legitimate(error)
        if refusal is not None:
            self.facts = before
            zeroed = refusal.drops_gradients or self.dropped  # a closure drops them before its forward
            if zeroed:
                self.drop_all_gradients()
            refused = {"is": "refused", "class": type(error).__name__, "why": refusal.why}
            return refused | {"zeroed": zeroed, "forwards": list(self.forwards)}
        return {"is": "wrong", "says": "".join(traceback.format_exception(error))}

    def died_of(self, error: BaseException) -> Outcome | None:
        """On several ranks what ends one rank's process, or another's end, ends the script."""
        if self.program.ranks == 1:
            return None
        if self._is_of_the_drive(error):
            return {"is": "died", "struck": True}
        told = type(error) is offload.CheckpointError and "rank 0 could not begin the checkpoint: StorageError" in str(error)
        if told or any(isinstance(one, offload.RankError) for one in (error, error.__cause__)):
            # What struck a save beside is told by a later call, and the other rank may have ended before this one made that.
            struck = self.drives.has_struck
            return {"is": "died", "struck": struck, "says": "".join(traceback.format_exception(error))}
        return None

    def _was_swallowed(self, error: BaseException) -> bool:
        """Python swallows an interrupt that comes in a finalizer; the engine says so."""
        failed = type(error) is offload.EngineFailedError and isinstance(error.__cause__, KeyboardInterrupt)
        return self._interrupted and failed

    def _settle(self, operation: Operation) -> Outcome:
        if self.engine.closed:  # which told the failure of a save that was still running
            return self._recover()
        self.graphs.clear()
        self._beside = None  # its failure was told; what it saved is seen where it is loaded
        try:
            self.do_zero_grad()
            state = self.whole_state()
        except offload.EngineFailedError:
            return self._recover()
        except offload.StorageError as error:
            if self._is_of_the_drive(error):
                return self._settle(operation)
            if not self.drives.has_struck or not isinstance(error, offload.CorruptDataError):
                raise
            return self._recover()  # what lies damaged on the drive is so at every look
        self.facts.version += 1
        torch.manual_seed(1000 + self.position)
        candidates = self.facts.saved[self._saved(operation.values["number"])] if operation.name == "load" else []
        return {"is": "settled", "state": state, "candidates": list(candidates)} | self._standing()

    def _recover(self) -> Outcome:
        """The engine says that it cannot go on: from its last checkpoint, or from the start."""
        self._beside = None
        failed = {"is": "failed"} | self._standing()
        if not self.engine.closed and any(path.name.startswith("step-") for path in (self.folder / "checkpoints").glob("*")):
            with contextlib.suppress(offload.CheckpointError):
                position = self._loaded(self.load(None))["position"]
                if position is not None:
                    return failed | {"loaded": position}
        with contextlib.suppress(offload.OffloadError):
            self.engine.close()
        self._began(self.program.setups.index(self.facts.setup))
        return failed | {"loaded": None}

    def _standing(self) -> Outcome:
        return {"began": self.began_count > self._began_before, "setup": self.program.setups.index(self.facts.setup)}


class MemoryPlayer(EnginePlayer):
    """The reference: everything in memory, every update at its step. It follows what came of the program as drawn."""

    def start(self, setup: Setup, state: Mapping[str, torch.Tensor] | None = None) -> None:
        super().start(replace(MEMORY, marked=setup.marked), state)

    def save(self, number: int, beside: bool) -> None:
        """Of every save one folder: which of them the drawn side will load is not known here."""
        self.engine.save_checkpoint(self.path(self.position), client_state={"position": self.position})

    def wait(self) -> None:
        pass

    def load(self, number: int | None) -> int | None:
        assert self.follow is not None
        return self.load_at(self.follow[self.position]["value"]["position"])

    def load_at(self, position: int | None) -> int | None:
        if position is not None:
            self.engine.load_checkpoint(self.path(position))
        return position
