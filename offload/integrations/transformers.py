# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer, and the trainers that others make of it, on an engine.

    from offload.integrations.transformers import OffloadMixin, OffloadTrainer, enable

    trainer = OffloadTrainer(model=model, args=args, train_dataset=data, offload={"parameters": "nvme", ...})
    class Tuner(OffloadMixin, SFTTrainer): ...       # any other Trainer
    enable(trainer, {"parameters": "nvme", ...})     # one that exists, before train()

The engine is made when the Trainer makes its optimizer, and is `trainer.engine`. The loop, the scheduler, clipping, logging and
callbacks are the Trainer's own. A checkpoint holds what Trainer saves and, in its folder "offload", what the engine saves. So
training goes on to the bit. With `bf16` or `fp16` in the arguments the model runs in that dtype, with fp32 masters, not under
autocast.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import offload
from offload import Engine, UsageError
from offload.integrations.accelerate import FOLDER, attach
from offload.integrations.settings import Settings, settings_of

_GIB, _GB = 2**30, 10**9


def _on_an_engine(create: Callable[..., Any]) -> Callable[..., Any]:
    """A `create_optimizer` with an engine made of what it makes, once for each model."""

    @functools.wraps(create)
    def create_optimizer(trainer: Any, *args: Any, **keywords: Any) -> Any:
        if trainer.engine is not None and trainer.engine.module is not trainer.model:  # of another trial
            trainer.engine.close()
            trainer.engine = None
        if trainer.engine is None:
            create(trainer, *args, **keywords)
        if trainer.engine is None:
            trainer._compile_blocks()
            trainer._make_engines()
        return trainer.optimizer

    return create_optimizer


