"""Rotary embedding, head norms and the new keys' and values' way into pages, against the twin, on every level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from headrace.kernels import reference
from headrace.kernels.fields import rope as fields_of_rope
from headrace.kernels.tables import TOKEN_PAGE, TOKEN_POSITION, TOKEN_SLOT, TOKEN_WORDS

KERNELS = ["rope", "rope.commit"]
EPSILON = 1e-6
ROUNDING = 2.0**-24
HALF_ROUNDING = 2.0**-11
HALF_SUBNORMAL_STEP = 2.0**-25
PAGE_TOKENS = 32
LAYER_OFFSET = 128
POSITIONS = [0, 3, 31, 32, 40, 2047]
SLOTS = [(0, 0), (0, 3), (0, 31), (1, 0), (1, 8), (2, 31)]  # (page, slot) of each token


@dataclass(frozen=True)
class Shape:
    """Heads of one case."""

    heads: int
    kv_heads: int
    width: int
    rotated: int
    norms: bool = False


SHAPES = {
    "smollm2": Shape(9, 3, 64, 64),
    "gemma3": Shape(4, 1, 256, 256, norms=True),
    "partial": Shape(2, 2, 128, 64),
    "narrow": Shape(3, 1, 64, 32, norms=True),
}


@dataclass
class Case:
    """Inputs, and what the kernel made of them."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    query_norm: np.ndarray
    key_norm: np.ndarray
    table: np.ndarray
    out: np.ndarray
    pages: np.ndarray


