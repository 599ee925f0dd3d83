"""Attention over KV pages, with an online softmax over segments of 256 tokens.

For a query row with position p, weights over the tokens max(0, p - window + 1) .. p:

    m = max score, l = sum of e^(score - m), o = sum of e^(score - m) * value

are taken segment by segment, each in one go, and merged in order. Segments start at multiples of 256 tokens of the
sequence, so the arithmetic of a row is fixed by its position alone: not by the chunk it came in, nor by how segments
were shared out to threads. A block computes one KV head for all query heads that share it, so keys and values are
read once for the group; a window reads no page outside it.

Words of the page table are addresses tagged with the page's format (`page_formats.py`); pages of f16 among compressed
ones give the bits that they give among their own kind.

The state of a row is [o: D][m, l, unused: 16] float32; states lie [token][H]. `merge` combines blocks' states, divides,
and quantises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.kernels.dots import inline
from headrace.kernels.fields.attention import (
    ENTRIES,
    GROUP,
    HEADS,
    LAYER_OFFSET,
    MERGE_BLOCK_TOKENS,
    MERGE_ENTRIES,
    MERGE_FLOATS,
    MERGE_HEADS,
    MERGE_OUTPUT,
    MERGE_OUTPUT_STRIDE,
    MERGE_QUANTISED,
    MERGE_TOKENS,
    MERGE_WIDTH,
    PAGE_TOKENS,
    QUERIES,
    QUERIES_STRIDE,
    WIDTH,
    WINDOW,
)
from headrace.kernels.math import exp
from headrace.kernels.page_formats import F16, FORMAT_BITS, head_bytes, key_bytes
from headrace.kernels.page_sums import exact_sums, mixed_sums
from headrace.kernels.rows import copy_bytes, quantise_row
from headrace.kernels.tables import (
    ENTRY_BYTES,
    ENTRY_END_SEGMENT,
    ENTRY_KV_HEAD,
    ENTRY_NUM_TOKENS,
    ENTRY_PAGES,
    ENTRY_POSITION,
    ENTRY_SEGMENT,
    ENTRY_STATES,
    ENTRY_TOKEN,
    MERGE_ENTRY_BYTES,
    MERGE_NUM_STATES,
    MERGE_STATES,
    MERGE_STATES_STRIDE,
    SEGMENT_TOKENS,
    STATE_EXTRA,
)
from headrace.kernels.vectors import (
    fma,
    keep_between,
    lane,
    load_f32,
    load_floats,
    load_i64,
    max_lanes,
    maximum,
    splat_float,
    store_f32,
    store_floats,
    sum_lanes,
)

MAX_ROWS = 4
_NEGATIVE_INFINITY = np.float32(-np.inf)
_FINITE_FLOOR = np.float32(-1.0e30)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@inline
def scalar_exp(x: Any) -> Any:
    """e^x of one value, by the vectors' function."""
    return lane(exp(splat_float(x)), 0)


