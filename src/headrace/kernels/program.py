"""The record of one operation, as the kernels and the worker team read it: 32 int64 fields.

A step is an array of these records. A kernel is two compiled functions with one signature,

    compute(op, block, scratch)   reads its inputs, writes only the thread's own scratch
    commit(op, block, scratch)    copies the scratch to where the result belongs

so a block can be computed twice, by two threads, and committed once. Fields are named by their byte offset; those
from `argument(0)` on belong to the kernel, and each kernel's module names its own.
"""

OP_FIELDS = 32
OP_BYTES = 8 * OP_FIELDS
MAX_BLOCKS = 2**15 - 1

COMPUTE = 0  # address of the compute function
COMMIT = 8  # address of the commit function
NUM_BLOCKS = 16  # blocks to claim, at most MAX_BLOCKS
AFTER = 24  # number of leading operations that must be complete before this one starts
FLAGS = 32  # address of this operation's commit flags, one int64 per block
AHEAD = 40  # address of what the next product reads, block after block; 0: nothing worth asking for early
AHEAD_BYTES = 48  # bytes of one of its blocks
AHEAD_BLOCKS = 56  # its number of blocks
_ARGUMENTS = 64

# activation functions, where a kernel takes one
NONE, SILU, GELU = 0, 1, 2


def argument(index: int) -> int:
    """Byte offset of a kernel's own field."""
    return _ARGUMENTS + 8 * index
