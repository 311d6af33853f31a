# SPDX-License-Identifier: Apache-2.0
"""The optimizer step in torch operations, bit for bit the native one: for other devices, and where the library is missing."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from offload.device.arithmetic import encoding
from offload.device.arithmetic.encoding import CODES, ROOT, SCALE_GROUP, group_count
from offload.device.arithmetic.flat import chunks, f32, fma, store
from offload.device.arithmetic.rules import MOMENTS, Rule
from offload.device.arithmetic.segment import MASTER, REMAINDER, Segment, StateFormat, scale_name

_LOSSY = (StateFormat.BF16, StateFormat.EIGHT_BIT)
"""Their moments are rounded at every update."""


def update_torch(segment: Segment) -> None:
    """See `offload.device.arithmetic.optimizer_step.update`."""
    for chunk in chunks(segment.grad):
        _update_chunk(segment, chunk)


def _update_chunk(segment: Segment, chunk: slice) -> None:
    hyper = segment.hyper
    p = _master(segment, chunk)
    g = segment.grad[chunk].float()
    moments = {name: _moment(segment, name, chunk) for name in hyper.moments}
    p, roots = _RULES[hyper.rule](segment, p, g, moments)
    random: dict[str, Tensor] = {}
    if segment.state_format in _LOSSY:
        key = encoding.rounding_key(segment.rounding_seed, segment.step)
        width = 16 if segment.state_format is StateFormat.BF16 else 8
        both = encoding.random_bits(key, segment.first_index + chunk.start, g.numel(), width, g.device)
        random = dict(zip(MOMENTS, both, strict=True))
    for name, value in moments.items():
        _put_moment(
            segment, name, chunk, roots if CODES[name] is ROOT and roots is not None else value, value, random.get(name)
        )
    if segment.state_format.is_split:
        assert segment.values is not None
        encoding.put_remainder(segment.arrays[REMAINDER][chunk], p)
        encoding.put_upper_half(segment.values[chunk], p)
    else:
        segment.arrays[MASTER][chunk].copy_(p)
        if segment.values is not None:
            store(segment.values[chunk], p)


# ---- state


def _master(segment: Segment, chunk: slice) -> Tensor:
    if segment.state_format.is_split:
        assert segment.values is not None
        return encoding.joined(segment.values[chunk], segment.arrays[REMAINDER][chunk])
    return segment.arrays[MASTER][chunk]


def _groups(chunk: slice) -> slice:
    first: int = chunk.start // SCALE_GROUP
    return slice(first, first + group_count(chunk.stop - chunk.start))


def _moment(segment: Segment, name: str, chunk: slice) -> Tensor:
    """Adam's rounded exp_avg_sq: times beta2."""
    hyper, array = segment.hyper, segment.arrays[name][chunk]
    decays = CODES[name] is ROOT and hyper.rule is Rule.ADAM
    if segment.state_format is not StateFormat.EIGHT_BIT:
        return array.float() * f32(hyper.beta2) if decays and segment.state_format in _LOSSY else array.float()
    factor = f32(math.sqrt(hyper.beta2)) if decays else 1.0
    values = encoding.values_of(array, segment.arrays[scale_name(name)][_groups(chunk)], CODES[name], factor)
    return values * values if CODES[name] is ROOT else values


def _put_moment(segment: Segment, name: str, chunk: slice, root: Tensor, value: Tensor, random: Tensor | None) -> None:
    """`root`: what 8-bit codes are made of."""
    array = segment.arrays[name][chunk]
    if segment.state_format is StateFormat.EIGHT_BIT:
        codes, scale_bytes = encoding.codes_of(root, CODES[name], random)
        array.copy_(codes)
        segment.arrays[scale_name(name)][_groups(chunk)].copy_(scale_bytes)
    elif random is not None:
        array.copy_(encoding.bf16_of(value, random))
    else:
        array.copy_(value)


# ---- rules: (segment, p, the gradient without its factor, moments) -> the new p and the root of the new exp_avg_sq;
# ---- moments are replaced

_Moments = dict[str, Tensor]


def _scaled(segment: Segment, g: Tensor) -> Tensor:
    return g * f32(segment.signed_factor)


def _with_l2(segment: Segment, p: Tensor, g: Tensor) -> Tensor:
    """The gradient times its factor, with weight decay as L2."""
    decay = segment.hyper.weight_decay
    return fma(f32(decay), p, _scaled(segment, g)) if decay != 0 else _scaled(segment, g)


