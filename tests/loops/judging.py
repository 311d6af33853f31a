# SPDX-License-Identifier: Apache-2.0
"""Runs a program on all sides, and says what is wrong with it, if anything is."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.acceptance.runs import LOSS_RTOL, WEIGHT_ATOL, assert_close, assert_same_bits
from tests.ranks.crew import Crew

from .ends import went_on
from .jobs import HANG_SECONDS
from .playing import Outcome
from .programs import Model, Program

# Against plain PyTorch, where both compute in fp32: a step differs by rounding in the last bit of a square root and of the
# norm, about lr * 2**-23 = 1e-9, which the loop feeds back through its gradients. The acceptance tests allow 2e-6 for 20 steps
# (tests/acceptance/runs.py); these have up to 60 operations of one step or two. The smallest fault (one weight decay that
# is missing moves a weight by about 1e-4) is still ten times larger.
ATOL = 4 * WEIGHT_ATOL
RTOL = 4 * LOSS_RTOL


def has_oracle(model: Model) -> bool:
    """Whether plain PyTorch computes the same: in fp32. Other dtypes are compared between engines, to the bit."""
    return model.dtype is None and model.state_format == "fp32" and "half" not in model.blocks


class Stage:
    """The processes that loops run in, kept from one to the next: two alone, two in one group. Who died is replaced.

    `device`: what they train on. On "cuda" every setup's accelerator is that GPU, which both ranks of a pair share."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self._folder = folder
        # The workspace is what makes cuBLAS deterministic; it is read when the first handle is made.
        self._variables = {"LOOPS_DEVICE": device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        self._crews: dict[str, Crew] = {}
        self._count = 0

    def _crew(self, name: str) -> Crew:
        crew = self._crews.get(name)
        if crew is None or any(process.poll() is not None for process in crew.processes):
            if crew is not None:
                crew.close()
            self._count += 1
            place = self._folder / f"crew-{self._count}"
            place.mkdir()
            size = 2 if "pair" in name else 1
            self._crews[name] = Crew(size, place, seconds=HANG_SECONDS + 30, jobs="tests.loops.jobs", **self._variables)
        return self._crews[name]

    def close(self) -> None:
        for crew in self._crews.values():
            crew.close()

    def verdict(self, program: Program) -> str | None:
        """What is wrong with the program; None: nothing."""
        place = Path(tempfile.mkdtemp(dir=self._folder, prefix="loop-"))
        try:
            self._run(program, place)
            self._judge(program, place)
        except AssertionError as error:
            return f"{error}\n{self._where(program, place)}"
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return None

    def _run(self, program: Program, place: Path) -> None:
        asked: dict[str, Any] = {"program": program.to_json(), "folder": str(place)}
        players = ["pair", "other pair"] if program.ranks == 2 else ["first", "second"]
        start, segment = 0, 0
        while start >= 0:
            crew = self._crew(players[segment % len(players)])
            crew.begin("play_drawn", **asked, segment=segment, start=start)
            start = went_on(program, place, segment, start, crew)
            segment += 1
        _assert_right(program, "drawn", _played(place, "drawn", program))
        memory = self._crew(players[0])
        memory.begin("play_reference", **asked, side="memory")
        if has_oracle(program.model):
            self._crew("second").do("play_reference", **asked, side="plain")
        answers = memory.answers()
        assert all("result" in answer for answer in answers), f"in memory: {answers}"

    def _judge(self, program: Program, place: Path) -> None:
        drawn, memory = _played(place, "drawn", program), _played(place, "memory", program)
        _assert_right(program, "memory", memory)
        for rank, (ours, theirs) in enumerate(zip(drawn, memory, strict=True)):
            for position, (one, other) in enumerate(zip(ours, theirs, strict=True), -1):
                at = f"{_shown(program, position)} on rank {rank}, the engine as drawn and in memory"
                _compare(one, other, at, _assert_same_bits)
        _judge_ends(drawn[0][-1], memory[0][-1])
        if not has_oracle(program.model):
            return
        (plain,) = _played(place, "plain", program, ranks=1)
        _assert_right(program, "plain", [plain])
        for rank, ours in enumerate(drawn):
            for position, (one, other) in enumerate(zip(ours, plain, strict=True), -1):
                at = f"{_shown(program, position)} on rank {rank}, the engine and plain PyTorch"
                _compare(one, _of_rank(other, rank, program.ranks), at, _assert_close)

    def _where(self, program: Program, place: Path) -> str:
        names = [f"drawn-{rank}-*.pt" for rank in range(program.ranks)]
        lines = []
        for name in names:
            for file in sorted(place.glob(name)):
                outcomes = torch.load(file, weights_only=False, map_location="cpu")["outcomes"]
                lines.append(f"{file.name}: " + ", ".join(one["is"] for one in outcomes))
        return "\n".join(lines)


def _played(place: Path, side: str, program: Program, ranks: int | None = None) -> list[list[Outcome]]:
    """By rank, what came of the operations; before the first stands the start, behind the last the end."""
    found: list[list[Outcome]] = []
    for rank in range(ranks or program.ranks):
        found.append([])
        for file in sorted(place.glob(f"{side}-{rank}-*.pt")):
            found[-1] += torch.load(file, weights_only=False, map_location="cpu")["outcomes"]
    return found


def _shown(program: Program, position: int) -> str:
    if position < 0:
        return "the start"
    return f"{position}: {program.script[position]!r}" if position < len(program.script) else "the end"


def _assert_right(program: Program, side: str, played: list[list[Outcome]]) -> None:
    for rank, outcomes in enumerate(played):
        for position, outcome in enumerate(outcomes, -1):
            says = outcome.get("says", "")
            assert outcome["is"] != "wrong", f"{side}, rank {rank}, {_shown(program, position)}:\n{says}"
        assert len(outcomes) == len(program.script) + 2, f"{side}, rank {rank}: {len(outcomes)} outcomes"


def _of_rank(outcome: Outcome, rank: int, ranks: int) -> Outcome:
    """Plain PyTorch plays all ranks at once."""
    value = outcome.get("value")
    if isinstance(value, dict) and "losses" in value:
        return outcome | {"value": value | {"losses": value["losses"][rank::ranks]}}
    return outcome


def _compare(one: Outcome, other: Outcome, at: str, judge: Any) -> None:
    assert one["is"] == other["is"] and one.get("class") == (other.get("class") or one.get("class")), (
        f"{at}: {one['is']} {one.get('class', '')} is not {other['is']} {other.get('class', '')}"
    )
    if one["is"] == "settled":
        judge({"state": one["state"]}, {"state": other["state"]}, f"{at}: state after the interrupt")
    if one["is"] == "ok":
        judge(one["value"], other["value"], at)


def _assert_same_bits(ours: Any, other: Any, what: str) -> None:
    """Norms, losses and positions, and tensors. A norm that is NaN (of a step that is left out) is the same as another."""
    if isinstance(other, dict) and "state" in other:
        assert_same_bits(ours["state"], other["state"], what)
        ours, other = ({name: value for name, value in one.items() if name != "state"} for one in (ours, other))
    if isinstance(other, dict) and not any(isinstance(value, torch.Tensor) for value in other.values()):
        assert repr(ours) == repr(other), f"{what}: {ours} is not {other}"
        return
    assert_same_bits(ours, other, what)


def _assert_close(ours: Any, plain: Any, what: str) -> None:
    if isinstance(plain, dict) and "state" in plain:
        named = {
            name: value for name, value in plain["state"].items() if name in ours["state"]
        }  # an export names a tied one once
        assert_close(ours["state"], named, ATOL, what)
        ours, plain = ({name: value for name, value in one.items() if name != "state"} for one in (ours, plain))
    if isinstance(plain, dict) and set(plain) & {"losses", "norm"}:
        for name in plain:
            for one, two in zip(_numbers(ours[name]), _numbers(plain[name]), strict=True):
                assert abs(one - two) <= ATOL + RTOL * abs(two), f"{what}: {name} {one} is not {two}"
        return
    assert_close(ours, plain, ATOL, what)


def _numbers(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def _judge_ends(drawn: Outcome, memory: Outcome) -> None:
    assert not drawn["left"], f"left behind in the nvme folder: {drawn['left']}"
    for name, (position, contents) in drawn["kept"].items():
        expected_position, expected = memory["kept"][f"step-{position}"]
        assert expected_position == position
        _assert_same_contents(contents, expected, f"the checkpoint {name!r}, saved at {position}")


def _assert_same_contents(ours: dict[str, str], other: dict[str, str], what: str) -> None:
    assert set(ours) == set(other), f"{what} holds other things: {set(ours) ^ set(other)}"
    differing = [name for name in ours if ours[name] != other[name]]
    assert not differing, f"{what} differs from that in memory in {differing[:6]}"
