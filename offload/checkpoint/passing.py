"""The checkpoint through which an engine's state passes while its parts are made anew.

It lies in a folder that is written and never gets a name (`offload.checkpoint.staged_folder`): what a kill leaves of it, the
next such checkpoint there removes, or the next start.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload.checkpoint.staged_folder import PREFIX, StagedFolder, remove_leftovers
from offload.config import Config

_log = logging.getLogger(__name__)


def _parent(config: Config) -> Path:
    """An nvme folder, or where there is none, that of temporary files."""
    return (*config.nvme_paths, Path(tempfile.gettempdir()))[0]


@contextmanager
def passing_checkpoint(config: Config) -> Iterator[Path]:
    """Where the state can be saved; gone afterwards."""
    with StagedFolder(_parent(config) / f"{PREFIX}passing", replace=False) as folder:
        os.chmod(folder.path, 0o700)
        yield folder.path / "state"


def remove_abandoned(config: Config) -> None:
    """Remove what processes that are gone left there."""
    try:
        remove_leftovers(_parent(config))
    except OSError as error:
        _log.warning("what a killed process may have left in %s stays there (%s)", _parent(config), error.strerror)
