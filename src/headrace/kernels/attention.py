"""Attention over KV pages, with an online softmax over segments of 256 tokens.

For a query row with position p, weights over the tokens max(0, p - window + 1) .. p:

    m = max score, l = sum of e^(score - m), o = sum of e^(score - m) * value

are taken segment by segment, each in one go, and merged in order. Segments start at multiples of 256 tokens of the
sequence, so the arithmetic of a row is fixed by its position alone: not by the chunk it came in, nor by how segments
were shared out to threads. A block computes one KV head for all query heads that share it, so keys and values are
read once for the group; a window reads no page outside it.

The state of a row is [o: D][m, l, unused: 16] float32; states lie [token][H]. `merge` combines blocks' states, divides,
and quantises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.kernels import level as _level
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
from headrace.kernels.rope import head_bytes
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
from headrace.kernels.tiles import add_broadcast, add_tiles, load_tile, store_tile, zero_floats
from headrace.kernels.vectors import (
    fma,
    keep_between,
    lane,
    load_f16,
    load_f32,
    load_floats,
    load_i64,
    max_lanes,
    maximum,
    prefetch,
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


def _scores_function(rows: int) -> Callable[..., Any]:
    """Scores of `rows` query rows against one page of keys; asks for the page at `ahead` meanwhile."""
    panels = _level.current().score_panels

    @inline
    def one_panel(keys: int, width: int, queries: int, scores: int, ahead: int) -> None:
        sums = zero_floats(rows)
        for d in range(width):
            prefetch(ahead + 32 * d)
            sums = add_broadcast(sums, load_f16(keys + 32 * d), queries + 4 * d, 4 * width)
        store_tile(sums, scores, 4 * SEGMENT_TOKENS)

    @inline
    def two_panels(keys: int, width: int, queries: int, scores: int, ahead: int) -> None:
        """Two panels at once, even and odd dimensions apart: four chains hide the latency of each sum."""
        even1, even2 = zero_floats(rows), zero_floats(rows)
        odd1, odd2 = zero_floats(rows), zero_floats(rows)
        for pair in range(width // 2):
            at = keys + 64 * pair
            prefetch(ahead + 128 * pair)
            prefetch(ahead + 128 * pair + 64)
            query = queries + 8 * pair
            even1 = add_broadcast(even1, load_f16(at), query, 4 * width)
            even2 = add_broadcast(even2, load_f16(at + 32 * width), query, 4 * width)
            odd1 = add_broadcast(odd1, load_f16(at + 32), query + 4, 4 * width)
            odd2 = add_broadcast(odd2, load_f16(at + 32 * width + 32), query + 4, 4 * width)
        store_tile(add_tiles(even1, odd1), scores, 4 * SEGMENT_TOKENS)
        store_tile(add_tiles(even2, odd2), scores + 64, 4 * SEGMENT_TOKENS)

    @inline
    def page_scores(keys: int, width: int, page_tokens: int, queries: int, scores: int, ahead: int) -> None:
        if panels == 2:
            for pair in range(page_tokens // 32):
                part = pair * 64 * width
                two_panels(keys + part, width, queries, scores + 128 * pair, ahead + part)
        else:
            for panel in range(page_tokens // 16):
                part = panel * 32 * width
                one_panel(keys + part, width, queries, scores + 64 * panel, ahead + part)

    return page_scores


def _values_function(rows: int) -> Callable[..., Any]:
    """Adds one page of values, weighted for `rows` query rows; asks for the page at `ahead` meanwhile."""
    panels = _level.current().score_panels

    @inline
    def one_strip(strip: int, width: int, page_tokens: int, weights: int, output: int, ahead: int) -> None:
        sums = load_tile(zero_floats(rows), output, 4 * width)
        for t in range(page_tokens):
            prefetch(ahead + 32 * t)
            sums = add_broadcast(sums, load_f16(strip + 32 * t), weights + 4 * t, 4 * SEGMENT_TOKENS)
        store_tile(sums, output, 4 * width)

    @inline
    def two_strips(strip: int, width: int, page_tokens: int, weights: int, output: int, ahead: int) -> None:
        """Two strips at once, even and odd tokens apart, as for the scores."""
        even1 = load_tile(zero_floats(rows), output, 4 * width)
        even2 = load_tile(zero_floats(rows), output + 64, 4 * width)
        odd1, odd2 = zero_floats(rows), zero_floats(rows)
        other = 32 * page_tokens
        for pair in range(page_tokens // 2):
            at = strip + 64 * pair
            prefetch(ahead + 128 * pair)
            prefetch(ahead + 128 * pair + 64)
            weight = weights + 8 * pair
            even1 = add_broadcast(even1, load_f16(at), weight, 4 * SEGMENT_TOKENS)
            even2 = add_broadcast(even2, load_f16(at + other), weight, 4 * SEGMENT_TOKENS)
            odd1 = add_broadcast(odd1, load_f16(at + 32), weight + 4, 4 * SEGMENT_TOKENS)
            odd2 = add_broadcast(odd2, load_f16(at + other + 32), weight + 4, 4 * SEGMENT_TOKENS)
        store_tile(add_tiles(even1, odd1), output, 4 * width)
        store_tile(add_tiles(even2, odd2), output + 64, 4 * width)

    @inline
    def page_values(values: int, width: int, page_tokens: int, weights: int, output: int, ahead: int) -> None:
        if panels == 2:
            for pair in range(width // 32):
                part = pair * 64 * page_tokens
                two_strips(values + part, width, page_tokens, weights, output + 128 * pair, ahead + part)
        else:
            for strip in range(width // 16):
                part = strip * 32 * page_tokens
                one_strip(values + part, width, page_tokens, weights, output + 64 * strip, ahead + part)

    return page_values


def _tile_function(rows: int) -> Callable[..., Any]:
    """One segment for `rows` query rows of one KV head."""
    page_scores, page_values = _scores_function(rows), _values_function(rows)

    @inline
    def tile(op: int, entry: int, row: int, segment: int, queries: int, states: int, scores: int) -> None:
        stats = scores + MAX_ROWS * 4 * SEGMENT_TOKENS
        output = stats + 64
        width, group = load_i64(op + WIDTH), load_i64(op + GROUP)
        page_tokens, window = load_i64(op + PAGE_TOKENS), load_i64(op + WINDOW)
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
        offset += load_i64(entry + ENTRY_KV_HEAD) * head_bytes(width, page_tokens)
        pages = load_i64(entry + ENTRY_PAGES)
        at0 = page0 * page_tokens - start
        for page in range(page0, page1):
            keys = load_i64(pages + 8 * page) + offset
            # the page after the last one of a segment is asked for as well: it is next unless the sequence ends
            ahead = load_i64(pages + 8 * min(page + 1, last_page)) + offset
            page_scores(keys, width, page_tokens, queries, scores + 4 * (page * page_tokens - start), ahead)
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
        for page in range(page0, page1):
            values = load_i64(pages + 8 * page) + offset + 2 * width * page_tokens
            ahead = load_i64(pages + 8 * min(page + 1, last_page)) + offset + 2 * width * page_tokens
            page_values(values, width, page_tokens, scores + 4 * (page * page_tokens - start), output, ahead)
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

    Scratch: states, queries, then one tile's scores, statistics and output.
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
