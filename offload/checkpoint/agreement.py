# SPDX-License-Identifier: Apache-2.0
"""What the ranks tell one another where they save, load or export together, so that none waits for one that has given up."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from offload.errors import EngineFailedError, OffloadError
from offload.ranks.group import Group
from offload.ranks.next_transfers import MeetingPoint

T = TypeVar("T")


class Agreement:
    """Every method is collective. One rank tells itself."""

    def __init__(self, ranks: Group, meet: Callable[[MeetingPoint, Callable[[], Any]], Any]) -> None:
        """`meet`: `Meeting.meet`, or what does more around it."""
        self._ranks, self._meet = ranks, meet

    def exchange(self, point: MeetingPoint, said: object) -> list[Any]:
        """What every rank says, as JSON, by rank."""
        data = json.dumps(said).encode()
        return [json.loads(one) for one in self._meet(point, lambda: self._ranks.exchange_bytes(data))]

    def on_all(
        self,
        point: MeetingPoint,
        act: Callable[[], T],
        facts: Callable[[T], Any],
        refusal: Callable[[int, str, str], OffloadError],
    ) -> tuple[T, list[Any]]:
        """What `act` gives here, and the `facts` (JSON) of what it gives everywhere, by rank. Where it fails on one rank, the
        others raise `refusal(rank, class of the failure, what it says)`."""
        failure: Exception | None = None
        said: dict[str, Any] = {}
        try:
            result = act()
            said["facts"] = facts(result)
        except EngineFailedError:
            raise  # the others know
        except Exception as error:
            failure = error
            said["failure"] = type(error).__name__, str(error)
        answers = self.exchange(point, said)
        if failure is not None:
            raise failure
        for index, answer in enumerate(answers):
            if "failure" in answer:
                raise refusal(index, *answer["failure"])
        return result, [answer["facts"] for answer in answers]

    def by_first(self, point: MeetingPoint, act: Callable[[], T], refusal: Callable[[str], OffloadError]) -> T:
        """What `act` gives on the first rank (JSON). Where it fails there, the others raise `refusal(what it says)`."""
        failure: Exception | None = None
        said: dict[str, Any] = {}
        if self._ranks.index == 0:
            try:
                said["result"] = act()
            except Exception as error:
                failure = error
                said["failure"] = f"{type(error).__name__}: {error}"
        answer = self.exchange(point, said)[0]
        if failure is not None:
            raise failure
        if "failure" in answer:
            raise refusal(answer["failure"])
        result: T = answer["result"]
        return result
