"""How fast this machine reads: the limit that decoding is held against.

Each thread reads blocks of its own end of a buffer; what fits a cache is read again and again. The best of several runs
counts: a limit is what is there when nobody else is in the way.
"""

from __future__ import annotations

import mmap
import time
from types import TracebackType
from typing import Self

from headrace.kernels.fields import probes
from headrace.kernels.library import KernelLibrary
from headrace.kernels.program import COMMIT, COMPUTE, NUM_BLOCKS
from headrace.kernels.runtime import Memory, Program, Team

KERNELS = ("probes.read", "probes.nothing")
MEMORY_BYTES = 96 << 20
"""Far beyond most caches, and little enough to stay within a run's working memory."""
_CACHE_MULTIPLE = 3
_LARGEST_BLOCK_BYTES = 1 << 20
_RUNS = 12
_SHORTEST_RUN_BYTES = 64 << 20


def memory_bytes(last_cache_bytes: int) -> int:
    """A working set that is read from memory, behind a last cache of that size."""
    return max(MEMORY_BYTES, _CACHE_MULTIPLE * last_cache_bytes)


def measure_with(library: KernelLibrary, team: Team, num_bytes: int = MEMORY_BYTES) -> float:
    """Bytes per second that a team reads from a working set of `num_bytes`, shared out among its threads.

    The buffer lies in huge pages where the system grants them.
    """
    library.prepare(KERNELS)
    share = max(4096, num_bytes // team.threads)
    block = min(share, _LARGEST_BLOCK_BYTES) // 512 * 512
    blocks = max(team.threads, num_bytes // block)
    memory = Memory(blocks * block + 8192, huge_pages=True)
    memory.bytes[:: mmap.PAGESIZE] = 1  # a page that was never written is not in memory
    repeats = max(1, _SHORTEST_RUN_BYTES // (blocks * block))
    program = Program(1, blocks, 8)
    record = program.ops[0]
    record[COMPUTE // 8], record[COMMIT // 8] = library.address("probes.read"), library.address("probes.nothing")
    record[NUM_BLOCKS // 8] = blocks
    record[probes.BUFFER // 8], record[probes.BLOCK_BYTES // 8], record[probes.REPEATS // 8] = memory.address, block, repeats
    program.assign_flags()
    seconds = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        team.run_single(program)
        seconds.append(time.perf_counter() - start)
    return blocks * block * repeats / min(seconds)


class BandwidthMeter:
    """Measures without a model, with a team of its own. `library` must hold or be able to make TEAM_KERNELS and KERNELS."""

    def __init__(self, library: KernelLibrary, threads: int) -> None:
        self._library = library
        self._team = Team(library, threads, 4096, 1)

    def measure(self, num_bytes: int) -> float:
        """Bytes per second, all threads together."""
        return measure_with(self._library, self._team, num_bytes)

    def close(self) -> None:
        """Stops the team."""
        self._team.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
