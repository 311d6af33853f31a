# SPDX-License-Identifier: Apache-2.0
"""What cannot be replayed is refused, by the name of the parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from offload.deferred_init.deferred_init import deferred_init, is_deferred, materialize, name_parameters
from offload.errors import InitializerError, UsageError


class Inner(nn.Module):
    def __init__(self, initialise: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        if initialise is not None:
            initialise(self.weight)


class Outer(nn.Module):
    def __init__(self, in_init: Callable[[Tensor], object] | None, in_apply: Callable[[Tensor], object] | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner(), Inner(in_init)])
        if in_apply is not None:
            in_apply(self.blocks[1].weight)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "numpy": lambda weight: weight.detach().numpy(),
    "asarray": lambda weight: np.asarray(weight.data),
    "data_ptr": lambda weight: weight.data_ptr(),
    "dlpack": lambda weight: torch.from_dlpack(weight.detach()),
    "computed": lambda weight: (weight.detach() * 2 + 1).numpy(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_memory_given_away_while_the_tree_is_built_names_the_fqn(name: str) -> None:
    with (
        pytest.raises(InitializerError, match=r"parameter 'blocks\.1\.weight' of Outer .*outside of deferred_init"),
        deferred_init(),
    ):
        Outer(None, REFUSED[name])


def test_memory_given_away_in_a_constructor_names_the_modules() -> None:
    with (
        pytest.raises(InitializerError, match=r"parameter 'weight' of Inner \(while building Outer > Inner\)"),
        deferred_init(),
    ):
        Outer(lambda weight: weight.detach().numpy(), None)


def test_reading_a_tensor_without_value() -> None:
    with pytest.raises(InitializerError, match=r"'blocks\.1\.weight'.*no value"), deferred_init():
        Outer(None, lambda weight: weight.data.copy_(torch.empty(4, 3, device="meta")))


def test_a_constant_that_changed_since() -> None:
    source = torch.randn(300, 300)
    with deferred_init():
        module = nn.Linear(300, 300)
        module.weight.data.copy_(source)
    source.mul_(2)
    with pytest.raises(InitializerError, match=r"parameter 'weight' cannot be initialised: .*written to after"):
        materialize([module.bias, module.weight])
    assert materialize([module.bias])[0].shape == (300,)


def test_a_small_constant_may_change() -> None:
    source = torch.ones(3)
    with deferred_init():
        module = nn.Linear(3, 1)
        module.bias.data.copy_(source[:1])
    source.zero_()
    assert materialize([module.bias])[0].item() == 1


def test_change_in_place_after_the_block() -> None:
    with deferred_init():
        model = Outer(None, None)
    nn.init.zeros_(model.blocks[0].weight)
    with pytest.raises(InitializerError, match=r"'blocks\.0\.weight' was changed in place outside"):
        materialize([model.blocks[0].weight])
    assert materialize([model.blocks[1].weight])[0].shape == (4, 3)


def test_names_follow_a_later_wrapper() -> None:
    with deferred_init():
        model = Outer(None, None)
    wrapper = nn.Module()
    wrapper.inner = model
    name_parameters(wrapper)
    nn.init.zeros_(model.blocks[0].weight)
    with pytest.raises(InitializerError, match=r"'inner\.blocks\.0\.weight'"):
        materialize([model.blocks[0].weight])


def test_copies_and_replacements_on_meta_have_no_initialiser() -> None:
    with deferred_init():
        model = Outer(None, None)
    copied = copy.deepcopy(model)
    assert not is_deferred(copied.blocks[0].weight)
    with pytest.raises(InitializerError, match="no recorded initialiser"):
        materialize([copied.blocks[0].weight])
    model.half().float()  # two roundings of which nothing is known any more
    assert not is_deferred(model.blocks[0].weight)
    with pytest.raises(InitializerError, match=r"'blocks\.0\.weight'.*no recorded initialiser"):
        materialize([model.blocks[0].weight])


def test_a_meta_model_from_elsewhere() -> None:
    model = nn.Linear(2, 2, device="meta")
    name_parameters(model)
    with pytest.raises(InitializerError, match=r"parameter 'bias' is on the meta device"):
        materialize([model.bias])


def test_a_buffer_that_is_part_of_a_parameter() -> None:
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("part", self.weight.data[:2])

    with (
        pytest.raises(InitializerError, match=r"shares memory with parameter 'weight' of Overlapping"),
        deferred_init(),
    ):
        _kept = Overlapping()


def test_another_default_device() -> None:
    with torch.device("meta"), pytest.raises(UsageError, match="default device is meta"), deferred_init():
        pass


def test_an_operation_that_is_wrong_gives_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="must match the size"), deferred_init():
        Outer(None, lambda weight: weight.data.copy_(torch.ones(7)))


def test_a_check_on_values_raises_as_in_ordinary_construction() -> None:
    with pytest.raises(torch.linalg.LinAlgError, match="positive-definite"), deferred_init():
        nn.Parameter(torch.linalg.cholesky(-torch.eye(3)))


def test_an_operation_that_fails_on_the_values_names_the_parameter() -> None:
    with deferred_init():
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(3).index_select(0, torch.tensor([7])))
    with pytest.raises(InitializerError, match=r"parameter 'weight' cannot be initialised: .*index.* failed"):
        materialize([module.weight])
