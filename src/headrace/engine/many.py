"""Answers to many prompts: in the order of the prompts, and one that fails costs none of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from headrace.engine.generation import Generation
from headrace.engine.results import GenerationResult, Timings, Usage
from headrace.errors import HeadraceError, OptionError
from headrace.model.step import LedgerTotals
from headrace.text.chat_template import Message
from headrace.text.messages import Prompt

MOST_AT_ONCE = 256
"""Answers that are begun and not read: more than run at once, so that the engine always has a next one."""


def answer_all(prompts: Iterable[Prompt], generate: Callable[[Prompt], Generation]) -> list[GenerationResult]:
    """The answer that `generate` gives to each prompt; what it raises for one becomes the `error` of that result."""
    answers: list[GenerationResult] = []
    coming: deque[Generation | GenerationResult] = deque()
    for prompt in prompts:
        coming.append(_begin(prompt, generate))
        if len(coming) == MOST_AT_ONCE:
            answers.append(_end(coming.popleft()))
    return answers + [_end(each) for each in coming]


def check_prompts(prompts: Sequence[Prompt]) -> None:
    """Refuses what is one prompt where several are wanted: its letters or messages would be answered one by one.

    Raises:
        OptionError: it is a text, or one conversation.
    """
    if isinstance(prompts, str):
        raise OptionError(f"prompts={prompts[:60]!r} is one text: give a list of prompts")
    first: object = next(iter(prompts), "")
    if isinstance(first, Mapping | Message):
        raise OptionError(
            f"prompts[0]={str(first)[:60]} is a message, so that prompts is one conversation: give a list of them"
        )


def _begin(prompt: Prompt, generate: Callable[[Prompt], Generation]) -> Generation | GenerationResult:
    try:
        return generate(prompt)
    except HeadraceError as error:
        return GenerationResult("", (), "error", Usage(), Timings(), LedgerTotals(), LedgerTotals(), error=error)


def _end(answer: Generation | GenerationResult) -> GenerationResult:
    if isinstance(answer, GenerationResult):
        return answer
    try:
        return answer.wait()
    except HeadraceError as error:
        return replace(answer.result, finish_reason="error", error=error)
