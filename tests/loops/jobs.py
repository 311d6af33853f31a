# SPDX-License-Identifier: Apache-2.0
"""What the processes do: play one side of a program, or the part of it until it goes on in another process."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.small_sizes import small_for_good

from .engines import DrawnPlayer, MemoryPlayer
from .models import device
from .plain import PlainPlayer
from .playing import Outcome, Player
from .programs import Program

HANG_SECONDS = int(os.environ.get("OFFLOAD_LOOPS_SECONDS", "300"))
OVER, ENDED = -1, -2
DIED = 3
"""The exit code of a process whose script an interrupt ended, or a failure, or another rank's."""


def settle() -> None:
    """Called in each process before its first job."""
    small_for_good(least_unit_numel=0)  # the models here are tiny, and are to have units all the same
    if device().type == "cuda":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _outcomes(folder: Path, side: str, of_rank: int) -> list[Outcome]:
    found: list[Outcome] = []
    for file in sorted(folder.glob(f"{side}-{of_rank}-*.pt")):
        found += torch.load(file, weights_only=False)["outcomes"]
    return found


def _watched(program: Program) -> None:
    """A loop that hangs ends its process, and says which it was and where it stands."""
    print(program, file=sys.stderr, flush=True)
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)


def play_drawn(program: dict[str, Any], folder: str, segment: int, start: int) -> int:
    """From operation `start` on. Returns where the next process goes on, or OVER, or ENDED where something is wrong."""
    drawn, place = Program.of_json(program), Path(folder)
    _watched(drawn)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    outcomes: list[Outcome] = []
    player = DrawnPlayer(drawn, place, (rank(),))
    reached = ENDED
    try:
        if segment > 0:
            carried = torch.load(place / f"drawn-{rank()}-{segment - 1:03}.pt", weights_only=False)["carried"]
            player.facts, player.drives.is_excused = carried["facts"], carried["excused"]
        if start == 0:
            outcomes.append(player.begin())
        else:
            outcomes.append(_gone_on(player, start))
        reached = _play_on(player, start, outcomes)
        if reached == OVER:
            outcomes.append(player.finish())
    except BaseException as error:
        outcome = player.died_of(error)
        outcomes.append(outcome or {"is": "wrong", "says": "".join(traceback.format_exception(error))})
        reached = ENDED
    player._patch.undo()
    carried = {"facts": player.facts, "excused": player.drives.is_excused or player.drives.has_struck}
    torch.save({"outcomes": outcomes, "carried": carried}, place / f"drawn-{rank()}-{segment:03}.pt")
    if outcomes[-1]["is"] == "died":
        if player.facts.setup.accelerator == "deferred":
            os._exit(DIED)  # what has not been done there nobody does while the process waits for it
        raise SystemExit(DIED)  # as the script does; the others find out
    faulthandler.cancel_dump_traceback_later()
    return reached


def _gone_on(player: DrawnPlayer, start: int) -> Outcome:
    """In a new process behind the operation before `start`: a "resume", or one that ended the last processes."""
    player.position = start - 1
    operation = player.program.script[start - 1]
    died = player.facts.ended
    value: dict[str, Any] = {}
    if died:
        player._faultless(lambda: value.update(player.come_back()))
    else:
        player._faultless(lambda: value.update(player.resumed(operation.values["setup"])))
    return {"is": "back" if died else "ok", "value": value}


def _play_on(player: DrawnPlayer, start: int, outcomes: list[Outcome]) -> int:
    for position in range(start, len(player.program.script)):
        player.position = position
        outcome = player.take(player.program.script[position])
        if outcome["is"] == "moved":
            return position + 1
        outcomes.append(outcome)
        if outcome["is"] in ("wrong", "died"):
            return ENDED
    return OVER


def play_reference(program: dict[str, Any], folder: str, side: str) -> None:
    """The side "memory" or "plain", following what came of the drawn one."""
    drawn, place = Program.of_json(program), Path(folder)
    _watched(drawn)
    follow = _outcomes(place, "drawn", rank())[1:]
    own = place / side
    own.mkdir(exist_ok=True)
    outcomes: list[Outcome] = []
    try:
        player: Player
        if side == "memory":
            player = MemoryPlayer(drawn, own, (rank(),), follow)
        else:
            player = PlainPlayer(drawn, own, tuple(range(drawn.ranks)), follow)
        player._began(0)
        outcomes.append({"is": "ok", "value": {}})
        for position, operation in enumerate(drawn.script):
            player.position = position
            outcomes.append(player.follows(operation, follow[position]))
        outcomes.append(player.finish())
    except BaseException as error:
        outcomes.append({"is": "wrong", "says": "".join(traceback.format_exception(error))})
    torch.save({"outcomes": outcomes}, place / f"{side}-{rank()}-000.pt")
    faulthandler.cancel_dump_traceback_later()
