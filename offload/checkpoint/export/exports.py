# SPDX-License-Identifier: Apache-2.0
"""Exports of one engine: its weights for others, the adapters of a PEFT model, or the base model with them merged into it.

Everything is read unit by unit. On several ranks all of them gather, and the first writes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.agreement import Agreement
from offload.checkpoint.checkpoint import Checkpointing
from offload.checkpoint.export.arriving import Arriving
from offload.checkpoint.export.peft import AdapterFile, Merging, Skeleton, adapter_files, computed_parameters
from offload.checkpoint.export.unpacking import Unpacking
from offload.checkpoint.export.weights import AdapterExporter, Exporter
from offload.checkpoint.format.consistency import row_major
from offload.checkpoint.model_names import buffers_once, kept_fqn, model_code, model_configs, plain_elements
from offload.checkpoint.state_reading import StateReader
from offload.config import parse_nbytes
from offload.errors import RankError, UsageError
from offload.model.flat import ParameterInfo
from offload.model.peft_names import is_peft, is_peft_model, library_models
from offload.ranks.next_transfers import MeetingPoint
from offload.step.components import Components
from offload.step.parameter_access.gathering import Gathering
from offload.step.training import Training

_SAVE_OPTIONS = (
    *("max_shard_size", "save_original_format"),
    *("safe_serialization", "is_main_process", "save_function", "save_peft_format", "token"),
)
"""Of a Hugging Face model's `save_pretrained`: what an export has too, or has no need of."""
_UNFINISHED = ".offload-export"
_WEIGHTS = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors(\.index\.json)?")
"""Files of an export's weights. What has more in its name (model_ema.safetensors) is somebody else's."""
Pieces = Iterable[tuple[ParameterInfo, torch.Tensor]]
"""Of each parameter all elements in slot order, in any number of parts."""
_Made = Callable[[nn.Module, Mapping[str, str]], Exporter]
"""From a model and its configurations."""


