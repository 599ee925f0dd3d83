"""A conversation that keeps its past gives the tokens of one that is computed at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import headrace
from headrace import Message

TURNS = ("Name three colours.", "Which of them is the colour of grass?", "Write one sentence about it.")
MAX_TOKENS = 24


def test_chat_of_three_turns_equals_the_conversation_prefilled_at_once(smollm2_path: Path) -> None:
    with headrace.load(str(smollm2_path), context=2048) as model:
        chat = model.chat()
        answers = []
        for turn, text in enumerate(TURNS):
            generation = chat.send(text, max_tokens=MAX_TOKENS, temperature=0.0)
            generation.text()
            answers.append(generation.result)
            assert (generation.result.usage.cached_tokens > 0) == (turn > 0)
        # The best token after each prefix of the whole conversation, computed in one pass from nothing.
        best = model.logits(chat.token_ids).argmax(axis=1)
        for answer in answers:
            start = answer.usage.prompt_tokens
            tokens = np.array(answer.token_ids)
            assert len(tokens) > 0
            assert chat.token_ids[start : start + len(tokens)] == answer.token_ids
            assert best[start - 1 : start - 1 + len(tokens)].tolist() == tokens.tolist()


def test_chat_prompt_equals_the_template_of_the_whole_conversation(smollm2_path: Path) -> None:
    with headrace.load(str(smollm2_path), context=2048) as model:
        chat = model.chat()
        chat.send(TURNS[0], max_tokens=MAX_TOKENS, temperature=0.0).text()
        before = [message for message in chat.messages if message.role != "system"]
        second = chat.send(TURNS[1], max_tokens=1, temperature=0.0)
        second.text()
        whole = model.chat_template.encode([*before, Message("user", TURNS[1])])
        prompt = chat.token_ids[: second.result.usage.prompt_tokens]
        # An answer cut off at max_tokens is closed by the template in both; the same text may have other tokens inside.
        assert model.tokenizer.decode(prompt, skip_special=False) == model.tokenizer.decode(whole, skip_special=False)
