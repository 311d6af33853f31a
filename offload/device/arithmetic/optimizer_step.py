# SPDX-License-Identifier: Apache-2.0
"""The optimizer step on flat tensors: one call, any rule in any state format.

CPU tensors go through the native library (`offload_update`), Adam with fp32 states on CUDA tensors through a kernel of
`offload.device.arithmetic.compiled_kernels`, all else, and all where those are missing, through torch operations that give
the same bits (`offload.device.arithmetic.optimizer_step_torch`). On CPU tensors the work is over when the call
returns; on a device it is queued on the current stream. Any thread may call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload import _native
from offload.device.arithmetic import compiled_kernels
from offload.device.arithmetic.encoding import SCALE_GROUP
from offload.device.arithmetic.flat import DTYPE_CODES, check_flat, uses_native
from offload.device.arithmetic.optimizer_step_torch import update_torch
from offload.device.arithmetic.records import RecordFormat
from offload.device.arithmetic.rules import MOMENTS, Hyper, Rule
from offload.device.arithmetic.segment import Segment, StateFormat, scale_name
from offload.device.virtual.current import virtual_machine


def update(segments: Sequence[Segment]) -> None:
    """One step on every segment, in place. The formulas are those of torch.optim with foreach=False and its order of operations
    (see `offload_update` in `native/include/offload.h`)."""
    if (machine := virtual_machine()) is not None:
        machine.pass_over(segments[0].grad, sum(map(touched_nbytes, segments)))
        return
    native, on_device = list[_native.UpdateArguments](), list[_native.UpdateArguments]()
    for segment in segments:
        _check(segment)
        if uses_native(segment.grad) and segment.hyper.own is None:
            native.append(_arguments(segment))
        elif has_compiled(segment.grad.device, segment.hyper, segment.state_format):
            on_device.append(_arguments(segment))
        else:
            update_torch(segment)
    if native:
        _native.update(native)
    if on_device:
        kernels = compiled_kernels.of(segments[0].grad.device)
        assert kernels is not None
        kernels.update(on_device)


def has_compiled(device: torch.device, hyper: Hyper, state_format: StateFormat) -> bool:
    """Whether there is a compiled kernel for this."""
    is_known = hyper.rule is Rule.ADAM and state_format is StateFormat.FP32
    return is_known and compiled_kernels.of(device) is not None


def takes_one_pass(device: torch.device, record: RecordFormat) -> bool:
    """Whether a kernel of ours updates such records there. Torch operations pass over memory many times, and take the host a
    launch each. On a machine in numbers: as where the kernels are."""
    if device.type == "cpu":
        return True
    is_known = record.state_format is StateFormat.FP32 and record.moments == MOMENTS
    return is_known and (virtual_machine() is not None or compiled_kernels.of(device) is not None)


def touched_nbytes(segment: Segment) -> int:
    """Bytes that the step on a segment reads, and those that it writes."""
    values = segment.values.nbytes * (2 if segment.state_format.is_split else 1) if segment.values is not None else 0
    return segment.grad.nbytes + 2 * sum(array.nbytes for array in segment.arrays.values()) + values


# Assertions: these are the contract between our own layers, and native code behind a wrong size would corrupt memory.


def _check(segment: Segment) -> None:
    numel, device, state_format = segment.grad.numel(), segment.grad.device, segment.state_format
    check_flat("grad", segment.grad, numel, device)
    for name, dtype, count in RecordFormat(state_format, segment.hyper.moments).arrays(numel):
        array = segment.arrays[name]
        if array.dtype != dtype or array.shape != (count,) or not array.is_contiguous() or array.device != device:
            raise AssertionError(
                f"{name} must be [{count}] of {dtype} on {device}, not {list(array.shape)} of {array.dtype} on {array.device}"
            )
    if segment.values is not None:
        check_flat("values", segment.values, numel, device)
    if state_format.is_split and (segment.values is None or segment.values.dtype != torch.bfloat16):
        raise AssertionError(f"{state_format.value} states need bfloat16 values")
    if segment.step < 1:
        raise AssertionError(f"steps count from 1, not {segment.step}")
    if state_format is StateFormat.EIGHT_BIT and segment.first_index % SCALE_GROUP:
        raise AssertionError(f"first_index must be a multiple of {SCALE_GROUP}, not {segment.first_index}")


def _arguments(segment: Segment) -> _native.UpdateArguments:
    hyper, values = segment.hyper, segment.values

    def address(name: str) -> int:
        return segment.arrays[name].data_ptr() if name in segment.arrays else 0

    exp_avg, exp_avg_sq = MOMENTS
    return _native.UpdateArguments(
        grad=segment.grad.data_ptr(),
        master=segment.master.data_ptr(),
        exp_avg=address(exp_avg),
        exp_avg_sq=address(exp_avg_sq),
        exp_avg_scale=address(scale_name(exp_avg)),
        exp_avg_sq_scale=address(scale_name(exp_avg_sq)),
        values=0 if values is None else values.data_ptr(),
        numel=segment.grad.numel(),
        first_index=segment.first_index,
        source_distance=0,
        step=segment.step,
        rounding_seed=segment.rounding_seed,
        lr=hyper.lr_at(segment.step),
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        grad_factor=segment.signed_factor,
        grad_dtype=DTYPE_CODES[segment.grad.dtype],
        values_dtype=_native.F32 if values is None else DTYPE_CODES[values.dtype],
        state_format=_native.STATE_FORMATS[segment.state_format.value],
        rule=_native.RULES[hyper.rule.value],
        decoupled=int(hyper.decoupled),
        nesterov=int(hyper.nesterov),
    )
