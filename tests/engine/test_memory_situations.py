"""Situations that users of other engines have met, and what the memory of the past makes of each; every answer is exact."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.engine.answer import Answer
from headrace.engine.model import Model
from headrace.engine.sampler import Sampled
from headrace.errors import ContextOverflowError
from tiny import models as tiny
from tiny.memory import Reference, Ticks, answer, known_tokens, only_miss, plain_ids
from tiny.models import TinySpec, write_model

Open = Callable[..., Model]


# what stays


def test_cyclic_set_just_larger_than_memory_is_not_evicted_whole(opened: Open, reference: Reference) -> None:
    """Ten conversations would fit; of twelve in turn, least recently used first would always drop the one that is next."""
    clock = Ticks()
    model = opened(folder=None, pages=40, wall_clock=clock)
    conversations = [plain_ids(4 * 32, seed) for seed in range(12)]
    hits = []
    for _ in range(8):
        for conversation in conversations:
            clock.now_s += 10
            hits.append(known_tokens(answer(model, reference, conversation, 1)) / len(conversation))
    assert np.mean(hits[:12]) == 0
    assert np.mean(hits[-48:]) > 0.5


def test_oversized_prompt_breaks_no_bound_and_leaves_what_is_used_again(opened: Open, reference: Reference) -> None:
    clock = Ticks()
    model = opened(folder=None, pages=24, wall_clock=clock)
    conversations = [plain_ids(4 * 32, seed) for seed in range(5)]
    for _ in range(3):
        for conversation in conversations:
            clock.now_s += 10
            answer(model, reference, conversation, 1)
    clock.now_s += 10
    answer(model, reference, plain_ids(16 * 32, 99), 1)
    model.cache.check()
    known = [model.cache.find(conversation) for conversation in conversations]
    for found in known:
        model.cache.let_go(found)
    # 16 of 24 pages were needed: the other 8 hold what was in use before, not what is left of one
    assert sum(found.num_tokens for found in known) >= 7 * 32


def test_pinned_conversation_outlives_an_oversized_prompt(opened: Open, reference: Reference) -> None:
    model = opened(folder=None, pages=24)
    chat = model.chat("and")
    chat.send("the user " * 30, max_tokens=4, temperature=0.0).text()
    chat.pin()
    for seed in range(4):
        answer(model, reference, plain_ids(14 * 32, seed), 1)
    again = chat.send("in the end", max_tokens=2, temperature=0.0)
    known = len(chat.token_ids) - 1
    again.text()
    assert again.result.usage.cached_tokens == known


def test_prompt_that_cannot_fit_is_refused_before_anything_is_evicted(opened: Open, reference: Reference) -> None:
    model = opened(folder=None, pages=24)
    conversations = [plain_ids(4 * 32, seed) for seed in range(5)]
    for conversation in conversations:
        answer(model, reference, conversation, 1)
    with pytest.raises(ContextOverflowError, match=r"800 tokens .* need 26 pages of 32 tokens and memory holds 24.*kv_disk"):
        model.generate_ids(plain_ids(800, 99)).text()
    model.cache.check()
    for conversation in conversations:
        assert known_tokens(answer(model, reference, conversation, 1)) == 4 * 32 - 1


def test_side_requests_do_not_displace_the_main_conversation(opened: Open, reference: Reference) -> None:
    """A title, a summary: other prompts, each used once, later than the conversation, and too large to stay beside it."""
    clock = Ticks()
    model = opened(folder=None, pages=24, wall_clock=clock)
    main = plain_ids(6 * 32)
    for turn in range(8):
        clock.now_s += 30
        generation = answer(model, reference, main, 4)
        # but for the last pages, until the rule has seen enough
        assert turn == 0 or known_tokens(generation) >= len(main) - 1 - 64
        main += [*generation.token_ids, *plain_ids(12, turn)]
        clock.now_s += 1
        answer(model, reference, plain_ids(12 * 32, 100 + turn), 2)


@pytest.mark.parametrize("shared", [460, 448])
def test_prompt_that_shares_most_of_another_does_not_overwrite_it(opened: Open, reference: Reference, shared: int) -> None:
    model = opened(folder=None)
    first = plain_ids(500)
    begun = answer(model, reference, first, 8)
    other = answer(model, reference, [*first[:shared], *plain_ids(40, 1)], 8)
    assert known_tokens(other) == shared
    assert only_miss(other).at_token == shared
    again = answer(model, reference, [*first, *begun.token_ids, *plain_ids(5, 2)], 8)
    assert known_tokens(again) == len(first) + len(begun.token_ids) - 1


def test_clock_at_the_start_of_a_prompt_is_the_place_of_divergence_with_both_texts(opened: Open) -> None:
    model = opened(folder=None)
    prompts = [f"It is {time}. Answer the user in the end, and then the other one." for time in ("12:41:07", "12:41:52")]
    model.generate(prompts[0], raw=True, max_tokens=2).text()
    generation = model.generate(prompts[1], raw=True, max_tokens=2)
    generation.text()
    miss = only_miss(generation)
    at = len(model.tokenize("It is 12:41:"))
    assert (miss.reason, miss.at_token) == ("diverged", at)
    assert miss.num_tokens == len(model.tokenize(prompts[1])) - 1 - at
    assert miss.detail == "behind 's 12:41:' comes '52. Answ', where '07. Answ' is known"
    assert known_tokens(generation) == at


def test_newlines_that_read_back_as_one_token_are_found_again(
    tmp_path: Path, open_file: Open, spec: TinySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "_MERGES", (*tiny._MERGES, "Ċ Ċ"))
    model = open_file(write_model(tmp_path / "newlines.gguf", spec))
    (newline,), (double,) = model.tokenize("\n"), model.tokenize("\n\n")
    assert newline != double
    take = Answer.take
    monkeypatch.setattr(Answer, "take", lambda self, _: take(self, Sampled(newline)))
    chat = model.chat()
    chat.send("the", max_tokens=2, temperature=0.0, logprobs=1).text()
    assert chat.messages[-1].content == "\n\n"
    assert chat.token_ids[-2:] == (newline, newline)
    known = len(chat.token_ids) - 1
    again = chat.send("user", max_tokens=1, temperature=0.0, logprobs=1)
    again.text()
    assert again.result.usage.cached_tokens == known


# sessions


def test_fork_copies_no_page_and_takes_no_time(opened: Open, reference: Reference) -> None:
    model = opened()
    chat = model.session("long", "and")
    chat.send("the user and " * 120, max_tokens=8, temperature=0.0).text()
    assert len(chat.token_ids) > 700
    model.cache.flush()
    owned = model.cache.pool.owned_bytes
    times = []
    for number in range(60):
        start = time.perf_counter()
        copy = chat.fork()
        times.append(time.perf_counter() - start)
        chat.fork(f"copy {number}")  # with a name it is written down, too
        assert (copy.messages, copy.token_ids) == (chat.messages, chat.token_ids)
    assert model.cache.pool.owned_bytes == owned
    assert statistics.median(times) < 1e-3
    # each goes on with all of it, and none knows what the others say
    turns = [each.send(text, max_tokens=6, temperature=0.0) for each, text in ((chat, "the"), (copy, "in the end"))]
    known = len(copy.token_ids) - 1
    for turn in turns:
        turn.text()
        reference.check(turn.prompt_ids, turn.token_ids, [])
        assert turn.result.usage.cached_tokens >= known
