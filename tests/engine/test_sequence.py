"""Sequences: growing, shrinking, and what errors leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.engine.model import Model
from headrace.engine.sequence import Sequence
from headrace.errors import ContextOverflowError, NumericError, OptionError
from tiny.models import Tensor, TinySpec, write_model

if TYPE_CHECKING:
    from conftest import TinyModels

SPEC = TinySpec()
CONTEXT = 320


@pytest.fixture
def model(tiny_models: TinyModels) -> Iterator[Model]:
    """A model whose pages must all have come back after the test."""
    model = tiny_models.load(SPEC, context=CONTEXT)
    free = model.cache.pool.num_free
    yield model
    model.cache.pool.check()
    assert model.cache.pool.num_free == free


@pytest.fixture
def sequence(model: Model) -> Iterator[Sequence]:
    sequence = model.sequence()
    yield sequence
    sequence.close()


def _ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, SPEC.vocabulary, count).tolist()


def test_sequence_takes_pages_as_it_grows_and_gives_them_back(model: Model, sequence: Sequence) -> None:
    free = model.cache.pool.num_free
    for tokens, pages in ((1, 1), (32, 1), (33, 2), (97, 4)):
        sequence.append(_ids(tokens - sequence.num_tokens))
        assert (sequence.num_tokens, free - model.cache.pool.num_free) == (tokens, pages)
    sequence.truncate(64)
    assert (sequence.num_tokens, free - model.cache.pool.num_free) == (64, 2)
    sequence.truncate(0)
    assert model.cache.pool.num_free == free


def test_truncated_sequence_continues_as_if_it_had_never_been_longer(sequence: Sequence) -> None:
    ids, other = _ids(70), _ids(20, seed=1)
    sequence.append(ids[:40])
    expected = sequence.append(other).copy()
    sequence.truncate(0)
    sequence.append(ids)
    sequence.truncate(40)
    assert np.array_equal(sequence.append(other), expected)
    assert sequence.token_ids == [*ids[:40], *other]


def test_keep_common_keeps_the_longest_common_beginning(sequence: Sequence) -> None:
    sequence.append([1, 2, 3, 4, 5])
    assert sequence.keep_common([1, 2, 3, 9]) == 3
    assert sequence.token_ids == [1, 2, 3]
    assert sequence.keep_common([1, 2, 3, 4, 5]) == 3
    assert sequence.keep_common([7]) == 0
    assert sequence.num_tokens == 0


def test_tokens_beyond_the_context_leave_everything_as_it_was(model: Model, sequence: Sequence) -> None:
    ids = _ids(CONTEXT)
    sequence.append(ids[:100])
    free = model.cache.pool.num_free
    with pytest.raises(ContextOverflowError, match=f"{CONTEXT + 1} tokens do not fit into a context of {CONTEXT}"):
        sequence.append(_ids(CONTEXT - 99))
    assert (sequence.num_tokens, model.cache.pool.num_free) == (100, free)
    # all of the context can be used, to the last token
    assert sequence.append(ids[100:]).shape == (SPEC.vocabulary,)
    with pytest.raises(ContextOverflowError):
        sequence.append([1])


def test_full_arena_leaves_everything_as_it_was(model: Model) -> None:
    others = []
    while model.cache.pool.num_free > 2:
        others.append(model.sequence())
        others[-1].append(_ids(min(CONTEXT, 32 * (model.cache.pool.num_free - 2))))
    last = model.sequence()
    last.append(_ids(10))
    with pytest.raises(ContextOverflowError, match="65 tokens do not fit: there is room for 64"):
        last.append(_ids(55))
    assert (last.num_tokens, model.cache.pool.num_free) == (10, 1)
    last.append(_ids(54))
    for sequence in [*others, last]:
        sequence.close()


@pytest.mark.parametrize(("ids", "words"), [([], "empty"), ([1, 10**6], "1000000 is outside"), ([-1], "-1 is outside")])
def test_tokens_that_cannot_be_computed_are_refused(sequence: Sequence, ids: list[int], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        sequence.append(ids)
    assert sequence.num_tokens == 0


def test_append_stops_between_chunks_when_it_is_cancelled(sequence: Sequence) -> None:
    ids = _ids(300)
    expected = sequence.append(ids[:256]).copy()
    sequence.truncate(0)
    logits = sequence.append(ids, cancelled=lambda: True)
    assert sequence.token_ids == ids[:256]
    assert np.array_equal(logits, expected)


def test_sequences_take_turns_without_disturbing_each_other(model: Model) -> None:
    first, second = model.sequence(), model.sequence()
    ids, other = _ids(60), _ids(60, seed=1)
    alone = [first.append([token]).copy() for token in ids]
    first.truncate(0)
    for at in range(60):
        assert np.array_equal(first.append(ids[at : at + 1]), alone[at])
        second.append(other[at : at + 1])
    first.close()
    second.close()


def test_step_ledger_is_booked_for_each_step(model: Model, sequence: Sequence) -> None:
    sequence.append(_ids(300))
    sequence.append([1])
    assert sequence.ledger.steps == 3
    assert sequence.ledger.kv_write_bytes == 301 * SPEC.layers * SPEC.kv_heads * SPEC.head_width * 4


def _overflowing(tensors: dict[str, Tensor]) -> None:
    tensors["output_norm.weight"].data = np.full(SPEC.embedding, 3e38, np.float32)


def test_logits_that_overflow_raise_one_sentence(tmp_path: Path, open_file: Callable[..., Model]) -> None:
    model = open_file(write_model(tmp_path / "damaged.gguf", SPEC, _overflowing))
    with pytest.raises(NumericError, match="not finite"):
        model.logits([1, 2, 3])
    with pytest.raises(NumericError, match="not finite"):
        model.perplexity("the user")
    with pytest.raises(NumericError):
        model.generate("the user", raw=True).text()
    model.cache.pool.check()
    assert model.cache.pool.owned_bytes == 0
