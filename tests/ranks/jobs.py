# SPDX-License-Identifier: Apache-2.0
"""What the members of a crew do. Every function runs on all of them; arguments and results are JSON."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import hashlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import offload
from offload.device.recording import COLLECTIVES
from offload.planning.schedule import Verb
from offload.profiling.trace_events import read_trace
from offload.ranks.transport import Ranks
from tests.drives import drive_is, drives_from
from tests.file_systems import at_call, path_of
from tests.inside import layout_of, parts_of, residency_of
from tests.small_sizes import small_for_good

from ..acceptance.models import adamw, byte_batches, gpt2, llama, vector_batches
from ..tiers.faulty_io import Fault, FaultyBackend


def settle() -> None:
    """Called in each process before its first job."""
    small_for_good(least_unit_numel=0)  # the models here are tiny, and are to have units all the same


class Experts(nn.Module):
    """A mixture of experts, each a unit of its own; `route` says which of them a forward uses, and in which order."""

    def __init__(self, count: int = 4, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for index in route:
            x = x + torch.tanh(self.experts[index](x))
        return self.last(x)


class Branches(nn.Module):
    """Blocks that hold two branches each, of which a forward uses those it is told to."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branch(width) for _ in range(3))

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, route)
        return x


class Branch(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.choices = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)])

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        for index in route:
            x = x + torch.tanh(self.choices[index](x))
        return x


def _partly_frozen() -> nn.Module:
    model = llama()
    for name, parameter in model.named_parameters():
        if "mlp" in name or "embed" in name:
            parameter.requires_grad_(False)
    return model


