"""Packed matrices, slowly: bits out of GGUF blocks into the layouts of `packed.py`, and out of either as numbers.

Everything passes through one plain form, `Fields`: the integers of every weight, the scale bytes and the block scales,
as arrays in the order of the weights. So a packed matrix is right when its fields equal those of the blocks it was made
from, and a kernel is right when it equals what `dequantise` or `reference.matmul` say of the same fields.

Source of the block layouts: `ggml-common.h` and `ggml-quants.c` of https://github.com/ggml-org/ggml.
Letters: `N` rows, `K` columns, `U` units of a row (`packed.PackedFormat.unit_columns` columns each), `S` scale bytes.
Knows nothing of files, tensors or compiled code; imports NumPy and `packed` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.kernels.packed import PACKED, ROWS, PackedFormat, groups

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

FLOAT_FORMATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
MINIMUM_FORMATS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
"""Formats with a second float16 per block: a minimum that is added (legacy formats) or scaled and subtracted (K)."""
FIVE_BIT_FORMATS = ("Q5_0", "Q5_1", "Q5_K")
WEIGHT_OFFSETS = {"Q4_0": 8, "Q5_0": 16, "Q3_K": 4, "Q6_K": 32}
"""What is taken from the stored unsigned integer of a weight; zero for the other formats."""


@dataclass(frozen=True)
class Fields:
    """A matrix as plain arrays. Which are empty depends on the format.

    `q` [N, K] is the stored integer of each weight before its offset is taken (signed for Q8_0), or its float bits;
    `scales` [N, U, S] are the scale bytes as GGUF packs them, `d` and `m` [N, U] the block's scale and minimum.
    """

    q: Array
    scales: Bytes
    d: npt.NDArray[np.float16]
    m: npt.NDArray[np.float16]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.q.shape[0], self.q.shape[1]


def _empty(rows: int, units: int, dtype: type[Any]) -> Array:
    return np.zeros((rows, units, 0) if dtype is np.uint8 else (rows, 0), dtype)


def _bits(values: Array, shift: int, mask: int) -> Array:
    return (values >> np.uint8(shift)) & np.uint8(mask)


# ---- fields out of GGUF blocks ----


def fields_of_blocks(name: str, raw: Bytes, columns: int) -> Fields:
    """The fields of a matrix in GGUF's form. `raw` is uint8 [N, bytes of a row of K = `columns` weights]."""
    rows = raw.shape[0]
    layout = PACKED[name]
    units = columns // layout.unit_columns
    none = _empty(rows, 0, np.float16)
    if name in FLOAT_FORMATS:
        values = np.ascontiguousarray(raw).view(FLOAT_FORMATS[name])
        assert values.shape == (rows, columns)
        return Fields(values, _empty(rows, units, np.uint8), none, none)
    blocks = raw.reshape(rows, units, -1)
    if layout.unit_columns == 32:
        q, d, m = _legacy_fields(name, blocks)
        scales = _empty(rows, units, np.uint8)
    else:
        q, scales, d, m = _k_fields(name, blocks)
    return Fields(q.reshape(rows, columns), scales, d, m)


def _half(blocks: Bytes, at: int) -> Array:
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0]


