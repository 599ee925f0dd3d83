"""Fields of the kernels that narrow pages, see `kernels/pages.py`."""

from headrace.kernels.program import argument

SOURCE = argument(0)  # address of a page, tagged with its format
TARGET = argument(1)  # address of the page to write, not tagged
WIDTH = argument(2)  # D
PAGE_TOKENS = argument(3)  # P
HEADS = argument(4)  # layers times KV heads
BLOCK_HEADS = argument(5)  # of a block