def _narrow() -> nn.Module:
    """Units of a handful of elements: fewer than ranks have blocks of."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _marked() -> nn.Module:
    """Its list of layers, which is never called, is one unit."""
    model = llama()
    offload.unit(model.model.layers)
    return model


MODELS = {"llama": llama, "gpt2": gpt2, "frozen": _partly_frozen, "marked": _marked}


def digest(state: dict[str, torch.Tensor]) -> str:
    seen = hashlib.sha256()
    for name in sorted(state):
        seen.update(name.encode())
        seen.update(state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


@contextlib.contextmanager
def accelerator_of(name: str, seed: int = 0) -> Iterator[None]:
    os.environ["OFFLOAD_ACCELERATOR"], os.environ["OFFLOAD_SEED"] = name, str(seed)
    try:
        yield
    finally:
        os.environ["OFFLOAD_ACCELERATOR"] = "cpu"


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _step(model: nn.Module, batches: list[torch.Tensor], engine: Any, *, syncs: bool) -> list[float]:
    losses = []
    for position, batch in enumerate(batches):
        loss = model(input_ids=batch, labels=batch).loss
        last = position + 1 == len(batches)
        with contextlib.nullcontext() if last or syncs else engine.no_sync():
            engine.backward(loss / len(batches))
        losses.append(loss.item())
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return losses


def train(
    fields: dict[str, Any],
    model: str = "llama",
    steps: int = 4,
    micro: int = 1,
    syncs: bool = False,
    accelerator: str = "cpu",
    seed: int = 0,
    mesh: list[int] | None = None,
    average: str = "fp32",
    sums_on_device: bool = False,
) -> dict[str, Any]:
    """Each rank trains on batches of its own; returns losses, a digest of all weights, and the last norm. `sums_on_device`: the
    engine is told of the micro-batches, and plans to sum gradients on the device that are updated on the host."""
    rank, world = place()
    os.environ["OFFLOAD_AVERAGE"] = average
    with accelerator_of(accelerator, seed):
        built = MODELS[model]()
        arranged = None
        if mesh is not None:
            arranged = dist.init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("replicate", "shard")[-len(mesh) :])
        config = offload.Config(**fields).expecting(micro if sums_on_device else 1)
        with offload.initialize(built, adamw(built), config, mesh=arranged) as engine:
            assert not sums_on_device or any(unit.route.brings_gradients for unit in parts_of(engine).units)
            batches = byte_batches(steps * micro * world)
            losses = []
            for step in range(steps):
                start = (step * world + rank) * micro
                losses.append(_step(built, batches[start : start + micro], engine, syncs=syncs))
            return {"losses": losses, "weights": digest(engine.state_dict()), "norm": engine.grad_norm}


def between_devices(fields: dict[str, Any], own: str) -> dict[str, Any]:
    """As `train`, over the transfers that GPUs of their own have, which gloo plays, with the user's own all_reduce in between.

    own: "quiet" (inside `gathered`), "late" (rank 1's comes after a transfer of the engine's that rank 0's came before), ""
    """
    rank, world = place()

    def use(self: Ranks, device: torch.device) -> None:
        self._device_backend = "gloo"
        self._make_device_groups()

    used, Ranks.use_devices = Ranks.use_devices, use  # type: ignore[method-assign]
    try:
        built = llama()
        with warnings.catch_warnings(record=True) as said, offload.initialize(built, adamw(built), fields) as engine:
            warnings.simplefilter("always")
            assert parts_of(engine).ranks.has_devices
            batches, losses, total = byte_batches(4 * world), [], torch.zeros(1)
            for step in range(4):
                if own == "late" and step == 2 and rank == 0:
                    dist.all_reduce(total, async_op=True)
                losses.append(_step(built, batches[step * world + rank : step * world + rank + 1], engine, syncs=False))
                if own == "late" and step == 2 and rank == 1:
                    dist.all_reduce(total)
                if own == "quiet":
                    with engine.gathered(()):
                        dist.all_reduce(total.fill_(losses[-1][0]))
            weights = digest(engine.state_dict())
            moved = engine.stats()["ranks"]
        texts = [str(one.message) for one in said if "NCCL" in str(one.message)]
        return {"losses": losses, "weights": weights, "norm": engine.grad_norm, "said": texts, "moved": sorted(moved)}
    finally:
        Ranks.use_devices = used  # type: ignore[method-assign]


def train_alone(fields: dict[str, Any], world: int, steps: int = 4) -> dict[str, Any]:
    """One rank with the batches of all: the mean over ranks is the mean over the whole batch. Runs without a group."""
    built = llama()
    with offload.initialize(built, adamw(built), offload.Config(**fields)) as engine:
        batches = byte_batches(steps * world)
        losses = []
        for step in range(steps):
            batch = torch.cat(batches[step * world : (step + 1) * world])
            losses.append(_step(built, [batch], engine, syncs=True))
        weights = {name: value.tolist() for name, value in engine.state_dict().items()}
        return {"losses": losses, "weights": weights}


def weights_after(fields: dict[str, Any], steps: int = 4) -> dict[str, Any]:
    """As `train`, with the weights themselves."""
    rank, world = place()
    built = llama()
    with offload.initialize(built, adamw(built), offload.Config(**fields)) as engine:
        batches = byte_batches(steps * world)
        losses = [_step(built, [batches[step * world + rank]], engine, syncs=True) for step in range(steps)]
        return {"losses": losses, "weights": {name: value.tolist() for name, value in engine.state_dict().items()}}


def routes(fields: dict[str, Any], kind: str, plan: list[list[list[int]]], accelerator: str = "cpu") -> dict[str, Any]:
    """`plan[step][rank]`: the experts that this rank uses in that step. Returns a digest, and each expert's step count."""
    rank, _ = place()
    with accelerator_of(accelerator):
        torch.manual_seed(3)
        model = {"experts": Experts, "branches": Branches}[kind]()
        with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
            for step, (x, y) in enumerate(vector_batches(len(plan), seed=rank)):
                loss = F.mse_loss(model(x, plan[step][rank]), y)
                loss.backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            counts = {info.fqn: info.step for info in parts_of(engine).parameters}
            state = engine.state_dict()
            return {"weights": digest(state), "counts": counts, "each": {n: digest({n: v}) for n, v in state.items()}}


def taken_out(fields: dict[str, Any], how: str, *, syncs: bool, accelerator: str = "cpu") -> dict[str, Any]:
    """A step of one backward. Before that another one, whose gradients are dropped (`how`: "optimizer", "model"), or replaced
    by ones and the step made of those ("assigned"); "": there is none. Each rank has an expert of its own."""
    rank, _ = place()
    with accelerator_of(accelerator):
        torch.manual_seed(3)
        model = Experts()
        with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
            dropped, used = vector_batches(2, seed=rank)
            if how:
                with contextlib.nullcontext() if syncs else engine.no_sync():
                    F.mse_loss(model(dropped[0], [rank, 3]), dropped[1]).backward()
            if how == "optimizer":
                engine.optimizer.zero_grad()
            elif how == "model":
                model.zero_grad()
            if how == "assigned":
                for parameter in model.parameters():
                    parameter.grad = torch.ones(parameter.shape)
            else:
                F.mse_loss(model(used[0], [rank]), used[1]).backward()
            engine.optimizer.step()
            counts = {info.fqn: info.step for info in parts_of(engine).parameters}
            return {"weights": digest(engine.state_dict()), "counts": counts, "norm": engine.grad_norm}


def different_evaluations(fields: dict[str, Any]) -> str:
    """Between two steps the ranks evaluate different numbers of batches."""
    rank, _ = place()
    model = llama()
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        batches = byte_batches(8)
        for step in range(2):
            _step(model, [batches[step * 2 + rank % 2]], engine, syncs=True)
            with torch.no_grad():
                for batch in batches[: 1 + 2 * rank]:
                    model(input_ids=batch)
        return digest(engine.state_dict())


def own_collectives(fields: dict[str, Any], *, set_to_none: bool) -> dict[str, Any]:
    """Each rank has an expert of its own, and the first evaluates alone. The loop's own collective is behind each call."""

    def zero_grad() -> None:
        engine.optimizer.zero_grad(set_to_none)

    rank, _ = place()
    torch.manual_seed(3)
    model, total = Experts(), torch.ones(1)
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        for step, (x, y) in enumerate(vector_batches(4, seed=rank)):
            loss = F.mse_loss(model(x, [(rank + step) % 3]), y)
            calls = [lambda loss=loss: engine.backward(loss), engine.step, zero_grad]
            for call in calls:
                call()
                dist.all_reduce(total)
            if rank == 0:
                with torch.no_grad():
                    model(x, [0, 1, 2, 3])
            for lent in ([], [model.experts[1].weight], model.parameters()):
                with engine.gathered(lent):
                    dist.all_reduce(total)
                dist.all_reduce(total)
        return {"weights": digest(engine.state_dict()), "total": total.item()}


def numbers_apart(fields: dict[str, Any], what: str) -> None:
    """The second step is made with another number on each rank."""
    rank, _ = place()
    model = _narrow()
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        for step in range(2):
            x, number = torch.ones(2, 3), 0.01 * (1 + rank * step)
            if what == "loss_scale":
                engine.loss_scale = number
            engine.backward(F.mse_loss(model(x), x))
            if what == "clip":
                engine.clip_grad_norm_(number)
            elif what == "clip by torch":
                nn.utils.clip_grad_norm_(model.parameters(), number)
            elif what != "loss_scale":
                engine.optimizer.param_groups[0][what] = number
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            assert step == 0, "nobody was told"


def narrow(fields: dict[str, Any], rows: list[int]) -> str:
    """Tiny units, and a batch size of its own on each rank."""
    rank, _ = place()
    model = _narrow()
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(rows[rank], 3)
            F.mse_loss(model(x), x).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        return digest(engine.state_dict())


def overflow(fields: dict[str, Any], bad_rank: int) -> dict[str, Any]:
    """fp16: in the second of three steps the gradients of one rank overflow."""
    rank, _ = place()
    model = _narrow()
    with offload.initialize(model, adamw(model), offload.Config(dtype="fp16", **fields)) as engine:
        scales, digests = [], []
        for step in range(3):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(4, 3)
            loss = F.mse_loss(model(x).float(), x)
            if step == 1 and rank == bad_rank:
                loss = loss * float("inf")
            engine.backward(loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            scales.append(engine.loss_scale)
            digests.append(digest(engine.state_dict()))
        return {"scales": scales, "weights": digests, "skipped": engine.stats()["skipped_steps"]}


def counted(fields: dict[str, Any], steps: int) -> dict[str, Any]:
    """What went over the wire in steps after the first."""
    rank, world = place()
    model = llama(layers=4)
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        batches = byte_batches((steps + 2) * world)
        for step in range(2):
            _step(model, [batches[step * world + rank]], engine, syncs=True)
        with engine.gathered([]):  # what the step began of the next one's first fetch has been counted
            pass
        before, io_before = engine.stats()["ranks"], _file_nbytes(engine)
        for step in range(2, steps + 2):
            _step(model, [batches[step * world + rank]], engine, syncs=True)
        with engine.gathered([]):  # the updates are in place
            pass
        after, io_after = engine.stats()["ranks"], _file_nbytes(engine)
        units, schedule = layout_of(engine).units, residency_of(engine).schedule
        flats = [flat for unit in units for flat in unit.flats]
        return {
            "scheduled_nbytes": sum(units[op.unit_index].nbytes for op in schedule.ops if op.verb is Verb.FETCH),
            "capacity_nbytes": engine.stats()["resident_capacity_nbytes"],
            "moved": {
                verb: [after[verb][key] - before.get(verb, {key: 0})[key] for key in ("count", "nbytes")] for verb in after
            },
            "flat_nbytes": [flat.nbytes for flat in flats],
            "files": [last - first for first, last in zip(io_before, io_after, strict=True)],
        }


def _file_nbytes(engine: Any) -> list[int]:
    """Read and written so far, by what is over."""
    parts = parts_of(engine)
    parts.records.settle_writes()
    parts.parameter_store.settle_writes()
    io = parts.backend.stats() if parts.backend is not None else None
    return [io.read_nbytes, io.written_nbytes] if io is not None else [0, 0]


def profiled(fields: dict[str, Any], path: str) -> dict[str, Any]:
    """The file that this rank wrote, and the bytes that its profile has on the collectives' row."""
    rank, world = place()
    model = llama(layers=2)
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        batches = byte_batches(3 * world)
        _step(model, [batches[rank]], engine, syncs=True)
        profile = engine.profile(path, steps=2)
        for step in (1, 2):
            _step(model, [batches[step * world + rank]], engine, syncs=True)
        trace = read_trace(profile.path)
        return {
            "name": profile.path.name,
            "rank": trace.facts["rank"],
            "collectives": sorted({(one.name, one.unit) for one in trace.events if one.row == COLLECTIVES}),
        }


def memory(fields: dict[str, Any], accelerator: str = "cpu") -> dict[str, Any]:
    """Planned and measured bytes of one rank."""
    rank, world = place()
    with accelerator_of(accelerator):
        model = llama(layers=4, width=384)
        numel = sum(parameter.numel() for parameter in model.parameters())
        with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
            batches = byte_batches(2 * world)
            for step in range(2):
                _step(model, [batches[step * world + rank]], engine, syncs=True)
            stats = engine.stats()
            return {
                "numel": numel,
                "planned": {line["purpose"]: line["nbytes"] for line in stats["planned"]},
                "host": stats["host_nbytes"],
                "unreduced_peak": parts_of(engine).gradient_sync.peak_nbytes,
                "resident_peak": stats["resident_peak_nbytes"],
            }


def gathered(fields: dict[str, Any]) -> dict[str, Any]:
    """Reads and writes parameters between steps."""
    rank, world = place()
    model = llama()
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        batches = byte_batches(2 * world)
        _step(model, [batches[rank]], engine, syncs=True)
        head = model.lm_head.weight
        with engine.gathered([head, model.model.norm.weight]):
            seen = digest({"head": head.detach().clone()})
            with torch.no_grad():
                head.mul_(0.5)
        with engine.gathered(head):
            halved = float(head.detach().abs().sum())
        full = engine.state_dict()
        share = engine.state_dict(full=False)
        first = engine.state_dict(rank0_only=True)
        _step(model, [batches[world + rank]], engine, syncs=True)
        engine.load_state_dict(share)
        back = engine.state_dict()
        return {
            "seen": seen,
            "halved": halved,
            "full": digest(full),
            "head": float(full["lm_head.weight"].abs().sum()),
            "share": sorted(share),
            "names": sorted(full),
            "first": len(first),
            "back": digest(back),
            "after": digest(engine.state_dict()),
        }


def distributed_checkpoint(fields: dict[str, Any], other: dict[str, Any], folder: str) -> dict[str, Any]:
    """torch.distributed.checkpoint writes what one engine holds and fills another from it."""
    import torch.distributed.checkpoint as dcp

    rank, world = place()
    model = llama()
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        _step(model, [byte_batches(world)[rank]], engine, syncs=True)
        dcp.save(engine.state_dict(full=False), checkpoint_id=folder)
        saved = digest(engine.state_dict())
    torch.manual_seed(77)
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with offload.initialize(model, adamw(model), offload.Config(**other)) as engine:
        state = engine.state_dict(full=False)
        dcp.load(state, checkpoint_id=folder)
        engine.load_state_dict(state)
        return {"saved": saved, "loaded": digest(engine.state_dict())}


# ---- things that go wrong


def differing(what: str) -> None:
    """The ranks call initialize with something that differs. What one of them had made is given back before that is raised."""
    rank, _ = place()
    before = set(threading.enumerate())
    torch.manual_seed(5 + (rank if what == "seed" else 0))
    width = 16 + (rank if what == "shape" else 0)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))
    lr = 1e-3
    config = offload.Config(stage=3, max_grad_norm=1.0 + (rank if what == "config" else 0))
    if what == "optimizer":
        config = offload.Config(stage=3)
    if what == "failure" and rank == 1:
        os.environ["OFFLOAD_ACCELERATOR"] = "abacus"
    optimizer = torch.optim.AdamW(model[:1].parameters() if what == "optimizer" and rank else model.parameters(), lr=lr)
    try:
        with offload.initialize(model, optimizer, config):
            raise AssertionError("the difference was not seen")
    except offload.OffloadError:
        assert not [one.name for one in threading.enumerate() if "offload" in one.name and one not in before]
        raise
    finally:
        os.environ["OFFLOAD_ACCELERATOR"] = "cpu"


