"""Rotary position embedding of queries and keys, and the new keys' and values' way into KV pages.

A head is rotated in halves: (x[i], x[i + n]) by the angle of (position, i), for i < n = rotated dimensions / 2.
Models that rotate neighbouring pairs have the rows of their query and key matrices reordered when they are packed.

A page holds `P` tokens of all layers and KV heads. For one layer and head:

    keys    [P / 16][D][16] float16     16 tokens side by side, for one dimension after the other
    values  [D / 16][P][16] float16     16 dimensions side by side, for one token after the other

so both halves of attention stream through it in address order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.kernels.dots import inline
from headrace.kernels.fields.rope import (
    ANGLES,
    BLOCK_TOKENS,
    EPSILON,
    HEADS,
    KEY_NORM,
    KEYS,
    KEYS_STRIDE,
    KV_HEADS,
    LAYER_OFFSET,
    OUTPUT,
    OUTPUT_STRIDE,
    PAGE_TOKENS,
    QUERIES,
    QUERIES_STRIDE,
    QUERY_NORM,
    QUERY_SCALE,
    ROTATED,
    TOKEN_TABLE,
    TOKENS,
    VALUES,
    VALUES_STRIDE,
    WIDTH,
)
from headrace.kernels.rows import copy_bytes, root_mean_square
from headrace.kernels.tables import TOKEN_BYTES, TOKEN_PAGE, TOKEN_POSITION, TOKEN_SLOT
from headrace.kernels.vectors import (
    fma,
    load_f32,
    load_floats,
    load_i64,
    load_u16,
    splat_float,
    store_f16,
    store_floats,
    store_i16,
    store_i64,
)


@inline
def head_bytes(width: int, page_tokens: int) -> int:
    """Bytes of one layer and head in a page: keys, then values."""
    return 4 * width * page_tokens


@inline
def _token_range(op: int, block: int) -> Any:
    tokens = load_i64(op + TOKENS)
    block_tokens = load_i64(op + BLOCK_TOKENS)
    t0 = min(block * block_tokens, tokens)
    return t0, min(t0 + block_tokens, tokens)


@inline
def _norm_head(source: int, target: int, width: int, weight: int, epsilon: Any) -> None:
    """Copies a head, normed if there is a weight."""
    if weight == 0:
        copy_bytes(target, source, 4 * width)
        return
    factor = splat_float(root_mean_square(source, width, epsilon))
    for i in range(width // 16):
        store_floats(target + 64 * i, load_floats(source + 64 * i) * factor * load_floats(weight + 64 * i))


@inline
def _rotate_head(head: int, angles: int, rotated: int) -> None:
    """Rotates a head in place."""
    half = rotated // 2
    for i in range(half // 16):
        x = load_floats(head + 64 * i)
        y = load_floats(head + 4 * half + 64 * i)
        cos = load_floats(angles + 64 * i)
        sin = load_floats(angles + 4 * half + 64 * i)
        zero = splat_float(np.float32(0.0))
        store_floats(head + 64 * i, fma(x, cos, (zero - y) * sin))
        store_floats(head + 4 * half + 64 * i, fma(y, cos, x * sin))


@inline
def _scratch_bytes(op: int) -> int:
    heads, kv_heads, width = load_i64(op + HEADS), load_i64(op + KV_HEADS), load_i64(op + WIDTH)
    return 4 * width * (heads + kv_heads) + 2 * width * 2 * kv_heads


def compute(op: int, block: int, scratch: int) -> None:
    """Per token: rotated queries [H][D] float32, keys [G][D] and values [G][D] float16, a key head in float32."""
    t0, t1 = _token_range(op, block)
    heads, kv_heads = load_i64(op + HEADS), load_i64(op + KV_HEADS)
    width, rotated = load_i64(op + WIDTH), load_i64(op + ROTATED)
    epsilon = load_f32(op + EPSILON)
    scale = splat_float(load_f32(op + QUERY_SCALE))
    for t in range(t1 - t0):
        token = load_i64(op + TOKEN_TABLE) + (t0 + t) * TOKEN_BYTES
        angles = load_i64(op + ANGLES) + load_i64(token + TOKEN_POSITION) * 4 * rotated
        target = scratch + t * _scratch_bytes(op)
        source = load_i64(op + QUERIES) + (t0 + t) * load_i64(op + QUERIES_STRIDE)
        for _ in range(heads):
            _norm_head(source, target, width, load_i64(op + QUERY_NORM), epsilon)
            _rotate_head(target, angles, rotated)
            for i in range(width // 16):
                store_floats(target + 64 * i, load_floats(target + 64 * i) * scale)
            source += 4 * width
            target += 4 * width
        keys, values = target, target + 2 * width * kv_heads
        head = values + 2 * width * kv_heads
        source = load_i64(op + KEYS) + (t0 + t) * load_i64(op + KEYS_STRIDE)
        for g in range(kv_heads):
            _norm_head(source + 4 * width * g, head, width, load_i64(op + KEY_NORM), epsilon)
            _rotate_head(head, angles, rotated)
            for i in range(width // 16):
                store_f16(keys + 2 * width * g + 32 * i, load_floats(head + 64 * i))
        source = load_i64(op + VALUES) + (t0 + t) * load_i64(op + VALUES_STRIDE)
        for i in range(width * kv_heads // 16):
            store_f16(values + 32 * i, load_floats(source + 64 * i))


def commit(op: int, block: int, scratch: int) -> None:
    """Copies the queries, and spreads keys and values over their page."""
    t0, t1 = _token_range(op, block)
    heads, kv_heads = load_i64(op + HEADS), load_i64(op + KV_HEADS)
    width, page_tokens = load_i64(op + WIDTH), load_i64(op + PAGE_TOKENS)
    for t in range(t1 - t0):
        token = load_i64(op + TOKEN_TABLE) + (t0 + t) * TOKEN_BYTES
        source = scratch + t * _scratch_bytes(op)
        out = load_i64(op + OUTPUT) + (t0 + t) * load_i64(op + OUTPUT_STRIDE)
        copy_bytes(out, source, 4 * width * heads)
        keys = source + 4 * width * heads
        values = keys + 2 * width * kv_heads
        slot = load_i64(token + TOKEN_SLOT)
        page = load_i64(token + TOKEN_PAGE) + load_i64(op + LAYER_OFFSET)
        for g in range(kv_heads):
            chunk = page + g * head_bytes(width, page_tokens)
            panel = chunk + (slot // 16) * 32 * width + 2 * (slot % 16)
            for d in range(width):
                store_i16(panel + 32 * d, load_u16(keys + 2 * (g * width + d)))
            strip = chunk + 2 * width * page_tokens + 32 * slot
            for i in range(width // 16):
                for part in range(4):
                    word = load_i64(values + 2 * g * width + 32 * i + 8 * part)
                    store_i64(strip + 32 * i * page_tokens + 8 * part, word)
