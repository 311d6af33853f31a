# SPDX-License-Identifier: Apache-2.0
"""The states of torch's random generators: what a resumed run draws next is what the uninterrupted one would have."""

from __future__ import annotations

from collections.abc import Mapping

import torch

CPU, DEVICE = "cpu", "device"


def take_random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """uint8 states of the CPU's default generator and, on CUDA, of the device's."""
    states = {CPU: torch.get_rng_state()}
    if device.type == "cuda":
        states[DEVICE] = torch.cuda.get_rng_state(device)
    return states


def put_random_state(device: torch.device, states: Mapping[str, torch.Tensor]) -> None:
    """Set what `take_random_state` gave. A device's state is left out where this run's device is another kind."""
    torch.set_rng_state(states[CPU])
    if DEVICE in states and device.type == "cuda":
        torch.cuda.set_rng_state(states[DEVICE], device)
