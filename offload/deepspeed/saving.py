# SPDX-License-Identifier: Apache-2.0
"""What `DeepSpeedEngine` writes and reads: values by name, 16-bit weights, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.checkpoint.format.packing import packed, unpacked
from offload.config import expanded
from offload.deepspeed import comm
from offload.deepspeed.folder import agreed_tag, is_imported, own_checkpoint, read_latest, write_latest, write_recovery_script
from offload.deepspeed.loss_scaler import LossScaler
from offload.deepspeed.utils import logger
from offload.deepspeed_config import Translation
from offload.errors import ConfigError, UsageError

PREFIX = "module."


class Saving:
    """A part of `DeepSpeedEngine`."""

    offload_engine: offload.Engine
    module: nn.Module
    optimizer: Any
    _said: Translation
    lr_scheduler: Any
    global_rank: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int
    loss_scaler: LossScaler

    # ---- values --------------------------------------------------------------------------------------------------

    def module_state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return every parameter, in the precision of its master, and every buffer, on the CPU. Collective."""
        del destination, keep_vars
        values = self.offload_engine.state_dict()
        left_out = self._frozen() if exclude_frozen_parameters else set()
        return {prefix + name: value for name, value in values.items() if name not in left_out}

    def _frozen(self) -> set[str]:
        return {name for name, one in self.module.named_parameters(remove_duplicate=False) if not one.requires_grad}

    def state_dict(self, *, prefix: str = "") -> dict[str, torch.Tensor]:
        """Return `module_state_dict`, with "module." before each name."""
        return {f"{prefix}{PREFIX}{name}": value for name, value in self.module_state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Set values by the names of `state_dict` or of `module_state_dict`. Moments stay as they are."""
        has_prefix = all(name.startswith(PREFIX) for name in state_dict)
        names = {name: name[len(PREFIX) :] if has_prefix else name for name in state_dict}
        self.offload_engine.load_state_dict({names[name]: value for name, value in state_dict.items()})

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None) -> None:
        """Set the values under "module" of a checkpoint, or those of the mapping itself."""
        values = checkpoint.get("module", checkpoint)
        if custom_load_fn is not None:
            raise UsageError("custom_load_fn is not called here: pass the mapping of values.")
        if not strict:
            values = self.offload_engine.state_dict() | dict(values)
        self.load_state_dict(values)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Return every value in the dtype that the model runs in on rank 0, and None on the others. Collective."""
        values = self.offload_engine.state_dict(rank0_only=True)
        if self.global_rank != 0:
            return None
        named = dict(self.module.named_parameters(remove_duplicate=False))
        left_out = self._frozen() if exclude_frozen_parameters else set()
        cast: dict[int, torch.Tensor] = {}  # tied parameters stay one tensor
        found: dict[str, torch.Tensor] = {}
        for name, value in values.items():
            if name not in left_out:
                dtype = named[name].dtype if name in named else value.dtype
                found[name] = cast.setdefault(id(value), value.to(dtype))
        return found

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights in the dtype that the model runs in: as safetensors where the name ends so, else with torch.save.

        For this rank 0 holds all of them in host memory. `offload_engine.export` writes them unit by unit. Collective.
        """
        values = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        if values is not None:
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
        """Write a checkpoint of this package into `save_dir`/`tag` ("global_step<n>"), and its name into `save_dir`/latest.

        From stage 1 on `save_dir`/zero_to_fp32.py stands there too, and is run as DeepSpeed's. `client_state` holds numbers,
        texts, None and tensors, in lists, tuples and dicts; the scheduler's state is saved with it. Between the micro-batches
        of a step the gradients that have accumulated are not saved, as in DeepSpeed. With `exclude_frozen_parameters` a load
        leaves those parameters as they are. Collective.
        """
        if save_dir is None or not str(save_dir):
            raise ConfigError(f"save_checkpoint(save_dir={save_dir!r}): name a folder.")
        name = agreed_tag(str(tag) if tag is not None else f"global_step{self.global_steps}", self._said.tag_validation)
        state = {
            "client_state": dict(client_state or {}),
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "loss_scaler": self.loss_scaler.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
        }
        self.offload_engine.save_checkpoint(
            expanded(save_dir) / name,
            client_state=packed(state),
            leave_gradients=True,
            without_frozen=exclude_frozen_parameters,
        )
        if save_latest and self.global_rank == 0:
            write_latest(expanded(save_dir), name)
        if self._said.config.stage and self.global_rank == 0:
            write_recovery_script(expanded(save_dir))
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
        """Go on from a checkpoint, to the bit, and return its folder and its client_state. Collective.

        A checkpoint of DeepSpeed's own (ordinary, of any stage, or universal) is converted beside itself first. The rates,
        the scheduler and the scaler that it holds are taken over.

        Without a `tag` it loads the one that `load_dir`/latest names, and returns (None, None) where there is no such file.

        load_optimizer_states=False  take values and counts of steps; moments stay as they are
        load_module_only             take values alone
        load_module_strict=False     pass over values that the model lacks; what the checkpoint lacks stays
        """
        if custom_load_fn is not None:
            raise UsageError("custom_load_fn is not called here: read the values yourself, and call load_module_state_dict.")
        universal = self._said.loads_universal
        name = str(tag) if tag is not None else read_latest(expanded(load_dir), universal=universal)
        if name is None:
            logger.warning("there is no file 'latest' in %r: nothing is loaded. Name a tag, or the right folder.", load_dir)
            return None, None
        path = expanded(load_dir) / name
        with own_checkpoint(path, self._trained_names()) as own:
            if load_module_only or not load_optimizer_states or not load_module_strict:
                state = self.offload_engine.load_values(own, strict=load_module_strict)
            else:
                state = self.offload_engine.load_checkpoint(own)
            imported = is_imported(own)
        if "global_steps" not in state:  # saved by an offload.Engine's own call
            return str(path), state
        state = state if imported else unpacked(state)
        if not load_module_only:
            self._resume(state, load_lr_scheduler_states)
            if load_optimizer_states:
                self._take_numbers(state.get("param_groups") or ())
        return str(path), state["client_state"]

    def _resume(self, state: Mapping[str, Any], with_scheduler: bool) -> None:
        self.global_steps, self.global_samples = state["global_steps"], state["global_samples"]
        self.skipped_steps = state["skipped_steps"]
        self.micro_steps = self.global_steps * self._said.batch.accumulation
        if state.get("loss_scaler"):
            self.loss_scaler.load_state_dict(state["loss_scaler"])
            self._show_scale()
        if with_scheduler and self.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])

    def _trained_names(self) -> list[str]:
        """In the order of the optimizer's groups."""
        names = {id(one): name for name, one in self.module.named_parameters()}
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [names[id(one)] for group in groups for one in group["params"] if id(one) in names]

    def _take_numbers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Rates and the like of groups that DeepSpeed saved, by name."""
        for group, said in zip(self.optimizer.param_groups if self.optimizer is not None else (), groups, strict=False):
            for name in group.keys() & said.keys() - {"params"}:
                value = tuple(said[name]) if isinstance(said[name], list) else said[name]
                if type(value) is type(group[name]):
                    group[name] = value

    def _show_scale(self) -> None:
        raise NotImplementedError


def _write_weights(values: dict[str, torch.Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file({name: value.contiguous().clone() for name, value in values.items()}, path)
    else:
        torch.save(values, path)
