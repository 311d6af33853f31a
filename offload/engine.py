# SPDX-License-Identifier: Apache-2.0
"""The public face of one training run: the `Engine` that `initialize` returns."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from offload.build.assembly import DTYPES
from offload.checkpoint.checkpoint import Checkpointing
from offload.checkpoint.format.numbering import checked_folder
from offload.checkpoint.preemption import Preemption
from offload.checkpoint.saving.saves import Save
from offload.config import Config, parse_nbytes
from offload.deferred_init.held_tensors import Slot
from offload.engine_rebuild import Rebuilding
from offload.errors import EngineFailedError, UsageError, words_of
from offload.model.optimizer import OffloadOptimizer
from offload.profiling.profile import Profile
from offload.statistics import statistics
from offload.step.components import Components
from offload.step.parameter_access.loading import ValueLoading
from offload.step.training import Training
from offload.taken_model import TakenModel


class Engine:
    """One model in training. A context manager: leaving it closes the engine.

    All methods belong to the thread that runs the training loop.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        parts: Components,
        slots: Sequence[Slot],
    ) -> None:
        """Use `offload.initialize`."""
        self.module = model
        self.config = config
        self.closed = False
        self._optimizer = OffloadOptimizer(optimizer) if optimizer is not None else None
        self._preemption: Preemption | None = None
        self._saves: Path | None = None
        try:
            self._rebuilding = Rebuilding(model, self._optimizer, config, parts, slots)
        except BaseException:
            if self._optimizer is not None:
                self._optimizer.disown()
            raise

    @property
    def _taken(self) -> TakenModel:
        return self._rebuilding.current

    @property
    def _parts(self) -> Components:
        return self._taken.parts

    @property
    def _training(self) -> Training:
        return self._taken.training

    @property
    def _checkpointing(self) -> Checkpointing:
        return self._taken.checkpointing

    # ---- the loop ------------------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer."""
        return self._optimizer is not None

    @property
    def optimizer(self) -> OffloadOptimizer:
        """The optimizer that the loop uses. Raises `UsageError` where there is none."""
        if self._optimizer is None:
            raise UsageError("the engine has no optimizer: offload.initialize was given none. Pass one to train.")
        return self._optimizer

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        """`loss.backward()`, with the loss scale in fp16. `keywords` are those of `torch.Tensor.backward`."""
        self._require_open()
        with self._training.scaled_backward():
            scale = self._training.loss_scale.value
            (loss * scale if scale != 1.0 else loss).backward(**keywords)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, for a backward of the loop's own. The step un-scales the gradients.

        `engine.scaled(loss).backward()` is `engine.backward(loss)`; several losses may be scaled and added up.
        """
        self._require_open()
        return self._training.scaled(loss)

    def step(self) -> None:
        """Begin the update of every parameter that has a gradient; the same as `engine.optimizer.step()`."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients of all that the optimizer has; the same as `engine.optimizer.zero_grad()`."""
        self._taken.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate: nothing is communicated, and no update begins.

        Raises `BudgetError` where there is no room for the fp32 sums of several micro-batches, before anything is done.
        """
        with self._training.failures():
            self._training.parameter_gradients.micro_batches.take_room()
        before, self._training.synchronizing = self._training.synchronizing, False
        try:
            yield
        finally:  # of other parts, where a forward inside had them made anew
            self._training.synchronizing = before

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients of the coming step to a global L2 norm of `max_norm`; return the norm before clipping."""
        self._require_open()
        return torch.tensor(self._taken.clip_at_step(float(max_norm)), dtype=torch.float64, device="cpu")

    @property
    def grad_norm(self) -> float | None:
        """The global L2 norm of the last step's gradients before clipping; None before the first step."""
        return self._training.grad_norm

    @property
    def loss_scale(self) -> float:
        """What `backward` multiplies the loss by now. Set it between steps if the loop has a rule of its own
        for it. With `Config.loss_scale="skip"` nothing else changes it."""
        return self._training.loss_scale.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._require_open()
        self._training.set_loss_scale(value)

    # ---- values --------------------------------------------------------------------------------------------------

    def gathered(self, params: Iterable[nn.Parameter] | nn.Parameter) -> AbstractContextManager[None]:
        """The parameters are ordinary tensors inside: read and write them. What was written reaches their master weights.

        Host memory: a copy of what is gathered, to see what was written.
        """
        self._require_open()
        return self._taken.gathered([params] if isinstance(params, nn.Parameter) else params)

    def resident(self) -> AbstractContextManager[None]:
        """Inside, parameters that were used stay in device memory: for many forwards in a row, as in generation.

        They may fill the budget; without one, half of the memory that is free now. Nothing else changes. `module.generate`
        does this by itself.
        """
        return self._taken.resident()

    def state_dict(self, *, full: bool = True, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Every parameter (fp32 master precision where it is trained) and persistent buffer on the CPU, by fqn.

        As `module.state_dict()`, tied parameters are under each of their names. Takes as much host memory as it returns,
        and one unit more. On several ranks all of them call it, with the same arguments:

        full        False: each rank returns its share, whole tensors of which no other rank has any. What
                    `torch.distributed.checkpoint` writes in parallel, and reads back for `load_state_dict`
        rank0_only  the other ranks return an empty dictionary
        """
        self._require_open()
        return self._taken.state_dict(full, rank0_only)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set parameters and persistent buffers, by fqn, as `state_dict` returns them; optimizer moments stay as they are.

        On several ranks each gives the whole or a share of it (each name on one rank at least). Names that are missing or
        unknown, and shapes that do not fit, are a `UsageError` before anything changes. Host memory: one unit.
        """
        self._require_open()
        self._checkpointing.saver.settle()  # what is set goes around the updates
        ValueLoading(self._parts, self._training, self.module, state).run()

    def read(self, parameter: nn.Parameter, what: str = "value") -> torch.Tensor | None:
        """A copy of one parameter's whole tensor, in its shape, in fp32, on the CPU. Collective. It can be read between steps,
        and between a backward and the step, wherever it lies.

        what  "value": the master weight; "gradient": the average over the ranks, un-scaled, before clipping; None if there is
              none; "exp_avg", "exp_avg_sq": the moment that the optimizer has; "step": how often it was updated, one number

        Raises `UsageError` for what the parameter does not have.
        """
        self._require_open()
        return self._taken.named.read(self._taken.info_of(parameter), what)

    def write(self, parameter: nn.Parameter, what: str, value: torch.Tensor) -> None:
        """Set what `read` reads. On several ranks each passes the same value. A gradient is rounded to the parameter's dtype,
        and counts for the coming step."""
        self._require_open()
        self._checkpointing.saver.settle()  # what is set goes around the updates
        self._taken.named.write(self._taken.info_of(parameter), what, value)

    def stats(self) -> dict[str, Any]:
        """Return counts, and bytes as planned and as measured; for the time since the last call, seconds and links.

        steps, skipped_steps     how many there were; `speculated_steps` began updates early, `undone_steps` undid them
        placement                the furthest tier of parameters, optimizer_states and gradients
        decision                 what "auto" weighed; None where nothing was left to it
        planned                  a list of tier, purpose and nbytes: what the budgets were computed from
        host_nbytes              bytes of host memory that the engine holds now, by purpose
        host_peak_nbytes         the most so far; device_peak_nbytes: of the device, activations included
        seconds                  since the last call, by phase
        links                    since the last call, by name ("nvme read", "nvme write", "adam"): the seconds in which the link
                                 was at work, those of them in which the model waited for it, the share that was hidden (None
                                 if it did nothing), and the bytes that it moved (None if they are not counted). No overlap
                                 can make a step shorter than the largest `busy_seconds`
        units                    for each unit the bytes of its parameters, and whether its update may begin in backward
        pending_updates          the chunks whose last update has not run; it runs at the latest when the next forward
                                 reaches them

        An engine that failed says what it had planned and done until then; a closed one raises `UsageError`.
        """
        self._training.check_process()
        if self.closed:
            self._require_open()
        return statistics(self._taken)

    def profile(self, path: str | os.PathLike[str], steps: int | None = None) -> Profile:
        """Record what happens from now on as a trace that Perfetto and chrome://tracing open: a row for each link and lane.

        engine.profile("trace.json", steps=2)        the file is there when two more steps are over
        with engine.profile("trace.json"): ...       when the block is left

        Begin between two steps that are alike: updates of the step before run under the next forward. On several ranks each
        writes its own ("trace.rank0.json"). `python -m offload explain trace.json` says what is hidden, who waited for what,
        and what to change. On a GPU the times of copies and of compute are those of events on their streams. Numbers do not
        change. Ops are also told to torch.profiler where it records, and as NVTX ranges on a GPU.

        Raises `UsageError` while another one records, `ConfigError` where the path is no file's, `StorageError` (at the end)
        where it cannot be written.
        """
        self._require_open()
        return self._taken.begin_profile(self.config, Path(path), steps)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        dir: str | os.PathLike[str],
        *,
        client_state: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        wait: bool = True,
        leave_gradients: bool = False,
        without_frozen: bool = False,
    ) -> Save:
        """Write everything that a resume needs into the folder `dir`: when this returns it is there, whole and durable.

        Saved are weights (fp32 masters), moments, step counts, persistent buffers, the loss scale, the numbers in
        param_groups, and the states of torch's random generators. A complete checkpoint at `dir` is replaced; until the new
        one is there, the old one is. What others put into the folder stays. Host memory: the largest chunk's record.

        client_state  JSON values to get back from `load_checkpoint`: a scheduler's state_dict(), the position in the data, ...
        keep_last     with `dir` = "folder/step-<n>": remove all numbered checkpoints in the folder but the last so many, by
                      when they were written, that are sound. Damaged ones and links do not count, and stay
        wait          False: return at once and write beside training. What is saved is the state of this moment; the
                      checkpoint is there when the returned `Save`'s `wait()` returns. The next save, a load, `export`,
                      `gathered`, `close()` and the end of the interpreter wait for it. A failure is raised once: by
                      `wait()`, else by one of these or the next step; at last a `RuntimeWarning` says it.

        leave_gradients  True: also between the micro-batches of a step: saved is what the last step left, and the gradients
                         go on waiting. False: a `UsageError` then, as a resume would begin that step anew

        without_frozen   True: what is not trained is left out. A load leaves those parameters as they are

        Raises `StorageError` where writing fails (training may go on),
        `CheckpointError` where something that is no checkpoint is in the way.
        """
        return self._checkpointing.save(
            dir, client_state, keep_last, wait=wait, leave_gradients=leave_gradients, without_frozen=without_frozen
        )

    def load_checkpoint(self, dir: str | os.PathLike[str]) -> dict[str, Any]:
        """Go on from a checkpoint, bit for bit; returns its client_state. Gradients at hand are dropped.

        The model, its optimizer and groups must be those of the run that saved; placement, budgets, dtype and I/O may be
        others. Without an optimizer only the weights and buffers are taken. Everything is checked before anything changes:
        a `CheckpointError` then leaves the engine as it was.

        On one rank an engine that failed can be used again after it: everything but its configuration is made anew.
        """
        path = checked_folder(dir, "load_checkpoint")
        with self._rebuilding.revived():
            return self._rebuilding.with_states(lambda: self._checkpointing.load(path))

    def load_values(self, dir: str | os.PathLike[str], *, strict: bool = True) -> dict[str, Any]:
        """Set parameters and buffers from a checkpoint, as `load_state_dict` would; returns its client_state. Moments, step
        counts and all else stay as they are.

        strict  False: what the model lacks is passed over, and what the checkpoint lacks stays
        """
        self._require_open()
        state, client_state = self._taken.values_of(checked_folder(dir, "load_values"), strict)
        self.load_state_dict(state)
        return client_state

    def resume_or_start(self, dir: str | os.PathLike[str], *, catch_sigterm: bool = False) -> dict[str, Any] | None:
        """Load the sound checkpoint "step-<n>" in `dir` that was written last; return its client_state, None if there is none.

        Checkpoints that are damaged are passed over with a warning. Raises `CheckpointError` if all of them are.

        catch_sigterm  for preemptible machines: from now until `close()` the first SIGTERM only asks for an end, which
                       `exit_if_terminated` at the end of each step brings about. The second ends the process at once.
        """
        path = checked_folder(dir, "resume_or_start")
        with self._rebuilding.revived() as failure:
            state = self._rebuilding.with_states(lambda: self._checkpointing.resume_or_start(path))
            if state is None and failure is not None:
                raise EngineFailedError(
                    f"there is no checkpoint in {str(dir)!r} to go on from, and the engine failed: {words_of(failure)}. "
                    "Start again."
                ) from failure
        if catch_sigterm and self._preemption is None:
            self._preemption = Preemption()
        self._saves = path
        return state

    def exit_if_terminated(
        self, client_state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None, *, keep_last: int | None = None
    ) -> None:
        """If SIGTERM came: save the newest checkpoint in the folder of `resume_or_start`, then exit with 0.

        Call it when one step of the loop is over and the next has not begun, so that a resume finds what the next step would
        have found. `client_state` and `keep_last` are those of `save_checkpoint`; `client_state` may be a function, which is
        called only if it is needed. Raises `SystemExit(0)`.
        """
        if self._preemption is None or self._saves is None:
            raise UsageError(
                "exit_if_terminated was called, but SIGTERM is not caught: resume_or_start(dir, catch_sigterm=True)."
            )
        if self._checkpointing.agree_to_end(self._preemption.requested):
            state = client_state() if callable(client_state) else client_state
            self._checkpointing.save_next(self._saves, state, keep_last)
            raise SystemExit(0)

    def export(
        self,
        dir: str | os.PathLike[str],
        dtype: Literal["bf16", "fp16", "fp32"] | None = None,
        *,
        max_shard_size: int | str = "5GB",
        merged: bool = False,
        exist_ok: bool = False,
    ) -> None:
        """Write the weights as safetensors, in shards with an index, and a Hugging Face model's config: for `from_pretrained`.

        dtype  of floating-point parameters; "fp32" is the master's precision. None: what the model runs in.

        merged  of a PEFT model: the base model, with the active adapters merged into it layer by layer, as its
                `merge_and_unload` would. False: a PEFT model's adapters alone, as its `save_pretrained` writes them

        exist_ok  whether `dir` may have files. What is exported replaces files of the same names once it is whole, and the
                  weights of an earlier export; all others stay. False: `dir` must not exist or be empty

        A tied parameter is written once, under the name that Hugging Face keeps. What transformers has on disk otherwise than
        in memory (experts one by one) is written as its `save_pretrained` writes it.
        """
        if dtype is not None and dtype not in DTYPES:
            raise UsageError(f"dtype={dtype!r} is unknown: expected one of {', '.join(DTYPES)}, or None.")
        path = checked_folder(dir, "export")
        self._require_open()
        chosen = DTYPES[dtype] if dtype is not None else None
        shard_nbytes = parse_nbytes(max_shard_size, "max_shard_size")
        self._taken.exporting.export(path, chosen, shard_nbytes, merged=merged, exist_ok=exist_ok)

    # ---- lifecycle -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back memory and files. Parameters that lie in the tiers become unreadable. A second call does nothing, or
        goes on if an interrupt ended the first.

        If an update or write had failed and nothing has raised that failure yet, it is raised after everything was given back.
        """
        if self._training.is_forked:  # what it holds is the other process's
            self.closed = self._training.closed = True
            return
        if self.closed and not self._parts.made:
            return
        if self._preemption is not None:
            self._preemption.close()
        self.closed = True
        if self._optimizer is not None:
            self._optimizer.disown()
        self._taken.close()

    def __reduce__(self) -> Any:
        raise UsageError(
            "an engine cannot be copied or pickled: save_checkpoint(dir) writes what training goes on from, state_dict() gives "
            "the weights, and the model can be copied inside `with engine.gathered(model.parameters()):`."
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        ends_well = value is None or (isinstance(value, SystemExit) and not value.code)
        if value is not None and not ends_well and self._parts.meeting.waits_for_others and not self.closed:
            self._training.leave_others(value)
        try:
            self.close()
        except Exception as error:
            if value is None or ends_well or isinstance(value, Exception):
                raise
            warnings.warn(f"while the engine was closed after {words_of(value)}: {error}", RuntimeWarning, stacklevel=2)

    # ---- checks --------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        self._training.check()
