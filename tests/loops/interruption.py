# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at a moment of an operation, and what PyTorch keeps of it."""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch

from offload.device import lane
from tests.tiers import faulty_io


class Interruption:
    """Sends SIGINT once, at the call or return of that number: where Python would run a signal's handler."""

    def __init__(self, moment: int) -> None:
        self._left, self.struck = moment, False
        self._counter = self._count  # Python holds no reference while it calls it: it is not to be taken away from within

    def __enter__(self) -> Interruption:
        if self._left:
            sys.setprofile(self._counter)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if self.struck or event not in ("call", "c_return"):
            return
        self._left -= 1
        if self._left <= 0 and not _is_elsewhere(frame):
            self.struck = True
            signal.raise_signal(signal.SIGINT)


_NO_THREAD_OF_THE_LOOP = (lane.__file__, faulty_io.__file__)


def _is_elsewhere(frame: Any) -> bool:
    """Whether this would run on a thread, or in a drive, that no signal reaches: tests have the lanes of the deferred
    accelerator and the faulty drive do their work on the thread that waits for it."""
    while frame is not None:
        if frame.f_code.co_filename in _NO_THREAD_OF_THE_LOOP:
            return True
        frame = frame.f_back
    return False


def leave_contexts() -> None:
    """An interrupt that comes just as `torch.no_grad()` or a checkpoint's context begins or ends leaves PyTorch's state of the
    thread as it is then, with and without an engine."""
    torch.set_grad_enabled(True)
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
