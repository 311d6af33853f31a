# SPDX-License-Identifier: Apache-2.0
"""The scratch files of this process, which have no name: paths through which tests reach them all the same."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from offload.tiers import scratch_file


def scratch_files(folder: Path, name: str = "*") -> list[Path]:
    """Of the stores called `name` (a pattern) that lie in `folder` or below."""
    files = [file for file in tuple(scratch_file._open_files) if file.path.is_relative_to(folder)]
    found = [file for file in files if fnmatch(file.path.name, f"{name}.swap (nameless)")]
    return [Path(f"/proc/self/fd/{file.fileno()}") for file in sorted(found, key=lambda file: file.path)]
