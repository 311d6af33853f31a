# SPDX-License-Identifier: Apache-2.0
"""What a file of compiled kernels says of itself: machine code for one compute capability, an ELF file (cubin).

And what the launches give to its kernels, to compare the two.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import torch

from offload.device.arithmetic.compiled_kernels import (
    ADAM_PIECES_MOST,
    INGEST_PIECES_MOST,
    NO_TENSOR,
    AdamPiece,
    DeviceKernels,
    IngestPiece,
    scalars_of,
)
from offload.device.arithmetic.flat import DTYPE_CODES

_MACHINE = 190  # EM_CUDA
_HEADER = struct.Struct("<4s12x2HI3QI6H")
_SECTION = struct.Struct("<2I4Q2I2Q")
_INFO = ".nv.info."
# An entry in .nv.info.<kernel>: how its value is told, what it is about, the value or its length.
_ENTRY, _HAS_LENGTH, _PARAMETER = struct.Struct("<BBH"), 4, 0x17
_PARAMETER_INFO = struct.Struct("<I2HI")
# A fatbin's header: magic, version, its length, bytes behind it. An entry's: kind, its length, bytes behind it, architecture.
_FATBIN, _FATBIN_MAGIC = struct.Struct("<I2HQ"), 0xBA55ED50
_FATBIN_ENTRY, _MACHINE_CODE = struct.Struct("<2HIQ2I2HI"), 2


@dataclass(frozen=True)
class Cubin:
    """`architecture`: 90 for compute capability 9.0. `parameters`: of each kernel, by name, the bytes of each parameter."""

    architecture: int
    parameters: dict[str, list[int]]

    @staticmethod
    def of(code: bytes) -> Cubin:
        """Raises `AssertionError` for what is no such file."""
        magic, _, machine, _, _, _, table, flags, _, _, _, _, count, names = _HEADER.unpack_from(code)
        assert magic == b"\x7fELF" and machine == _MACHINE
        sections = [_SECTION.unpack_from(code, table + _SECTION.size * number) for number in range(count)]
        contents = [code[offset : offset + nbytes] for _, _, _, _, offset, nbytes, *_ in sections]
        found = {}
        for section, content in zip(sections, contents, strict=True):
            name = contents[names][section[0] :].split(b"\0", 1)[0].decode()
            if name.startswith(_INFO):
                found[name.removeprefix(_INFO)] = list(_parameters(content))
        return Cubin(flags >> 8 & 0xFF, found)


def fatbin_architectures(code: bytes) -> set[int]:
    """The architectures for which a fatbin has machine code. Raises `AssertionError` for what is none."""
    magic, _, position, nbytes = _FATBIN.unpack_from(code)
    assert magic == _FATBIN_MAGIC and position + nbytes <= len(code)
    found = set()
    while position < len(code):
        kind, _, header_nbytes, content_nbytes, *_, architecture = _FATBIN_ENTRY.unpack_from(code, position)
        if kind == _MACHINE_CODE:
            found.add(architecture)
        position += header_nbytes + content_nbytes
    return found


def _parameters(info: bytes) -> Iterator[int]:
    """The bytes of each, in order."""
    sizes = {}
    position = 0
    while position < len(info):
        kind, about, value = _ENTRY.unpack_from(info, position)
        position += _ENTRY.size
        if kind == _HAS_LENGTH:
            if about == _PARAMETER:
                _, ordinal, _, packed = _PARAMETER_INFO.unpack_from(info, position)
                sizes[ordinal] = packed >> 18
            position += value
    yield from (sizes[ordinal] for ordinal in range(len(sizes)))


def launched() -> dict[str, list[int]]:
    """The bytes of the parameter, by kernel: of one launch of every one of them, with as many pieces as it takes."""
    found: dict[str, list[int]] = {}

    def launch(name: str, block_count: int, parameter: bytes) -> None:
        found.setdefault(name, [len(parameter)])

    compiled = DeviceKernels(launch)
    codes = DTYPE_CODES.values()
    adam_pieces = (ADAM_PIECES_MOST + 1) * [AdamPiece(0, 0, 0, 0, 0, 1, scalars_of(*5 * (0.5,), True, 1, 1.0))]
    ingest_pieces = (INGEST_PIECES_MOST + 1) * [IngestPiece(0, 0, 0, 1, 0)]
    for source in codes:
        for target in (*codes, NO_TENSOR):
            compiled.adam(source, target, adam_pieces)
            compiled.ingest(source, target, ingest_pieces, accumulate=False)
    for source, target in permutations(DTYPE_CODES, 2):
        compiled.convert(torch.zeros(8, dtype=target), torch.zeros(8, dtype=source))
    return found
