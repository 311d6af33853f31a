# SPDX-License-Identifier: Apache-2.0
"""Making the pages of large host memory, on all cores at once.

A page is zeroed when it is first touched, by the thread that touches it. Where the GPU's driver does that while it registers
memory, that is one thread: tens of seconds for tens of GB.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import torch

_log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_SLICE_NBYTES = 64 << 20
"""One thread zeroes this much in about 10 ms; less is not worth a second thread."""
_SAID_NBYTES = 1 << 30
"""What takes long enough to be announced."""

_libc = ctypes.CDLL(None, use_errno=True)  # not mmap.madvise: that keeps other threads of Python waiting
_libc.madvise.argtypes, _libc.madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int


def populate(address: int, nbytes: int) -> None:
    """Make all pages of [address, address + nbytes), which begins on a page and which nobody has written to yet.

    `OSError` (ENOMEM among others) where the system has no such memory."""
    starts = range(address, address + nbytes, _SLICE_NBYTES)
    thread_count = min(len(os.sched_getaffinity(0)), len(starts))
    if nbytes >= _SAID_NBYTES:
        _log.info("taking %.1f GiB of host memory, by %d threads", nbytes / 2**30, thread_count)
    if thread_count <= 1:
        for start in starts:
            _populate(start, min(_SLICE_NBYTES, address + nbytes - start))
        return
    with ThreadPoolExecutor(thread_count, "offload-pages") as threads:
        slices = [threads.submit(_populate, start, min(_SLICE_NBYTES, address + nbytes - start)) for start in starts]
        try:
            for one in slices:
                one.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)  # those that have begun are waited for on the way out
            raise


def _populate(address: int, nbytes: int) -> None:
    while _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # an older kernel
            _touch(address, nbytes)
            return
        if code not in (errno.EINTR, errno.EAGAIN):
            # EFAULT: what a write would have ended the process with.
            code = errno.ENOMEM if code == errno.EFAULT else code
            raise OSError(code, os.strerror(code))


def _touch(address: int, nbytes: int) -> None:
    """Write the zero that is there to each page."""
    memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    memory[:: os.sysconf("SC_PAGE_SIZE")].zero_()
