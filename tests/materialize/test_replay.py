# SPDX-License-Identifier: Apache-2.0
"""Replay: any order, any subset, any number of times, with no more work or memory than the values need."""

from __future__ import annotations

import copy
import gc
import textwrap
import threading

import pytest
import torch
from torch import Tensor, nn

from offload.deferred_init import deferred_init as module_under_test
from offload.deferred_init.deferred_init import deferred_init, held_values, is_deferred, materialize
from offload.deferred_init.recording import GeneratorState, Operation
from offload.deferred_init.replay import needed_operations
from tests.materialize.ordinary import bits_equal, built_deferred
from tests.warm import WarmProcess


def _operations(tensor: Tensor) -> list[Operation]:
    value = module_under_test._registry.value(tensor)
    assert value is not None
    return needed_operations([value])


def _layers() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(6)))
    for layer in model:
        nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(layer.bias)
    return model


def test_any_order_and_any_number_of_times() -> None:
    torch.manual_seed(0)
    expected = [parameter.detach() for parameter in _layers().parameters()]
    parameters = list(built_deferred(_layers).parameters())
    backwards = materialize(parameters[::-1])[::-1]
    singly = [materialize([parameter])[0] for parameter in parameters]
    again = materialize(parameters)
    for value, *others in zip(expected, backwards, singly, again, strict=True):
        assert all(bits_equal(value, other) for other in others)
    again[0].fill_(7)
    assert bits_equal(materialize(parameters[:1])[0], expected[0])


def _count(kind: type) -> int:
    return sum(type(thing) is kind for thing in gc.get_objects())


@pytest.fixture
def swept() -> None:
    """No recording of an earlier test is alive."""
    gc.collect()
    with deferred_init():
        pass


@pytest.mark.usefixtures("swept")
def test_overwritten_initialisers_are_neither_run_nor_kept() -> None:
    before = _count(GeneratorState)
    model = built_deferred(_layers)
    for layer in model:
        assert [operation.function for operation in _operations(layer.weight)] == [torch.ops.aten.normal_.default]
        assert len(_operations(layer.bias)) == 1
    # No garbage collection here: reference counting alone must have freed the states of the overwritten ones.
    assert _count(GeneratorState) - before == len(model)


def test_a_partly_overwritten_value_is_kept() -> None:
    with deferred_init():
        weight = nn.Parameter(torch.randn(4, 4))
        weight.data[1].zero_()
    assert [operation.function.overloadpacket for operation in _operations(weight)] == [
        torch.ops.aten.randn,
        torch.ops.aten.zero_,
    ]


@pytest.mark.usefixtures("swept")
def test_the_recording_dies_with_the_tensors() -> None:
    before = _count(Operation)
    model = built_deferred(_layers)
    assert _count(Operation) > before
    del model
    gc.collect()
    with deferred_init():
        pass  # forgets what is gone
    assert _count(Operation) == before


def test_undefined_memory_is_the_same_each_time() -> None:
    with deferred_init():
        weight = nn.Parameter(torch.empty(64, 64))
    first, second = materialize([weight])[0].clone(), materialize([weight])[0]
    assert bits_equal(first, second)


def test_shared_memory_stays_shared_and_parts_are_compact() -> None:
    with deferred_init():
        whole = torch.randn(6, 4)
        upper, both = nn.Parameter(whole[:3]), nn.Parameter(whole)
    half, full = materialize([upper, both])
    half.zero_()
    assert full[:3].abs().sum() == 0
    (alone,) = materialize([upper])
    assert alone.untyped_storage().nbytes() == alone.nbytes
    same = materialize([upper, upper])
    assert same[0].data_ptr() == same[1].data_ptr()


def test_replay_under_other_settings_gives_the_same_values() -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4)
        model.register_parameter("ratio", nn.Parameter(torch.arange(5) / 3))
        return model

    torch.manual_seed(0)
    expected = list(build().parameters())
    deferred = list(built_deferred(build).parameters())
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu"), torch.inference_mode():
            values = materialize(deferred)
    finally:
        torch.set_default_dtype(torch.float32)
    for value, ordinary in zip(values, expected, strict=True):
        assert value.dtype == torch.float32 and not value.is_inference() and bits_equal(value, ordinary)


