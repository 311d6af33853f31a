"""Weights for others: Hugging Face safetensors shards with an index and the model's configuration, written as a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from offload.checkpoint.consistency import row_major, same_order
from offload.checkpoint.model_names import CONFIGS
from offload.checkpoint.staged_folder import StagedFolder
from offload.checkpoint.tensor_file import METADATA, TensorFile, TensorSpec, known_dtype, write_file
from offload.device.rounding import round_into

INDEX_NAME = "model.safetensors.index.json"
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_STEP_NUMEL = 2**20


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

    def _announce(self, name: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        spec = TensorSpec(name, known_dtype(name, dtype), shape)
        self._incoming[name] = _Incoming(spec, stride, same_order(shape, stride, row_major(shape)))

    def __enter__(self) -> Exporter:
        shards = _shards([one.spec for one in self._incoming.values()], self._max_shard_nbytes)
        self._folder.__enter__()
        try:
            for index, specs in enumerate(shards):
                name = "model.safetensors"
                if len(shards) > 1:
                    name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
                file = TensorFile(self._folder.path, name, specs, METADATA)
                self._files.update({spec.name: file for spec in specs})
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()
        self._folder.__exit__()

    def append(self, name: str, values: torch.Tensor) -> None:
        """The next elements of a tensor, 1-D in host memory, in the order of its strides, in any dtype."""
        incoming = self._incoming[name]
        if incoming.row_major:
            self._write(incoming.spec, values)
            return
        shape, start = incoming.spec.shape, incoming.arrived_numel
        if incoming.whole is None:
            incoming.whole = torch.empty(torch.Size(shape).numel(), dtype=values.dtype)
        incoming.whole[start : start + values.numel()].copy_(values)
        incoming.arrived_numel += values.numel()
        if incoming.arrived_numel == incoming.whole.numel():
            shaped = incoming.whole.as_strided(shape, incoming.stride)
            incoming.whole = None
            self._write(incoming.spec, shaped.contiguous().reshape(-1))

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

    def _write(self, spec: TensorSpec, values: torch.Tensor) -> None:
        file = self._files[spec.name]
        if values.dtype == spec.dtype:
            file.append(spec.name, values)
            return
        for low in range(0, values.numel(), _STEP_NUMEL):
            part = values[low : low + _STEP_NUMEL]
            rounded = torch.empty(part.numel(), dtype=spec.dtype)
            round_into(rounded, part)
            file.append(spec.name, rounded)


def _shards(specs: Sequence[TensorSpec], max_nbytes: int) -> list[list[TensorSpec]]:
    """In the given order, each shard at most `max_nbytes` unless a single tensor is larger."""
    shards: list[list[TensorSpec]] = [[]]
    filled_nbytes = 0
    for spec in specs:
        if shards[-1] and filled_nbytes + spec.nbytes > max_nbytes:
            shards.append([])
            filled_nbytes = 0
        shards[-1].append(spec)
        filled_nbytes += spec.nbytes
    return shards


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
