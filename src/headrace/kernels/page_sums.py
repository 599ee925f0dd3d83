"""What attention adds up over one page, whatever its format: scores of its keys, and its values, weighted.

Both are sums of columns: for scores a column is 16 tokens and its entries are dimensions, for values it is 16 dimensions
and its entries are tokens. With a query q and keys minimum + step * number, a score is

    sum over d of (q[d] * step[d]) * number[t, d]  +  sum over d of q[d] * minimum[d]

so steps and minimums meet the query once for a page, as those of values meet the weights, and the inner loop is the one of
f16 but for how it loads. Compressed pages are not widened in memory.

Every row of a tile is computed as it would be alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from headrace.kernels import level as _level
from headrace.kernels.dots import inline
from headrace.kernels.page_formats import F16, FORMAT_BITS, Q4, Q8, head_bytes, key_bytes, value_group_width
from headrace.kernels.pages import PAIRS
from headrace.kernels.tables import SEGMENT_TOKENS
from headrace.kernels.tiles import add_broadcast, add_tiles, load_tile, store_tile, zero_floats
from headrace.kernels.vectors import (
    fma,
    ints_to_floats,
    keep_apart,
    load_f16,
    load_floats,
    load_short_floats,
    load_u8_ints,
    prefetch,
    splat_float,
    store_floats,
    sum_lanes,
)

# for functions that say `keep_apart`: what is compiled for an inlined caller is inlined unless told otherwise
_called = njit(forceinline=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
_ROW = 4 * SEGMENT_TOKENS  # bytes from one row of scores or weights to the next
_ZERO = np.float32(0.0)
_ZERO_PART = np.float32(-1.0 / 16.0)


def _columns_function(rows: int, page_format: int, *, onto: bool) -> Callable[..., Any]:
    """Sums of columns of `count` entries, each times a factor of its own for each of `rows` rows.

    With `onto` they are added to what is at the target. Asks for as much at `ahead` as it reads meanwhile.
    """
    even, odd, pair_bytes = PAIRS[page_format]
    panels = _level.current().score_panels

    @inline
    def one(column: int, count: int, factors: int, stride: int, target: int, target_stride: int, ahead: int) -> None:
        sums = zero_floats(rows)
        if onto:
            sums = load_tile(sums, target, target_stride)
        for pair in range(count // 2):
            at = column + pair_bytes * pair
            prefetch(ahead + pair_bytes * pair)
            sums = add_broadcast(sums, even(at), factors + 8 * pair, stride)
            sums = add_broadcast(sums, odd(at), factors + 8 * pair + 4, stride)
        store_tile(sums, target, target_stride)

    @inline
    def two(column: int, count: int, factors: int, stride: int, target: int, target_stride: int, ahead: int) -> None:
        """Two columns at once, even and odd entries apart: four chains hide the latency of each sum."""
        even1, even2 = zero_floats(rows), zero_floats(rows)
        odd1, odd2 = zero_floats(rows), zero_floats(rows)
        if onto:
            even1 = load_tile(even1, target, target_stride)
            even2 = load_tile(even2, target + 64, target_stride)
        column_bytes = count // 2 * pair_bytes
        for pair in range(count // 2):
            at = column + pair_bytes * pair
            prefetch(ahead + 2 * pair_bytes * pair)
            if page_format == F16:
                prefetch(ahead + 2 * pair_bytes * pair + 64)
            factor = factors + 8 * pair
            even1 = add_broadcast(even1, even(at), factor, stride)
            even2 = add_broadcast(even2, even(at + column_bytes), factor, stride)
            odd1 = add_broadcast(odd1, odd(at), factor + 4, stride)
            odd2 = add_broadcast(odd2, odd(at + column_bytes), factor + 4, stride)
        store_tile(add_tiles(even1, odd1), target, target_stride)
        store_tile(add_tiles(even2, odd2), target + 64, target_stride)

    some = two if panels == 2 else one

    @inline
    def columns(
        base: int, num_columns: int, count: int, factors: int, stride: int, target: int, target_stride: int, ahead: int
    ) -> None:
        part_bytes = panels * (count // 2) * pair_bytes
        for i in range(num_columns // panels):
            part = part_bytes * i
            some(base + part, count, factors, stride, target + 64 * panels * i, target_stride, ahead + part)

    return columns


def exact_sums(rows: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """For pages of f16: (scores, values).

    scores(keys, width, page_tokens, queries, scores, factors, ahead)      scores [rows][P] of queries [rows][D]
    values(values, width, page_tokens, weights, output, factors, ahead)    output [rows][D] += weights [rows][P] * values

    `factors` is room for [rows][D], or [rows][P] with the stride of scores; `ahead` is the address to ask for meanwhile.
    """
    return _sums_f16(rows)


def mixed_sums(rows: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What `exact_sums` gives, for pages of any format: with the words of this page and the next before the arguments.

    scores(word, next_word, offset, width, ...) and values(word, next_word, offset, width, ...) without `ahead`; `offset` is
    that of the layer and head in pages of f16. Functions of their own, so that they take nothing from those for f16.
    """
    scores_f16, values_f16 = _sums_f16(rows)
    scores_q8, values_q8 = _sums_q8(rows)
    scores_q4, values_q4 = _sums_q4(rows)

    @_called
    def page_scores(
        word: int, next_word: int, offset: int, width: int, page_tokens: int, queries: int, scores: int, factors: int
    ) -> None:
        keep_apart()
        keys = _keys_at(word, offset, width, page_tokens)
        ahead = _keys_at(next_word, offset, width, page_tokens)
        if word & FORMAT_BITS == F16:
            scores_f16(keys, width, page_tokens, queries, scores, factors, ahead)
        elif word & FORMAT_BITS == Q8:
            scores_q8(keys, width, page_tokens, queries, scores, factors, ahead)
        else:
            scores_q4(keys, width, page_tokens, queries, scores, factors, ahead)

    @_called
    def page_values(
        word: int, next_word: int, offset: int, width: int, page_tokens: int, weights: int, output: int, factors: int
    ) -> None:
        keep_apart()
        values = _values_at(word, offset, width, page_tokens)
        ahead = _values_at(next_word, offset, width, page_tokens)
        if word & FORMAT_BITS == F16:
            values_f16(values, width, page_tokens, weights, output, factors, ahead)
        elif word & FORMAT_BITS == Q8:
            values_q8(values, width, page_tokens, weights, output, factors, ahead)
        else:
            values_q4(values, width, page_tokens, weights, output, factors, ahead)

    return page_scores, page_values


