"""Fields of a matrix product, see `kernels/matmul.py`."""

from headrace.kernels.program import argument

WEIGHTS = argument(0)  # address of the packed matrix
GROUPS = argument(1)  # groups of 16 rows
UNITS = argument(2)  # units per group
TOKENS = argument(3)  # rows of activations
INPUT = argument(4)  # address of the activations
INPUT_STRIDE = argument(5)  # bytes from one row of activations to the next
RECORDS = argument(6)  # bytes from the start of a row to its block records
OUTPUT = argument(7)  # address of the result, float32
OUTPUT_STRIDE = argument(8)  # bytes from one row of the result to the next
BLOCK_GROUPS = argument(9)  # groups in a block
BLOCK_TOKENS = argument(10)  # tokens in a block
ACTIVATION = argument(11)  # NONE, SILU or GELU
