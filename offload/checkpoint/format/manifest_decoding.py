# SPDX-License-Identifier: Apache-2.0
"""Reading MANIFEST.json: every key must be known and there, every value of its kind and within its bounds."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from offload.checkpoint.format.manifest import (
    FORMAT,
    KEYS_OF,
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
from offload.checkpoint.format.packing import unpacked
from offload.errors import CheckpointError
from offload.model.file_dtypes import DTYPES

T = TypeVar("T")
READABLE_VERSIONS = (VERSION, VERSION_IMPORTED, VERSION_PADDED, VERSION_PARTIAL)

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}\.safetensors")
_MAX_COUNT = (1 << 63) - 1


class Malformed(Exception):
    """What is wrong with a manifest, as a clause."""


class _Fields:
    """The fields of one JSON object, each taken once and checked."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise Malformed(f"{where} is not an object")
        self._left, self._where = dict(value), where

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise Malformed(f"{self._where} has no {name!r}")
        return self._left.pop(name)

    def _typed(self, name: str, kind: type[T], otherwise: str) -> T:
        value = self.take(name)
        if not isinstance(value, kind):
            raise Malformed(f"{name} of {self._where} is {otherwise}")
        return value

    def count(self, name: str) -> int:
        return _count(self.take(name), f"{name} of {self._where}")

    def text(self, name: str) -> str:
        return self._typed(name, str, "not a text")

    def number(self, name: str) -> float:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e300:
            raise Malformed(f"{name} of {self._where} is not a finite number")
        return float(value)

    def truth(self, name: str) -> bool:
        return self._typed(name, bool, "neither true nor false")

    def items(self, name: str) -> list[Any]:
        return self._typed(name, list, "not a list")

    def counts(self, name: str) -> list[int]:
        return [_count(value, f"{name} of {self._where}") for value in self.items(name)]

    def texts(self, name: str) -> list[str]:
        values = self.items(name)
        if not all(isinstance(value, str) for value in values):
            raise Malformed(f"{name} of {self._where} holds something that is not a text")
        return values

    def mapping(self, name: str) -> dict[str, Any]:
        return self._typed(name, dict, "not an object")

    def crc32(self, name: str) -> int:
        value = self.count(name)
        if value >> 32:
            raise Malformed(f"{name} of {self._where} is not a number of 32 bits")
        return value

    def dtype(self, name: str) -> str:
        code = self.text(name)
        if code not in DTYPES:
            raise Malformed(f"the dtype {code!r} is unknown")
        return code

    def object(self, name: str, decode: Callable[[_Fields], T]) -> T:
        return _object(self.take(name), name, decode)

    def optional(self, name: str, decode: Callable[[_Fields], T]) -> T | None:
        value = self.take(name)
        return None if value is None else _object(value, name, decode)

    def objects(self, name: str, each: str, decode: Callable[[_Fields], T]) -> list[T]:
        """`each`: what one of them is called."""
        return [_object(value, f"{each} {index}", decode) for index, value in enumerate(self.items(name))]

    def end(self) -> None:
        """Refuse what is left."""
        if self._left:
            raise Malformed(f"{self._where} has the unknown key {next(iter(self._left))!r}")


def _object(value: Any, where: str, decode: Callable[[_Fields], T]) -> T:
    fields = _Fields(value, where)
    result = decode(fields)
    fields.end()
    return result


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
    fields.take("format")
    version = fields.take("version")
    line, newline, body = content.partition(b"\n")
    crc32 = fields.crc32("crc32")
    if line + newline != head(version, crc32):  # no checksum covers it
        raise Malformed(f"its first line is not {head(version, crc32)!r}: it is damaged")
    if zlib.crc32(body) != crc32:
        raise Malformed(f"its bytes have the checksum {zlib.crc32(body)}, not {crc32}: it is damaged")
    manifest = _object(fields.take("manifest"), "the manifest", lambda inside: _manifest(inside, version))
    fields.end()
    return manifest


