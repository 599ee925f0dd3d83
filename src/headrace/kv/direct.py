"""Reading past the system's cache: the disk writes straight to where the bytes are wanted, and no core copies them.

A few such reads at once keep a disk busy that a reader through the cache leaves idle half of the time, and leave the cores
to whoever computes. What lies in the cache already is better read from there. Where system, file system or file do not
allow any of this, nothing is read, and the caller reads as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import queue
from collections.abc import Callable

import numpy as np

from headrace.kernels.runtime import Memory
from headrace.kv.folder import NO_FOLLOW
from headrace.kv.runs import ALIGNMENT

NUM_BOUNCES = 8
BOUNCE_BYTES = 1 << 20
"""Memory for so many reads at once whose offset, length or address is no multiple of ALIGNMENT, which disks ask for."""
_HUGE_BYTES = 2 << 20


class DirectFile:
    """A file that can be read past the cache; `descriptor` is the same file, open for ordinary reading.

    Asking what lies in the cache needs a mapping of the file. It is never looked into: if another process cut the file
    off, that would end this one.
    """

    __slots__ = ("_address", "_descriptor", "_map", "_size")

    def __init__(self, path: str | os.PathLike[str], descriptor: int, size: int) -> None:
        self._descriptor, self._size, self._address = -1, size, 0
        self._map: mmap.mmap | None = None
        if _MINCORE is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            self._address = _address_of(memoryview(self._map))
            opened = os.open(path, os.O_RDONLY | os.O_DIRECT | NO_FOLLOW)
            if os.path.sameopenfile(opened, descriptor):
                self._descriptor = opened
            else:
                os.close(opened)

    def is_cached(self, offset: int, num_bytes: int) -> bool:
        """Whether all of a range lies in the system's cache; also True where nobody can tell, or it makes no difference."""
        if self._descriptor < 0 or offset + num_bytes > self._size:
            return True
        assert _MINCORE is not None
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = offset + num_bytes - start
        found = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        return _MINCORE(self._address + start, length, found) != 0 or b"\0" not in found.raw

    def read(self, target: memoryview, offset: int) -> bool:
        """Reads all of a target past the cache; False if it has to be read in the ordinary way."""
        if self._descriptor < 0:
            return False
        try:
            if (offset | len(target) | _address_of(target)) % ALIGNMENT:
                return self._read_by_bounce(target, offset)
            return os.preadv(self._descriptor, (target,), offset) == len(target)
        except OSError:
            return False

    def close(self) -> None:
        """Closes what was opened here."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._map is not None:
            self._map.close()
            self._map = None

    def _read_by_bounce(self, target: memoryview, offset: int) -> bool:
        """By way of memory that is aligned, for what begins or ends anywhere, or is to lie anywhere."""
        free = _bounces()
        bounce = free.get()
        try:
            return self._read_through(bounce, target, offset)
        finally:
            free.put(bounce)

    def _read_through(self, bounce: memoryview, target: memoryview, offset: int) -> bool:
        address, bounce_address, done = _address_of(target), _address_of(bounce), 0
        while done < len(target):
            shift = (offset + done) % ALIGNMENT
            count = min(len(target) - done, BOUNCE_BYTES - shift)
            asked = -(-(shift + count) // ALIGNMENT) * ALIGNMENT
            if os.preadv(self._descriptor, (bounce[:asked],), offset + done - shift) < shift + count:
                return False
            ctypes.memmove(address + done, bounce_address + shift, count)  # lets other threads in meanwhile
            done += count
        return True


@functools.cache
def _bounces() -> queue.SimpleQueue[memoryview]:
    """Aligned memory, free to be used: in huge pages, as a disk writes to scattered small ones at half speed."""
    memory = Memory(NUM_BOUNCES * BOUNCE_BYTES + _HUGE_BYTES, huge_pages=True)
    start = -memory.address % _HUGE_BYTES
    free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for number in range(NUM_BOUNCES):
        free.put(memory.bytes[start + number * BOUNCE_BYTES :][:BOUNCE_BYTES].data)
    return free


def _address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _mincore() -> Callable[[int, int, ctypes.Array[ctypes.c_char]], int] | None:
    """The system's call that tells which pages of a mapping are in memory; None if nothing is read past the cache here."""
    if not (hasattr(os, "O_DIRECT") and hasattr(os, "preadv")):
        return None
    try:
        function = ctypes.PyDLL(None).mincore  # takes so little time that other threads need not be let in
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return function


_MINCORE = _mincore()
