# SPDX-License-Identifier: Apache-2.0
"""What the hooks report of forwards and backwards through the model, and what that leads to."""

from __future__ import annotations

from typing import Any

import torch

from offload.device.virtual.current import virtual_machine
from offload.errors import UsageError
from offload.model.flat import ParameterInfo
from offload.model.unit import Unit
from offload.step.components import Components
from offload.step.homes import Homes
from offload.step.nested_tensors import cast_floating
from offload.step.parameter_gradients import stale_gradient
from offload.step.training import Training


class ModelEvents:
    """Owned by the thread that runs the model's forward, or autograd's backward, never both at once. `Hooks` calls each method
    inside `Training.failures`."""

    def __init__(self, parts: Components, training: Training, *, input_dtype: torch.dtype | None) -> None:
        """`input_dtype`: what the root's floating-point inputs are cast to."""
        self._training, self._speculation = training, training.speculation
        self._parameter_gradients = training.parameter_gradients
        self._residency, self._gradient_sync, self._updates = parts.residency, parts.gradient_sync, parts.updates
        self._accelerator, self._timeline = parts.accelerator, parts.timeline
        self.all_stays = parts.stays
        self.memory_is_short = any(unit.route.has_store for unit in parts.units) or parts.placement.uses_nvme
        self._is_alone, self._trains = parts.ranks.world_size == 1, parts.gradients is not None
        self._homes, self._input_dtype = Homes(parts), input_dtype

    # ---- forward -------------------------------------------------------------------------------------------------

    def forward_begins(self, unit: Unit, inputs: Any) -> None:
        """An outermost one, on these inputs."""
        recorded = torch.is_grad_enabled()
        if recorded and (machine := virtual_machine()) is not None:
            left_out = machine.take_left_out()
            self._residency.micro_batch_begins(left_out)
            self._speculation.micro_batch_begins(left_out)
            self._parameter_gradients.micro_batches.micro_batch_begins(left_out)
        self._residency.forward_begins(unit, inputs, recorded=recorded)

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The root's inputs, as the root is to see them."""
        return (args, kwargs) if self._input_dtype is None else cast_floating(args, kwargs, self._input_dtype)

    def forward_ended(self) -> None:
        """An outermost forward is over (or was cut short by an exception)."""
        # What this forward did not use (an expert, a head) is not updated under it: do it now.
        self._training.finish_updates()

    def forward_wrote(self, info: ParameterInfo) -> None:
        """A forward that is about to end wrote to the parameter in place.

        All its values are carried home: of fp32 parameters, and of what is not trained, that is exactly what was written.
        """
        wrote = f"a forward wrote to parameter {info.fqn!r} in place"
        instead = "Write to it between steps, inside `with engine.gathered([parameter]):`."
        if not self._is_alone:
            raise UsageError(f"{wrote}: each rank's would write something else to what all share. {instead}")
        if info.trainable and info.dtype != torch.float32:
            raise UsageError(f"{wrote}, which its fp32 master does not see: its next update would undo it. {instead}")
        if self._updates is not None and self._updates.watcher is not None:
            raise UsageError(f"{wrote} while a save with wait=False copies it: wait for the save first. {instead}")
        self._homes.write(info, torch.ones(info.numel, dtype=torch.bool, device="cpu"))

    # ---- backward ------------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """An outermost backward reached the model."""
        self._training.backward_begins()
        self._parameter_gradients.backward_begins()
        self._speculation.backward_begins()

    def backward_reaches(self, unit: Unit, version: int | None) -> None:
        """A backward is about to use the unit; `version`: of the values that it must find, None where it reads none."""
        self._speculation.before_use(unit)
        if version is not None and version != unit.version:
            raise UsageError(
                f"backward reached unit {unit.name} through a forward that ran before optimizer.step() (a load, a write): its "
                "parameters have changed since. Run the forward again after the step."
            )
        if self.memory_is_short:
            self._accelerator.about_to_allocate(unit.largest_gradient_nbytes)

    def first_gradient_coming(self, unit: Unit, info: ParameterInfo) -> bool:
        """`gradient_coming` where that finds nothing: no earlier gradient, and no update of the unit. Whether that is so; it is
        in most steps for every parameter, and takes no turn."""
        if not self._trains or unit.early is not None or unit.update is not None:
            return False
        self._training.require_scaled_loss()
        return self._parameter_gradients.first_coming(info)

    def gradient_coming(self, unit: Unit, info: ParameterInfo) -> None:
        """PyTorch is about to accumulate into the parameter's `grad`."""
        if not self._trains:
            raise UsageError("backward was called, but offload.initialize was given no optimizer: pass one to train.")
        self._training.require_scaled_loss()
        self._speculation.before_use(unit)
        if unit.update is not None:
            raise stale_gradient(info.fqn)
        self._parameter_gradients.coming(info)

    def gradient_arrived(self, unit: Unit, info: ParameterInfo) -> None:
        """PyTorch accumulated into the parameter's `grad`."""
        with self._timeline.working("gradients", unit):
            gradient = self._parameter_gradients.arrived(info)
        if gradient is None:
            return
        self._residency.go_on()
        if self.memory_is_short and gradient.layout is torch.strided:
            self._accelerator.about_to_free(gradient.nbytes)

    def backward_leaves(self, unit: Unit) -> None:
        """No use of the unit is open in this backward any more."""
        if self._training.synchronizing:
            self._gradient_sync.leave(unit)
            self._speculation.backward_left(unit, 1.0 / self._training.loss_scale.value)

    def waiting_arrived(self, unit: Unit | None = None, module_id: int | None = None) -> bool:
        """Backward is about to leave a module of the unit, or (None) to be over: what waited in parameters has arrived. Whether
        any did."""
        with self._timeline.working("gradients"):
            nbytes = self._parameter_gradients.take_waiting(unit, module_id)
        if nbytes and unit is not None:
            self._residency.go_on()
            if self.memory_is_short:
                self._accelerator.about_to_free(nbytes)
        return nbytes > 0

    def backward_ended(self) -> None:
        """An outermost backward is over."""
        self._training.loss_is_scaled = False
        if self._training.synchronizing:
            self._gradient_sync.end()
            self._parameter_gradients.adopt()
