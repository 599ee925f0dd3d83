"""The worker team: threads that walk a step's operations together, without a barrier that one of them can hold up.

Each thread has a stretch of an operation's blocks, so that it streams its own part of the weights in address order; when
that is used up it takes blocks from the ends of the others' stretches. It computes a block into its own scratch, and
commits it by compare-and-swap on the block's flag: the winner copies, a loser drops its result. While a thread waits it
asks for the weights it will read next. A thread that has waited too long for an operation to complete *helps*: it
computes a block that its claimant, having lost its core, has not committed. A thread that wakes late jumps to the front.
So a step moves at the speed of whatever cores it has.

Every word is tagged with the step's serial number, so what a late thread does to an old step has no effect on a new
one. A program is not changed while any thread may read it (`INSIDE`), see `runtime.py`; `layout.py` says where the
words lie.
"""

from __future__ import annotations

from headrace.kernels.atomics import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    compare_and_swap,
    condition_broadcast,
    condition_wait,
    mutex_lock,
    mutex_unlock,
    spin_pause,
    ticks,
)
from headrace.kernels.dots import inline
from headrace.kernels.layout import (
    CONDITION,
    FRONT,
    HELP_TICKS,
    HELPED,
    INSIDE,
    MUTEX,
    NUM_THREADS,
    PROGRAM,
    PROGRAM_NUM_OPS,
    PROGRAM_OPS,
    PROGRAM_STAMPS,
    SCRATCH,
    SERIAL,
    SPIN_TICKS,
    STOP,
    SYNC,
    SYNC_LINE,
    SYNC_STRIDE,
    THREAD_BYTES,
    THREADS,
    WAITERS,
)
from headrace.kernels.program import AFTER, AHEAD, AHEAD_BLOCKS, AHEAD_BYTES, COMMIT, COMPUTE, FLAGS, NUM_BLOCKS, OP_BYTES
from headrace.kernels.vectors import load_i64, prefetch, store_i64

LATE = -2
AHEAD_LINES = 1024  # asked for while waiting: 64 KiB, an eighth of the smallest L2 cache of a core that matters
FIRST_LINES = 24  # asked for before a small operation


@inline
def _tag(serial: int) -> int:
    """A step's mark in the upper half of a word: its serial, wrapped before it could reach the sign (in fifty days)."""
    return serial & 0x7FFFFFFF


@inline
def stretch_start(blocks: int, thread: int, threads: int) -> int:
    """The first block of a thread's stretch; a single block is the first thread's."""
    return (blocks * thread + threads - 1) // threads


@inline
def _take(word: int, serial: int, from_back: int) -> int:
    """A block of a stretch that nobody has claimed, -1 if there is none, LATE if the step is over."""
    while True:
        old = atomic_load(word)
        if (old >> 32) != _tag(serial):
            return LATE
        first, end = (old >> 16) & 0xFFFF, old & 0xFFFF
        if first >= end:
            return -1
        if from_back != 0:
            if compare_and_swap(word, old, old - 1):
                return end - 1
        elif compare_and_swap(word, old, old + 0x10000):
            return first


@inline
def _claim(control: int, sync: int, serial: int, number: int) -> int:
    """The next block of the thread's own stretch, or the last one of another's; -1 if none is left, LATE if it is late."""
    block = _take(sync + SYNC_LINE * (1 + number), serial, 0)
    if block != -1:
        return block
    threads = load_i64(control + NUM_THREADS)
    for distance in range(1, threads):
        block = _take(sync + SYNC_LINE * (1 + (number + distance) % threads), serial, 1)
        if block != -1:
            return block
    return -1


@inline
def _ask_ahead(op: int, number: int, threads: int, line: int, lines: int) -> None:
    """Asks for some lines of what this thread will read first in the next product."""
    start = stretch_start(load_i64(op + AHEAD_BLOCKS), number, threads) * load_i64(op + AHEAD_BYTES)
    at = load_i64(op + AHEAD) + start + 64 * line
    for i in range(lines):
        prefetch(at + 64 * i)


@inline
def _run_block(op: int, sync: int, stamp: int, block: int, serial: int, scratch: int) -> int:
    """Computes a block and commits it unless another thread has; returns 1 if this thread did."""
    flag = load_i64(op + FLAGS) + 8 * block
    before = atomic_load(flag)
    if before >= serial:
        return 0
    call_kernel(load_i64(op + COMPUTE), op, block, scratch)
    if not compare_and_swap(flag, before, serial):
        return 0
    call_kernel(load_i64(op + COMMIT), op, block, scratch)
    done = atomic_add(sync, 1) + 1
    if (done & 0xFFFFFFFF) == load_i64(op + NUM_BLOCKS):
        store_i64(stamp, ticks())
    return 1


@inline
def _complete(sync: int, blocks: int, serial: int) -> int:
    """1 if all blocks are committed, 0 if not yet, LATE if the step is over."""
    word = atomic_load(sync)
    if (word >> 32) != _tag(serial):
        return LATE
    return 1 if (word & 0xFFFFFFFF) >= blocks else 0


