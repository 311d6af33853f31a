# SPDX-License-Identifier: Apache-2.0
"""Reading MANIFEST.json: every key must be known and there, every value of its kind and within its bounds."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from offload.checkpoint.format.manifest import (
    FORMAT,
    KEYS_OF,
    MOMENTS,
    VERSION,
    VERSION_IMPORTED,
    VERSION_PADDED,
    VERSION_PARTIAL,
    BufferEntry,
    FileEntry,
    LossScaleEntry,
    Manifest,
    ModelEntry,
    OptimizerEntry,
    ParameterEntry,
    PieceEntry,
    RandomEntry,
    TensorEntry,
    head,
)
from offload.errors import CheckpointError
from offload.model.file_dtypes import DTYPES

READABLE_VERSIONS = (VERSION, VERSION_IMPORTED, VERSION_PADDED, VERSION_PARTIAL)

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}\.safetensors")
_MAX_COUNT = (1 << 63) - 1


class Malformed(Exception):
    """What is wrong with a manifest, as a clause."""


class _Fields:
    """The fields of one JSON object, each taken once and checked; `end` refuses what is left."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise Malformed(f"{where} is not an object")
        self._left, self._where = dict(value), where

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise Malformed(f"{self._where} has no {name!r}")
        return self._left.pop(name)

    def count(self, name: str) -> int:
        return _count(self.take(name), f"{name} of {self._where}")

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise Malformed(f"{name} of {self._where} is not a text")
        return value

    def number(self, name: str) -> float:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e300:
            raise Malformed(f"{name} of {self._where} is not a finite number")
        return float(value)

    def truth(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise Malformed(f"{name} of {self._where} is neither true nor false")
        return value

    def items(self, name: str) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list):
            raise Malformed(f"{name} of {self._where} is not a list")
        return value

    def counts(self, name: str) -> list[int]:
        return [_count(value, f"{name} of {self._where}") for value in self.items(name)]

    def texts(self, name: str) -> list[str]:
        values = self.items(name)
        if not all(isinstance(value, str) for value in values):
            raise Malformed(f"{name} of {self._where} holds something that is not a text")
        return values

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.take(name)
        if not isinstance(value, dict):
            raise Malformed(f"{name} of {self._where} is not an object")
        return value

    def crc32(self, name: str) -> int:
        value = self.count(name)
        if value >> 32:
            raise Malformed(f"{name} of {self._where} is not a number of 32 bits")
        return value

    def end(self) -> None:
        if self._left:
            raise Malformed(f"{self._where} has the unknown key {next(iter(self._left))!r}")


