"""One answer as its reader has it: an iterator of pieces, a way to end it, and what is known of it afterwards.

The loop computes (`loop.py`); this reads what it left in the outbox, and makes the loop turn when nothing is there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Self

from headrace.engine.accounts import OperationAccount
from headrace.engine.live import Live
from headrace.engine.loop import Loop
from headrace.engine.results import FinishReason, GenerationResult, Piece, Timings, Usage
from headrace.errors import ContextOverflowError, OptionError


class Generation(Iterator[Piece]):
    """Iterate for pieces of text as they come; afterwards `result` holds everything about the answer.

    Several of them may be read in turn, or from several threads: all that were made and not ended are computed together. A
    reader who is slow makes its own answer wait and nobody else's. Ending one early, by `cancel`, by `close`, by leaving the
    loop over it or by dropping it, keeps what was computed and read.

    Methods make the answer go on: `wait()` gives the result and `text()` the whole text, both at the end. Attributes show
    what is there by now: `token_ids`, `result`. Under asyncio, `async for` gives the pieces and `await` the result; a task that
    is cancelled meanwhile cancels the answer.

    Attributes:
        failed: an error ended the answer; it was raised to whoever asked for the next piece.
    """

    def __init__(self, loop: Loop, live: Live, load_s: float, on_end: Callable[[Generation], None]) -> None:
        self._loop, self._live, self._load_s, self._on_end = loop, live, load_s, on_end
        self._finish: FinishReason | None = None
        self._ended = self.failed = False
        self._held = ""
        # may run inside the garbage collector, on any thread: it only leaves word for the next turn
        self._dropped = weakref.finalize(self, loop.cancel, live)
        self._dropped.atexit = False

    def __next__(self) -> Piece:
        if self._ended:
            raise StopIteration
        live, outbox = self._live, self._live.outbox
        if not live.is_cancelled and not outbox.has_news:
            self._loop.drive(outbox)
        piece = None if live.is_cancelled else outbox.take()
        if piece is not None:
            return piece
        self._end()
        if self.failed and outbox.error is not None:
            raise outbox.error
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        from headrace.engine.asynchronous import next_piece  # asyncio slows down a start that has no use for it

        return await next_piece(self)

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        from headrace.engine.asynchronous import result_of

        return result_of(self).__await__()

    @property
    def has_news(self) -> bool:
        """Whether the next piece, or the end, is there without computing anything."""
        return self._ended or self._live.is_cancelled or self._live.outbox.has_news

    def cancel(self) -> None:
        """Ends the answer after the step that is running. Safe to call from a signal handler or another thread."""
        self._loop.cancel(self._live)

    def close(self) -> None:
        """Ends the answer now; what was read stays in `result`."""
        if not self._ended:
            self.cancel()
            self._end()

    def wait(self) -> GenerationResult:
        """Runs to the end; everything about the answer."""
        for _ in self:
            pass
        return self.result

    def text(self) -> str:
        """Runs to the end; the whole text, the same as `wait().text`."""
        return self.wait().text

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens read so far."""
        return tuple(token for piece in self._live.outbox.read for token in piece.token_ids)

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Tokens of the prompt."""
        return self._live.request.prompt_ids

    @property
    def result(self) -> GenerationResult:
        """Everything about the answer so far; complete once the iteration has ended."""
        live, reuse, pieces = self._live, self._loop.reuse_of(self._live), self._live.outbox.read
        token_ids = self.token_ids
        cached = reuse.memory_tokens + reuse.disk_tokens
        return GenerationResult(
            text="".join(piece.text for piece in pieces) + self._held,
            token_ids=tuple(token_ids),
            finish_reason=self._finish or "cancelled",
            usage=Usage(len(live.request.prompt_ids), cached, len(token_ids)),
            timings=Timings(self._load_s, live.prefill_s, live.decode_s, self._load_s + live.prefill_s),
            prefill_ledger=live.prefill.totals,
            decode_ledger=live.decode.totals,
            logprobs=tuple(each for piece in pieces for each in piece.logprobs),
            reuse=reuse,
            seed=live.request.params.seed,
        )

    def operations(self) -> list[OperationAccount]:
        """Time and bytes by class of operation; prefill first, in the order of the step."""
        return self._live.prefill.operations() + self._live.decode.operations()

    def _end(self) -> None:
        """Nothing more will be read."""
        self._ended = True
        self._dropped.detach()
        live, outbox = self._live, self._live.outbox
        self._loop.settle()
        if outbox.error is not None and not live.is_cancelled:
            self.failed = True
        elif outbox.finish_reason is not None and not outbox.has_pieces:
            self._finish = outbox.finish_reason
        if self._finish == "cancelled":
            self._held = live.answer.finish()  # what might have become a stop string
        self._on_end(self)


def check_max_tokens(max_tokens: int) -> None:
    """Refuses an answer without a token.

    Raises:
        OptionError: there would be none.
    """
    if max_tokens < 1:
        raise OptionError(f"max_tokens={max_tokens} generates nothing: use 1 or more")


def check_prompt(num_prompt_tokens: int, context_tokens: int) -> None:
    """Refuses a prompt that leaves no room for an answer.

    Raises:
        ContextOverflowError: it does not fit.
    """
    if num_prompt_tokens >= context_tokens:
        raise ContextOverflowError(
            f"the prompt has {num_prompt_tokens} tokens and the context holds {context_tokens}, answer included: "
            "shorten the prompt or raise the context",
            arguments=("context",),
        )
