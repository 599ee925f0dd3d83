"""Fields of choosing a token for each of R rows, see `kernels/choose.py`; and the record of a part of a row."""

from headrace.kernels.program import argument

LOGITS = argument(0)  # address of float32 [R, V]
STRIDE = argument(1)  # bytes from one row to the next, of logits and of scores
COUNT = argument(2)  # V
PART = argument(3)  # values that a block of `find` looks at, a multiple of STRETCH
NUM_PARTS = argument(4)  # blocks per row
PARTS = argument(5)  # address of the records of parts [R, NUM_PARTS], `part_bytes(PART)` each
SCORES = argument(6)  # address of float32 [R, V]: logits after edits, of rows that have any
SAMPLES = argument(7)  # address of the sampling records of the rows, see `sample.py`; 0: every row takes its largest logit
STEP = argument(8)  # number of the step in its program: what is added to the positions in the sampling records
CHOSEN = argument(9)  # address of int64 [R] where the ids go, or one of the codes below
NEXT = argument(10)  # address of the token table of the next step, or 0
ROW_TABLE = argument(11)  # address of int64 [R]: which token of a step each row of logits is of
DRAW = argument(12)  # addresses of the kernels that draw: from few candidates, and from any number
DRAW_FLAT = argument(13)

FRAME_BYTES = 1 << 17  # of a frame, but for what each stretch takes
STRETCH = 64
"""Values whose maximum is kept, so that the few large ones are found without looking at all."""

# a part's record: largest value (float32), not 0 if a logit is not finite (float32), id (int64), sum of the weights relative
# to the part's largest (float64), not 0 if an edit left float32's range (float32); then the maxima of stretches (float32)
PART_LARGEST, PART_POISON, PART_TOKEN, PART_MASS, PART_OVERFLOW, PART_MAXIMA = 0, 4, 8, 16, 24, 32

# what stands in an id's place
NOT_FINITE = -1  # a logit is NaN or infinite
EDITED_OUT_OF_RANGE = -2  # penalties pushed a logit out of float32's range
NOTHING_ALLOWED = -3  # the mask allows no token


def part_bytes(part: int) -> int:
    """Bytes of the record of a part of this many values."""
    return -(-(PART_MAXIMA + 4 * (part // STRETCH)) // 64) * 64


def scratch_bytes(count: int, num_parts: int) -> int:
    """Scratch for a row of `count` values: a part with its scores and counts; a frame, see `kernels/candidates.py`."""
    part, stretches = count // num_parts + STRETCH, count // STRETCH + 16
    return max(part_bytes(part) + 8 * part, FRAME_BYTES + 12 * stretches)
