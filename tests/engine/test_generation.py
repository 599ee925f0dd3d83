"""Answers: how they end, what they report, and what they leave behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.engine.model import Model
from headrace.errors import ContextOverflowError, OptionError, TemplateError
from tiny.models import Tensor, TinySpec, vocabulary_tokens, write_model

if TYPE_CHECKING:
    from conftest import TinyModels

SPEC = TinySpec(seed=5, ends=False)
CONTEXT = 128
PROMPT = "the user and the"


@pytest.fixture
def model(tiny_models: TinyModels, checked_memory: Callable[[Model], None]) -> Iterator[Model]:
    """A model whose pages must all have come back after the test."""
    model = tiny_models.load(SPEC, context=CONTEXT)
    model.cache.clear()  # other tests share it
    yield model
    checked_memory(model)


def _greedy(model: Model, count: int) -> list[int]:
    """The best tokens after the prompt, each computed from scratch."""
    ids = model.tokenize(PROMPT)
    for _ in range(count):
        ids.append(int(model.logits(ids)[-1].argmax()))
    return ids[-count:]


def test_generation_gives_the_best_tokens_and_stops_at_max_tokens(model: Model) -> None:
    generation = model.generate(PROMPT, raw=True, max_tokens=12, temperature=0.0)
    pieces = list(generation)
    result = generation.result
    assert list(result.token_ids) == _greedy(model, 12)
    assert [token for piece in pieces for token in piece.token_ids] == list(result.token_ids)
    assert "".join(piece.text for piece in pieces) == result.text == model.detokenize(result.token_ids)
    assert result.finish_reason == "length"
    assert (result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.completion_tokens) == (
        len(model.tokenize(PROMPT)),
        0,
        12,
    )
    assert result.prefill_ledger.steps == 1
    assert result.decode_ledger.steps == 11
    assert result.logprobs == ()
    phases = [account.phase for account in generation.operations()]
    assert phases == sorted(phases, reverse=True)  # prefill before decode
    assert set(phases) == {"prefill", "decode"}


def test_generation_ends_with_the_context(model: Model) -> None:
    result_of = model.generate(PROMPT, raw=True, max_tokens=1000, temperature=0.0)
    result_of.text()
    result = result_of.result
    assert result.finish_reason == "context"
    assert result.usage.prompt_tokens + result.usage.completion_tokens == CONTEXT


def test_generation_ends_before_a_stop_string(model: Model) -> None:
    whole = model.generate(PROMPT, raw=True, max_tokens=30, temperature=0.0).text()
    stop = whole[5:8]
    generation = model.generate(PROMPT, raw=True, max_tokens=30, temperature=0.0, stop=[stop])
    assert generation.text() == whole[: whole.index(stop)]
    assert generation.result.finish_reason == "stop"


def _ends_at_once(tensors: dict[str, Tensor]) -> None:
    # the end token's row points where every hidden state does
    rows = tensors["output.weight"].data
    rows[:] *= 1e-3
    tensors["output_norm.weight"].data[:] = np.abs(tensors["output_norm.weight"].data)
    tensors["token_embd.weight"].data[:, 0] = 10.0
    rows[vocabulary_tokens().index("<|im_end|>")] = 0.0
    rows[vocabulary_tokens().index("<|im_end|>"), 0] = 1.0


def test_generation_ends_at_an_end_token(tmp_path: Path, open_file: Callable[..., Model]) -> None:
    model = open_file(write_model(tmp_path / "ends.gguf", TinySpec(tied=False), _ends_at_once))
    generation = model.generate(PROMPT, max_tokens=5, temperature=0.0)
    pieces = list(generation)
    assert (generation.result.text, generation.result.token_ids, generation.result.finish_reason) == ("", (), "stop")
    assert all(piece.text == "" and piece.token_ids == () for piece in pieces)


def test_cancelled_generation_keeps_what_it_has(model: Model) -> None:
    generation = model.generate(PROMPT, raw=True, max_tokens=50, temperature=0.0)
    made = [next(generation) for _ in range(3)]
    generation.cancel()
    assert list(generation) == []
    assert generation.result.finish_reason == "cancelled"
    assert generation.result.token_ids == tuple(token for piece in made for token in piece.token_ids)


def test_generation_cancelled_before_it_starts_makes_nothing(model: Model) -> None:
    generation = model.generate(PROMPT, raw=True)
    generation.cancel()
    assert generation.text() == ""
    assert generation.result.finish_reason == "cancelled"
    assert generation.result.timings.prefill_s == 0  # not even the prompt is computed


@pytest.mark.parametrize("started", [False, True])
def test_closed_generation_gives_its_pages_back(model: Model, checked_memory: Callable[[Model], None], started: bool) -> None:
    free = model.cache.pool.num_free
    generation = model.generate(PROMPT, raw=True)
    if started:
        next(generation)
        assert model.cache.pool.num_free < free
    generation.close()
    generation.close()
    checked_memory(model)  # the memory of the past has what was computed, and nobody else has anything
    model.cache.clear()
    assert model.cache.pool.num_free == free
    assert generation.result.finish_reason == "cancelled"
    assert list(generation) == []


def test_logprobs_are_those_of_the_logits(model: Model) -> None:
    generation = model.generate(PROMPT, raw=True, max_tokens=4, temperature=0.0, logprobs=3)
    generation.text()
    ids = [*model.tokenize(PROMPT), *generation.result.token_ids]
    logits = model.logits(ids).astype(np.float64)
    start = len(model.tokenize(PROMPT)) - 1
    for number, entry in enumerate(generation.result.logprobs):
        scores = logits[start + number]
        logprobs = scores - scores.max() - math.log(np.exp(scores - scores.max()).sum())
        assert entry.token_id == ids[start + number + 1]
        assert entry.logprob == pytest.approx(logprobs[entry.token_id], abs=1e-4)
        assert [token for token, _, _ in entry.top] == np.argsort(-logprobs)[:3].tolist()
        assert entry.text == model.tokenizer.token_text(entry.token_id)
    assert len(generation.result.logprobs) == 4


def test_timings_leave_out_what_the_reader_does(open_tiny: Callable[..., Model]) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    model = open_tiny(SPEC, context=CONTEXT, timer=clock)
    generation = model.generate(PROMPT, raw=True, max_tokens=5, temperature=0.0)
    for _ in generation:
        now[0] += 100.0
    timings = generation.result.timings
    assert 1.0 <= timings.prefill_s < 10.0
    assert 1.0 <= timings.decode_s < 10.0


def test_same_seed_gives_the_same_answer(model: Model) -> None:
    texts = [model.generate(PROMPT, raw=True, max_tokens=20, temperature=1.0, seed=seed).text() for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_prompt_that_leaves_no_room_is_refused(model: Model) -> None:
    with pytest.raises(ContextOverflowError, match="the prompt has 128 tokens and the context holds 128"):
        model.generate("z" * CONTEXT, raw=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperatur": 1.0}, "'temperatur' is no sampling option"),
        ({"temperature": -1.0}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"system": "x"}, "system message"),
    ],
)
def test_options_that_cannot_be_used_are_refused(model: Model, options: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        model.generate(PROMPT, raw=True, **options)  # type: ignore[arg-type]


def test_empty_prompt_is_refused(model: Model) -> None:
    with pytest.raises(OptionError, match="empty"):
        model.generate("", raw=True)


def test_model_without_a_template_is_refused_for_chat(tiny_models: TinyModels) -> None:
    model = tiny_models.load(TinySpec(template=None))
    with pytest.raises(TemplateError, match="raw=True"):
        model.generate(PROMPT)
    with pytest.raises(TemplateError):
        model.chat()


def test_closed_model_is_refused(tiny_models: TinyModels, open_file: Callable[..., Model]) -> None:
    model = open_file(tiny_models.path(SPEC))
    model.close()
    model.close()
    with pytest.raises(OptionError, match="closed"):
        model.logits([1])


def test_perplexity_is_that_of_the_logits(model: Model) -> None:
    text = "the user and the other in the end" * 4
    ids = model.tokenize(text)
    logits = model.logits(ids[:-1]).astype(np.float64)
    logprobs = logits - logits.max(axis=1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
    expected = math.exp(-logprobs[np.arange(len(ids) - 1), ids[1:]].mean())
    assert len(ids) > 65  # more than one step
    assert model.perplexity(text) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(OptionError, match="at least 2"):
        model.perplexity("a")
