"""Options of a request as JSON has them, by Headrace's names or OpenAI's, to arguments of `Model.generate`.

Nothing is dropped in silence: a name that means nothing here is refused, and so is a value that asks for what cannot be had
(`n` of 2). An option that is null is not given. Types are checked here, ranges by whoever uses a value.
Knows neither ids nor lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace.engine.sampler import SamplingParams
from headrace.errors import OptionError
from headrace.text.chat_template import Message
from headrace.text.messages import conversation

SAMPLING_NAMES = tuple(each.name for each in fields(SamplingParams) if each.name != "logprobs")
"""Options that say how tokens are chosen."""

_SHOWN_CHARACTERS = 60
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # one way to write each, so that none comes twice

_NEUTRAL: Mapping[str, object] = {
    "n": 1,
    "best_of": 1,
    "stream": False,
    "echo": False,
    "store": False,
    "response_format": {"type": "text"},
}
"""Of OpenAI's options that cannot be had, the value that asks for nothing."""

_IGNORED = ("model", "user", "metadata")
"""Of OpenAI's options, those that change no answer here: there is one model, and nobody is told who asks."""


@dataclass(frozen=True)
class Wanted:
    """What to answer and how: the prompt, arguments of `Model.generate`, and fields of `SamplingParams`, by name.

    `shows_logprobs` is the number of likeliest tokens that OpenAI's answer shows at each place; None: no log-probabilities.
    """

    prompt: str | tuple[Message, ...]
    options: Mapping[str, Any]
    sampling: Mapping[str, Any]
    shows_logprobs: int | None = None


def own_options(document: Mapping[str, Any]) -> Wanted:
    """The options of a request in Headrace's own form.

    Raises:
        OptionError: there is no prompt or a second one, a name is unknown, or a value has the wrong type.
    """
    given = {name: value for name, value in document.items() if name != "id" and value is not None}
    known = ("prompt", "messages", "system", "raw", *_OPTIONS, *SAMPLING_NAMES)
    _check_names(given, known)
    if ("prompt" in given) == ("messages" in given):
        raise OptionError("give either a prompt or messages" + (", not both" if "prompt" in given else ""))
    options, system = _options(given), given.get("system")
    raw = "raw" in given and _truth("raw", given["raw"])
    if system is not None:
        _text("system", system)
    prompt = _messages(given["messages"]) if "messages" in given else _prompt(given["prompt"])
    options |= {"system": system, "raw": raw}
    return Wanted(prompt, options, _sampling(given))


def openai_body(body: Mapping[str, Any], *, is_chat: bool) -> Wanted:
    """The options of a body for `/v1/chat/completions`, or else for `/v1/completions`.

    Raises:
        OptionError: as for `own_options`.
    """
    given = {name: value for name, value in body.items() if value is not None}
    subject, limits = ("messages", ("max_tokens", "max_completion_tokens")) if is_chat else ("prompt", ("max_tokens",))
    logprobs = ("logprobs", "top_logprobs") if is_chat else ("logprobs",)
    _check_names(given, (subject, *limits, "stop", *logprobs, *SAMPLING_NAMES, *_NEUTRAL, *_IGNORED))
    for name, neutral in _NEUTRAL.items():
        if name in given and (given[name] != neutral or type(given[name]) is not type(neutral)):
            raise OptionError(f"{name}={shown(given[name])} cannot be had: leave it out, or give {neutral!r}")
    if "model" in given:
        _text("model", given["model"])
    if subject not in given:
        raise OptionError(f"the body has no {subject!r}: give it")
    if all(limit in given for limit in limits[-2:]) and len(limits) == 2:
        raise OptionError("give max_tokens or max_completion_tokens, not both")
    renamed = {("max_tokens" if name == "max_completion_tokens" else name): value for name, value in given.items()}
    num_shown = (_chat_logprobs if is_chat else _completion_logprobs)(given)
    renamed.pop("logprobs", None)
    options = _options(renamed)
    if num_shown is not None:
        options["logprobs"] = max(num_shown, 1)
    if is_chat:
        return Wanted(_messages(given["messages"]), options, _sampling(given), num_shown)
    return Wanted(_prompt(given["prompt"]), {**options, "system": None, "raw": True}, _sampling(given), num_shown)


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    wanted = "logprobs" in given and _truth("logprobs", given["logprobs"])
    if "top_logprobs" in given and not wanted:
        raise OptionError("top_logprobs needs logprobs=true: give both, or leave both out")
    return _count("top_logprobs", given.get("top_logprobs", 0)) if wanted else None


def _completion_logprobs(given: Mapping[str, Any]) -> int | None:
    return _count("logprobs", given["logprobs"]) if "logprobs" in given else None


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {name: given[name] for name in SAMPLING_NAMES if name in given}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _bias(sampling["logit_bias"])
    return sampling


def _bias(value: object) -> dict[int, Any]:
    """JSON's names are texts: {"123": -5} biases token 123."""
    if not isinstance(value, dict) or not all(_TOKEN_ID.fullmatch(name) for name in value):
        raise OptionError(f'logit_bias={shown(value)} is no object from token ids to numbers: write {{"123": -5}}')
    return {int(name): bias for name, bias in value.items()}


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: check(name, given[name]) for name, check in _OPTIONS.items() if name in given}


def _check_names(given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        names = ", ".join(shown(name) for name in unknown[:4])
        raise OptionError(f"{names} {'is' if len(unknown) == 1 else 'are'} unknown: use {', '.join(sorted(known))}")


def _prompt(value: object) -> str:
    text = _text("prompt", value)
    if not text:
        raise OptionError("the prompt is empty: give some text")
    return text


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise OptionError(f"messages={shown(value)} is no list of messages: give at least one")
    return tuple(conversation(value))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name}={shown(value)} is no text: give a string")
    return value


def _truth(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={shown(value)} is neither true nor false: give one of them")
    return value


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(f"{name}={shown(value)} cannot be used: give a whole number from 0 on")
    return value


def _max_tokens(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name}={shown(value)} is not a number of tokens: use 1 or more")
    return value


def _stop(name: str, value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise OptionError(f"{name}={shown(value)} is not a text or a list of texts with a character each: leave empty ones out")
    return tuple(texts)


def shown(value: object) -> str:
    """A value as messages show it, cut where it gets long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


_OPTIONS: Mapping[str, Callable[[str, object], Any]] = {"max_tokens": _max_tokens, "stop": _stop, "logprobs": _count}
"""Arguments of `Model.generate` that both forms name alike."""