def _adam(segment: Segment, p: Tensor, g: Tensor, moments: _Moments) -> tuple[Tensor, Tensor | None]:
    hyper = segment.hyper
    step_size = hyper.lr / (1.0 - hyper.beta1**segment.step)
    root_correction2 = math.sqrt(1.0 - hyper.beta2**segment.step)
    is_l2 = not hyper.decoupled and hyper.weight_decay != 0
    decay = 1.0 if not hyper.decoupled or hyper.weight_decay == 0 else f32(1.0 - hyper.lr * hyper.weight_decay)
    m, v = moments["exp_avg"], moments["exp_avg_sq"]
    if segment.state_format in _LOSSY:
        factor = 1.0 if is_l2 else f32(segment.signed_factor)
        g = _with_l2(segment, p, g) if is_l2 else g
        m = fma(f32(hyper.beta1), m, g * f32((1.0 - hyper.beta1) * factor))
        g = g * f32(math.sqrt(1.0 - hyper.beta2) * factor)
        v = fma(g, g, v)
        root = encoding.root_of(v)
        step = (m * f32(-(step_size * root_correction2))) / (root + f32(hyper.eps * root_correction2))
        p = fma(decay, p, step)
    else:
        weight = f32(1.0 - hyper.beta1)
        g = _with_l2(segment, p, g) if is_l2 else _scaled(segment, g)
        m = fma(weight, g - m, m) if abs(weight) < 0.5 else fma(f32(weight - 1.0), g - m, g)
        v = fma(g * f32(1.0 - hyper.beta2), g, v * f32(hyper.beta2))
        root = encoding.root_of(v)
        # A tensor, because torch multiplies by the reciprocal of a number on some devices.
        divisor = torch.full((1,), f32(root_correction2), device=p.device)
        p = p * decay + (m * f32(-step_size)) / (root / divisor + f32(hyper.eps))
    moments["exp_avg"], moments["exp_avg_sq"] = m, v
    return p, root


def _lion(segment: Segment, p: Tensor, g: Tensor, moments: _Moments) -> tuple[Tensor, Tensor | None]:
    hyper, m = segment.hyper, moments["exp_avg"]
    g = _scaled(segment, g)
    direction = fma(f32(1.0 - hyper.beta1), g, m * f32(hyper.beta1))
    sign = (direction > 0).float() - (direction < 0).float()
    moments["exp_avg"] = fma(f32(1.0 - hyper.beta2), g, m * f32(hyper.beta2))
    return fma(f32(-hyper.lr), sign, p * f32(1.0 - hyper.lr * hyper.weight_decay)), None


def _adagrad(segment: Segment, p: Tensor, g: Tensor, moments: _Moments) -> tuple[Tensor, Tensor | None]:
    hyper = segment.hyper
    g = _with_l2(segment, p, g)
    moments["exp_avg_sq"] = fma(g, g, moments["exp_avg_sq"])
    root = encoding.root_of(moments["exp_avg_sq"])
    return p + (g * f32(-hyper.lr_at(segment.step))) / (root + f32(hyper.eps)), root


def _sgd(segment: Segment, p: Tensor, g: Tensor, moments: _Moments) -> tuple[Tensor, Tensor | None]:
    hyper = segment.hyper
    g = _with_l2(segment, p, g)
    if "exp_avg" in moments:
        momentum, buffer = f32(hyper.beta1), moments["exp_avg"]
        buffer = g if segment.step == 1 else fma(f32(1.0 - hyper.beta2), g, buffer * momentum)
        moments["exp_avg"] = buffer
        g = fma(momentum, buffer, g) if hyper.nesterov else buffer
    return fma(f32(-hyper.lr), g, p), None


def _own(segment: Segment, p: Tensor, g: Tensor, moments: _Moments) -> tuple[Tensor, Tensor | None]:
    own = segment.hyper.own
    assert own is not None
    return own(p, _scaled(segment, g), moments, segment.step), None


_RULES: dict[Rule, Callable[[Segment, Tensor, Tensor, _Moments], tuple[Tensor, Tensor | None]]] = {
    Rule.ADAM: _adam,
    Rule.LION: _lion,
    Rule.ADAGRAD: _adagrad,
    Rule.SGD: _sgd,
    Rule.OWN: _own,
}
