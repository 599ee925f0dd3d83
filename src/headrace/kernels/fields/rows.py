"""Fields of row operations, see `kernels/rows.py`."""

from headrace.kernels.program import argument

INPUT = argument(0)  # address of float32 rows
INPUT_STRIDE = argument(1)
COLUMNS = argument(2)
TOKENS = argument(3)
BLOCK_TOKENS = argument(4)
ROW_TABLE = argument(5)  # address of int64 row numbers of the input, or 0 for rows in order
ADDEND = argument(6)  # address of float32 rows to add, or 0
ADDEND_STRIDE = argument(7)
ADDEND_NORM = argument(8)  # address of the weight that norms the addend first, or 0
WEIGHT = argument(9)  # address of the norm's weight, or 0 for no norm
EPSILON = argument(10)  # float32 bits
SUM = argument(11)  # address for the float32 sums, or 0
SUM_STRIDE = argument(12)
OUTPUT = argument(13)
OUTPUT_STRIDE = argument(14)
QUANTISED = argument(15)  # bytes of the quantised part, padded; 0: none is wanted
FLOATS = argument(16)  # bytes of the float32 part; 0: none is wanted
COMBINE = argument(17)  # NONE: input + addend; SILU, GELU: f(input) * addend
