"""Fields of the bandwidth probe, see `kernels/probes.py`."""

from headrace.kernels.program import argument

BUFFER = argument(0)  # address
BLOCK_BYTES = argument(1)  # bytes a block reads, a multiple of 512
REPEATS = argument(2)  # times a block is read