def failing(fields: dict[str, Any], how: str, when: str) -> None:
    """Rank 1 dies, hangs, raises or leaves in the second step."""
    rank, world = place()
    model = llama()
    batches = byte_batches(4 * world)
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        for step in range(4):
            loss = model(input_ids=batches[step * world + rank], labels=batches[step * world + rank]).loss
            if step == 1 and rank == 1 and when == "forward":
                _fail(how)
            if step == 1 and rank == 1 and when == "backward":
                model.model.layers[1].register_full_backward_hook(lambda *_: _fail(how))
            loss.backward()
            if step == 1 and rank == 1 and when == "step":
                _fail(how)
            engine.optimizer.step()
            engine.optimizer.zero_grad()


def staying(fields: dict[str, Any], folder: str, when: str, failing: int) -> list[str]:
    """A rank's drive fails in the second step, or in an export. It catches that and lives on until the other has heard."""
    rank, _ = place()
    backend, heard = FaultyBackend(), os.path.join(folder, "heard")
    with pytest.MonkeyPatch.context() as patch:
        drive_is(patch, backend)
        model = llama(layers=2)
        engine = offload.initialize(model, adamw(model), offload.Config(**fields, nvme=os.path.join(folder, "nvme")))
    _train_on(engine, model, 0, 1)
    engine.state_dict()  # no update is left that the fault could meet first
    if rank == failing:
        backend.faults = {index: Fault("errno", errno.EIO) for index in range(backend.submitted_count, 10000)}
    try:
        if when == "step":
            _train_on(engine, model, 1, 2)
        else:
            engine.export(os.path.join(folder, "export"), "fp32")
    except Exception as error:
        said = [type(error).__name__, str(error)]
    while rank == failing and not os.path.exists(heard):
        time.sleep(0.01)
    Path(heard).touch()
    return said


