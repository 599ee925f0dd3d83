"""The worker team: threads that walk a step's operations together, without a barrier that one of them can hold up.

A thread claims blocks of the current operation (even threads from the front, odd ones from the back, so that each
streams its own end of the weights), computes each into its own scratch, and commits it by compare-and-swap on the
block's flag: the winner copies, a loser drops its result. A thread that has waited too long for an operation to
complete *helps*: it computes a block that its claimant, having lost its core, has not committed. A thread that wakes
late jumps to the front. So a step moves at the speed of whatever cores it has.

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
    PROGRAM,
    PROGRAM_NUM_OPS,
    PROGRAM_OPS,
    PROGRAM_STAMPS,
    SCRATCH,
    SERIAL,
    SPIN_TICKS,
    STOP,
    SYNC,
    SYNC_BYTES,
    SYNC_DONE,
    THREAD_BYTES,
    THREADS,
    WAITERS,
)
from headrace.kernels.program import AFTER, COMMIT, COMPUTE, FLAGS, NUM_BLOCKS, OP_BYTES
from headrace.kernels.vectors import load_i64, store_i64

LATE = -2


@inline
def _claim(word: int, serial: int, from_back: int) -> int:
    """The number of a block nobody has claimed, -1 if there is none, LATE if the step is over."""
    while True:
        old = atomic_load(word)
        if (old >> 32) != serial:
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
    done = atomic_add(sync + SYNC_DONE, 1) + 1
    if (done & 0xFFFFFFFF) == load_i64(op + NUM_BLOCKS):
        store_i64(stamp, ticks())
    return 1


@inline
def _complete(sync: int, blocks: int, serial: int) -> int:
    """1 if all blocks are committed, 0 if not yet, LATE if the step is over."""
    word = atomic_load(sync + SYNC_DONE)
    if (word >> 32) != serial:
        return LATE
    return 1 if (word & 0xFFFFFFFF) >= blocks else 0


@inline
def _wait(control: int, thread: int, op: int, sync: int, stamp: int, serial: int, own_ticks: int) -> int:
    """Waits until an operation is complete, helping after a while; 1, or LATE if the step is over."""
    blocks = load_i64(op + NUM_BLOCKS)
    patience = max(load_i64(control + HELP_TICKS), own_ticks + own_ticks // 4)
    start = ticks()
    while True:
        state = _complete(sync, blocks, serial)
        if state != 0:
            return state
        spin_pause()
        if ticks() - start > patience:
            flags = load_i64(op + FLAGS)
            for block in range(blocks):
                if atomic_load(flags + 8 * block) < serial:
                    helped = _run_block(op, sync, stamp, block, serial, load_i64(thread + SCRATCH))
                    store_i64(thread + HELPED, load_i64(thread + HELPED) + helped)
            start = ticks()


@inline
def _walk(control: int, thread: int, program: int, serial: int, number: int) -> int:
    """Works through the step's operations; 1 when all were claimed, LATE if the step is over."""
    ops, num_ops = load_i64(program + PROGRAM_OPS), load_i64(program + PROGRAM_NUM_OPS)
    stamps, syncs = load_i64(program + PROGRAM_STAMPS), load_i64(control + SYNC)
    scratch = load_i64(thread + SCRATCH)
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
            awaited = ops + complete * OP_BYTES
            state = _wait(control, thread, awaited, syncs + complete * SYNC_BYTES, stamps + 8 * complete, serial, own_ticks)
            if state == LATE:
                return LATE
            complete += 1
        if (front >> 16) == serial and (front & 0xFFFF) < i:
            compare_and_swap(control + FRONT, front, serial << 16 | i)
        sync = syncs + i * SYNC_BYTES
        begin = ticks()
        blocks = 0
        while True:
            block = _claim(sync, serial, number & 1)
            if block == LATE:
                return LATE
            if block < 0:
                break
            _run_block(op, sync, stamps + 8 * i, block, serial, scratch)
            blocks += 1
        if blocks > 0:
            own_ticks = (ticks() - begin) // blocks
        i += 1
    while complete < num_ops:
        awaited = ops + complete * OP_BYTES
        state = _wait(control, thread, awaited, syncs + complete * SYNC_BYTES, stamps + 8 * complete, serial, own_ticks)
        if state == LATE:
            return LATE
        complete += 1
    return 1


def run_step(control: int, program: int, serial: int) -> None:
    """Runs a program on the calling thread and on all workers that are awake or wake up; returns when it is done."""
    ops, num_ops = load_i64(program + PROGRAM_OPS), load_i64(program + PROGRAM_NUM_OPS)
    syncs = load_i64(control + SYNC)
    for i in range(num_ops):
        blocks = load_i64(ops + i * OP_BYTES + NUM_BLOCKS)
        atomic_store(syncs + i * SYNC_BYTES, serial << 32 | blocks)
        atomic_store(syncs + i * SYNC_BYTES + SYNC_DONE, serial << 32)
    store_i64(load_i64(program + PROGRAM_STAMPS) + 8 * num_ops, ticks())
    atomic_store(control + FRONT, serial << 16)
    atomic_store(control + PROGRAM, program)
    atomic_store(control + SERIAL, serial)
    if atomic_load(control + WAITERS) > 0:
        mutex_lock(control + MUTEX)
        condition_broadcast(control + CONDITION)
        mutex_unlock(control + MUTEX)
    _walk(control, control + THREADS, program, serial, 0)
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
                _walk(control, thread, program, serial, number)
            seen = serial
        atomic_store(thread + INSIDE, 0)
