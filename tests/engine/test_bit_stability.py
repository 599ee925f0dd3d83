"""The same tokens give the same bits, whatever the chunks, threads, neighbours in the batch and blocks of attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import headrace
from headrace.engine.batch import Slice
from headrace.engine.model import Model
from headrace.model.attention_parts import attention_parts
from headrace.model.config import ModelConfig
from headrace.model.step import MAX_STEP_TOKENS
from tiny.models import TinySpec

if TYPE_CHECKING:
    from conftest import TinyModels

# tokens in every position of a tile, a page and a segment; three segments of 256
SPECS = {
    "llama": TinySpec(format="Q8_0", formats={"attn_output": "F16", "ffn_up": "Q4_1"}, context=640),
    "gemma3": TinySpec("gemma3", format="Q8_0", formats={"ffn_down": "F32"}, layers=6, window=40, context=640),
}
TOKENS = 600


def _ids(vocabulary: int, seed: int, count: int = TOKENS) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, count).tolist()


def _last_logits(model: Model, ids: Sequence[int], chunks: Sequence[int]) -> bytes:
    """The logits after the last token, which depend on all keys and values."""
    sequence = model.sequence()
    try:
        start = 0
        for chunk in chunks:
            logits = sequence.append(ids[start : start + chunk])
            start += chunk
        assert start == len(ids)
        return logits.tobytes()
    finally:
        sequence.close()


def _even(size: int, total: int = TOKENS) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


@pytest.mark.parametrize("name", SPECS)
def test_logits_have_the_same_bits_for_any_chunks_and_threads(tiny_models: TinyModels, level: str, name: str) -> None:
    spec = SPECS[name]
    ids = _ids(spec.vocabulary, 0)
    one = tiny_models.load(spec, level=level, threads=1)
    expected = _last_logits(one, ids, _even(MAX_STEP_TOKENS))
    for chunks in (_even(1), _even(2), _even(7), _even(32), [255, 1, 256, 88], [1, 300, 299]):
        assert _last_logits(one, ids, chunks) == expected, chunks[:4]
    for threads in (2, 3):
        team = tiny_models.load(spec, level=level, threads=threads)
        for chunks in (_even(MAX_STEP_TOKENS), _even(33), [540, *[1] * 60]):
            assert _last_logits(team, ids, chunks) == expected, (threads, chunks[:4])


@pytest.mark.parametrize("name", SPECS)
def test_logits_of_every_token_have_the_same_bits_alone_and_in_chunks(tiny_models: TinyModels, name: str) -> None:
    model = tiny_models.load(SPECS[name])
    ids = _ids(SPECS[name].vocabulary, 1, 300)
    whole = model.logits(ids)
    sequence = model.sequence()
    single = np.stack([sequence.append([token]).copy() for token in ids])
    sequence.close()
    assert np.array_equal(whole.view(np.uint32), single.view(np.uint32))


@pytest.mark.parametrize("name", SPECS)
def test_batch_of_sequences_gives_each_the_bits_it_has_alone(tiny_models: TinyModels, level: str, name: str) -> None:
    spec = SPECS[name]
    # (past, new): decoding in the first, second and third segment, a chunk across two, a fresh prompt
    shapes = [(3, 1), (511, 1), (599, 1), (250, 20), (0, 40), (100, 2)]
    for threads in (1, 3):
        model = tiny_models.load(spec, level=level, threads=threads)
        parts = [(_ids(spec.vocabulary, 7 + number, past + new), past) for number, (past, new) in enumerate(shapes)]
        alone = []
        for ids, past in parts:
            sequence = model.sequence()
            if past:
                sequence.append(ids[:past])
            alone.append(sequence.append(ids[past:]).tobytes())
            sequence.close()
        assert _together(model, parts) == alone
        assert _together(model, parts[::-1]) == alone[::-1]


def _together(model: Model, parts: Sequence[tuple[list[int], int]]) -> list[bytes]:
    """Last logits of several sequences whose new tokens are computed in one step."""
    sequences, slices = [], []
    for ids, past in parts:
        sequence = model.sequence()
        if past:
            sequence.append(ids[:past])
        sequence.reserve(len(ids))
        sequences.append(sequence)
        slices.append(Slice(ids[past:], past, sequence._addresses))
    try:
        return [row.tobytes() for row in model._executor.run(slices).logits]
    finally:
        for sequence in sequences:
            sequence.close()


def test_attention_is_split_for_few_tokens_only(tiny_models: TinyModels) -> None:
    # what makes the tests above cover both ways
    config = tiny_models.load(SPECS["llama"]).config
    assert _states(config, 1, 599, 0) == 3
    assert _states(config, 256, 256, 0) == 1
    assert _states(config, 1, 599, 0, room=2) == 1
    assert _states(config, 1, 599, 40) == 1


def _states(config: ModelConfig, new: int, past: int, window: int, room: int | None = None) -> int:
    parts = attention_parts(config, np.array([new]), np.array([past]), window, 1, room=room)
    return int(parts.row_counts[0])


def test_smollm2_has_the_same_bits_for_any_chunks_and_threads(smollm2_path: Path) -> None:
    _check_real(smollm2_path, TOKENS, ([1, 256, 256, 7, 32, 2, 46], [599, 1], [580, *[1] * 20]))


def _check_real(path: Path, tokens: int, variants: Sequence[Sequence[int]]) -> None:
    with headrace.load(str(path), context=1024, threads=1) as one, headrace.load(str(path), context=1024, threads=3) as three:
        ids = _ids(one.vocab_size, 3, tokens)
        expected = _last_logits(one, ids, [tokens])
        for chunks in variants:
            assert _last_logits(one, ids, chunks) == expected, chunks[:4]
        assert _last_logits(three, ids, variants[-1]) == expected
