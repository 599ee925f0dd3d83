"""Where the worker team's words lie in memory, shared by the compiled team and the Python side of it.

Control block, in 64-byte lines: the words below, then a mutex, a condition, and one line per thread.
Synchronisation words of operation i lie at SYNC + SYNC_BYTES * i: claims (serial << 32 | first << 16 | end), then the
count of committed blocks (serial << 32 | count).
A program begins with a header of 64 bytes.
"""

SERIAL, PROGRAM, FRONT, WAITERS, STOP = 0, 64, 128, 192, 256
HELP_TICKS, SPIN_TICKS, SYNC = 320, 328, 336
MUTEX, CONDITION, THREADS = 384, 512, 640
THREAD_BYTES = 64
INSIDE, SCRATCH, HELPED = 0, 8, 16  # in a thread's line: step being walked, own scratch, blocks computed for others

SYNC_BYTES, SYNC_DONE = 128, 64

PROGRAM_OPS, PROGRAM_NUM_OPS, PROGRAM_STAMPS = 0, 8, 16
HEADER_BYTES = 64
