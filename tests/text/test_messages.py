"""Prompts as users write them become messages, or one sentence that says what is wrong with which of them."""

from __future__ import annotations

import pytest

from headrace.errors import OptionError
from headrace.text.chat_template import Message
from headrace.text.messages import conversation

SYSTEM, USER = Message("system", "Be brief."), Message("user", "Hi")


def test_text_is_what_the_user_says() -> None:
    assert conversation("Hi") == [USER]
    assert conversation("Hi", "Be brief.") == [SYSTEM, USER]


def test_mappings_and_messages_mix() -> None:
    given = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": ""},
        {"content": "Hi", "role": "user"},
    ]
    assert conversation(given) == [SYSTEM, USER, Message("assistant", ""), USER]
    assert conversation(tuple(given[1:]), "Be brief.") == conversation(given)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (3, r"the prompt 3 is neither"),
        (b"Hi", r"the prompt b'Hi' is neither"),
        (None, r"the prompt None is neither"),
        ({"role": "user", "content": "Hi"}, r"the prompt \{'role': 'user', 'content': 'Hi'\} is neither"),
        ([], "no message"),
        (["Hi"], r"messages\[0\]='Hi' is no message"),
        ([USER, {"role": "user"}], r"messages\[1\]=\{'role': 'user'\} has no 'content'"),
        ([{"content": "Hi"}], r"messages\[0\]=.* has no 'role'"),
        ([{"role": "robot", "content": "Hi"}], r"messages\[0\]: 'robot' is not a role: use one of system"),
        ([{"role": ["user"], "content": "Hi"}], r"messages\[0\]: \['user'\] is not a role"),
        ([{"role": "user", "content": None}], r"messages\[0\]: the content None is no text"),
        ([{"role": "user", "content": "Hi", "name": "Ann"}], r"messages\[0\] has 'name'"),
        ([{"role": "x" * 1000}], r"^.{1,200}$"),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_sentence(prompt: list[Message], words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        conversation(prompt)
    assert "\n" not in str(caught.value)


def test_two_system_messages_are_refused() -> None:
    with pytest.raises(OptionError, match=r"system='Be kind\.' is given, and messages\[0\]"):
        conversation([SYSTEM, USER], "Be kind.")
