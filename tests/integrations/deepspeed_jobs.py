# SPDX-License-Identifier: Apache-2.0
"""What two ranks do with `offload.deepspeed`. Every function runs on both; arguments and results are JSON."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offload
import offload.deepspeed as deepspeed
from offload.planning.route import Memory

from .conftest import CONFIG, small


def settle() -> None:
    """Called in each process before its first job."""
    for handler in deepspeed.logger.handlers:  # it logs to stdout, as DeepSpeed's; answers go there
        handler.setStream(sys.stderr)


def _config(**keys: Any) -> dict[str, Any]:
    return CONFIG | {"train_batch_size": 2} | keys


def tags(folder: str, validation: str) -> list[str]:
    """Each rank names a tag of its own."""
    engine = deepspeed.initialize(model=small(), config=_config(checkpoint={"tag_validation": validation}))[0]
    try:
        engine.save_checkpoint(folder, tag=f"rank-{dist.get_rank()}")
    finally:
        engine.destroy()
    return sorted(one.name for one in Path(folder).iterdir())


def init_block() -> list[float]:
    """initialize and training inside the block in which the model was built."""
    torch.manual_seed(0)
    with deepspeed.zero.Init():
        engine = deepspeed.initialize(model=small(), config=_config(zero_optimization={"stage": 3}))[0]
        losses = []
        for _ in range(2):
            loss = engine(torch.ones(1, 4)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.destroy()
    return losses


def first_ranks_values() -> dict[str, Any]:
    """Of a model that each rank initialises otherwise, one parameter on rank 0 alone."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    with deepspeed.zero.Init():
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        with torch.no_grad():
            model[0].weight.fill_(1.0 + rank)
    with deepspeed.zero.GatheredParameters(model[2].weight, modifier_rank=0):
        if rank == 0:
            torch.nn.init.constant_(model[2].weight, 5.0)
    with deepspeed.zero.GatheredParameters(model[2].bias, modifier_rank=1):
        if rank == 1:
            torch.nn.init.constant_(model[2].bias, 6.0)
    with deepspeed.zero.GatheredParameters(model[2].bias):
        assert model[2].bias.tolist() == [6.0, 6.0]
    model[1].running_mean.fill_(rank + 2.0)
    engine = deepspeed.initialize(model=model, config=_config(zero_optimization={"stage": 3}))[0]
    shown = {name: value.tolist() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return shown


def values(stage: int) -> list[Any]:
    """From weights drawn differently: what is read and set is the same on both."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    engine = deepspeed.initialize(model=model, config=_config(zero_optimization={"stage": stage}))[0]
    weight, shown = model[0].weight, []
    for step in range(2):
        loss = engine(torch.full((1, 4), 1.0 + step + dist.get_rank())).square().mean()
        engine.backward(loss)
        gradient = deepspeed.utils.safe_get_full_grad(weight)
        assert gradient is not None
        shown.append(gradient.tolist())
        deepspeed.utils.safe_set_full_grad(weight, gradient * 0.5)
        again = deepspeed.utils.safe_get_full_grad(weight)
        assert again is not None and torch.equal(again, gradient * 0.5)
        engine.step()
    value, moment = torch.arange(20.0).reshape(5, 4), deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert moment is not None and moment.any()
    share = deepspeed.utils.safe_get_local_fp32_param(weight)
    assert share is not None and share.numel() == 10
    deepspeed.utils.safe_set_local_fp32_param(weight, torch.full((10,), float(dist.get_rank())))
    assert deepspeed.utils.safe_get_full_fp32_param(weight).flatten().tolist() == [0.0] * 10 + [1.0] * 10
    deepspeed.utils.safe_set_full_fp32_param(weight, value)
    deepspeed.utils.safe_set_full_optimizer_state(weight, value, "exp_avg_sq")
    assert torch.equal(deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg_sq"), value)
    shown += [moment.tolist(), engine.module_state_dict()["0.weight"].tolist(), engine(torch.ones(1, 4)).tolist()]
    engine.destroy()
    return shown


def kept(folder: str) -> dict[str, Any]:
    """What one rank reads of small parameters without a block, by moment; and that of a larger one it is refused."""
    shown: dict[str, Any] = {}
    sections = {"stage": 3, "stage3_param_persistence_threshold": 40}
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 12), torch.nn.Linear(12, 3))
    config = _config(zero_optimization=sections | {"offload_optimizer": {"device": "cpu"}})
    engine = deepspeed.initialize(model=torch.nn.Sequential(*map(offload.unit, model)), config=config)[0]
    layers = list(engine.module)

    def note(moment: str) -> None:
        alone = layers[0].weight.tolist() if dist.get_rank() else None  # the other rank asks for nothing
        with deepspeed.zero.GatheredParameters(layers[0].weight):
            gathered = layers[0].weight.tolist()
        shown[moment] = [alone in (None, gathered), gathered]

    note("beginning")
    for step in range(2):
        engine.backward(engine(torch.full((1, 4), 1.0 + step + dist.get_rank())).square().mean())
        engine.step()
        note(f"step {step}")
        if step == 0:
            engine.save_checkpoint(folder, tag="0")
    engine.load_checkpoint(folder, tag="0")
    note("loaded")
    try:
        layers[1].weight.sum()
        shown["larger"] = "read"
    except offload.errors.ParameterAccessError as error:
        shown["larger"] = str(error)
    engine.destroy()
    return shown


def drawn(seed: int, differs: bool) -> list[list[float]]:
    """What comes after a model was built in `zero.Init`, and after one that was built as ever."""
    found = []
    for block in (deepspeed.zero.Init(), nullcontext()):
        torch.manual_seed(seed + (dist.get_rank() if differs else 0))
        with block:
            torch.nn.Linear(8, 8)
        found.append(torch.randn(3).tolist())
    return found


def watched(deferred: bool, writer: int | None) -> str:
    """What is said of a write by one rank, inside `GatheredParameters` without a `modifier_rank`."""
    config = _config(zero_optimization={"stage": 3, "enable_sanity_checks": True})
    with deepspeed.zero.Init(config_dict_or_path=config) if deferred else nullcontext():
        layer = torch.nn.Linear(4, 2)
    engine = deepspeed.initialize(model=layer, config=config)[0] if not deferred else None
    try:
        with deepspeed.zero.GatheredParameters([layer.weight]), torch.no_grad():
            if dist.get_rank() == writer:
                layer.weight.add_(1.0)
    except RuntimeError as error:
        return str(error)
    finally:
        if engine is not None:
            engine.destroy()
    return ""


def sums(stage: int, said: str | None) -> list[float]:
    """Both ranks have the same data: the mean of three micro-batches, as gradients are summed."""
    torch.manual_seed(0)
    types = {"data_types": {"grad_accum_dtype": said}} if said else {}
    keys = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 3} | types
    layer = torch.nn.Linear(16, 1, bias=False)
    engine = deepspeed.initialize(model=layer, config=_config(train_batch_size=6, **keys))[0]
    for index in range(3):
        generator = torch.Generator().manual_seed(index)
        engine.backward(engine(torch.randn(1, 16, generator=generator).bfloat16()).sum(), scale_wrt_gas=False)
        if index < 2:
            engine.step()
    found = deepspeed.utils.safe_get_full_grad(layer.weight)
    assert found is not None
    engine.step()
    engine.destroy()
    return list(found.flatten().tolist())


def summed() -> bool:
    norms = []
    for keys in ({"gradient_allreduce_op": "sum"}, {}):
        engine = deepspeed.initialize(model=small(), config=_config(gradient_clipping=0.0, **keys))[0]
        loss = engine(torch.full((1, 4), 1.0 + dist.get_rank())).square().mean()
        engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm() or 0.0)
        engine.destroy()
    return norms[0] == 2 * norms[1]


def partly_on_device(ratio: float) -> dict[str, Any]:
    """Of eight blocks, how many are updated on the device; and what training with that gives."""
    before = os.environ.get("OFFLOAD_ACCELERATOR")
    os.environ["OFFLOAD_ACCELERATOR"] = "deferred"  # whose device memory is not the host's
    try:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
        states = {"device": "cpu", "ratio": ratio}
        sections = {"stage": 3, "offload_optimizer": states, "offload_param": {"device": "cpu"}}
        engine = deepspeed.initialize(model=model, config=_config(zero_optimization=sections, bf16={"enabled": True}))[0]
        losses = []
        for _ in range(3):
            inputs = torch.ones(1, 512, dtype=torch.bfloat16).to(engine.device)
            loss = engine(inputs * (1 + dist.get_rank())).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        routes = [unit.route for unit in engine.offload_engine._parts.units if unit.parameters]
        values = {name: value.sum().item() for name, value in engine.module_state_dict().items()}
        engine.destroy()
    finally:
        os.environ.pop("OFFLOAD_ACCELERATOR") if before is None else os.environ.update(OFFLOAD_ACCELERATOR=before)
    return {"on device": [route.update_in is Memory.DEVICE for route in routes], "losses": losses, "values": values}


def without_frozen(folder: str, stage: int) -> list[Any]:
    """Saved with `exclude_frozen_parameters`; loaded into an engine whose frozen values are others."""
    sections = {"stage": stage, "offload_optimizer": {"device": "cpu"}}

    def started(value: float) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        model[0].requires_grad_(False).weight.data.fill_(value)
        return deepspeed.initialize(model=model, config=_config(zero_optimization=sections))[0]

    first = started(1.0)
    first.backward(first(torch.ones(1, 4)).square().mean())
    first.step()
    first.save_checkpoint(folder, exclude_frozen_parameters=True)
    saved = {name: value.tolist() for name, value in first.module_state_dict().items()}
    first.destroy()
    shown: list[Any] = []
    for only in (False, True):
        other = started(2.0)
        other.load_checkpoint(folder, load_module_only=only)
        loaded = {name: value.tolist() for name, value in other.module_state_dict().items()}
        other.destroy()
        assert all(one == 2.0 for row in loaded.pop("0.weight") for one in row)
        shown.append(loaded == {name: value for name, value in saved.items() if name != "0.weight"})
    held = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    return [*shown, sorted(held)]


def unused(stage: int) -> list[Any]:
    """Of two layers the second is used in step 1 alone, there by rank 1 alone."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    engine = deepspeed.initialize(model=_Either(model), config=_config(zero_optimization={"stage": stage}))[0]
    shown = []
    for step in range(4):
        engine.backward(engine(torch.ones(1, 2), both=step == 1 and dist.get_rank() == 1))
        engine.step()
        shown.append(engine.module_state_dict()["parts.1.weight"].tolist())
    engine.destroy()
    return shown


class _Either(torch.nn.Module):
    def __init__(self, parts: torch.nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        first = self.parts[0](x)
        return (self.parts[1](first) if both else first).square().mean()
