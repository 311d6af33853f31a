"""What the search found: each program failed once."""

from __future__ import annotations

import pytest

from .judging import Stage
from .programs import Model, Program, Setup, op

FOUND = {
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
}


@pytest.mark.parametrize("found", FOUND)
def test_found(stage: Stage, found: str) -> None:
    verdict = stage.verdict(FOUND[found])
    assert verdict is None, f"{verdict}\n\nThe program:\n\n{FOUND[found]!r}"
