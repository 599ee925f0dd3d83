"""Attention over pages against a plain softmax, and the same bits however tokens and segments are shared out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from headrace.kernels import reference, reference_pages
from headrace.kernels.fields import attention as fields_of_attention
from headrace.kernels.packed import quantised_row_bytes
from headrace.kernels.page_formats import F16, Q4, Q8, head_bytes
from headrace.kernels.tables import (
    ENTRY_END_SEGMENT,
    ENTRY_KV_HEAD,
    ENTRY_NUM_TOKENS,
    ENTRY_PAGES,
    ENTRY_POSITION,
    ENTRY_SEGMENT,
    ENTRY_STATES,
    ENTRY_TOKEN,
    ENTRY_WORDS,
    MERGE_ENTRY_WORDS,
    MERGE_NUM_STATES,
    MERGE_STATES,
    MERGE_STATES_STRIDE,
    SEGMENT_TOKENS,
    state_bytes,
)

GROUPS = (1, 2, 3, 4, 5, 8)  # query heads that share a KV head
KERNELS = [*(f"attention:{group}" for group in GROUPS), "attention.commit", "merge", "merge.commit"]
PAST_TOKENS = 700  # two segments and a part of the third
LAYER_HEADS = 3  # heads of the layers before
ROUNDING = 2.0**-24


@dataclass
class Past:
    """Keys and values of one layer, in pages, and queries for every position."""

    group: int
    kv_heads: int
    width: int
    page_tokens: int
    queries: np.ndarray  # [S, H, D]
    keys: np.ndarray  # [S, G, D], as the pages' formats have them
    values: np.ndarray
    page_table: np.ndarray
    pages: list[np.ndarray] = field(repr=False)

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads


def _make_past(
    kernels: Any,
    rng: np.random.Generator,
    group: int,
    kv_heads: int,
    width: int,
    page_tokens: int = 32,
    page_formats: tuple[int, ...] = (F16,),
) -> Past:
    """Pages have the formats in turn; the last page, which is not full, is f16."""
    heads = group * kv_heads
    padded = -(-PAST_TOKENS // page_tokens) * page_tokens
    keys, values = (rng.normal(size=(padded, kv_heads, width)).astype(np.float16) for _ in range(2))
    # what an earlier owner of the last page left behind must not matter
    keys[PAST_TOKENS:], values[PAST_TOKENS:] = reference.F16_LARGEST, -reference.F16_LARGEST
    queries = (rng.normal(size=(PAST_TOKENS, heads, width)) * 2 * width**-0.5).astype(np.float32)
    pages, words, seen = [], [], []
    for number, start in enumerate(range(0, padded, page_tokens)):
        chosen = slice(start, start + page_tokens)
        page_format = page_formats[number % len(page_formats)] if start + page_tokens <= PAST_TOKENS else F16
        layer = reference.page_of(keys[chosen], values[chosen])
        if page_format != F16:
            layer = reference_pages.narrow(layer, page_format, kv_heads, width, page_tokens)
        before = np.full(LAYER_HEADS * head_bytes(page_format, width, page_tokens), 0x7F, np.uint8)
        pages.append(kernels.array(np.concatenate([before, layer])))
        words.append(pages[-1].ctypes.data | page_format)
        seen.append(reference_pages.widen(layer, page_format, kv_heads, width, page_tokens))
    read_keys, read_values = (np.concatenate(part)[:PAST_TOKENS] for part in zip(*seen, strict=True))
    table = kernels.array(words, np.int64)
    return Past(group, kv_heads, width, page_tokens, queries, read_keys, read_values, table, pages)


def _attend(
    kernels: Any,
    past: Past,
    chunks: list[tuple[int, int]],
    *,
    window: int = 0,
    splits: tuple[tuple[int, int], ...] = ((0, 3),),
    block_tokens: int = 5,
    want_quantised: bool = False,
    repeat: bool = False,
) -> np.ndarray:
    """Output rows of chunks of positions [first, end), one after the other: float32 [T, H, D].

    Each chunk is one block per KV head and split; a split is a range of segments with states of its own.
    """
    positions = [position for first, end in chunks for position in range(first, end)]
    tokens, heads, width = len(positions), past.heads, past.width
    queries = kernels.array(past.queries[positions])
    size = state_bytes(width)
    states = kernels.array(np.full((len(splits), tokens, heads, size), 0xFF, np.uint8))
    entries = []
    token = 0
    for first, end in chunks:
        for split, (segment, end_segment) in enumerate(splits):
            for kv_head in range(past.kv_heads):
                record = np.zeros(ENTRY_WORDS, np.int64)
                for where, value in (
                    (ENTRY_TOKEN, token),
                    (ENTRY_NUM_TOKENS, end - first),
                    (ENTRY_KV_HEAD, kv_head),
                    (ENTRY_POSITION, first),
                    (ENTRY_PAGES, past.page_table.ctypes.data),
                    (ENTRY_SEGMENT, segment),
                    (ENTRY_END_SEGMENT, min(end_segment, (end - 1) // SEGMENT_TOKENS + 1)),
                    (ENTRY_STATES, states[split, token, kv_head * past.group :].ctypes.data),
                ):
                    record[where // 8] = value
                entries.append(record)
        token += end - first
    scratch_rows = max(end - first for first, end in chunks) * past.group
    kernels.run(
        f"attention:{past.group}",
        "attention.commit",
        fields_of_attention,
        len(entries),
        repeat=repeat,
        scratch_bytes=scratch_rows * (size + 4 * width) + 2 * 4 * 4 * SEGMENT_TOKENS + 64 + 4 * 4 * width,
        entries=kernels.array(np.stack(entries)),
        queries=queries,
        queries_stride=queries.strides[0],
        group=past.group,
        width=width,
        page_tokens=past.page_tokens,
        layer_offset=LAYER_HEADS * head_bytes(F16, width, past.page_tokens),
        window=window,
        heads=heads,
    )
    return _merge(kernels, states, heads, width, block_tokens, want_quantised, repeat)


def _merge(
    kernels: Any, states: np.ndarray, heads: int, width: int, block_tokens: int, want_quantised: bool, repeat: bool
) -> np.ndarray:
    splits, tokens = states.shape[:2]
    records = np.zeros((tokens, MERGE_ENTRY_WORDS), np.int64)
    records[:, MERGE_STATES // 8] = [states[0, t].ctypes.data for t in range(tokens)]
    records[:, MERGE_NUM_STATES // 8] = splits
    records[:, MERGE_STATES_STRIDE // 8] = states.strides[0]
    quantised = -(-quantised_row_bytes(heads * width) // 64) * 64 if want_quantised else 0
    out = kernels.zeros((tokens, quantised + 4 * heads * width), np.uint8)
    kernels.run(
        "merge",
        "merge.commit",
        fields_of_attention,
        -(-tokens // block_tokens),
        repeat=repeat,
        scratch_bytes=block_tokens * out.strides[0] + 4 * heads * width + state_bytes(width),
        merge_entries=kernels.array(records),
        merge_heads=heads,
        merge_width=width,
        merge_tokens=tokens,
        merge_block_tokens=block_tokens,
        merge_output=out,
        merge_output_stride=out.strides[0],
        merge_quantised=quantised,
        merge_floats=4 * heads * width,
    )
    floats = out[:, quantised:].copy().view(np.float32)
    if want_quantised:
        twin = reference.quantise(floats).encode()
        assert out[:, : twin.shape[1]].tobytes() == twin.tobytes()
    return floats.reshape(tokens, heads, width)


def _tolerance(past: Past) -> float:
    """How far an output may be off, for values of at most |v|.

    A score is off by about sqrt(D) roundings of the sum of |q k|, and so is the logarithm of its weight; that of e^x
    adds 2^-22. A weighted mean of values moves by twice that, and by the S additions above and below the line, which
    are sqrt(S) roundings each. Square roots, because roundings of either sign cancel; measured errors are a tenth.
    """
    products = np.einsum("shd,sd->sh", np.abs(past.queries[::50]), np.abs(past.keys[::50, 0].astype(np.float64))).max()
    score_error = past.width**0.5 * ROUNDING * 2 * products
    return float(np.abs(past.values).max() * (2 * (score_error + 2.0**-22) + 2 * PAST_TOKENS**0.5 * ROUNDING))


EDGES = [0, 1, 15, 16, 31, 32, 100, 255, 256, 257, 511, 512, 640, 699]


@pytest.mark.parametrize(
    ("group", "kv_heads", "width"), [(1, 2, 64), (3, 3, 64), (4, 1, 256), (8, 1, 128), (2, 1, 96), (5, 1, 64)]
)
@pytest.mark.parametrize("window", [0, 1, 40, 300])
def test_attention_equals_softmax(
    kernels: Any, rng: np.random.Generator, group: int, kv_heads: int, width: int, window: int
) -> None:
    past = _make_past(kernels, rng, group, kv_heads, width)
    result = _attend(kernels, past, [(position, position + 1) for position in EDGES], window=window)
    expected = reference.attention(past.queries[EDGES], past.keys, past.values, EDGES, window)
    assert np.abs(result - expected).max() <= _tolerance(past)


FORMATS = {"q8": (Q8,), "q4": (Q4,), "mixed": (Q4, F16, Q8, Q4, Q8, F16, F16)}


@pytest.mark.parametrize("page_formats", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("group", "kv_heads", "width"), [(1, 2, 64), (3, 3, 32), (4, 1, 256), (3, 1, 96), (5, 1, 160)])
def test_attention_over_compressed_pages_equals_softmax(
    kernels: Any, rng: np.random.Generator, group: int, kv_heads: int, width: int, page_formats: tuple[int, ...]
) -> None:
    past = _make_past(kernels, rng, group, kv_heads, width, page_formats=page_formats)
    for window in (0, 40, 300):
        result = _attend(kernels, past, [(position, position + 1) for position in EDGES], window=window)
        expected = reference.attention(past.queries[EDGES], past.keys, past.values, EDGES, window)
        assert np.abs(result - expected).max() <= _tolerance(past)


@pytest.mark.parametrize(("group", "kv_heads", "width"), [(1, 2, 64), (3, 1, 96), (4, 1, 256)])
@pytest.mark.parametrize("window", [0, 200])
def test_attention_over_compressed_pages_does_not_depend_on_chunks_or_splits(
    kernels: Any, rng: np.random.Generator, group: int, kv_heads: int, width: int, window: int
) -> None:
    past = _make_past(kernels, rng, group, kv_heads, width, page_formats=FORMATS["mixed"])
    chunks = [(0, 37), (240, 277), (500, 540), (690, 700)]
    single = _attend(kernels, past, [(p, p + 1) for first, end in chunks for p in range(first, end)], window=window)
    assert _attend(kernels, past, chunks, window=window, repeat=True).tobytes() == single.tobytes()
    splits = ((0, 1), (1, 2), (2, 3))
    assert _attend(kernels, past, chunks, window=window, splits=splits).tobytes() == single.tobytes()


def test_attention_over_f16_pages_does_not_depend_on_their_neighbours(kernels: Any, rng: np.random.Generator) -> None:
    """A window that holds f16 pages only gives the bits that it gives among f16 pages."""
    state = rng.bit_generator.state
    mixed = _make_past(kernels, rng, 3, 1, 64, page_formats=(Q8, Q4, *[F16] * 40))
    rng.bit_generator.state = state
    plain = _make_past(kernels, rng, 3, 1, 64)
    found, expected = (_attend(kernels, past, [(600, 640)], window=500) for past in (mixed, plain))
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("page_tokens", [32, 64, 256])
def test_attention_takes_pages_of_any_size(kernels: Any, rng: np.random.Generator, page_tokens: int) -> None:
    past = _make_past(kernels, rng, 3, 1, 64, page_tokens)
    for window in (0, 100):
        result = _attend(kernels, past, [(position, position + 1) for position in EDGES], window=window)
        expected = reference.attention(past.queries[EDGES], past.keys, past.values, EDGES, window)
        assert np.abs(result - expected).max() <= _tolerance(past)


@pytest.mark.parametrize(("group", "kv_heads", "width"), [(1, 2, 64), (3, 1, 64), (4, 1, 256), (8, 1, 128)])
@pytest.mark.parametrize("window", [0, 60])
def test_attention_of_a_chunk_equals_token_by_token(
    kernels: Any, rng: np.random.Generator, group: int, kv_heads: int, width: int, window: int
) -> None:
    """Bit for bit, for chunks that cross pages and segments."""
    past = _make_past(kernels, rng, group, kv_heads, width)
    for first, end in [(0, 37), (240, 277), (500, 540)]:
        single = _attend(kernels, past, [(position, position + 1) for position in range(first, end)], window=window)
        chunk = _attend(kernels, past, [(first, end)], window=window)
        assert chunk.tobytes() == single.tobytes()
        pieces = _attend(kernels, past, [(first, first + 3), (first + 3, first + 20), (first + 20, end)], window=window)
        assert pieces.tobytes() == single.tobytes()
    expected = reference.attention(past.queries[500:540], past.keys, past.values, range(500, 540), window)
    assert np.abs(chunk - expected).max() <= _tolerance(past)


@pytest.mark.parametrize(("group", "width"), [(3, 64), (4, 256)])
@pytest.mark.parametrize("window", [0, 200])
def test_attention_of_single_segments_merges_to_the_same_bits(
    kernels: Any, rng: np.random.Generator, group: int, width: int, window: int
) -> None:
    """A block for all segments, one per segment, or one for the first two and one for the third."""
    past = _make_past(kernels, rng, group, 2, width)
    chunks = [(0, 1), (100, 104), (255, 258), (520, 530), (698, 700)]
    whole = _attend(kernels, past, chunks, window=window)
    assert _attend(kernels, past, chunks, window=window, splits=((0, 1), (1, 2), (2, 3))).tobytes() == whole.tobytes()
    assert _attend(kernels, past, chunks, window=window, splits=((0, 2), (2, 3))).tobytes() == whole.tobytes()


def test_attention_does_not_depend_on_blocks_or_repetition(kernels: Any, rng: np.random.Generator) -> None:
    past = _make_past(kernels, rng, 3, 3, 64)
    chunks = [(0, 1), (250, 263), (600, 602)]
    whole = _attend(kernels, past, chunks, block_tokens=100)
    again = _attend(kernels, past, chunks, block_tokens=3, want_quantised=True, repeat=True)
    assert again.tobytes() == whole.tobytes()


def test_attention_carries_not_a_number_of_a_query(kernels: Any, rng: np.random.Generator) -> None:
    past = _make_past(kernels, rng, 3, 1, 64)
    past.queries[300, 1, 5] = np.nan
    result = _attend(kernels, past, [(298, 303)])
    assert np.isnan(result[2, 1]).all()
    assert np.isfinite(np.delete(result.reshape(15, 64), 7, axis=0)).all()


def test_attention_survives_large_scores(kernels: Any, rng: np.random.Generator) -> None:
    """Scores of thousands: one token takes all the weight, none overflows."""
    past = _make_past(kernels, rng, 2, 1, 64)
    past.queries *= 2000
    result = _attend(kernels, past, [(position, position + 1) for position in EDGES])
    expected = reference.attention(past.queries[EDGES], past.keys, past.values, EDGES)
    clear = _margin(past) > 50  # elsewhere two tokens share the weight by a difference that float32 cannot hold
    assert clear.sum() > len(EDGES)
    assert np.abs(result - expected)[clear].max() <= 1e-5


def _margin(past: Past) -> np.ndarray:
    """How far the best score is above the second, [edges, H]; infinite where there is one token only."""
    result = np.full((len(EDGES), past.heads), np.inf)
    for i, position in enumerate(EDGES):
        if position:
            keys = past.keys[: position + 1, 0].astype(np.float64)
            scores = np.sort(past.queries[position].astype(np.float64) @ keys.T, axis=1)
            result[i] = scores[:, -1] - scores[:, -2]
    return result


def test_merge_twin_equals_softmax(rng: np.random.Generator) -> None:
    """The twin of merging, on states of plain softmaxes over parts of the past."""
    scores, values = rng.normal(size=40) * 5, rng.normal(size=(40, 8))
    states: list[tuple[np.ndarray, float, float]] = [(np.full(8, np.nan), -np.inf, 0.0)]
    for part in (slice(0, 7), slice(7, 30), slice(30, 40)):
        weights = np.exp(scores[part] - scores[part].max())
        states.append((weights @ values[part], float(scores[part].max()), float(weights.sum())))
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(reference.merge(states), weights @ values / weights.sum(), rtol=1e-12)
