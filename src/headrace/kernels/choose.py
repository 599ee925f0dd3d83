"""The next token of each row of logits, inside a step: so that the next step can follow without anybody's help.

Blocks of `find` look at a part of a row each: they edit its logits where the row asks for it, find the largest, and note
what a draw will want to know of the part. A block of `choose` then takes the largest of the parts, of equal ones the
lowest id, or has a token drawn (`sample.py`, `flat.py`), and writes its id where the next token's embedding is looked up.
"""

from __future__ import annotations

import numpy as np

from headrace.kernels.atomics import call_kernel
from headrace.kernels.candidates import BEST, RANDOM, RESULT, SAMPLE, UNDECIDED, prepare, sized_part_bytes
from headrace.kernels.dots import inline
from headrace.kernels.edits import edit_part
from headrace.kernels.fields.choose import (
    CHOSEN,
    COUNT,
    DRAW,
    DRAW_FLAT,
    EDITED_OUT_OF_RANGE,
    LOGITS,
    NEXT,
    NOT_FINITE,
    NOTHING_ALLOWED,
    NUM_PARTS,
    PART,
    PART_LARGEST,
    PART_MASS,
    PART_MAXIMA,
    PART_OVERFLOW,
    PART_POISON,
    PART_TOKEN,
    PARTS,
    ROW_TABLE,
    SAMPLES,
    SCORES,
    STEP,
    STRETCH,
    STRIDE,
)
from headrace.kernels.fields.sample import EDITED, FLAGS, HISTORY, POSITION, SAMPLE_BYTES, SAMPLED, SCALE, SEED, WEIGHED, WHOLE
from headrace.kernels.math import exp
from headrace.kernels.philox import uniform
from headrace.kernels.scalars import store_f64
from headrace.kernels.tables import TOKEN_BYTES, TOKEN_ID
from headrace.kernels.vectors import (
    load_f32,
    load_floats,
    load_i64,
    max_lanes,
    maximum,
    splat_float,
    store_f32,
    store_floats,
    store_i32,
    store_i64,
    sum_lanes,
)

_NEGATIVE_INFINITY = np.float32(-np.inf)
_ZERO = np.float32(0.0)


@inline
def _sample_of(op: int, row: int) -> int:
    """The sampling record of a row; 0 if there is none."""
    samples = load_i64(op + SAMPLES)
    return samples + SAMPLE_BYTES * row if samples != 0 else 0


@inline
def _flags_of(op: int, row: int) -> int:
    sample = _sample_of(op, row)
    return load_i64(sample + FLAGS) if sample != 0 else 0


