"""A request on its way through the loop: where it has got to, and what it has cost."""

from __future__ import annotations

from typing import Literal

from headrace.engine.accounts import Account
from headrace.engine.answer import Answer
from headrace.engine.outbox import Outbox
from headrace.engine.past import Past
from headrace.engine.request import Request
from headrace.engine.results import Reuse
from headrace.engine.sampler import Sampler
from headrace.engine.sampling_rows import SamplingRow
from headrace.engine.sequence import Sequence

State = Literal["waiting", "reading", "prefill", "decode", "done"]


class Live:
    """One request and everything that the loop knows of it. Only the loop changes it.

    Attributes:
        number: its number among the requests of this model.
        state: waiting for its turn; reading what is known of its prompt, or waiting for another request that computes the
            same; computing its prompt; decoding; done.
        row: how its tokens are drawn, as steps read it; None if the likeliest ones are taken.
        sequence: its tokens and pages; None while it waits, unless the sequence is its owner's.
        prefill, decode: ledger and time of its part of the steps.
        prefill_s, decode_s: seconds of the steps it took part in.
        past: what was known of its prompt when it began for the first time.
        reuse: the report of that, once it is done.
        is_paused: its reader is slow.
        is_cancelled: its reader wants no more; the next turn ends it.
        kept_tokens: tokens of the prompt that its owner's sequence had already.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        answer: Answer,
        sampler: Sampler,
        row: SamplingRow | None,
        accounts: tuple[Account, Account],
    ) -> None:
        self.number, self.request, self.answer, self.sampler, self.row = number, request, answer, sampler, row
        self.prefill, self.decode = accounts
        self.outbox = Outbox(request.outbox_tokens)
        self.state: State = "waiting"
        self.sequence: Sequence | None = None
        self.prefill_s = self.decode_s = 0.0
        self.past: Past | None = None
        self.reuse: Reuse | None = None
        self.kept_tokens = 0
        self.is_paused = False
        self.is_cancelled = False

    @property
    def left(self) -> tuple[int, ...]:
        """Tokens of prompt and answer that are still to be computed before the next one can be chosen."""
        assert self.sequence is not None
        return tuple(self.answer.history[self.sequence.num_tokens :])

    def took_part(self, seconds: float) -> None:
        """A step with its tokens in it took so long."""
        if self.state == "decode":
            self.decode_s += seconds
        else:
            self.prefill_s += seconds
