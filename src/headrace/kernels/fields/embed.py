"""Fields of embedding look-up, see `kernels/embed.py`."""

from headrace.kernels.program import argument

WEIGHTS = argument(0)  # address of the packed matrix [V][E]
UNITS = argument(1)  # units per group
COLUMNS = argument(2)  # E
TOKEN_TABLE = argument(3)  # address of token records, see `rope`
TOKENS = argument(4)
SCALE = argument(5)  # float32 bits
OUTPUT = argument(6)
OUTPUT_STRIDE = argument(7)
