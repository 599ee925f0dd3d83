"""Prompts as users write them: one text, or a conversation as a list of messages.

A message is a `Message` or a mapping like {"role": "user", "content": "Hi"}.
Knows neither templates nor tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from headrace.errors import OptionError
from headrace.text.chat_template import Message

Prompt: TypeAlias = str | Sequence[Message | Mapping[str, str]]
"""What the user says, or a whole conversation that an answer is wanted to."""

_SHOWN_CHARACTERS = 60


def conversation(prompt: Prompt, system: str | None = None) -> list[Message]:
    """The messages of a prompt: a text is what the user says. `system` comes first.

    Raises:
        OptionError: the prompt is neither, holds no message, or has a system message of its own beside `system`; a message
            lacks its role or content, has more than these, an unknown role, or a content that is no text.
    """
    given: object = prompt  # callers may not be typed
    if isinstance(given, str):
        messages = [Message("user", given)]
    elif not isinstance(given, Sequence) or isinstance(given, bytes):
        raise OptionError(f"the prompt {_shown(prompt)} is neither a text nor a list of messages: give one of them")
    else:
        messages = [_message(each, place) for place, each in enumerate(given)]
    if not messages:
        raise OptionError("the conversation has no message: give at least one")
    if system is None:
        return messages
    if messages[0].role == "system":
        raise OptionError(
            f"system={_shown(system)} is given, and messages[0] is a system message already: leave one of them out"
        )
    return [Message("system", system), *messages]


def _message(given: object, place: int) -> Message:
    if isinstance(given, Message):
        return given
    what = f"messages[{place}]"
    if not isinstance(given, Mapping):
        raise OptionError(f'{what}={_shown(given)} is no message: write {{"role": "user", "content": "..."}}')
    for key in ("role", "content"):
        if key not in given:
            raise OptionError(f'{what}={_shown(given)} has no {key!r}: write {{"role": "user", "content": "..."}}')
    for key in given:
        if key not in {"role", "content"}:
            raise OptionError(f"{what} has {key!r}, which no template here is given: leave it out")
    try:
        return Message(given["role"], given["content"])
    except OptionError as error:
        raise OptionError(f"{what}: {error}") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
