"""What a prompt computes is known while its answer is still coming: to other requests, and to the next process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.engine.generation import Generation
from headrace.engine.model import Model
from headrace.errors import ContextOverflowError
from headrace.kv.intake import SharedPast
from headrace.model.step import PAGE_TOKENS
from tiny.memory import Reference, answer, crash, known_tokens, plain_ids, recorded_logits

PROMPT = plain_ids(700)
WHOLE = 700 // PAGE_TOKENS * PAGE_TOKENS


def _begin(model: Model, prompt: list[int], max_tokens: int = 8) -> Generation:
    generation = model.generate_ids(prompt, max_tokens=max_tokens, temperature=0.0, ignore_end=True, logprobs=1)
    next(generation)
    return generation


def test_prompt_is_found_in_memory_while_its_answer_is_coming(opened: Callable[..., Model], reference: Reference) -> None:
    model = opened()
    with recorded_logits() as seen:
        first = _begin(model, PROMPT)
    second = answer(model, reference, PROMPT)
    assert second.result.reuse.memory_tokens == WHOLE
    with recorded_logits() as more:
        first.text()
    reference.check(PROMPT, first.token_ids, [*seen[first._live], *more[first._live]])
    assert known_tokens(answer(model, reference, [*PROMPT, *first.token_ids])) == 700 + len(first.token_ids) - 1


def test_two_answers_to_one_prompt_take_the_memory_of_one_prompt(opened: Callable[..., Model]) -> None:
    model = opened()
    first = _begin(model, PROMPT)
    owned = model.cache.pool.num_owned()
    second = _begin(model, PROMPT)
    assert model.cache.pool.num_owned() <= owned + 1  # the page that the prompt ends in
    for each in (first, second):
        each.close()


def test_chunks_of_a_prompt_that_is_cancelled_are_known(opened: Callable[..., Model]) -> None:
    """Cancelled from within the first step, as by a signal."""
    model = opened()
    generation = model.generate_ids(PROMPT, max_tokens=4, temperature=0.0)
    generation.cancel()
    generation.text()
    generation = model.generate_ids(PROMPT, max_tokens=4, temperature=0.0)
    share = model.cache.share
    shared_tokens = []

    def cancelled(tokens: list[int], *rest: Any, **more: Any) -> SharedPast:
        shared_tokens.append(len(tokens))
        generation.cancel()
        return share(tokens, *rest, **more)

    model.cache.share = cancelled  # type: ignore[method-assign]
    generation.text()
    model.cache.share = share  # type: ignore[method-assign]
    assert shared_tokens == [256]
    assert len(model.cache.tree.match(PROMPT).nodes) == 256 // PAGE_TOKENS


def test_killed_process_has_kept_the_prompt_of_its_first_answer(opened: Callable[..., Model], reference: Reference) -> None:
    model = opened()
    _begin(model, PROMPT)
    model.cache.flush()  # what was queued has been written by then
    crash(model)
    again = answer(opened(), reference, PROMPT)
    assert again.result.reuse.disk_tokens == WHOLE


def test_answer_that_fails_leaves_its_prompt_and_holds_nothing(opened: Callable[..., Model], reference: Reference) -> None:
    model = opened(pages=24, folder=None)
    generation = model.generate_ids(PROMPT, max_tokens=200, temperature=0.0, ignore_end=True)
    try:
        generation.text()
    except ContextOverflowError:
        pass
    else:
        raise AssertionError("an answer of 200 tokens fits into no 24 pages")
    assert answer(model, reference, PROMPT, 2).result.reuse.memory_tokens == WHOLE
