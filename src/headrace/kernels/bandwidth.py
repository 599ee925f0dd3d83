"""How fast this machine reads: the limit that decoding is held against.

Each thread reads blocks of its own end of a buffer; what fits a cache is read again and again. Medians of several runs.
"""

from __future__ import annotations

import statistics
import time

from headrace.kernels.fields import probes
from headrace.kernels.library import KernelLibrary
from headrace.kernels.program import COMMIT, COMPUTE, NUM_BLOCKS
from headrace.kernels.runtime import Memory, Program, Team

KERNELS = ("probes.read", "probes.nothing")
MEMORY_BYTES = 256 << 20
_LARGEST_BLOCK_BYTES = 1 << 20
_RUNS = 7
_SHORTEST_RUN_BYTES = 64 << 20


def measure_with(library: KernelLibrary, team: Team, num_bytes: int = MEMORY_BYTES) -> float:
    """Bytes per second that a team reads from a working set of `num_bytes`, shared out among its threads.

    The default is beyond any cache; the buffer lies in huge pages where the system grants them.
    """
    library.prepare(KERNELS)
    share = max(4096, num_bytes // team.threads)
    block = min(share, _LARGEST_BLOCK_BYTES) // 512 * 512
    blocks = max(team.threads, num_bytes // block)
    memory = Memory(blocks * block + 8192)
    memory.bytes[:] = 1
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
    return blocks * block * repeats / statistics.median(seconds)
