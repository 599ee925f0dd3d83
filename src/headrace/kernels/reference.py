"""The slow NumPy twin of every kernel: what it computes, in as few lines as it takes to say so.

A twin takes the kernel's inputs as arrays and computes in float64, so that its own rounding is nothing beside the
kernel's; where a kernel is exact (integers, quantisation, embedding rows, float16) so is its twin, bit for bit.
Packed matrices enter as `reference_packed.Fields`.

Letters: `T` tokens, `H` query heads, `G` KV heads, `D` head width, `E` embedding width, `V` vocabulary, `P` tokens in
a page, `S` tokens of the past; for a matrix `N` rows and `K` columns, for a row `B` = K / 32 blocks.
Knows no operation records, no blocks of work and no compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.kernels import reference_packed
from headrace.kernels.packed import BLOCK_COLUMNS, PACKED, RECORD_BYTES, ROWS, quantised_row_bytes
from headrace.kernels.reference_packed import Fields

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]

F16_LARGEST = 65504.0
EXP_SMALLEST, EXP_LARGEST = -87.0, 88.0


# ---- elementary functions ----


def exp(x: Array) -> Doubles:
    """e^x, zero from EXP_SMALLEST down, constant from EXP_LARGEST up; zero for not-a-number."""
    wide = x.astype(np.float64)
    return np.where(wide > EXP_SMALLEST, np.exp(np.clip(wide, EXP_SMALLEST, EXP_LARGEST)), 0.0)


def sigmoid(x: Array) -> Doubles:
    """1 / (1 + e^-x)."""
    return np.exp(-np.logaddexp(0.0, -x.astype(np.float64)))


def silu(x: Array) -> Doubles:
    """x * sigmoid(x)."""
    return x.astype(np.float64) * sigmoid(x)


def gelu(x: Array) -> Doubles:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the tanh form of GELU."""
    wide = x.astype(np.float64)
    return 0.5 * wide * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (wide + 0.044715 * wide**3)))


def to_f16(x: Floats) -> Halves:
    """Rounded to nearest even, clamped to finite values; not-a-number becomes the lowest."""
    clamped = np.where(x > -F16_LARGEST, x, np.float32(-F16_LARGEST))
    return np.where(clamped < F16_LARGEST, clamped, np.float32(F16_LARGEST)).astype(np.float16)


# ---- quantised activations ----