@inline
def _clear_state(state: int, width: int) -> None:
    for i in range(width // 16):
        store_floats(state + 64 * i, splat_float(_ZERO))
    store_f32(state + 4 * width, _NEGATIVE_INFINITY)
    store_f32(state + 4 * width + 4, _ZERO)


@inline
def _merge_state(state: int, width: int, output: int, m: Any, l: Any) -> None:
    """Adds (output, m, l) of later tokens to a state; nothing if they were all masked."""
    if m == _NEGATIVE_INFINITY:
        return
    old = load_f32(state + 4 * width)
    if old == _NEGATIVE_INFINITY:
        # the first tokens: what the arithmetic below would give, without it
        copy_bytes(state, output, 4 * width)
        store_f32(state + 4 * width, m)
        store_f32(state + 4 * width + 4, l)
        return
    top = old if old > m else m
    keep, add = scalar_exp(old - top), scalar_exp(m - top)
    for i in range(width // 16):
        kept = load_floats(state + 64 * i) * splat_float(keep)
        store_floats(state + 64 * i, fma(load_floats(output + 64 * i), splat_float(add), kept))
    store_f32(state + 4 * width, top)
    store_f32(state + 4 * width + 4, load_f32(state + 4 * width + 4) * keep + l * add)


def _tile_function(rows: int) -> Callable[..., Any]:
    """One segment for `rows` query rows of one KV head."""
    exact_scores, exact_values = exact_sums(rows)
    mixed_scores, mixed_values = mixed_sums(rows)

    @inline
    def tile(op: int, entry: int, row: int, segment: int, queries: int, states: int, scores: int) -> None:
        stats = scores + MAX_ROWS * 4 * SEGMENT_TOKENS
        output = stats + 64
        width, group = load_i64(op + WIDTH), load_i64(op + GROUP)
        page_tokens, window = load_i64(op + PAGE_TOKENS), load_i64(op + WINDOW)
        factors = output + MAX_ROWS * 4 * width
        first_position = load_i64(entry + ENTRY_POSITION) + row // group
        last_position = load_i64(entry + ENTRY_POSITION) + (row + rows - 1) // group
        start = segment * SEGMENT_TOKENS
        lowest = 0
        if window > 0:
            lowest = max(0, first_position - window + 1)
        page0 = max(start, lowest) // page_tokens
        last_page = last_position // page_tokens
        page1 = min((start + SEGMENT_TOKENS) // page_tokens, last_page + 1)
        if page0 >= page1:
            return
        offset = load_i64(op + LAYER_OFFSET)
        offset += load_i64(entry + ENTRY_KV_HEAD) * head_bytes(F16, width, page_tokens)
        pages = load_i64(entry + ENTRY_PAGES)
        at0 = page0 * page_tokens - start
        formats = 0
        for page in range(page0, page1):
            formats |= load_i64(pages + 8 * page) & FORMAT_BITS
        for page in range(page0, page1):
            word = load_i64(pages + 8 * page)
            # the page after the last one of a segment is asked for as well: it is next unless the sequence ends
            next_word = load_i64(pages + 8 * min(page + 1, last_page))
            at = scores + 4 * (page * page_tokens - start)
            if formats == F16:
                exact_scores(word + offset, width, page_tokens, queries, at, output, next_word + offset)
            else:
                mixed_scores(word, next_word, offset, width, page_tokens, queries, at, output)
        for r in range(rows):
            position = load_i64(entry + ENTRY_POSITION) + (row + r) // group
            low = 0
            if window > 0:
                low = max(0, position - window + 1)
            weights = scores + r * 4 * SEGMENT_TOKENS
            m, l = _softmax(weights, at0, page1 * page_tokens - start, low - start, position - start)
            store_f32(stats + 8 * r, m)
            store_f32(stats + 8 * r + 4, l)
            for i in range(width // 16):
                store_floats(output + r * 4 * width + 64 * i, splat_float(_ZERO))
        skip = offset + key_bytes(F16, width, page_tokens)
        for page in range(page0, page1):
            word = load_i64(pages + 8 * page)
            next_word = load_i64(pages + 8 * min(page + 1, last_page))
            at = scores + 4 * (page * page_tokens - start)
            if formats == F16:
                exact_values(word + skip, width, page_tokens, at, output, factors, next_word + skip)
            else:
                mixed_values(word, next_word, offset, width, page_tokens, at, output, factors)
        for r in range(rows):
            state = states + (row + r) * 4 * (width + STATE_EXTRA)
            _merge_state(state, width, output + r * 4 * width, load_f32(stats + 8 * r), load_f32(stats + 8 * r + 4))

    return tile


@inline
def _softmax(scores: int, begin: int, end: int, low: int, high: int) -> Any:
    """Scores [begin, end) become weights, zero outside [low, high]; returns their maximum and sum."""
    top = splat_float(_NEGATIVE_INFINITY)
    for i in range(begin // 16, end // 16):
        score = keep_between(load_floats(scores + 64 * i), 16 * i, low, high)
        store_floats(scores + 64 * i, score)
        top = maximum(top, score)
    m = max_lanes(top)
    floor = m if m > _FINITE_FLOOR else _FINITE_FLOOR
    total = splat_float(_ZERO)
    for i in range(begin // 16, end // 16):
        weight = exp(load_floats(scores + 64 * i) - splat_float(floor))
        store_floats(scores + 64 * i, weight)
        total = total + weight
    return m, sum_lanes(total)


@inline
def _state_bytes(width: int) -> int:
    return 4 * (width + STATE_EXTRA)


def attend_function(group: int) -> Callable[[int, int, int], None]:
    """The compute function of attention where `group` query heads share a KV head.

    Rows of a block are its tokens' heads, token by token. They are taken in tiles of 4; heads left over of one token
    (or, for groups of 1 and 2, tokens left over) in one more size of tile. Only these two are compiled.

    Scratch: states, queries, then one tile's scores, statistics, output, and factors as many as scores.
    """
    span = group if group > 2 else 4
    size = min(group, 4) if group != 1 and group != 2 else 4
    rest = group % 4 if group > 4 else group % size
    tile = _tile_function(size)
    rest_tile = _tile_function(rest) if rest else tile

    def attend(op: int, block: int, scratch: int) -> None:
        entry = load_i64(op + ENTRIES) + block * ENTRY_BYTES
        width = load_i64(op + WIDTH)
        tokens, token0 = load_i64(entry + ENTRY_NUM_TOKENS), load_i64(entry + ENTRY_TOKEN)
        rows = tokens * group
        states = scratch
        queries = states + rows * _state_bytes(width)
        scores = queries + rows * 4 * width
        head = load_i64(entry + ENTRY_KV_HEAD) * group * 4 * width
        for t in range(tokens):
            source = load_i64(op + QUERIES) + (token0 + t) * load_i64(op + QUERIES_STRIDE) + head
            copy_bytes(queries + t * group * 4 * width, source, group * 4 * width)
        for row in range(rows):
            _clear_state(states + row * _state_bytes(width), width)
        for segment in range(load_i64(entry + ENTRY_SEGMENT), load_i64(entry + ENTRY_END_SEGMENT)):
            for first in range(0, rows, span):
                end = min(first + span, rows)
                row = first
                while row + size <= end:
                    tile(op, entry, row, segment, queries + row * 4 * width, states, scores)
                    row += size
                if rest:
                    while row < end:
                        rest_tile(op, entry, row, segment, queries + row * 4 * width, states, scores)
                        row += rest

    return attend


def commit(op: int, block: int, scratch: int) -> None:
    """Copies a block's states."""
    entry = load_i64(op + ENTRIES) + block * ENTRY_BYTES
    size = _state_bytes(load_i64(op + WIDTH))
    group_bytes, token_bytes = load_i64(op + GROUP) * size, load_i64(op + HEADS) * size
    states = load_i64(entry + ENTRY_STATES)
    for t in range(load_i64(entry + ENTRY_NUM_TOKENS)):
        copy_bytes(states + t * token_bytes, scratch + t * group_bytes, group_bytes)


@inline
def _merge_range(op: int, block: int) -> Any:
    tokens = load_i64(op + MERGE_TOKENS)
    block_tokens = load_i64(op + MERGE_BLOCK_TOKENS)
    t0 = min(block * block_tokens, tokens)
    return t0, min(t0 + block_tokens, tokens)


def merge(op: int, block: int, scratch: int) -> None:
    """States of one token's heads, merged in the order of their segments, divided by l, and quantised as in `rows`."""
    t0, t1 = _merge_range(op, block)
    width, heads = load_i64(op + MERGE_WIDTH), load_i64(op + MERGE_HEADS)
    quantised, floats = load_i64(op + MERGE_QUANTISED), load_i64(op + MERGE_FLOATS)
    stride = load_i64(op + MERGE_OUTPUT_STRIDE)
    row = scratch + (t1 - t0) * stride
    state = row + 4 * width * heads
    for t in range(t1 - t0):
        entry = load_i64(op + MERGE_ENTRIES) + (t0 + t) * MERGE_ENTRY_BYTES
        for h in range(heads):
            part = load_i64(entry + MERGE_STATES) + h * _state_bytes(width)
            _clear_state(state, width)
            for _ in range(load_i64(entry + MERGE_NUM_STATES)):
                _merge_state(state, width, part, load_f32(part + 4 * width), load_f32(part + 4 * width + 4))
                part += load_i64(entry + MERGE_STATES_STRIDE)
            scale = splat_float(_ONE / load_f32(state + 4 * width + 4))
            for i in range(width // 16):
                store_floats(row + 4 * width * h + 64 * i, load_floats(state + 64 * i) * scale)
        out = scratch + t * stride
        if quantised != 0:
            quantise_row(row, heads * width, out)
        if floats != 0:
            copy_bytes(out + quantised, row, 4 * heads * width)


def commit_merge(op: int, block: int, scratch: int) -> None:
    """Copies the output rows."""
    t0, t1 = _merge_range(op, block)
    stride = load_i64(op + MERGE_OUTPUT_STRIDE)
    row_bytes = load_i64(op + MERGE_QUANTISED) + load_i64(op + MERGE_FLOATS)
    for t in range(t1 - t0):
        copy_bytes(load_i64(op + MERGE_OUTPUT) + (t0 + t) * stride, scratch + t * stride, row_bytes)
