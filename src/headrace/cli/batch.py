"""`headrace batch`: a file of requests, a file of answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, BinaryIO, Self

import typer

from headrace.cli import options as o
from headrace.cli.errors import guarded, say
from headrace.cli.loading import loaded_model
from headrace.errors import OptionError

if TYPE_CHECKING:
    from headrace.cli.batch_files import AnswerFile, AnswerStream, Found
    from headrace.cli.progress import ConsoleProgress
    from headrace.cli.protocols import ModelLike
    from headrace.engine.request_lines import RequestLine

HAS_ERRORS = 3
"""Exit code when every request has its line and some of the lines are errors."""

STANDARD = "-"
DEFAULT_PARALLEL = 64
MOST_PARALLEL = 256
"""More would only wait in the engine, whose queue is bounded."""
SAID_EVERY = 1000
"""Answers from one line about the progress to the next, where nobody knows how many there will be."""


@guarded
def batch(
    prompts: Annotated[
        str,
        typer.Argument(
            metavar="PROMPTS", help="A file with one request a line, as JSON; - for standard input.", show_default=False
        ),
    ],
    out: Annotated[
        str,
        typer.Option("--out", metavar="FILE", help="Where answers go, one a line; - for standard output.", show_default=False),
    ],
    model: o.Model = o.DEFAULT_MODEL,
    max_tokens: o.MaxTokens = o.DEFAULT_MAX_TOKENS,
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="N", help="Most answers that are on their way at once.")
    ] = DEFAULT_PARALLEL,
    threads: o.Threads = None,
    context: o.Context = None,
    no_cache: o.NoCache = False,
    kv_memory: o.KvMemory = None,
    kv_disk: o.KvDisk = None,
    kv_formats: o.KvFormats = None,
    kv_dir: o.KvDir = None,
) -> None:
    """Answer a file of requests, and go on where a killed run ended.

    A request is {"id": "a", "prompt": "Hi"} or {"id": "a", "messages": [...]}, with the options of headrace run by their
    names in Python (max_tokens, temperature, seed, stop ...); --max-tokens holds for those that do not say. Its answer is
    {"id", "text", "token_ids", "finish_reason", "usage"}, or {"id", "error"}. OpenAI's batch form is read and answered too.

    Answers are in the order of the requests. The same command again goes on where the file of answers ends. The exit code is
    0 if all requests are answered, 3 if some of the lines are errors, 2 if nothing could be done, 130 for Ctrl-C.
    """
    if max_tokens < 1:
        raise OptionError(f"--max-tokens={max_tokens} is not a number of tokens: use 1 or more")
    if not 1 <= parallel <= MOST_PARALLEL:
        raise OptionError(f"--parallel={parallel} is not a number of answers from 1 to {MOST_PARALLEL}: use one of them")
    loading = o.LoadOptions.checked(
        model,
        threads,
        context,
        no_cache=no_cache,
        kv_memory=kv_memory,
        kv_disk=kv_disk,
        kv_formats=kv_formats,
        kv_dir=kv_dir,
    )
    from headrace.cli.batch_files import count_requests, read_lines
    from headrace.engine.request_lines import read_requests

    with _input(prompts) as stream, _output(out) as answers:
        answers.check_apart(stream)
        total = None if prompts == STANDARD else count_requests(Path(prompts).expanduser())
        found = answers.find(read_requests(read_lines(stream)))
        course = Course(found, total, shows=not (out == STANDARD and sys.stdout.isatty()))
        first = next(found.requests, None)
        if first is None:
            say(f"nothing to do: {course.told()}")
        else:
            with loaded_model(loading) as loaded:
                _answer_all(loaded, chain([first], found.requests), answers, course, max_tokens, parallel)
            say(course.told())
    if course.num_errors:
        raise typer.Exit(HAS_ERRORS)


def _answer_all(
    model: ModelLike,
    requests: Iterator[RequestLine],
    answers: AnswerFile | AnswerStream,
    course: Course,
    max_tokens: int,
    num_parallel: int,
) -> None:
    from headrace.cli.batch_window import Window, submit
    from headrace.engine.request_lines import answer_line

    window = Window(
        num_parallel,
        lambda request: submit(model, request, max_tokens),
        lambda request, result: answer_line(request, result, model.name, int(time.time())),
    )
    start_s = time.perf_counter()
    # closed before the model is, whatever happens
    with course, closing(window.answers(requests)) as answered:
        for each in answered:
            answers.append(each.line)
            course.advance(None if each.result is None else each.result.usage.completion_tokens)
            course.computed_s = time.perf_counter() - start_s


class Course:
    """How far a batch has got, told on standard error: a bar on a terminal, elsewhere a line now and then.

    `total` is the number of requests, None if nobody knows it.
    """

    def __init__(self, found: Found, total: int | None, *, shows: bool) -> None:
        self.num_answers, self.num_errors, self._num_before = found.num_answers, found.num_errors, found.num_answers
        self.computed_s, self._num_tokens = 0.0, 0
        self._total, self._shows = total, shows
        self._said_every = SAID_EVERY if total is None else max(1, -(-total // 10))
        self._bar: ConsoleProgress | None = None

    def advance(self, num_tokens: int | None) -> None:
        """A request has its line: an answer of so many tokens, or an error."""
        self.num_answers += 1
        if num_tokens is None:
            self.num_errors += 1
        else:
            self._num_tokens += num_tokens
        if self._bar is not None:
            self._bar.advance(1)
        elif self._shows and self.num_answers % self._said_every == 0 and self.num_answers != self._total:
            say(f"{self.num_answers:,}{'' if self._total is None else f' of {self._total:,}'} answers")

    def told(self) -> str:
        """'100 answers (12 were there before), 3 of them errors, 1,234 tokens generated at 567 tok/s'."""
        told = _counted(self.num_answers, "answer")
        if self._num_before:
            told += f" ({self._num_before:,} {'was' if self._num_before == 1 else 'were'} there before)"
        if self.num_errors:
            told += f", {self.num_errors:,} of them {'an error' if self.num_errors == 1 else 'errors'}"
        if self._num_tokens and self.computed_s > 0:
            told += f", {_counted(self._num_tokens, 'token')} generated at {self._num_tokens / self.computed_s:,.0f} tok/s"
        return told

    def __enter__(self) -> Self:
        if self._num_before:
            say(f"going on behind {_counted(self._num_before, 'answer')}")
        if self._shows and sys.stderr.isatty():
            from headrace.cli.progress import ConsoleProgress

            self._bar = ConsoleProgress()
            self._bar.start("answering", self._total, "answers")
            self._bar.advance(self._num_before)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.done()


@contextmanager
def _input(name: str) -> Iterator[BinaryIO]:
    """What requests are read from.

    Raises:
        OptionError: there is no such file.
    """
    if name == STANDARD:
        if sys.stdin.isatty():
            say("reading requests from the terminal, one a line; end them with Ctrl-D")
        yield sys.stdin.buffer
        return
    path = Path(name).expanduser()
    if path.is_dir() or not path.exists():
        raise OptionError(f"{name} is {'a folder' if path.is_dir() else 'not there'}: name a file with one request a line")
    with path.open("rb") as stream:
        yield stream


def _output(name: str) -> AnswerFile | AnswerStream:
    from headrace.cli.batch_files import AnswerFile, AnswerStream

    return AnswerStream(sys.stdout.buffer) if name == STANDARD else AnswerFile(Path(name).expanduser())


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
