"""Fields of attention and of merging its states, see `kernels/attention.py`."""

from headrace.kernels.program import argument

ENTRIES = argument(0)  # address of one record per block, see ENTRY_*
QUERIES = argument(1)  # address of float32 rows [H * D], scaled
QUERIES_STRIDE = argument(2)
GROUP = argument(3)  # query heads that share a KV head
WIDTH = argument(4)  # D
PAGE_TOKENS = argument(5)  # P, divides 256
LAYER_OFFSET = argument(6)  # bytes from the start of a page of f16 to this layer, a multiple of those of a head
WINDOW = argument(7)  # tokens a query sees, itself included; 0: all
HEADS = argument(8)  # H
MERGE_ENTRIES = argument(0)  # address of one record per token, see MERGE_*
MERGE_HEADS = argument(1)
MERGE_WIDTH = argument(2)
MERGE_TOKENS = argument(3)
MERGE_BLOCK_TOKENS = argument(4)
MERGE_OUTPUT = argument(5)
MERGE_OUTPUT_STRIDE = argument(6)
MERGE_QUANTISED = argument(7)  # bytes of the quantised part, padded; 0: none is wanted
MERGE_FLOATS = argument(8)  # bytes of the float32 part; 0: none is wanted
