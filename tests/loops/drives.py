# SPDX-License-Identifier: Apache-2.0
"""The drive of a setup: slow, or with one fault in all of a program."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from torch import Tensor

from offload.device.pending import Pending
from offload.tiers.io.backend import OpenFile
from tests.drives import drives_from
from tests.file_systems import at_call
from tests.tiers.faulty_io import Fault, FaultyBackend, seeded_faults

from .programs import Setup

FAULTS = {"error": Fault("errno", errno.EIO), "full": Fault("errno", errno.ENOSPC), "flip": Fault("bit_flip")}
FILES = {"any": "", "parameters": "parameters", "records": "optimizer", "gradients": "gradients", "checkpoints": ".safetensors"}
"""By what a fault strikes, what is part of the file's name. Not here: "sync", the call that makes a file durable."""


class Drive(FaultyBackend):
    """Of one engine. `may_fail`: whether its fault is still to come."""

    def __init__(self, setup: Setup, *, may_fail: bool) -> None:
        is_slow = setup.drive != "failing" or setup.seed % 2
        super().__init__(setup.seed, seeded_faults(setup.seed, 4000, 0.3, (Fault("short"), Fault("delay"))) if is_slow else {})
        self._setup, self._may_fail = setup, may_fail and setup.drive == "failing"
        self._left = setup.failing
        self.struck_file: Path | None = None
        """What the fault struck."""

    def _submit(self, file: OpenFile, tensor: Tensor, offset: int, *, is_write: bool) -> Pending:
        with self._lock:
            if self._is_meant(file.path, is_write) and self._is_next():
                self.faults[self.submitted_count] = FAULTS[self._setup.fault]
                self.struck_file = file.path
            return super()._submit(file, tensor, offset, is_write=is_write)

    def _is_meant(self, path: Path, is_write: bool) -> bool:
        name = FILES.get(self._setup.strikes)
        return name is not None and name in path.name and (is_write or self._setup.fault != "full")

    def _is_next(self) -> bool:
        if not self._may_fail:
            return False
        self._left -= 1
        self._may_fail = self._left >= 0
        return self._left < 0

    def synced(self, path: str) -> None:
        """A file is about to be made durable."""
        if self._setup.strikes == "sync" and self._is_next():
            self.struck_file = Path(path)
            code = FAULTS[self._setup.fault].code
            raise OSError(code, os.strerror(code))

    @property
    def damages_silently(self) -> bool:
        """Whether a checkpoint holds what was not written to it: seen when it is loaded."""
        return self._setup.fault == "flip" and self.struck_file is not None and self.struck_file.suffix == ".safetensors"


class Drives:
    """Gives each engine of a program its drive."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._made: list[Drive] = []
        """Of the engine that is there: what is newly trained makes its parts, and so the drive, anew."""
        self._former: list[Drive] = []
        """Of engines before: what struck a save beside the end of one is seen when the next one loads it."""
        self.is_excused = False
        """Whether the fault came, and was told."""

    def connect(self, setup: Setup, rank: int, ranks: int) -> None:
        """For the engine that is made next. Of several ranks one has the fault."""
        self._former += self._made
        self._made = []
        if not setup.drive:
            return
        fails_here = ranks == 1 or setup.failing % ranks == rank

        def opened() -> Drive:
            self._made.append(Drive(setup, may_fail=fails_here and not (self.is_excused or self.has_struck)))
            return self._made[-1]

        if "nvme" in (setup.parameters, setup.states):
            drives_from(self._patch, opened)
        else:
            opened()
        if setup.drive == "failing" and setup.strikes == "sync" and setup.fault != "flip":
            at_call(self._patch, "fsync", before=self._synced)

    def _synced(self, fileno: int) -> None:
        if self._made:
            self._made[-1].synced(os.readlink(f"/proc/self/fd/{fileno}"))

    @property
    def has_struck(self) -> bool:
        return any(drive.struck_file is not None for drive in self._former + self._made)

    @property
    def damages_silently(self) -> bool:
        return any(drive.damages_silently for drive in self._former + self._made)
