"""Fields of reductions over logits, see `kernels/reduce.py`."""

from headrace.kernels.program import argument

VALUES = argument(0)  # address of float32, readable up to a multiple of 16
COUNT = argument(1)
MARGIN = argument(2)  # float32 bits
CAPACITY = argument(3)
IDS = argument(4)  # address of int64
KEPT = argument(5)  # address of float32
OUT = argument(6)
