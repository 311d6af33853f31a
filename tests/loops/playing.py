# SPDX-License-Identifier: Apache-2.0
"""A program's operations as a user's script writes them, for plain PyTorch and for an engine alike.

A `Player` has one side's model and optimizer. What the sides do differently (gathered, clipping, saves) are the methods
that the subclasses fill in; everything above them is written once, so all sides are fed the same in the same order.

What came of an operation is an outcome: {"is": "ok", "value": ...}, or
    nothing    it meant nothing here, or is left out for a reason that `tests.loops.refusals` gives
    refused    an error of `offload.errors` came; everything is as before ("zeroed": but for gradients, which were dropped)
    raised     the user's own error came through
    gone       of several ranks one was interrupted or failed, now or before: its process ended, and so did the others'
    back       the next ones went on from the last checkpoint ("position"; None: anew)
    settled    it was interrupted, or a drive failed: all but gradients is as before or as after it ("state" says which)
    failed     the engine could not go on; the script loaded its last checkpoint ("loaded"), or began anew (None)
               (both: "began" says whether the operation had begun anew by then, "setup" which is the one since)
    moved      the script goes on in another process
    wrong      anything else
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import offload

from .models import Boom, Subject, build, data, loss_of, optimizer_of
from .programs import Operation, Program, Setup

Outcome = dict[str, Any]
MOST_GRAPHS = 3


COUNTS = "(steps, steps left out, loss scale)"
"""In a state: what tells a step that changed no weight from none."""


@dataclass
class Graph:
    """A loss that nobody has called backward of, or that was retained. `losses`: one for each rank that this side plays."""

    losses: list[torch.Tensor]
    version: int
    trained_count: int
    """How many parameters had been trained until then."""
    trained: set[str]
    """What was."""
    added: bool
    """Whether a group had been added."""
    wanted: set[str]
    """What required gradients."""


@dataclass
class Facts:
    """What the script knows of where it stands."""

    setup: Setup
    version: int = 0
    """Counts what may have changed weights."""
    live: bool = False
    """Gradients wait for a step."""
    taken: bool = False
    """A step used the gradients, and nobody has dropped them since."""
    synced: bool = False
    """A backward outside of no_sync has run since the last step."""
    saved: dict[int, list[int]] = field(default_factory=dict)
    """By number of a checkpoint: the positions in the program at which the save that it holds may have been made."""
    sure: set[int] = field(default_factory=set)
    """The numbers of checkpoints that are there for sure."""
    ended: bool = False
    """Whether the processes before this one ended without saying so: the script goes on where they were."""
    damaged: bool = False
    """Whether a checkpoint may be there that holds other bytes than were written to it."""
    added: bool = False
    """Whether a group was added, of all parameters that were in none."""
    saved_added: dict[int, bool] = field(default_factory=dict)
    """The same, by position of a save."""
    trained: set[str] = field(default_factory=set)
    """What was trained at the last forward that was recorded."""


class Player(ABC):
    """Plays one side. `follow`: what came of the program on the side that this one is compared with."""

    model: Subject
    optimizer: Any

    def __init__(self, program: Program, folder: Path, ranks: tuple[int, ...], follow: list[Outcome] | None) -> None:
        self.program, self.folder, self.ranks, self.follow = program, folder, ranks, follow
        self.graphs: list[Graph] = []
        self.forwards: list[tuple[int, int]] = []
        """That the operation ran: (block, or -1 for all of the model; batch)."""
        self.dropped = False
        """Whether the operation dropped the gradients."""
        self.facts = Facts(program.setups[0])
        self.position = 0
        self.began_count = 0
        """How often a model was made, and what trains it."""

    # ---- what the sides do differently ---------------------------------------------------------------------------

    @abstractmethod
    def start(self, setup: Setup, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """A new model (with these values), its optimizer, and what trains them; what was there before is over."""

    def made(self, state: Mapping[str, torch.Tensor] | None) -> tuple[Subject, torch.optim.Optimizer]:
        """A model and its optimizer as the script makes them."""
        model = self.built()
        if state is not None:
            model.load_state_dict(dict(state))
        optimizer = optimizer_of(self.program.model, model)
        if self.facts.added:
            held = {id(one) for group in optimizer.param_groups for one in group["params"]}
            others = [one.requires_grad_() for one in model.parameters() if id(one) not in held]
            optimizer.add_param_group({"params": others, "lr": 2e-3})
        return model, optimizer

    def built(self) -> Subject:
        """A model with its first values."""
        return build(self.program.model)

    @abstractmethod
    def end(self) -> None:
        """The engine is closed."""

    @abstractmethod
    def backward(self, losses: list[torch.Tensor], how: str, **keywords: Any) -> None: ...

    @abstractmethod
    def no_sync(self) -> Any: ...

    @abstractmethod
    def norm_of_step(self) -> float: ...

    @abstractmethod
    def clip(self, max_norm: float) -> float: ...

    def crowd(self, room: float | None) -> None:  # noqa: B027 - plain PyTorch has no device of a stated size
        """Something else takes the device's memory, but for `room` times what all parameters take; None: it goes."""

    @abstractmethod
    def gathered(self, parameters: list[nn.Parameter]) -> Any: ...

    @abstractmethod
    def state(self) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def set_state(self, state: Mapping[str, torch.Tensor]) -> None: ...

    @abstractmethod
    def save(self, number: int, beside: bool) -> None: ...

    @abstractmethod
    def wait(self) -> None:
        """For a save beside training."""

    @abstractmethod
    def load(self, number: int | None) -> int | None:
        """The checkpoint of that number, or the newest; at which position it was saved. None: there is none."""

    @abstractmethod
    def exported(self) -> dict[str, torch.Tensor]: ...

    # ---- operations ----------------------------------------------------------------------------------------------

    def perform(self, operation: Operation) -> Any:
        """Do it; its value is what an oracle compares."""
        self.forwards.clear()
        self.dropped = False
        return getattr(self, f"do_{operation.name}")(**operation.values)

    def _losses(self, batch: int) -> list[torch.Tensor]:
        losses = [loss_of(self.model, self.program.model.width, batch, rank) for rank in self.ranks]
        self._has_run(-1, batch)
        return losses

    def _has_run(self, block: int, batch: int) -> None:
        self.forwards.append((block, batch))
        if torch.is_grad_enabled():
            self.facts.trained |= self.trained_now()

    def wanted_now(self) -> set[str]:
        """What requires gradients, in a group of the optimizer or not."""
        return {name for name, one in self.model.named_parameters() if one.requires_grad}

    def trained_now(self) -> set[str]:
        """The names of what the optimizer has and autograd computes gradients of."""
        held = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        return {name for name, one in self.model.named_parameters() if one.requires_grad and id(one) in held}

    def do_forward(self, batch: int, fails_at: int = -1, error: str = "Boom") -> Any:
        with self._fuse("forward_at", fails_at, error):
            losses = self._losses(batch)
        self.graphs = [
            *self.graphs,
            Graph(losses, self.facts.version, len(self.facts.trained), self.trained_now(), self.facts.added, self.wanted_now()),
        ][-MOST_GRAPHS:]
        return {"losses": [one.item() for one in losses]}

    @contextlib.contextmanager
    def _fuse(self, where: str, number: int, error: str) -> Iterator[None]:
        fuse = self.model.fuse
        setattr(fuse, where, number)
        fuse.error = KeyboardInterrupt if error == "KeyboardInterrupt" else Boom
        try:
            yield
        finally:
            setattr(fuse, where, -1)

    def do_backward(
        self,
        which: int = -1,
        retain: bool = False,
        sync: bool = True,
        how: str = "loss",
        fails_at: int = -1,
        error: str = "Boom",
    ) -> Any:
        """`which`: the oldest graph (0) or the newest (-1)."""
        graph = self._chosen(which, retain)
        with self._fuse("backward_at", fails_at, error), contextlib.nullcontext() if sync else self.no_sync():
            self._marks_backward(sync)
            self._backward(graph.losses, how, retain_graph=retain)
        return {}

    def _backward(self, losses: list[torch.Tensor], how: str, **keywords: Any) -> None:
        # What goes through PyTorch's reentrant checkpoint has no gradient where nothing before it has one, whatever is trained
        # inside: there is no backward then.
        if self.model.checkpointing != "reentrant" or any(one.requires_grad for one in losses):
            self.backward(losses, how, **keywords)

    def _chosen(self, which: int, retain: bool) -> Graph:
        if not self.graphs:
            self.do_forward(0)
        return self.graphs[which] if retain else self.graphs.pop(which)

    def _marks_backward(self, sync: bool) -> None:
        self.facts.live, self.facts.synced = True, self.facts.synced or sync

    def do_partial_backward(self, block: int, batch: int) -> Any:
        """A part of the model is called and trained by itself."""
        losses = self._losses_of_block(block % len(self.model.blocks), batch)
        self._marks_backward(True)
        if any(one.requires_grad for one in losses):
            self.backward(losses, "engine")
        return {"losses": [one.item() for one in losses]}

    def _losses_of_block(self, block: int, batch: int) -> list[torch.Tensor]:
        losses = []
        for rank in self.ranks:
            x, y = data(self.program.model.width, batch, rank)
            part = self.model.blocks[block]
            losses.append(F.mse_loss(part(x.to(part.mix.weight.dtype), batch).float(), y))
        self._has_run(block, batch)
        return losses

    def do_backward_of_some(self, batch: int, part: int) -> Any:
        """Gradients of some parameters alone are asked for."""
        losses = self._losses(batch)
        some = [one for one in self.model.blocks[part % len(self.model.blocks)].parameters() if one.requires_grad]
        self._marks_backward(True)
        if some:
            self.backward(losses, "engine", inputs=some)
        return {"losses": [one.item() for one in losses]}

    def do_penalty(self, batch: int) -> Any:
        """A gradient penalty: backward through a gradient."""
        penalised = []
        for rank in self.ranks:
            x, y = data(self.program.model.width, batch, rank)
            x.requires_grad_()
            loss = F.mse_loss(self.model(x, batch).float(), y)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            penalised.append(loss + slope.square().sum())
        self._has_run(-1, batch)
        self._marks_backward(True)
        self.backward(penalised, "loss")
        return {"losses": [one.item() for one in penalised]}

    def do_slope(self, batch: int) -> Any:
        """The gradient of the input alone."""
        found = []
        for rank in self.ranks:
            x, y = data(self.program.model.width, batch, rank)
            x.requires_grad_()
            (slope,) = torch.autograd.grad(F.mse_loss(self.model(x, batch).float(), y), x)
            found.append(slope.double().sum().item())
        self._has_run(-1, batch)
        return {"losses": found}

    def do_step(self) -> Any:
        self.optimizer.step()
        return self._stepped()

    def _stepped(self) -> Any:
        self.facts.version += 1
        self.facts.taken = self.facts.taken or self.facts.live
        self.facts.live = self.facts.synced = False
        return {"norm": self.norm_of_step()}

    def do_closure(self, batch: int, fails: bool = False) -> Any:
        """A step that computes its own loss; `fails`: an error comes in the middle of it."""

        def closure() -> Any:
            self.do_zero_grad()
            losses = self._losses(batch)
            if fails:
                raise Boom("in step")
            self._marks_backward(True)
            self._backward(losses, "engine")
            return losses[0].item()

        self.optimizer.step(closure)
        return self._stepped()

    def do_zero_grad(self, to_none: bool = True) -> Any:
        self.optimizer.zero_grad(set_to_none=to_none)
        if to_none:
            self.dropped = True
            self.facts.taken = self.facts.live = self.facts.synced = False
        else:
            self.facts.live = self.facts.live or self.facts.taken
            self.facts.taken = False
        return {}

    def drop_all_gradients(self) -> None:
        """Those of what is in no group too, which a backward that was refused afterwards may have left on one side alone."""
        self.do_zero_grad()
        held = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        for parameter in self.model.parameters():
            if id(parameter) not in held:
                parameter.grad = None

    def do_train(self, batch: int, micro: int = 1) -> Any:
        """One step of an ordinary loop."""
        seen = []
        for index in range(micro):
            last = index + 1 == micro
            losses = self._losses(batch + index)
            with contextlib.nullcontext() if last else self.no_sync():
                self._marks_backward(last)
                self._backward([loss / micro for loss in losses], "engine")
            seen += [one.item() for one in losses]
        self.optimizer.step()
        norm = self._stepped()
        self.do_zero_grad()
        return {"losses": seen} | norm

    def do_clip(self, max_norm: float) -> Any:
        return {"norm": self.clip(max_norm)}

    def do_evaluate(self, batch: int, inference: bool = False) -> Any:
        self.model.eval()
        try:
            with torch.inference_mode() if inference else torch.no_grad():
                return {"losses": [one.item() for one in self._losses(batch)]}
        finally:
            self.model.train()

    def do_generate(self, batch: int, count: int) -> Any:
        """Each output is the next input."""
        found = []
        self.model.eval()
        try:
            with torch.no_grad():
                for rank in self.ranks:
                    x, _ = data(self.program.model.width, batch, rank)
                    for index in range(count):
                        x = torch.tanh(self.model(x, batch + index).float())
                    found.append(x.double().sum().item())
        finally:
            self.model.train()
        return {"losses": found}

    def do_freeze(self, block: int, frozen: bool) -> Any:
        self.model.blocks[block % len(self.model.blocks)].requires_grad_(not frozen)
        return {}

    def do_freeze_one(self, parameter: int, frozen: bool) -> Any:
        self._parameter(parameter).requires_grad_(not frozen)
        return {}

    def do_add_group(self) -> Any:
        """What is in no group is trained from now on."""
        held = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        others = [one for one in self.model.parameters() if id(one) not in held]
        if others:
            self.optimizer.add_param_group({"params": [one.requires_grad_() for one in others], "lr": 2e-3})
            self.facts.added = True
            # What backward left on them no step has taken: it is the next one's.
            self.facts.live = self.facts.live or any(one.grad is not None for one in others)
        return {}

    def do_rate(self, group: int, rate: float) -> Any:
        groups = self.optimizer.param_groups
        groups[group % len(groups)]["lr"] = rate
        return {}

    def do_save(self, number: int, beside: bool = False) -> Any:
        self.facts.saved_added[self.position] = self.facts.added  # first: an interrupt may come between the two
        self.facts.saved.setdefault(number, []).append(self.position)
        self.save(number, beside)
        return {}

    def do_wait(self) -> Any:
        self.wait()
        return {}

    def do_load(self, number: int) -> Any:
        return self._loaded(self.load(self._saved(number)))

    def _saved(self, number: int) -> int:
        """One of the numbers under which there is a checkpoint."""
        numbers = sorted(self.facts.saved)
        return numbers[number % len(numbers)]

    def _loaded(self, position: int | None) -> Any:
        self.facts.version += 1
        self.facts.live = self.facts.taken = self.facts.synced = False
        return {"position": position}

    def do_anew(self, how: str, setup: int) -> Any:
        """Close and start again: "scratch", or with the weights ("state") or the last checkpoint of this run."""
        state = self.state() if how == "state" else None
        self.end()
        if how == "checkpoint":
            return self.resumed(setup)
        self._began(setup, state)
        return {}

    def _began(self, setup: int, state: Mapping[str, torch.Tensor] | None = None) -> None:
        self.graphs.clear()
        self.facts.setup, self.facts.ended = self.program.setups[setup % len(self.program.setups)], False
        self.facts.live = self.facts.taken = self.facts.synced = False
        self.start(self.facts.setup, state)
        self.began_count += 1
        self.facts.trained = self.trained_now()
        torch.manual_seed(7)

    def do_resume(self, setup: int) -> Any:
        """In a new process, as `resume_or_start` does."""
        self.end()
        return self.resumed(setup)

    def come_back(self) -> Any:
        """Where every rank ended: in new processes, as `do_resume`, with the groups of the run that saved."""
        facts, setup = self.facts, self.program.setups.index(self.facts.setup)
        positions = [one for number in sorted(facts.saved, reverse=True) for one in reversed(facts.saved[number])]
        *first, last = dict.fromkeys([facts.saved_added[one] for one in positions] or [facts.added])
        for facts.added in first:
            try:
                return self.resumed(setup) | {"added": facts.added}
            except offload.CheckpointError as error:
                if "does not fit this run" not in str(error):
                    raise
                self.end()
        facts.added = last
        return self.resumed(setup) | {"added": last}

    def resumed(self, setup: int) -> Any:
        self._began(setup)
        return self._loaded(self.load(None))

    def do_export(self) -> Any:
        return {"state": self.exported()}

    def do_state_dict(self) -> Any:
        return {"state": self.state()}

    def do_load_state_dict(self, seed: int) -> Any:
        draw = torch.Generator().manual_seed(seed)
        state = {
            name: value if not value.is_floating_point() else _scale(value) * torch.randn(value.shape, generator=draw).abs()
            for name, value in sorted(self.state().items())
        }
        for names in self._tied():
            for name in names[1:]:
                state[name] = state[names[0]]
        self.set_state(state)
        self.facts.version += 1
        return {}

    def _tied(self) -> list[list[str]]:
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return list(names.values())

    def _parameter(self, index: int) -> nn.Parameter:
        parameters = list(self.model.parameters())
        return parameters[index % len(parameters)]

    def do_read(self, parameter: int) -> Any:
        chosen = self._parameter(parameter)
        with self.gathered([chosen]):
            return {"state": {"value": chosen.detach().clone()}}

    def do_crowd(self, room: float | None) -> Any:
        self.crowd(room)
        return {}

    def do_write(self, parameter: int, fails: bool = False) -> Any:
        """`fails`: an error comes inside `gathered`, behind the write."""
        chosen = self._parameter(parameter)
        self.facts.version += 1
        with self.gathered([chosen]):
            with torch.no_grad():
                chosen.mul_(0.75).add_(0.0625)
            if fails:
                raise Boom("inside gathered")
        return {}

    # ---- what operations mean nothing where they stand -----------------------------------------------------------

    def means_nothing(self, operation: Operation) -> bool:
        if operation.name == "nothing":
            return True
        if operation.name == "backward" and self.model.checkpointing and self.graphs:
            # PyTorch's own checkpoints compute again what is trained now, and find that it is something else.
            return self.graphs[operation.values.get("which", -1)].trained != self.trained_now()
        if operation.name in ("slope", "penalty", "backward_of_some") and self.model.checkpointing == "reentrant":
            return True  # PyTorch's own reentrant checkpoints know no gradient of a part
        if operation.name == "penalty" and "attention" in self.program.model.blocks:
            return True  # PyTorch's own attention has no second derivative
        if operation.name == "load":
            return not self.facts.saved or self._of_other_groups(self.facts.saved[self._saved(operation.values["number"])])
        if operation.name == "resume" or operation.values.get("how") == "checkpoint":
            return any(self._of_other_groups(positions) for positions in self.facts.saved.values())
        return False

    def _of_other_groups(self, positions: list[int]) -> bool:
        """A checkpoint of other groups does not load, as `load_checkpoint` says (tests/checkpoint/test_use.py)."""
        return any(self.facts.saved_added[position] != self.facts.added for position in positions)

    def after_users_error(self, operation: Operation) -> None:
        """What a script does where it catches its own error. Plain PyTorch plays all ranks in one backward: a part of it is no
        part of each rank's."""
        if self.program.ranks > 1 and operation.name == "backward":
            self.do_zero_grad()

    # ---- following another side ----------------------------------------------------------------------------------

    def follows(self, operation: Operation, outcome: Outcome) -> Outcome:
        """Go where the other side went."""
        went = outcome["is"]
        if went == "nothing":
            return {"is": "nothing"}
        if went == "refused":
            if operation.name == "backward" and (self.graphs or outcome["forwards"]):
                self._chosen(operation.values.get("which", -1), operation.values.get("retain", False))
                outcome["forwards"].clear()
            for block, batch in outcome["forwards"]:  # they drew random numbers and changed running statistics
                self._losses(batch) if block < 0 else self._losses_of_block(block, batch)
            if outcome["zeroed"]:
                self.drop_all_gradients()
            return {"is": "refused"}
        if went in ("gone", "back"):
            return self._goes(operation, outcome)
        if went == "failed":
            self._fails(outcome)
            return {"is": "failed"}
        if went == "settled":
            return self._settles(operation, outcome)
        try:
            return {"is": "ok", "value": self.perform(operation)}
        except (Boom, KeyboardInterrupt) as error:
            self.after_users_error(operation)
            return {"is": "raised", "class": type(error).__name__}

    def _goes(self, operation: Operation, outcome: Outcome) -> Outcome:
        """A save that was cut off may be there all the same."""
        self.graphs.clear()
        if operation.name == "save":
            self.do_zero_grad()
            self.perform(operation)
        if outcome["is"] == "gone":
            return {"is": "gone"}
        self.end()
        self.facts.added = outcome["value"]["added"]
        self._began(self.program.setups.index(self.facts.setup))
        self._loaded(self.load_at(outcome["value"]["position"]))
        return {"is": "back"}

    def _fails(self, outcome: Outcome) -> None:
        self.graphs.clear()
        if outcome["began"] or outcome["loaded"] is None:
            self.end()
            self._began(outcome["setup"])
        if outcome["loaded"] is not None:
            self._loaded(self.load_at(outcome["loaded"]))

    def _settles(self, operation: Operation, outcome: Outcome) -> Outcome:
        """An interrupted operation was done or was not: which, the state says; half of it is wrong."""
        self.graphs.clear()
        before = self.whole_state()
        if outcome["began"]:  # nothing was loaded into it
            self.end()
            self._began(outcome["setup"])
        elif operation.name == "save":
            self.do_zero_grad()
            self.perform(operation)  # whether it was made or not is seen where it is loaded
        elif not self.agrees(before, outcome["state"]):
            if operation.name == "load":
                for candidate in outcome["candidates"]:
                    self._loaded(self.load_at(candidate))
                    if self.agrees(self.whole_state(), outcome["state"]):
                        break
            else:
                self.perform(operation)
        elif any(before[name].dtype != one.dtype for name, one in outcome["state"].items() if name in before):
            self._give_states()
        self.graphs.clear()
        self.do_zero_grad()
        self.facts.version += 1
        torch.manual_seed(1000 + self.position)
        return {"is": "settled", "state": self.whole_state()}

    def _give_states(self) -> None:
        """A forward began, and was interrupted when what is newly trained had got its states, fp32 masters among them."""
        training = self.model.training
        self.model.eval()
        self._losses(0)
        self.model.train(training)

    def whole_state(self) -> dict[str, torch.Tensor]:
        """With `COUNTS`."""
        return self.state()

    def agrees(self, own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
        """Whether the two are one state, as far as this side can tell."""
        return all(torch.equal(own[name], other[name]) for name in other)

    @abstractmethod
    def load_at(self, position: int | None) -> int | None:
        """What was saved at that position."""

    def finish(self) -> Outcome:
        """What is left in the end."""
        self.graphs.clear()
        return {"is": "ok", "value": {}}


def _scale(value: torch.Tensor) -> float:
    """Of values that `load_state_dict` brings: a sum of thousands of them stays in reach of rounding."""
    return 0.2 / max(1.0, value.shape[-1] / 16 if value.dim() > 1 else 1.0)
