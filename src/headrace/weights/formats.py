"""Tensor formats of GGUF: how many bytes a block of weights takes, and how to turn it into float32.

A row of a tensor is a whole number of blocks; a block holds `block_weights` weights in `block_bytes` bytes, little-endian.
Each `_unpack_*` function below documents the bytes of its block; the structured dtype above it is the same layout for NumPy.
Source of all layouts: ggml's `ggml-common.h` (block structs) and `ggml-quants.c` (order of weights inside a block),
https://github.com/ggml-org/ggml. Letters: `d` is the block's scale and `dmin` the scale of its minima (both float16),
`q` an unsigned integer of few bits, `N` a number of blocks.

Invariant: the result equals, bit for bit, what the `gguf` package's own dequantiser gives (NaN payloads excepted).
Does not know files, tensors' names or kernels: packing and kernels work on raw bytes, this is the slow and exact way.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Blocks = npt.NDArray[Any]
"""Structured array [N] of blocks."""
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_CHUNK_WEIGHTS = 1 << 18  # intermediates of one chunk stay near 1 MiB each, inside the cache, however big the tensor


@dataclass(frozen=True)
class TensorFormat:
    """One way to store weights. `gguf_type` is ggml's type id, as written in a GGUF file."""

    name: str
    gguf_type: int
    block_weights: int
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bytes per block over weights per block, in bits: 4.5 for Q4_0."""
        return self.block_bytes * 8 / self.block_weights

    @property
    def quantised(self) -> bool:
        """Whether weights share a scale per block; False for the plain float formats."""
        return self.block_weights > 1

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights.

        Raises:
            ModelFileError: `columns` is not a whole number of blocks.
        """
        if columns < 0 or columns % self.block_weights:
            raise ModelFileError(
                f"a row of {columns} weights is not a whole number of {self.name} blocks of {self.block_weights}; "
                "convert the model again"
            )
        return columns // self.block_weights * self.block_bytes


F32 = TensorFormat("F32", 0, 1, 4)
F16 = TensorFormat("F16", 1, 1, 2)
Q4_0 = TensorFormat("Q4_0", 2, 32, 18)
Q4_1 = TensorFormat("Q4_1", 3, 32, 20)
Q5_0 = TensorFormat("Q5_0", 6, 32, 22)
Q5_1 = TensorFormat("Q5_1", 7, 32, 24)
Q8_0 = TensorFormat("Q8_0", 8, 32, 34)
Q2_K = TensorFormat("Q2_K", 10, 256, 84)
Q3_K = TensorFormat("Q3_K", 11, 256, 110)
Q4_K = TensorFormat("Q4_K", 12, 256, 144)
Q5_K = TensorFormat("Q5_K", 13, 256, 176)
Q6_K = TensorFormat("Q6_K", 14, 256, 210)
BF16 = TensorFormat("BF16", 30, 1, 2)

ALL_FORMATS: tuple[TensorFormat, ...] = (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)
"""Every format that can be read, plain ones first."""

FORMATS: Mapping[int | str, TensorFormat] = MappingProxyType(
    {**{each.gguf_type: each for each in ALL_FORMATS}, **{each.name: each for each in ALL_FORMATS}}
)
"""A format by its GGUF type id or by its name: `FORMATS[3] is FORMATS["Q4_1"]`."""