@dataclass(frozen=True)
class QuantisedRows:
    """Rows of activations as signed bytes `q` int8 [T, K] with one `scale` float32 [T, B] per 32 columns."""

    q: npt.NDArray[np.int8]
    scale: Floats

    @property
    def sums(self) -> npt.NDArray[np.int64]:
        """Sum of each block's integers, [T, B]."""
        return self._blocks().sum(axis=2)

    @property
    def first_sums(self) -> npt.NDArray[np.int64]:
        """Sum of the integers of each block's first 16 columns, [T, B]."""
        return self._blocks()[:, :, :16].sum(axis=2)

    def encode(self) -> npt.NDArray[np.uint8]:
        """The rows as the kernels read them (see `packed.py`), uint8 [T, quantised_row_bytes(K)]."""
        tokens, columns = self.q.shape
        records = np.zeros((tokens, columns // BLOCK_COLUMNS, 4), np.int32)
        records[:, :, 0] = self.scale.view(np.int32)
        records[:, :, 1] = (self.scale * self.sums.astype(np.float32)).view(np.int32)
        records[:, :, 2] = self.sums
        records[:, :, 3] = self.first_sums
        return np.concatenate([self.q.view(np.uint8), records.reshape(tokens, -1).view(np.uint8)], axis=1)

    @classmethod
    def decode(cls, raw: npt.NDArray[np.uint8], columns: int) -> QuantisedRows:
        """The inverse of `encode`; bytes after a row are left out."""
        records = np.ascontiguousarray(raw[:, columns : quantised_row_bytes(columns)])
        scale = records.reshape(len(raw), -1, RECORD_BYTES)[:, :, :4]
        return cls(raw[:, :columns].view(np.int8), np.ascontiguousarray(scale).view(np.float32)[:, :, 0])

    def _blocks(self) -> npt.NDArray[np.int64]:
        return self.q.astype(np.int64).reshape(len(self.q), -1, BLOCK_COLUMNS)


def quantise(x: Floats) -> QuantisedRows:
    """float32 [T, K], finite, to signed bytes: the largest magnitude of a block becomes 127. Exactly what the kernel gives."""
    blocks = x.reshape(len(x), -1, BLOCK_COLUMNS)
    largest = np.abs(blocks).max(axis=2)
    scale = largest / np.float32(127.0)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest > 0, np.float32(127.0) / largest, np.float32(0.0))
    inverse = np.where(inverse < np.float32(3.0e38), inverse, np.float32(0.0))  # a largest value too small to divide by
    q = np.rint(blocks * inverse[:, :, np.newaxis]).astype(np.int8)
    return QuantisedRows(q.reshape(x.shape), scale)


# ---- matrix products ----


@dataclass(frozen=True)
class Product:
    """A matrix product `values` [T, N], with the sum of its terms' magnitudes [T, N] and their number.

    These bound what any order of float32 additions can give: |result - values| <= (terms + a few) * 2^-24 * magnitudes.
    """

    values: Doubles
    magnitudes: Doubles
    num_terms: int


def matmul(name: str, fields: Fields, x: QuantisedRows) -> Product:
    """out[t, n] = sum over k of weights[n, k] * activations[t, k]; integer sums of sub-blocks are exact."""
    scale, least = reference_packed.sub_block_scales(name, fields)
    subs = scale.shape[1]
    weights = reference_packed.integers(name, fields).reshape(len(scale), subs, -1)
    tokens = x.q.astype(np.int64).reshape(len(x.q), subs, -1)
    per_unit = subs // fields.d.shape[1]
    x_scale = np.repeat(x.scale.astype(np.float64), subs // x.scale.shape[1], axis=1)
    d = np.repeat(fields.d.astype(np.float64), per_unit, axis=1) * scale
    terms = np.einsum("nsw,tsw->tns", weights, tokens) * d * x_scale[:, np.newaxis, :]
    values, magnitudes = terms.sum(axis=2), np.abs(terms).sum(axis=2)
    num_terms = subs
    if name in reference_packed.MINIMUM_FORMATS:
        m = np.repeat(fields.m.astype(np.float64), per_unit, axis=1)
        m = m if PACKED[name].unit_columns == BLOCK_COLUMNS else -(m * least)
        offsets = m * (tokens.sum(axis=2) * x_scale)[:, np.newaxis, :]
        values, magnitudes = values + offsets.sum(axis=2), magnitudes + np.abs(offsets).sum(axis=2)
        num_terms += subs
    return Product(values, magnitudes, num_terms)


def matmul_floats(name: str, fields: Fields, x: Floats) -> Product:
    """`matmul` for the float formats, whose activations are float32 [T, K]."""
    terms = reference_packed.floats(name, fields).astype(np.float64) * x.astype(np.float64)[:, np.newaxis, :]
    return Product(terms.sum(axis=2), np.abs(terms).sum(axis=2), x.shape[1])


def gate(values: Array, function: str) -> Doubles:
    """f(gate) * up: of groups of 16 columns [T, N], even ones are gates and odd ones ups; [T, N / 2]."""
    pairs = values.reshape(len(values), -1, 2, ROWS).astype(np.float64)
    result = {"silu": silu, "gelu": gelu}[function](pairs[:, :, 0]) * pairs[:, :, 1]
    return result.reshape(len(values), -1)


# ---- rows ----


def rms_norm(x: Array, weight: Array, epsilon: float) -> Doubles:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis."""
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + epsilon) * weight.astype(np.float64)


def rows(
    x: Floats,
    *,
    addend: Floats | None = None,
    addend_norm: Floats | None = None,
    weight: Floats | None = None,
    epsilon: float = 0.0,
) -> tuple[Doubles, Doubles]:
    """(sums, normed sums), both [T, E]: the addend is normed by itself first if it has a norm, the sum if there is a weight."""
    sums = x.astype(np.float64)
    if addend is not None:
        sums = sums + (addend if addend_norm is None else rms_norm(addend, addend_norm, epsilon))
    return sums, sums if weight is None else rms_norm(sums, weight, epsilon)


def embed(name: str, fields: Fields, ids: Sequence[int], scale: float) -> Floats:
    """Rows of the embedding matrix [V, E] times a scale, float32 [T, E]; exactly what the kernel gives."""
    chosen = list(ids)
    some = Fields(
        fields.q[chosen],
        fields.scales[chosen],
        fields.d[chosen] if fields.d.size else fields.d,
        fields.m[chosen] if fields.m.size else fields.m,
    )
    return reference_packed.dequantise(name, some) * np.float32(scale)


# ---- rotary embedding and pages ----


def angles(num_positions: int, rotated: int, base: float) -> Floats:
    """The kernel's table, float32 [positions, rotated]: cosines, then sines, of position * base^(-2i / rotated)."""
    frequencies = base ** (-2.0 * np.arange(rotated // 2) / rotated)
    angle = np.arange(num_positions)[:, np.newaxis] * frequencies
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def rotate(x: Array, table: Floats, positions: Sequence[int]) -> Doubles:
    """Heads [T, heads, D] turned by their position's angles: dimensions i and i + rotated / 2 together, the rest kept."""
    half = table.shape[1] // 2
    chosen = table[list(positions)].astype(np.float64)[:, np.newaxis, :]
    cos, sin = chosen[:, :, :half], chosen[:, :, half:]
    wide = x.astype(np.float64)
    first, second = wide[:, :, :half], wide[:, :, half : 2 * half]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, wide[:, :, 2 * half :]], axis=2)


def page_of(keys: Halves, values: Halves) -> npt.NDArray[np.uint8]:
    """One layer of a page, uint8 [G * 4 * D * P], out of keys and values [P, G, D]; see `rope.py` for the layout."""
    page_tokens, kv_heads, width = keys.shape
    parts = []
    for g in range(kv_heads):
        panels = keys[:, g].reshape(page_tokens // 16, 16, width).transpose(0, 2, 1)
        strips = values[:, g].reshape(page_tokens, width // 16, 16).transpose(1, 0, 2)
        parts += [np.ascontiguousarray(panels).reshape(-1), np.ascontiguousarray(strips).reshape(-1)]
    return np.concatenate(parts).view(np.uint8)


def keys_and_values(page: npt.NDArray[np.uint8], kv_heads: int, width: int, page_tokens: int) -> tuple[Halves, Halves]:
    """The inverse of `page_of`: keys and values, float16 [P, G, D]."""
    parts = page.view(np.float16).reshape(kv_heads, 2, width * page_tokens)
    keys = parts[:, 0].reshape(kv_heads, page_tokens // 16, width, 16).transpose(1, 3, 0, 2)
    values = parts[:, 1].reshape(kv_heads, width // 16, page_tokens, 16).transpose(2, 0, 1, 3)
    return keys.reshape(page_tokens, kv_heads, width), values.reshape(page_tokens, kv_heads, width)


# ---- attention ----


def attention(queries: Floats, keys: Halves, values: Halves, positions: Sequence[int], window: int = 0) -> Doubles:
    """Softmax attention, [T, H, D], of scaled queries [T, H, D] over keys and values [S, G, D].

    A query at position p sees the tokens max(0, p - window + 1) .. p, all up to p if the window is 0. Query head h uses
    KV head h // (H / G).
    """
    group = queries.shape[1] // keys.shape[1]
    k = np.repeat(keys.astype(np.float64), group, axis=1)
    v = np.repeat(values.astype(np.float64), group, axis=1)
    result = np.zeros(queries.shape)
    for t, position in enumerate(positions):
        seen = slice(max(0, position - window + 1) if window else 0, position + 1)
        scores = np.einsum("hd,shd->hs", queries[t].astype(np.float64), k[seen])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        result[t] = np.einsum("hs,shd->hd", weights, v[seen])
    return result


def merge(states: Sequence[tuple[Array, float, float]]) -> Doubles:
    """One head's output [D] out of states (o [D], m, l) of disjoint runs of tokens; a state with m = -inf saw none."""
    top = max(m for _, m, _ in states)
    shares = [(np.exp(m - top), o, l) for o, m, l in states if np.isfinite(m)]
    total = sum(share * l for share, _, l in shares)
    result: Doubles = sum((share * o.astype(np.float64) for share, o, _ in shares), np.zeros(len(states[0][0]))) / total
    return result


# ---- reductions ----


def chosen_token(logits: Floats) -> int:
    """The lowest id of the largest of float32 [V] logits; -1 if one is not finite."""
    return int(logits.argmax()) if np.isfinite(logits).all() else -1
