"""Memory and threads behind the worker team: control block, scratch, programs. See `team.py` for the protocol.

Invariants: a program is written only while no thread can be reading it; memory that kernels touch is freed only after
the team has stopped. Knows no models and no kernels but the team's own.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import threading
import time
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headrace.kernels import layout
from headrace.kernels.library import KernelLibrary
from headrace.kernels.program import COMMIT, COMPUTE, FLAGS, NUM_BLOCKS, OP_BYTES, OP_FIELDS

TEAM_KERNELS = ("team.run_step", "team.work", "probes.ticks")
HELP_AFTER_US = 20.0
SPIN_US = 400.0
MAX_OPS = 1 << 16
_CACHE_LINE = 64


class Memory:
    """Zeroed, page-aligned memory of the process, resident where it was touched.

    With `huge_pages`, in huge pages where the system grants them: for what is streamed through, since each small page
    costs a look-up; not for what is touched here and there, since a huge page is resident as a whole.
    """

    def __init__(self, num_bytes: int, *, huge_pages: bool = False) -> None:
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        if hasattr(mmap, "MAP_PRIVATE"):
            # shared memory, which Python maps by default, gets no huge pages
            self._map = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._map = mmap.mmap(-1, self.num_bytes)
        if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def discard(self, offset: int, num_bytes: int) -> None:
        """Gives the system's pages inside a range back, where that can be done; they read as zeros when touched again."""
        start, end = round_up(offset, mmap.PAGESIZE), (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def words(self, offset: int, count: int) -> NDArray[np.int64]:
        """A view of int64 words at a byte offset."""
        return self.bytes[offset : offset + 8 * count].view(np.int64)

    def floats(self, offset: int, count: int) -> NDArray[np.float32]:
        """A view of float32 values at a byte offset."""
        return self.bytes[offset : offset + 4 * count].view(np.float32)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below value."""
    return -(-value // multiple) * multiple


class Program:
    """One step's operations, stamps, flags and tables in one piece of memory.

    `ops` is int64 [num_ops, OP_FIELDS], `stamps` int64 [num_ops + 1]; `tables` is free int64 space that operations may
    point into. A program can be used for fewer operations than it has room for.
    """

    def __init__(self, num_ops: int, num_flags: int, table_words: int) -> None:
        self._stamps_at = layout.HEADER_BYTES + num_ops * OP_BYTES
        self._flags_at = round_up(self._stamps_at + 8 * (num_ops + 1), _CACHE_LINE)
        tables_at = round_up(self._flags_at + 8 * num_flags, _CACHE_LINE)
        self.memory = Memory(tables_at + 8 * table_words)
        self.address = self.memory.address
        self.num_flags = num_flags
        self._room = num_ops
        self.resize(num_ops)
        self.tables = self.memory.words(tables_at, table_words)
        self.tables_address = self.address + tables_at
        self.serial = 0

    def resize(self, num_ops: int) -> None:
        """Uses the program for its first `num_ops` operations only; records beyond them are kept."""
        assert num_ops <= self._room, "the program was sized for fewer operations"
        self.ops = self.memory.words(layout.HEADER_BYTES, num_ops * OP_FIELDS).reshape(num_ops, OP_FIELDS)
        self.stamps = self.memory.words(self._stamps_at, num_ops + 1)
        header = self.memory.words(0, 3)
        header[:] = (self.address + layout.HEADER_BYTES, num_ops, self.address + self._stamps_at)

    def assign_flags(self) -> None:
        """Gives each operation its own run of flags, by its number of blocks."""
        blocks = self.ops[:, NUM_BLOCKS // 8]
        ends = np.cumsum(blocks)
        assert ends[-1] <= self.num_flags, "the program was sized for fewer blocks"
        self.ops[:, FLAGS // 8] = self.address + self._flags_at + 8 * (ends - blocks)


class Team:
    """Threads that run programs. The calling thread works too; `threads` counts it."""

    def __init__(self, library: KernelLibrary, threads: int, scratch_bytes: int, max_ops: int) -> None:
        assert max_ops < MAX_OPS, "the word of the front has 16 bits for an operation's number"
        library.prepare(TEAM_KERNELS)
        self.threads = threads
        self._library = library
        self._run = library.function("team.run_step")
        self._read_ticks = library.function("probes.ticks")
        self.max_ops = max_ops
        self._scratch_bytes = round_up(scratch_bytes, 4096)
        threads_at = layout.THREADS
        sync_at = threads_at + threads * layout.THREAD_BYTES
        sync_stride = (1 + threads) * layout.SYNC_LINE
        scratch_at = round_up(sync_at + max_ops * sync_stride, 4096)
        self._memory = Memory(scratch_at + threads * self._scratch_bytes)
        self._base = self._memory.address
        self._words = self._memory.words(0, scratch_at // 8)
        self._words[layout.SYNC // 8] = self._base + sync_at
        self._words[layout.SYNC_STRIDE // 8] = sync_stride
        self._words[layout.NUM_THREADS // 8] = threads
        for number in range(threads):
            self._thread_word(number, layout.SCRATCH, self._base + scratch_at + number * self._scratch_bytes)
        self.ticks_per_us = self._calibrate()
        self._words[layout.HELP_TICKS // 8] = int(HELP_AFTER_US * self.ticks_per_us)
        self._words[layout.SPIN_TICKS // 8] = int(SPIN_US * self.ticks_per_us)
        # which step each worker is in
        step_words = self._words[layout.THREADS // 8 :: layout.THREAD_BYTES // 8]
        self._inside = step_words[1:threads]
        self._serial = 0
        self._lock = threading.Lock()
        self._initialise_locks()
        self._workers = [
            threading.Thread(target=self._work, args=(number,), name=f"headrace-{number}", daemon=True)
            for number in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()

    @property
    def scratch_bytes(self) -> int:
        """Scratch of one thread."""
        return self._scratch_bytes

    @property
    def helped_blocks(self) -> int:
        """Blocks computed by a thread in another's stead since the start."""
        return sum(int(self._words[self._line(number) + layout.HELPED // 8]) for number in range(self.threads))

    def is_free(self, program: Program) -> bool:
        """Whether no thread can be reading a program any more."""
        if program.serial == 0:
            return True
        return program.serial not in self._inside.tolist()

    def run(self, program: Program) -> None:
        """Runs a program to its end; every operation's flags, kernels and blocks must be set.

        The caller may reuse the program only when `is_free` says so.
        """
        assert len(program.ops) <= self.max_ops
        with self._lock:
            self._serial += 1
            program.serial = self._serial
            self._run(self._base, program.address, self._serial)

    def run_single(self, program: Program) -> None:
        """`run`, then waits until the program is free: for programs that are built once and changed between runs."""
        self.run(program)
        while not self.is_free(program):
            time.sleep(0)

    def close(self) -> None:
        """Stops the workers; afterwards memory that programs named may be freed."""
        if self._words[layout.STOP // 8]:
            return
        self._words[layout.STOP // 8] = 1
        self._libc.pthread_mutex_lock(self._base + layout.MUTEX)
        self._libc.pthread_cond_broadcast(self._base + layout.CONDITION)
        self._libc.pthread_mutex_unlock(self._base + layout.MUTEX)
        for worker in self._workers:
            worker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def read_ticks(self) -> int:
        """The counter that stamps are taken from."""
        out = ctypes.c_int64()
        self._read_ticks(ctypes.addressof(out), 0, 0)
        return out.value

    def _work(self, number: int) -> None:
        self._library.function("team.work")(self._base, number, 0)

    def _line(self, number: int) -> int:
        return (layout.THREADS + number * layout.THREAD_BYTES) // 8

    def _thread_word(self, number: int, offset: int, value: int) -> None:
        self._words[self._line(number) + offset // 8] = value

    def _calibrate(self) -> float:
        """Ticks per microsecond, over 2 ms."""
        start_ticks, start = self.read_ticks(), time.perf_counter()
        time.sleep(0.002)
        end_ticks, end = self.read_ticks(), time.perf_counter()
        return (end_ticks - start_ticks) / (end - start) / 1e6

    def _initialise_locks(self) -> None:
        libc = ctypes.CDLL(None)
        for name in ("pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_broadcast"):
            getattr(libc, name).argtypes = (ctypes.c_void_p,)
        for name, offset in (("pthread_mutex_init", layout.MUTEX), ("pthread_cond_init", layout.CONDITION)):
            initialise = getattr(libc, name)
            initialise.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
            initialise(self._base + offset, None)
        self._libc = libc


def set_kernel(program: Program, index: int, library: KernelLibrary, compute: str, commit: str) -> None:
    """Names an operation's kernel."""
    program.ops[index, COMPUTE // 8] = library.address(compute)
    program.ops[index, COMMIT // 8] = library.address(commit)
