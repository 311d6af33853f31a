"""The optimizer step in torch operations, bit for bit the native one: for other devices, and where the library is missing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offload.device import encoding
from offload.device.encoding import CODES, ROOT, SCALE_GROUP, group_count
from offload.device.flat import chunks, f32, fma, store
from offload.device.records import MASTER, REMAINDER, StateFormat, scale_name
from offload.device.rules import MOMENTS, Hyper, Rule

if TYPE_CHECKING:
    from offload.device.updating import Segment


def update_torch(segment: Segment) -> None:
    """See `offload.device.updating.update`."""
    for chunk in chunks(segment.grad):
        _update_chunk(segment, chunk)


def _update_chunk(segment: Segment, chunk: slice) -> None:
    hyper = segment.hyper
    factor = f32(segment.signed_factor)
    p = _master(segment, chunk)
    g = segment.grad[chunk].float() * factor
    moments = {name: _moment(segment, name, chunk) for name in hyper.moments}
    p, roots = _RULES[hyper.rule](segment, p, g, moments)
    random: dict[str, Tensor] = {}
    if segment.state_format in (StateFormat.BF16, StateFormat.EIGHT_BIT):
        key = encoding.rounding_key(segment.rounding_seed, segment.step)
        draw = encoding.random_bits if segment.state_format is StateFormat.BF16 else encoding.random_bytes
        both = draw(key, segment.first_index + chunk.start, g.numel(), g.device)
        random = dict(zip(MOMENTS, both, strict=True))
    for name, value in moments.items():
        _put_moment(
            segment, name, chunk, roots if CODES[name] is ROOT and roots is not None else value, value, random.get(name)
        )
    if segment.state_format.is_split:
        assert segment.values is not None
        segment.arrays[REMAINDER][chunk].copy_(encoding.remainder(p))
        segment.values[chunk].copy_(encoding.upper_half(p))
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
    array = segment.arrays[name][chunk]
    if segment.state_format is not StateFormat.EIGHT_BIT:
        return array.float()
    values = encoding.values_of(array, segment.arrays[scale_name(name)][_groups(chunk)], CODES[name])
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


# ---- rules: (segment, p, g, moments) -> the new p and the root of the new exp_avg_sq; moments are replaced

_Moments = dict[str, Tensor]


def _l2(hyper: Hyper, p: Tensor, g: Tensor) -> Tensor:
    return fma(f32(hyper.weight_decay), p, g) if hyper.weight_decay != 0 else g


def _adam(segment: Segment, p: Tensor, g: Tensor, moments: _Moments) -> tuple[Tensor, Tensor | None]:
    hyper = segment.hyper
    step_size = hyper.lr / (1.0 - hyper.beta1**segment.step)
    root_correction2 = math.sqrt(1.0 - hyper.beta2**segment.step)
    weight = f32(1.0 - hyper.beta1)
    if not hyper.decoupled:
        g = _l2(hyper, p, g)
    elif hyper.weight_decay != 0:
        p = p * f32(1.0 - hyper.lr * hyper.weight_decay)
    m, v = moments["exp_avg"], moments["exp_avg_sq"]
    m = fma(weight, g - m, m) if abs(weight) < 0.5 else fma(f32(weight - 1.0), g - m, g)
    v = fma(g * f32(1.0 - hyper.beta2), g, v * f32(hyper.beta2))
    moments["exp_avg"], moments["exp_avg_sq"] = m, v
    root = encoding.root_of(v)
    if segment.state_format in (StateFormat.BF16, StateFormat.EIGHT_BIT):
        negative_step, denominator = f32(-(step_size * root_correction2)), root + f32(hyper.eps * root_correction2)
    else:
        # A tensor, because torch multiplies by the reciprocal of a number on some devices.
        divisor = torch.full((1,), f32(root_correction2), device=p.device)
        negative_step, denominator = f32(-step_size), root / divisor + f32(hyper.eps)
    return p + (m * negative_step) / denominator, root


def _lion(segment: Segment, p: Tensor, g: Tensor, moments: _Moments) -> tuple[Tensor, Tensor | None]:
    hyper, m = segment.hyper, moments["exp_avg"]
    direction = fma(f32(1.0 - hyper.beta1), g, m * f32(hyper.beta1))
    sign = (direction > 0).float() - (direction < 0).float()
    moments["exp_avg"] = fma(f32(1.0 - hyper.beta2), g, m * f32(hyper.beta2))
    return fma(f32(-hyper.lr), sign, p * f32(1.0 - hyper.lr * hyper.weight_decay)), None


def _adagrad(segment: Segment, p: Tensor, g: Tensor, moments: _Moments) -> tuple[Tensor, Tensor | None]:
    hyper = segment.hyper
    g = _l2(hyper, p, g)
    moments["exp_avg_sq"] = fma(g, g, moments["exp_avg_sq"])
    root = encoding.root_of(moments["exp_avg_sq"])
    return p + (g * f32(-hyper.lr_at(segment.step))) / (root + f32(hyper.eps)), root


def _sgd(segment: Segment, p: Tensor, g: Tensor, moments: _Moments) -> tuple[Tensor, Tensor | None]:
    hyper = segment.hyper
    g = _l2(hyper, p, g)
    if "exp_avg" in moments:
        momentum, buffer = f32(hyper.beta1), moments["exp_avg"]
        buffer = g if segment.step == 1 else fma(f32(1.0 - hyper.beta2), g, buffer * momentum)
        moments["exp_avg"] = buffer
        g = fma(momentum, buffer, g) if hyper.nesterov else buffer
    return fma(f32(-hyper.lr), g, p), None


_RULES: dict[Rule, Callable[[Segment, Tensor, Tensor, _Moments], tuple[Tensor, Tensor | None]]] = {
    Rule.ADAM: _adam,
    Rule.LION: _lion,
    Rule.ADAGRAD: _adagrad,
    Rule.SGD: _sgd,
}
