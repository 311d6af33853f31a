# SPDX-License-Identifier: Apache-2.0
"""What the search found: each program failed once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .judging import Stage
from .programs import Model, Program, Setup, op

FOUND = {
    "what a backward that was cut short left was taken over in inference mode, and nothing added to it": Program(
        Model(width=3),
        (Setup(states="cpu", accelerator="deferred", prefetch=0),),
        (op("backward", fails_at=0, error="Boom"), op("evaluate", batch=0, inference=True), op("train", batch=0)),
    ),
    "a step that is refused leaves gradients of what is in no group: the search's own account of that": Program(
        Model(width=3, blocks=("half", "lora")),
        (Setup(accelerator="deferred"),),
        (
            op("closure", batch=1),
            op("freeze_one", parameter=10, frozen=False),
            op("train", batch=4),
            op("add_group"),
            op("train", batch=1),
        ),
    ),
    "units of a backward that an exception cut short had the room of what came next": Program(
        Model(width=3, blocks=("attention",), dtype="bf16"),
        (Setup("cpu", accelerator="deferred", prefetch=0, on_device=1.0),),
        (op("backward", fails_at=0, error="Boom"), op("state_dict")),
    ),
    "what stayed on the device took the room of what a checkpoint of several units computes again": Program(
        Model(width=7, blocks=("large", "mlp", "parametrised"), tie="blocks", reused=True, frozen=(1,), checkpointing="plain"),
        (Setup("cpu", "cpu", "deferred", memory=3.0, on_device=1.5, joined=100, marked="mixes", expects=2),),
        (op("slope", batch=3), op("train", batch=0)),
    ),
    "a kept forward's recomputations were forgotten as others trained: a mean over ranks was of two parts": Program(
        Model(blocks=("lora",), tie="leaf", reused=True, checkpointing="reentrant"),
        (Setup(),),
        (
            op("closure", batch=1, fails=False),
            op("forward", batch=4),
            op("train", batch=3, micro=2),
            op("backward", sync=True, how="engine", retain=False, which=0),
            op("train", batch=3, micro=2),
        ),
        ranks=2,
    ),
    "clipping outlived the gradients that it was for": Program(
        Model(),
        (Setup(),),
        (
            op("forward", batch=0),
            op("backward"),
            op("clip", max_norm=0.05),
            op("zero_grad"),
            op("train", batch=3),
        ),
    ),
    "clipping where there is no gradient was kept for the next one": Program(
        Model(),
        (Setup(),),
        (op("clip", max_norm=0.5), op("train", batch=1)),
    ),
    "clipping gradients that a step had consumed said 0": Program(
        Model(),
        (Setup(),),
        (
            op("forward", batch=0),
            op("backward"),
            op("step"),
            op("clip", max_norm=0.05),
        ),
    ),
    "gradients of some parameters alone could not be asked for": Program(
        Model(blocks=("mlp", "odd")),
        (Setup("cpu", "cpu", "deferred"),),
        (
            op("backward_of_some", batch=1, part=1),
            op("step"),
            op("zero_grad"),
            op("train", batch=0),
        ),
    ),
    "running statistics and bf16 weights are nothing that torch can compute with": Program(
        Model(blocks=("normed",), dtype="bf16"),
        (Setup("nvme", "nvme"),),
        (op("train", batch=0), op("evaluate", batch=1)),
    ),
    "a graph from before a write was torch's to refuse": Program(
        Model(),
        (Setup("nvme", "nvme"),),
        (op("forward", batch=0), op("write", parameter=2), op("backward")),
    ),
    "load_state_dict did not reach what a backward that was refused had left in memory": Program(
        Model(),
        (Setup("cpu", "cpu", "deferred"),),
        (
            op("forward", batch=4),
            op("backward"),
            op("step"),
            op("backward_of_some", batch=4, part=0),
            op("load_state_dict", seed=3),
        ),
    ),
    "a scalar parameter kept an engine from being made anew": Program(
        Model(blocks=("experts", "mlp", "odd"), frozen=(1,), dtype="bf16"),
        (Setup(),),
        (op("add_group"), op("train", batch=4)),
    ),
    "one chunk alone had no second buffer to be widened into": Program(
        Model(blocks=("lora",), tie="leaf", frozen=(0,), dtype="bf16"),
        (Setup(states="nvme"),),
        (op("train", batch=4, micro=2),),
    ),
    "what a backward that was refused had ranks reduce was added to the next one": Program(
        Model(width=3, blocks=("experts",)),
        (Setup(prefetch=0),),
        (
            op("closure", batch=1),
            op("partial_backward", block=0, batch=0),
            op("train", batch=0),
        ),
        ranks=2,
    ),
    "a frozen layer without gradients stayed in memory with its parent": Program(
        Model(width=3, blocks=("lora",), frozen=(0,)),
        (Setup("cpu", accelerator="deferred", prefetch=0, on_device=1.0),),
        (op("partial_backward", block=0, batch=0), op("forward", batch=0)),
    ),
    "what was still on its way of a dropped gradient was added to the next one": Program(
        Model(blocks=("mlp", "mlp", "mlp")),
        (Setup(states="cpu", accelerator="deferred"),),
        (
            op("backward_of_some", batch=1, part=2),
            op("partial_backward", batch=0, block=2),
            op("zero_grad", to_none=False),
            op("step"),
            op("forward", batch=1),
        ),
    ),
    "what a step had consumed was not seen to be there any more when parameters were added": Program(
        Model(width=3, blocks=("mlp", "mlp", "mlp"), frozen=(0,)),
        (Setup(prefetch=0),),
        (
            op("backward_of_some", batch=0, part=2),
            op("add_group"),
            op("step"),
            op("train", batch=0),
        ),
    ),
    "the second backward through a graph from before a step was not refused as such": Program(
        Model(width=3),
        (Setup(prefetch=0),),
        (
            op("forward", batch=0),
            op("train", batch=0),
            op("backward", retain=True),
            op("backward", fails_at=0),
        ),
    ),
    "the reference of a closure that is refused in its forward kept what that closure had dropped": Program(
        Model(width=3, frozen=(0,)),
        (Setup(prefetch=0, on_device=1.0),),
        (
            op("backward", fails_at=0, error="Boom"),
            op("add_group"),
            op("closure", batch=0, fails=False),
            op("clip", max_norm=0.05),
        ),
    ),
    "the only checkpoint was damaged, and nobody removed it": Program(
        Model(width=3),
        (Setup(states="nvme", prefetch=0, drive="failing", fault="flip", failing=1),),
        (op("save", number=0, beside=False), op("resume", setup=0)),
    ),
    "a frozen weight of two blocks left with the root's own gradients": Program(
        Model(width=7, blocks=("experts", "lora"), tie="blocks", reused=True, frozen=(0,)),
        (Setup(),),
        (
            op("forward", batch=2),
            op("train", batch=1),
            op("forward", batch=5, fails_at=1),
            op("write", parameter=16),
            op("write", parameter=14, fails=True),
            op("closure", batch=2),
        ),
        ranks=2,
    ),
    "what a forward used that Ctrl-C ended had the room of a state_dict": Program(
        Model(width=3, blocks=("large", "mlp", "large")),
        (Setup(parameters="nvme", prefetch=0, on_device=1.0),),
        (op("export"), op("backward", interrupt=624)),
    ),
    "a function of the second order had the room of the next unit": Program(
        Model(width=3, blocks=("lora", "half"), tie="blocks", reused=True, frozen=(1,), dtype="bf16", state_format="8bit"),
        (Setup("cpu", accelerator="deferred", prefetch=0, on_device=1.5),),
        (op("penalty", batch=2),),
    ),
    "a load of two ranks gave no states to what is frozen now": Program(
        Model(width=7, blocks=("lora", "parametrised"), frozen=(1,), groups=2, all_in_groups=True),
        (Setup("nvme", accelerator="deferred"),),
        (
            op("freeze", frozen=False, block=1),
            op("train", batch=4),
            op("save", number=0),
            op("anew", how="state", setup=0),
            op("load", number=0),
            op("train", batch=0),
        ),
        ranks=2,
    ),
    "what attention reads of a child that it does not call came with the root, beside what stays on the device": Program(
        Model(width=3, blocks=("attention",)),
        (Setup("nvme", accelerator="deferred", prefetch=0, on_device=1.0),),
        (op("slope", batch=0), op("train", batch=1)),
    ),
    "what was frozen between its forward and its backward lost the gradient of the backward before": Program(
        Model(width=3, blocks=("mlp", "normed"), reused=True, all_in_groups=True, max_grad_norm=0.3),
        (Setup("cpu", "nvme", "deferred", prefetch=0, memory=1.0),),
        (
            op("forward", batch=1),
            op("penalty", batch=3),
            op("freeze", frozen=True, block=1),
            op("backward", how="loss", retain=True, which=-1, sync=True),
            op("clip", max_norm=0.5),
        ),
    ),
    "a gradient that was to be spilled had a part on the device that needed the buffer it left": Program(
        Model(
            width=7, blocks=("large", "dropping"), reused=True, frozen=(0,), dtype="bf16", state_format="8bit", optimizer="adam"
        ),
        (Setup("nvme", "nvme", "deferred", update="auto", prefetch=2, on_device=1.5, seed=149, speculates=True),),
        (
            op("forward", batch=3),
            op("backward", which=0, how="loss", sync=False),
            op("backward", error="KeyboardInterrupt", fails_at=2),
        ),
    ),
    "an interrupt as no_sync began left room for sums that nobody could use": Program(
        Model(
            width=3, blocks=("experts",), tie="blocks", reused=True, checkpointing="reentrant", dtype="fp16", optimizer="adam"
        ),
        (Setup(accelerator="deferred", update="auto", on_device=1.5, seed=262, speculates=True),),
        (
            op("forward", batch=5),
            op("backward", sync=False, retain=True, how="loss", which=-1, interrupt=54),
            op("train", micro=2, batch=2),
        ),
    ),
    "an interrupt as a forward looked for what is newly trained left it unfound": Program(
        Model(width=3, frozen=(0,), checkpointing="plain", groups=2, all_in_groups=True, max_grad_norm=1000000.0),
        (Setup("nvme", "nvme", update="auto", seed=152, drive="slow", speculates=True),),
        (
            op("freeze", frozen=False, block=2),
            op("state_dict"),
            op("backward", sync=True, how="engine", retain=False, which=-1, interrupt=170),
            op("backward_of_some", batch=4, part=0),
            op("step"),
        ),
    ),
    "what a scaled backward that was cut short had brought was refused as unscaled by the next torch.autograd.grad": Program(
        Model(blocks=("large", "normed"), tie="leaf", frozen=(0,), dtype="fp16", optimizer="sgd", groups=2),
        (Setup(),),
        (op("backward", fails_at=0, error="Boom"), op("slope", batch=5), op("step"), op("zero_grad"), op("train", batch=1)),
    ),
    "clipping left out the gradient of what was added to the optimizer after its forward": Program(
        Model(width=3, blocks=("parametrised", "parametrised"), frozen=(1,), checkpointing="plain", optimizer="adam", groups=2),
        (Setup("cpu"),),
        (
            op("freeze", block=1, frozen=False),
            op("forward", batch=2),
            op("backward"),
            op("add_group"),
            op("clip", max_norm=0.5),
        ),
    ),
    "the failure of a save that ran beside was told by close": Program(
        Model(blocks=("mlp", "experts", "large"), tie="blocks", frozen=(1,), checkpointing="reentrant", optimizer="sgd"),
        (
            Setup("nvme", "nvme", "deferred", prefetch=0, on_device=1.5, drive="failing", fault="flip", failing=2),
            Setup("cpu", "cpu"),
        ),
        (op("save", beside=True, number=1), op("anew", setup=0, how="scratch"), op("train", batch=1)),
    ),
    "the search took an engine for a step further that was as far as rounding from PyTorch": Program(
        Model(width=3, blocks=("large", "large", "attention")),
        (Setup(prefetch=0),),
        (op("train", batch=0), op("train", batch=0), op("train", batch=0, interrupt=1)),
    ),
    "a drive that failed behind an error of the script's was told as EngineFailedError": Program(
        Model(width=7, blocks=("half", "normed"), tie="blocks", reused=True, optimizer="lion", all_in_groups=True),
        (
            Setup(
                "cpu",
                "nvme",
                update="backward",
                seed=21,
                drive="failing",
                strikes="records",
                failing=9,
                joined=100,
                marked="second",
                expects=2,
                room=1.5,
            ),
        ),
        (op("train", batch=5, micro=3), op("forward", batch=2, fails_at=0, error="Boom"), op("slope", batch=3)),
    ),
    "an update on the host was undone that had copied its gradient from the device": Program(
        Model(blocks=("dropping", "attention", "normed"), checkpointing="plain", max_grad_norm=0.3),
        (Setup("nvme", "nvme", "deferred", update="backward", on_device=1.0, seed=651, speculates=True, expects=2),),
        (op("train", batch=5, micro=1), op("evaluate", inference=False, batch=1)),
    ),
    "a forward that was interrupted had given states to what was newly trained": Program(
        Model(blocks=("mlp", "lora", "attention"), dtype="bf16", state_format="bf16", optimizer="lion", max_grad_norm=0.3),
        (Setup("cpu", update="backward", prefetch=0, memory=1.4, seed=384, speculates=True),),
        (op("add_group"), op("forward", batch=3, interrupt=1718)),
    ),
    "a unit that was to be fetched ahead kept all buffers when the drive failed: the next one found none": Program(
        Model(blocks=("parametrised", "large", "large")),
        (Setup("nvme", "nvme", "deferred", drive="failing", failing=59, marked="outlet", room=1.5),),
        (
            op("state_dict"),
            op("step"),
            op("write", parameter=9, fails=False),
            op("forward", batch=0, fails_at=2, error="Boom"),
            op("backward", fails_at=1, error="Boom"),
            op("train", batch=0, micro=1),
        ),
    ),
    "a record that is damaged on the drive is so at every look at it: the search's own account of that": Program(
        Model(
            width=3,
            blocks=("large", "half"),
            tie="blocks",
            checkpointing="reentrant",
            dtype="bf16",
            state_format="bf16",
            optimizer="lion",
            all_in_groups=True,
            max_grad_norm=0.3,
        ),
        (
            Setup(
                *("cpu", "nvme", "deferred", "backward"),
                prefetch=0,
                seed=192,
                drive="failing",
                fault="flip",
                strikes="records",
                failing=7,
                joined=1 << 20,
                marked="mixes",
                expects=2,
                room=6.0,
            ),
        ),
        (
            op("step", interrupt=1942),
            op("penalty", batch=4),
            op("save", beside=True, number=2),
            op("forward", batch=0),
            op("export"),
            op("state_dict"),
        ),
    ),
} | {
    f"one backward through what is used twice found no room, {where}": Program(
        Model(width=3, blocks=blocks, reused=True, tie=tie, checkpointing="reentrant"),
        (setup,),
        (op("train", batch=0), op("train", batch=1)),
    )
    for where, setup, blocks, tie in (
        ("in memory", Setup(prefetch=0, on_device=1.0), ("normed", "half"), ""),
        ("all on the device", Setup(accelerator="deferred", prefetch=0, on_device=1.0), ("half", "large"), "leaf"),
        ("cpu", Setup("cpu", "cpu", "deferred", prefetch=0, on_device=1.0, memory=1.0), ("half", "large"), "blocks"),
    )
}

FOUND |= {
    f"a gradient of what is in no group, which {told}": Program(
        Model(blocks=("lora",), frozen=(0,)),
        (Setup("cpu", "cpu", accelerator),),
        (op("freeze_one", parameter=5, frozen=False), op("train", batch=0), *then, op("train", batch=1)),
    )
    for accelerator in ("cpu", "deferred")
    for told, then in (
        (f"zero_grad leaves, {accelerator}", (op("zero_grad"), op("add_group"))),
        (
            f"zero_grad leaves where it is frozen, {accelerator}",
            (op("freeze_one", parameter=5, frozen=True), op("zero_grad"), op("add_group")),
        ),
        (f"is added before zero_grad, {accelerator}", (op("add_group"), op("zero_grad"))),
        (f"is added before it becomes zeros, {accelerator}", (op("add_group"), op("zero_grad", to_none=False))),
    )
}


BEGUN_ANEW = {
    f"begun anew by {how}, {when} {failing} transfers": Program(
        Model(width=3, blocks=("mlp",), state_format="8bit", dtype="bf16"),
        (before, replace(after, marked="mixes")),
        (op("train", batch=0), op("save", number=0), op("anew", how=how, setup=1), op("train", batch=1), op("train", batch=2)),
    )
    for how in ("scratch", "state", "checkpoint")
    for failing in (2, 9, 20, 28)
    for when, before, after in (
        ("the drive fails after", Setup("nvme", "nvme"), Setup("nvme", "nvme", drive="failing", failing=failing)),
        ("it failed before, after", Setup("nvme", "nvme", drive="failing", failing=20 + failing), Setup("nvme", "nvme")),
    )
}
"""The search's own account of what the script began with, where a drive fails as it begins."""


@pytest.mark.parametrize("found", BEGUN_ANEW)
def test_begun_anew(stage: Stage, found: str) -> None:
    verdict = stage.verdict(BEGUN_ANEW[found])
    assert verdict is None, f"{verdict}\n\nThe program:\n\n{BEGUN_ANEW[found]!r}"


@pytest.mark.parametrize("found", FOUND)
def test_found(stage: Stage, found: str) -> None:
    verdict = stage.verdict(FOUND[found])
    assert verdict is None, f"{verdict}\n\nThe program:\n\n{FOUND[found]!r}"
