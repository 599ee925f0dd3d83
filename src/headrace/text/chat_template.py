"""Conversations to tokens, by the chat template of the model.

Special tokens come only out of the template's own text: in the messages, whatever spells one is broken with a Unicode
noncharacter before the template runs, and mended in the pieces of text after the special tokens are split off.
The noncharacter stands next to characters that are no space, so that templates which trim messages still do.

A file without a template belongs to a base model, which continues text: there is no made-up template for it, the
caller goes on without one (`raw=True`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import OptionError, TemplateError

if TYPE_CHECKING:
    from datetime import datetime

    from headrace.text.tokenizer import Tokenizer

ROLES: Final = ("system", "developer", "user", "assistant", "model", "tool")
"""Roles a message can have; templates build special tokens out of them, so that they are no free text."""

_NONCHARACTERS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_MAX_TEMPLATE_CHARACTERS: Final = 1 << 20  # that a template may write around the messages
_MAX_REPEATS: Final = 4  # times that it may write the messages


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Raises:
        OptionError: the role is not one of `ROLES`, or the content is no text.
    """

    role: str
    content: str

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):  # callers may not be typed
            raise OptionError(f"the content {self.content!r:.60} is no text: give a string")
        if self.role not in ROLES:
            raise OptionError(f"{self.role!r} is not a role: use one of {', '.join(ROLES)}")


class ChatTemplate:
    """The chat template of a model with its tokenizer.

    Args:
        source: Jinja source, `tokenizer.chat_template` of a GGUF file.
        tokenizer: the tokenizer of the same file.
        now: the time that the template may ask for, or None to let it do without.
        variables: further variables that the template reads, such as `enable_thinking`.

    Raises:
        TemplateError: there is no template, or it cannot be compiled.
    """

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        *,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        from headrace.text.template_sandbox import BoundedTemplate  # loads jinja2, which takes 50 ms

        if source is None:
            raise TemplateError(
                "the model file has no chat template, it only continues text: use raw=True, or a model for chat",
                arguments=("raw",),
            )
        self._source = source
        self._template = BoundedTemplate(source)
        self._tokenizer = tokenizer
        self._now = now
        self._variables = {
            "bos_token": _text_of(tokenizer, tokenizer.bos_id),
            "eos_token": _text_of(tokenizer, tokenizer.eos_id),
            "tools": None,
            "documents": None,
            **(variables or {}),
        }

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as text, with special tokens written out.

        Raises:
            OptionError: there is no message.
            TemplateError: the template refuses these messages, fails or goes beyond its bounds.
        """
        return self._render([message.content for message in messages], messages, add_generation_prompt)

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """The conversation as token ids, special ones only where the template puts them.

        Raises:
            OptionError: there is no message, or one holds a lone surrogate.
            TemplateError: the template refuses these messages, fails or goes beyond its bounds.
        """
        covered, shield = self._covered(messages, add_generation_prompt)
        return self._ids(covered, shield)

    def encode_turn(
        self, messages: Sequence[Message], previous_ids: Sequence[int], *, add_generation_prompt: bool = True
    ) -> list[int] | None:
        """The token ids to append to those of the conversation so far.

        The conversation so far, with the tokens that were generated, is kept as it is, even where encoding its text
        again would give other tokens. Where it would give the same, so does `previous_ids` + the result.

        Args:
            messages: the whole conversation, the new messages included.
            previous_ids: token ids of its beginning, in full up to the last generated one.
            add_generation_prompt: end with the opening of an answer.

        Returns:
            The ids to append, or None where the template does not continue the text of `previous_ids` (it rewrites
            history, or an answer was cut): then `encode` everything.

        Raises:
            OptionError: there is no message, or one holds a lone surrogate.
            TemplateError: the template refuses these messages, fails or goes beyond its bounds.
        """
        previous = list(previous_ids)
        covered, shield = self._covered(messages, add_generation_prompt)
        whole = self._ids(covered, shield)
        if whole[: len(previous)] == previous:
            return whole[len(previous) :]
        tokenizer = self._tokenizer
        text = shield.uncover(covered)
        known_ids = previous
        if previous and previous[0] == tokenizer.bos_id and not text.startswith(tokenizer.token_text(previous[0])):
            known_ids = previous[1:]  # the BOS token that the template did not write
        known = tokenizer.source_text(known_ids)
        if not text.startswith(known):
            return None
        rest = covered[shield.covered_index(covered, len(known)) :]
        continues = bool(previous) and not tokenizer.is_special(previous[-1])
        return self._encode_parts(tokenizer.split_special(rest), shield, continues=continues)

    def _covered(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[str, _Shield]:
        contents = [message.content for message in messages]
        shield = _Shield(self._special_texts, "".join([self._source, *contents]))
        return self._render([shield.cover(content) for content in contents], messages, add_generation_prompt), shield

    def _render(self, contents: list[str], messages: Sequence[Message], add_generation_prompt: bool) -> str:
        if not messages:
            raise OptionError("the conversation has no message: pass at least one")
        variables = {
            **self._variables,
            "messages": [{"role": message.role, "content": text} for message, text in zip(messages, contents, strict=True)],
            "add_generation_prompt": add_generation_prompt,
        }
        max_characters = _MAX_TEMPLATE_CHARACTERS + _MAX_REPEATS * sum(map(len, contents))
        return self._template.render(variables, now=self._now, max_characters=max_characters)

    def _ids(self, covered: str, shield: _Shield) -> list[int]:
        tokenizer = self._tokenizer
        parts = tokenizer.split_special(covered)
        bos = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
        if parts[:1] == bos:
            bos = []  # the template has written it
        return bos + self._encode_parts(parts, shield, continues=False)

    def _encode_parts(self, parts: Sequence[str | int], shield: _Shield, *, continues: bool) -> list[int]:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._tokenizer.encode(shield.uncover(part), continues=continues)
            continues = False
        return ids

    @cached_property
    def _special_texts(self) -> _SpecialTexts:
        return _SpecialTexts(self._tokenizer.special_texts)


class _SpecialTexts:
    """Texts of special tokens, the longest first, and what a message must not begin or end with."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self.endings = {text[length:] for text in texts for length in range(1, len(text))}
        self.max_characters = max(map(len, texts), default=0)


