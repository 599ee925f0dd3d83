"""Lines of requests and of answers, one JSON object a line, in two forms; whoever serves files or a socket can use them.

| form | a request | its answer |
|---|---|---|
| Headrace's own | `{"id", "prompt" or "messages", options by name}` | `{"id", "text", "token_ids", "finish_reason", "usage"}` |
| OpenAI's batch | `{"custom_id", "method", "url", "body"}` | `{"id", "custom_id", "response", "error"}` |

A line that cannot be used is a request with an `error`, never an exception: others of the same file go on. An own answer that
failed is `{"id", "error"}`, an OpenAI one has a `status_code` that is not 200; a line without an id of its own is answered by
`{"line", "error"}`, with its number.

Invariant: the bytes of an answer depend on the request, the result, the model's name and the time only (an own answer not
even on the last two), and every answer of a request begins with the same bytes, its `key`, so that a file of answers can be
compared with the requests that it answers.
Knows no files and no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from headrace.engine.request_options import openai_body, own_options, shown
from headrace.engine.results import GenerationResult, TokenLogprob
from headrace.errors import ContextOverflowError, HeadraceError, OptionError, TemplateError
from headrace.text.chat_template import Message

LINE_BYTES_MAX = 64 << 20
"""A longer line is refused: no context holds what such a line can say."""

_BOM = b"\xef\xbb\xbf"
_THEIRS = (str, OptionError, ContextOverflowError, TemplateError)
"""Errors that the request itself is to blame for."""
_LINE_BREAKS = {character: f"\\u{character:04x}" for character in (0x85, 0x2028, 0x2029)}
"""Characters that JSON lets stand in a text, but at which some readers of lines break one."""


class Form(Enum):
    """How a request was written, and how its answer is."""

    OWN = "own"
    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


@dataclass(frozen=True)
class RequestLine:
    """One line of a file of requests.

    Attributes:
        number: of the line, from 1 on.
        form: how its answer is written.
        id: what its answer is known by; None if the line has none that it could be.
        prompt: what to answer: a text, or the messages of a conversation.
        options: arguments of `Model.generate` by name, besides the prompt and fields of `SamplingParams`.
        sampling: fields of `SamplingParams` by name.
        error: why it cannot be answered.
        shows_logprobs: most likely tokens to show at each place, where the form tells this from asking for any; else None.
    """

    number: int
    form: Form = Form.OWN
    id: str | int | None = None
    prompt: str | tuple[Message, ...] = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    shows_logprobs: int | None = None

    @property
    def key(self) -> bytes:
        """What every answer of this request begins with."""
        if self.id is None:
            return _opening({"line": self.number})
        if self.form is Form.OWN:
            return _opening({"id": self.id})
        return _opening({"id": f"batch_req_{self.number}", "custom_id": self.id})


def read_requests(lines: Iterable[bytes]) -> Iterator[RequestLine]:
    """The requests of a file, given line by line; blank lines are none, nor is a byte-order mark at the beginning.

    Of each id 16 bytes are kept, so that the second line of an id can be refused; nothing else is.
    """
    seen: set[bytes] = set()
    for number, each in enumerate(lines, 1):
        line = each.removeprefix(_BOM) if number == 1 else each
        if not line.strip():
            continue
        request = parse_request(line, number)
        if request.id is not None:
            digest = hashlib.blake2b(_json(request.id).encode(), digest_size=16).digest()
            if digest in seen:
                name = "id" if request.form is Form.OWN else "custom_id"
                told = f"the {name} {shown(request.id)} is that of an earlier line: give each line its own"
                request = RequestLine(number, error=told)
            seen.add(digest)
        yield request


def parse_request(line: bytes, number: int) -> RequestLine:
    """The request of one line: UTF-8, with or without its line break."""
    try:
        document = _object_of(line)
    except OptionError as error:
        return RequestLine(number, error=str(error))
    is_openai = not {"custom_id", "method", "url", "body"}.isdisjoint(document)
    name = "custom_id" if is_openai else "id"
    given = document.get(name)
    if is_openai and not isinstance(given, str):
        return RequestLine(number, error=_no_id(name, given, "a text"))
    if isinstance(given, bool) or not isinstance(given, str | int):
        return RequestLine(number, error=_no_id(name, given, "a text or a whole number"))
    form = Form.CHAT if is_openai else Form.OWN
    try:
        if not is_openai:
            own = own_options(document)
            return RequestLine(number, form, given, own.prompt, own.options, own.sampling)
        form = _form_of(document)
        body = openai_body(document["body"], is_chat=form is Form.CHAT)
        return RequestLine(number, form, given, body.prompt, body.options, body.sampling, shows_logprobs=body.shows_logprobs)
    except OptionError as error:
        return RequestLine(number, form, given, error=str(error))


def answer_line(request: RequestLine, result: GenerationResult, model: str, created_s: int) -> bytes:
    """The line that answers a request: `model` answered it, at a time in seconds since 1970."""
    if request.form is not Form.OWN:
        return _line(request, _response(request, 200, _completion(request, result, model, created_s)))
    document: dict[str, object] = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "usage": {"prompt_tokens": result.usage.prompt_tokens, "completion_tokens": result.usage.completion_tokens},
    }
    if result.seed is not None:
        document["seed"] = result.seed
    if result.logprobs:
        document["logprobs"] = [
            {
                "token_id": token.token_id,
                "text": token.text,
                "logprob": token.logprob,
                "top": [{"token_id": other, "text": text, "logprob": logprob} for other, text, logprob in token.top],
            }
            for token in result.logprobs
        ]
    return _line(request, document)


def error_line(request: RequestLine, error: str | HeadraceError) -> bytes:
    """The line that says why a request has no answer: its own error, or one that was raised while it was computed."""
    message = " ".join(str(error).split())
    if request.form is Form.OWN or request.id is None:
        return _line(request, {"error": message})
    is_theirs = isinstance(error, _THEIRS)
    kind = "invalid_request_error" if is_theirs else "server_error"
    told: dict[str, object] = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return _line(request, _response(request, 400 if is_theirs else 500, told))


def is_answered(request: RequestLine, answer: bytes) -> bool:
    """Whether a line, which begins with the request's key, is an answer and no error."""
    behind = answer[len(request.key) :]
    if request.form is Form.OWN or request.id is None:
        return not behind.startswith(b'"error": ')
    return behind.startswith(b'"response": {"status_code": 200,')


