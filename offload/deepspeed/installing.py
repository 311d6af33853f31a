# SPDX-License-Identifier: Apache-2.0
"""`import deepspeed` answers as this drop-in, in this process: module, submodules and the package's metadata."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offload.errors import UsageError

ALIAS, ROOT = "deepspeed", "offload.deepspeed"
COMPARED_VERSION = "0.19.8"
"""Of DeepSpeed: what the drop-in's behaviour was compared with, and what its metadata say."""
_METADATA = (
    f"Metadata-Version: 2.1\nName: {ALIAS}\nVersion: {COMPARED_VERSION}\nSummary: offload.deepspeed, a drop-in for DeepSpeed\n"
)


def install(*, shadow: bool = False) -> None:
    """From now on `import deepspeed` gives this drop-in. Calling it twice does no harm.

    Raises `UsageError` where the real DeepSpeed is installed, unless `shadow`.
    """
    import offload.deepspeed as drop_in

    if sys.modules.get(ALIAS) is drop_in:
        return
    if not shadow and (ALIAS in sys.modules or importlib.util.find_spec(ALIAS) is not None):
        raise UsageError(
            "the real DeepSpeed is installed, and offload.deepspeed.install() does not hide it unasked: pass shadow=True, "
            "uninstall it, or import offload.deepspeed as deepspeed."
        )
    for name, module in list(sys.modules.items()):
        if name == ROOT or name.startswith(f"{ROOT}."):
            sys.modules[ALIAS + name[len(ROOT) :]] = module
    sys.meta_path.insert(0, _Finder())


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return _METADATA if filename in ("METADATA", "PKG-INFO") else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


class _Finder(importlib.metadata.DistributionFinder):
    """Finds the metadata, and the specification of what is imported already."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name == ALIAS:  # asked for by find_spec alone: the module is imported
            return importlib.machinery.ModuleSpec(ALIAS, None, is_package=True)
        return None

    def find_distributions(self, context: Any = None) -> Iterable[Any]:
        name = getattr(context, "name", None)
        return [_Distribution()] if name is None or name.lower() == ALIAS else []