def dequantise(tensor_format: TensorFormat, raw: Bytes) -> Floats:
    """Weights of whole blocks as float32.

    Args:
        tensor_format: the format of every block in `raw`.
        raw: uint8 [..., num_blocks * block_bytes].

    Returns:
        A new array, float32 [..., num_blocks * block_weights].

    Raises:
        ModelFileError: the last axis is not a whole number of blocks.
    """
    assert raw.dtype == np.uint8
    assert raw.ndim > 0
    row_bytes = raw.shape[-1]
    if row_bytes % tensor_format.block_bytes:
        raise ModelFileError(
            f"{row_bytes} bytes are not a whole number of {tensor_format.name} blocks of {tensor_format.block_bytes} bytes; "
            "fetch the model again"
        )
    layout, unpack = _CODECS[tensor_format.name]
    blocks = np.ascontiguousarray(raw).reshape(-1).view(layout)
    weights = np.empty((blocks.size, tensor_format.block_weights), np.float32)
    step = _CHUNK_WEIGHTS // tensor_format.block_weights
    with np.errstate(all="ignore"):  # scales of a damaged file may be inf or NaN; the result says so
        for start in range(0, blocks.size, step):
            weights[start : start + step] = unpack(blocks[start : start + step])
    return weights.reshape(*raw.shape[:-1], row_bytes // tensor_format.block_bytes * tensor_format.block_weights)


# Pieces that several formats share.

_BITS_8 = np.arange(8, dtype=np.uint8)
_BITS_32 = np.arange(32, dtype=np.uint32)
_PAIRS = np.array([0, 2, 4, 6], np.uint8)
_NIBBLES = np.array([0, 4], np.uint8)


def _column(values: npt.NDArray[Any]) -> Floats:
    """One float16 per block [N] as a float32 column [N, 1]."""
    return values.astype(np.float32)[:, np.newaxis]


def _fields(packed: Bytes, run: int, shifts: Bytes, mask: int) -> Bytes:
    """Bit fields in the order of the weights.

    `packed` [N, K] is cut into runs of `run` bytes; the field at the first shift of a whole run comes first, then the field
    at the next shift: [N, K * len(shifts)].
    """
    runs = packed.reshape(len(packed), -1, 1, run)
    fields = (runs >> shifts[:, np.newaxis]) & np.uint8(mask)
    return fields.reshape(len(packed), -1)


def _scaled(scales: Floats, q: npt.NDArray[Any], minima: Floats | None = None) -> Floats:
    """Multiplies scales [N, S] by q [N, W], less minima [N, S]: each scale covers W / S consecutive weights."""
    grouped = scales[:, :, np.newaxis] * q.reshape(*scales.shape, -1).astype(np.float32)
    if minima is not None:
        grouped -= minima[:, :, np.newaxis]
    return grouped.reshape(len(scales), -1)


def _six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minima of Q4_K and Q5_K out of 12 bytes [N, 12]: ([N, 8], [N, 8]).

    Bytes 0-3 hold scales 0-3 in their low six bits, bytes 4-7 minima 0-3. Byte 8 + i holds the low four bits of scale 4 + i
    in its low nibble and of minimum 4 + i in its high one; their upper two bits are the top bits of bytes i and 4 + i.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales, minima


# Plain formats: a block is one number.

_F32 = np.dtype("<f4")
_F16 = np.dtype("<f2")
_BF16 = np.dtype("<u2")


def _unpack_float(blocks: Blocks) -> Floats:
    """F32 and F16: one IEEE 754 number, 4 or 2 bytes."""
    return _column(blocks)


def _unpack_bf16(blocks: Blocks) -> Floats:
    """BF16: 2 bytes, the upper half of the float32 with the same sign, exponent and leading seven bits of mantissa."""
    return (blocks.astype(np.uint32) << 16).view(np.float32)[:, np.newaxis]


# Blocks of 32 weights. In those of 4 and 5 bits, byte i of `qs` holds weight i in the low nibble, 16 + i in the high one.

_Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
_Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
_Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])


def _fifth_bits(blocks: Blocks) -> Bytes:
    """Bit i of the little-endian word `qh` is the top bit of weight i: 0 or 16, [N, 32]."""
    words = np.ascontiguousarray(blocks["qh"]).view("<u4")
    return ((words >> _BITS_32) & 1).astype(np.uint8) << np.uint8(4)


def _unpack_q4_0(blocks: Blocks) -> Floats:
    """Q4_0, 18 bytes: 0-1 `d`; 2-17 `qs`. Weight = d * (q - 8)."""
    q = _fields(blocks["qs"], 16, _NIBBLES, 15).astype(np.int8) - np.int8(8)
    return _scaled(_column(blocks["d"]), q)


def _unpack_q4_1(blocks: Blocks) -> Floats:
    """Q4_1, 20 bytes: 0-1 `d`; 2-3 `m`, the minimum (float16); 4-19 `qs`. Weight = d * q + m."""
    return _scaled(_column(blocks["d"]), _fields(blocks["qs"], 16, _NIBBLES, 15)) + _column(blocks["m"])


def _unpack_q5_0(blocks: Blocks) -> Floats:
    """Q5_0, 22 bytes: 0-1 `d`; 2-5 `qh`, the fifth bits; 6-21 `qs`, the low four. Weight = d * (q - 16)."""
    q = (_fields(blocks["qs"], 16, _NIBBLES, 15) | _fifth_bits(blocks)).astype(np.int8) - np.int8(16)
    return _scaled(_column(blocks["d"]), q)


def _unpack_q5_1(blocks: Blocks) -> Floats:
    """Q5_1, 24 bytes: 0-1 `d`; 2-3 `m` (float16); 4-7 `qh`, the fifth bits; 8-23 `qs`, the low four. Weight = d * q + m."""
    q = _fields(blocks["qs"], 16, _NIBBLES, 15) | _fifth_bits(blocks)
    return _scaled(_column(blocks["d"]), q) + _column(blocks["m"])


def _unpack_q8_0(blocks: Blocks) -> Floats:
    """Q8_0, 34 bytes: 0-1 `d`; 2-33 one signed byte per weight. Weight = d * q."""
    return _scaled(_column(blocks["d"]), blocks["qs"])


# Blocks of 256 weights ("K-quants"): the block's scale multiplies small integer scales of its groups of 16 or 32 weights.

_Q2_K = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
_Q3_K = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
_Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
_Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
_Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])


