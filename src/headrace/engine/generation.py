"""One answer: prefill, then sample, commit and detokenise, token by token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.engine.accounts import Account, OperationAccount
from headrace.engine.ahead import MAX_STEPS
from headrace.engine.past import Past, lost_reports, reuse_of
from headrace.engine.recall import recall
from headrace.engine.results import FinishReason, GenerationResult, Piece, Reuse, Timings, TokenLogprob, Usage
from headrace.engine.sampler import Sampled, Sampler
from headrace.engine.sequence import Sequence as TokenSequence
from headrace.errors import ContextOverflowError, HeadraceError
from headrace.text.detokenizer import StreamingDetokenizer
from headrace.text.tokenizer import Tokenizer

_AHEAD_S = 0.03
"""How long several steps in one go may take: what feels immediate to a reader, and to somebody who cancels."""


@dataclass(frozen=True)
class GenerationPlan:
    """What an answer needs. With `recalls` it begins with what is known of the prompt, else with what is in the sequence.

    `end_ids` are the tokens that end it.
    """

    prompt_ids: tuple[int, ...]
    recalls: bool
    max_tokens: int
    context_tokens: int
    stop: tuple[str, ...]
    load_s: float
    end_ids: frozenset[int]


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
        self._kept_tokens = 0 if plan.recalls else sequence.num_tokens
        self._past: Past | None = None
        self._history = list(plan.prompt_ids)
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._times = [0.0, 0.0]  # prefill, decode
        self._step_s: float | None = None
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
            usage=Usage(len(plan.prompt_ids), self._cached_tokens, len(self._token_ids)),
            timings=Timings(plan.load_s, prefill_s, decode_s, plan.load_s + prefill_s),
            prefill_ledger=self._prefill.totals,
            decode_ledger=self._decode.totals,
            logprobs=tuple(self._logprobs),
            reuse=self._reuse(),
        )

    @property
    def _cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed. Of what is read while a step runs, some may yet have to be."""
        if self._past is None:
            return self._kept_tokens
        return self._past.recalled.memory_tokens + self._past.recalled.disk_tokens

    def _reuse(self) -> Reuse:
        """Where the past came from."""
        sequence, prompt = self._sequence, self._plan.prompt_ids
        if self._past is None:
            reuse = Reuse(memory_tokens=self._cached_tokens, computed_tokens=len(prompt) - self._cached_tokens)
        else:
            reuse = reuse_of(self._past, prompt, self._tokenizer, sequence.cache)
        misses = (*reuse.misses, *lost_reports(sequence.lost))
        return replace(reuse, misses=misses, streamed_bytes=sequence.streamed_bytes, streamed_s=sequence.streamed_s)

    def operations(self) -> list[OperationAccount]:
        """Time and bytes by class of operation; prefill first, in the order of the step."""
        return self._prefill.operations() + self._decode.operations()

    def _run(self) -> Generator[Piece, None, None]:
        compute, phase = self._first, 0
        try:
            while self._finish is None and not self._cancelled:
                start = self._clock()
                sampled = compute()
                # what the reader of a piece does until it asks for the next one is no part of it
                taken_s = self._clock() - start
                self._times[phase] += taken_s
                if phase == 1 and sampled:
                    self._step_s = taken_s / len(sampled)
                yield from self._take_all(sampled)
                compute, phase = self._several if self._sampler.params.takes_largest else self._one, 1
        except HeadraceError:
            self.failed = True
            raise
        finally:
            self._end("cancelled")

    def _first(self) -> list[Sampled]:
        """Prefills what is not known of the prompt and chooses the first token."""
        prompt, sequence = self._plan.prompt_ids, self._sequence
        if self._plan.recalls:
            with self._booked(self._prefill):
                # the last token is always computed anew: its logits are needed
                recalled = recall(sequence, prompt[:-1], 1, self._clock)
            self._past = Past(recalled, sequence.cache.now_s())
        return self._sample(self._compute(prompt[sequence.num_tokens :], self._prefill))

    def _one(self) -> list[Sampled]:
        """One step, one token."""
        return self._sample(self._compute(self._token_ids[-1:], self._decode))

    def _several(self) -> list[Sampled]:
        """Several steps in one go, as many as take a moment; each chooses its token itself."""
        with self._booked(self._decode):
            chosen = self._sequence.run_ahead(self._token_ids[-1], self._steps_ahead())
        return [Sampled(token) for token in chosen]

    def _take_all(self, sampled: list[Sampled]) -> Generator[Piece, None, None]:
        """Takes tokens one by one; those behind the end of the answer, or not asked for any more, are forgotten."""
        try:
            for token in sampled:
                if self._cancelled or self._finish is not None:
                    break
                piece = self._take(token)
                if piece.text or piece.token_ids:
                    yield piece
        finally:
            self._sequence.truncate(len(self._history))

    def _steps_ahead(self) -> int:
        """A power of two, so that few programs are built: within the answer's bounds, and within what feels immediate."""
        room = min(self._plan.max_tokens - len(self._token_ids), self._plan.context_tokens - len(self._history) + 1, MAX_STEPS)
        quick = 1 if self._step_s is None else int(_AHEAD_S / max(self._step_s, 1e-9))
        room = min(room, quick)
        return 1 << (max(room, 1).bit_length() - 1)

    def _compute(self, token_ids: Sequence[int], account: Account) -> npt.NDArray[np.float32]:
        with self._booked(account):
            return self._sequence.append(token_ids, cancelled=lambda: self._cancelled)

    @contextmanager
    def _booked(self, account: Account) -> Iterator[None]:
        """Steps inside are booked on this account too."""
        self._sequence.accounts.append(account)
        try:
            yield
        finally:
            self._sequence.accounts.remove(account)

    def _sample(self, logits: npt.NDArray[np.float32]) -> list[Sampled]:
        return [] if self._cancelled else [self._sampler.sample(logits, self._history, len(self._history))]

    def _take(self, sampled: Sampled) -> Piece:
        """Makes a token part of the answer, or ends the answer with it."""
        history = self._history
        if sampled.token_id in self._plan.end_ids:
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


def check_prompt(num_prompt_tokens: int, context_tokens: int) -> None:
    """Refuses a prompt that leaves no room for an answer.

    Raises:
        ContextOverflowError: it does not fit.
    """
    if num_prompt_tokens >= context_tokens:
        raise ContextOverflowError(
            f"the prompt has {num_prompt_tokens} tokens and the context holds {context_tokens}, answer included: "
            "shorten the prompt or raise --context"
        )
