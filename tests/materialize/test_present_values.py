# SPDX-License-Identifier: Apache-2.0
"""Values asked for in the middle of a recording: right after every kind of write, and not computed again and again."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from offload.deferred_init.deferred_init import deferred_init, materialize
from tests.materialize.ordinary import bits_equal
from tests.small_sizes import small


@pytest.fixture(params=[0, 2**20], ids=["remember", "repeat"])
def threshold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, remembered_nbytes=request.param)


def _random_program(seed: int) -> tuple[list[float], list[Tensor]]:
    """Writes and questions in a seeded order; what the questions answered, and the tensors at the end."""
    choose = torch.Generator().manual_seed(seed)
    tensors = [nn.Parameter(torch.randn(6)) for _ in range(3)]
    answers: list[float] = []

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=choose))

    with torch.no_grad():
        for _ in range(40):
            one, other = tensors[pick(3)], tensors[pick(3)]
            kind = pick(9)
            if kind == 0:
                one.normal_()
            elif kind == 1:
                one[pick(6)].fill_(0.5)
            elif kind == 2:
                one.add_(other, alpha=0.5)
            elif kind == 3:
                one.copy_(torch.where(one > other, one, torch.rand(6)))
            elif kind == 4:
                tensors[pick(3)] = nn.Parameter(one * 0.5 + other)
            elif kind == 5:
                one[1:4].uniform_()
            else:
                answers.append(one.sum().item() if kind < 8 else float((one > other).any()))
    return answers, tensors


@pytest.mark.usefixtures("threshold")
@pytest.mark.parametrize("seed", range(25))
def test_answers_are_those_of_ordinary_construction(seed: int) -> None:
    torch.manual_seed(seed)
    expected, ordinary = _random_program(seed)
    torch.manual_seed(seed)
    with deferred_init():
        answers, deferred = _random_program(seed)
    assert answers == expected
    for value, other in zip(materialize(deferred), ordinary, strict=True):
        assert bits_equal(value, other)


def test_questions_in_a_loop_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, remembered_nbytes=0)
    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU]) as seen, deferred_init():
        nn.init.trunc_normal_(nn.Parameter(torch.empty(3000)), std=1.0, a=-0.5, b=0.5)
    counts = Counter(event.name for event in seen.events())
    questions = counts["aten::is_nonzero"]  # one after each draw
    assert questions >= 10
    assert questions < counts["aten::lt"] <= 4 * questions, "what is asked is recorded and computed once, none of it again"


def test_memory_remembered_is_that_of_the_last_question(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, remembered_nbytes=0)
    held: list[int] = []

    def held_nbytes() -> int:
        storages = (one for one in gc.get_objects() if isinstance(one, torch.UntypedStorage))
        return sum(one.nbytes() for one in storages if one.device.type == "cpu")

    before = held_nbytes()
    with deferred_init():
        kept = [nn.Parameter(torch.empty(1000)) for _ in range(20)]
        for parameter in kept:
            nn.init.trunc_normal_(parameter, std=0.02)
            held.append(held_nbytes() - before)
    assert 0 < max(held) < 3 * 4000
