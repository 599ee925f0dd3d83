"""An answer in the making: turns chosen tokens into pieces of text, and knows when it has to end."""

from __future__ import annotations

from headrace.engine.request import Request
from headrace.engine.results import FinishReason, Piece, TokenLogprob
from headrace.engine.sampler import Sampled
from headrace.text.detokenizer import StreamingDetokenizer
from headrace.text.tokenizer import Tokenizer


class Answer:
    """Tokens and text of one answer.

    Attributes:
        history: tokens of the prompt and of the answer so far.
        token_ids: tokens of the answer so far.
        finish_reason: why it ended; None while it goes on.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._detokenizer = StreamingDetokenizer(tokenizer, request.stop)
        self.history = list(request.prompt_ids)
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be generated, by the request's bound and by the context's."""
        request = self._request
        return min(request.max_tokens - len(self.token_ids), request.context_tokens - len(self.history))

    def take(self, sampled: Sampled) -> Piece:
        """Makes a token part of the answer, or ends the answer with it."""
        if sampled.token_id in self._request.end_ids:
            self.finish_reason = "stop"
            return Piece(self._detokenizer.finish(), ())
        self.token_ids.append(sampled.token_id)
        self.history.append(sampled.token_id)
        text = self._detokenizer.push(sampled.token_id)
        if self._detokenizer.stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self._request.max_tokens:
            self.finish_reason = "length"
        elif len(self.history) >= self._request.context_tokens:
            self.finish_reason = "context"
        if self.finish_reason is not None:
            text += self._detokenizer.finish()
        return Piece(text, (sampled.token_id,), self._named(sampled))

    def finish(self) -> str:
        """The text that was held back because a stop string might have begun in it, when the answer ends before its time."""
        return self._detokenizer.finish()

    def _named(self, sampled: Sampled) -> tuple[TokenLogprob, ...]:
        if sampled.logprob is None:
            return ()
        name = self._tokenizer.token_text
        top = tuple((token_id, name(token_id), logprob) for token_id, logprob in sampled.top)
        return (TokenLogprob(sampled.token_id, name(sampled.token_id), sampled.logprob, top),)