def dying_in_refit(fields: dict[str, Any], where: str) -> None:
    """Rank 1 dies where room is made for the states of what was unfrozen: as the ranks connect anew, or behind that."""
    rank, world = place()
    model = llama()
    optimizer = adamw(model)
    model.model.layers[0].requires_grad_(False)
    batch = byte_batches(world)[rank]
    with offload.initialize(model, optimizer, offload.Config(**fields)) as engine:
        model(input_ids=batch, labels=batch).loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        model.model.layers[0].requires_grad_(True)
        if rank == 1:
            place_of_death = dist if where == "new_group" else psutil
            setattr(place_of_death, where, lambda *_, **__: _fail("dies"))
        model(input_ids=batch, labels=batch)


def refused_refit(fields: dict[str, Any], refusals: int) -> dict[str, Any]:
    """A block is unfrozen for the third step. `refusals`: for the second too, but rank 1's drive is full so many times as room
    for its states is made; so it is frozen again. What was said then, and at the next call, is told with the rest."""
    rank, said = place()[0], list[list[str]]()
    model = llama()
    block = model.model.layers[0].requires_grad_(False)
    drives: Iterator[Any] = iter([offload.StorageError("the drive is full")] * refusals if rank == 1 else [])

    def drive() -> Any:
        if (failure := next(drives, None)) is not None:
            raise failure
        return FaultyBackend()

    with offload.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), offload.Config(**fields)) as engine:
        losses = _train_on(engine, model, 0, 1)
        if refusals:
            block.requires_grad_(True)
            with pytest.MonkeyPatch.context() as patch:
                drives_from(patch, drive)
                for ask in (lambda: _train_on(engine, model, 1, 2), engine.state_dict)[:refusals]:
                    try:
                        ask()
                    except Exception as error:
                        said.append([type(error).__name__, str(error)])
            block.requires_grad_(False)
        if refusals > 1:
            return {"said": said}
        losses += _train_on(engine, model, 1, 2)
        block.requires_grad_(True)
        losses += _train_on(engine, model, 2, 3)
        return {"losses": losses, "weights": digest(engine.state_dict()), "said": said}


