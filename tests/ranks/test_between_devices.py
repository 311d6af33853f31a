# SPDX-License-Identifier: Apache-2.0
"""Transfers between GPUs, which NCCL makes and gloo plays here: the same bits, and their order beside the user's own."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from offload.ranks.transport import Ranks

from .crew import Crew

FIELDS = {"stage": 3, "parameters": "cpu", "optimizer_states": "cpu", "dtype": "bf16", "max_grad_norm": 1.0}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_same_bits_as_over_the_host(pair: Crew, stage: int) -> None:
    """And a user's collectives inside `gathered` are in one order with the engine's."""
    fields = FIELDS | {"stage": stage, "parameters": "cpu" if stage == 3 else "device"}
    expected = pair.do("train", fields=fields)
    found = pair.do("between_devices", fields=fields, own="quiet")
    for one, other in zip(found, expected, strict=True):
        assert {name: one[name] for name in other} == other and one["said"] == [] and "reduce" in one["moved"]


def test_another_order_on_another_rank_is_said_once(pair: Crew) -> None:
    for one in pair.do("between_devices", fields=FIELDS, own="late"):
        (text,) = one["said"]
        assert "different orders" in text and "with engine.gathered(())" in text


def test_one_queue_of_the_gpu_takes_no_second_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so, and the other ranks learn that this one has no device for it."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    said: list[bytes] = []

    def exchange_bytes(data: bytes) -> list[bytes]:
        said.append(data)
        return [data, b"host/another"]

    ranks: Any = types.SimpleNamespace(exchange_bytes=exchange_bytes)
    with pytest.warns(RuntimeWarning, match="CUDA_DEVICE_MAX_CONNECTIONS=1"):
        Ranks.use_devices(ranks, torch.device("cuda", 0))
    assert said == [b""]


def test_ranks_that_share_a_gpu_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on three GPUs: those of the first two are told."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="0"))
    ranks: Any = types.SimpleNamespace(exchange_bytes=lambda data: [data, data, b"host/1", b"host/2"])
    with pytest.warns(RuntimeWarning, match="ranks 0, 1 share one GPU.*set_device"):
        Ranks.use_devices(ranks, torch.device("cuda", 0))
