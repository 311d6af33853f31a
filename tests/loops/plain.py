# SPDX-License-Identifier: Apache-2.0
"""The oracle: the same script in plain PyTorch, on one process, which plays all ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.acceptance.runs import WEIGHT_ATOL

from .models import Subject, device
from .playing import COUNTS, Outcome, Player
from .programs import Program, Setup


class PlainPlayer(Player):
    """What the engine refused is left out here. Where the engine settled or failed, this side goes where it went."""

    def __init__(self, program: Program, folder: Path, ranks: tuple[int, ...], follow: list[Outcome]) -> None:
        super().__init__(program, folder, ranks, follow)
        self._snapshots: dict[int, Any] = {}
        self._clip_once: float | None = None
        self._norm = 0.0
        self._step_count = 0

    def start(self, setup: Setup, state: Mapping[str, torch.Tensor] | None = None) -> None:
        self.model, self.optimizer = self.made(state)
        self._give_states_to_added()
        self.optimizer.register_step_pre_hook(self._before_step)
        self._clip_once, self._step_count = None, 0

    def built(self) -> Subject:
        return super().built().to(device())

    def end(self) -> None:
        pass

    def do_add_group(self) -> Any:
        super().do_add_group()
        self._give_states_to_added()
        return {}

    def _give_states_to_added(self) -> None:
        """Where torch does not."""
        if isinstance(self.optimizer, torch.optim.Adagrad) and not adagrad_gives_states_late():
            for parameter in self._held():
                if not self.optimizer.state[parameter]:
                    self.optimizer.state[parameter] = {"step": torch.tensor(0.0), "sum": torch.zeros_like(parameter)}

    def backward(self, losses: list[torch.Tensor], how: str, **keywords: Any) -> None:
        total = losses[0] if len(losses) == 1 else sum(loss / len(losses) for loss in losses)
        assert isinstance(total, torch.Tensor)
        total.backward(**keywords)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def _gradients(self) -> list[torch.Tensor]:
        return [one.grad for one in self._held() if one.grad is not None]

    def _held(self) -> list[nn.Parameter]:
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._step_count += 1
        limit = self._clip_once if self._clip_once is not None else self.program.model.max_grad_norm
        self._clip_once = None
        self._norm = self._measured()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(self._held(), limit, foreach=False)

    def do_closure(self, batch: int, fails: bool = False) -> Any:
        """`torch.optim`'s own order: the closure first, then a step."""
        plain_step = self.optimizer.step

        def step(closure: Any) -> None:
            closure()
            plain_step()

        self.optimizer.step = step
        try:
            return super().do_closure(batch, fails)
        finally:
            del self.optimizer.step

    def do_zero_grad(self, to_none: bool = True) -> Any:
        self._clip_once = None
        return super().do_zero_grad(to_none)

    def _measured(self) -> float:
        gradients = self._gradients()
        return float(torch.nn.utils.get_total_norm([one.double() for one in gradients], foreach=False)) if gradients else 0.0

    def norm_of_step(self) -> float:
        return self._norm

    def clip(self, max_norm: float) -> float:
        """The engine clips the gradients of the coming step, as its documentation says, not those that are there now."""
        norm = self._measured()
        self._clip_once = max_norm if norm else None
        return norm

    def gathered(self, parameters: list[nn.Parameter]) -> Any:
        return contextlib.nullcontext()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.model.load_state_dict(dict(state))

    def save(self, number: int, beside: bool) -> None:
        content = (self.model.state_dict(), self.optimizer.state_dict(), _random_state(), self._step_count)
        self._snapshots[self.position] = copy.deepcopy(content)

    def wait(self) -> None:
        pass

    def load(self, number: int | None) -> int | None:
        assert self.follow is not None
        return self.load_at(self.follow[self.position]["value"]["position"])

    def load_at(self, position: int | None) -> int | None:
        if position is not None:
            weights, optimizer, random, self._step_count = copy.deepcopy(self._snapshots[position])
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(optimizer)
            _set_random_state(random)
            self.optimizer.zero_grad()
            self._clip_once = None
        return position

    def whole_state(self) -> dict[str, torch.Tensor]:
        return self.state() | {COUNTS: torch.tensor([self._step_count, 0, 1.0], dtype=torch.float64)}

    def agrees(self, own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
        return all(torch.allclose(own[name], other[name], rtol=0.0, atol=4 * WEIGHT_ATOL) for name in own)  # as `judging`

    def exported(self) -> dict[str, torch.Tensor]:
        return self.state()


@functools.cache
def adagrad_gives_states_late() -> bool:
    """Whether torch's Adagrad gives states to what is added to it, or only to what it is made of."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.Adagrad(parameters[:1])
    optimizer.add_param_group({"params": parameters[1:]})
    parameters[1].grad = torch.zeros(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def _random_state() -> list[torch.Tensor]:
    """Of the host's generator, and of the device's where batches lie on one."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device().type == "cuda" else [])]


def _set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
