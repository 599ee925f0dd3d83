"""Repacks GGUF matrices into the layouts of `kernels/packed.py`: a permutation of bits, never a change of a value.

Each function maps whole groups of 16 rows at once with NumPy: R groups, U units per row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelFileError
from headrace.kernels.packed import PACKED, ROWS, PackedFormat, groups, packed_bytes
from headrace.weights.formats import TensorFormat

Bytes = npt.NDArray[np.uint8]
_GROUPS_AT_ONCE = 256


def pack_rows(
    tensor_format: TensorFormat, raw: Bytes, columns: int, out: Bytes, order: npt.NDArray[np.intp] | None = None
) -> None:
    """Packs a matrix.

    Args:
        tensor_format: its GGUF format.
        raw: uint8 [rows, row bytes].
        columns: a multiple of the layout's unit.
        out: uint8 of `packed_bytes` to fill.
        order: row i of the result is row order[i] of the matrix.

    Raises:
        ModelFileError: the columns are no multiple of the layout's unit.
    """
    layout = PACKED[tensor_format.name]
    if columns % layout.unit_columns:
        raise ModelFileError(
            f"a {layout.name} matrix with {columns} columns cannot be packed: columns must be a multiple of "
            f"{layout.unit_columns}; use a file with another format for it"
        )
    rows = len(raw) if order is None else len(order)
    units = columns // layout.unit_columns
    group_bytes = units * layout.unit_bytes
    target = out[: packed_bytes(layout, rows, columns)].reshape(groups(rows), units, layout.unit_bytes)
    assert target.shape[0] * group_bytes == len(out), "out has another size than the packed matrix"
    pack = _PACKERS[layout.name]
    for start in range(0, groups(rows), _GROUPS_AT_ONCE):
        end = min(start + _GROUPS_AT_ONCE, groups(rows))
        wanted = slice(ROWS * start, min(ROWS * end, rows))
        chunk = raw[wanted] if order is None else raw[order[wanted]]
        padding = ROWS * (end - start) - len(chunk)
        if padding:
            chunk = np.concatenate([chunk, np.zeros((padding, chunk.shape[1]), np.uint8)])
        pack(layout.name, np.ascontiguousarray(chunk).reshape(end - start, ROWS, units, -1), target[start:end])
        _check_finite(layout, target[start:end])


# the bits of the exponent: all set in infinities and not-a-number
_EXPONENTS = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}


def _check_finite(layout: PackedFormat, packed: Bytes) -> None:
    """Scales, minimums and float weights must be finite: one that is not would spoil every logit.

    Raises:
        ModelFileError: one is not.
    """
    kind, exponent = _EXPONENTS.get(layout.name, _EXPONENTS["F16"])
    ends = [*(start for _, start in layout.sections[1:]), layout.unit_bytes]
    for (section, start), end in zip(layout.sections, ends, strict=True):
        if section in ("d", "m", "floats"):
            bits = np.ascontiguousarray(packed[:, :, start:end]).view(kind)
            if ((bits & kind(exponent)) == exponent).any():
                raise ModelFileError(f"a {layout.name} weight or scale is not finite: fetch or convert the file again")


def _transpose_rows(blocks: Bytes) -> Bytes:
    """[R, 16, U, n bytes] to [R, U, n, 16]: one vector of 16 rows per byte position."""
    return blocks.transpose(0, 2, 3, 1)


def _pairs_of_bytes(blocks: Bytes) -> Bytes:
    """A 2-byte field per row, [R, 16, U, 2], to [R, U, 32]."""
    count, _, units, _ = blocks.shape
    return blocks.transpose(0, 2, 1, 3).reshape(count, units, 32)


def _quads(values: Bytes) -> Bytes:
    """[R, 16, U, columns] to [R, U, columns / 4, 64]: 4 neighbouring columns of each row side by side."""
    count, rows, units, columns = values.shape
    return values.reshape(count, rows, units, columns // 4, 4).transpose(0, 2, 3, 1, 4).reshape(count, units, columns // 4, 64)


def _nibbles(quads: Bytes) -> Bytes:
    """4-bit values [R, U, 8 B, 64] to [R, U, 256 B]: per sub-block, vector j holds columns 4j.. and 16 + 4j.. ."""
    count, units, vectors, _ = quads.shape
    blocks = quads.reshape(count, units, vectors // 8, 2, 4, 64)
    joined: Bytes = blocks[:, :, :, 0] | blocks[:, :, :, 1] << np.uint8(4)
    return joined.reshape(count, units, -1)


def _high1(quads: Bytes) -> Bytes:
    """1-bit values [R, U, 8 B, 64] to [R, U, 64 B]: bit j is logical vector j of the sub-block."""
    count, units, vectors, _ = quads.shape
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    blocks = quads.reshape(count, units, vectors // 8, 8, 64) << shifts
    joined: Bytes = np.bitwise_or.reduce(blocks, axis=3)
    return joined.reshape(count, units, -1)


def _pairs(quads: Bytes) -> Bytes:
    """2-bit values [R, U, 8 B, 64] to [R, U, 128 B]: field i of vector h is logical vector 4h + i."""
    count, units, vectors, _ = quads.shape
    shifts = 2 * np.arange(4, dtype=np.uint8)[:, None]
    blocks = quads.reshape(count, units, vectors // 4, 4, 64) << shifts
    joined: Bytes = np.bitwise_or.reduce(blocks, axis=3)
    return joined.reshape(count, units, -1)


def _place(target: Bytes, name: str, **sections: Bytes) -> None:
    layout = PACKED[name]
    for section, values in sections.items():
        start = layout.offset(section)
        flat = values.reshape(*target.shape[:2], -1)
        target[:, :, start : start + flat.shape[2]] = flat


def _split_nibbles(packed: Bytes) -> Bytes:
    """n bytes to 2n values: the low halves, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: Bytes) -> Bytes:
    """n bytes to 8n bits, lowest first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _pack_simple(name: str, blocks: Bytes, target: Bytes) -> None:
    """Q4_0: d, 16 nibbles. Q4_1: d, m. Q5_0: d, 4 bytes of high bits. Q5_1: d, m, high bits."""
    sections = {"d": _pairs_of_bytes(blocks[..., 0:2])}
    start = 2
    if name in ("Q4_1", "Q5_1"):
        sections["m"] = _pairs_of_bytes(blocks[..., 2:4])
        start = 4
    if name in ("Q5_0", "Q5_1"):
        sections["high1"] = _high1(_quads(_bits(blocks[..., start : start + 4])))
        start += 4
    sections["nibbles"] = _nibbles(_quads(_split_nibbles(blocks[..., start:])))
    _place(target, name, **sections)


def _pack_q8_0(name: str, blocks: Bytes, target: Bytes) -> None:
    _place(target, name, d=_pairs_of_bytes(blocks[..., 0:2]), bytes8=_quads(blocks[..., 2:]))


def _k_nibbles(packed: Bytes) -> Bytes:
    """128 bytes to 256 values: each 32 bytes are the low halves of 32 columns, then the high halves of the next 32."""
    chunks = packed.reshape(*packed.shape[:-1], 4, 32)
    return np.stack([chunks & 15, chunks >> 4], axis=-2).reshape(*packed.shape[:-1], 256)


def _pack_q45_k(name: str, blocks: Bytes, target: Bytes) -> None:
    """d, dmin, 12 scale bytes, then for Q5_K 32 bytes whose bit b is the high bit of sub-block b, then nibbles."""
    sections = {
        "d": _pairs_of_bytes(blocks[..., 0:2]),
        "m": _pairs_of_bytes(blocks[..., 2:4]),
        "scales": _transpose_rows(blocks[..., 4:16]),
    }
    start = 16
    if name == "Q5_K":
        bits = _bit_planes(blocks[..., 16:48])
        sections["high1"] = _high1(_quads(bits))
        start = 48
    sections["nibbles"] = _nibbles(_quads(_k_nibbles(blocks[..., start:])))
    _place(target, name, **sections)


def _bit_planes(packed: Bytes) -> Bytes:
    """32 bytes to 256 bits: bit b of each byte belongs to sub-block b."""
    bits: Bytes = packed[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return bits.reshape(*packed.shape[:-1], 256)


def _two_bits(packed: Bytes) -> Bytes:
    """64 bytes to 256 values: each 32 bytes hold 4 runs of 32 columns, lowest bits first."""
    chunks = packed.reshape(*packed.shape[:-1], 2, 1, 32)
    shifts: Bytes = np.arange(0, 8, 2, dtype=np.uint8)
    fields: Bytes = chunks >> shifts[:, None] & np.uint8(3)
    return fields.reshape(*packed.shape[:-1], 256)


def _pack_q6_k(name: str, blocks: Bytes, target: Bytes) -> None:
    """128 low halves (64 bytes: columns 0..63 low, then 64..127 high), 64 bytes of 2-bit fields, 16 scales, d."""
    low = blocks[..., 0:128].reshape(*blocks.shape[:-1], 2, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-1).reshape(*blocks.shape[:-1], 256)
    _place(
        target,
        name,
        nibbles=_nibbles(_quads(low)),
        pairs=_pairs(_quads(_two_bits(blocks[..., 128:192]))),
        scales=_transpose_rows(blocks[..., 192:208]),
        d=_pairs_of_bytes(blocks[..., 208:210]),
    )


def _pack_q3_k(name: str, blocks: Bytes, target: Bytes) -> None:
    """32 bytes whose bit b is the high bit of sub-block b, 64 bytes of 2-bit fields, 12 scale bytes, d."""
    bits = _bit_planes(blocks[..., 0:32])
    _place(
        target,
        name,
        pairs=_pairs(_quads(_two_bits(blocks[..., 32:96]))),
        high1=_high1(_quads(bits)),
        scales=_transpose_rows(blocks[..., 96:108]),
        d=_pairs_of_bytes(blocks[..., 108:110]),
    )


def _pack_q2_k(name: str, blocks: Bytes, target: Bytes) -> None:
    """16 bytes of scales and minimums, 64 bytes of 2-bit fields, d, dmin."""
    _place(
        target,
        name,
        pairs=_pairs(_quads(_two_bits(blocks[..., 16:80]))),
        scales=_transpose_rows(blocks[..., 0:16]),
        d=_pairs_of_bytes(blocks[..., 80:82]),
        m=_pairs_of_bytes(blocks[..., 82:84]),
    )


def _pack_floats(name: str, blocks: Bytes, target: Bytes) -> None:
    """[R, 16, U, 32 values] to one vector of 16 rows per column."""
    width = 4 if name == "F32" else 2
    count, rows, units, _ = blocks.shape
    values = blocks.reshape(count, rows, units, 32, width).transpose(0, 2, 3, 1, 4)
    _place(target, name, floats=values)


_PACKERS: dict[str, Callable[[str, Bytes, Bytes], None]] = {
    "F32": _pack_floats,
    "F16": _pack_floats,
    "BF16": _pack_floats,
    "Q4_0": _pack_simple,
    "Q4_1": _pack_simple,
    "Q5_0": _pack_simple,
    "Q5_1": _pack_simple,
    "Q8_0": _pack_q8_0,
    "Q2_K": _pack_q2_k,
    "Q3_K": _pack_q3_k,
    "Q4_K": _pack_q45_k,
    "Q5_K": _pack_q45_k,
    "Q6_K": _pack_q6_k,
}
