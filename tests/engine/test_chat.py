"""Conversations: what an earlier turn computed is never computed again, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.engine.chat import Chat
from headrace.engine.model import Model
from headrace.errors import ContextOverflowError, NumericError, OptionError
from headrace.text.chat_template import Message
from tiny.models import Tensor, TinySpec, write_model

if TYPE_CHECKING:
    from conftest import TinyModels

SPEC = TinySpec(seed=5, ends=False)


@pytest.fixture
def model(tiny_models: TinyModels, checked_memory: Callable[[Model], None]) -> Iterator[Model]:
    model = tiny_models.load(SPEC, context=256)
    model.cache.clear()  # other tests share it
    yield model
    checked_memory(model)


@pytest.fixture
def chat(model: Model) -> Iterator[Chat]:
    chat = model.chat("and")
    yield chat
    chat.close()


def test_three_turns_equal_the_conversation_computed_at_once(model: Model, chat: Chat) -> None:
    for number, text in enumerate(("the", "user", "in the end")):
        known = len(chat.token_ids)
        answer = chat.send(text, max_tokens=8, temperature=0.0)
        answer.text()
        result = answer.result
        # all but the last token of the earlier turns is known; that one was sampled and never computed
        assert result.usage.cached_tokens == max(0, known - 1)
        assert result.prefill_ledger.steps == 1
        ids = chat.token_ids
        assert ids[result.usage.prompt_tokens :] == result.token_ids
        best = model.logits(ids).argmax(axis=1).tolist()
        assert best[result.usage.prompt_tokens - 1 : -1] == list(result.token_ids)
        assert len(chat.messages) == 3 + 2 * number
    assert [message.role for message in chat.messages] == ["system", *["user", "assistant"] * 3]


def test_first_turn_is_what_generate_computes(model: Model, chat: Chat) -> None:
    text = chat.send("the", max_tokens=8, temperature=0.0).text()
    assert text == model.generate("the", system="and", max_tokens=8, temperature=0.0).text()


def test_cancelled_answer_stays_as_far_as_it_got(model: Model, chat: Chat) -> None:
    answer = chat.send("the", max_tokens=50, temperature=0.0)
    pieces = [next(answer) for _ in range(4)]
    answer.close()
    text = "".join(piece.text for piece in pieces)
    assert chat.messages[-1] == Message("assistant", answer.result.text)
    assert answer.result.text.startswith(text)
    again = chat.send("user", max_tokens=4, temperature=0.0)
    again.text()
    best = model.logits(chat.token_ids).argmax(axis=1).tolist()
    assert best[again.result.usage.prompt_tokens - 1 : -1] == list(again.result.token_ids)


def test_answer_that_is_still_coming_ends_with_the_next_turn(chat: Chat) -> None:
    first = chat.send("the", max_tokens=50, temperature=0.0)
    next(first)
    second = chat.send("user", max_tokens=3, temperature=0.0)
    assert first.result.finish_reason == "cancelled"
    assert list(first) == []
    second.text()
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    first.close()  # late, and without effect
    assert len(chat.messages) == 5


def test_reset_forgets_all_but_the_system_message(model: Model, chat: Chat) -> None:
    before = chat.send("the", max_tokens=8, temperature=0.0).text()
    half = chat.send("user", max_tokens=8)
    next(half)
    chat.reset()
    assert (chat.messages, chat.token_ids) == ((Message("system", "and"),), ())
    again = chat.send("the", max_tokens=8, temperature=0.0)
    assert again.text() == before
    # the prompt lies in the pages still; its last token is computed for its logits
    assert again.result.usage.cached_tokens == again.result.usage.prompt_tokens - 1


def test_turn_that_does_not_fit_leaves_the_conversation_as_it_was(chat: Chat) -> None:
    chat.send("the", max_tokens=8, temperature=0.0).text()
    messages, ids = chat.messages, chat.token_ids
    with pytest.raises(ContextOverflowError):
        chat.send("z" * 300)
    with pytest.raises(OptionError):
        chat.send("the", max_tokens=0)
    assert (chat.messages, chat.token_ids) == (messages, ids)
    answer = chat.send("user", max_tokens=2, temperature=0.0)
    answer.text()
    assert answer.result.usage.cached_tokens == len(ids) - 1


def test_error_that_leaves_no_answer_leaves_no_turn(tmp_path: Path, open_file: Callable[..., Model]) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["output_norm.weight"].data = np.full(SPEC.embedding, 3e38, np.float32)

    chat = open_file(write_model(tmp_path / "damaged.gguf", SPEC, damage)).chat()
    answer = chat.send("the")
    with pytest.raises(NumericError):
        answer.text()
    assert answer.failed
    assert (chat.messages, chat.token_ids) == ((), ())