class _Shield:
    """Breaks the texts of special tokens in messages, and mends them again.

    Raises:
        TemplateError: the messages use up all noncharacters.
    """

    def __init__(self, special: _SpecialTexts, taken: str) -> None:
        self._special = special
        single = [text for text in special.texts if len(text) == 1]
        free = [mark for mark in _NONCHARACTERS if mark not in taken]
        if len(free) <= len(single):
            raise TemplateError("the messages hold every Unicode noncharacter from U+FDD0 to U+FDEF: remove these characters")
        self._mark = free[0]
        self._substitutes = dict(zip(single, free[1:], strict=False))  # a single character cannot be broken

    def cover(self, content: str) -> str:
        """The content without the text of any special token, nor the beginning of one at its end and so on."""
        for text in self._special.texts:
            if text in self._substitutes:
                content = content.replace(text, self._substitutes[text])
            while text in content:
                content = content.replace(text, text[0] + self._mark + text[1:])
        # What the template writes next to a message could complete a special token.
        core = content.strip()
        start = content.find(core)
        lengths = range(1, min(self._special.max_characters, len(core) + 1))
        before = self._mark if any(core[:length] in self._special.endings for length in lengths) else ""
        after = self._mark if any(core[-length:] in self._special.beginnings for length in lengths) else ""
        return content[:start] + before + core + after + content[start + len(core) :]

    def uncover(self, text: str) -> str:
        """The inverse of `cover`, for a piece of a rendered text too."""
        for character, substitute in self._substitutes.items():
            text = text.replace(substitute, character)
        return text.replace(self._mark, "")

    def covered_index(self, covered: str, index: int) -> int:
        """Where the character of this index in the uncovered text stands in the covered one."""
        found = index
        while (moved := index + covered.count(self._mark, 0, found)) != found:
            found = moved
        return found


def _text_of(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)
