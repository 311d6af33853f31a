# SPDX-License-Identifier: Apache-2.0
"""Exact arithmetic to compare with: rational numbers, rounded once to float32; and comparison by bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch

LANES = 32
BLOCK = 4096


def _nearest(near: float, is_above: Callable[[Fraction], bool], is_at: Callable[[Fraction], bool]) -> np.float32:
    """The float32 nearest to a number known by comparison with rationals; `near` is within an ulp. Ties to even."""
    candidate = np.float32(near)
    for _ in range(3):
        up = np.nextafter(candidate, np.float32(np.inf))
        down = np.nextafter(candidate, np.float32(-np.inf))
        upper = (Fraction(float(candidate)) + Fraction(float(up))) / 2
        lower = (Fraction(float(candidate)) + Fraction(float(down))) / 2
        odd = bool(candidate.view(np.uint32) & 1)
        if is_above(upper) or (is_at(upper) and odd):
            candidate = up
        elif not is_above(lower) and (not is_at(lower) or odd):
            candidate = down
        else:
            return candidate
    raise AssertionError("the first guess was too far off")


def float32_of(exact: Fraction) -> np.float32:
    if exact == 0:
        return np.float32(0)
    return _nearest(float(exact), lambda middle: exact > middle, lambda middle: exact == middle)


def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    return float32_of(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


def sqrt(a: np.float32) -> np.float32:
    if a == 0:
        return a
    exact = Fraction(float(a))

    def is_above(middle: Fraction) -> bool:
        return middle < 0 or exact > middle * middle

    return _nearest(math.sqrt(float(a)), is_above, lambda middle: middle >= 0 and exact == middle * middle)


def adam_element(g: float, p: float, m: float, v: float, settings: dict[str, float], step: int) -> tuple[float, ...]:
    """(p, m, v) after one step, each operation rounded once. `settings`: lr, beta1, ..., decoupled, factor."""
    f = np.float32
    lr, beta1, beta2 = settings["lr"], settings["beta1"], settings["beta2"]
    decay = settings["weight_decay"]
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    g32, p32, m32, v32 = f(g) * f(settings["factor"]), f(p), f(m), f(v)
    if settings["decoupled"]:
        p32 = p32 * f(1 - lr * decay)
    elif decay != 0:
        g32 = fma(p32, f(decay), g32)
    weight = f(1 - beta1)
    difference = g32 - m32
    m32 = fma(weight, difference, m32) if weight < 0.5 else fma(weight - f(1), difference, g32)
    v32 = v32 * f(beta2)
    v32 = fma(f(1 - beta2) * g32, g32, v32)
    denominator = sqrt(v32) / f(math.sqrt(correction2)) + f(settings["eps"])
    p32 = p32 + (f(-(lr / correction1)) * m32) / denominator
    return float(p32), float(m32), float(v32)


def rounded_adam_element(
    g: float, p: float, m: float, decayed: np.float32, settings: dict[str, float], step: int
) -> tuple[np.float32, np.float32, np.float32, np.float32]:
    """(p, m, v, its root) after one step with moments that are rounded afterwards. `decayed`: exp_avg_sq times beta2."""
    f = np.float32
    lr, beta1, beta2 = settings["lr"], settings["beta1"], settings["beta2"]
    decay = settings["weight_decay"]
    correction1, root_correction2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
    g32, p32, factor = f(g), f(p), float(f(settings["factor"]))
    if not settings["decoupled"]:
        g32, factor = fma(p32, f(decay), g32 * f(factor)), 1.0
    m32 = fma(f(m), f(beta1), g32 * f((1 - beta1) * factor))
    h = g32 * f(math.sqrt(1 - beta2) * factor)
    v32 = fma(h, h, decayed)
    root = sqrt(v32)
    move = (f(-(lr / correction1 * root_correction2)) * m32) / (root + f(settings["eps"] * root_correction2))
    p32 = fma(p32, f(1 - lr * decay), move) if settings["decoupled"] else p32 + move
    return p32, m32, v32, root


def block_sums(values: np.ndarray, start_index: int) -> np.ndarray:
    """The definition of the sums of squares, word for word. `values`: float32."""
    sums = []
    end_index = start_index + len(values)
    for block in range(start_index // BLOCK, -(-end_index // BLOCK)):
        lanes = [0.0] * LANES
        for index in range(max(block * BLOCK, start_index), min((block + 1) * BLOCK, end_index)):
            x = float(values[index - start_index])
            lanes[index % LANES] += x * x
        for width in (16, 8, 4, 2, 1):
            for lane in range(width):
                lanes[lane] += lanes[lane + width]
        sums.append(lanes[0])
    return np.array(sums)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit; of a float32 or float64 NaN only that it is one."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = a.view(integers) == b.view(integers)
    if a.element_size() > 2:
        equal |= a.isnan() & b.isnan()
    return bool(equal.all())


def rough_values(numel: int, generator: torch.Generator, *, specials: bool) -> torch.Tensor:
    """float32 of magnitudes from 1e-38 to 1e4; with `specials` also zeros, denormals, infinities and NaN."""
    exponents = torch.randint(-126, 14, (numel,), generator=generator).float()
    values = torch.randn(numel, generator=generator) * torch.exp2(exponents)
    ordinary = torch.rand(numel, generator=generator) < 0.7
    values = torch.where(ordinary, torch.randn(numel, generator=generator), values)
    if specials:
        choices = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 65519.996, 65520.0, 3e38, math.inf, -math.inf, math.nan])
        picked = choices[torch.randint(len(choices), (numel,), generator=generator)]
        values = torch.where(torch.rand(numel, generator=generator) < 0.1, picked, values)
    return values