@inline
def _wait(control: int, number: int, program: int, awaited: int, next_op: int, serial: int, own_ticks: int) -> int:
    """Waits until an operation is complete; 1, or LATE if the step is over.

    Meanwhile asks for what the thread will read next; after a while it helps.
    """
    op = load_i64(program + PROGRAM_OPS) + awaited * OP_BYTES
    sync = load_i64(control + SYNC) + awaited * load_i64(control + SYNC_STRIDE)
    stamp = load_i64(program + PROGRAM_STAMPS) + 8 * awaited
    thread = control + THREADS + number * THREAD_BYTES
    blocks = load_i64(op + NUM_BLOCKS)
    patience = max(load_i64(control + HELP_TICKS), own_ticks + own_ticks // 4)
    start = ticks()
    line = 0
    while True:
        state = _complete(sync, blocks, serial)
        if state != 0:
            return state
        if line < AHEAD_LINES and load_i64(next_op + AHEAD) != 0 and 64 * line < load_i64(next_op + AHEAD_BYTES):
            _ask_ahead(next_op, number, load_i64(control + NUM_THREADS), line, 4)
            line += 4
        else:
            spin_pause()
        if ticks() - start > patience:
            flags = load_i64(op + FLAGS)
            for block in range(blocks):
                if atomic_load(flags + 8 * block) < serial:
                    helped = _run_block(op, sync, stamp, block, serial, load_i64(thread + SCRATCH))
                    store_i64(thread + HELPED, load_i64(thread + HELPED) + helped)
            start = ticks()


@inline
def _walk(control: int, program: int, serial: int, number: int) -> int:
    """Works through the step's operations; 1 when all are complete, LATE if the step is over."""
    ops, num_ops = load_i64(program + PROGRAM_OPS), load_i64(program + PROGRAM_NUM_OPS)
    scratch = load_i64(control + THREADS + number * THREAD_BYTES + SCRATCH)
    complete = 0
    i = 0
    own_ticks = 0
    while i < num_ops:
        front = atomic_load(control + FRONT)
        if (front >> 16) == serial and (front & 0xFFFF) > i:
            # all before the front is claimed, and what the front waits for is complete
            i = front & 0xFFFF
            complete = max(complete, load_i64(ops + i * OP_BYTES + AFTER))
        op = ops + i * OP_BYTES
        while complete < load_i64(op + AFTER):
            if _wait(control, number, program, complete, op, serial, own_ticks) == LATE:
                return LATE
            complete += 1
        if (front >> 16) == serial and (front & 0xFFFF) < i:
            compare_and_swap(control + FRONT, front, serial << 16 | i)
        if load_i64(op + AHEAD) != 0:
            # memory would idle during a small operation: a few lines hide the latency of the product that follows
            _ask_ahead(op, number, load_i64(control + NUM_THREADS), 0, FIRST_LINES)
        sync = load_i64(control + SYNC) + i * load_i64(control + SYNC_STRIDE)
        stamp = load_i64(program + PROGRAM_STAMPS) + 8 * i
        begin = ticks()
        blocks = 0
        block = _claim(control, sync, serial, number)
        while block >= 0:
            _run_block(op, sync, stamp, block, serial, scratch)
            blocks += 1
            block = _claim(control, sync, serial, number)
        if block == LATE:
            return LATE
        if blocks > 0:
            own_ticks = (ticks() - begin) // blocks
        i += 1
    while complete < num_ops:
        if _wait(control, number, program, complete, ops, serial, own_ticks) == LATE:
            return LATE
        complete += 1
    return 1


def run_step(control: int, program: int, serial: int) -> None:
    """Runs a program on the calling thread and on all workers that are awake or wake up; returns when it is done."""
    ops, num_ops = load_i64(program + PROGRAM_OPS), load_i64(program + PROGRAM_NUM_OPS)
    threads = load_i64(control + NUM_THREADS)
    for i in range(num_ops):
        blocks = load_i64(ops + i * OP_BYTES + NUM_BLOCKS)
        sync = load_i64(control + SYNC) + i * load_i64(control + SYNC_STRIDE)
        # plain stores: nobody reads them before SERIAL says so, late threads see a foreign serial either way
        store_i64(sync, _tag(serial) << 32)
        for thread in range(threads):
            first, end = stretch_start(blocks, thread, threads), stretch_start(blocks, thread + 1, threads)
            store_i64(sync + SYNC_LINE * (1 + thread), _tag(serial) << 32 | first << 16 | end)
    store_i64(load_i64(program + PROGRAM_STAMPS) + 8 * num_ops, ticks())
    atomic_store(control + FRONT, serial << 16)
    atomic_store(control + PROGRAM, program)
    atomic_store(control + SERIAL, serial)
    if atomic_load(control + WAITERS) > 0:
        mutex_lock(control + MUTEX)
        condition_broadcast(control + CONDITION)
        mutex_unlock(control + MUTEX)
    _walk(control, program, serial, 0)
    # nobody enters a step that is over: from here on the program is read only by those who are inside
    atomic_store(control + SERIAL, -serial)


def work(control: int, number: int, unused: int) -> None:
    """The life of worker `number`: spins for a short while after each step, then sleeps until the next."""
    thread = control + THREADS + number * THREAD_BYTES
    seen = 0
    while True:
        start = ticks()
        while atomic_load(control + SERIAL) == seen and atomic_load(control + STOP) == 0:
            spin_pause()
            if ticks() - start > load_i64(control + SPIN_TICKS):
                mutex_lock(control + MUTEX)
                atomic_add(control + WAITERS, 1)
                while atomic_load(control + SERIAL) == seen and atomic_load(control + STOP) == 0:
                    condition_wait(control + CONDITION, control + MUTEX)
                atomic_add(control + WAITERS, -1)
                mutex_unlock(control + MUTEX)
        if atomic_load(control + STOP) != 0:
            return
        serial = atomic_load(control + SERIAL)
        atomic_store(thread + INSIDE, serial)
        program = atomic_load(control + PROGRAM)
        # the step may have ended, and its program been given up, before the two lines above
        if atomic_load(control + SERIAL) == serial:
            if serial > 0:
                _walk(control, program, serial, number)
            seen = serial
        atomic_store(thread + INSIDE, 0)