def test_materialize_inside_the_block() -> None:
    torch.manual_seed(0)
    expected = torch.randn(5)
    torch.manual_seed(0)
    with deferred_init():
        weight = torch.randn(5)
        (value,) = materialize([weight])
        assert is_deferred(weight) and not is_deferred(value)
    assert bits_equal(value, expected)


def test_blocks_nest_and_leave_torch_as_it_was_after_an_exception() -> None:
    hooks = torch.nn.modules.module
    with pytest.raises(ZeroDivisionError), deferred_init(), deferred_init():
        nn.Linear(2, 2)
        _ = 1 / 0
    assert torch.ones(2).sum().item() == 2
    assert not nn.Linear(2, 2).weight.is_meta
    assert not hooks._global_parameter_registration_hooks
    assert not hooks._global_buffer_registration_hooks
    assert not hooks._global_module_registration_hooks
    with deferred_init():
        with deferred_init():
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert is_deferred(inner.weight) and is_deferred(outer.weight)


def test_other_threads_build_as_always() -> None:
    built: list[nn.Module] = []
    with deferred_init():
        thread = threading.Thread(target=lambda: built.append(nn.BatchNorm1d(3)))
        thread.start()
        thread.join()
    assert not built[0].weight.is_meta and not built[0].running_mean.is_meta


def test_parameters_can_be_swapped_for_real_ones() -> None:
    model = built_deferred(lambda: nn.Linear(3, 3))
    weight = model.weight
    real = nn.Parameter(materialize([weight])[0])
    torch.utils.swap_tensors(weight, real)
    assert model.weight is weight and not weight.is_meta and not is_deferred(weight)


def test_buffers_of_a_copied_model() -> None:
    with deferred_init():
        model = nn.BatchNorm1d(3)
        copied = copy.deepcopy(model)
    held = held_values([copied])
    assert torch.equal(held[id(copied.running_var)], torch.ones(3)) and is_deferred(copied.weight)
    assert torch.equal(materialize([copied.weight])[0], torch.ones(3))


@pytest.mark.parametrize("numel", [3, 5000], ids=["remembered by value", "remembered itself"])
def test_a_real_tensor_is_copied_deeply(numel: int) -> None:
    table = torch.arange(float(numel))
    with deferred_init():
        copied, again = copy.deepcopy([table, table[1:]])
        layer = nn.Linear(numel, 1, bias=False)
        with torch.no_grad():
            layer.weight.copy_(copied)
    assert torch.equal(copied, table) and torch.equal(again, table[1:])
    assert again.untyped_storage().data_ptr() == copied.untyped_storage().data_ptr() != table.untyped_storage().data_ptr()
    assert torch.equal(materialize([layer.weight])[0][0], table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_moved_to_the_meta_device_has_no_value(dtype: torch.dtype) -> None:
    """Older versions of Hugging Face's build their models so, and initialise there what files bring."""
    state = torch.get_rng_state()
    with deferred_init():
        kept = torch.zeros(3)
        moved = kept.to("meta") if dtype is kept.dtype else kept.to(device=torch.device("meta"), dtype=dtype)
        moved.normal_()
    assert moved.is_meta and not is_deferred(moved) and torch.equal(torch.get_rng_state(), state)
    assert moved.dtype is dtype and torch.equal(materialize([kept])[0], torch.zeros(3))


def test_memory_of_recording_and_of_replay() -> None:
    # 101 M parameters, 404 MB, of which the largest has 34 MB.
    script = """
        import torch
        from torch import nn
        from offload.deferred_init.deferred_init import deferred_init, materialize
        torch.set_num_threads(2)
        from tests.acceptance.worker import resident_nbytes
        peak = lambda: resident_nbytes("VmHWM")
        build = lambda width, count: nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
        with deferred_init():
            small = build(8, 2)
        materialize(list(small.parameters()))
        base = peak()
        with deferred_init():
            model = build(2900, 12)
        recorded = peak() - base
        total = 0.0
        for parameter in model.parameters():
            total += materialize([parameter])[0].sum().item()
        print(recorded, peak() - base, sum(p.nbytes for p in model.parameters()))
    """
    done = WarmProcess.run(["-c", textwrap.dedent(script)], 120)
    assert done.returncode == 0, done.stderr
    recorded, replayed, model_nbytes = map(int, done.stdout.split())
    assert model_nbytes > 400e6
    assert recorded < 0.2 * model_nbytes
    assert replayed < 0.25 * model_nbytes
