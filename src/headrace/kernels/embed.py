"""Rows of the embedding matrix, out of their packed form: out[t] = weights[id[t]] * scale, as float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.kernels.dots import inline
from headrace.kernels.fields.embed import (
    COLUMNS,
    OUTPUT,
    OUTPUT_STRIDE,
    SCALE,
    TOKEN_TABLE,
    UNITS,
    WEIGHTS,
)
from headrace.kernels.packed import PACKED
from headrace.kernels.rows import copy_bytes
from headrace.kernels.tables import TOKEN_BYTES, TOKEN_ID
from headrace.kernels.vectors import load_bf16_scalar, load_f16_scalar, load_f32, load_i8, load_i64, load_u8, store_f32


@inline
def _nibble(vectors: int, row: int, c: int) -> int:
    """The 4 bits of column c (of 32) of a row."""
    byte = load_u8(vectors + 64 * ((c % 16) // 4) + 4 * row + c % 4)
    return (byte >> (4 * (c // 16))) & 15


@inline
def _high_bit(vector: int, row: int, c: int) -> int:
    return (load_u8(vector + 4 * row + c % 4) >> (c // 4)) & 1


@inline
def _pair(vectors: int, row: int, c: int) -> int:
    return (load_u8(vectors + 64 * (c // 16) + 4 * row + c % 4) >> (2 * ((c % 16) // 4))) & 3


@inline
def _scale_byte(scales: int, i: int, row: int) -> int:
    return load_u8(scales + 16 * i + row)


def _simple_element(name: str) -> Callable[..., Any]:
    layout = PACKED[name]
    d_at = layout.offset("d")
    has_minimum = name in ("Q4_1", "Q5_1")
    m_at = layout.offset("m") if has_minimum else 0
    five_bits = name in ("Q5_0", "Q5_1")
    high_at = layout.offset("high1") if five_bits else 0
    eight_bits = name == "Q8_0"
    offset = 0 if has_minimum or eight_bits else (16 if five_bits else 8)

    @inline
    def element(unit: int, row: int, c: int) -> Any:
        if eight_bits:
            q = load_i8(unit + 64 * (c // 4) + 4 * row + c % 4)
        else:
            q = _nibble(unit, row, c)
            if five_bits:
                q += _high_bit(unit + high_at, row, c) << 4
        value = np.float32(q - offset) * load_f16_scalar(unit + d_at + 2 * row)
        if has_minimum:
            value += load_f16_scalar(unit + m_at + 2 * row)
        return value

    return element


def _k_element(name: str) -> Callable[..., Any]:
    layout = PACKED[name]
    scales_at, d_at = layout.offset("scales"), layout.offset("d")
    m_at = layout.offset("m") if name != "Q6_K" and name != "Q3_K" else 0
    high_at = layout.offset("high1") if name in ("Q5_K", "Q3_K") else 0
    pairs_at = layout.offset("pairs") if name in ("Q6_K", "Q2_K", "Q3_K") else 0

    @inline
    def element(unit: int, row: int, column: int) -> Any:
        b, c = column // 32, column % 32
        scales = unit + scales_at
        d = load_f16_scalar(unit + d_at + 2 * row)
        if name == "Q4_K" or name == "Q5_K":
            q = _nibble(unit + 256 * b, row, c)
            if name == "Q5_K":
                q += _high_bit(unit + high_at + 64 * b, row, c) << 4
            if b < 4:
                scale = _scale_byte(scales, b, row) & 63
                minimum = _scale_byte(scales, b + 4, row) & 63
            else:
                both = _scale_byte(scales, b + 4, row)
                scale = (both & 15) | (_scale_byte(scales, b - 4, row) >> 6) << 4
                minimum = (both >> 4) | (_scale_byte(scales, b, row) >> 6) << 4
            m = load_f16_scalar(unit + m_at + 2 * row)
            return d * np.float32(scale) * np.float32(q) - m * np.float32(minimum)
        i = 2 * b + c // 16
        if name == "Q6_K":
            q = _nibble(unit + 256 * b, row, c) + (_pair(unit + pairs_at + 128 * b, row, c) << 4) - 32
            return d * np.float32(load_i8(scales + 16 * i + row)) * np.float32(q)
        q = _pair(unit + pairs_at + 128 * b, row, c)
        if name == "Q2_K":
            byte = _scale_byte(scales, i, row)
            m = load_f16_scalar(unit + m_at + 2 * row)
            return d * np.float32(byte & 15) * np.float32(q) - m * np.float32(byte >> 4)
        q += (_high_bit(unit + high_at + 64 * b, row, c) << 2) - 4
        low = (_scale_byte(scales, i % 8, row) >> (4 * (i // 8))) & 15
        high = (_scale_byte(scales, 8 + i % 4, row) >> (2 * (i // 4))) & 3
        return d * np.float32((low | high << 4) - 32) * np.float32(q)

    return element


def _float_element(name: str) -> Callable[..., Any]:
    load = {"F32": load_f32, "F16": load_f16_scalar, "BF16": load_bf16_scalar}[name]
    width = 4 if name == "F32" else 2

    @inline
    def element(unit: int, row: int, c: int) -> Any:
        return load(unit + 16 * width * c + width * row)

    return element


def compute_function(name: str) -> Callable[[int, int, int], None]:
    """The compute function for one packed format; a block is one token."""
    layout = PACKED[name]
    maker = _float_element if not layout.integer_activations else _k_element if name.endswith("K") else _simple_element
    element = maker(name)
    unit_columns, unit_bytes = layout.unit_columns, layout.unit_bytes

    def compute(op: int, block: int, scratch: int) -> None:
        token = load_i64(load_i64(op + TOKEN_TABLE) + block * TOKEN_BYTES + TOKEN_ID)
        units = load_i64(op + UNITS)
        scale = load_f32(op + SCALE)
        weights = load_i64(op + WEIGHTS) + (token // 16) * units * unit_bytes
        for column in range(load_i64(op + COLUMNS)):
            unit = weights + (column // unit_columns) * unit_bytes
            store_f32(scratch + 4 * column, element(unit, token % 16, column % unit_columns) * scale)

    return compute


def commit(op: int, block: int, scratch: int) -> None:
    """Copies one row."""
    out = load_i64(op + OUTPUT) + block * load_i64(op + OUTPUT_STRIDE)
    copy_bytes(out, scratch, 4 * load_i64(op + COLUMNS))
