"""Whether an engine can still be used: it was not closed, and nothing failed that leaves its state undefined."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from offload.errors import EngineFailedError, NonFiniteGradientError, ParameterAccessError, UsageError
from offload.ranks.rendezvous import Rendezvous
from offload.step.hooks import Listener


@contextmanager
def outside_transforms() -> Iterator[None]:
    """What runs inside is no part of the function that torch.func (grad, jvp, vmap, ...) transforms around it."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield


class Usable(Listener):
    """See the module. The part of the hooks' listener that takes failures in."""

    def __init__(self, rendezvous: Rendezvous | None) -> None:
        """`rendezvous`: with the other ranks, which are told of a failure."""
        self._others = rendezvous
        self.failure: BaseException | None = None
        self.closed = False
        self.turn = threading.RLock()
        """Whose turn it is: held by the thread that drives the model while the engine is at work for it, and by who does some
        of that work while it does nothing (`offload.checkpoint.idleness`)."""
        self.turn_count = 0
        """How often the thread that drives the model asked for its turn."""

    @contextmanager
    def failures(self) -> Iterator[None]:
        """A failure of the engine's own work leaves its state undefined; an answer to the user's error does not."""
        self.turn_count += 1
        with self.turn, self.failures_beside():
            yield

    @contextmanager
    def failures_beside(self) -> Iterator[None]:
        """The same on a thread that does not drive the model."""
        self.check()
        try:
            with outside_transforms():
                yield
        except (ParameterAccessError, UsageError, EngineFailedError, NonFiniteGradientError):
            raise
        except BaseException as error:
            self.failure = error
            if self._others is not None:
                self._others.abandon(f"{type(error).__name__}: {error}")
            raise

    @property
    def has_failed(self) -> bool:
        return self.failure is not None

    def check(self) -> None:
        """Raise if the engine is closed, or if an earlier failure left it unusable."""
        if self.closed:
            raise UsageError("the engine was closed: call offload.initialize again.")
        if self.failure is not None:
            raise EngineFailedError(
                f"the engine failed earlier and its state is undefined: {self.failure}. Go on from the last checkpoint: "
                "engine.load_checkpoint(dir) on one rank, else start again."
            ) from self.failure
