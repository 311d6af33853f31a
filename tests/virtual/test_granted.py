# SPDX-License-Identifier: Apache-2.0
"""What a forecast grants of a device's memory: what the model leaves of it, found in few steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers

import offload
from offload.cli.plans.forecast import Work, forecast, forecast_granted
from tests.virtual.test_forecast import MACHINE, UNIFIED, WORK, adamw, tiny


def test_what_the_model_leaves_of_a_device_is_granted() -> None:
    """Unless the configuration names a budget, or there is no such memory."""

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            model = tiny()
        return model, adamw(model)

    config = offload.Config(dtype="bf16", nvme=".", cpu_memory=2**30)
    plain = forecast(*make(), config, MACHINE, WORK)
    found, granted = forecast_granted(make, config, MACHINE, WORK)
    assert found.fits and found.step_seconds <= plain.step_seconds and found.moved_nbytes["h2d"] <= plain.moved_nbytes["h2d"]
    assert granted.device_memory is not None and found.own_nbytes < int(granted.device_memory) < MACHINE.device_nbytes
    assert forecast_granted(make, config, UNIFIED, WORK)[1] is config
    named = dataclasses.replace(config, device_memory=2**30)
    assert forecast_granted(make, named, MACHINE, WORK) == (forecast(*make(), named, MACHINE, WORK), named)


def small() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """With blocks that the device holds some of."""
    shape = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=2, vocab_size=512
    )
    shape.use_cache = False
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(shape).to(torch.bfloat16)
    return model, adamw(model)


@pytest.mark.parametrize("mebibytes", [20, 25])
def test_what_does_not_fit_ends_where_that_is_seen_and_less_is_granted(mebibytes: int) -> None:
    """The answer is that of one whole run with what was granted, and no run without a grant is needed."""
    machine = dataclasses.replace(MACHINE, device_nbytes=mebibytes * 2**20)
    config = offload.Config(dtype="bf16", nvme=".", cpu_memory=2**33, state_format="split")
    work, runs = Work(batch=2, sequence=64, micro_batches=4, checkpointing=True), list[list[int]]()

    def count(model: torch.nn.Module, _: Any) -> None:
        if all(parameter.grad is None for parameter in model.parameters()):
            runs[-1].append(0)
        runs[-1][-1] += model.training and torch.is_grad_enabled()

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = small()
        model.register_forward_pre_hook(count)
        runs.append([])
        return model, optimizer

    found, granted = forecast_granted(make, config, machine, work)
    assert runs == [[1], [3, 3, 4]], "of what does not fit what shows it, then all of what does"
    assert found.fits and found.peak_nbytes["device"] <= machine.device_nbytes
    assert found == forecast(*small(), granted, machine, work)


def test_places_that_leave_a_part_of_what_is_granted_are_not_tried_again_and_again() -> None:
    """All lies on the device and is a little too much with what the model takes: some of it goes elsewhere."""
    work = Work(batch=8, sequence=512, micro_batches=4, checkpointing=True)
    config = offload.Config(dtype="bf16", nvme=".", cpu_memory=2**33, state_format="split")
    large = forecast_granted(small, config, MACHINE, work)[0]
    assert large.placement["optimizer_states"] == "device" and large.own_nbytes > large.peak_nbytes["device"] / 2
    machine = dataclasses.replace(MACHINE, device_nbytes=large.peak_nbytes["device"] - 2**18)
    found, granted = forecast_granted(small, config, machine, work)
    assert granted.device_memory is not None and found.fits
    assert any(line["tier"] == "device" and "states" in line["purpose"] for line in found.planned)
    assert found.step_seconds < forecast(*small(), config, machine, work).step_seconds
