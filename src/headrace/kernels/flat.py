"""Draws from rows in which many tokens can be drawn, and from the whole vocabulary.

A cut is a key, see `candidates.py`: kept are the tokens whose keys are not above it. To find that of a top-k or a top-p,
the range of values is cut into slices, the values in each are counted or weighed, and the slice that the cut falls into is
put in order, or cut into slices again. Weights are exponentials in float32 here, their sums from stretch to stretch float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.kernels.candidates import (
    ALL,
    BEST,
    KEYS,
    LAST_TOKEN,
    LOW,
    LOWEST,
    MAXIMA,
    MOST_CANDIDATES,
    NEEDED,
    NUM_SLICES,
    NUM_STRETCHES,
    ORDERED,
    RANDOM,
    RESULT,
    ROW_PARTS,
    SAMPLE,
    SLICES,
    SPARE,
    WEIGHTS,
    called,
    maximum_of,
    order,
    pick,
    sized_part_bytes,
    stretch_at,
    weigh_parts,
)
from headrace.kernels.dots import inline
from headrace.kernels.fields.choose import NUM_PARTS, PART, PART_LARGEST, PART_MASS, STRETCH
from headrace.kernels.fields.sample import FLAGS, LOG_MIN_P, SCALE, TEMPERATURE, TOP_K, TOP_P, WHOLE
from headrace.kernels.math import exp
from headrace.kernels.scalars import descending_key, exp64, key_token, key_value, load_f64, store_f64
from headrace.kernels.vectors import (
    keep_apart,
    keep_between,
    load_f32,
    load_floats,
    load_i64,
    splat_float,
    store_floats,
    store_i64,
    sum_lanes,
    zero_unless_greater,
)

_LARGEST_SCALE, _SMALLEST_SCALE = 3e38, 1e-37  # within float32's range, so that no product is not-a-number
_LEAST_MASS = 1e-300  # top-p 0 keeps the best token
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@inline
def _weights(values: int, first: int, top: np.float32, scale: np.float32, floor: np.float32, tied: int) -> Any:
    """exp(scale * (value - top)) of 16 values; 0 below `floor`, and at `floor` for ids above `tied`."""
    value = load_floats(values)
    weight = exp((value - splat_float(top)) * splat_float(scale))
    until, behind = keep_between(value, first, 0, tied), keep_between(value, first, tied + 1, LAST_TOKEN)
    # what is masked out is minus infinity: below the floor, and not above it
    at_or_above = weight - zero_unless_greater(splat_float(floor), until, weight)
    return at_or_above + zero_unless_greater(behind, splat_float(floor), weight)


@called
def _weigh_stretch(frame: int, stretch: int, top: np.float32, scale: np.float32, cut: int) -> float:
    """Writes exp(scale * (value - top)) of the kept values of a stretch to WEIGHTS, 0 for others; returns the sum.

    A scale of 0 counts: each value weighs 1, minus infinity nothing.
    """
    keep_apart()
    floor = LOWEST if cut == ALL else key_value(cut)
    tied = LAST_TOKEN - 1 if cut == ALL else min(key_token(cut), LAST_TOKEN - 1)
    values, sums = stretch_at(frame, stretch), splat_float(_ZERO)
    for i in range(STRETCH // 16):
        weights = _weights(values + 64 * i, STRETCH * stretch + 16 * i, top, scale, floor, tied)
        store_floats(frame + WEIGHTS + 64 * i, weights)
        sums = sums + weights
    return float(sum_lanes(sums))


@inline
def _sums_at(frame: int) -> int:
    """Where the sums of stretches lie."""
    return frame + MAXIMA + 4 * ((load_i64(frame + NUM_STRETCHES) + 15) // 16 * 16)


@called
def _sum_stretches(frame: int, first: int, end: int, top: np.float32, scale: np.float32, cut: int) -> float:
    """Weights of what is kept, added up by stretch; returns their sum."""
    keep_apart()
    floor, total = LOWEST if cut == ALL else key_value(cut), 0.0
    for stretch in range(first, end):
        mass = 0.0
        if maximum_of(frame, stretch) >= floor:
            mass = _weigh_stretch(frame, stretch, top, scale, cut)
        store_f64(_sums_at(frame) + 8 * stretch, mass)
        total += mass
    return total


@inline
def _sum_before(weights: int, end: int) -> float:
    """The running sum of the weights before one."""
    total = 0.0
    for i in range(end):
        total += load_f64(weights + 8 * i)
    return total


@inline
def _draw_from_stretches(frame: int, first: int, end: int, top: np.float32, scale: np.float32, cut: int, wanted: float) -> int:
    """The first id at which the running sum of weights exceeds `wanted`, by the sums of `_sum_stretches`."""
    sums = _sums_at(frame) + 8 * first
    chosen = max(pick(sums, end - first, wanted), 0)
    rest = wanted - _sum_before(sums, chosen)
    _weigh_stretch(frame, first + chosen, top, scale, cut)
    for i in range(STRETCH):
        store_f64(frame + SPARE + 8 * i, float(load_f32(frame + WEIGHTS + 4 * i)))
    return STRETCH * (first + chosen) + max(pick(frame + SPARE, STRETCH, rest), 0)


@inline
def _slice_of(value: np.float32, high: np.float32, steepness: float) -> int:
    return min(int((float(high) - float(value)) * steepness), NUM_SLICES - 1)


@inline
def _fill_slices(
    frame: int, best: np.float32, scale: np.float32, low: np.float32, high: np.float32, outer: int, steepness: float
) -> None:
    """Counts and weighs the values from low to high (within the cut `outer`) by slice, the highest values first."""
    for i in range(2 * NUM_SLICES):
        store_i64(frame + SLICES + 8 * i, 0)
    for stretch in range(load_i64(frame + NUM_STRETCHES)):
        if maximum_of(frame, stretch) >= low:
            values = stretch_at(frame, stretch)
            _weigh_stretch(frame, stretch, best, scale, outer)
            for i in range(STRETCH):
                value, weight = load_f32(values + 4 * i), load_f32(frame + WEIGHTS + 4 * i)
                if weight > _ZERO and value >= low and value <= high:
                    at = frame + SLICES + 16 * _slice_of(value, high, steepness)
                    store_i64(at, load_i64(at) + 1)
                    store_f64(at + 8, load_f64(at + 8) + float(weight))


@inline
def _lowest(frame: int) -> np.float32:
    """The lowest value that is not minus infinity."""
    lowest = -LOWEST
    for stretch in range(load_i64(frame + NUM_STRETCHES)):
        values = stretch_at(frame, stretch)
        for i in range(STRETCH):
            value = load_f32(values + 4 * i)
            if value >= LOWEST and value < lowest:
                lowest = value
    return lowest


@inline
def _weight_of(value: np.float32, best: np.float32, scale: np.float32) -> float:
    return exp64((float(value) - float(best)) * float(scale))


@inline
def _cut_of_few(frame: int, count: int, best: np.float32, scale: np.float32, above: float, wanted: float) -> int:
    """The cut among the keys at KEYS, all of one slice; what lies above the slice has weight `above`."""
    order(frame, count)
    running = above
    for i in range(count - 1):
        key = load_i64(frame + ORDERED + 8 * i)
        running += _weight_of(key_value(key), best, scale)
        if running >= wanted:
            return key
    return load_i64(frame + ORDERED + 8 * (count - 1))


@inline
def _cut_of_equals(frame: int, value: np.float32, outer: int, weight: float, above: float, wanted: float) -> int:
    """The cut among very many equal values, of which the lowest ids are kept."""
    running, last = above, outer
    for stretch in range(load_i64(frame + NUM_STRETCHES)):
        if maximum_of(frame, stretch) >= value and running < wanted:
            values = stretch_at(frame, stretch)
            for i in range(STRETCH):
                if load_f32(values + 4 * i) == value and running < wanted:
                    key = descending_key(value, STRETCH * stretch + i)
                    if key <= outer:
                        running += weight
                        last = key
    return last


@called
def _select(frame: int, low: np.float32, outer: int, scale: np.float32, wanted: float) -> int:
    """The cut at which the sum of exp(scale * (value - best)) reaches `wanted`, in the order of keys; scale 0 counts.

    Looks at values >= low within the cut `outer` only; if these do not reach it, the cut keeps them all.
    """
    keep_apart()
    best = load_f32(frame + BEST)
    low, high, above = low if low > LOWEST else _lowest(frame), best, 0.0
    everything = min(outer, descending_key(low, LAST_TOKEN))
    while low < high:
        steepness = NUM_SLICES / (float(high) - float(low))
        _fill_slices(frame, best, scale, low, high, outer, steepness)
        chosen, count = NUM_SLICES, 0
        for i in range(NUM_SLICES):
            mass = load_f64(frame + SLICES + 16 * i + 8)
            count = load_i64(frame + SLICES + 16 * i)
            if count > 0 and above + mass >= wanted:
                chosen = i
                break
            above += mass
        if chosen == NUM_SLICES:
            return everything
        # bounds of the values in the slice, and their keys if there is room
        found, lowest, highest = 0, high, low
        for stretch in range(load_i64(frame + NUM_STRETCHES)):
            if maximum_of(frame, stretch) >= low:
                values = stretch_at(frame, stretch)
                for i in range(STRETCH):
                    value = load_f32(values + 4 * i)
                    if value >= low and value <= high and _slice_of(value, high, steepness) == chosen:
                        key = descending_key(value, STRETCH * stretch + i)
                        if key <= outer:
                            lowest = value if value < lowest else lowest
                            highest = value if value > highest else highest
                            if found < MOST_CANDIDATES:
                                store_i64(frame + KEYS + 8 * found, key)
                            found += 1
        if found <= MOST_CANDIDATES:
            return _cut_of_few(frame, found, best, scale, above, wanted)
        low, high = lowest, highest
    return _cut_of_equals(frame, low, outer, _weight_of(low, best, scale), above, wanted)


@inline
def _cut_of(frame: int, sample: int, best: np.float32) -> int:
    """The cut of top-k, top-p and min-p together."""
    low, needed, cut = load_f32(frame + LOW), load_f64(frame + NEEDED), ALL
    top_k, top_p = load_i64(sample + TOP_K), load_f64(sample + TOP_P)
    scale, wanted, rounds = _ONE, needed, 1 if needed > 0.0 else 0
    if top_k > 0:
        scale, wanted, rounds = _ZERO, float(top_k), 2 if top_p < 1.0 else 1
    for _ in range(rounds):
        cut = _select(frame, low, cut, scale, wanted)
        if rounds == 2:
            total = _sum_stretches(frame, 0, load_i64(frame + NUM_STRETCHES), best, _ONE, cut)
            scale, wanted = _ONE, max(top_p * total, _LEAST_MASS)
    return min(cut, descending_key(max(best + load_f32(sample + LOG_MIN_P), LOWEST), LAST_TOKEN))


def draw_flat(op: int, row: int, frame: int) -> None:
    """Draws a token of the row that the frame is prepared for, whatever its values are."""
    sample, best, random = load_i64(frame + SAMPLE), load_f32(frame + BEST), load_f64(frame + RANDOM)
    temperature = load_f64(sample + TEMPERATURE)
    if load_i64(sample + FLAGS) & WHOLE:
        # first the part, by the sums that the parts have brought, then the token in it
        num_parts, part = load_i64(op + NUM_PARTS), load_i64(op + PART)
        wanted = random * weigh_parts(frame, num_parts, sized_part_bytes(part), temperature)
        chosen = max(pick(frame + SPARE, num_parts, wanted), 0)
        record = load_i64(frame + ROW_PARTS) + sized_part_bytes(part) * chosen
        wanted -= _sum_before(frame + SPARE, chosen)
        wanted *= load_f64(record + PART_MASS) / load_f64(frame + SPARE + 8 * chosen)
        first = chosen * (part // STRETCH)
        end = min(first + part // STRETCH, load_i64(frame + NUM_STRETCHES))
        top, scale, cut = load_f32(record + PART_LARGEST), load_f32(sample + SCALE), ALL
        _sum_stretches(frame, first, end, top, scale, cut)
    else:
        first, end, top, cut = 0, load_i64(frame + NUM_STRETCHES), best, _cut_of(frame, sample, best)
        scale = np.float32(min(max(1.0 / temperature, _SMALLEST_SCALE), _LARGEST_SCALE))
        wanted = random * _sum_stretches(frame, first, end, top, scale, cut)
    store_i64(frame + RESULT, _draw_from_stretches(frame, first, end, top, scale, cut, wanted))
