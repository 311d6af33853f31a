# SPDX-License-Identifier: Apache-2.0
"""How programs are drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from .models import BLOCKS
from .programs import Model, Operation, Program, Setup, op

PLACES = ("device", "cpu", "nvme")
FEWEST, MOST = 10, 60

_batches = st.integers(0, 5)
_blocks = st.integers(0, 2)
_ends = st.sampled_from(["Boom", "KeyboardInterrupt"])
_moments = st.integers(0, 5000) | st.integers(0, 200)


def _ops(name: str, **values: st.SearchStrategy[Any]) -> st.SearchStrategy[Operation]:
    return st.fixed_dictionaries(values).map(lambda drawn: op(name, **drawn))


def _interrupted(operation: st.SearchStrategy[Operation]) -> st.SearchStrategy[Operation]:
    return st.builds(lambda one, moment: op(one.name, interrupt=moment + 1, **one.values), operation, _moments)


_save = _ops("save", number=_blocks, beside=st.booleans())
_load = _ops("load", number=_blocks)
_train = _ops("train", batch=_batches, micro=st.sampled_from([1, 1, 2]))
_forward = _ops("forward", batch=_batches)
_backward = _ops(
    "backward",
    which=st.sampled_from([-1, -1, 0]),
    retain=st.sampled_from([False, False, False, True]),
    sync=st.sampled_from([True, True, True, False]),
    how=st.sampled_from(["loss", "engine"]),
)
_step, _zero = _ops("step"), _ops("zero_grad", to_none=st.sampled_from([True, True, True, False]))

# What every loop does is drawn often, what ends or breaks something seldom.
_often = [_train, _forward, _backward, _step, _zero, _train, _forward, _backward, _step, _zero]
_at_times = [
    _save,
    _load,
    _ops("wait"),
    _ops("evaluate", batch=_batches, inference=st.booleans()),
    _ops("generate", batch=_batches, count=st.integers(1, 3)),
    _ops("clip", max_norm=st.sampled_from([0.05, 0.5, 1e6])),
    _ops("rate", group=_blocks, rate=st.sampled_from([0.0, 1e-3, 2e-2])),
    _ops("freeze", block=_blocks, frozen=st.booleans()),
    _ops("read", parameter=st.integers(0, 20)),
    _ops("write", parameter=st.integers(0, 20), fails=st.booleans()),
    _ops("partial_backward", block=_blocks, batch=_batches),
    _ops("backward_of_some", batch=_batches, part=_blocks),
    _ops("penalty", batch=_batches),
    _ops("slope", batch=_batches),
    _ops("closure", batch=_batches, fails=st.booleans()),
    _ops("state_dict"),
    _ops("forward", batch=_batches, fails_at=_blocks, error=_ends),
    _ops("backward", fails_at=_blocks, error=_ends),
    _interrupted(_train),
    _interrupted(_forward),
    _interrupted(_backward),
    _interrupted(_step),
    _interrupted(_save),
    _interrupted(_load),
]
_seldom = [
    _ops("anew", how=st.sampled_from(["scratch", "state", "checkpoint"]), setup=st.integers(0, 1)),
    _ops("resume", setup=st.integers(0, 1)),
    _ops("export"),
    _ops("load_state_dict", seed=st.integers(0, 3)),
    _ops("add_group"),
]
_widely = [
    _ops("train", batch=_batches, micro=st.sampled_from([2, 3])),
    _ops("freeze_one", parameter=st.integers(0, 20), frozen=st.booleans()),
    _ops("crowd", room=st.sampled_from([None, 1.3, 2.0, 4.0])),
]
operations = st.one_of(st.builds(op, st.just("nothing")), *3 * _often, *_at_times, *_seldom)
_wide_operations = st.one_of(st.builds(op, st.just("nothing")), *3 * _often, *_at_times, *2 * _widely, *_seldom)


def _models(ranks: int) -> st.SearchStrategy[Model]:
    # Each rank has running statistics and random states of its own, and plain PyTorch plays both in one process.
    kinds = [kind for kind in BLOCKS if ranks == 1 or kind not in ("normed", "dropping")]
    numbers = st.sampled_from(
        [(None, "fp32", None)] * 6
        + [("bf16", "fp32", None), ("bf16", "split", None), ("bf16", "bf16", None), ("bf16", "8bit", None)]
        + [("fp16", "fp32", None), (None, "fp32", "skip")]
    )

    def made(numbers: tuple[Any, ...], blocks: tuple[str, ...], **rest: Any) -> Model:
        if numbers[1] != "fp32":  # needs bf16 parameters throughout; running statistics keep theirs in fp32
            blocks = tuple("mlp" if kind == "normed" else kind for kind in blocks)
        return Model(dtype=numbers[0], state_format=numbers[1], loss_scale=numbers[2], blocks=blocks, **rest)

    return st.builds(
        made,
        numbers,
        width=st.sampled_from([3, 4, 7]),
        blocks=st.lists(st.sampled_from(kinds), min_size=1, max_size=3).map(tuple),
        tie=st.sampled_from(["", "leaf", "blocks"]),
        reused=st.booleans(),
        frozen=st.sampled_from([(), (), (0,), (1,)]),
        checkpointing=st.sampled_from(["", "", "plain", "reentrant"]),
        optimizer=st.sampled_from(["adamw", "adamw", "adam", "sgd", "adagrad", "lion"]),
        groups=st.sampled_from([1, 2]),
        all_in_groups=st.booleans(),
        max_grad_norm=st.sampled_from([None, 0.3, 1e6]),
    )


def _wide_models(ranks: int) -> st.SearchStrategy[Model]:
    narrow = st.sampled_from([False, False, True])
    return st.builds(lambda model, narrow: replace(model, narrow_sums=narrow), _models(ranks), narrow)


_setups = st.builds(
    Setup,
    parameters=st.sampled_from(PLACES),
    states=st.sampled_from(PLACES),
    accelerator=st.sampled_from(["cpu", "deferred"]),
    update=st.sampled_from(["step", "auto", "backward"]),
    prefetch=st.integers(0, 2),
    memory=st.sampled_from([None, None, 1.0, 1.4, 3.0, 100.0]),
    on_device=st.sampled_from([None, None, 1.0, 1.5, 100.0]),
    seed=st.integers(0, 1000),
    drive=st.sampled_from(["", "", "slow", "failing"]),
    fault=st.sampled_from(["error", "full", "flip"]),
    strikes=st.sampled_from(["any", "parameters", "records", "gradients", "checkpoints", "sync"]),
    failing=st.integers(0, 20) | st.integers(0, 150),
    speculates=st.booleans(),
    joined=st.sampled_from((0, 0, 100, 1 << 20)),
)
_wide_setups = st.builds(
    lambda setup, values: replace(setup, **values),
    _setups,
    st.fixed_dictionaries(
        {
            "marked": st.sampled_from(["", "", "mixes", "second", "outlet", "inner"]),
            "expects": st.sampled_from([1, 1, 2, 3]),
            "room": st.sampled_from([None, 1.5, 3.0, 6.0, 1e6]),
        }
    ),
)


def programs(ranks: int = 1, *, widely: bool = False) -> st.SearchStrategy[Program]:
    """Programs of that many ranks. `widely`: also marked units, micro-batches that the script tells of, devices of a stated
    size, which something else fills, single parameters that are frozen, and narrow sums."""

    def settled(setup: Setup) -> Setup:
        if ranks > 1 and setup.fault == "flip" and setup.strikes in ("any", "checkpoints"):
            return replace(setup, strikes="records")  # to find one in a checkpoint takes loading it, on all ranks
        return setup

    def made(is_calm: bool, operations: list[Operation], **rest: Any) -> Program:
        """`is_calm`: nothing is interrupted; on several ranks each interrupt is the end of all processes."""
        played = [op(one.name, **one.values) if is_calm else one for one in operations]
        return Program(operations=tuple(played), ranks=ranks, **rest)

    drawn = st.builds(
        made,
        st.sampled_from([False, ranks > 1]),
        st.lists(_wide_operations if widely else operations, min_size=FEWEST, max_size=MOST),
        model=_wide_models(ranks) if widely else _models(ranks),
        setups=st.lists((_wide_setups if widely else _setups).map(settled), min_size=1, max_size=2).map(tuple),
    )
    return st.builds(_accumulating, drawn, st.sampled_from([False, False, True])) if widely else drawn


def _accumulating(program: Program, does: bool) -> Program:
    """If it `does`, every step has several micro-batches, beside a device where nothing lies for good."""
    if not does:
        return program
    operations = tuple(_of_several(one) for one in program.operations)
    return replace(program, operations=operations, setups=tuple(_beside_a_device(one) for one in program.setups))


def _of_several(operation: Operation) -> Operation:
    values = operation.values
    if operation.name == "train":
        values = values | {"micro": max(values["micro"], 2)}
    return op(operation.name, interrupt=operation.interrupt, **values)


def _beside_a_device(setup: Setup) -> Setup:
    parameters, states = (place if place != "device" else "cpu" for place in (setup.parameters, setup.states))
    room = setup.room if setup.room is not None or setup.on_device is not None else 6.0
    return replace(setup, parameters=parameters, states=states, accelerator="deferred", room=room)
