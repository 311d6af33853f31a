# SPDX-License-Identifier: Apache-2.0
"""The errors a user can meet, on one screen.

    OffloadError
    ├── ConfigError            the configuration, the model or the optimizer cannot be what was asked for
    │   └── BudgetError        a budget cannot hold what must be there (says the smallest that can)
    ├── ParameterAccessError   a parameter or gradient was read or written at a time or in a way that has no right answer
    ├── UsageError             calls in an order that cannot be right (a second backward into a begun update, ...)
    ├── NonFiniteGradientError gradients with inf or NaN, where skipping was not asked for
    ├── StorageError           an operation on a file or path failed: names path, offset, operation, errno
    │   └── CorruptDataError   what was read is not what was written
    ├── CheckpointError        a checkpoint cannot be read, is damaged, or does not fit the engine: names the file
    ├── RankError              another rank went away, hangs, raised, or does something else: names it and the phase
    ├── InitializerError       a parameter's initialiser cannot be replayed, or a weight cannot be found or does not fit
    └── EngineFailedError      an earlier failure left the engine's state undefined; names that failure

Every message names the thing, says what was expected, and what to do. This module imports nothing of the project.
"""

from __future__ import annotations


class OffloadError(Exception):
    """Base of every error raised by this package."""


class ConfigError(OffloadError, ValueError):
    """The configuration, the model or the optimizer cannot be what was asked for."""


class BudgetError(ConfigError):
    """A memory budget cannot hold what must be there. `smallest_nbytes`: the smallest that can, where that is known."""

    smallest_nbytes: int | None = None
    changed_nothing = False
    """Whether it was raised before anything was done, so that training may go on as it was."""


class ParameterAccessError(OffloadError, RuntimeError):
    """A parameter or gradient was read or written at a time or in a way that has no right answer."""


class UsageError(OffloadError, RuntimeError):
    """Calls came in an order that cannot be right."""


class NonFiniteGradientError(OffloadError, ArithmeticError):
    """Gradients hold inf or NaN, and skipping such steps was not asked for."""


class StorageError(OffloadError, OSError):
    """An operation on a file or path failed."""


class CorruptDataError(StorageError):
    """What was read is not what was written."""


class CheckpointError(OffloadError, RuntimeError):
    """A checkpoint cannot be read, is damaged, or does not fit the engine."""


class RankError(OffloadError, RuntimeError):
    """Another rank went away, does not answer, failed, or called something else than this one."""


class InitializerError(OffloadError, RuntimeError):
    """A parameter's initialiser cannot be replayed, or a weight cannot be found or does not fit."""


class EngineFailedError(OffloadError, RuntimeError):
    """An earlier failure left the engine's state undefined. On one rank `Engine.load_checkpoint` makes it usable again."""


def words_of(error: BaseException) -> str:
    """What an error says; its name where it says nothing, as an interrupt does."""
    return str(error) or type(error).__name__