@inline
def _keys_at(word: int, offset: int, width: int, page_tokens: int) -> int:
    """Where the keys of a layer and head lie in a page, by the page's word and their offset in pages of f16."""
    page_format = word & FORMAT_BITS
    head = offset // head_bytes(F16, width, page_tokens)
    return word - page_format + head * head_bytes(page_format, width, page_tokens)


@inline
def _values_at(word: int, offset: int, width: int, page_tokens: int) -> int:
    return _keys_at(word, offset, width, page_tokens) + key_bytes(word & FORMAT_BITS, width, page_tokens)


def _sums_f16(rows: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    of_keys, of_values = _columns_function(rows, F16, onto=False), _columns_function(rows, F16, onto=True)

    @inline
    def page_scores(keys: int, width: int, page_tokens: int, queries: int, scores: int, factors: int, ahead: int) -> None:
        of_keys(keys, page_tokens // 16, width, queries, 4 * width, scores, _ROW, ahead)

    @inline
    def page_values(values: int, width: int, page_tokens: int, weights: int, output: int, factors: int, ahead: int) -> None:
        of_values(values, width // 16, page_tokens, weights, _ROW, output, 4 * width, ahead)

    return page_scores, page_values


def _sums_q8(rows: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    columns = _columns_function(rows, Q8, onto=True)
    fresh = _columns_function(rows, Q8, onto=False)

    @inline
    def page_scores(keys: int, width: int, page_tokens: int, queries: int, scores: int, factors: int, ahead: int) -> None:
        _begin_keys_q8(keys, width, rows, queries, factors)
        fresh(keys + width, page_tokens // 16, width, factors, 4 * width, scores, _ROW, ahead)

    @inline
    def page_values(values: int, width: int, page_tokens: int, weights: int, output: int, factors: int, ahead: int) -> None:
        group_width = value_group_width(width)
        groups = width // group_width
        for group in range(groups):
            _begin_values_q8(values + 2 * page_tokens * group, page_tokens, rows, weights, factors)
            skip = group_width * page_tokens * group
            numbers, where = values + 2 * page_tokens * groups + skip, output + 4 * group_width * group
            columns(numbers, group_width // 16, page_tokens, factors, _ROW, where, 4 * width, ahead + skip)

    return page_scores, page_values


def _sums_q4(rows: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    columns = _columns_function(rows, Q4, onto=True)

    @inline
    def page_scores(keys: int, width: int, page_tokens: int, queries: int, scores: int, factors: int, ahead: int) -> None:
        _begin_keys_q4(keys, width, page_tokens, rows, queries, scores, factors)
        columns(keys + 3 * width, page_tokens // 16, width, factors, 4 * width, scores, _ROW, ahead)

    @inline
    def page_values(values: int, width: int, page_tokens: int, weights: int, output: int, factors: int, ahead: int) -> None:
        group_width = value_group_width(width)
        groups = width // group_width
        for group in range(groups):
            steps, where = values + page_tokens * group, output + 4 * group_width * group
            zeros = steps + page_tokens * groups
            _begin_values_q4(steps, zeros, page_tokens, rows, weights, factors, where, group_width, 4 * width)
            skip = group_width * page_tokens // 2 * group
            numbers = values + 2 * page_tokens * groups + skip
            columns(numbers, group_width // 16, page_tokens, factors, _ROW, where, 4 * width, ahead + skip)

    return page_scores, page_values


@inline
def _begin_keys_q8(keys: int, width: int, rows: int, queries: int, factors: int) -> None:
    """Factors are queries times steps."""
    for r in range(rows):
        for i in range(width // 16):
            at = 4 * width * r + 64 * i
            store_floats(factors + at, load_floats(queries + at) * load_short_floats(keys + 16 * i))


@inline
def _begin_keys_q4(keys: int, width: int, page_tokens: int, rows: int, queries: int, scores: int, factors: int) -> None:
    """Factors are queries times steps; scores begin with queries times minimums."""
    steps = keys + 2 * width
    for r in range(rows):
        total = splat_float(_ZERO)
        for i in range(width // 16):
            at = 4 * width * r + 64 * i
            query = load_floats(queries + at)
            total = fma(query, load_f16(keys + 32 * i), total)
            store_floats(factors + at, query * load_short_floats(steps + 16 * i))
        start = splat_float(sum_lanes(total))
        for i in range(page_tokens // 16):
            store_floats(scores + _ROW * r + 64 * i, start)


@inline
def _begin_values_q8(scales: int, page_tokens: int, rows: int, weights: int, factors: int) -> None:
    """Factors are weights times the scales of a group."""
    for r in range(rows):
        for i in range(page_tokens // 16):
            at = _ROW * r + 64 * i
            store_floats(factors + at, load_floats(weights + at) * load_f16(scales + 32 * i))


@inline
def _begin_values_q4(
    steps: int, zeros: int, page_tokens: int, rows: int, weights: int, factors: int, output: int, width: int, stride: int
) -> None:
    """Factors are weights times the steps of a group of `width` dimensions; what zeros stand for is taken off the output."""
    for r in range(rows):
        total = splat_float(_ZERO)
        for i in range(page_tokens // 16):
            at = _ROW * r + 64 * i
            factor = load_floats(weights + at) * load_short_floats(steps + 16 * i)
            store_floats(factors + at, factor)
            total = fma(factor, ints_to_floats(load_u8_ints(zeros + 16 * i)), total)
        start = splat_float(sum_lanes(total) * _ZERO_PART)
        for i in range(width // 16):
            at = output + stride * r + 64 * i
            store_floats(at, load_floats(at) + start)
