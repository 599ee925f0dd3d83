"""Drawing a token of a row inside a step, with the order of operations that `engine/sampler.py` states.

Few tokens of a row can be drawn, as a rule: bounds from the maxima of stretches cut them out, and they are put in order,
weighed and drawn in float64. Rows so flat that this does not suffice are left to `flat.py`.

Every sum is taken in an order that the row alone decides: the same row gives the same token on any number of threads.
"""

from __future__ import annotations

import numpy as np

from headrace.kernels.candidates import (
    ALL,
    BEST,
    KEYS,
    LAST_TOKEN,
    LOW,
    LOWEST,
    MOST_CANDIDATES,
    NEEDED,
    NUM_STRETCHES,
    ORDERED,
    RANDOM,
    RESULT,
    SAMPLE,
    SPARE,
    UNDECIDED,
    bound_of,
    called,
    collect,
    order,
    pick,
    sized_part_bytes,
    weigh_parts,
)
from headrace.kernels.dots import inline
from headrace.kernels.fields.choose import NUM_PARTS, PART
from headrace.kernels.fields.sample import FLAGS, LOG_MIN_P, LOG_REST, TEMPERATURE, TOP_K, TOP_P, WEIGHED
from headrace.kernels.scalars import descending_key, exp64, key_token, key_value, load_f64, store_f64
from headrace.kernels.vectors import keep_apart, load_f32, load_i64, store_f32, store_i64

_FIRST, _SECOND = 64, 512  # stretches whose maxima bound the first candidates of a top-p of the whole vocabulary
_LEAST_MASS = 1e-300  # top-p 0 keeps the best token


@called
def _weigh(keys: int, count: int, cut: int, best: float, temperature: float, weights: int) -> float:
    """Writes exp((value - best) / temperature) of the keys, float64, 0 for those beyond the cut; returns the sum."""
    keep_apart()
    total = 0.0
    for i in range(count):
        key, weight = load_i64(keys + 8 * i), 0.0
        if key <= cut:
            weight = exp64((float(key_value(key)) - best) / temperature)
        store_f64(weights + 8 * i, weight)
        total += weight
    return total


@inline
def _reaching(weights: int, count: int, needed: float) -> int:
    """How many of the first weights it takes to reach a sum; count + 1 if all do not."""
    running = 0.0
    for i in range(count):
        running += load_f64(weights + 8 * i)
        if running >= needed:
            return i + 1
    return count + 1


@called
def _try(frame: int, low: np.float32, last: bool) -> int:
    """The token, if the values >= low decide it; UNDECIDED if these are too many, or fewer or lighter than is kept.

    On the `last` try all values above low are kept even if they are.
    """
    keep_apart()
    sample, needed, best = load_i64(frame + SAMPLE), load_f64(frame + NEEDED), load_f32(frame + BEST)
    count = collect(frame, low)
    if count > MOST_CANDIDATES:
        return UNDECIDED
    top_k, top_p = load_i64(sample + TOP_K), load_f64(sample + TOP_P)
    cut = descending_key(best + load_f32(sample + LOG_MIN_P), LAST_TOKEN)
    if needed > 0.0 or top_k > 0:
        order(frame, count)
        if count < top_k and not last:
            return UNDECIDED
        kept = min(count, top_k) if top_k > 0 else count
        if top_p < 1.0:
            total = _weigh(frame + ORDERED, kept, ALL, float(best), 1.0, frame + SPARE)
            reaching = _reaching(frame + SPARE, kept, needed if needed > 0.0 else top_p * total)
            if needed > 0.0 and reaching > kept and not last:
                return UNDECIDED
            kept = min(kept, reaching)
        cut = min(cut, load_i64(frame + ORDERED + 8 * (kept - 1)))
    total = _weigh(frame + KEYS, count, cut, float(best), load_f64(sample + TEMPERATURE), frame + SPARE)
    return key_token(load_i64(frame + KEYS + 8 * pick(frame + SPARE, count, load_f64(frame + RANDOM) * total)))


def draw(op: int, row: int, frame: int) -> None:
    """Draws a token of the row that the frame is prepared for; leaves UNDECIDED if too many values may be kept for that.

    Not for draws from the whole vocabulary.
    """
    sample, best = load_i64(frame + SAMPLE), load_f32(frame + BEST)
    top_k, top_p = load_i64(sample + TOP_K), load_f64(sample + TOP_P)
    needed, low = 0.0, best + load_f32(sample + LOG_MIN_P)
    # seven of eight stretches have more than two values each above the bound, where large values lie anywhere
    first = min(top_k, load_i64(frame + NUM_STRETCHES) * 7 // 8)
    second = first
    if load_i64(sample + FLAGS) & WEIGHED:
        total = weigh_parts(frame, load_i64(op + NUM_PARTS), sized_part_bytes(load_i64(op + PART)), 1.0)
        needed = max(top_p * total, _LEAST_MASS)
        low = max(low, best + load_f32(sample + LOG_REST))
        first, second = _FIRST, _SECOND
    elif top_p < 1.0:
        low = LOWEST  # the mass of a top-k counts before min-p
    store_f64(frame + NEEDED, needed)
    store_f32(frame + LOW, low)
    token = UNDECIDED
    bound = bound_of(frame, best, first) if first > 0 else low
    if bound > low:
        token = _try(frame, bound, False)
        if token == UNDECIDED and second > first:
            bound = bound_of(frame, best, second)
            if bound > low:
                token = _try(frame, bound, False)
    if token == UNDECIDED:
        token = _try(frame, low, True)
    store_i64(frame + RESULT, token)