@inline
def _copy(source: int, target: int, first: int, size: int, padded: int) -> np.float32:
    """Copies values from `first` on, and minus infinities behind them up to `padded`; what is not 0 if one is not finite."""
    spread = splat_float(_ZERO)
    for i in range(first // 16, size // 16):
        value = load_floats(source + 64 * i)
        spread = spread + (value - value)
        store_floats(target + 64 * i - 4 * first, value)
    poison = sum_lanes(spread)
    for i in range(size // 16 * 16, padded):
        value = load_f32(source + 4 * i) if i < size else _NEGATIVE_INFINITY
        if i < size:
            poison += value - value
        store_f32(target + 4 * (i - first), value)
    return poison


@inline
def _weigh(values: int, tail: int, size: int, largest: np.float32, scale: np.float32) -> float:
    """The sum of exp(scale * (value - largest)) of a part: float32 within a stretch, float64 from stretch to stretch."""
    total = 0.0
    for stretch in range((size + STRETCH - 1) // STRETCH):
        at = values + 4 * STRETCH * stretch if STRETCH * (stretch + 1) <= size else tail
        sums = splat_float(_ZERO)
        for i in range(4):
            sums = sums + exp((load_floats(at + 64 * i) - splat_float(largest)) * splat_float(scale))
        total += float(sum_lanes(sums))
    return total


@inline
def _token_of(values: int, tail: int, size: int, maxima: int, largest: np.float32) -> int:
    """The index of the first value that equals the largest; 0 if none does (then something is not finite)."""
    for stretch in range((size + STRETCH - 1) // STRETCH):
        if load_f32(maxima + 4 * stretch) == largest:
            at = values + 4 * STRETCH * stretch if STRETCH * (stretch + 1) <= size else tail
            for i in range(STRETCH):
                if load_f32(at + 4 * i) == largest:
                    return STRETCH * stretch + i
    return 0


def find(op: int, block: int, scratch: int) -> None:
    """The record of one part of one row, at the start of the scratch; behind it the part's scores if the row is edited."""
    part, count, num_parts = load_i64(op + PART), load_i64(op + COUNT), load_i64(op + NUM_PARTS)
    row = block // num_parts
    start = min(block % num_parts * part, count)
    size = min(part, count - start)
    whole, padded = size // STRETCH * STRETCH, (size + STRETCH - 1) // STRETCH * STRETCH
    values = load_i64(op + LOGITS) + load_i64(op + STRIDE) * row + 4 * start
    maxima, work = scratch + PART_MAXIMA, scratch + sized_part_bytes(part)
    sample, flags = _sample_of(op, row), _flags_of(op, row)
    overflow = _ZERO
    if flags & EDITED:
        poison = _copy(values, work, 0, size, padded)
        overflow = edit_part(sample, load_i64(op + STEP), start, size, work, work + 4 * padded)
        values, tail = work, work + 4 * whole
    else:
        poison = _copy(values, work, whole, size, padded)
        tail = work
    top, spread = splat_float(_NEGATIVE_INFINITY), splat_float(_ZERO)
    for stretch in range(padded // STRETCH):
        at = values + 4 * STRETCH * stretch if STRETCH * (stretch + 1) <= size else tail
        highest = splat_float(_NEGATIVE_INFINITY)
        for i in range(4):
            value = load_floats(at + 64 * i)
            highest = maximum(value, highest)
            if STRETCH * (stretch + 1) <= size:
                spread = spread + (value - value)
        store_f32(maxima + 4 * stretch, max_lanes(highest))
        top = maximum(highest, top)
    largest = max_lanes(top)
    if not flags & EDITED:
        poison += sum_lanes(spread)
    store_f32(scratch + PART_LARGEST, largest)
    store_f32(scratch + PART_POISON, poison)
    store_i64(scratch + PART_TOKEN, start + _token_of(values, tail, size, maxima, largest))
    store_f64(scratch + PART_MASS, _weigh(values, tail, size, largest, load_f32(sample + SCALE)) if flags & WEIGHED else 0.0)
    store_f32(scratch + PART_OVERFLOW, overflow)


def commit_find(op: int, block: int, scratch: int) -> None:
    """Copies the record, as much of it as will be read, and the scores of an edited part."""
    part, count, num_parts = load_i64(op + PART), load_i64(op + COUNT), load_i64(op + NUM_PARTS)
    row = block // num_parts
    start = min(block % num_parts * part, count)
    size = min(part, count - start)
    flags = _flags_of(op, row)
    record = load_i64(op + PARTS) + sized_part_bytes(part) * block
    for i in range(PART_MAXIMA // 8):
        store_i64(record + 8 * i, load_i64(scratch + 8 * i))
    if flags & SAMPLED:
        for i in range((size + STRETCH - 1) // STRETCH):
            store_f32(record + PART_MAXIMA + 4 * i, load_f32(scratch + PART_MAXIMA + 4 * i))
    if flags & EDITED:
        work, scores = scratch + sized_part_bytes(part), load_i64(op + SCORES) + load_i64(op + STRIDE) * row + 4 * start
        for i in range(size // 16):
            store_floats(scores + 64 * i, load_floats(work + 64 * i))
        for i in range(size // 16 * 16, size):
            store_f32(scores + 4 * i, load_f32(work + 4 * i))


def choose(op: int, block: int, scratch: int) -> None:
    """The id of the largest of all parts of a row, or one that is drawn."""
    part, num_parts = load_i64(op + PART), load_i64(op + NUM_PARTS)
    record_bytes = sized_part_bytes(part)
    parts = load_i64(op + PARTS) + num_parts * record_bytes * block
    best, poison, overflow, token = _NEGATIVE_INFINITY, _ZERO, _ZERO, NOTHING_ALLOWED
    for i in range(num_parts):
        record = parts + record_bytes * i
        value = load_f32(record + PART_LARGEST)
        poison += load_f32(record + PART_POISON)
        overflow += load_f32(record + PART_OVERFLOW)
        if value > best:
            best = value
            token = load_i64(record + PART_TOKEN)
    flags = _flags_of(op, block)
    if not (poison == _ZERO):
        token = NOT_FINITE
    elif not (overflow == _ZERO):
        token = EDITED_OUT_OF_RANGE
    elif token >= 0 and flags & SAMPLED:
        rows, sample = load_i64(op + SCORES) if flags & EDITED else load_i64(op + LOGITS), _sample_of(op, block)
        prepare(scratch, rows + load_i64(op + STRIDE) * block, load_i64(op + COUNT), parts, part)
        store_i64(scratch + SAMPLE, sample)
        store_f32(scratch + BEST, best)
        store_f64(scratch + RANDOM, uniform(load_i64(sample + SEED), load_i64(sample + POSITION) + load_i64(op + STEP)))
        token = UNDECIDED
        if not flags & WHOLE:
            call_kernel(load_i64(op + DRAW), op, block, scratch)
            token = load_i64(scratch + RESULT)
        if token == UNDECIDED:
            call_kernel(load_i64(op + DRAW_FLAT), op, block, scratch)
            token = load_i64(scratch + RESULT)
    store_i64(scratch + RESULT, token)


def commit_choose(op: int, block: int, scratch: int) -> None:
    """Tells the caller, the next token's embedding and the history of the row."""
    token = load_i64(scratch + RESULT)
    store_i64(load_i64(op + CHOSEN) + 8 * block, token)
    # a step that follows a damaged one still has to read within the matrix, and to count within the vocabulary
    valid = max(token, 0)
    if load_i64(op + NEXT) != 0:
        row = load_i64(load_i64(op + ROW_TABLE) + 8 * block)
        store_i64(load_i64(op + NEXT) + TOKEN_BYTES * row + TOKEN_ID, valid)
    sample = _sample_of(op, block)
    if sample != 0 and load_i64(sample + HISTORY) != 0:
        position = load_i64(sample + POSITION) + load_i64(op + STEP)
        store_i32(load_i64(sample + HISTORY) + 4 * position, valid)
