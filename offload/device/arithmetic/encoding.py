# SPDX-License-Identifier: Apache-2.0
"""The narrow encodings of optimizer state, in torch operations: split weights, bf16 and 8-bit moments.

Each is defined to the bit in `native/include/offload.h`; the native kernel encodes and decodes while it updates, these
functions serve everything else: initial values, `state_dict`, checkpoints, and the torch form of the update. Without
random bits they round to nearest, and what was decoded encodes to what decodes to the same again:

    split   any float32
    bf16    a bf16 number is a float32
    8-bit   a group's values are whole multiples c * 2^k with |c| <= 127 (roots: 255) of its scale. The least scale that
            holds their maximum is 2^k or a smaller power of two, of which they are whole multiples too.

All tensors are 1-D; those of one call lie on one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload import _native
from offload.device.arithmetic.flat import f32, uses_native

SCALE_GROUP = 64
"""Elements that share a scale of 8-bit moments, counted from a parameter's first."""
_CANONICAL_NAN = 0x7FC00000
_SHARED_NUMEL = 1 << 17
"""What the cores share at a time where the native library splits."""
_BLOCK_NUMEL = 1 << 15
"""Also what torch computes on the calling thread: more threads would wait for each other longer than they compute."""


def group_count(numel: int) -> int:
    """Scales of `numel` elements."""
    return -(-numel // SCALE_GROUP)


# ---- split weights


def _blocks(numel: int, device: torch.device) -> Iterator[slice]:
    """On the CPU parts whose temporaries stay in its caches; elsewhere one."""
    step = _BLOCK_NUMEL if device.type == "cpu" else max(numel, 1)
    for low in range(0, numel, step):
        yield slice(low, low + step)


def _int32_of(values: Tensor) -> Tensor:
    """The bits of float32 [n], a NaN as the canonical one: a new int32 [n]."""
    return torch.where(values.isnan(), _CANONICAL_NAN, values.view(torch.int32))


def _halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the upper 16 bits of int32 [n], int16 [n] each: views."""
    low, high = bits.view(torch.int16).view(-1, 2).unbind(1)  # both on the host and on GPUs the lower half comes first
    return low, high


def put_upper_half(target: Tensor, values: Tensor) -> None:
    """target (bf16) = the weights of float32 masters: the nearest, ties away from zero."""
    if uses_native(values) and uses_native(target):
        _put_halves(target, None, values)
        return
    words = target.view(torch.int16)
    for part in _blocks(values.numel(), values.device):
        words[part].copy_(_halves(_int32_of(values[part]).add_(0x8000))[1])


def put_remainder(target: Tensor, values: Tensor) -> None:
    """target (int16) = what `put_upper_half` leaves of float32 masters."""
    if uses_native(values) and uses_native(target):
        _put_halves(None, target, values)
        return
    for part in _blocks(values.numel(), values.device):
        target[part].copy_(_halves(_int32_of(values[part]))[0])


def _bf16(address: int) -> _native.Values:
    return _native.Values(address, _native.BF16)


def _put_halves(upper: Tensor | None, rest: Tensor | None, values: Tensor) -> None:
    """Split float32 masters on the host, on all cores of the native library; None: that half is not wanted.

    The update of split weights is what splits: an SGD step of rate -1 from -0.0, the number whose sum with any is that one."""
    minus_zero, zero = _zeros()
    unwanted = torch.empty(min(values.numel(), _SHARED_NUMEL), dtype=torch.int16, device="cpu")
    for low in range(0, values.numel(), _SHARED_NUMEL):
        part = slice(low, min(low + _SHARED_NUMEL, values.numel()))
        numel, given = part.stop - part.start, values[part].contiguous()
        high_address = (upper[part] if upper is not None else unwanted).data_ptr()
        low_address = (rest[part] if rest is not None else unwanted).data_ptr()
        _native.convert(_bf16(high_address), _bf16(minus_zero.data_ptr()), numel)
        _native.convert(_bf16(low_address), _bf16(zero.data_ptr()), numel)
        step = _native.UpdateArguments(
            grad=given.data_ptr(), master=low_address, exp_avg=0, exp_avg_sq=0, exp_avg_scale=0, exp_avg_sq_scale=0,
            values=high_address, numel=numel, first_index=0, source_distance=0, step=1, rounding_seed=0, lr=-1.0, beta1=0.0,
            beta2=0.0, eps=0.0, weight_decay=0.0, grad_factor=1.0, grad_dtype=_native.F32, values_dtype=_native.BF16,
            state_format=_native.STATE_FORMATS["split"], rule=_native.RULES["sgd"], decoupled=0, nesterov=0,
        )  # fmt: skip
        _native.update([step])


@cache
def _zeros() -> tuple[Tensor, Tensor]:
    """-0.0 and 0.0, as many as are split at a time."""
    return torch.full((_SHARED_NUMEL,), -0.0, dtype=torch.bfloat16, device="cpu"), torch.zeros(
        _SHARED_NUMEL, dtype=torch.bfloat16, device="cpu"
    )


def joined(upper: Tensor, rest: Tensor) -> Tensor:
    """The float32 masters of bf16 weights and their int16 remainders."""
    bits = torch.empty(upper.numel(), dtype=torch.int32, device=upper.device)
    for part in _blocks(upper.numel(), upper.device):
        torch.add(upper[part].view(torch.int16).to(torch.int32) << 16, rest[part], out=bits[part])
    return bits.view(torch.float32)


# ---- bf16 moments


def bf16_of(values: Tensor, random: Tensor) -> Tensor:
    """float32 rounded stochastically to bf16; `random`: int64 of 16 bits."""
    return _halves(_int32_of(values).add_(random))[1].view(torch.bfloat16)


# ---- 8-bit moments


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of 8-bit numbers: `dtype`, the largest code, and the biased exponent of a group's maximum at scale byte 0."""

    dtype: torch.dtype
    largest: int
    first_exponent: int
    limit: float
    """Magnitudes above count as this."""

    @property
    def exponent_bits(self) -> int:
        return self.largest.bit_length() - 1

    @property
    def last_byte(self) -> int:
        """The scale byte of `limit`."""
        return math.frexp(self.limit)[1] + 126 - self.first_exponent

    @property
    def raised(self) -> int:
        """What takes a maximum above largest * 2^k into the next exponent."""
        return (1 << 23) - 1 - ((self.largest << (23 - self.exponent_bits)) & 0x7FFFFF)

    def scales_of(self, scale_bytes: Tensor) -> Tensor:
        """2^k of scale bytes, float32."""
        exponent = scale_bytes.to(torch.int32) + (self.first_exponent - self.exponent_bits)
        return (exponent << 23).view(torch.float32)

    def inverse_scales_of(self, scale_bytes: Tensor) -> Tensor:
        """2^(8 - k) of scale bytes, float32."""
        exponent = (254 + 8 + self.exponent_bits - self.first_exponent) - scale_bytes.to(torch.int32)
        return (exponent << 23).view(torch.float32)


AVERAGE = Code(torch.int8, 127, 23, 127 * 2.0**100)
"""Of exp_avg: signed."""
ROOT = Code(torch.uint8, 255, 71, 255 * 2.0**56)
"""Of the square root of exp_avg_sq."""
CODES = {"exp_avg": AVERAGE, "exp_avg_sq": ROOT}


def _groups(values: Tensor) -> Tensor:
    return pad(values, (0, -values.numel() % SCALE_GROUP)).view(-1, SCALE_GROUP)


def codes_of(values: Tensor, code: Code, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes [n] and scale bytes [groups] of float32 [n] that begin at a group. `random`: int64 of 8 bits [n]; None: nearest.

    For `ROOT` the values are the roots. With random bits a code of 0 becomes 1, and a maximum of exactly largest * 2^k takes
    the next scale: the native search for the maximum looks at the upper half of its bits."""
    limit = f32(code.limit)
    finite = torch.where(values.isnan(), limit if code is ROOT else 0.0, values).clamp(-limit, limit)
    groups = _groups(finite)
    largest = (groups.view(torch.int32) & 0x7FFFFFFF).amax(1)
    raised = code.raised + (random is not None)
    scale_bytes = (((largest + raised) >> 23) - code.first_exponent).clamp(0, code.last_byte).to(torch.uint8)
    fixed = (groups * code.inverse_scales_of(scale_bytes)[:, None]).round().to(torch.int64).view(-1)[: values.numel()]
    codes = (fixed + (1 << 7 if random is None else random)) >> 8
    if code is ROOT:
        codes = codes.clamp(min=1) if random is not None else torch.maximum(codes, (finite > 0).to(torch.int64))
    return codes.to(code.dtype), scale_bytes


def values_of(codes: Tensor, scale_bytes: Tensor, code: Code, factor: float = 1.0) -> Tensor:
    """float32 [n] (for `ROOT`: the roots) of codes [n] and scale bytes [groups], whose scales `factor` multiplies first."""
    groups = _groups(codes.to(torch.float32))
    return (groups * (code.scales_of(scale_bytes) * factor)[:, None]).view(-1)[: codes.numel()]


# ---- random bits


def rounding_key(seed: int, step: int) -> int:
    """32 bits: what the random bits of one parameter at one step start from."""
    mask = (1 << 64) - 1
    z = (seed + step * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return (z ^ z >> 31) & 0xFFFFFFFF


def random_bits(key: int, first_index: int, numel: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two times `width` (16, 8) random bits, int64 [numel], of the elements from `first_index` on: for exp_avg, for exp_avg_sq.

    32 / width elements share a word; exp_avg_sq takes the bits that are the other element's of a pair."""
    sharing = 32 // width
    index = torch.arange(first_index, first_index + numel, dtype=torch.int64, device=device)
    word = ((index // sharing & 0xFFFFFFFF) * 0x9E3779B9 + key) & 0xFFFFFFFF
    mixed = ((word ^ word >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    place = index % sharing
    mask = (1 << width) - 1
    return mixed >> place * width & mask, mixed >> (place ^ 1) * width & mask


def root_of(squares: Tensor) -> Tensor:
    """The square root of float32, rounded once."""
    return squares.double().sqrt().float()


assert AVERAGE.raised == 0x1FFFF and ROOT.raised == 0xFFFF and math.ldexp(127, 100) == AVERAGE.limit
