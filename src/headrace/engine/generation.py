"""One answer: prefill, then sample, commit and detokenise, token by token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine.accounts import Account, OperationAccount
from headrace.engine.results import FinishReason, GenerationResult, Piece, Timings, TokenLogprob, Usage
from headrace.engine.sampler import Sampled, Sampler
from headrace.engine.sequence import Sequence as TokenSequence
from headrace.errors import ContextOverflowError, HeadraceError
from headrace.text.detokenizer import StreamingDetokenizer
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationPlan:
    """What an answer needs: `prompt_ids` is the whole prompt, of which `cached_tokens` are in the sequence already."""

    prompt_ids: tuple[int, ...]
    cached_tokens: int
    max_tokens: int
    context_tokens: int
    stop: tuple[str, ...]
    load_s: float


class Generation(Iterator[Piece]):
    """Iterate for pieces of text as they come; afterwards `result` holds everything about the answer.

    The first step prefills the prompt. Closing early, by `cancel` or by leaving the loop, keeps what was made so far.

    Attributes:
        failed: an error ended the answer; it was raised to whoever asked for the next piece.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        sequence: TokenSequence,
        sampler: Sampler,
        tokenizer: Tokenizer,
        accounts: tuple[Account, Account],
        clock: Callable[[], float],
        on_end: Callable[[Generation], None],
    ) -> None:
        self._plan, self._sequence, self._sampler, self._tokenizer = plan, sequence, sampler, tokenizer
        self._prefill, self._decode = accounts
        self._clock, self._on_end = clock, on_end
        self._detokenizer = StreamingDetokenizer(tokenizer, plan.stop)
        self._cancelled = False
        self.failed = False
        self._history = list(plan.prompt_ids)
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._times = [0.0, 0.0]  # prefill, decode
        self._finish: FinishReason | None = None
        self._pieces: Generator[Piece, None, None] = self._run()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def cancel(self) -> None:
        """Ends the answer after the step that is running. Safe to call from a signal handler or another thread."""
        self._cancelled = True

    def close(self) -> None:
        """Ends the answer now; what was made stays in `result`."""
        self._pieces.close()
        if self._finish is None:
            self._end("cancelled")

    def text(self) -> str:
        """Runs to the end; the whole text."""
        for _ in self:
            pass
        return self.result.text

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens generated so far."""
        return tuple(self._token_ids)

    @property
    def result(self) -> GenerationResult:
        """Everything about the answer so far; complete once the iteration has ended."""
        plan = self._plan
        prefill_s, decode_s = self._times
        return GenerationResult(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish or "cancelled",
            usage=Usage(len(plan.prompt_ids), plan.cached_tokens, len(self._token_ids)),
            timings=Timings(plan.load_s, prefill_s, decode_s, plan.load_s + prefill_s),
            prefill_ledger=self._prefill.totals,
            decode_ledger=self._decode.totals,
            logprobs=tuple(self._logprobs),
        )

    def operations(self) -> list[OperationAccount]:
        """Time and bytes by class of operation; prefill first, in the order of the step."""
        return self._prefill.operations() + self._decode.operations()

    def _run(self) -> Generator[Piece, None, None]:
        token_ids: Sequence[int] = self._plan.prompt_ids[self._plan.cached_tokens :]
        account, phase = self._prefill, 0
        try:
            while self._finish is None:
                start = self._clock()
                piece = self._commit(self._compute(token_ids, account))
                # what the reader of a piece does until it asks for the next one is no part of it
                self._times[phase] += self._clock() - start
                if piece is None:
                    break
                if piece.text or piece.token_ids:
                    yield piece
                token_ids, account, phase = self._token_ids[-1:], self._decode, 1
        except HeadraceError:
            self.failed = True
            raise
        finally:
            self._end("cancelled")

    def _compute(self, token_ids: Sequence[int], account: Account) -> npt.NDArray[np.float32]:
        self._sequence.accounts.append(account)
        try:
            return self._sequence.append(token_ids, cancelled=lambda: self._cancelled)
        finally:
            self._sequence.accounts.remove(account)

    def _commit(self, logits: npt.NDArray[np.float32]) -> Piece | None:
        """Samples a token; None if the answer was cancelled before it."""
        if self._cancelled:
            return None
        history = self._history
        sampled = self._sampler.sample(logits, history, len(history))
        if sampled.token_id in self._tokenizer.end_ids:
            self._finish = "stop"
            text = self._detokenizer.finish()
            self._text.append(text)
            return Piece(text, ())
        self._token_ids.append(sampled.token_id)
        history.append(sampled.token_id)
        logprobs = self._named(sampled)
        self._logprobs += logprobs
        text = self._detokenizer.push(sampled.token_id)
        if self._detokenizer.stopped:
            self._finish = "stop"
        elif len(self._token_ids) >= self._plan.max_tokens:
            self._finish = "length"
        elif len(history) >= self._plan.context_tokens:
            self._finish = "context"
        if self._finish is not None:
            text += self._detokenizer.finish()
        self._text.append(text)
        return Piece(text, (sampled.token_id,), logprobs)

    def _named(self, sampled: Sampled) -> tuple[TokenLogprob, ...]:
        if sampled.logprob is None:
            return ()
        name = self._tokenizer.token_text
        top = tuple((token_id, name(token_id), logprob) for token_id, logprob in sampled.top)
        return (TokenLogprob(sampled.token_id, name(sampled.token_id), sampled.logprob, top),)

    def _end(self, reason: FinishReason) -> None:
        if self._finish is None:
            self._finish = reason
            self._text.append(self._detokenizer.finish())
        self._on_end(self)


def check_room(num_prompt_tokens: int, context_tokens: int) -> None:
    """Refuses a prompt that leaves no room for an answer.

    Raises:
        ContextOverflowError: it does not fit.
    """
    if num_prompt_tokens >= context_tokens:
        raise ContextOverflowError(
            f"the prompt has {num_prompt_tokens} tokens and the context holds {context_tokens}, answer included: "
            "shorten the prompt or raise --context"
        )