def _unpack_q2_k(blocks: Blocks) -> Floats:
    """Q2_K, 84 bytes: 0-15 `scales`; 16-79 `qs`; 80-81 `d`; 82-83 `dmin`.

    Group g of 16 weights has scale `scales[g] & 15` and minimum `scales[g] >> 4`.
    Each 32 bytes of `qs` hold 128 weights: bits 0-1 of the 32 bytes, then bits 2-3, 4-5, 6-7.
    Weight = d * scale * q - dmin * minimum.
    """
    scales = _column(blocks["d"]) * (blocks["scales"] & 15).astype(np.float32)
    minima = _column(blocks["dmin"]) * (blocks["scales"] >> 4).astype(np.float32)
    return _scaled(scales, _fields(blocks["qs"], 32, _PAIRS, 3), minima)


def _unpack_q3_k(blocks: Blocks) -> Floats:
    """Q3_K, 110 bytes: 0-31 `hmask`; 32-95 `qs`; 96-107 `scales`; 108-109 `d`.

    `qs` holds the low two bits of q as in Q2_K; bit j of `hmask[i]` is the third bit of weight 32 * j + i.
    Group g of 16 weights has a 6-bit scale: its low four bits are the low nibbles of bytes 0-7 (g < 8) or their high nibbles
    (g >= 8), its upper two are bits 2 * (g // 4) of byte 8 + g % 4.
    Weight = d * (scale - 32) * (q - 4).
    """
    low = _fields(blocks["scales"][:, :8], 8, _NIBBLES, 15)
    high = _fields(blocks["scales"][:, 8:], 4, _PAIRS, 3)
    group_scales = (low | high << 4).astype(np.int8) - np.int8(32)
    q = _fields(blocks["qs"], 32, _PAIRS, 3) | _fields(blocks["hmask"], 32, _BITS_8, 1) << 2
    return _scaled(_column(blocks["d"]) * group_scales.astype(np.float32), q.astype(np.int8) - np.int8(4))


def _unpack_q4_k(blocks: Blocks) -> Floats:
    """Q4_K, 144 bytes: 0-1 `d`; 2-3 `dmin`; 4-15 `scales` (see `_six_bit_scales`); 16-143 `qs`.

    Each 32 bytes of `qs` hold 64 weights: the low nibbles first, then the high ones. Groups of 32 weights.
    Weight = d * scale * q - dmin * minimum.
    """
    scales, minima = _group_scales(blocks)
    return _scaled(scales, _fields(blocks["qs"], 32, _NIBBLES, 15), minima)


def _unpack_q5_k(blocks: Blocks) -> Floats:
    """Q5_K, 176 bytes: 0-1 `d`; 2-3 `dmin`; 4-15 `scales` (see `_six_bit_scales`); 16-47 `qh`; 48-175 `qs`.

    `qs` holds the low four bits of q as in Q4_K; bit j of `qh[i]` is the fifth bit of weight 32 * j + i. Groups of 32.
    Weight = d * scale * q - dmin * minimum.
    """
    scales, minima = _group_scales(blocks)
    q = _fields(blocks["qs"], 32, _NIBBLES, 15) | _fields(blocks["qh"], 32, _BITS_8, 1) << 4
    return _scaled(scales, q, minima)


def _group_scales(blocks: Blocks) -> tuple[Floats, Floats]:
    """The products d * scale and dmin * minimum of the eight groups of Q4_K and Q5_K: ([N, 8], [N, 8])."""
    scales, minima = _six_bit_scales(blocks["scales"])
    return _column(blocks["d"]) * scales.astype(np.float32), _column(blocks["dmin"]) * minima.astype(np.float32)


def _unpack_q6_k(blocks: Blocks) -> Floats:
    """Q6_K, 210 bytes: 0-127 `ql`; 128-191 `qh`; 192-207 `scales` (signed bytes); 208-209 `d`.

    Each 64 bytes of `ql` hold the low four bits of 128 weights: the 64 low nibbles first, then the 64 high ones.
    Each 32 bytes of `qh` hold their upper two bits: bits 0-1 of the 32 bytes, then bits 2-3, 4-5, 6-7. Groups of 16.
    Weight = d * scale * (q - 32).
    """
    scales = _column(blocks["d"]) * blocks["scales"].astype(np.float32)
    q = _fields(blocks["ql"], 64, _NIBBLES, 15) | _fields(blocks["qh"], 32, _PAIRS, 3) << 4
    return _scaled(scales, q.astype(np.int8) - np.int8(32))


_CODECS: Mapping[str, tuple[np.dtype[Any], Callable[[Blocks], Floats]]] = {
    "F32": (_F32, _unpack_float),
    "F16": (_F16, _unpack_float),
    "BF16": (_BF16, _unpack_bf16),
    "Q4_0": (_Q4_0, _unpack_q4_0),
    "Q4_1": (_Q4_1, _unpack_q4_1),
    "Q5_0": (_Q5_0, _unpack_q5_0),
    "Q5_1": (_Q5_1, _unpack_q5_1),
    "Q8_0": (_Q8_0, _unpack_q8_0),
    "Q2_K": (_Q2_K, _unpack_q2_k),
    "Q3_K": (_Q3_K, _unpack_q3_k),
    "Q4_K": (_Q4_K, _unpack_q4_k),
    "Q5_K": (_Q5_K, _unpack_q5_k),
    "Q6_K": (_Q6_K, _unpack_q6_k),
}
