# SPDX-License-Identifier: Apache-2.0
"""Weights for others: Hugging Face safetensors shards with an index and the model's configuration, written as a stream."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from offload.checkpoint.export.peft import AdapterFile
from offload.checkpoint.format.consistency import row_major, same_order
from offload.checkpoint.format.staged_folder import StagedFolder, sync
from offload.checkpoint.format.tensor_file import TensorFile, TensorSpec, known_dtype, write_file
from offload.checkpoint.model_names import CONFIGS
from offload.model.flat import ParameterInfo
from offload.progress import Progress

_log = logging.getLogger(__name__)

ADAPTER_NAME = "adapter_model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(slots=True)
class _Incoming:
    """A tensor whose elements come in the order of `stride`. `whole` gathers them where that is not row by row."""

    spec: TensorSpec
    stride: tuple[int, ...]
    row_major: bool
    arrived_numel: int = 0
    whole: torch.Tensor | None = None


class Exporter:
    """Tensors are announced by `add`, then, inside the context, their values come by `append`, then `commit`.

    Extra host memory: 1 Mi elements, and one tensor where its elements do not lie row by row.
    """

    def __init__(self, path: Path, dtype: torch.dtype | None, max_shard_nbytes: int) -> None:
        """`dtype`: of every floating-point parameter; None: each in its own."""
        self._dtype, self._max_shard_nbytes = dtype, max_shard_nbytes
        self._folder = StagedFolder(path, replace=False)
        self._incoming: dict[str, _Incoming] = {}
        self._files: dict[str, TensorFile] = {}
        self._weight_dtype: torch.dtype | None = None

    def add(self, name: str, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> None:
        """Announce a parameter that runs in `dtype`."""
        target = self._dtype if self._dtype is not None and dtype.is_floating_point else dtype
        if self._weight_dtype is None and target.is_floating_point:
            self._weight_dtype = target
        self._announce(name, tuple(shape), tuple(stride), target)

    def add_buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Announce a buffer; it keeps its dtype."""
        self._announce(name, tuple(shape), row_major(shape), dtype)

    def _announce(
        self, name: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, key: str | None = None
    ) -> None:
        """`key`: what the file calls it; None: `name`."""
        spec = TensorSpec(key or name, known_dtype(name, dtype), shape)
        self._incoming[name] = _Incoming(spec, stride, same_order(shape, stride, row_major(shape)))

    def __enter__(self) -> Exporter:
        self._folder.__enter__()
        total_nbytes = sum(one.spec.nbytes for one in self._incoming.values())
        self._progress = Progress(_log, "export: %.1f of %.1f GiB are written", total_nbytes)
        try:
            for file_name, names in self._layout():
                folder = (self._folder.path / file_name).parent
                folder.mkdir(exist_ok=True)
                specs = [self._incoming[name].spec for name in names]
                file = TensorFile(folder, Path(file_name).name, specs)
                self._files.update(dict.fromkeys(names, file))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _layout(self) -> Iterator[tuple[str, list[str]]]:
        """The files, and which of the announced tensors are in them."""
        shards = _shards({name: one.spec.nbytes for name, one in self._incoming.items()}, self._max_shard_nbytes)
        for index, names in enumerate(shards):
            several = f"-{index + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            yield f"model{several}.safetensors", names

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()
        self._folder.__exit__()

    def append(self, name: str, values: torch.Tensor) -> None:
        """The next elements of a tensor, 1-D in host memory, in the order of its strides, in any dtype."""
        incoming = self._incoming[name]
        if incoming.row_major:
            self._write(name, values)
            return
        shape, start = incoming.spec.shape, incoming.arrived_numel
        if incoming.whole is None:
            incoming.whole = torch.empty(torch.Size(shape).numel(), dtype=values.dtype, device="cpu")
        incoming.whole[start : start + values.numel()].copy_(values)
        incoming.arrived_numel += values.numel()
        if incoming.arrived_numel == incoming.whole.numel():
            shaped = incoming.whole.as_strided(shape, incoming.stride)
            incoming.whole = None
            self._write(name, shaped.contiguous().reshape(-1))

    def commit(self, kind: str, configs: Mapping[str, str]) -> None:
        """Write index and configurations; then the export is there, whole. `kind`: the model's class."""
        files = list(dict.fromkeys(self._files.values()))
        for file in files:
            file.finish()
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(one.spec.nbytes for one in self._incoming.values())},
                "weight_map": {name: file.name for name, file in sorted(self._files.items())},
            }
            write_file(self._folder.path / INDEX_NAME, _json(index))
        for attribute, text in configs.items():
            content = json.loads(text)
            if attribute == "config":
                content["architectures"] = [kind]
                if self._weight_dtype in DTYPE_NAMES:
                    key = "torch_dtype" if "torch_dtype" in content else "dtype"
                    content[key] = DTYPE_NAMES[self._weight_dtype]
            write_file(self._folder.path / CONFIGS[attribute], _json(content))
        self._folder.commit()

    def _write(self, name: str, values: torch.Tensor) -> None:
        file, spec = self._files[name], self._incoming[name].spec
        self._progress.add(values.numel() * spec.dtype.itemsize)
        file.append(spec.name, values)


class AdapterExporter(Exporter):
    """As `Exporter`, for the adapters of a PEFT model: a file and a configuration for each, the default's at the top."""

    def __init__(self, path: Path, dtype: torch.dtype | None, adapters: Sequence[AdapterFile]) -> None:
        super().__init__(path, dtype, 0)
        self._adapters = adapters

    def add_copy(self, adapter: AdapterFile, key: str, info: ParameterInfo) -> None:
        """Announce a parameter that an adapter saves under `key`, as `name_of` calls it."""
        target = self._dtype if self._dtype is not None and info.dtype.is_floating_point else info.dtype
        self._announce(self.name_of(adapter, key), tuple(info.shape), info.stride, target, key)

    def add_buffer_copy(self, adapter: AdapterFile, key: str, buffer: torch.Tensor) -> None:
        """As `add_copy`, of a buffer."""
        self._announce(self.name_of(adapter, key), tuple(buffer.shape), row_major(buffer.shape), buffer.dtype, key)

    @staticmethod
    def name_of(adapter: AdapterFile, key: str) -> str:
        """What `append` calls a tensor."""
        return f"{adapter.folder}/{key}"

    def _layout(self) -> Iterator[tuple[str, list[str]]]:
        for adapter in self._adapters:
            yield str(Path(adapter.folder) / ADAPTER_NAME), [self.name_of(adapter, key) for key in adapter.content]

    def commit_adapters(self) -> None:
        """Write the configurations; then the export is there, whole."""
        for file in dict.fromkeys(self._files.values()):
            file.finish()
        for adapter in self._adapters:
            folder = self._folder.path / adapter.folder
            write_file(folder / "adapter_config.json", adapter.config)
            sync(folder)
        self._folder.commit()


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
