"""Many requests of a file on their way at once, answered in the order of the file.

    entries   answered, waiting for those before them | on their way | ... requests that were not read yet

An answer that is ready before an earlier one waits as a line of bytes, so that its place among those on their way is free.
Invariant: no more than `num_parallel` answers are on their way, and no more than a bounded number wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine.request_lines import RequestLine, error_line
from headrace.engine.results import GenerationResult
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.cli.protocols import GenerationLike, ModelLike

_ENTRIES_PER_PLACE = 16
"""Entries, for each answer on its way: a long answer in front does not soon leave the others without work."""


@dataclass(frozen=True)
class Answered:
    """The line that answers a request; `result` is None if the line holds an error."""

    line: bytes
    result: GenerationResult | None


@dataclass
class _Entry:
    request: RequestLine
    answer: GenerationLike | None = None
    answered: Answered | None = None


def submit(model: ModelLike, request: RequestLine, max_tokens: int) -> GenerationLike:
    """Asks a model for the answer to a request, of `max_tokens` at most if the request does not say.

    Raises:
        HeadraceError: it cannot be answered.
    """
    defaults: dict[str, Any] = {"max_tokens": max_tokens, "stop": (), "system": None, "raw": False, "logprobs": 0}
    return model.generate(request.prompt, **{**defaults, **request.options, **request.sampling})


class Window:
    """Keeps answers on their way: `start` begins one, `finish` makes the line of one that has ended."""

    def __init__(
        self,
        num_parallel: int,
        start: Callable[[RequestLine], GenerationLike],
        finish: Callable[[RequestLine, GenerationResult], bytes],
    ) -> None:
        self._num_parallel, self._start, self._finish = num_parallel, start, finish
        self._entries: deque[_Entry] = deque()
        self._running: dict[int, _Entry] = {}

    def answers(self, requests: Iterator[RequestLine]) -> Generator[Answered, None, None]:
        """Answers in the order of the requests, of which no more are read than are wanted; errors are answers too."""
        try:
            while self._fill(requests):
                while self._entries and self._entries[0].answered is not None:
                    yield self._entries.popleft().answered  # type: ignore[misc] # it was looked at
                self._read()
        finally:
            for entry in self._running.values():
                assert entry.answer is not None
                entry.answer.close()

    def _fill(self, requests: Iterator[RequestLine]) -> bool:
        """Begins answers while there is place; False when nothing is left."""
        while len(self._running) < self._num_parallel and len(self._entries) < _ENTRIES_PER_PLACE * self._num_parallel:
            request = next(requests, None)
            if request is None:
                break
            self._begin(request)
        return bool(self._entries)

    def _begin(self, request: RequestLine) -> None:
        entry = _Entry(request)
        self._entries.append(entry)
        if request.error is not None:
            entry.answered = Answered(error_line(request, request.error), None)
            return
        try:
            entry.answer = self._start(request)
        except HeadraceError as error:
            entry.answered = Answered(error_line(request, error), None)
        else:
            self._running[request.number] = entry

    def _read(self) -> None:
        """Takes what is there of all answers; if there is nothing, lets the engine compute until the first one goes on."""
        is_idle = True
        for entry in tuple(self._running.values()):
            while entry.answer is not None and entry.answer.has_news:
                self._take(entry)
                is_idle = False
        if is_idle and self._running:
            self._take(next(iter(self._running.values())))

    def _take(self, entry: _Entry) -> None:
        """Takes the next piece of an answer, or its end."""
        assert entry.answer is not None
        try:
            if next(entry.answer, None) is not None:
                return
            result = entry.answer.result
            entry.answered = Answered(self._finish(entry.request, result), result)
        except HeadraceError as error:
            entry.answered = Answered(error_line(entry.request, error), None)
        entry.answer = None
        del self._running[entry.request.number]
