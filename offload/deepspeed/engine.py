"""`DeepSpeedEngine`: DeepSpeed's calls around `offload.Engine`, which does the work.

A micro-step is one backward(loss) and step(). backward divides the loss by the number of micro-batches of a step; step updates
at the last of them (the boundary), drops the gradients and steps the scheduler, unless the update was left out for non-finite
gradients.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.config import expanded
from offload.deepspeed import comm
from offload.deepspeed.absent import AskedWrongly
from offload.deepspeed.folder import agreed_tag, check_whose, read_latest, write_latest
from offload.deepspeed.outputs import divided
from offload.deepspeed.packing import packed, unpacked
from offload.deepspeed.utils import log_dist, logger
from offload.deepspeed_config import Translation
from offload.errors import UsageError

_PREFIX = "module."


class DeepSpeedEngine(nn.Module):
    """Made by `initialize`. The model is `.module`; names of parameters begin with "module.", as in DeepSpeed.

    `.offload_engine` is this package's engine, with its statistics, `gathered` and `export`.
    """

    def __init__(self, engine: offload.Engine, said: Translation, lr_scheduler: Any, training_dataloader: Any) -> None:
        super().__init__()
        self.module = engine.module
        self.offload_engine, self._said = engine, said
        self.optimizer = engine.optimizer if engine.trains else None
        self.lr_scheduler, self.training_dataloader = lr_scheduler, training_dataloader
        self.device = next(engine.module.parameters()).device
        self.local_rank, self.global_rank, self.world_size = comm.get_local_rank(), comm.get_rank(), comm.get_world_size()
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        if self.optimizer is not None and said.config.stage == 2:  # at stage 3 the optimizer's call drops them, as at 0 and 1
            vars(self.optimizer)["zero_grad"] = self.zero_grad
        self._boundary: bool | None = None
        self._step_applied = self._backward_is_own = False

    # ---- the loop ------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        outputs = self.module(*inputs, **keywords)
        if self.gradient_accumulation_steps() == 1 or not torch.is_grad_enabled():
            return outputs
        return divided(outputs, self._divisor)

    def _divisor(self) -> float:
        """Of gradients that a backward of the script's own brings; `backward` divides the loss itself."""
        return 1 if self._backward_is_own else self.gradient_accumulation_steps()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Accumulate the gradients of loss / gradient_accumulation_steps(); returns that."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise AskedWrongly(
                "backward needs a loss of one element, a scalar tensor: call backward of other outputs yourself."
            )
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        self._backward_is_own = True
        try:
            with nullcontext() if self.is_gradient_accumulation_boundary() else self.offload_engine.no_sync():
                self.offload_engine.backward(loss, retain_graph=retain_graph)
        finally:
            self._backward_is_own = False
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a `backward()` of the script's own."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise AskedWrongly("scale needs a loss of one element, a scalar tensor: multiply other outputs by cur_scale.")
        return self.offload_engine.scaled(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-step; at the boundary, update."""
        self._step_applied = False
        if self.is_gradient_accumulation_boundary():
            self._update(lr_kwargs or {})
        self.micro_steps += 1

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        if self.optimizer is None:
            raise UsageError(
                "step was called on an engine without an optimizer: pass one to initialize, or set it in the config."
            )
        if not self._said.ignores_unused and self.zero_optimization_stage() in (1, 2):
            self._require_gradients()
        self.optimizer.step()
        self.offload_engine.zero_grad()
        self._step_applied = math.isfinite(self.offload_engine.grad_norm or 0.0)
        if not self._step_applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        every = self._said.steps_per_print
        if every is not None and self.global_steps % every == 0:
            log_dist(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}", ranks=[0])

    def _require_gradients(self) -> None:
        unused = [name for name, one in self.module.named_parameters() if one.requires_grad and one.grad is None]
        if unused:
            raise AskedWrongly(
                f"the loss does not depend on {', '.join(unused)}, and zero_optimization.ignore_unused_parameters is false: "
                "use them in the forward, freeze them, or set ignore_unused_parameters to true."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, which `step` does by itself after an update. Between a step's micro-batches, as in DeepSpeed: at
        stages 0 and 1 what has accumulated is dropped, from stage 2 on it is out of reach and stays."""
        del set_to_none
        if self.zero_optimization_stage() < 2:
            self.offload_engine.zero_grad()

    def no_sync(self) -> Any:
        """Backwards inside only accumulate; `step` belongs outside."""
        return self.offload_engine.no_sync()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say it instead of counting, from now on."""
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated: not between boundaries, and not with non-finite gradients."""
        return self._step_applied

    # ---- numbers -------------------------------------------------------------------------------------------------

    def gradient_accumulation_steps(self) -> int:
        return self._said.batch.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        assert self._said.batch.micro is not None
        return self._said.batch.micro

    def train_batch_size(self) -> int:
        assert self._said.batch.train is not None
        return self._said.batch.train

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def gradient_clipping(self) -> float:
        return self.offload_engine.config.max_grad_norm or 0.0

    def zero_optimization_stage(self) -> int:
        return self.offload_engine.config.stage

    def fp16_enabled(self) -> bool:
        return self.offload_engine.config.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.offload_engine.config.dtype == "bf16"

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last update's gradients before clipping; None before the first."""
        return self.offload_engine.grad_norm

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def loss_scale(self) -> float:
        """What the config says: 0 is the dynamic one. `cur_scale` is what the loss is multiplied by now."""
        scale = self.offload_engine.config.loss_scale
        return 0.0 if scale is None or isinstance(scale, str) else scale

    @property
    def cur_scale(self) -> float:
        return self.offload_engine.loss_scale

    # ---- values --------------------------------------------------------------------------------------------------

    def module_state_dict(self) -> dict[str, torch.Tensor]:
        """Every parameter, in the precision of its master, and every buffer, on the CPU; collective."""
        return self.offload_engine.state_dict()

    def state_dict(self, *, prefix: str = "") -> dict[str, torch.Tensor]:  # type: ignore[override]
        """`module_state_dict`, its names beginning with "module."."""
        return {f"{prefix}{_PREFIX}{name}": value for name, value in self.module_state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:  # type: ignore[override]
        """Values by the names of `state_dict` or of `module_state_dict`; moments stay as they are."""
        has_prefix = all(name.startswith(_PREFIX) for name in state_dict)
        names = {name: name[len(_PREFIX) :] if has_prefix else name for name in state_dict}
        self.offload_engine.load_state_dict({names[name]: value for name, value in state_dict.items()})

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """The weights in the dtype that the model runs in: with torch.save, or as safetensors by the name's ending.

        All of them are in the host memory of rank 0 for it; `offload_engine.export` writes them unit by unit. Collective.
        """
        values = self.offload_engine.state_dict(rank0_only=True)
        named = dict(self.module.named_parameters(remove_duplicate=False))
        for name, parameter in named.items():
            if exclude_frozen_parameters and not parameter.requires_grad:
                values.pop(name, None)
        if self.global_rank == 0:
            cast: dict[int, torch.Tensor] = {}  # tied parameters stay one tensor
            for name, value in values.items():
                dtype = named[name].dtype if name in named else value.dtype
                values[name] = cast.setdefault(id(value), value.to(dtype))
            _write_weights(values, expanded(save_dir) / save_filename)
        comm.barrier()
        return True

    save_fp16_model = save_16bit_model

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """A checkpoint of this package in `save_dir`/`tag` ("global_step<n>"), and `save_dir`/latest, which names it.

        `client_state` is JSON; the scheduler's state is saved with it. Between steps, after an update. Collective.
        """
        if exclude_frozen_parameters:
            raise UsageError("exclude_frozen_parameters=True is not done: a checkpoint holds all that a resume needs.")
        name = agreed_tag(str(tag) if tag is not None else f"global_step{self.global_steps}", self._said.tag_validation)
        state = {
            "client_state": dict(client_state or {}),
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "lr_scheduler": packed(self.lr_scheduler.state_dict()) if self.lr_scheduler is not None else None,
        }
        self.offload_engine.save_checkpoint(expanded(save_dir) / name, client_state=state)
        if save_latest and self.global_rank == 0:
            write_latest(expanded(save_dir), name)
        comm.barrier()
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint, to the bit; returns its folder and its client_state. Collective.

        `tag=None`: the one that `load_dir`/latest names; (None, None) where there is no such file.
        """
        if not load_module_strict or not load_optimizer_states or load_module_only or custom_load_fn is not None:
            raise UsageError(
                "load_checkpoint restores a run as a whole: for weights alone use engine.load_state_dict, or "
                "`python -m offload export` and offload.initialize(weights=...)."
            )
        name = str(tag) if tag is not None else read_latest(expanded(load_dir))
        if name is None:
            logger.warning("there is no file 'latest' in %r: nothing is loaded. Name a tag, or the right folder.", load_dir)
            return None, None
        path = expanded(load_dir) / name
        check_whose(path)
        state = self.offload_engine.load_checkpoint(path)
        if "global_steps" not in state:  # saved by an offload.Engine's own call
            return str(path), state
        self.global_steps, self.global_samples = state["global_steps"], state["global_samples"]
        self.skipped_steps = state["skipped_steps"]
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        if load_lr_scheduler_states and self.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(unpacked(state["lr_scheduler"]))
        return str(path), state["client_state"]

    # ---- lifecycle -----------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Close the engine; done at the end of the process too."""
        self.offload_engine.close()

    def to(self, *args: Any, **keywords: Any) -> DeepSpeedEngine:
        """To the device that it is on already; nothing else."""
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
            return super().__getattr__(name)
        except AttributeError:
            pass
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None and hasattr(module, name):
            return getattr(module, name)
        close = difflib.get_close_matches(name, [one for one in dir(type(self)) if not one.startswith("_")], n=1, cutoff=0.6)
        hint = f"; the nearest is {close[0]}" if close else ""
        raise AttributeError(f"the engine has no {name!r}, and neither has {type(module).__name__}{hint}.")


def _write_weights(values: dict[str, torch.Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file({name: value.contiguous().clone() for name, value in values.items()}, path)
    else:
        torch.save(values, path)