class OffloadMixin:
    """Put it before a Trainer among a class's bases. `offload`: as the `config` of `offload.initialize`."""

    engine: Engine | None = None
    """Made by the first `train`, `evaluate` or `predict`."""
    reference_engine: Engine | None = None
    """Where a Trainer of TRL's has a reference model of its own: the one that has it, without an optimizer."""
    _offload: Settings = None
    _save_beside: Any = None

    def __init__(self, *args: Any, offload: Settings = None, **keywords: Any) -> None:
        self._offload = offload
        model = keywords.get("model", args[0] if args else None)
        if _is_deferred(model) and any(getattr(one, "precompute_ref_log_probs", False) for one in (*args, *keywords.values())):
            raise UsageError(
                "precompute_ref_log_probs=True reads the model while its trainer is made, and this one has no values yet: "
                "build it outside of deferred_init(), or leave precompute_ref_log_probs out."
            )
        if _begins_deferred(model, keywords):
            self._begin_deferred(*args, **keywords)
        else:
            super().__init__(*args, **keywords)

    def _begin_deferred(self, *args: Any, **keywords: Any) -> None:
        """TRL puts adapters onto the model by itself: they remember how they are initialised, as the model does. Tensors of the
        trainer's own get their values at the end of the block, as buffers do."""
        beside = nn.Module()
        with offload.deferred_init():
            super().__init__(*args, **keywords)
            for name, value in vars(self).items():
                if isinstance(value, torch.Tensor):
                    beside.register_buffer(name, value)
        vars(self).update(beside.named_buffers())

    # ---- the engine ----------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self: Any) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        _stand_alone(self)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Where parameters lie is the engine's."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """A class's own `create_optimizer` need not call this one's."""
        super().__init_subclass__(**keywords)
        own = vars(cls).get("create_optimizer")
        if own is not None:
            cls.create_optimizer = _on_an_engine(own)  # type: ignore[method-assign]

    @_on_an_engine
    def create_optimizer(self: Any, *args: Any, **keywords: Any) -> Any:
        super().create_optimizer(*args, **keywords)  # type: ignore[misc]

    def _make_engines(self: Any) -> None:
        precision = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else "no"
        config = settings_of(self._offload, precision=precision)
        several = settings_of(config, micro_batches=self.args.gradient_accumulation_steps)
        self.engine = offload.initialize(self.model, self.optimizer, several)
        reference = getattr(self, "ref_model", None)
        if reference is not None and self.reference_engine is None and not getattr(self.args, "sync_ref_model", False):
            self.reference_engine = offload.initialize(reference, None, config)
        callbacks = self.callback_handler.callbacks
        for place, callback in enumerate(callbacks):
            if type(callback).__name__ == "SyncRefModelCallback":
                callbacks[place] = _GatheredSync(self.engine, callback)
            if type(callback).__name__ == "JITCheckpointCallback":  # no checkpoint holds gradients: at the end of the step
                callback.on_pre_optimizer_step = _nothing
        self.optimizer = self.engine.optimizer
        attach(self.accelerator, self.engine)

    def compute_ref_log_probs(self: Any, *args: Any, **keywords: Any) -> Any:
        """TRL's; with `precompute_ref_log_probs` while the trainer is made, and then the engine is too."""
        self.create_optimizer()
        return super().compute_ref_log_probs(*args, **keywords)  # type: ignore[misc]

    def _compile_blocks(self: Any) -> None:
        """`torch_compile`: block by block, since the whole is never in memory."""
        if self.args.torch_compile:
            names = getattr(self.model, "_no_split_modules", None) or ()
            for module in self.model.modules():
                if type(module).__name__ in names:
                    module.compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)

    def evaluation_loop(self: Any, *args: Any, **keywords: Any) -> Any:
        if self.engine is None:
            self.create_optimizer()
        with _evaluated_as_trained(self.args, self.engine):
            return super().evaluation_loop(*args, **keywords)  # type: ignore[misc]

    # ---- saves ---------------------------------------------------------------------------------------------------

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's, written unit by unit; in a checkpoint of the Trainer, what the engine needs to go on too."""
        if self.engine is None:
            return super().save_model(output_dir, _internal_call)  # type: ignore[misc, no-any-return]
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        self.engine.export(folder, exist_ok=True)
        if self.args.should_save:
            self._save_beside_the_weights(folder)
        if _internal_call and output_dir is not None and not self.args.save_only_model:
            last = self.control.should_training_stop
            self._save_beside = self.engine.save_checkpoint(folder / FOLDER, wait=last)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_beside_the_weights(self: Any, folder: Path) -> None:
        collator = getattr(self.data_collator, "tokenizer", None)
        for processor in (self.processing_class or collator, getattr(self.model, "generation_config", None)):
            if processor is not None:
                processor.save_pretrained(folder)
        torch.save(self.args, folder / "training_args.bin")

    # ---- going on ------------------------------------------------------------------------------------------------

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **keywords: Any) -> Any:
        """As Trainer's; `resume_from_checkpoint=True`: the last checkpoint that is whole."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_whole(self.args.output_dir)
        try:
            return super().train(resume_from_checkpoint, *args, **keywords)  # type: ignore[misc]
        finally:
            self._wait_for_save()

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """The weights come with everything else, once there is an engine."""
        if not os.path.isdir(os.path.join(resume_from_checkpoint, FOLDER)):
            raise UsageError(
                f"{resume_from_checkpoint!r} has no folder {FOLDER!r}, from which training goes on: it was saved without an "
                "engine or with save_only_model=True, or the run was ended while it was written. Name another checkpoint, or "
                "build the model from this one's weights."
            )

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.engine.load_checkpoint(os.path.join(checkpoint, FOLDER))
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_best_model(self: Any) -> None:
        self._wait_for_save()
        best = os.path.join(self.state.best_model_checkpoint, FOLDER)
        if os.path.isdir(best):
            self.engine.load_checkpoint(best)
        else:  # save_only_model: as Trainer does it, which takes the memory of the model
            with self.engine.gathered(self.model.parameters()):
                super()._load_best_model()  # type: ignore[misc]

    def _wait_for_save(self) -> None:
        if self._save_beside is not None:
            save, self._save_beside = self._save_beside, None
            save.wait()

    # ---- logs ----------------------------------------------------------------------------------------------------

    def log(self: Any, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        if self.engine is not None and "loss" in logs:
            logs.update(_figures(self.engine.stats()))
        super().log(logs, *args, **keywords)  # type: ignore[misc]


class OffloadTrainer(OffloadMixin, Trainer):
    """Trainer, on an engine."""


def enable(trainer: Trainer, offload: Settings = None) -> Trainer:
    """Have a Trainer that exists, and has not trained, use an engine: its class becomes one with `OffloadMixin` before its
    own."""
    kind = type(trainer)
    if trainer.optimizer is not None and hasattr(trainer.optimizer, "optimizer"):
        raise UsageError(f"this {kind.__name__} has trained already: enable(trainer) comes before; make another of its model.")
    _stand_alone(trainer)
    trainer._train_batch_size = trainer.args.train_batch_size
    if not issubclass(kind, OffloadMixin):
        trainer.__class__ = type(f"Offload{kind.__name__}", (OffloadMixin, kind), {"__module__": kind.__module__})
    vars(trainer)["_offload"] = offload
    return trainer


def _stand_alone(trainer: Any) -> None:
    """A process has one device, where Trainer would put `nn.DataParallel` around a model that sees several."""
    for name, asked in (("DeepSpeed", trainer.is_deepspeed_enabled), ("FSDP", trainer.is_fsdp_enabled)):
        if asked:
            raise UsageError(
                f"{name} and the engine would both partition the model: leave out what asks for {name} (an argument of "
                "the Trainer, Accelerate's configuration)."
            )
    trainer.args._n_gpu = min(trainer.args.n_gpu, 1)


def _nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def _evaluated_as_trained(args: Any, engine: Engine) -> Iterator[None]:
    """`bf16_full_eval` and `fp16_full_eval` would convert the model: there is nothing to do where it runs in that."""
    for name, dtype in (("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)):
        if getattr(args, name) and not any(parameter.dtype == dtype for parameter in engine.module.parameters()):
            raise UsageError(
                f"{name}=True would convert the model, which is the engine's: {name[:4]}=True has it train and evaluate in "
                f"that dtype; or leave {name} out."
            )
    before = args.bf16_full_eval, args.fp16_full_eval
    args.bf16_full_eval = args.fp16_full_eval = False
    try:
        yield
    finally:
        args.bf16_full_eval, args.fp16_full_eval = before


def _begins_deferred(model: Any, keywords: Mapping[str, Any]) -> bool:
    """Whether a Trainer would do with models on the meta device what only a recording can: adapters, moves."""
    is_adapted = keywords.get("peft_config") is not None or hasattr(model, "peft_config")
    return (is_adapted and _is_deferred(model)) or _is_deferred(keywords.get("ref_model"))


def _is_deferred(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters())


class _GatheredSync(TrainerCallback):
    """TRL's callback that moves a reference model towards the policy: with the values of the policy there, which takes their
    memory."""

    def __init__(self, engine: Engine, callback: TrainerCallback) -> None:
        self._engine, self._callback = engine, callback

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            with self._engine.gathered(self._engine.module.parameters()):
                self._callback.on_step_end(args, state, control, **keywords)


def _last_whole(folder: str | os.PathLike[str]) -> str:
    found = [path for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        if (path / FOLDER).is_dir():
            return str(path)
    raise UsageError(
        f"{str(folder)!r} has no checkpoint to go on from: expected {PREFIX_CHECKPOINT_DIR}-<step> with {FOLDER!r} in it."
    )


def _figures(stats: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """What a log has of the engine: memory in GiB, and of each link the GB moved and the share hidden since the last log."""
    yield "offload/host_gib", round(sum(stats["host_nbytes"].values()) / _GIB, 3)
    if stats["device_peak_nbytes"] is not None:
        yield "offload/device_peak_gib", round(stats["device_peak_nbytes"] / _GIB, 3)
    for name, link in stats["links"].items():
        key = f"offload/{name.replace(' ', '_')}"
        if link["nbytes"]:
            yield f"{key}_gb", round(link["nbytes"] / _GB, 4)
        if link["hidden"] is not None:
            yield f"{key}_hidden", round(link["hidden"], 3)
