"""The large values of a row: bounds from the maxima of its stretches, values above a bound, values in order.

What these functions share about the row lies in a frame at the start of the thread's scratch, named by byte offsets.
A key, see `scalars.descending_key`, holds a value and its id; keys in ascending order are values in descending order.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from headrace.kernels.dots import inline
from headrace.kernels.fields.choose import PART_LARGEST, PART_MASS, PART_MAXIMA, STRETCH, part_bytes
from headrace.kernels.scalars import descending_key, exp64, load_f64, store_f64
from headrace.kernels.vectors import (
    keep_apart,
    load_f32,
    load_floats,
    load_i64,
    splat_float,
    store_f32,
    store_i64,
    sum_lanes,
    zero_unless_greater,
)

# for functions that say `keep_apart`: what is compiled for an inlined caller is inlined unless told otherwise
called = njit(forceinline=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
sized_part_bytes = inline(part_bytes)

MOST_CANDIDATES = 4096
"""Values that are put in order at once; rows with more of them are gone through slice by slice, see `flat.py`."""

# the frame: the id chosen; addresses of the row's values, of its sampling record and of the records of its parts
RESULT, VALUES, SAMPLE, ROW_PARTS = 0, 8, 16, 24
NUM_VALUES, NUM_STRETCHES = 32, 40
BEST = 48  # the largest value (float32)
RANDOM = 56  # the row's number in [0, 1) (float64)
NEEDED = 64  # the mass, as float64, that a top-p of the whole vocabulary has to reach; 0 where there is no such top-p
LOW = 72  # no value below this is kept (float32)
TAIL = 128  # the last stretch, if V is no whole number of them, padded with minus infinity
WEIGHTS = 512  # float32, of the values of one stretch
KEYS = 1024  # candidates, ids ascending
ORDERED = KEYS + 8 * MOST_CANDIDATES  # candidates, keys ascending
SPARE = ORDERED + 8 * MOST_CANDIDATES  # room for ordering, then float64 weights of candidates, or of parts
SLICES = SPARE + 8 * MOST_CANDIDATES  # number and weight of the values in a slice
NUM_SLICES = 1024
MAXIMA = SLICES + 16 * NUM_SLICES  # of all stretches of the row, then whatever needs room per stretch

ALL = (1 << 63) - 1  # no key is larger
LAST_TOKEN = (1 << 31) - 1
UNDECIDED = -4  # in an id's place, see `fields/choose.py` for others
LOWEST = np.float32(-3.4028234663852886e38)
_NEGATIVE_INFINITY = np.float32(-np.inf)
_ONE, _ZERO, _TWO = np.float32(1.0), np.float32(0.0), np.float32(2.0)
_RUN = 8  # keys put in order by insertion
_FARTHEST = np.float32(1 << 20)
_HALVINGS = 12


@inline
def prepare(frame: int, values: int, count: int, parts: int, part: int) -> None:
    """Fills in what the frame says of a row of `count` values and of its stretches; `parts` are the records of its parts."""
    num_stretches = (count + STRETCH - 1) // STRETCH
    store_i64(frame + VALUES, values)
    store_i64(frame + NUM_VALUES, count)
    store_i64(frame + NUM_STRETCHES, num_stretches)
    store_i64(frame + ROW_PARTS, parts)
    whole = count // STRETCH * STRETCH
    for i in range(STRETCH):
        value = load_f32(values + 4 * (whole + i)) if whole + i < count else _NEGATIVE_INFINITY
        store_f32(frame + TAIL + 4 * i, value)
    record_bytes, per_part = sized_part_bytes(part), part // STRETCH
    for stretch in range((num_stretches + 15) // 16 * 16):
        largest = _NEGATIVE_INFINITY
        if stretch < num_stretches:
            largest = load_f32(parts + stretch // per_part * record_bytes + PART_MAXIMA + 4 * (stretch % per_part))
        store_f32(frame + MAXIMA + 4 * stretch, largest)


@inline
def stretch_at(frame: int, stretch: int) -> int:
    """Where the 64 values of a stretch lie."""
    if STRETCH * (stretch + 1) > load_i64(frame + NUM_VALUES):
        return frame + TAIL
    return load_i64(frame + VALUES) + 4 * STRETCH * stretch


@inline
def maximum_of(frame: int, stretch: int) -> np.float32:
    """The largest value of a stretch."""
    return load_f32(frame + MAXIMA + 4 * stretch)


@called
def _count_above(frame: int, bound: np.float32) -> int:
    """Stretches whose maximum is above a bound."""
    keep_apart()
    total = splat_float(_ZERO)
    for i in range((load_i64(frame + NUM_STRETCHES) + 15) // 16):
        total = total + zero_unless_greater(load_floats(frame + MAXIMA + 64 * i), splat_float(bound), splat_float(_ONE))
    return int(sum_lanes(total))


@called
def bound_of(frame: int, best: np.float32, wanted: int) -> np.float32:
    """A bound that at least `wanted` values are above, and not many more; minus infinity if the maxima tell none."""
    keep_apart()
    near, far = _ZERO, _ONE  # distances from the best: too few are above, enough are above
    slack = min(wanted, load_i64(frame + NUM_STRETCHES) - wanted) // 4 + 2
    above = _count_above(frame, best - far)
    while above < wanted:
        near, far = far, far * _TWO
        if far > _FARTHEST:
            return _NEGATIVE_INFINITY
        above = _count_above(frame, best - far)
    for _ in range(_HALVINGS):
        if above <= wanted + slack:
            break
        middle = (near + far) / _TWO
        found = _count_above(frame, best - middle)
        if found >= wanted:
            far, above = middle, found
        else:
            near = middle
    return best - far


@called
def collect(frame: int, low: np.float32) -> int:
    """Puts the keys of all values >= low (never minus infinity) at KEYS, ids ascending.

    Returns their number, or MOST_CANDIDATES + 1 if there are more than MOST_CANDIDATES.
    """
    keep_apart()
    low = low if low > LOWEST else LOWEST
    found = 0
    for stretch in range(load_i64(frame + NUM_STRETCHES)):
        if maximum_of(frame, stretch) >= low:
            values = stretch_at(frame, stretch)
            for i in range(STRETCH):
                value = load_f32(values + 4 * i)
                if value >= low:
                    if found == MOST_CANDIDATES:
                        return MOST_CANDIDATES + 1
                    store_i64(frame + KEYS + 8 * found, descending_key(value, STRETCH * stretch + i))
                    found += 1
    return found


@inline
def _insert(keys: int, start: int, end: int) -> None:
    """Orders a few keys in place."""
    for i in range(start + 1, end):
        key = load_i64(keys + 8 * i)
        j = i
        while j > start and load_i64(keys + 8 * (j - 1)) > key:
            store_i64(keys + 8 * j, load_i64(keys + 8 * (j - 1)))
            j -= 1
        store_i64(keys + 8 * j, key)


@called
def order(frame: int, count: int) -> None:
    """Writes the first `count` keys at KEYS in ascending order to ORDERED."""
    keep_apart()
    source, target = frame + ORDERED, frame + SPARE
    for i in range(count):
        store_i64(source + 8 * i, load_i64(frame + KEYS + 8 * i))
    for start in range(0, count, _RUN):
        _insert(source, start, min(start + _RUN, count))
    width = _RUN
    while width < count:
        for start in range(0, count, 2 * width):
            middle, end = min(start + width, count), min(start + 2 * width, count)
            i, j = start, middle
            for k in range(start, end):
                if i < middle and (j >= end or load_i64(source + 8 * i) <= load_i64(source + 8 * j)):
                    store_i64(target + 8 * k, load_i64(source + 8 * i))
                    i += 1
                else:
                    store_i64(target + 8 * k, load_i64(source + 8 * j))
                    j += 1
        source, target = target, source
        width *= 2
    if source != frame + ORDERED:
        for i in range(count):
            store_i64(frame + ORDERED + 8 * i, load_i64(source + 8 * i))


@inline
def weigh_parts(frame: int, num_parts: int, record_bytes: int, temperature: float) -> float:
    """Writes each part's share of the weight of the row to SPARE, from the sums that the parts have brought; their sum."""
    best, total = float(load_f32(frame + BEST)), 0.0
    for i in range(num_parts):
        record = load_i64(frame + ROW_PARTS) + record_bytes * i
        weight = load_f64(record + PART_MASS) * exp64((float(load_f32(record + PART_LARGEST)) - best) / temperature)
        store_f64(frame + SPARE + 8 * i, weight)
        total += weight
    return total


@called
def pick(weights: int, count: int, wanted: float) -> int:
    """The index of the first of `count` float64 weights at which their running sum exceeds `wanted`, never one of weight 0.

    Where the sum does not exceed it, which only rounding can bring about, the last index of any weight; -1 if all are 0.
    """
    keep_apart()
    running, last = 0.0, -1
    for i in range(count):
        weight = load_f64(weights + 8 * i)
        running += weight
        if weight > 0.0:
            last = i
            if running > wanted:
                break
    return last