class Exporting:
    """See the module. Owned by the thread that drives the model."""

    def __init__(
        self, parts: Components, training: Training, gathering: Gathering, checkpointing: Checkpointing, model: nn.Module
    ) -> None:
        self._parts, self._training, self._model = parts, training, model
        self._gathering, self._checkpointing = gathering, checkpointing

    def export(
        self, path: Path, dtype: torch.dtype | None, max_shard_nbytes: int, *, merged: bool, exist_ok: bool = False
    ) -> None:
        """See `Engine.export`."""
        model = self._model
        if merged and not is_peft(model):
            adapted = [one for one in library_models(model).values() if is_peft(one)]
            if len(adapted) != 1:
                raise UsageError("export(merged=True) was called, but the model has no PEFT adapters to merge: leave it out.")
            model = adapted[0]
        self._prepare("export")
        if not merged and is_peft(model):
            self._export_adapters(_Place(path, exist_ok), dtype)
        else:
            self._export_whole(model, _Place(path, exist_ok), dtype, max_shard_nbytes, merged=merged)

    def _export_whole(
        self,
        model: nn.Module,
        place: _Place,
        dtype: torch.dtype | None,
        max_shard_nbytes: int,
        *,
        merged: bool,
        as_saved: bool = True,
    ) -> None:
        """`as_saved`: under the names that its library gives the weights on disk; False: under those in memory."""
        infos = self._infos_of(model)

        def exporter(saved: nn.Module, configs: Mapping[str, str]) -> Exporter:
            kind = type(saved).__name__
            return Exporter(place.written, dtype, max_shard_nbytes, kind, configs, saved if as_saved else None)

        def write(pieces: Iterator[Any]) -> None:
            with place:
                if merged:
                    self._export_merged(model, infos, exporter, dtype, pieces)
                else:
                    self._export(model, infos, exporter, pieces)

        self._write(write, {info.index for info in infos})

    def _infos_of(self, model: nn.Module) -> list[ParameterInfo]:
        """The parameters of one of the model's modules, by its own names."""
        path = next(path for path, module in self._model.named_modules() if module is model)
        start = f"{path}." if path else ""
        found = []
        for info in self._parts.parameters:
            names = tuple(fqn.removeprefix(start) for fqn in info.fqns if fqn.startswith(start))
            if names:
                found.append(replace(info, fqns=names))
        return found

    def save_adapters(self, own: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """What `own`, the `save_pretrained` of a PEFT model, does: on a skeleton of the model in which the values are that it
        saves. Collective; the first rank writes."""
        self._training.check()
        if keywords.get("state_dict") is not None or self._training.lender.lends_any:
            return own(*args, **keywords)
        self._prepare("save_pretrained")
        model: Any = own.__self__  # type: ignore[attr-defined]
        skeleton, adapters = self._adapters(model, None, keywords.get("save_embedding_layers", "auto"))
        wanted = {held for adapter in adapters for held in adapter.content.values() if isinstance(held, int)}

        def write(pieces: Pieces) -> None:
            _fill(skeleton, wanted, pieces)
            type(model).save_pretrained(skeleton.model, *args, **keywords)

        self._write(write, wanted)

    def save_whole(self, own: Callable[..., Any], save_directory: Any, *args: Any, **keywords: Any) -> Any:
        """What `own`, the `save_pretrained` of a Hugging Face model, does: unit by unit, in the place of an earlier save.
        Collective; the first rank writes. What an export cannot do (a `variant`, the hub) is left to `own`."""
        self._training.check()
        others = {name: value for name, value in keywords.items() if name not in _SAVE_OPTIONS and value not in (None, False)}
        if args or others or not keywords.get("safe_serialization", True) or self._training.lender.lends_any:
            return own(save_directory, *args, **keywords)
        shard_size = parse_nbytes(keywords.get("max_shard_size", "5GB"), "max_shard_size")
        self._prepare("save_pretrained")
        model: Any = own.__self__  # type: ignore[attr-defined]
        place = _Place(Path(save_directory), exist_ok=True)
        if is_peft(model):
            self._export_adapters(place, None, model)
        else:
            as_saved = bool(keywords.get("save_original_format", True))
            self._export_whole(model, place, None, shard_size, merged=False, as_saved=as_saved)

    def replaced_methods(self, model: nn.Module) -> dict[str, Callable[..., Any]]:
        """Methods of one of `library_models` that are called in another way, by name: as `TakenMethods` has them."""
        return {"save_pretrained": self.save_adapters if is_peft_model(model) else self.save_whole}

    # ---- what is written -----------------------------------------------------------------------------------------

    def _adapters(
        self, model: nn.Module, dtype: torch.dtype | None, save_embedding_layers: Any = "auto"
    ) -> tuple[Skeleton, list[AdapterFile]]:
        skeleton = Skeleton(model, self._infos_of(model), dtype)
        computed = computed_parameters(skeleton)
        if computed:
            self._write(lambda pieces: _fill(skeleton, computed, pieces), computed)
        return skeleton, adapter_files(skeleton, save_embedding_layers)

    def _export_adapters(self, place: _Place, dtype: torch.dtype | None, model: nn.Module | None = None) -> None:
        skeleton, adapters = self._adapters(model if model is not None else self._model, dtype)
        exporter, places = AdapterExporter(place.written, dtype, adapters), dict[int, list[str]]()
        buffers: list[tuple[str, torch.Tensor]] = []
        for adapter in adapters:
            for key, held in adapter.content.items():
                name = exporter.name_of(adapter, key)
                if isinstance(held, int):
                    info = skeleton.infos[held]
                    exporter.add(name, info.shape, info.stride, info.dtype, key)
                    places.setdefault(held, []).append(name)
                else:
                    exporter.add_buffer(name, held.shape, held.dtype, key)
                    buffers.append((name, held))

        def write(pieces: Pieces) -> None:
            values = ((name, part) for info, part in pieces for name in places[info.index])
            with place:
                exporter.write(chain(values, _flat(buffers)))

        self._write(write, places)

    @staticmethod
    def _export_merged(
        model: nn.Module, infos: Sequence[ParameterInfo], made: _Made, dtype: torch.dtype | None, pieces: Iterator[Any]
    ) -> None:
        unpacking = Unpacking(infos)
        skeleton = Skeleton(model, unpacking.infos, dtype)
        merging = Merging(skeleton)
        code = model_code(skeleton.base)  # first: its names belong in the config
        configs = merging.configs(model_configs(skeleton.base, as_packed=not unpacking.any))
        exporter = made(skeleton.base, configs)
        exporter.add_code(code)
        names = {index: kept_fqn(skeleton.base, found) for index, found in merging.names.items()}
        for index, name in names.items():
            info = skeleton.infos[index]
            stride = row_major(info.shape) if merging.is_merged(index) else info.stride
            exporter.add(name, info.shape, stride, info.dtype)
        for fqn, buffer in merging.buffers():
            exporter.add_buffer(fqn, buffer.shape, buffer.dtype)
        values = ((names[index], part) for index, part in merging.merged(unpacking.unpacked(pieces)))
        exporter.write(chain(values, _flat(merging.buffers())))

    @staticmethod
    def _export(model: nn.Module, infos: Sequence[ParameterInfo], made: _Made, pieces: Iterator[Any]) -> None:
        unpacking = Unpacking(infos)
        code = model_code(model)  # first: its names belong in the config
        exporter = made(model, model_configs(model, as_packed=not unpacking.any))
        exporter.add_code(code)
        names = {info.index: kept_fqn(model, info.fqns) for info in unpacking.infos}
        for info in unpacking.infos:
            exporter.add(names[info.index], info.shape, info.stride, info.dtype)
        for fqn, buffer in buffers_once(model):
            exporter.add_buffer(fqn, buffer.shape, buffer.dtype)
        values = ((names[info.index], part) for info, part in unpacking.unpacked(pieces))
        exporter.write(chain(values, _flat(buffers_once(model))))

    # ---- where it comes from -------------------------------------------------------------------------------------

    def _prepare(self, what: str) -> None:
        self._checkpointing.prepare(what)
        with self._training.failures():
            self._training.settle()

    def _write(self, write: Callable[[Iterator[Any]], None], wanted: Collection[int]) -> None:
        """`write` gets the parameters of these indices, piece by piece."""

        def write_wanted(pieces: Iterator[Any]) -> None:
            write(piece for piece in pieces if piece[0].index in wanted)

        if self._parts.ranks.world_size == 1:
            write_wanted(self._own_pieces(wanted))
        else:
            self._write_first(write_wanted)

    def _own_pieces(self, wanted: Collection[int]) -> Iterator[tuple[ParameterInfo, torch.Tensor]]:
        with closing(StateReader(self._parts, self._training.failures)) as reader:
            for unit in self._parts.units:
                if any(info.index in wanted for info in unit.parameters):
                    for state in reader.pieces(unit):
                        yield state.info, state.value

    def _write_first(self, write: Callable[[Iterator[Any]], None]) -> None:
        """On several ranks: all of them gather unit by unit, the first writes."""
        gathered = self._gathering.values_by_unit(MeetingPoint.EXPORTING)
        failure: Exception | None = None
        if self._parts.ranks.index == 0:
            try:
                write(gathered)
            except Exception as error:
                if self._training.has_failed:
                    raise  # nobody is met any more
                failure = error
        for _ in gathered:
            pass  # the other ranks, and this one after a failure: the gathers are everybody's

        def outcome() -> None:
            if failure is not None:
                raise failure

        agreement = Agreement(self._parts.ranks, self._gathering.meet)
        agreement.by_first(
            MeetingPoint.EXPORTING, outcome, lambda word: RankError(f"rank 0 could not write the export: {word}")
        )


def _flat(buffers: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in buffers:
        yield name, plain_elements(name, buffer).reshape(-1)


def _fill(skeleton: Skeleton, wanted: Collection[int], pieces: Pieces) -> None:
    """Give parameters of the skeleton their values."""
    sizes = {index: (skeleton.infos[index].numel, skeleton.twins[index].dtype) for index in sorted(wanted)}
    arriving = Arriving(sizes)
    for info, part in pieces:
        arriving.take(info.index, part)
    for index, values in arriving.values.items():
        skeleton.fill(index, values)


class _Place:
    """Where an export is written, and then moved to. The context is the first rank's."""

    def __init__(self, path: Path, exist_ok: bool) -> None:
        self._path, self._exist_ok = path, exist_ok
        self.written = path / _UNFINISHED if exist_ok else path

    def __enter__(self) -> None:
        if self._exist_ok and self.written.exists():  # of a process that was killed
            shutil.rmtree(self.written)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._exist_ok and kind is None:
            self._move_up()

    def _move_up(self) -> None:
        """Over an earlier export, of which no weights stay: they would be loaded instead, as they are until all others are
        there."""
        found = sorted(self.written.rglob("*"))
        names = {path.name for path in found}
        for path in found:
            target = self._path / path.relative_to(self.written)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                path.replace(target)
        if any(map(_WEIGHTS.fullmatch, names)):
            for path in sorted(self._path.iterdir()):
                if path.name not in names and _WEIGHTS.fullmatch(path.name):
                    path.unlink()
        shutil.rmtree(self.written)