def _fail(how: str) -> None:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        time.sleep(14)
        raise AssertionError("over")
    raise ValueError("rank 1 has had enough")


def different_calls(fields: dict[str, Any]) -> None:
    """Rank 0 makes a step, rank 1 asks for the weights."""
    rank, world = place()
    model = llama()
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        batch = byte_batches(world)[rank]
        model(input_ids=batch, labels=batch).loss.backward()
        if rank == 0:
            engine.optimizer.step()
        else:
            engine.state_dict()


def dropped(fields: dict[str, Any]) -> list[str]:
    """Names of the threads that an engine leaves which was dropped without close(). Of earlier jobs there may be others."""
    before = set(threading.enumerate())

    def one_engine() -> None:
        model = llama()
        engine = offload.initialize(model, adamw(model), offload.Config(**fields))
        _train_on(engine, model, 0, 1)
        engine.state_dict()  # a point where all ranks meet: none needs another after it

    one_engine()
    deadline = time.monotonic() + 30
    while (left := [one for one in threading.enumerate() if "offload" in one.name and one not in before]) and (
        time.monotonic() < deadline
    ):
        gc.collect()
        time.sleep(0.01)
    return [one.name for one in left]


def threads_left_by(count: int, fields: dict[str, Any]) -> int:
    """How many threads of any kind there are more after `count` engines that were closed, and one that could not be made."""

    def one_engine() -> None:
        model = llama()
        with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
            _train_on(engine, model, 0, 1)

    one_engine()  # what a process makes once is there from now on
    before = len(os.listdir("/proc/self/task"))
    for _ in range(count):
        one_engine()
    model = llama()
    with contextlib.suppress(offload.ConfigError):
        offload.initialize(model, adamw(model), offload.Config(**fields, device_memory=1))
    gc.collect()
    deadline = time.monotonic() + 10
    while (left := len(os.listdir("/proc/self/task")) - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    return max(left, 0)  # of earlier jobs some may have ended


def clipped(fields: dict[str, Any], by_torch: bool) -> dict[str, Any]:
    """Three steps, clipped by torch.nn.utils or by the engine."""
    rank, world = place()
    model = llama()
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        norms = []
        for batch in byte_batches(3 * world)[rank::world]:
            model(input_ids=batch, labels=batch).loss.backward()
            clip = nn.utils.clip_grad_norm_ if by_torch else lambda _, max_norm: engine.clip_grad_norm_(max_norm)
            norms.append(float(clip(model.parameters(), 0.5)))
            assert engine.grad_norm == norms[-1] > 0.5
            engine.step()
            engine.zero_grad()
        return {"norms": norms, "weights": digest(engine.state_dict())}


def writes_differ(fields: dict[str, Any]) -> None:
    rank, _ = place()
    model = llama()
    with (
        offload.initialize(model, adamw(model), offload.Config(**fields)) as engine,
        engine.gathered(model.lm_head.weight),
        torch.no_grad(),
    ):
        model.lm_head.weight.add_(rank)


# ---- checkpoints


def _train_on(engine: Any, model: nn.Module, first: int, last: int) -> list[float]:
    """Steps [first, last) of one training run, on as many ranks as there are: the batches of a step are theirs in turn."""
    rank, world = place()
    batches = byte_batches(4 * last)
    losses = []
    for step in range(first, last):
        mine = batches[4 * step + rank : 4 * step + 4 : world]
        losses += _step(model, mine, engine, syncs=False)
    return losses


def save_and_go_on(fields: dict[str, Any], folder: str, wait: bool = True, steps: int = 4) -> dict[str, Any]:
    model = llama()
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        _train_on(engine, model, 0, steps // 2)
        torch.manual_seed(100 + place()[0])
        engine.save_checkpoint(folder, client_state={"step": steps // 2}, wait=wait)
        before = digest(engine.state_dict())
        losses = _train_on(engine, model, steps // 2, steps)
        return {"before": before, "losses": losses, "weights": digest(engine.state_dict()), "drawn": torch.rand(1).item()}


def resume(fields: dict[str, Any], folder: str, steps: int = 4, numbered: bool = False) -> dict[str, Any]:
    torch.manual_seed(1000)
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        state = engine.resume_or_start(folder) if numbered else engine.load_checkpoint(folder)
        before = digest(engine.state_dict())
        losses = _train_on(engine, model, state["step"] if state else 0, steps)
        return {"before": before, "losses": losses, "weights": digest(engine.state_dict()), "drawn": torch.rand(1).item()}


def save_as(
    fields: dict[str, Any],
    names: list[str | None],
    rest: str,
    partial: list[bool],
    wait: bool = True,
    keep_last: int | None = None,
) -> Any:
    """Each rank saves under a name of its own, and `partial` without what is frozen. Returns its error; training goes on, and
    so do saves."""
    model = llama(layers=2)
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        _train_on(engine, model, 0, 1)
        try:
            rank = place()[0]
            save = engine.save_checkpoint(names[rank], keep_last=keep_last, wait=wait, without_frozen=partial[rank])  # type: ignore[arg-type]
            save.wait()
        except offload.OffloadError as error:
            said = [type(error).__name__, str(error)]
        _train_on(engine, model, 1, 2)
        engine.save_checkpoint(rest, wait=wait).wait()
        return said


def load_another(fields: dict[str, Any], folder: str, names: list[str], resumes: bool) -> Any:
    """Each rank loads the checkpoint of its own name. Returns its error, and whether the weights are what they were."""
    model = llama(layers=2)
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        for name in ("first", "second"):
            _train_on(engine, model, 0, 1)
            engine.save_checkpoint(os.path.join(folder, name, "step-1"))
        before = engine.state_dict()
        path = os.path.join(folder, names[place()[0]])
        try:
            if resumes:
                engine.resume_or_start(path)
            else:
                engine.load_checkpoint(os.path.join(path, "step-1"))
        except offload.OffloadError as error:
            said = [type(error).__name__, str(error)]
        after = engine.state_dict()
        _train_on(engine, model, 1, 2)
        return said, all(torch.equal(value, after[name]) for name, value in before.items())


def killed_in_a_save(fields: dict[str, Any], folder: str, wait: bool) -> None:
    """The last rank dies while it writes its part."""
    model = llama(layers=2)
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        _train_on(engine, model, 0, 1)
        if place()[0] == 1:
            os.fsync = lambda fileno: os.kill(os.getpid(), signal.SIGKILL)
        engine.save_checkpoint(folder, wait=wait).wait()


def given_up_save(fields: dict[str, Any], folder: str, wait: bool, first_writes: bool) -> list[str]:
    """The first rank gives a save up and removes its folder before the other writes (`first_writes`: its manifest, else its
    files). Returns this rank's error; training goes on, and so do saves."""

    def failing(*_: Any) -> None:
        raise ValueError("enough")

    def late(fileno: int, *_: Any) -> None:
        while path_of(fileno).parent.exists():
            time.sleep(0.01)

    model = llama(layers=2)
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        _train_on(engine, model, 0, 1)
        with pytest.MonkeyPatch.context() as patch:
            if place()[0] == 0:
                at_call(patch, "pwrite", before=failing)
            else:  # what is written is made durable before the manifest
                at_call(patch, "fsync" if first_writes else "pwrite", before=late)
            try:
                engine.save_checkpoint(os.path.join(folder, "step-1"), wait=wait).wait()
            except Exception as error:
                said = [type(error).__name__, str(error)]
        _train_on(engine, model, 1, 2)
        engine.save_checkpoint(os.path.join(folder, "step-2"), wait=wait).wait()
        return said


def calls_after_a_lost_save(fields: dict[str, Any], folder: str, call: str, loser: int) -> list[Any]:
    """One rank's disk is full under a save beside training. Returns what the next call, which is told of it, raises here;
    training goes on, and so do saves."""

    def full(fileno: int) -> None:
        if path_of(fileno).name.startswith("unit-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = llama(layers=2)
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        _train_on(engine, model, 0, 1)
        with pytest.MonkeyPatch.context() as patch:
            if place()[0] == loser:
                at_call(patch, "fsync", before=full)
            lost = engine.save_checkpoint(os.path.join(folder, "step-1"), wait=False)
            while not lost.done():
                time.sleep(0.01)
        try:
            getattr(engine, call)(os.path.join(folder, "step-2"))
        except Exception as error:
            said = [type(error).__name__, str(error)]
        _train_on(engine, model, 1, 2)
        engine.save_checkpoint(os.path.join(folder, "step-3"))
        return said


def load_without_files(fields: dict[str, Any], folder: str, call: str) -> list[Any]:
    """The last rank has no file left to open as it reads the newer of two checkpoints. Returns this rank's error; then the same
    call loads it."""

    def short(path: Any, *_: Any, **__: Any) -> None:
        if str(path).startswith("unit-"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    model = llama(layers=2)
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        for step in (1, 2):
            _train_on(engine, model, 0, 1)
            engine.save_checkpoint(os.path.join(folder, f"step-{step}"), client_state={"step": step})
        path = folder if call == "resume_or_start" else os.path.join(folder, "step-2")
        with pytest.MonkeyPatch.context() as patch:
            if place()[0] == 1:
                at_call(patch, "open", before=short)
            try:
                getattr(engine, call)(path)
            except Exception as error:
                said = [type(error).__name__, str(error)]
        assert getattr(engine, call)(path) == {"step": 2}
        return said


def refused_load(fields: dict[str, Any], folder: str) -> str:
    """A load that is refused on every rank leaves the engine as it was."""
    model = llama()
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        before = digest(engine.state_dict())
        try:
            engine.load_checkpoint(folder)
        except offload.CheckpointError as error:
            assert digest(engine.state_dict()) == before
            _train_on(engine, model, 0, 1)
            return str(error)
        raise AssertionError("a damaged checkpoint was loaded")


def export(fields: dict[str, Any], folder: str) -> str:
    model = llama()
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        _train_on(engine, model, 0, 1)
        engine.export(folder, "fp32")
        return digest(engine.state_dict())


def train_and_save(fields: dict[str, Any], folder: str, steps: int) -> None:
    """Resume, then a checkpoint after every step, some beside training; meant to be killed."""
    model = llama(layers=2)
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        state = engine.resume_or_start(folder)
        for step in range(state["step"] if state else 0, steps):
            _train_on(engine, model, step, step + 1)
            engine.save_checkpoint(
                os.path.join(folder, f"step-{step + 1}"), client_state={"step": step + 1}, keep_last=2, wait=step % 2 == 0
            )
            if place()[0] == 0:
                print("", end="", flush=True)


def train_to_the_end(fields: dict[str, Any], folder: str, steps: int) -> dict[str, Any]:
    """The rest of `train_and_save`'s run; says where it went on."""
    model = llama(layers=2)
    with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
        state = engine.resume_or_start(folder)
        start = state["step"] if state else 0
        _train_on(engine, model, start, steps)
        return {"start": start, "weights": digest(engine.state_dict())}


def folded(fields: dict[str, Any], least_numel: int) -> dict[str, Any]:
    """How many messages a step takes when small units join the root."""
    small_for_good(least_unit_numel=least_numel)
    try:
        rank, world = place()
        torch.manual_seed(4)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)), nn.Linear(16, 1024))
        with offload.initialize(model, adamw(model), offload.Config(**fields)) as engine:
            for x, y in vector_batches(2 * world)[rank::world]:
                (model(x) - y[:, :1]).square().mean().backward()
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            return {"units": len(engine.stats()["units"]), "reduced": engine.stats()["ranks"]["reduce"]["count"]}
    finally:
        small_for_good(least_unit_numel=0)


def peft_export(fields: dict[str, Any], folder: str) -> dict[str, str]:
    """Adapters and the merged model, beside what PEFT writes of the same values on one rank. Returns what differs."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    options: dict[str, Any] = {"r": 3, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    base = llama(layers=2)
    base.name_or_path = ""
    model = get_peft_model(base, LoraConfig(**options))
    plain = copy.deepcopy(model)
    optimizer = adamw(model)
    with offload.initialize(model, optimizer, offload.Config(**fields)) as engine:
        _train_on(engine, model, 0, 2)
        engine.export(os.path.join(folder, "ours"))
        engine.export(os.path.join(folder, "merged"), merged=True, max_shard_size="20KB")
        plain.load_state_dict(engine.state_dict())
    if place()[0] != 0:
        return {}
    plain.save_pretrained(os.path.join(folder, "theirs"))
    plain.merge_and_unload().save_pretrained(os.path.join(folder, "unloaded"))
    different = {}
    for ours, theirs in (("ours", "theirs"), ("merged", "unloaded")):
        found, expected = (
            {name: value for file in sorted(Path(folder, one).glob("*.safetensors")) for name, value in load_file(file).items()}
            for one in (ours, theirs)
        )
        if set(found) != set(expected):
            different[ours] = f"{sorted(set(found) ^ set(expected))}"
        elif not all(torch.equal(found[name], expected[name]) for name in expected):
            different[ours] = "values"
    return different


def unfreeze(fields: dict[str, Any], knows_all: bool) -> dict[str, Any]:
    """Blocks are unfrozen between steps, one of them after an evaluation that the first rank makes alone; another joins the
    optimizer. `knows_all`: they have states from the start, as what was trained once has."""
    model = llama(layers=3)
    parts = [model.model.layers[0], model.model.layers[1], model.lm_head]
    if not knows_all:
        for part in parts:
            part.requires_grad_(False)
    rest = list(parts[2].parameters())
    optimizer = torch.optim.AdamW([one for one in model.parameters() if not any(one is other for other in rest)], lr=0.01)
    if knows_all:
        optimizer.add_param_group({"params": rest, "lr": 0.02})
    with offload.initialize(model, optimizer, offload.Config(**fields)) as engine:
        for part in parts:
            part.requires_grad_(False)
        losses = _train_on(engine, model, 0, 1)
        for step, part in enumerate(parts, 1):
            part.requires_grad_(True)
            if part is parts[2] and not knows_all:
                engine.optimizer.add_param_group({"params": rest, "lr": 0.02})
            if place()[0] == 0:
                with torch.no_grad():
                    model(input_ids=byte_batches(1)[0])
            losses += _train_on(engine, model, step, step + 1)
        parts[0].requires_grad_(False)
        losses += _train_on(engine, model, 4, 6)
        return {"losses": losses, "weights": digest(engine.state_dict()), "steps": engine.stats()["steps"]}


def load_frozen(fields: dict[str, Any], folder: str) -> dict[str, Any]:
    """A block is trained, frozen and saved; in a model where it is frozen from the start the load gives it its states. Then it
    is trained again."""
    found: dict[str, Any] = {}
    for run in ("on", "loaded"):
        model = llama(layers=2)
        block = model.model.layers[0]
        block.requires_grad_(run == "on")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with offload.initialize(model, optimizer, offload.Config(**fields)) as engine:
            if run == "on":
                _train_on(engine, model, 0, 2)
                block.requires_grad_(False)
                _train_on(engine, model, 2, 3)
                engine.save_checkpoint(folder)
            else:
                engine.load_checkpoint(folder)
            losses = _train_on(engine, model, 3, 4)
            block.requires_grad_(True)
            losses += _train_on(engine, model, 4, 6)
            found[run] = {"losses": losses, "weights": digest(engine.state_dict()), "steps": engine.stats()["steps"]}
    return found
