"""Greedy decoding in runs of several steps: the same tokens and the same past as one step after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.engine.ahead import MAX_STEPS
from headrace.engine.model import Model
from headrace.errors import ContextOverflowError, NumericError
from tiny.models import Tensor, TinySpec, write_model

if TYPE_CHECKING:
    from conftest import TinyModels

SPECS = [TinySpec(seed=5, ends=False), TinySpec("gemma3", seed=6, layers=6, window=20, heads=4, kv_heads=2, ends=False)]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def _one_by_one(model: Model, count: int) -> list[int]:
    sequence = model.sequence()
    logits, chosen = sequence.append(PROMPT), []
    for _ in range(count):
        chosen.append(int(logits.argmax()))
        logits = sequence.append(chosen[-1:])
    sequence.close()
    return chosen


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.architecture)
@pytest.mark.parametrize("threads", [1, 2])
def test_running_ahead_gives_the_tokens_of_single_steps(tiny_models: TinyModels, spec: TinySpec, threads: int) -> None:
    model = tiny_models.load(spec, threads=threads)
    expected = _one_by_one(model, 60)
    sequence = model.sequence()
    made = [int(sequence.append(PROMPT).argmax())]
    # every length, crossing pages and the window
    for steps in (1, 2, MAX_STEPS, 3, MAX_STEPS, MAX_STEPS, 1, MAX_STEPS, MAX_STEPS, MAX_STEPS, 4):
        made += sequence.run_ahead(made[-1], steps)
    assert made[:60] == expected
    # what was computed on the way is the past that single steps would have left
    assert sequence.token_ids == PROMPT + made[:-1]
    after = sequence.append(made[-1:]).copy()
    alone = model.logits(PROMPT + made)[-1]
    assert np.array_equal(after, alone)
    sequence.close()


def test_running_ahead_books_every_step(tiny_models: TinyModels) -> None:
    model = tiny_models.load(SPECS[0], threads=2)
    sequence = model.sequence()
    sequence.append(PROMPT)
    before = sequence.ledger
    sequence.run_ahead(7, 4)
    ledger = sequence.ledger
    assert ledger.steps == before.steps + 4
    steps = sequence.accounts[0].operations()
    assert next(row for row in steps if row.operation.startswith("choose")).calls == 2 * ledger.steps
    assert all(row.time_s >= 0 for row in steps)
    sequence.close()


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 23])
def test_generation_that_runs_ahead_leaves_no_token_behind(tiny_models: TinyModels, max_tokens: int) -> None:
    model = tiny_models.load(SPECS[0], threads=1)
    sequence = model.sequence()
    answer = model.generate_ids(PROMPT, sequence=sequence, max_tokens=max_tokens)
    answer.text()
    assert list(answer.result.token_ids) == _one_by_one(model, max_tokens)
    history = PROMPT + list(answer.result.token_ids)
    assert sequence.token_ids == history[: sequence.num_tokens]
    assert sequence.num_tokens >= len(history) - 1
    sequence.close()


def test_generation_closed_within_a_run_forgets_what_was_not_asked_for(tiny_models: TinyModels) -> None:
    model = tiny_models.load(SPECS[0], threads=1)
    sequence = model.sequence()
    answer = model.generate_ids(PROMPT, sequence=sequence, max_tokens=40)
    made = [next(answer).token_ids[0] for _ in range(10)]
    answer.close()
    assert list(answer.result.token_ids) == made == _one_by_one(model, 10)
    assert sequence.num_tokens <= len(PROMPT) + len(made)
    sequence.close()


def test_running_ahead_beyond_the_context_computes_nothing(tiny_models: TinyModels) -> None:
    model = tiny_models.load(SPECS[0], context=16)
    sequence = model.sequence()
    sequence.append(PROMPT)
    with pytest.raises(ContextOverflowError, match="17 tokens do not fit"):
        sequence.run_ahead(1, 9)
    assert sequence.token_ids == PROMPT
    assert len(sequence.run_ahead(1, 8)) == 8
    sequence.close()


def _overflowing(tensors: dict[str, Tensor]) -> None:
    tensors["output_norm.weight"].data = np.full(SPECS[0].embedding, 3e38, np.float32)


def test_running_ahead_on_damaged_weights_raises(tmp_path: Path, open_file: Callable[..., Model]) -> None:
    model = open_file(write_model(tmp_path / "damaged.gguf", SPECS[0], _overflowing))
    sequence = model.sequence()
    sequence.append(PROMPT)
    with pytest.raises(NumericError, match="logits of tokens 8 to 8 are not finite"):
        sequence.run_ahead(1, 4)
    assert sequence.token_ids == PROMPT
    sequence.close()


def test_equal_logits_choose_the_lowest_token(tmp_path: Path, open_file: Callable[..., Model]) -> None:
    def flat(tensors: dict[str, Tensor]) -> None:
        tensors["output_norm.weight"].data = np.zeros(SPECS[0].embedding, np.float32)

    model = open_file(write_model(tmp_path / "flat.gguf", SPECS[0], flat))
    sequence = model.sequence()
    sequence.append(PROMPT)
    assert sequence.run_ahead(1, 3) == [0, 0, 0]
    sequence.close()
