"""Logits of a part of a row after edits: biases, penalties for tokens of the history, a mask of allowed tokens.

Which edits, and in which order, `engine/sampler.py` says. An edited part lies in the thread's scratch until it is
committed.
"""

from __future__ import annotations

import numpy as np

from headrace.kernels.dots import inline
from headrace.kernels.fields.sample import (
    BIAS_BYTES,
    BIASES,
    FREQUENCY,
    HISTORY,
    MASK,
    POSITION,
    PRESENCE,
    REPEAT,
    WINDOW,
)
from headrace.kernels.scalars import keep_bits, load_i32
from headrace.kernels.vectors import load_f32, load_floats, load_i64, load_u16, store_f32, store_floats, store_i32

_ZERO = np.float32(0.0)


@inline
def _add_biases(biases: int, start: int, size: int, scores: int) -> None:
    """Adds the biases of the tokens from `start` on."""
    num_biases, first = load_i64(biases), biases + 8
    low, high = 0, num_biases
    while low < high:
        middle = (low + high) // 2
        if load_i32(first + BIAS_BYTES * middle) < start:
            low = middle + 1
        else:
            high = middle
    while low < num_biases:
        at = load_i32(first + BIAS_BYTES * low) - start
        if at >= size:
            break
        store_f32(scores + 4 * at, load_f32(scores + 4 * at) + load_f32(first + BIAS_BYTES * low + 4))
        low += 1


@inline
def _penalise(sample: int, position: int, start: int, size: int, scores: int, counts: int) -> np.float32:
    """Penalises the tokens of the part that are in the window; returns what is not 0 if one left float32's range."""
    history = load_i64(sample + HISTORY)
    first = max(0, position - load_i64(sample + WINDOW))
    repeat, presence, frequency = load_f32(sample + REPEAT), load_f32(sample + PRESENCE), load_f32(sample + FREQUENCY)
    overflow = _ZERO
    for i in range(first, position):
        at = load_i32(history + 4 * i) - start
        if at >= 0 and at < size:
            store_i32(counts + 4 * at, 0)
    for i in range(first, position):
        at = load_i32(history + 4 * i) - start
        if at >= 0 and at < size:
            store_i32(counts + 4 * at, load_i32(counts + 4 * at) + 1)
    for i in range(first, position):
        at = load_i32(history + 4 * i) - start
        if at >= 0 and at < size and load_i32(counts + 4 * at) > 0:
            value = load_f32(scores + 4 * at)
            value = value / repeat if value > _ZERO else value * repeat
            value -= np.float32(load_i32(counts + 4 * at)) * frequency + presence
            overflow += value - value
            store_f32(scores + 4 * at, value)
            store_i32(counts + 4 * at, 0)  # each token once
    return overflow


@inline
def edit_part(sample: int, step: int, start: int, size: int, scores: int, counts: int) -> np.float32:
    """Edits the part of `size` tokens from `start` on, whose logits were copied to `scores`; `counts` is room for as many.

    `scores` has room for whole vectors. Returns what is not 0 if an edit left float32's range.
    """
    overflow = _ZERO
    if load_i64(sample + BIASES) != 0:
        _add_biases(load_i64(sample + BIASES), start, size, scores)
    if load_i64(sample + HISTORY) != 0:
        overflow = _penalise(sample, load_i64(sample + POSITION) + step, start, size, scores, counts)
    mask = load_i64(sample + MASK)
    if mask != 0:
        for i in range((size + 15) // 16):
            bits = load_u16(mask + start // 8 + 2 * i)
            if bits != 0xFFFF:
                store_floats(scores + 64 * i, keep_bits(load_floats(scores + 64 * i), bits))
    return overflow
