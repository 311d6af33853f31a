# SPDX-License-Identifier: Apache-2.0
"""File systems as tests want them: full, slow, without an operation, with shared blocks, interrupted on the way.

They take the place of the system's calls, so that what the package makes of the answers is tested too."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload.checkpoint import carry_over
from offload.tiers import scratch_file
from offload.tiers.io import reflink

Clone = Callable[[int, int, int, int, int], bool]
"""Of the source's file number, its offset, the bytes, the target's number and its offset."""


def at_call(
    patch: pytest.MonkeyPatch,
    name: str,
    before: Callable[..., object] = lambda *_, **__: None,
    after: Callable[..., object] = lambda *_, **__: None,
) -> None:
    """Of `os`: what it is called with goes to `before`, and with the result in front to `after`. Either may raise."""
    call = getattr(os, name)

    def watched(*given: Any, **named: Any) -> Any:
        before(*given, **named)
        result = call(*given, **named)
        after(result, *given, **named)
        return result

    patch.setattr(os, name, watched)


def no_syncs(patch: pytest.MonkeyPatch, instead: Callable[[Path], object] = lambda _: None) -> None:
    """`fsync` does nothing but that, with the path of the file."""
    patch.setattr(os, "fsync", lambda fileno: instead(path_of(fileno)) and None)


def path_of(fileno: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{fileno}"))


def raising(code: int) -> Callable[..., Any]:
    """A call that fails so."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def no_locks(patch: pytest.MonkeyPatch, code: int) -> None:
    """Folders cannot be locked."""
    patch.setattr(fcntl, "flock", raising(code))


def free_room(patch: pytest.MonkeyPatch, nbytes: float) -> None:
    """So much is left on every file system, whoever asks."""
    plenty = SimpleNamespace(f_frsize=1, f_blocks=1 << 50, f_bfree=int(nbytes), f_bavail=int(nbytes))
    patch.setattr(os, "statvfs", lambda path: plenty)


def reservations(patch: pytest.MonkeyPatch, answer: Callable[[bool], int | None]) -> None:
    """What `fallocate` answers: an errno, or as it does (None). `answer` is told whether it reserves or gives back."""
    real = scratch_file._fallocate

    def fallocate(fileno: int, mode: int, offset: int, nbytes: int) -> int:
        code = answer(mode == 0)
        return real(fileno, mode, offset, nbytes) if code is None else code

    patch.setattr(scratch_file, "_fallocate", fallocate)


def scratch_kind(patch: pytest.MonkeyPatch, name: str) -> None:
    """What is carried over from one engine to the next lies on a file system of that name."""
    patch.setattr(carry_over, "file_system_of", lambda path: name)


def sharing_blocks(patch: pytest.MonkeyPatch, clone: Clone) -> None:
    """What the call for shared blocks does; it says False where the two files cannot share them."""

    def ioctl(target: int, request: int, argument: bytes) -> int:
        assert request == reflink._FICLONERANGE
        source, source_offset, nbytes, target_offset = struct.unpack("=qQQQ", argument)
        if not clone(source, source_offset, nbytes, target, target_offset):
            raise OSError(errno.EOPNOTSUPP, "no shared blocks")
        return 0

    clone_calls(patch, ioctl)


def clone_calls(patch: pytest.MonkeyPatch, ioctl: Callable[[int, int, bytes], object]) -> None:
    """The call itself."""
    patch.setattr(fcntl, "ioctl", ioctl)
