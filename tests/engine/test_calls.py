"""What the public calls take, and what they give: stop strings, seeds, messages, lists of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from headrace.engine.answer import Answer
from headrace.engine.model import Model
from headrace.engine.results import Piece
from headrace.engine.sampler import Sampled
from headrace.errors import ContextOverflowError, NumericError, OptionError
from headrace.text.chat_template import Message
from tiny.models import TinySpec

if TYPE_CHECKING:
    from conftest import TinyModels

SPEC = TinySpec(seed=5, ends=False)
PROMPT = "the user and the"


@pytest.fixture
def model(tiny_models: TinyModels, checked_memory: Callable[[Model], None]) -> Iterator[Model]:
    """A model whose pages must all have come back after the test."""
    model = tiny_models.load(SPEC, context=128)
    model.cache.clear()  # other tests share it
    yield model
    checked_memory(model)


def _whole(model: Model) -> str:
    return model.generate(PROMPT, raw=True, max_tokens=30).text()


def test_stop_as_one_text_ends_at_the_text_and_not_at_one_of_its_letters(model: Model) -> None:
    whole = _whole(model)
    threes = [whole[at : at + 3] for at in range(len(whole) - 2)]
    stop, at = next((three, at) for at, three in enumerate(threes) if whole.index(three) == at and set(three) & set(whole[:at]))
    generation = model.generate(PROMPT, raw=True, max_tokens=30, stop=stop)
    assert generation.text() == whole[:at]
    assert generation.result.finish_reason == "stop"
    assert model.generate(PROMPT, raw=True, max_tokens=30, stop=[stop]).text() == generation.result.text


@pytest.mark.parametrize("stop", ["", ["a", ""], [1]])
def test_stop_that_is_empty_or_no_text_is_refused(model: Model, stop: str | list[str]) -> None:
    with pytest.raises(OptionError, match="stop="):
        model.generate(PROMPT, raw=True, stop=stop)


def test_seed_that_nobody_gave_is_drawn_told_and_gives_the_same_text_again(model: Model) -> None:
    options = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # so tiny a model is too sure of itself at 0.9
    drawn = [model.generate(PROMPT, raw=True, max_tokens=30, **options).wait() for _ in range(3)]
    assert len({result.token_ids for result in drawn}) == 3
    for result in drawn:
        assert isinstance(result.seed, int)
        again = model.generate(PROMPT, raw=True, max_tokens=30, seed=result.seed, **options).wait()
        assert (again.token_ids, again.seed) == (result.token_ids, result.seed)


def test_seed_comes_from_the_source_that_the_model_was_given(tiny_models: TinyModels, open_file: Callable[..., Model]) -> None:
    seeds = iter([11, 12])
    model = open_file(tiny_models.path(SPEC), draw_seed=lambda: next(seeds))
    results = [model.generate(PROMPT, raw=True, max_tokens=4, temperature=1.0).text() for _ in range(2)]
    assert results == [model.generate(PROMPT, raw=True, max_tokens=4, temperature=1.0, seed=seed).text() for seed in (11, 12)]


def test_seed_is_not_drawn_where_no_token_is(model: Model) -> None:
    greedy, given = model.generate(PROMPT, raw=True, max_tokens=1), model.generate(PROMPT, raw=True, max_tokens=1, seed=3)
    assert (greedy.result.seed, given.result.seed) == (None, 3)
    greedy.close()
    given.close()


def test_messages_are_asked_as_the_chat_asks_them(model: Model) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the user"}]
    generation = model.generate(turns, max_tokens=6)
    assert generation.text() == model.generate("the user", system="Be brief.", max_tokens=6).text()
    chat = model.chat("Be brief.")
    first = chat.send("the user", max_tokens=6).text()
    answered = [*turns, {"role": "assistant", "content": first}, {"role": "user", "content": "and"}]
    assert [(message.role, message.content) for message in chat.messages] == [(t["role"], t["content"]) for t in answered[:3]]
    assert model.generate(answered, max_tokens=1).result.usage.prompt_tokens == len(
        model.chat_template.encode([*chat.messages, Message("user", "and")])
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"raw": True}, "messages need the chat template"),
        ({"system": "x"}, r"system='x' is given"),
        ({}, "'robot' is not a role"),
    ],
)
def test_messages_that_cannot_be_used_are_refused(model: Model, options: dict[str, object], words: str) -> None:
    role = "robot" if not options else "system"
    with pytest.raises(OptionError, match=words):
        model.generate([{"role": role, "content": "x"}], **options)  # type: ignore[arg-type]


def test_wait_gives_the_result_and_text_its_text(model: Model) -> None:
    generation = model.generate(PROMPT, raw=True, max_tokens=5)
    result = generation.wait()
    assert result.usage.completion_tokens == 5
    assert (generation.text(), generation.wait(), generation.result) == (result.text, result, result)


def test_list_of_prompts_is_answered_in_order_as_each_is_alone(model: Model) -> None:
    prompts = [PROMPT, "and", [{"role": "user", "content": "the other"}], PROMPT]
    alone = [model.generate(prompt, max_tokens=6).wait() for prompt in prompts]
    together = model.generate_all(prompts, max_tokens=6)
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert [result.usage.prompt_tokens for result in together] == [result.usage.prompt_tokens for result in alone]
    assert model.generate_all([]) == []


def test_prompt_that_cannot_be_answered_costs_none_of_the_others(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [PROMPT, "z" * 128, "", "broken", "and"]
    take = Answer.take

    def break_one(self: Answer, sampled: Sampled) -> Piece:
        if self.history[: len(broken)] == broken and len(self.history) > len(broken) + 1:
            raise NumericError("the logits are not finite")
        return take(self, sampled)

    broken = model.tokenize("broken")
    monkeypatch.setattr(Answer, "take", break_one)
    results = model.generate_all(prompts, raw=True, max_tokens=5, logprobs=1)
    assert [result.finish_reason for result in results] == ["length", "error", "error", "error", "length"]
    assert [type(result.error) for result in results] == [
        type(None),
        ContextOverflowError,
        OptionError,
        NumericError,
        type(None),
    ]
    assert [len(result.token_ids) for result in results] == [5, 0, 0, 2, 5]
    assert results[4].text == model.generate("and", raw=True, max_tokens=5).text()


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        (PROMPT, {}, "is one text"),
        ([{"role": "user", "content": "Hi"}], {}, "is one conversation"),
        ([PROMPT], {"max_tokens": 0}, "max_tokens=0"),
        ([PROMPT], {"temperature": -1}, "temperature=-1"),
        ([PROMPT], {"stop": ""}, "stop="),
        ([PROMPT], {"temperatur": 1}, "'temperatur' is no sampling option"),
    ],
)
def test_options_that_no_prompt_can_use_are_refused_at_once(
    model: Model, prompts: list[str], options: dict[str, object], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        model.generate_all(prompts, raw=True, **options)  # type: ignore[arg-type]
