"""The slow NumPy twin of compressed pages: narrowing, byte for byte, and what their numbers mean.

Layouts are those of `page_formats.py`; letters those of `reference.py`, and `W` the width of a group of value dimensions,
`N` = D / W. Everything is float32, one operation after the other, as in the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.kernels.page_formats import F16, Q4, Q8, head_bytes, key_bytes, used_bytes, value_group_width
from headrace.kernels.reference import F16_LARGEST, Floats, Halves, keys_and_values

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


def short_floats(codes: Bytes) -> Floats:
    """What short floats stand for: a byte is the upper part of a float16 without its sign."""
    return (codes.astype(np.uint16) << 7).view(np.float16).astype(np.float32)


def to_short_floats(x: Floats) -> Bytes:
    """Rounded to float16, then up to the next short float; x is from 0 on and far from the largest float16."""
    bits = np.ascontiguousarray(x.astype(np.float16)).view(np.uint16)
    return ((bits + 127) >> 7).astype(np.uint8)


def narrow(page: Bytes, page_format: int, kv_heads: int, width: int, page_tokens: int) -> Bytes:
    """One layer of a page of float16 in a smaller format, uint8 [G * head_bytes]."""
    keys, values = (_finite(part) for part in keys_and_values(page, kv_heads, width, page_tokens))
    made = np.zeros((kv_heads, head_bytes(page_format, width, page_tokens)), np.uint8)
    narrow_keys, narrow_values = {Q8: (_keys_q8, _values_q8), Q4: (_keys_q4, _values_q4)}[page_format]
    for g in range(kv_heads):
        parts = narrow_keys(keys[:, g]) + narrow_values(values[:, g].reshape(page_tokens, -1, value_group_width(width)))
        content = np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])
        assert len(content) == used_bytes(page_format, width, page_tokens)
        made[g, : len(content)] = content
    return made.reshape(-1)


def widen(page: Bytes, page_format: int, kv_heads: int, width: int, page_tokens: int) -> tuple[Floats, Floats]:
    """Keys and values, float32 [P, G, D], of one layer of a page of any format."""
    if page_format == F16:
        keys, values = keys_and_values(page, kv_heads, width, page_tokens)
        return keys.astype(np.float32), values.astype(np.float32)
    heads = page.reshape(kv_heads, head_bytes(page_format, width, page_tokens))
    at, end = key_bytes(page_format, width, page_tokens), used_bytes(page_format, width, page_tokens)
    read_keys, read_values = {Q8: (_read_keys_q8, _read_values_q8), Q4: (_read_keys_q4, _read_values_q4)}[page_format]
    keys32 = [read_keys(head[:at], width, page_tokens) for head in heads]
    values32 = [read_values(head[at:end], width, page_tokens) for head in heads]
    return np.stack(keys32, axis=1), np.stack(values32, axis=1)


def _finite(x: Halves) -> Floats:
    wide = x.astype(np.float32)
    return np.where(wide > -F16_LARGEST, np.minimum(wide, np.float32(F16_LARGEST)), np.float32(-F16_LARGEST))


def _inverse(steps: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.where(steps > 0, np.float32(1) / steps, np.float32(0))


def _numbers(x: Floats, low: int, high: int) -> npt.NDArray[np.int8]:
    return np.clip(np.rint(x), low, high).astype(np.int8)


def _columns(x: Array) -> Array:
    """[entries, lanes of all columns] as [columns][entries][16]."""
    entries, lanes = x.shape
    return x.reshape(entries, lanes // 16, 16).transpose(1, 0, 2)


def _packed(numbers: Array) -> Bytes:
    """Columns [columns][entries][16] of 4-bit numbers, even and odd entries in the halves of bytes."""
    return (numbers[:, 0::2] | numbers[:, 1::2] << 4).astype(np.uint8)


def _unpacked(halves: Bytes, entries: int, lanes: int) -> Floats:
    """The inverse of `_packed` and `_columns`: [entries, lanes]."""
    pairs = halves.reshape(lanes // 16, entries // 2, 1, 16)
    numbers = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(lanes // 16, entries, 16)
    return numbers.transpose(1, 0, 2).reshape(entries, lanes).astype(np.float32)


def _bytes(numbers: Bytes, entries: int, lanes: int) -> Floats:
    """[entries, lanes] of signed bytes that lie in columns."""
    columns = numbers.view(np.int8).reshape(lanes // 16, entries, 16)
    return columns.transpose(1, 0, 2).reshape(entries, lanes).astype(np.float32)


def _keys_q8(keys: Floats) -> list[Array]:
    steps = to_short_floats(np.abs(keys).max(axis=0) / np.float32(127))
    numbers = _numbers(keys * _inverse(short_floats(steps)), -127, 127)
    return [steps, _columns(numbers.T)]


def _keys_q4(keys: Floats) -> list[Array]:
    low = np.float32(0) - (np.float32(0) - keys).max(axis=0)  # zero has no sign
    steps = to_short_floats((keys.max(axis=0) - low) / np.float32(15))
    numbers = _numbers((keys - low) * _inverse(short_floats(steps)), 0, 15)
    return [low.astype(np.float16), steps, _packed(_columns(numbers.T))]


def _values_q8(values: Floats) -> list[Array]:
    scales = (np.abs(values).max(axis=2) / np.float32(127)).astype(np.float16)  # [P, N]
    numbers = _numbers(values * _inverse(scales.astype(np.float32))[:, :, np.newaxis], -127, 127)
    return [scales.T, _columns(numbers.reshape(len(values), -1))]


def _values_q4(values: Floats) -> list[Array]:
    top, depth = np.maximum(values.max(axis=2), np.float32(0)), np.maximum((-values).max(axis=2), np.float32(0))
    steps = to_short_floats((top + depth) / np.float32(15))
    inverse = _inverse(short_floats(steps))
    zeros = np.clip(np.rint(depth * inverse * np.float32(16)), 0, 255).astype(np.uint8)
    shift = zeros.astype(np.float32) / np.float32(16)
    numbers = _numbers(values * inverse[:, :, np.newaxis] + shift[:, :, np.newaxis], 0, 15)
    return [steps.T, zeros.T, _packed(_columns(numbers.reshape(len(values), -1)))]


def _read_keys_q8(part: Bytes, width: int, page_tokens: int) -> Floats:
    return _bytes(part[width:], width, page_tokens).T * short_floats(part[:width])


def _read_keys_q4(part: Bytes, width: int, page_tokens: int) -> Floats:
    low = part[: 2 * width].view(np.float16).astype(np.float32)
    numbers = _unpacked(part[3 * width :], width, page_tokens).T
    return numbers * short_floats(part[2 * width : 3 * width]) + low


def _spread(per_group: Array, width: int) -> Array:
    """[N, P] as [P, D]."""
    return np.repeat(per_group.T, width // len(per_group), axis=1)


def _read_values_q8(part: Bytes, width: int, page_tokens: int) -> Floats:
    count = page_tokens * (width // value_group_width(width))
    scales = part[: 2 * count].view(np.float16).reshape(-1, page_tokens).astype(np.float32)
    return _bytes(part[2 * count :], page_tokens, width) * _spread(scales, width)


def _read_values_q4(part: Bytes, width: int, page_tokens: int) -> Floats:
    count = page_tokens * (width // value_group_width(width))
    steps = _spread(short_floats(part[:count]).reshape(-1, page_tokens), width)
    zeros = _spread(part[count : 2 * count].reshape(-1, page_tokens), width).astype(np.float32)
    return (_unpacked(part[2 * count :], page_tokens, width) - zeros / np.float32(16)) * steps
