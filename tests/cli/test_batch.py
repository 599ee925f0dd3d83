"""`headrace batch`: what it asks of the engine, what it answers and says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import batch as batch_verb
from headrace.cli import batch_files
from headrace.engine.request_lines import read_requests
from headrace.engine.request_options import SAMPLING_NAMES
from headrace.errors import OptionError
from headrace.weights.progress import NullProgress
from tiny.batch import Engine, Runner, mixed_requests


def test_batch_answers_in_order_and_says_what_it_did(batch: Runner) -> None:
    batch.write({"id": "a", "prompt": "one two three"}, {"id": "b", "prompt": "four"})
    ending = batch()
    assert (ending.code, ending.out) == (0, "")
    assert ending.err.splitlines()[:-1] == ["headrace: 1 of 2 answers"]
    assert ending.err.splitlines()[-1].startswith("headrace: 2 answers, 4 tokens generated at ")
    assert batch.answers == [
        {
            "id": "a",
            "text": "ONE TWO THREE ",
            "token_ids": [1, 2, 3],
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 3, "completion_tokens": 3},
        },
        {
            "id": "b",
            "text": "FOUR ",
            "token_ids": [1],
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 1, "completion_tokens": 1},
        },
    ]
    assert batch.engine.closed


def test_batch_passes_every_option_on(batch: Runner) -> None:
    batch.write(
        {"id": "a", "prompt": "Hi", "stop": "x", "temperature": 0.5, "seed": 3, "logprobs": 2, "system": "S", "raw": False},
        {"id": "b", "messages": [{"role": "user", "content": "Hi"}], "system": "S", "max_tokens": 5},
        {
            "custom_id": "c",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "Hi", "top_p": 0.5, "logit_bias": {"5": -1}},
        },
    )
    loading = ("--threads", "3", "--context", "99", "--kv-memory", "1GB", "--kv-disk", "0", "--kv-formats", "f16,q8")
    assert batch("--max-tokens", "7", "-m", "gemma3-270m", "--kv-dir", "past", "--no-cache", *loading).code == 0
    plain = {"max_tokens": 7, "stop": (), "system": None, "raw": False, "logprobs": 0}
    assert batch.engine.asked == [
        ("Hi", plain | {"stop": ("x",), "temperature": 0.5, "seed": 3, "logprobs": 2, "system": "S", "raw": False}),
        ("user Hi", plain | {"max_tokens": 5, "system": "S"}),
        ("Hi", plain | {"top_p": 0.5, "logit_bias": {5: -1}, "raw": True}),
    ]
    (loaded,) = batch.command_line.loaded
    assert (loaded.model, loaded.threads, loaded.context_tokens, loaded.cache) == ("gemma3-270m", 3, 99, False)
    assert (loaded.kv_memory_bytes, loaded.kv_disk_bytes, loaded.kv_formats) == (10**9, 0, ("f16", "q8"))
    assert loaded.kv_dir == Path("past")


def test_batch_error_of_a_line_stays_with_it_and_the_exit_code_says_so(batch: Runner) -> None:
    batch.write(
        {"id": 1, "prompt": "one"},
        b"nonsense\n",
        {"id": 2, "prompt": "two broken three"},
        {"id": 3, "prompt": "long " * 60},
        {"id": 4, "prompt": "hot", "temperature": -1},
        {"id": 7, "messages": [{"role": "user", "content": "Hi"}], "raw": True},
        {"id": 1, "prompt": "again"},
        b'{"id": 6, "prompt": "\xff"}\n',
        {"custom_id": "q", "method": "POST", "url": "/v1/completions", "body": {"prompt": "broken"}},
        {"id": 5, "prompt": "five"},
    )
    ending = batch()
    assert ending.code == batch_verb.HAS_ERRORS
    assert "10 answers, 8 of them errors, 2 tokens" in ending.err
    answers = batch.answers
    assert [answer.get("id", answer.get("line")) for answer in answers] == [1, 2, 2, 3, 4, 7, 7, 8, "batch_req_9", 5]
    assert [answer.get("text") for answer in answers if "text" in answer] == ["ONE ", "FIVE "]
    told = [answer["error"] for answer in answers if answer.get("error")]
    starts = (
        "the line is not JSON",
        "the logit of",
        "the prompt has 60",
        "temperature=-1",
        "raw",
        "the id 1 is",
        "the line is not UTF-8",
    )
    assert [each.startswith(start) for each, start in zip(told, starts, strict=True)] == [True] * 7
    assert answers[8]["response"]["status_code"] == 500


def test_batch_keeps_as_many_on_their_way_as_it_may_and_short_ones_do_not_wait_for_long_ones(batch: Runner) -> None:
    batch.write({"id": 0, "prompt": "long " * 40}, *({"id": number, "prompt": "short"} for number in range(1, 101)))
    assert batch("--parallel", "4").code == 0
    assert batch.engine.most_on_their_way == 4
    assert batch.engine.num_turns <= 61  # three at a time beside the long one, as far as answers may wait, then four
    assert [answer["id"] for answer in batch.answers] == list(range(101))


def test_batch_reads_no_more_of_its_input_than_may_wait() -> None:
    from headrace.cli.batch_window import Window

    engine, num_read = Engine(), 0

    def lines() -> Iterator[bytes]:
        nonlocal num_read
        while True:
            num_read += 1
            yield json.dumps({"id": num_read, "prompt": "long " * 40 if num_read == 1 else "short"}).encode()

    window = Window(
        2,
        lambda request: engine.generate(request.prompt, max_tokens=99, stop=(), system=None, raw=False, logprobs=0),
        lambda request, result: b"",
    )
    answers = window.answers(read_requests(lines()))
    for _ in range(3):
        next(answers)
    assert num_read <= 3 + 16 * 2
    answers.close()
    assert all(answer.has_ended for answer in engine.answers)


@pytest.mark.parametrize("num_parallel", ["1", "3", "64"])
def test_batch_output_does_not_depend_on_how_many_are_on_their_way(
    batch: Runner, num_parallel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_verb.time, "time", lambda: 1_800_000_000.0)
    batch.write(*mixed_requests())
    batch("--parallel", "5")
    expected = batch.out.read_bytes()
    batch.out.unlink()
    assert batch("--parallel", num_parallel).code == 3
    assert batch.out.read_bytes() == expected


@pytest.mark.parametrize("options", [("--parallel", "0"), ("--parallel", "257"), ("--max-tokens", "0"), ("--context", "0")])
def test_batch_refuses_numbers_that_cannot_be(batch: Runner, options: tuple[str, str]) -> None:
    batch.write({"id": "a", "prompt": "one"})
    ending = batch(*options)
    assert (ending.code, ending.out) == (2, "")
    assert f"{'='.join(options)} is not" in ending.err
    assert not batch.out.exists()


def test_batch_mistake_of_ours_keeps_its_exception_and_the_answers_before_it(batch: Runner) -> None:
    batch.write({"id": 0, "prompt": "one"}, {"id": 1, "prompt": "surprise"})
    batch.surprise = ZeroDivisionError("ours")
    assert isinstance(batch("--parallel", "1").exception, ZeroDivisionError)
    assert [answer["id"] for answer in batch.answers] == [0]


def test_batch_model_that_cannot_be_loaded_leaves_nothing_behind_that_stops_the_next_run(batch: Runner) -> None:
    batch.write({"id": "a", "prompt": "one"})

    def fail(_options: Any, _progress: Any) -> Any:
        raise OptionError("no such model")

    batch.command_line.load = fail
    assert batch().code == 2
    batch.command_line.load = batch._load
    assert batch().code == 0


def test_batch_shows_a_bar_at_a_terminal(batch: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[Any, ...]] = []

    class Bar(NullProgress):
        def start(self, *task: Any) -> None:
            shown.append(task)

        def advance(self, amount: int) -> None:
            shown.append(("advance", amount))

        def done(self) -> None:
            shown.append(("done",))

    found = batch_files.Found(2, 1, iter(()))
    course = batch_verb.Course(found, 4, shows=True)
    monkeypatch.setattr("headrace.cli.progress.ConsoleProgress", Bar)
    monkeypatch.setattr(batch_verb.sys.stderr, "isatty", lambda: True, raising=False)
    with course:
        course.advance(5)
        course.advance(None)
    assert shown == [("answering", 4, "answers"), ("advance", 2), ("advance", 1), ("advance", 1), ("done",)]
    assert course.told() == "4 answers (2 were there before), 2 of them errors"


def test_batch_says_every_tenth_of_a_long_way(batch: Runner) -> None:
    batch.write(*({"id": number, "prompt": "one"} for number in range(35)))
    lines = batch().err.splitlines()
    assert lines[:-1] == [f"headrace: {number} of 35 answers" for number in range(4, 35, 4)]


def test_batch_document_shows_requests_that_can_be_answered(batch: Runner) -> None:
    text = (Path(__file__).parents[2] / "docs" / "batch.md").read_text(encoding="utf-8")
    examples = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        batch.prompts.write_text(example, encoding="utf-8")
        batch.out.unlink(missing_ok=True)
        assert batch().code == 0
    rows = re.findall(r"^\| (`\w.*?) \|", text, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {"id", "prompt", "messages", "system", "raw", "max_tokens", "stop", "logprobs", *SAMPLING_NAMES}
