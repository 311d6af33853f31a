# SPDX-License-Identifier: Apache-2.0
"""Where the files of compiled kernels lie, for tests that put their own there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from offload import _native_library
from offload.device.arithmetic import compiled_kernels


def kernel_files_under(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Python finds packages there, and kernels are looked for there alone: not beside a checkout's library. Returns the folder
    in it for them."""
    patch.syspath_prepend(folder)
    paths = _native_library.installed_paths
    patch.setattr(_native_library, "installed_paths", lambda name: [one for one in paths(name) if one.is_relative_to(folder)])
    own = folder / "offload_cuda"
    own.mkdir(exist_ok=True)
    return own


def no_kernels_loaded(patch: pytest.MonkeyPatch, missing: Iterable[int] = ()) -> None:
    """As in a new process. `missing`: devices for which there are none, as was said."""
    patch.setattr(compiled_kernels, "_prepared", dict.fromkeys(missing))
