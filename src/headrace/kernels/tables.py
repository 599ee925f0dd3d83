"""Tables of a step as kernels read them, in int64 words, and the state of a row of attention.

One record per token, one per block of attention, one per row to merge; fields are named by their byte offsets.
"""

TOKEN_WORDS, TOKEN_BYTES = 4, 32
TOKEN_POSITION, TOKEN_PAGE, TOKEN_SLOT, TOKEN_ID = 0, 8, 16, 24

ENTRY_WORDS, ENTRY_BYTES = 8, 64
ENTRY_TOKEN, ENTRY_NUM_TOKENS, ENTRY_KV_HEAD, ENTRY_POSITION = 0, 8, 16, 24
ENTRY_PAGES, ENTRY_SEGMENT, ENTRY_END_SEGMENT, ENTRY_STATES = 32, 40, 48, 56

MERGE_ENTRY_WORDS, MERGE_ENTRY_BYTES = 4, 32
MERGE_STATES, MERGE_NUM_STATES, MERGE_STATES_STRIDE = 0, 8, 16

SEGMENT_TOKENS = 256
STATE_EXTRA = 16


def state_bytes(head_width: int) -> int:
    """Bytes of one row's state: its output, then maximum and sum."""
    return 4 * (head_width + STATE_EXTRA)
