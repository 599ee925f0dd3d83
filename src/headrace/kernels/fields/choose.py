"""Fields of choosing the most likely token, see `kernels/choose.py`."""

from headrace.kernels.program import argument

LOGITS = argument(0)  # address of float32 [V]
COUNT = argument(1)  # V
PART = argument(2)  # values that a block looks at, a multiple of 16
PARTS = argument(3)  # address of one record per block: largest value, poison (float32), id (int64)
NUM_PARTS = argument(4)
CHOSEN = argument(5)  # address where the id goes (int64); -1 if a logit is not finite
NEXT = argument(6)  # address of the next token's id, or 0

PART_BYTES = 16
