# SPDX-License-Identifier: Apache-2.0
"""How a process of a program ended, and where the next one goes on."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.ranks.crew import Crew

from .jobs import DIED, OVER
from .playing import Facts, Outcome
from .programs import Program


def went_on(program: Program, place: Path, segment: int, start: int, crew: Crew) -> int:
    """At which operation the next processes go on; negative: nowhere. `crew`: those of this segment, who play it.

    Where one died each has got elsewhere: all that came behind the first end is forgotten ("gone"), and the next processes
    begin at the last checkpoint, behind the operation that the last one died in ("back").
    """
    answers = crew.answers()
    for rank, answer in enumerate(answers):
        assert "result" in answer or answer.get("ended") == DIED, f"rank {rank}: {answer}\n{crew.said(rank)}"
    if all("result" in answer for answer in answers):
        return int(answers[0]["result"])
    files = [place / f"drawn-{rank}-{segment:03}.pt" for rank in range(program.ranks)]
    found = [torch.load(file, weights_only=False) for file in files]
    ends = [one["outcomes"][-1] for one in found]
    wrong = [end["says"] for end in ends if end["is"] == "wrong"]
    assert not wrong, f"where another rank ended: {wrong[0]}"
    assert any(end.get("struck") for end in ends), f"nothing struck, and yet: {ends}"
    last_position = len(program.script) - 1
    died_at = [
        answer["result"] - 1 if answer.get("result", OVER) >= 0 else min(start + len(one["outcomes"]) - 2, last_position)
        for one, answer in zip(found, answers, strict=True)
    ]
    first, last = min(died_at), max(died_at)
    facts = _together([one["carried"]["facts"] for one in found])
    carried = {"facts": facts, "excused": any(one["carried"]["excused"] for one in found)}
    for file, one in zip(files, found, strict=True):
        # The first outcome is that of the operation before `start`; before the first operation, of the start itself.
        kept: list[Outcome] = one["outcomes"][: first + 1 - start]
        torch.save({"outcomes": kept + [{"is": "gone"}] * (last - first), "carried": carried}, file)
    return last + 1


def _together(facts: list[Facts]) -> Facts:
    """What the ranks knew: of a save that one rank saw the end of both know that it is there."""
    together = facts[0]
    together.ended = True
    for other in facts[1:]:
        for number, positions in other.saved.items():
            known = together.saved.get(number, [])
            if number in other.sure and number not in together.sure:
                together.saved[number] = positions
            elif number not in together.sure or number in other.sure:
                together.saved[number] = sorted({*known, *positions})
        together.sure |= other.sure
        together.saved_added |= other.saved_added
    return together
