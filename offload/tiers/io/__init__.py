# SPDX-License-Identifier: Apache-2.0
"""File I/O: one protocol, three implementations, the best that works here chosen by trying.

io_uring    native; one ring for each device, deep queues, no thread per transfer
threads     native; pread and pwrite on a pool of threads, where the system forbids io_uring (most containers)
aiofiles    pure Python, where the native library cannot be had
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from offload.errors import ConfigError
from offload.tiers.io.backend import IoBackend, IoStats, OpenFile, Priority
from offload.tiers.io.devices import DeviceBackends
from offload.tiers.io.failure import errno_text

__all__ = ["BACKEND_NAMES", "IoBackend", "IoStats", "OpenFile", "Priority", "open_backend"]

BACKEND_NAMES = ("io_uring", "threads", "aiofiles")
"""Best first."""

ENVIRONMENT_VARIABLE = "OFFLOAD_IO"

_log = logging.getLogger(__name__)


def open_backend(
    name: str = "auto",
    *,
    queue_depth: int | None = None,
    block_nbytes: int | None = None,
    paths: Sequence[str | os.PathLike[str]] = (),
) -> IoBackend:
    """Open the backend of that name, or with "auto" the best one that works on this system.

    The environment variable OFFLOAD_IO, where set, takes the place of "auto". At most `queue_depth` blocks of
    `block_nbytes` are in flight; what is not given is the backend's own default. `paths`: existing folders where the files
    will lie; there is then one queue for each device among them. The caller closes it.

    Raises `ConfigError` where the name is unknown or the backend that was named does not work here, with the reason."""
    sizes = {key: size for key, size in (("queue_depth", queue_depth), ("block_nbytes", block_nbytes)) if size is not None}
    first = _choose(name, sizes)
    devices = list(dict.fromkeys(os.stat(path).st_dev for path in paths))
    if len(devices) < 2:
        return first
    opened = {devices[0]: first}
    try:
        for device in devices[1:]:
            opened[device] = _open(first.name, sizes)
    except BaseException:
        for one in opened.values():
            one.close()
        raise
    return DeviceBackends(opened)


def _choose(name: str, sizes: Mapping[str, int]) -> IoBackend:
    source = "the I/O backend"
    if name == "auto":
        name = os.environ.get(ENVIRONMENT_VARIABLE, "auto") or "auto"
        source = f"the environment variable {ENVIRONMENT_VARIABLE}"
    if name == "auto":
        return _open_best(sizes)
    if name not in BACKEND_NAMES:
        raise ConfigError(f"{source} is {name!r}; expected one of auto, {', '.join(BACKEND_NAMES)}")
    try:
        return _open(name, sizes)
    except (OSError, ImportError) as error:
        raise ConfigError(
            f"{source} asks for {name}, which does not work here: {_reason(error)}. Leave the choice to offload "
            "(auto), or make it available"
        ) from error


def _open_best(sizes: Mapping[str, int]) -> IoBackend:
    refusals: list[str] = []
    for name in BACKEND_NAMES:
        try:
            backend = _open(name, sizes)
        except (OSError, ImportError) as error:
            refusals.append(f"{name}: {_reason(error)}")
            continue
        if name == "aiofiles":
            # Nothing is said where the library is there but what it needs is forbidden: the log has the reason.
            from offload import _native

            _native.warn_if_missing()
        _log.info("file I/O by %s%s", name, f" ({'; '.join(refusals)})" if refusals else "")
        return backend
    raise ConfigError(
        f"no I/O backend works here: {'; '.join(refusals)}. Install aiofiles (pip install aiofiles), or reinstall "
        "offload where a C++ compiler is available"
    )


def _open(name: str, sizes: Mapping[str, int]) -> IoBackend:
    # Imported here: who uses one backend does not pay for, or need, what the other is made of.
    if name == "aiofiles":
        from offload.tiers.io.aio import AioBackend

        return AioBackend(**sizes)
    from offload import _native

    if not _native.available():
        raise ImportError(f"the native library is missing: {_native.unavailable_reason()}")
    from offload.tiers.io.native import NativeBackend

    return NativeBackend("io_uring" if name == "io_uring" else "threads", **sizes)


def _reason(error: OSError | ImportError) -> str:
    if isinstance(error, OSError) and error.errno:
        return errno_text(error.errno)
    return str(error)
