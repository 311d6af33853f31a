# SPDX-License-Identifier: Apache-2.0
"""`DeepSpeedEngine`: DeepSpeed's calls around `offload.Engine`, which does the work.

A micro-step is one backward(loss) and step(). backward divides the loss by the number of micro-batches of a step; step updates
at the last of them (the boundary), drops the gradients and steps the scheduler, unless the update was left out for non-finite
gradients.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

import offload
from offload.deepspeed import comm, fragments
from offload.deepspeed.absent import AskedWrongly
from offload.deepspeed.layer_drop import ProgressiveLayerDrop
from offload.deepspeed.loss_scaler import LossScaler
from offload.deepspeed.numbers import Numbers
from offload.deepspeed.ops import BaseOptimizer
from offload.deepspeed.outputs import divided
from offload.deepspeed.owners import forget
from offload.deepspeed.saving import Saving
from offload.deepspeed.utils import log_dist
from offload.deepspeed_config import Translation
from offload.errors import UsageError


class DeepSpeedEngine(Saving, Numbers, nn.Module):  # type: ignore[misc]
    """What `initialize` returns. The model is `.module`; names of parameters begin with "module.", as in DeepSpeed.

    `.offload_engine` is this package's own engine, with its statistics, `gathered` and `export`.

    sparse_tensor_module_names  modules whose gradients travel as sparse tensors; there are none, all gradients are dense
    """

    sparse_tensor_module_names: frozenset[str] = frozenset()

    def __init__(self, engine: offload.Engine, said: Translation, lr_scheduler: Any, training_dataloader: Any) -> None:
        nn.Module.__init__(self)
        self.module = engine.module
        self.offload_engine, self._said = engine, said
        self.optimizer: Any = engine.optimizer if engine.trains else None
        self.lr_scheduler, self.training_dataloader = lr_scheduler, training_dataloader
        parameter = next(engine.module.parameters(), None)
        self.device = parameter.device if parameter is not None else torch.device("cpu")
        self.local_rank, self.global_rank, self.world_size = comm.get_local_rank(), comm.get_rank(), comm.get_world_size()
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self.loss_scaler = LossScaler.of(said.half, hesitates=said.config.stage > 0)
        self._boundary: bool | None = None
        self._step_applied = self._backward_is_own = self._is_stepping = self.inside_no_sync_ctxt = False
        self._backwards_since_step = 0
        self.progressive_layer_drop = ProgressiveLayerDrop(*said.layer_drop) if said.layer_drop is not None else None
        self._summing = self.world_size if said.sums_gradients else 1
        """What gradients, which are averaged over the ranks, are multiplied by."""
        if self.optimizer is not None:
            self._adapt_optimizer(self.optimizer)

    def _adapt_optimizer(self, optimizer: Any) -> None:
        """What scripts look for on DeepSpeed's optimizers."""
        shown = vars(optimizer)
        shown.update(
            optimizer=BaseOptimizer(optimizer, self.offload_engine),
            loss_scaler=self.loss_scaler,
            loss_scale_config=self.loss_scaler,
            dynamic_loss_scale=self.loss_scaler.dynamic,
            custom_loss_scaler=False,
            needs_scaler=lambda: self._said.half is not None,
            clip_grad=self.gradient_clipping(),
            partitions=self.zero_optimization(),
            backward=self._scaled_backward,
            overflow=False,
            _global_grad_norm=0.0,
        )
        if self._said.config.stage == 2:  # at stage 3 the optimizer's call drops them, as at 0 and 1
            shown["zero_grad"] = self.zero_grad
        self._show_scale()

    def _show_scale(self) -> None:
        if self.optimizer is None:
            return
        scale = self.loss_scaler.cur_scale
        if self._said.half is not None and self.offload_engine.loss_scale != scale:
            self.offload_engine.loss_scale = scale
        vars(self.optimizer).update(cur_scale=scale, loss_scale=scale)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if self.progressive_layer_drop is not None and self.module.training:
            keywords |= self.progressive_layer_drop.get_state()
        with self._autocast():
            outputs = self.module(*inputs, **keywords)
        if self.gradient_accumulation_steps() == self._summing or not torch.is_grad_enabled():
            return outputs
        if torch._C._are_functorch_transforms_active():  # a derivative of the function itself, and no micro-batch
            return outputs
        return divided(outputs, self._divisor)

    def _autocast(self) -> AbstractContextManager[Any]:
        """As the config's "torch_autocast" says; where it says nothing, what is around the engine ends at it."""
        chosen, kind = self._said.autocast, self.device.type
        if chosen is None and not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, chosen, enabled=chosen is not None, cache_enabled=False)

    def _divisor(self) -> float:
        """Of gradients that a backward of the script's own brings; `backward` divides the loss itself."""
        return 1 if self._backward_is_own else self.gradient_accumulation_steps() / self._summing

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **tuning: Any
    ) -> torch.Tensor:
        """Accumulate the gradients of loss / gradient_accumulation_steps() and return that quotient."""
        del tuning  # as allreduce_gradients: DeepSpeed has passed over it for long
        if self.optimizer is None:
            raise AskedWrongly("must provide optimizer during init in order to use backward: pass one to initialize.")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise AskedWrongly(
                "backward needs a loss of one element, a scalar tensor: call backward of other outputs yourself."
            )
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        self._scaled_backward(loss, retain_graph=retain_graph)
        return loss

    def _scaled_backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self._backwards_since_step += 1
        self._backward_is_own = True
        may_be_last = self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation()
        try:
            with nullcontext() if may_be_last and not self.inside_no_sync_ctxt else self.offload_engine.no_sync():
                self.offload_engine.backward(loss * self._summing if self._summing != 1 else loss, retain_graph=retain_graph)
        finally:
            self._backward_is_own = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, for a `backward()` of the script's own."""
        if self.optimizer is None:
            raise AskedWrongly("must provide optimizer during init in order to use scale: pass one to initialize.")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise AskedWrongly("scale needs a loss of one element, a scalar tensor: multiply other outputs by cur_scale.")
        return self.offload_engine.scaled(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step, and update at the boundary."""
        if self.inside_no_sync_ctxt:
            raise AskedWrongly("It is illegal to call Engine.step() inside no_sync context manager: call it after the block.")
        if self.optimizer is None:
            raise AskedWrongly(
                "step was called on an engine without an optimizer (must provide optimizer during init): pass one to "
                "initialize, or set it in the config."
            )
        self._step_applied, self._is_stepping = False, True
        try:
            if self.is_gradient_accumulation_boundary():
                self._update(lr_kwargs or {})
        finally:
            self._is_stepping = False
        self.micro_steps += 1

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        if not self._said.ignores_unused and self.zero_optimization_stage() in (1, 2):
            self._require_gradients()
        self._fill_unused()
        self.optimizer.step()
        self.offload_engine.zero_grad()
        if self.progressive_layer_drop is not None:
            self.progressive_layer_drop.update_state(self.global_steps)
        norm = self.offload_engine.grad_norm or 0.0
        self._step_applied = math.isfinite(norm)
        self.loss_scaler.update_scale(not self._step_applied)
        vars(self.optimizer).update(overflow=not self._step_applied, _global_grad_norm=norm)
        self._show_scale()
        if not self._step_applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self._count_samples()
        every = self._said.steps_per_print
        if every is not None and self.global_steps % every == 0:
            log_dist(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}", ranks=[0])

    def _count_samples(self) -> None:
        if not self.managed_gradient_accumulation():
            per_backward = self.train_batch_size() // self.gradient_accumulation_steps()
            self.global_samples += per_backward * self._backwards_since_step
        else:
            self.global_samples += self.train_batch_size()
        self._backwards_since_step = 0

    def _require_gradients(self) -> None:
        unused = [name for name, one in self.module.named_parameters() if one.requires_grad and one.grad is None]
        if unused:
            raise AskedWrongly(
                f"the loss does not depend on {', '.join(unused)}, and zero_optimization.ignore_unused_parameters is false: "
                "use them in the forward, freeze them, or set ignore_unused_parameters to true."
            )

    def _fill_unused(self) -> None:
        """Zeros for the gradients that no rank has, as in DeepSpeed: moments and weight decay go on. Collective."""
        trained = [one for group in self.optimizer.param_groups for one in group["params"] if one.requires_grad]
        unused = {index for index, one in enumerate(trained) if one.grad is None}
        for index in sorted(set.intersection(*comm.gathered_objects(unused))):
            self.offload_engine.write(trained[index], "gradient", torch.zeros(trained[index].shape, device="cpu"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, which `step` does by itself after an update. Between the micro-batches of a step it is as in
        DeepSpeed: stages 0 and 1 drop what has accumulated, stages 2 and 3 keep it."""
        del set_to_none
        if self.zero_optimization_stage() < 2:
            self.offload_engine.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate; call `step` outside. DeepSpeed refuses this from stage 2 on."""
        if self.inside_no_sync_ctxt:
            raise AskedWrongly("no_sync context manager reentry is unsupported, nor can blocks be nested: leave the first.")
        self.inside_no_sync_ctxt = True
        try:
            with self.offload_engine.no_sync():
                yield
        finally:
            self.inside_no_sync_ctxt = False

    coalesce_grad_reduction = no_sync
    """Gradients that accumulate inside are averaged once, at the step."""

    def managed_gradient_accumulation(self) -> bool:
        """Whether `step` counts micro-batches; if not, every `step` updates, after any number of backwards."""
        return self._said.manages_accumulation

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates."""
        if self._boundary is not None:
            return self._boundary
        if not self.managed_gradient_accumulation():
            return self._is_stepping
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next `step` updates; from then on micro-batches are not counted."""
        if not self.managed_gradient_accumulation():
            raise AskedWrongly(
                "set_gradient_accumulation_boundary() is not for managed_gradient_accumulation=false: every step() is one."
            )
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated, which it does not between boundaries, nor with non-finite gradients."""
        return self._step_applied

    # ---- placement -----------------------------------------------------------------------------------------------

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Check that the states lie in CPU memory between uses, where the config puts them. Nothing is moved by hand."""
        del pin_memory, non_blocking
        fragments.check_states(include, device)
        placement = self.offload_engine.stats()["placement"]
        if self.device.type != "cpu" and "device" in (placement["parameters"], placement["optimizer_states"]):
            raise UsageError(
                f"offload_states was called, and parameters lie on {placement['parameters']!r}, optimizer states on "
                f"{placement['optimizer_states']!r}: set offload_param.device and offload_optimizer.device to 'cpu', and they "
                "take no device memory between uses."
            )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Do nothing: `offload_states` moved nothing."""
        del non_blocking

    def empty_partition_cache(self) -> None:
        """Do nothing: units leave the device by the schedule."""

    # ---- lifecycle -----------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Close the engine. The end of the process does so too."""
        forget(self.module.parameters())
        self.offload_engine.close()

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
        **keywords: Any,
    ) -> None:
        """Compile the model in place, with torch.compile, which is given `backend`, `compile_kwargs` and `keywords`."""
        del schedule, compiled_autograd_enabled
        self.module.compile(**{**(compile_kwargs or {}), **keywords, "backend": backend})

    def to(self, *args: Any, **keywords: Any) -> DeepSpeedEngine:
        """Accept the device that the engine is on already, and refuse any other."""
        given = (*args, *keywords.values())
        is_device = len(given) == 1 and isinstance(given[0], (str, int, torch.device))
        if not is_device or torch.device(given[0]).type != self.device.type:
            raise UsageError(
                "an engine's model stays where the config says: choose device and dtype there, and leave to() out."
            )
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> DeepSpeedEngine:
        raise UsageError("an engine's parameters stay where the config says: choose device and dtype there.")

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            pass
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None and hasattr(module, name):
            return getattr(module, name)
        close = difflib.get_close_matches(name, [one for one in dir(type(self)) if not one.startswith("_")], n=1, cutoff=0.6)
        hint = f"; the nearest is {close[0]}" if close else ""
        raise AttributeError(f"the engine has no {name!r}, and neither has {type(module).__name__}{hint}.")
