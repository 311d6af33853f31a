# SPDX-License-Identifier: Apache-2.0
"""Weights for others: Hugging Face safetensors shards with an index and the model's configuration, written as a stream."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from offload.checkpoint.export.arriving import Arriving
from offload.checkpoint.export.peft import AdapterFile
from offload.checkpoint.format.consistency import row_major, same_order
from offload.checkpoint.format.folders import sync
from offload.checkpoint.format.staged_folder import StagedFolder
from offload.checkpoint.format.tensor_file import TensorFile, TensorSpec, known_dtype, write_file
from offload.checkpoint.model_names import CONFIGS
from offload.model.conversions import Conversion, reversions
from offload.progress import Progress

_log = logging.getLogger(__name__)

ADAPTER_NAME = "adapter_model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(slots=True)
class _Incoming:
    """A tensor whose elements come in the order of `stride`. `arriving` gathers them where that is not row by row. `place`: by
    which it is known where it is written."""

    place: str
    spec: TensorSpec
    stride: tuple[int, ...]
    row_major: bool
    arriving: Arriving[str] | None = None


@dataclass(slots=True)
class _Joint:
    """Tensors that come, and of which others are made together when all are there."""

    conversion: Conversion
    arriving: Arriving[str]


class Exporter:
    """Tensors are announced by `add` and `add_buffer`; then their values come, by `write`. They are written as the library of
    their model saves them: under other names, and experts one by one, where its files have that.

    Extra host memory: 1 Mi elements, and one tensor where its elements do not lie row by row, or what is written otherwise
    than it comes.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype | None,
        max_shard_nbytes: int,
        kind: str,
        configs: Mapping[str, str],
        model: nn.Module | None = None,
    ) -> None:
        """`dtype`: of every floating-point parameter; None: each in its own. `kind`: the model's class. `configs`: as
        `model_configs` has them. `model`: whose tensors they are, under its own names; None: names are written as they are."""
        self._dtype, self._max_shard_nbytes, self._kind, self._configs = dtype, max_shard_nbytes, kind, configs
        self._model = model
        self._folder = StagedFolder(path, replace=False)
        self._incoming: dict[str, _Incoming] = {}
        self._joint: dict[str, _Joint] = {}
        """By the names of those that come."""
        self._outgoing: dict[str, TensorSpec] = {}
        self._files: dict[str, TensorFile] = {}
        """Both by places."""
        self._weight_dtype: torch.dtype | None = None
        self._code: Mapping[str, bytes] = {}

    def add(self, name: str, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, key: str | None = None) -> None:
        """Announce a parameter that runs in `dtype`. `key`: what its file calls it; None: `name`."""
        target = self._dtype if self._dtype is not None and dtype.is_floating_point else dtype
        if self._weight_dtype is None and target.is_floating_point:
            self._weight_dtype = target
        self._announce(name, tuple(shape), tuple(stride), target, key)

    def add_buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype, key: str | None = None) -> None:
        """Announce a buffer; it keeps its dtype."""
        self._announce(name, tuple(shape), row_major(shape), dtype, key)

    def add_code(self, files: Mapping[str, bytes]) -> None:
        """Announce what lies beside the configurations; `files`: as `model_code` has them."""
        self._code = files

    def _announce(
        self, name: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, key: str | None
    ) -> None:
        spec = TensorSpec(key or name, known_dtype(name, dtype), shape)
        self._incoming[name] = _Incoming(name, spec, stride, same_order(shape, stride, row_major(shape)))

    def write(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        """`values`: the next elements of a tensor, 1-D in host memory, in the order of its strides, in any dtype. When this
        returns the export is there, whole."""
        total_nbytes = sum(one.spec.nbytes for one in self._incoming.values())
        self._progress = Progress(_log, "export: %.1f of %.1f GiB are written", total_nbytes)
        self._outgoing = self._converted()
        files: list[TensorFile] = []
        with self._folder, ExitStack() as stack:
            for file_name, places in self._layout():
                folder = (self._folder.path / file_name).parent
                folder.mkdir(exist_ok=True)
                specs = [self._outgoing[place] for place in places]
                files.append(stack.enter_context(closing(TensorFile(folder, Path(file_name).name, specs))))
                self._files.update(dict.fromkeys(places, files[-1]))
            for name, part in values:
                self._append(name, part)
            for file in files:
                file.finish()
            self._describe()
            self._folder.commit()

    def _converted(self) -> dict[str, TensorSpec]:
        """What is written, by its places: what comes, and where that is needed for others these."""
        outlines = {
            name: torch.empty(one.spec.shape, dtype=one.spec.dtype, device="meta") for name, one in self._incoming.items()
        }
        found = reversions(self._model, outlines) if self._model is not None else None
        if found is None:
            return {one.place: one.spec for one in self._incoming.values()}
        renamed = {given: name for name, given in found.renamed.items()}
        joint_of = {name: conversion for conversion in found.joint for name in conversion.names}
        specs: list[TensorSpec] = []
        for name, one in self._incoming.items():
            if name in renamed:
                one.place, one.spec = renamed[name], replace(one.spec, name=renamed[name])
                specs.append(one.spec)
            elif name not in self._joint:
                specs += self._begin(joint_of[name], outlines)
        return {spec.name: spec for spec in specs}

    def _begin(self, conversion: Conversion, outlines: Mapping[str, torch.Tensor]) -> Iterator[TensorSpec]:
        """What it makes of those that come."""
        sizes = {name: (outlines[name].numel(), outlines[name].dtype) for name in conversion.names}
        self._joint.update(dict.fromkeys(sizes, _Joint(conversion, Arriving(sizes))))
        for name, outline in conversion.made_of(outlines).items():
            yield TensorSpec(name, known_dtype(name, outline.dtype), tuple(outline.shape))

    def _layout(self) -> Iterator[tuple[str, list[str]]]:
        """The files, and the places of what is in them."""
        shards = _shards({place: spec.nbytes for place, spec in self._outgoing.items()}, self._max_shard_nbytes)
        for index, places in enumerate(shards):
            several = f"-{index + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            yield f"model{several}.safetensors", places

    def _append(self, name: str, values: torch.Tensor) -> None:
        incoming, joint = self._incoming[name], self._joint.get(name)
        if joint is not None:
            if joint.arriving.take(name, values):
                self._append_made(joint)
            return
        spec = incoming.spec
        if not incoming.row_major:
            if incoming.arriving is None:
                incoming.arriving = Arriving({name: (torch.Size(spec.shape).numel(), values.dtype)})
            if not incoming.arriving.take(name, values):
                return
            values = incoming.arriving.values.pop(name).as_strided(spec.shape, incoming.stride).contiguous().reshape(-1)
        self._write(incoming.place, values)

    def _append_made(self, joint: _Joint) -> None:
        arrived = {}
        for name in joint.conversion.names:
            incoming = self._incoming[name]
            arrived[name] = joint.arriving.values.pop(name).as_strided(incoming.spec.shape, incoming.stride)
        for name, tensor in joint.conversion.made_of(arrived).items():
            self._write(name, tensor.contiguous().reshape(-1))

    def _write(self, place: str, values: torch.Tensor) -> None:
        spec = self._outgoing[place]
        self._progress.add(values.numel() * spec.dtype.itemsize)
        self._files[place].append(spec.name, values)

    def _describe(self) -> None:
        """Write index, configurations and code."""
        if len(set(self._files.values())) > 1:
            index = {
                "metadata": {"total_size": sum(spec.nbytes for spec in self._outgoing.values())},
                "weight_map": {name: file.name for name, file in sorted(self._files.items())},
            }
            write_file(self._folder.path / INDEX_NAME, _json(index))
        for attribute, text in self._configs.items():
            content = json.loads(text)
            if attribute == "config":
                content["architectures"] = [self._kind]
                if self._weight_dtype in DTYPE_NAMES:
                    key = "torch_dtype" if "torch_dtype" in content else "dtype"
                    content[key] = DTYPE_NAMES[self._weight_dtype]
            write_file(self._folder.path / CONFIGS[attribute], _json(content))
        for name, code in self._code.items():
            write_file(self._folder.path / name, code)


class AdapterExporter(Exporter):
    """As `Exporter`, for the adapters of a PEFT model: a file and a configuration for each, the default's at the top. What an
    adapter saves under a key is announced as `name_of` calls it."""

    def __init__(self, path: Path, dtype: torch.dtype | None, adapters: Sequence[AdapterFile]) -> None:
        super().__init__(path, dtype, 0, "", {})
        self._adapters = adapters

    @staticmethod
    def name_of(adapter: AdapterFile, key: str) -> str:
        return f"{adapter.folder}/{key}"

    def _layout(self) -> Iterator[tuple[str, list[str]]]:
        for adapter in self._adapters:
            yield str(Path(adapter.folder) / ADAPTER_NAME), [self.name_of(adapter, key) for key in adapter.content]

    def _describe(self) -> None:
        for adapter in self._adapters:
            folder = self._folder.path / adapter.folder
            write_file(folder / "adapter_config.json", adapter.config)
            sync(folder)


def _shards(sizes: Mapping[str, int], max_nbytes: int) -> list[list[str]]:
    """In the given order, each shard at most `max_nbytes` unless a single tensor is larger."""
    shards: list[list[str]] = [[]]
    filled_nbytes = 0
    for name, nbytes in sizes.items():
        if shards[-1] and filled_nbytes + nbytes > max_nbytes:
            shards.append([])
            filled_nbytes = 0
        shards[-1].append(name)
        filled_nbytes += nbytes
    return shards


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
