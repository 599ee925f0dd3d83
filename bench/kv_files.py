"""What a figure depends on beside the engine: files in the system's cache or not, and memory that the machine has or not.

What a plain sequential read of the same files takes, right before, is what reading pages is compared with.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

CHUNK_BYTES = 1 << 20


def can_drop() -> bool:
    """Whether this system lets files be taken out of its cache."""
    return hasattr(os, "posix_fadvise")


def drop(paths: Sequence[Path]) -> None:
    """Writes files out and takes them out of the system's cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not on disk yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def plain_read_s(paths: Sequence[Path]) -> float:
    """Seconds to read files one after the other into one buffer, which is written again and again.

    The buffer has been written before, so no time goes into memory that the system has to find first.
    """
    buffer = bytearray(CHUNK_BYTES)
    buffer[:] = b"\xff" * CHUNK_BYTES
    start = time.perf_counter()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            while os.readv(descriptor, [buffer]):
                pass
        finally:
            os.close(descriptor)
    return time.perf_counter() - start


def total_bytes(paths: Sequence[Path]) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in paths)


class Ballast:
    """Memory that is in use until it is let go of, right before it is needed elsewhere.

    The host of a virtual machine may take back what its guest does not use, within a second; whoever uses it next waits some
    1.5 ms for each MB until the host has found it again. On a machine of its own, and on one that is in use, free memory is
    simply there: that is what a process finds which starts to use memory when a ballast has just been let go of.
    """

    def __init__(self, num_bytes: int) -> None:
        """Takes memory; `touch_s` is what that took."""
        start = time.perf_counter()
        if hasattr(mmap, "MAP_PRIVATE"):
            # shared memory, which Python maps by default, is not given back in one piece
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._map = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            self._map[offset] = 1
        self.touch_s = time.perf_counter() - start

    def release(self) -> None:
        """Lets go of it."""
        self._map.close()
