# SPDX-License-Identifier: Apache-2.0
"""MANIFEST.json: what a checkpoint consists of. Its presence is the commit. See docs/checkpoint-format.md.

The dataclasses are the manifest's objects, field for field. `offload.checkpoint.format.manifest_decoding` reads them
back and trusts nothing.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

from offload.checkpoint.format.packing import packed

MANIFEST_NAME = "MANIFEST.json"
FORMAT = "offload-checkpoint"
VERSION, VERSION_IMPORTED, VERSION_PADDED, VERSION_PARTIAL = 1, 2, 3, 4
"""A checkpoint is written in the lowest version that can say what it is."""
KEYS_OF = {
    "imported": (VERSION_IMPORTED,),
    "padding": (VERSION_PADDED, VERSION_PARTIAL),
    "without_frozen": (VERSION_PARTIAL,),
}
"""Keys that only these versions have."""
VALUE = "value"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class FileEntry:
    """One data file. `header_nbytes`: where its data begins; the checksum is of all bytes before."""

    name: str
    nbytes: int
    header_nbytes: int
    header_crc32: int


@dataclass(slots=True)
class TensorEntry:
    """Bytes [offset, offset + nbytes) of a file: elements of `dtype`, little-endian."""

    file: str
    dtype: str
    offset: int
    nbytes: int
    crc32: int


@dataclass(slots=True)
class PieceEntry:
    """Elements [start, stop) of a parameter, in the order of its strides. Moments are None where it is not trained, and
    where its optimizer keeps none."""

    start: int
    stop: int
    value: TensorEntry
    exp_avg: TensorEntry | None
    exp_avg_sq: TensorEntry | None


@dataclass(slots=True)
class ParameterEntry:
    """One parameter under all its names. `dtype`: what it ran in; a trained one's value is its fp32 master."""

    fqns: list[str]
    shape: list[int]
    stride: list[int]
    dtype: str
    group: int | None
    step: int
    pieces: list[PieceEntry]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(slots=True)
class BufferEntry:
    """One persistent buffer, row-major."""

    fqn: str
    shape: list[int]
    data: TensorEntry


@dataclass(slots=True)
class LossScaleEntry:
    value: float
    dynamic: bool
    good_step_count: int
    skipped_step_count: int


@dataclass(slots=True)
class OptimizerEntry:
    """`kind`: the class of torch.optim. `param_groups`: everything in them but the parameters."""

    kind: str
    param_groups: list[dict[str, Any]]


@dataclass(slots=True)
class RandomEntry:
    """States of torch's generators on one rank, as torch gives them out. `device`: None where there was none but the CPU."""

    rank: int
    cpu: TensorEntry
    device: TensorEntry | None


@dataclass(slots=True)
class ModelEntry:
    """What an export needs to know. `configs`: JSON texts of a Hugging Face model's configurations, by attribute.
    `kept_fqns`: of each tied parameter, the name that an export writes."""

    kind: str
    configs: dict[str, str]
    kept_fqns: list[str]


@dataclass(slots=True)
class Manifest:
    world_size: int
    step_count: int
    loss_scale: LossScaleEntry
    optimizer: OptimizerEntry | None
    model: ModelEntry
    parameters: list[ParameterEntry]
    buffers: list[BufferEntry]
    random: list[RandomEntry]
    files: list[FileEntry]
    client_state: dict[str, Any] = field(default_factory=dict)
    """JSON values; where the checkpoint was converted, what `offload.checkpoint.format.packing` makes JSON of."""
    imported: str | None = None
    """What kind of checkpoint it was converted from; None: a run saved it."""
    padding: list[TensorEntry] = field(default_factory=list)
    """Zeros between other ranges, so that those begin where blocks can be shared."""
    without_frozen: bool = False
    """The values of what was not trained are left out: these parameters have no pieces."""

    def leaves_out(self, parameter: ParameterEntry) -> bool:
        return self.without_frozen and parameter.group is None and not parameter.pieces

    def tensors(self) -> list[tuple[str, TensorEntry]]:
        """Every range of bytes, with a name for messages."""
        found: list[tuple[str, TensorEntry]] = []
        for parameter in self.parameters:
            for piece in parameter.pieces:
                for kind in (VALUE, *MOMENTS):
                    entry = getattr(piece, kind)
                    if entry is not None:
                        found.append((f"{kind} of {parameter.fqns[0]!r}", entry))
        found += [(f"buffer {buffer.fqn!r}", buffer.data) for buffer in self.buffers]
        for one in self.random:
            found.append((f"the random state of rank {one.rank}", one.cpu))
            if one.device is not None:
                found.append((f"the device's random state of rank {one.rank}", one.device))
        found += [("padding", entry) for entry in self.padding]
        return found


def encode(manifest: Manifest) -> bytes:
    """The file's bytes: one line with format, version and the checksum of everything after it, then the content."""
    content, version = asdict(manifest), VERSION
    if manifest.imported is not None:
        version, content["client_state"] = VERSION_IMPORTED, packed(manifest.client_state)
    elif manifest.without_frozen:
        version = VERSION_PARTIAL
    elif manifest.padding:
        version = VERSION_PADDED
    for key, versions in KEYS_OF.items():
        if version not in versions:
            del content[key]
    body = b'"manifest":' + json.dumps(content, separators=(",", ":"), allow_nan=False).encode() + b"}\n"
    return head(version, zlib.crc32(body)) + body


def head(version: int, crc32: int) -> bytes:
    """The file's first line."""
    return f'{{"format":"{FORMAT}","version":{version},"crc32":{crc32},\n'.encode()