def _legacy_fields(name: str, blocks: Bytes) -> tuple[Array, Array, Array]:
    """Blocks of 32: `d`, perhaps `m`, perhaps 32 fifth bits, then nibbles (weight i low, 16 + i high) or bytes."""
    d, at = _half(blocks, 0), 2
    m = _empty(blocks.shape[0], 0, np.float16)
    if name in MINIMUM_FORMATS:
        m, at = _half(blocks, 2), 4
    if name == "Q8_0":
        return blocks[:, :, 2:34].view(np.int8), d, m
    fifth = np.zeros((*blocks.shape[:2], 32), np.uint8)
    if name in FIVE_BIT_FORMATS:
        for i in range(32):
            fifth[:, :, i] = _bits(blocks[:, :, at + i // 8], i % 8, 1)
        at += 4
    nibbles = blocks[:, :, at : at + 16]
    q = np.concatenate([_bits(nibbles, 0, 15), _bits(nibbles, 4, 15)], axis=2)
    return q | fifth << np.uint8(4), d, m


def _k_fields(name: str, blocks: Bytes) -> tuple[Array, Array, Array, Array]:
    """Blocks of 256; the numbers are the first byte of each part.

    Q2_K   0 scales[16], 16 pairs[64], 80 d, 82 m
    Q3_K   0 third bits[32], 32 pairs[64], 96 scales[12], 108 d
    Q4_K   0 d, 2 m, 4 scales[12], 16 nibbles[128]
    Q5_K   0 d, 2 m, 4 scales[12], 16 fifth bits[32], 48 nibbles[128]
    Q6_K   0 nibbles[128], 128 pairs[64], 192 scales[16], 208 d
    """
    none = _empty(blocks.shape[0], 0, np.float16)
    if name == "Q2_K":
        return _pairs(blocks[:, :, 16:80]), blocks[:, :, :16], _half(blocks, 80), _half(blocks, 82)
    if name == "Q3_K":
        q = _pairs(blocks[:, :, 32:96]) | _planes(blocks[:, :, :32]) << np.uint8(2)
        return q, blocks[:, :, 96:108], _half(blocks, 108), none
    if name == "Q4_K":
        return _nibbles(blocks[:, :, 16:144], 32), blocks[:, :, 4:16], _half(blocks, 0), _half(blocks, 2)
    if name == "Q5_K":
        q = _nibbles(blocks[:, :, 48:176], 32) | _planes(blocks[:, :, 16:48]) << np.uint8(4)
        return q, blocks[:, :, 4:16], _half(blocks, 0), _half(blocks, 2)
    q = _nibbles(blocks[:, :, :128], 64) | _pairs(blocks[:, :, 128:192]) << np.uint8(4)
    return q, blocks[:, :, 192:208], _half(blocks, 208), none


def _nibbles(packed: Bytes, run: int) -> Array:
    """Runs of `run` bytes hold 2 * run weights: the low nibbles of all, then the high ones."""
    parts = []
    for start in range(0, 128, run):
        part = packed[:, :, start : start + run]
        parts += [_bits(part, 0, 15), _bits(part, 4, 15)]
    return np.concatenate(parts, axis=2)


def _pairs(packed: Bytes) -> Array:
    """Runs of 32 bytes hold 128 weights: bits 0-1 of all, then bits 2-3, 4-5, 6-7."""
    parts = [_bits(packed[:, :, start : start + 32], shift, 3) for start in (0, 32) for shift in (0, 2, 4, 6)]
    return np.concatenate(parts, axis=2)


def _planes(packed: Bytes) -> Array:
    """32 bytes hold one bit of 256 weights: bit 0 of all, then bit 1, ..."""
    return np.concatenate([_bits(packed, bit, 1) for bit in range(8)], axis=2)


# ---- numbers out of fields ----


def _six_bit(scales: Bytes) -> tuple[Array, Array]:
    """Scales and minimums [N, U, 8] of Q4_K and Q5_K: six bits each in 12 bytes; the last four are spread over three."""
    low, minimum, both = scales[:, :, 0:4], scales[:, :, 4:8], scales[:, :, 8:12]
    scale = np.concatenate([_bits(low, 0, 63), _bits(both, 0, 15) | _bits(low, 6, 3) << np.uint8(4)], axis=2)
    least = np.concatenate([_bits(minimum, 0, 63), _bits(both, 4, 15) | _bits(minimum, 6, 3) << np.uint8(4)], axis=2)
    return scale, least


def sub_block_scales(name: str, fields: Fields) -> tuple[Array, Array]:
    """Integer scales and minimums of a format's sub-blocks, int64 [N, sub-blocks of a row]; ones and zeros without any.

    A sub-block is K / (their number) columns: 32, or 16 for Q2_K, Q3_K and Q6_K.
    """
    rows, columns = fields.shape
    if name == "Q2_K":
        scale, least = _bits(fields.scales, 0, 15), _bits(fields.scales, 4, 15)
    elif name == "Q3_K":
        low = np.concatenate([_bits(fields.scales[:, :, :8], shift, 15) for shift in (0, 4)], axis=2)
        high = np.concatenate([_bits(fields.scales[:, :, 8:], shift, 3) for shift in (0, 2, 4, 6)], axis=2)
        scale = (low | high << np.uint8(4)).astype(np.int64) - 32
        least = np.zeros_like(scale)
    elif name in ("Q4_K", "Q5_K"):
        scale, least = _six_bit(fields.scales)
    elif name == "Q6_K":
        scale = np.ascontiguousarray(fields.scales).view(np.int8)
        least = np.zeros_like(scale)
    else:
        scale = np.ones((rows, columns // 32, 1), np.int64)
        least = np.zeros_like(scale)
    return scale.reshape(rows, -1).astype(np.int64), least.reshape(rows, -1).astype(np.int64)


def integers(name: str, fields: Fields) -> npt.NDArray[np.int64]:
    """The signed integer of every weight [N, K], its offset taken."""
    return fields.q.astype(np.int64) - WEIGHT_OFFSETS.get(name, 0)


def floats(name: str, fields: Fields) -> Floats:
    """The weights of a float format as float32 [N, K]."""
    if name == "BF16":
        return (fields.q.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return fields.q.astype(np.float32)


def dequantise(name: str, fields: Fields) -> Floats:
    """The weights as float32 [N, K]: d * scale * q - m * minimum, or d * q + m, rounded in that order as ggml does."""
    if name in FLOAT_FORMATS:
        return floats(name, fields)
    rows, columns = fields.shape
    scale, least = sub_block_scales(name, fields)
    width = columns // scale.shape[1]
    per_unit = scale.shape[1] // fields.d.shape[1]
    d = np.repeat(fields.d.astype(np.float32), per_unit, axis=1) * scale.astype(np.float32)
    weights = np.repeat(d, width, axis=1) * integers(name, fields).astype(np.float32)
    if name in MINIMUM_FORMATS:
        m = np.repeat(fields.m.astype(np.float32), per_unit, axis=1)
        m = m if PACKED[name].unit_columns == 32 else -(m * least.astype(np.float32))
        weights = weights + np.repeat(m, width, axis=1)
    assert weights.shape == (rows, columns)
    return weights


# ---- fields into the packed layout, and out of it ----
#
# One generator says where every field lies; packing writes there and unpacking reads there.


def _nibble_place(c: int, row: int) -> tuple[int, int]:
    """(byte, shift) of column c of 32 in a section of nibbles."""
    return 64 * (c % 16 // 4) + 4 * row + c % 4, 4 * (c // 16)


def _plane_place(c: int, row: int) -> tuple[int, int]:
    """(byte, shift) of column c of 32 in a section of single bits."""
    return 4 * row + c % 4, c // 4


def _pair_place(c: int, row: int) -> tuple[int, int]:
    """(byte, shift) of column c of 32 in a section of pairs: field i of vector h is logical vector 4h + i."""
    return 64 * (c // 16) + 4 * row + c % 4, 2 * (c // 4 % 4)


def _weight_parts(layout: PackedFormat) -> list[tuple[str, int, int, int]]:
    """(section, its bytes per 32 columns, bits in it, position of these bits in q) of each part of an integer weight."""
    name = layout.name
    if name == "Q8_0":
        return [("bytes8", 512, 8, 0)]
    if name == "Q2_K":
        return [("pairs", 128, 2, 0)]
    if name == "Q3_K":
        return [("pairs", 128, 2, 0), ("high1", 64, 1, 2)]
    if name == "Q6_K":
        return [("nibbles", 256, 4, 0), ("pairs", 128, 2, 4)]
    parts = [("nibbles", 256, 4, 0)]
    return [*parts, ("high1", 64, 1, 4)] if name in FIVE_BIT_FORMATS else parts


_PLACES = {"nibbles": _nibble_place, "high1": _plane_place, "pairs": _pair_place}


def _byte_place(c: int, row: int) -> tuple[int, int]:
    return 64 * (c // 4) + 4 * row + c % 4, 0


def pack_matrix(name: str, raw: Bytes, columns: int) -> Bytes:
    """GGUF blocks, uint8 [N, bytes of a row of K = `columns` weights], in the packed layout, uint8 [packed_bytes]."""
    return pack_fields(name, fields_of_blocks(name, raw, columns))


def pack_fields(name: str, fields: Fields) -> Bytes:
    """The fields of a matrix in the packed layout, uint8 [packed_bytes]; missing rows of the last group are zero."""
    layout = PACKED[name]
    rows, columns = fields.shape
    units = columns // layout.unit_columns
    packed = np.zeros((groups(rows), units, layout.unit_bytes), np.uint8)
    for n in range(rows):
        target, row = packed[n // ROWS], n % ROWS
        if name in FLOAT_FORMATS:
            width = FLOAT_FORMATS[name].itemsize
            for c in range(32):
                at = width * (ROWS * c + row)
                bits = np.ascontiguousarray(fields.q[n, c::32])
                target[:, at : at + width] = bits.view(np.uint8).reshape(units, width)
            continue
        q = fields.q[n].view(np.uint8).reshape(units, layout.unit_columns)
        for section, stride, width, low in _weight_parts(layout):
            place = _PLACES.get(section, _byte_place)
            for c in range(layout.unit_columns):
                at, shift = place(c % 32, row)
                at += layout.offset(section) + stride * (c // 32)
                target[:, at] |= _bits(q[:, c], low, 2**width - 1) << np.uint8(shift)
        for i in range(fields.scales.shape[2]):
            target[:, layout.offset("scales") + ROWS * i + row] = fields.scales[n, :, i]
        for section, values in (("d", fields.d), ("m", fields.m)):
            if values.shape[1]:
                at = layout.offset(section) + 2 * row
                target[:, at : at + 2] = np.ascontiguousarray(values[n]).view(np.uint8).reshape(units, 2)
    return packed.reshape(-1)


def unpack_fields(name: str, packed: Bytes, rows: int, columns: int) -> Fields:
    """The fields of a packed matrix of N = `rows` rows and K = `columns` columns, padding rows left out."""
    layout = PACKED[name]
    units = columns // layout.unit_columns
    source = packed.reshape(groups(rows), units, layout.unit_bytes)
    scale_bytes = {"Q2_K": 16, "Q3_K": 12, "Q4_K": 12, "Q5_K": 12, "Q6_K": 16}.get(name, 0)
    scales = np.zeros((rows, units, scale_bytes), np.uint8)
    halves = [np.zeros((rows, units if section in dict(layout.sections) else 0), np.float16) for section in ("d", "m")]
    dtype: np.dtype[Any] = FLOAT_FORMATS.get(name, np.dtype(np.int8 if name == "Q8_0" else np.uint8))
    q = np.zeros((rows, columns), dtype)
    for n in range(rows):
        unit, row = source[n // ROWS], n % ROWS
        if name in FLOAT_FORMATS:
            vectors = unit.view(dtype).reshape(units, 32, ROWS)
            q[n] = vectors[:, :, row].reshape(-1)
            continue
        value = np.zeros((units, layout.unit_columns), np.uint8)
        for section, stride, width, low in _weight_parts(layout):
            place = _PLACES.get(section, _byte_place)
            for c in range(layout.unit_columns):
                at, shift = place(c % 32, row)
                at += layout.offset(section) + stride * (c // 32)
                value[:, c] |= _bits(unit[:, at], shift, 2**width - 1) << np.uint8(low)
        q[n] = value.view(dtype).reshape(-1)
        for i in range(scale_bytes):
            scales[n, :, i] = unit[:, layout.offset("scales") + ROWS * i + row]
        for section, values in zip(("d", "m"), halves, strict=True):
            if values.shape[1]:
                at = layout.offset(section) + 2 * row
                values[n] = np.ascontiguousarray(unit[:, at : at + 2]).view("<f2")[:, 0]
    return Fields(q, scales, *halves)


def unpack_matrix(name: str, packed: Bytes, rows: int, columns: int) -> Floats:
    """A packed matrix as float32 [N, K]."""
    return dequantise(name, unpack_fields(name, packed, rows, columns))