def _object_of(line: bytes) -> dict[str, Any]:
    if len(line) > LINE_BYTES_MAX:
        raise OptionError(f"the line is longer than {LINE_BYTES_MAX} bytes: no context holds that, shorten it")
    try:
        document = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_single_names)
    except UnicodeDecodeError as error:
        raise OptionError(f"the line is not UTF-8 text at byte {error.start}: convert the file") from None
    except json.JSONDecodeError as error:
        raise OptionError(f"the line is not JSON at column {error.colno} ({error.msg}): write one object a line") from None
    except RecursionError:
        raise OptionError("the line is nested too deeply: write one plain object a line") from None
    except ValueError:  # what is left of it: Python reads no number of so many digits
        raise OptionError("the line holds a number of thousands of digits: write numbers that can be used") from None
    if not isinstance(document, dict):
        raise OptionError(f"the line is {shown(document)} and no JSON object: write {{...}} with an id and a prompt")
    if b"\\u" in line:  # nothing else makes half a pair out of UTF-8
        _check_encodable(document)
    return document


def _refuse_constant(name: str) -> None:
    raise OptionError(f"the line holds {name}, which is no JSON: give a number")


def _single_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise OptionError(f"{shown(twice)} is given twice: leave one of them out")
    return document


def _check_encodable(document: dict[str, Any]) -> None:
    try:
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise OptionError("the line has half of a surrogate pair (\\ud800 to \\udfff alone), which is no character") from None


def _no_id(name: str, given: object, kind: str) -> str:
    what = f"has no {name!r}" if given is None else f"has {name}={shown(given)}"
    return f"the line {what}: give it one, {kind}"


def _form_of(document: Mapping[str, Any]) -> Form:
    for name in document:
        if name not in {"custom_id", "method", "url", "body"}:
            raise OptionError(f"{shown(name)} is no part of a request: use custom_id, method, url, body")
    method, url = document.get("method"), document.get("url")
    if method != "POST":
        raise OptionError(f"method={shown(method)} cannot be used: give 'POST'")
    if url not in (Form.CHAT.value, Form.COMPLETION.value):
        raise OptionError(f"url={shown(url)} cannot be used: give {Form.CHAT.value!r} or {Form.COMPLETION.value!r}")
    if not isinstance(document.get("body"), dict):
        raise OptionError(f"body={shown(document.get('body'))} is no JSON object: give the request's options in it")
    return Form(url)


def _response(request: RequestLine, status_code: int, body: dict[str, object]) -> dict[str, object]:
    response = {"status_code": status_code, "request_id": f"req_{request.number}", "body": body}
    return {"response": response, "error": None}


def _completion(request: RequestLine, result: GenerationResult, model: str, created_s: int) -> dict[str, object]:
    """A `chat.completion` or a `text_completion`, as OpenAI's API reference has them."""
    is_chat = request.form is Form.CHAT
    choice: dict[str, object] = {"index": 0}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": result.text, "refusal": None}
    else:
        choice["text"] = result.text
    num_shown = request.shows_logprobs
    logprobs = _chat_logprobs if is_chat else _completion_logprobs
    choice["logprobs"] = None if num_shown is None else logprobs(result.logprobs, num_shown)
    choice["finish_reason"] = "length" if result.finish_reason == "context" else result.finish_reason
    usage = result.usage
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request.number}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created_s,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob], num_shown: int) -> dict[str, object]:
    def entry(text: str, logprob: float) -> dict[str, object]:
        return {"token": text, "logprob": logprob, "bytes": None}

    content = [
        {
            **entry(token.text, token.logprob),
            "top_logprobs": [entry(text, logprob) for _, text, logprob in token.top[:num_shown]],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Sequence[TokenLogprob], num_shown: int) -> dict[str, object]:
    def likeliest(token: TokenLogprob) -> dict[str, float]:
        # likeliest first, so that of tokens with the same text the likelier one is put in last
        return {text: logprob for _, text, logprob in reversed(token.top[:num_shown])}

    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [likeliest(token) for token in tokens] if num_shown else None,
    }


def _line(request: RequestLine, rest: Mapping[str, object]) -> bytes:
    return request.key + _json(rest)[1:].encode() + b"\n"


def _opening(names: Mapping[str, object]) -> bytes:
    """The beginning of an object that goes on: b'{"id": "a", '."""
    return _json(names)[:-1].encode() + b", "


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)
