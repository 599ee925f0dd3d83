"""The sampling record of one row: how its next token is chosen, in int64 words named by their byte offsets.

A record of zeros takes the largest logit. Positions are those of the program's first step; a later step adds its number.
"""

SAMPLE_WORDS, SAMPLE_BYTES = 16, 128

FLAGS = 0  # the sum of those below that apply
POSITION = 8  # index of the new token in its sequence: the counter of its random number, and the length of its history
SEED = 16  # unsigned
TEMPERATURE = 24  # float64 bits; read if SAMPLES
TOP_K = 32  # 0: all
TOP_P = 40  # float64 bits
LOG_MIN_P = 48  # float32 bits of ln(min_p); minus infinity: all
LOG_REST = 56  # float32 bits of ln((1 - top_p) / V): what lies this far below the best can be no part of a top-p of all
SCALE = 64  # float32 bits: weights in the records of parts are exp(SCALE * (value - largest)); read if WEIGHS
REPEAT = 72  # float32 bits
PRESENCE = 80  # float32 bits
FREQUENCY = 88  # float32 bits
WINDOW = 96  # the last tokens of the history that penalties look at; 0: no penalties
HISTORY = 104  # address of the ids from the first position on, int32; the chosen id is added. 0: no history
BIASES = 112  # address of the biases, see below; 0: none
MASK = 120  # address of bits, token 0 in the lowest of the first byte, padded to whole 64 bits; 0: all are allowed

SAMPLED = 1  # a token is drawn
EDITED = 2  # there are biases, penalties or a mask
WEIGHED = 4  # the parts' sums of weights are needed
WHOLE = 8  # the draw is from the whole vocabulary

# biases: their number (int64), then for each its token id (int32) and its float32, ids ascending
BIAS_BYTES = 8
