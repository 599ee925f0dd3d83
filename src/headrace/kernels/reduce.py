"""Reductions over a row of logits: what a sampler needs of 50,000 to 260,000 values, in one pass or two.

out[0] largest value (float32), out[4] sum of e^(value - largest) (float32 lanes summed in float64)
out[16] number of candidates kept (int64), out[24] 1 if all values are finite
ids, values: the candidates with value >= largest - margin, in order of their ids, at most `capacity`
"""

from __future__ import annotations

import numpy as np

from headrace.kernels.fields.reduce import (
    CAPACITY,
    COUNT,
    IDS,
    KEPT,
    MARGIN,
    OUT,
    VALUES,
)
from headrace.kernels.math import exp
from headrace.kernels.vectors import (
    lane,
    load_f32,
    load_floats,
    load_i64,
    max_lanes,
    maximum,
    splat_float,
    store_f32,
    store_i64,
    sum_lanes,
)


def candidates(op: int, unused: int, scratch: int) -> None:
    """See the module's docstring."""
    values, count, out = load_i64(op + VALUES), load_i64(op + COUNT), load_i64(op + OUT)
    whole = count // 16
    top = splat_float(np.float32(-np.inf))
    poison = splat_float(np.float32(0.0))
    for i in range(whole):
        value = load_floats(values + 64 * i)
        top = maximum(value, top)
        poison = poison + (value - value)
    largest = max_lanes(top)
    bad = sum_lanes(poison)
    for i in range(16 * whole, count):
        value = load_f32(values + 4 * i)
        largest = value if value > largest else largest
        bad += value - value
    ids, kept = load_i64(op + IDS), load_i64(op + KEPT)
    capacity = load_i64(op + CAPACITY)
    floor = largest - load_f32(op + MARGIN)
    total = np.float64(0.0)
    found = 0
    for i in range((count + 15) // 16):
        if i < whole:
            vector = load_floats(values + 64 * i)
            total += np.float64(sum_lanes(exp(vector - splat_float(largest))))
            if max_lanes(vector) < floor:
                continue
        for j in range(16 * i, min(16 * i + 16, count)):
            value = load_f32(values + 4 * j)
            if i >= whole:
                total += np.float64(lane(exp(splat_float(value - largest)), 0))
            if value >= floor:
                if found < capacity:
                    store_i64(ids + 8 * found, j)
                    store_f32(kept + 4 * found, value)
                found += 1
    store_f32(out, largest)
    store_f32(out + 4, np.float32(total))
    store_i64(out + 16, found)
    store_i64(out + 24, 1 if bad == np.float32(0.0) else 0)
