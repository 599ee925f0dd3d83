"""Where the worker team's words lie in memory, shared by the compiled team and the Python side of it.

Control block, in 64-byte lines: the words below, then a mutex, a condition, and one line per thread.
Synchronisation words of operation i lie at SYNC + SYNC_STRIDE * i, one line each: the count of committed blocks
(serial << 32 | count), then for each thread the stretch of blocks it starts with (serial << 32 | first << 16 | end).
A program begins with a header of 64 bytes.
"""

SERIAL, PROGRAM, FRONT, WAITERS, STOP = 0, 64, 128, 192, 256
HELP_TICKS, SPIN_TICKS, SYNC, SYNC_STRIDE, NUM_THREADS = 320, 328, 336, 344, 352
MUTEX, CONDITION, THREADS = 384, 512, 640
THREAD_BYTES = 64
INSIDE, SCRATCH, HELPED = 0, 8, 16  # in a thread's line: step being walked, own scratch, blocks computed for others

SYNC_LINE = 64

PROGRAM_OPS, PROGRAM_NUM_OPS, PROGRAM_STAMPS = 0, 8, 16
HEADER_BYTES = 64
