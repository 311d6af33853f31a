# SPDX-License-Identifier: Apache-2.0
"""One parameter's fp32 value, gradient or moment, read and set also before a step: `engine.read`, `engine.write`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offload.errors import UsageError
from offload.layout import Piece
from offload.model.chunk import Chunk
from offload.model.flat import ParameterInfo
from offload.ranks.next_transfers import MeetingPoint
from offload.step.components import Components
from offload.step.homes import Homes
from offload.step.parameter_access.gathering import Gathering
from offload.step.training import Training

VALUE, GRADIENT, STEP = "value", "gradient", "step"


class NamedStates:
    """Owned by the thread that drives the model. Collective: on several ranks all name the same parameter and kind."""

    def __init__(self, parts: Components, training: Training, gathering: Gathering) -> None:
        self._parts, self._training, self._gathering, self._homes = parts, training, gathering, Homes(parts)

    def kinds(self, info: ParameterInfo) -> tuple[str, ...]:
        """What there is to read of it."""
        if not info.trainable or self._parts.records is None:
            return (VALUE,)
        return (VALUE, GRADIENT, *self._parts.records.flat_format(info.flat).moments)

    def read(self, info: ParameterInfo, kind: str) -> Tensor | None:
        """See `Engine.read`."""
        if kind == STEP and len(self.kinds(info)) > 1:
            return torch.tensor(float(self._step_count(info)), dtype=torch.float32, device="cpu")
        self._require(info, kind)
        if kind == VALUE:
            return self._gathering.value_of(info)
        with self._training.failures():
            self._training.settle()
            return self._gradient(info) if kind == GRADIENT else self._whole(info, lambda: self._moment(info, kind))

    def write(self, info: ParameterInfo, kind: str, value: Tensor) -> None:
        """See `Engine.write`."""
        self._require(info, kind)
        if value.shape != info.shape or not value.is_floating_point():
            raise UsageError(
                f"{kind} of {info.fqn!r} was given as {value.dtype} {list(value.shape)}: expected floating-point numbers of "
                f"shape {list(info.shape)}."
            )
        self._gathering.meet(MeetingPoint.WRITTEN)
        with self._training.failures():
            self._training.settle()
            if kind == GRADIENT:
                scaled = value.detach().to(info.parameter.device, torch.float32) * self._training.loss_scale.value
                self._training.parameter_gradients.replace(info, scaled.to(info.dtype))
            elif kind == VALUE:
                self._write_value(info, value)
            else:
                self._write_moment(info, kind, value)
        self._gathering.meet(MeetingPoint.WRITTEN)

    def _require(self, info: ParameterInfo, kind: str) -> None:
        kinds = self.kinds(info)
        if kind not in kinds:
            raise UsageError(f"parameter {info.fqn!r} has no {kind!r}: it has {', '.join(kinds)}.")
        if self._training.lender.lends_any:
            raise UsageError(
                "engine.read or write was called inside `with engine.gathered(...)`: call it outside of the block."
            )

    # ---- reading -------------------------------------------------------------------------------------------------

    def _whole(self, info: ParameterInfo, own: Callable[[], Tensor]) -> Tensor:
        """From this rank's part (zeros elsewhere) to all of it, in the parameter's shape."""
        ranks = self._parts.ranks

        def joined() -> Tensor:
            bits = own().view(torch.int32)
            if ranks.world_size > 1 and self._parts.layout.stage > 0:
                total = torch.zeros_like(bits)
                for part in ranks.exchange(bits):
                    total |= part  # each element lies on one rank, or the same on several
                bits = total
            return bits.view(torch.float32)

        return info.shaped(self._gathering.meet(MeetingPoint.STATE_DICT, joined, argument=info.index))

    def _step_count(self, info: ParameterInfo) -> int:
        """How often it was updated: not counting an update that began before the step."""
        early = self._parts.units[info.unit_index].early
        return info.step - (early is not None and any(one is info for one in early.updated))

    def _moment(self, info: ParameterInfo, kind: str) -> Tensor:
        values = torch.zeros(info.numel, dtype=torch.float32, device="cpu")
        for chunk, piece in _filled_pieces(info):
            part = chunk.part(piece)
            values[piece.in_parameter].copy_(self._homes.record(chunk).moment(kind, part.start, part.stop))
        return values

    def _gradient(self, info: ParameterInfo) -> Tensor | None:
        gradients = self._training.parameter_gradients
        gradients.gather_in()
        found = self._whole(info, lambda: gradients.own(info))
        return found / self._training.loss_scale.value if gradients.is_live(info) else None

    # ---- writing -------------------------------------------------------------------------------------------------

    def _write_value(self, info: ParameterInfo, value: Tensor) -> None:
        unit, uses = self._parts.units[info.unit_index], self._training.uses
        exact = info.in_memory_order(value.detach().to("cpu", torch.float32))
        uses.hold(unit)
        info.view.copy_(info.shaped(self._homes.rounded(info.flat, exact)))
        for chunk, piece in _filled_pieces(info):
            if self._homes.has_master(info.flat):
                with self._homes.changing(chunk) as record:
                    part = chunk.part(piece)
                    record.put_master(part.start, part.stop, exact[piece.in_parameter].to(record.device))
            self._homes.write_values(chunk)
        self._training.values_changed(unit)
        uses.release(unit)

    def _write_moment(self, info: ParameterInfo, kind: str, value: Tensor) -> None:
        exact = info.in_memory_order(value.detach().to("cpu", torch.float32))
        for chunk, piece in _filled_pieces(info):
            with self._homes.changing(chunk) as record:
                part = chunk.part(piece)
                record.put_moment(kind, part.start, part.stop, exact[piece.in_parameter].to(record.device))


def _filled_pieces(info: ParameterInfo) -> list[tuple[Chunk, Piece]]:
    """What of it lies in each of this rank's chunks, where that is anything."""
    return [(chunk, piece) for chunk, piece in info.pieces if piece.numel]
