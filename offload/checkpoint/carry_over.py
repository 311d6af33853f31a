# SPDX-License-Identifier: Apache-2.0
"""The checkpoint through which an engine's state passes while its parts are made anew.

It lies in a folder that is written and never gets a name (`offload.checkpoint.format.staged_folder`): what a kill leaves
of it, the next such checkpoint there removes, or the next start.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from offload.checkpoint.agreement import Agreement
from offload.checkpoint.format.leftovers import PREFIX, remove_leftovers
from offload.checkpoint.format.staged_folder import StagedFolder
from offload.config import Config
from offload.errors import RankError
from offload.ranks.group import Group, Meeting
from offload.ranks.next_transfers import MeetingPoint
from offload.step.components import Components
from offload.tiers.scratch import file_system_of, free_nbytes

_log = logging.getLogger(__name__)
_STATE_NBYTES = 12
"""Of a parameter in a checkpoint, at most: master and two moments in fp32."""


def _parent(config: Config) -> Path:
    """An nvme folder, or where there is none, that of temporary files."""
    return (*config.nvme_paths, Path(tempfile.gettempdir()))[0]


@contextmanager
def passing_checkpoint(config: Config, ranks: Group, meeting: Meeting) -> Iterator[Path]:
    """Where the state can be saved, in a folder of the first rank; gone afterwards. Collective as it begins."""
    with ExitStack() as stack:

        def make() -> str:
            folder = stack.enter_context(StagedFolder(_parent(config) / f"{PREFIX}passing", replace=False))
            os.chmod(folder.path, 0o700)
            return str(folder.path / "state")

        def refusal(word: str) -> RankError:
            return RankError(f"rank 0 has no place for the state that newly trained parameters join: {word}")

        yield Path(Agreement(ranks, meeting.meet).by_first(MeetingPoint.UNFREEZING, make, refusal))


def has_room(config: Config, parts: Components) -> bool:
    """Whether there is room for one, with as much left: on a drive, not in memory by another name."""
    parent = _parent(config)
    numel = sum(info.numel for info in parts.parameters)
    return file_system_of(parent) not in ("tmpfs", "ramfs") and free_nbytes([parent]) > 2 * _STATE_NBYTES * numel


def remove_abandoned(config: Config) -> None:
    """Remove what processes that are gone left there."""
    try:
        remove_leftovers(_parent(config))
    except OSError as error:
        _log.warning("what a killed process may have left in %s stays there (%s)", _parent(config), error.strerror)
