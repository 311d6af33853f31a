# SPDX-License-Identifier: Apache-2.0
"""What files of weights call dtypes (safetensors' codes), and which of a file's may become a model's unasked."""

from __future__ import annotations

import torch

DTYPE_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


def converts(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of one dtype may become another's without being asked for by name.

    Floating-point numbers may be rounded to any other floating-point dtype, complex ones to any other complex. Integers and
    truth values only become what holds all of them. Nothing becomes another kind: integers where weights are expected are
    quantized, or no weights.
    """
    if given == wanted:
        return True
    if given.is_floating_point or wanted.is_floating_point or given.is_complex or wanted.is_complex:
        return given.is_floating_point == wanted.is_floating_point and given.is_complex == wanted.is_complex
    try:
        return torch.promote_types(given, wanted) == wanted
    except RuntimeError:  # torch does not promote the wide unsigned ones
        return False