def _count(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise Malformed(f"{what} is not a count")
    return value


def decode(content: bytes, name: str) -> Manifest:
    """The manifest in `content`. `name`: the file, for errors. Raises `CheckpointError`."""
    try:
        return _decode(content)
    except (Malformed, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not a checkpoint's manifest: {error}. Load another checkpoint.") from error


def _decode(content: bytes) -> Manifest:
    envelope = json.loads(content.decode("utf-8"))
    if not isinstance(envelope, Mapping) or envelope.get("format") != FORMAT:
        raise Malformed(f'it does not begin with {{"format":"{FORMAT}"')
    if envelope.get("version") not in READABLE_VERSIONS or isinstance(envelope["version"], bool):
        readable = ", ".join(map(str, READABLE_VERSIONS))
        raise Malformed(f"it is of version {envelope.get('version')!r}, and this release reads {readable}")
    fields = _Fields(envelope, "the manifest's envelope")
    version = (fields.take("format"), fields.take("version"))[1]
    line, newline, body = content.partition(b"\n")
    crc32 = fields.crc32("crc32")
    if line + newline != head(version, crc32):  # no checksum covers it
        raise Malformed(f"its first line is not {head(version, crc32)!r}: it is damaged")
    if zlib.crc32(body) != crc32:
        raise Malformed(f"its bytes have the checksum {zlib.crc32(body)}, not {crc32}: it is damaged")
    manifest = _manifest(_Fields(fields.take("manifest"), "the manifest"), version)
    fields.end()
    return manifest


def _manifest(fields: _Fields, version: int) -> Manifest:
    optimizer = fields.take("optimizer")
    result = Manifest(
        world_size=fields.count("world_size"),
        step_count=fields.count("step_count"),
        loss_scale=_loss_scale(_Fields(fields.take("loss_scale"), "loss_scale")),
        optimizer=None if optimizer is None else _optimizer(_Fields(optimizer, "optimizer")),
        model=_model(_Fields(fields.take("model"), "model")),
        parameters=[_parameter(_Fields(value, f"parameter {index}")) for index, value in enumerate(fields.items("parameters"))],
        buffers=[_buffer(_Fields(value, f"buffer {index}")) for index, value in enumerate(fields.items("buffers"))],
        random=[_random(_Fields(value, f"random {index}")) for index, value in enumerate(fields.items("random"))],
        files=[_file(_Fields(value, f"file {index}")) for index, value in enumerate(fields.items("files"))],
        client_state=fields.mapping("client_state"),
        imported=fields.text("imported") if version in KEYS_OF["imported"] else None,
        padding=_padding(fields) if version in KEYS_OF["padding"] else [],
        without_frozen=version in KEYS_OF["without_frozen"] and fields.truth("without_frozen"),
    )
    fields.end()
    return result


def _loss_scale(fields: _Fields) -> LossScaleEntry:
    result = LossScaleEntry(
        fields.number("value"),
        fields.truth("dynamic"),
        fields.count("good_step_count"),
        fields.count("skipped_step_count"),
    )
    if not result.value > 0:
        raise Malformed("value of loss_scale is not above 0")
    fields.end()
    return result


def _optimizer(fields: _Fields) -> OptimizerEntry:
    groups = fields.items("param_groups")
    if not all(isinstance(group, dict) for group in groups):
        raise Malformed("param_groups of optimizer holds something that is not an object")
    result = OptimizerEntry(fields.text("kind"), groups)
    fields.end()
    return result


def _model(fields: _Fields) -> ModelEntry:
    result = ModelEntry(fields.text("kind"), fields.mapping("configs"), fields.texts("kept_fqns"))
    if not all(isinstance(text, str) for text in result.configs.values()):
        raise Malformed("configs of model holds something that is not a text")
    fields.end()
    return result


def _parameter(fields: _Fields) -> ParameterEntry:
    fqns = fields.texts("fqns")
    if not fqns or len(set(fqns)) != len(fqns):
        raise Malformed("a parameter has no name, or one name twice")
    group = fields.take("group")
    result = ParameterEntry(
        fqns=fqns,
        shape=fields.counts("shape"),
        stride=fields.counts("stride"),
        dtype=_dtype(fields.text("dtype")),
        group=None if group is None else _count(group, f"group of {fqns[0]!r}"),
        step=fields.count("step"),
        pieces=[_piece(_Fields(value, f"a piece of {fqns[0]!r}")) for value in fields.items("pieces")],
    )
    fields.end()
    return result


def _piece(fields: _Fields) -> PieceEntry:
    moments = {name: fields.take(name) for name in MOMENTS}
    entries = {name: None if value is None else _tensor(_Fields(value, name)) for name, value in moments.items()}
    result = PieceEntry(fields.count("start"), fields.count("stop"), _tensor(_Fields(fields.take("value"), "value")), **entries)
    fields.end()
    return result


def _tensor(fields: _Fields) -> TensorEntry:
    result = TensorEntry(
        fields.text("file"),
        _dtype(fields.text("dtype")),
        fields.count("offset"),
        fields.count("nbytes"),
        fields.crc32("crc32"),
    )
    fields.end()
    return result


def _buffer(fields: _Fields) -> BufferEntry:
    result = BufferEntry(fields.text("fqn"), fields.counts("shape"), _tensor(_Fields(fields.take("data"), "a buffer's data")))
    fields.end()
    return result


def _random(fields: _Fields) -> RandomEntry:
    device = fields.take("device")
    result = RandomEntry(
        fields.count("rank"),
        _tensor(_Fields(fields.take("cpu"), "cpu")),
        None if device is None else _tensor(_Fields(device, "device")),
    )
    fields.end()
    return result


def _padding(fields: _Fields) -> list[TensorEntry]:
    return [_tensor(_Fields(value, f"padding {index}")) for index, value in enumerate(fields.items("padding"))]


def _file(fields: _Fields) -> FileEntry:
    name = fields.text("name")
    if not _FILE_NAME.fullmatch(name):
        raise Malformed(f"the file name {name!r} is not a plain name of lower-case letters, digits, _ and -")
    result = FileEntry(name, fields.count("nbytes"), fields.count("header_nbytes"), fields.crc32("header_crc32"))
    fields.end()
    return result


def _dtype(code: str) -> str:
    if code not in DTYPES:
        raise Malformed(f"the dtype {code!r} is unknown")
    return code
