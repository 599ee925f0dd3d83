"""Lines of requests and of answers, in both forms: what is read out of them, and what is said of those that are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.request_lines import (
    LINE_BYTES_MAX,
    Form,
    RequestLine,
    answer_line,
    error_line,
    is_answered,
    parse_request,
    read_requests,
)
from headrace.engine.request_options import SAMPLING_NAMES
from headrace.engine.results import FinishReason, GenerationResult, LedgerTotals, Timings, TokenLogprob, Usage
from headrace.errors import ContextOverflowError, NumericError
from headrace.text.chat_template import Message

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def _result(text: str = "Hé", finish: FinishReason = "stop", logprobs: tuple[TokenLogprob, ...] = ()) -> GenerationResult:
    return GenerationResult(text, (5, 6), finish, Usage(9, 4, 2), Timings(1, 2, 3, 4), LedgerTotals(), LedgerTotals(), logprobs)


def _parse(document: object, number: int = 1) -> RequestLine:
    return parse_request(json.dumps(document).encode(), number)


def _openai(url: str, **body: Any) -> RequestLine:
    return _parse({"custom_id": "q", "method": "POST", "url": url, "body": {"model": "any", **body}})


def test_own_prompt_and_every_option_are_read() -> None:
    sampling: dict[str, Any] = {**dict.fromkeys(SAMPLING_NAMES, 0), "logit_bias": {"12": -5}}
    given = {"id": "a", "prompt": "Hi", "max_tokens": 9, "stop": "END", "logprobs": 2, "system": "Be brief", **sampling}
    request = _parse(given)
    assert request.error is None
    assert (request.id, request.form, request.prompt) == ("a", Form.OWN, "Hi")
    assert request.options == {"max_tokens": 9, "stop": ("END",), "logprobs": 2, "system": "Be brief", "raw": False}
    assert request.sampling == {**sampling, "logit_bias": {12: -5}}


def test_own_messages_are_read() -> None:
    request = _parse({"id": 7, "messages": HI, "system": "Be brief", "stop": ["a", "b"], "seed": None})
    assert (request.id, request.error) == (7, None)
    assert request.prompt == (Message("user", "Hi"),)
    assert request.options == {"stop": ("a", "b"), "system": "Be brief", "raw": False}
    assert request.sampling == {}


def test_openai_chat_is_read() -> None:
    request = _openai(CHAT, messages=HI, max_completion_tokens=3, temperature=0.5, stop="x", n=1, stream=False, user="me")
    assert (request.id, request.form, request.error) == ("q", Form.CHAT, None)
    assert request.prompt == (Message("user", "Hi"),)
    assert (request.options, request.sampling) == ({"max_tokens": 3, "stop": ("x",)}, {"temperature": 0.5})


def test_openai_completion_continues_the_text_as_it_is() -> None:
    request = _openai(TEXT, prompt="Once", max_tokens=3, seed=1, logprobs=0)
    assert (request.form, request.prompt, request.shows_logprobs) == (Form.COMPLETION, "Once", 0)
    assert request.options == {"max_tokens": 3, "logprobs": 1, "system": None, "raw": True}
    assert request.sampling == {"seed": 1}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"nonsense", "not JSON at column 1"),
        (b'{"id": "a", "prompt": "Hi"', "not JSON at column"),
        (b'{"id": "a"} {"id": "b"}', "not JSON at column 13"),
        (b'["id"]', "['id'] and no JSON object"),
        (b"null", "None and no JSON object"),
        (b'{"prompt": "Hi"}', "has no 'id'"),
        (b'{"id": null, "prompt": "Hi"}', "has no 'id'"),
        (b'{"id": true, "prompt": "Hi"}', "has id=True"),
        (b'{"id": 1.5, "prompt": "Hi"}', "has id=1.5"),
        (b'{"custom_id": 5, "body": {}}', "has custom_id=5"),
        (b'{"id": "a", "url": "/v1/completions"}', "has no 'custom_id'"),
        (b'{"id": "a", "prompt": "\xff"}', "not UTF-8 text at byte 23"),
        (b'{"id": "a", "prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"id": "\\udfff", "prompt": "x"}', "half of a surrogate pair"),
        (b'{"id": "a", "prompt": "Hi", "prompt": "Ho"}', "'prompt' is given twice"),
        (b'{"id": "a", "prompt": "Hi", "temperature": NaN}', "NaN, which is no JSON"),
        (b'{"id": "a", "prompt": "Hi", "seed": ' + b"1" * 5000 + b"}", "thousands of digits"),
        (b"[" * 200_000, "nested too deeply"),
        (b" " * LINE_BYTES_MAX + b"{}", "longer than"),
    ],
)
def test_line_without_a_usable_id_is_answered_by_its_number(line: bytes, told: str) -> None:
    request = parse_request(line, 3)
    assert request.error is not None
    assert told in request.error
    answer = json.loads(error_line(request, request.error))
    assert answer == {"line": 3, "error": request.error}


@pytest.mark.parametrize(
    ("rest", "told"),
    [
        ({}, "give either a prompt or messages"),
        ({"prompt": "Hi", "messages": HI}, "not both"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": 5}, "prompt=5 is no text"),
        ({"prompt": "Hi", "temprature": 1, "n": 2}, "'temprature', 'n' are unknown: use frequency_penalty"),
        ({"prompt": "Hi", "max_tokens": 0}, "max_tokens=0 is not a number of tokens"),
        ({"prompt": "Hi", "max_tokens": True}, "max_tokens=True is not a number of tokens"),
        ({"prompt": "Hi", "max_tokens": "9"}, "max_tokens='9' is not a number of tokens"),
        ({"prompt": "Hi", "stop": ""}, "stop='' is not a text or a list"),
        ({"prompt": "Hi", "stop": ["a", 1]}, "stop=['a', 1] is not a text or a list"),
        ({"prompt": "Hi", "logprobs": -1}, "logprobs=-1 cannot be used"),
        ({"prompt": "Hi", "logprobs": True}, "logprobs=True cannot be used"),
        ({"prompt": "Hi", "logit_bias": [1]}, "logit_bias=[1] is no object from token ids"),
        ({"prompt": "Hi", "logit_bias": {"01": 1}}, "logit_bias={'01': 1} is no object from token ids"),
        ({"prompt": "Hi", "raw": 1}, "raw=1 is neither true nor false"),
        ({"prompt": "Hi", "system": []}, "system=[] is no text"),
        ({"messages": []}, "the conversation has no message"),
        ({"messages": "Hi"}, "messages='Hi' is no list of messages"),
        ({"messages": ["Hi"]}, "messages[0]='Hi' is no message"),
        ({"messages": [*HI, {"role": "user"}]}, "messages[1]={'role': 'user'} has no 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, "messages[0]: the content [{"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0]: 'wizard' is not a role"),
        ({"messages": [{"role": "user", "content": "Hi", "name": "Ann"}]}, "messages[0] has 'name'"),
    ],
)
def test_own_line_that_cannot_be_used_says_what_is_wrong(rest: dict[str, Any], told: str) -> None:
    request = _parse({"id": "a", **rest})
    assert request.error is not None
    assert told in request.error
    assert json.loads(error_line(request, request.error)) == {"id": "a", "error": request.error}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"method": "GET"}, "method='GET' cannot be used"),
        ({"method": None}, "method=None cannot be used"),
        ({"url": "/v1/embeddings"}, "url='/v1/embeddings' cannot be used"),
        ({"url": ["/v1/completions"]}, "url=['/v1/completions'] cannot be used"),
        ({"body": None}, "body=None is no JSON object"),
        ({"priority": 1}, "'priority' is no part of a request"),
        ({"body": {}}, "the body has no 'messages'"),
        ({"body": {"messages": HI, "prompt": "Hi"}}, "'prompt' is unknown"),
        ({"body": {"messages": HI, "tools": []}}, "'tools' is unknown"),
        ({"body": {"messages": HI, "n": 2}}, "n=2 cannot be had"),
        ({"body": {"messages": HI, "n": True}}, "n=True cannot be had"),
        ({"body": {"messages": HI, "stream": True}}, "stream=True cannot be had"),
        ({"body": {"messages": HI, "response_format": {"type": "json_object"}}}, "response_format="),
        ({"body": {"messages": HI, "max_tokens": 1, "max_completion_tokens": 1}}, "not both"),
        ({"body": {"messages": HI, "logprobs": 3}}, "logprobs=3 is neither true nor false"),
        ({"body": {"messages": HI, "top_logprobs": 3}}, "top_logprobs needs logprobs=true"),
        ({"body": {"messages": HI, "model": 3}}, "model=3 is no text"),
        ({"url": TEXT, "body": {"prompt": ["Hi"]}}, "prompt=['Hi'] is no text"),
        ({"url": TEXT, "body": {"messages": HI}}, "'messages' is unknown"),
    ],
)
def test_openai_line_that_cannot_be_used_says_what_is_wrong(changes: dict[str, Any], told: str) -> None:
    request = _parse({"custom_id": "q", "method": "POST", "url": CHAT, "body": {"messages": HI}} | changes, 4)
    assert request.error is not None
    assert told in request.error
    answer = json.loads(error_line(request, request.error))
    assert (answer["id"], answer["custom_id"], answer["error"]) == ("batch_req_4", "q", None)
    assert answer["response"]["status_code"] == 400
    assert answer["response"]["body"]["error"]["message"] == request.error


def test_bom_crlf_blank_lines_and_a_last_line_without_newline_are_read() -> None:
    lines = [b'\xef\xbb\xbf{"id": 1, "prompt": "x"}\r\n', b"\r\n", b" \n", b'{"id": 2, "prompt": "\xc3\xa9"}']
    requests = list(read_requests(lines))
    assert [(request.number, request.id, request.prompt, request.error) for request in requests] == [
        (1, 1, "x", None),
        (4, 2, "é", None),
    ]


def test_second_line_of_an_id_is_refused_and_does_not_take_the_first_ones_place() -> None:
    lines = [b'{"id": "a", "prompt": "x"}\n', b'{"id": "a"}\n', b'{"id": "1", "prompt": "x"}\n', b'{"id": 1, "prompt": "x"}\n']
    requests = list(read_requests(lines))
    assert [request.id for request in requests] == ["a", None, "1", 1]
    assert requests[1].error == "the id 'a' is that of an earlier line: give each line its own"
    assert requests[1].key == b'{"line": 2, '


def test_own_answer_depends_on_the_answer_alone() -> None:
    request = _parse({"id": "a", "prompt": "x"})
    line = answer_line(request, _result(), "tiny", 123)
    assert (
        line
        == (
            '{"id": "a", "text": "Hé", "token_ids": [5, 6], "finish_reason": "stop", '
            '"usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n'
        ).encode()
    )
    assert line == answer_line(request, _result(), "other", 456)
    assert json.loads(answer_line(request, replace(_result(), seed=7), "tiny", 123))["seed"] == 7
    assert line.startswith(request.key)
    assert is_answered(request, line)


def test_answer_is_one_line_for_every_reader_of_lines() -> None:
    line = answer_line(_parse({"id": "\u2028", "prompt": "x"}), _result("a\u2028b\u2029c\x85d\r\n\x1ce"), "tiny", 0)
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line)["text"] == "a\u2028b\u2029c\x85d\r\n\x1ce"
    assert json.loads(line)["id"] == "\u2028"


def test_own_answer_has_the_logprobs_that_were_asked_for() -> None:
    logprobs = (TokenLogprob(5, "H", -0.5, ((6, "J", -1.5),)),)
    answer = json.loads(answer_line(_parse({"id": "a", "prompt": "x"}), _result(logprobs=logprobs), "tiny", 0))
    top = [{"token_id": 6, "text": "J", "logprob": -1.5}]
    assert answer["logprobs"] == [{"token_id": 5, "text": "H", "logprob": -0.5, "top": top}]


def test_openai_chat_answer_is_a_chat_completion() -> None:
    request = _openai(CHAT, messages=HI)
    line = answer_line(request, _result(finish="context"), "tiny", 123)
    assert is_answered(request, line)
    assert json.loads(line) == {
        "id": "batch_req_1",
        "custom_id": "q",
        "response": {
            "status_code": 200,
            "request_id": "req_1",
            "body": {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 123,
                "model": "tiny",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Hé", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "length",
                    }
                ],
                "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
            },
        },
        "error": None,
    }


def test_openai_logprobs_are_as_many_as_were_asked_for() -> None:
    logprobs = (TokenLogprob(5, "H", -0.5, ((5, "H", -0.5), (6, "H", -1.5), (7, "J", -2.5))),)
    chat = _openai(CHAT, messages=HI, logprobs=True, top_logprobs=1)
    body = json.loads(answer_line(chat, _result(logprobs=logprobs), "tiny", 0))["response"]["body"]
    entry = {"token": "H", "logprob": -0.5, "bytes": None}
    assert body["choices"][0]["logprobs"] == {"content": [{**entry, "top_logprobs": [entry]}], "refusal": None}
    for asked, shown in ((0, None), (3, [{"H": -0.5, "J": -2.5}])):
        text = _openai(TEXT, prompt="x", logprobs=asked)
        body = json.loads(answer_line(text, _result(logprobs=logprobs), "tiny", 0))["response"]["body"]
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"] == "Hé"
        assert body["choices"][0]["logprobs"] == {"tokens": ["H"], "token_logprobs": [-0.5], "top_logprobs": shown}


@pytest.mark.parametrize(("error", "status"), [(ContextOverflowError("too\nlong"), 400), (NumericError("too\nlong"), 500)])
def test_error_of_a_computation_stays_on_its_line(error: Any, status: int) -> None:
    own, openai = _parse({"id": "a", "prompt": "x"}), _openai(CHAT, messages=HI)
    assert error_line(own, error) == b'{"id": "a", "error": "too long"}\n'
    response = json.loads(error_line(openai, error))["response"]
    assert (response["status_code"], response["body"]["error"]["message"]) == (status, "too long")
    for request in (own, openai):
        assert error_line(request, error).startswith(request.key)
        assert not is_answered(request, error_line(request, error))
