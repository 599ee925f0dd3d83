"""Fields of rope and page writing, see `kernels/rope.py`."""

from headrace.kernels.program import argument

QUERIES = argument(0)  # address of float32 rows [H * D]
QUERIES_STRIDE = argument(1)
KEYS = argument(2)  # address of float32 rows [G * D]
KEYS_STRIDE = argument(3)
VALUES = argument(4)
VALUES_STRIDE = argument(5)
QUERY_NORM = argument(6)  # address of a weight [D] that norms each head, or 0
KEY_NORM = argument(7)
EPSILON = argument(8)  # float32 bits
HEADS = argument(9)
KV_HEADS = argument(10)
WIDTH = argument(11)  # D
ROTATED = argument(12)  # rotated dimensions of each head, a multiple of 32
ANGLES = argument(13)  # address of rows [cos: ROTATED / 2][sin: ROTATED / 2] float32, one per position
TOKEN_TABLE = argument(14)  # address of records, see TOKEN_*
TOKENS = argument(15)
BLOCK_TOKENS = argument(16)
OUTPUT = argument(17)  # address of float32 rows [H * D] for the rotated, scaled queries
OUTPUT_STRIDE = argument(18)
LAYER_OFFSET = argument(19)  # bytes from a page's start to this layer
PAGE_TOKENS = argument(20)  # P
QUERY_SCALE = argument(21)  # float32 bits
