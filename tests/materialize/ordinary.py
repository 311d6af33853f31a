# SPDX-License-Identifier: Apache-2.0
"""The oracle of these tests: the same model, built the ordinary way from the same seed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from offload.deferred_init.deferred_init import deferred_init, is_deferred, materialize


def built_deferred(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with deferred_init():
        return build()


def assert_like_ordinary(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Builds twice; compares parameters, buffers and the generator bit for bit. Returns the deferred model."""
    torch.manual_seed(seed)
    ordinary = build()
    ordinary_state = torch.get_rng_state()
    deferred = built_deferred(build, seed)
    state = torch.get_rng_state()
    assert torch.equal(state, ordinary_state), "the generator is not where ordinary construction leaves it"

    expected, found = dict(ordinary.named_parameters()), dict(deferred.named_parameters())
    assert list(found) == list(expected)
    for fqn in sorted(found, key=lambda name: hash((seed, name))):  # in an order of no meaning
        assert_same_parameter(fqn, found[fqn], expected[fqn])
    assert_same_buffers(deferred, ordinary)
    assert torch.equal(torch.get_rng_state(), state), "replay moved the generator"
    return deferred


def assert_same_parameter(fqn: str, deferred: nn.Parameter, ordinary: nn.Parameter) -> None:
    assert type(deferred) is nn.Parameter and deferred.is_meta and is_deferred(deferred), fqn
    assert deferred.requires_grad == ordinary.requires_grad, fqn
    (value,) = materialize([deferred])
    assert value.device.type == "cpu" and not value.requires_grad, fqn
    assert (value.dtype, value.shape, value.stride()) == (ordinary.dtype, ordinary.shape, ordinary.stride()), fqn
    assert bits_equal(value, ordinary), fqn


def assert_same_buffers(deferred: nn.Module, ordinary: nn.Module) -> None:
    expected, found = dict(ordinary.named_buffers()), dict(deferred.named_buffers())
    assert list(found) == list(expected)
    for fqn, buffer in found.items():
        assert buffer.device.type == "cpu" and buffer.dtype == expected[fqn].dtype, fqn
        assert bits_equal(buffer, expected[fqn]), fqn


def bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.detach().contiguous().reshape(-1).view(torch.uint8).equal(other.detach().contiguous().reshape(-1).view(torch.uint8))
    )