def _run(
    kernels: Any,
    rng: np.random.Generator,
    shape: Shape,
    scale: float,
    *,
    block_tokens: int = 4,
    repeat: bool = False,
    special: tuple[float, ...] = (),
) -> Case:
    tokens, width = len(POSITIONS), shape.width
    row = rng.normal(size=(tokens, (shape.heads + 2 * shape.kv_heads) * width)).astype(np.float32)  # one row of q, k, v
    if special:
        row.reshape(-1)[::5] = np.resize(np.float32(special), -(-row.size // 5))
    qkv = kernels.array(row)
    page_bytes = LAYER_OFFSET + shape.kv_heads * 4 * width * PAGE_TOKENS
    pages = kernels.array(np.full((3, page_bytes), 0x3C, np.uint8))
    table = kernels.zeros((tokens, TOKEN_WORDS), np.int64)
    for t, (position, (page, slot)) in enumerate(zip(POSITIONS, SLOTS, strict=True)):
        table[t, [TOKEN_POSITION // 8, TOKEN_PAGE // 8, TOKEN_SLOT // 8]] = (position, pages[page].ctypes.data, slot)
    norms = [kernels.array(rng.normal(size=width).astype(np.float32)) for _ in range(2)]
    angles = kernels.array(reference.angles(max(POSITIONS) + 1, shape.rotated, 10_000.0))
    out = kernels.zeros((tokens, shape.heads * width + 16))
    start = qkv.ctypes.data
    kernels.run(
        "rope",
        "rope.commit",
        fields_of_rope,
        -(-tokens // block_tokens),
        repeat=repeat,
        queries=start,
        keys=start + 4 * shape.heads * width,
        values=start + 4 * (shape.heads + shape.kv_heads) * width,
        queries_stride=qkv.strides[0],
        keys_stride=qkv.strides[0],
        values_stride=qkv.strides[0],
        query_norm=norms[0] if shape.norms else 0,
        key_norm=norms[1] if shape.norms else 0,
        epsilon=EPSILON,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        width=width,
        rotated=shape.rotated,
        angles=angles,
        token_table=table,
        tokens=tokens,
        block_tokens=block_tokens,
        output=out,
        output_stride=out.strides[0],
        layer_offset=LAYER_OFFSET,
        page_tokens=PAGE_TOKENS,
        query_scale=scale,
    )
    queries, keys, values = (
        part.reshape(tokens, -1, width)
        for part in np.split(row, [shape.heads * width, (shape.heads + shape.kv_heads) * width], axis=1)
    )
    return Case(queries, keys, values, *norms, angles, out, pages)


def _stored(case: Case, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """The tokens' keys and values [T, G, D] out of their pages."""
    pairs = [reference.keys_and_values(page[LAYER_OFFSET:], shape.kv_heads, shape.width, PAGE_TOKENS) for page in case.pages]
    return tuple(np.stack([pairs[page][part][slot] for page, slot in SLOTS]) for part in (0, 1))  # type: ignore[return-value]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rope_equals_twin(kernels: Any, rng: np.random.Generator, shape: Shape) -> None:
    scale = shape.width**-0.5
    case = _run(kernels, rng, shape, scale)
    queries, keys = case.queries, case.keys
    if shape.norms:
        queries = reference.rms_norm(queries, case.query_norm, EPSILON)
        keys = reference.rms_norm(keys, case.key_norm, EPSILON)
    # a norm is off by (D / 16 + 8) / 2 + 4 roundings (see `test_rows.py`), a rotation by 3 of the pair's length, a scale by 1
    roundings = ((shape.width / 16 + 8) / 2 + 4 if shape.norms else 0) + 4
    bound = roundings * ROUNDING * np.abs(keys).max(axis=2, keepdims=True) * 2
    expected = reference.rotate(queries, case.table, POSITIONS) * scale
    result = case.out[:, : shape.heads * shape.width].reshape(expected.shape)
    assert (np.abs(result - expected) <= roundings * ROUNDING * 2 * np.abs(queries).max(axis=2, keepdims=True) * scale).all()
    assert not case.out[:, shape.heads * shape.width :].any()
    stored_keys, stored_values = _stored(case, shape)
    expected = reference.rotate(keys, case.table, POSITIONS)
    assert (np.abs(stored_keys - expected) <= bound + HALF_ROUNDING * np.abs(expected) + HALF_SUBNORMAL_STEP).all()
    assert stored_values.tobytes() == reference.to_f16(case.values).tobytes()


def test_rope_leaves_other_slots_alone(kernels: Any, rng: np.random.Generator) -> None:
    shape = SHAPES["smollm2"]
    case = _run(kernels, rng, shape, 1.0)
    assert (case.pages[:, :LAYER_OFFSET] == 0x3C).all()
    untouched = np.full(1, 0x3C3C, np.uint16).view(np.float16)
    for page, raw in enumerate(case.pages):
        keys, values = reference.keys_and_values(raw[LAYER_OFFSET:], shape.kv_heads, shape.width, PAGE_TOKENS)
        others = [slot for slot in range(PAGE_TOKENS) if (page, slot) not in SLOTS]
        assert (keys[others] == untouched).all()
        assert (values[others] == untouched).all()


def test_rope_does_not_depend_on_blocks_or_repetition(kernels: Any) -> None:
    shape = SHAPES["narrow"]
    whole = _run(kernels, np.random.default_rng(1), shape, 0.125, block_tokens=64)
    for block_tokens, repeat in [(1, False), (4, True)]:
        cut = _run(kernels, np.random.default_rng(1), shape, 0.125, block_tokens=block_tokens, repeat=repeat)
        assert cut.out.tobytes() == whole.out.tobytes()
        assert cut.pages.tobytes() == whole.pages.tobytes()


def test_page_layout_is_as_documented() -> None:
    """keys [P / 16][D][16], values [D / 16][P][16], one KV head after the other."""
    keys = np.arange(32 * 2 * 64).reshape(32, 2, 64).astype(np.float16)
    values = -keys
    halves = reference.page_of(keys, values).view(np.float16)
    head = halves[4 * 64 * 32 // 2 :]  # of head 1: 2 * D * P bytes of keys, then values
    assert head[(1 * 64 + 5) * 16 + 3] == keys[16 + 3, 1, 5]
    assert head[64 * 32 + (2 * 32 + 19) * 16 + 7] == values[19, 1, 2 * 16 + 7]
    back = reference.keys_and_values(halves.view(np.uint8), 2, 64, 32)
    assert back[0].tobytes() == keys.tobytes()
    assert back[1].tobytes() == values.tobytes()


@pytest.mark.parametrize("name", SHAPES)
def test_rope_writes_only_finite_values_into_pages(kernels: Any, name: str) -> None:
    """Attention weighs what lies behind the last token of a page with 0, which makes no number of what is not finite."""
    shape = SHAPES[name]
    special = (np.inf, -np.inf, np.nan, 3e38, -3e38, 65520.0)
    with np.errstate(all="ignore"):
        case = _run(kernels, np.random.default_rng(5), shape, 1.0, special=special)
    pages = case.pages.view(np.float16)
    assert np.isfinite(pages).all()
    assert np.abs(pages).max() == np.float16(65504.0)