def _manifest(fields: _Fields, version: int) -> Manifest:
    is_imported = version in KEYS_OF["imported"]
    return Manifest(
        world_size=fields.count("world_size"),
        step_count=fields.count("step_count"),
        loss_scale=fields.object("loss_scale", _loss_scale),
        optimizer=fields.optional("optimizer", _optimizer),
        model=fields.object("model", _model),
        parameters=fields.objects("parameters", "parameter", _parameter),
        buffers=fields.objects("buffers", "buffer", _buffer),
        random=fields.objects("random", "random", _random),
        files=fields.objects("files", "file", _file),
        client_state=_unpacked(fields) if is_imported else fields.mapping("client_state"),
        imported=fields.text("imported") if is_imported else None,
        padding=fields.objects("padding", "padding", _tensor) if version in KEYS_OF["padding"] else [],
        without_frozen=version in KEYS_OF["without_frozen"] and fields.truth("without_frozen"),
    )


def _unpacked(fields: _Fields) -> dict[str, Any]:
    packed = fields.mapping("client_state")
    try:
        return {name: unpacked(value) for name, value in packed.items()}
    except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise Malformed(f"its client_state has a mark with what cannot be under it ({error})") from error


def _loss_scale(fields: _Fields) -> LossScaleEntry:
    result = LossScaleEntry(
        fields.number("value"),
        fields.truth("dynamic"),
        fields.count("good_step_count"),
        fields.count("skipped_step_count"),
    )
    if not result.value > 0:
        raise Malformed("value of loss_scale is not above 0")
    return result


def _optimizer(fields: _Fields) -> OptimizerEntry:
    groups = fields.items("param_groups")
    if not all(isinstance(group, dict) for group in groups):
        raise Malformed("param_groups of optimizer holds something that is not an object")
    return OptimizerEntry(fields.text("kind"), groups)


def _model(fields: _Fields) -> ModelEntry:
    result = ModelEntry(fields.text("kind"), fields.mapping("configs"), fields.texts("kept_fqns"))
    if not all(isinstance(text, str) for text in result.configs.values()):
        raise Malformed("configs of model holds something that is not a text")
    return result


def _parameter(fields: _Fields) -> ParameterEntry:
    fqns = fields.texts("fqns")
    if not fqns or len(set(fqns)) != len(fqns):
        raise Malformed("a parameter has no name, or one name twice")
    group = fields.take("group")
    return ParameterEntry(
        fqns=fqns,
        shape=fields.counts("shape"),
        stride=fields.counts("stride"),
        dtype=fields.dtype("dtype"),
        group=None if group is None else _count(group, f"group of {fqns[0]!r}"),
        step=fields.count("step"),
        pieces=[_object(value, f"a piece of {fqns[0]!r}", _piece) for value in fields.items("pieces")],
    )


def _piece(fields: _Fields) -> PieceEntry:
    return PieceEntry(
        start=fields.count("start"),
        stop=fields.count("stop"),
        value=fields.object("value", _tensor),
        exp_avg=fields.optional("exp_avg", _tensor),
        exp_avg_sq=fields.optional("exp_avg_sq", _tensor),
    )


def _tensor(fields: _Fields) -> TensorEntry:
    return TensorEntry(
        fields.text("file"), fields.dtype("dtype"), fields.count("offset"), fields.count("nbytes"), fields.crc32("crc32")
    )


def _buffer(fields: _Fields) -> BufferEntry:
    return BufferEntry(fields.text("fqn"), fields.counts("shape"), _object(fields.take("data"), "a buffer's data", _tensor))


def _random(fields: _Fields) -> RandomEntry:
    return RandomEntry(fields.count("rank"), fields.object("cpu", _tensor), fields.optional("device", _tensor))


def _file(fields: _Fields) -> FileEntry:
    name = fields.text("name")
    if not _FILE_NAME.fullmatch(name):
        raise Malformed(f"the file name {name!r} is not a plain name of lower-case letters, digits, _ and -")
    return FileEntry(name, fields.count("nbytes"), fields.count("header_nbytes"), fields.crc32("header_crc32"))
