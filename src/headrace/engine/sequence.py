"""A sequence of tokens whose keys and values are kept in pages.

    tokens   0 ......... num_tokens          all of them are computed: their keys and values lie in `pages`
    pages    ceil(num_tokens / 32)           the last one partly filled

Grows by steps, shrinks by truncation; tokens are exact, so a later turn finds the past it needs.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.engine.batch import Slice
from headrace.engine.executor import MAX_STEP_OUTPUTS, Executor
from headrace.errors import ContextOverflowError, NumericError, OptionError
from headrace.kv.pages import PageArena, pages_for
from headrace.model.step import MAX_STEP_TOKENS, PAGE_TOKENS, LedgerTotals, SequenceStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.engine.accounts import Account

_NOT_FINITE = (
    "the logits of tokens {first} to {last} are not finite: the model file is damaged or its values overflow; "
    "fetch or convert it again"
)


class Sequence:
    """Tokens and their past, of one conversation or one request."""

    def __init__(self, executor: Executor, arena: PageArena, account: Account, vocabulary: int, context_tokens: int) -> None:
        self._executor, self._arena = executor, arena
        self._vocabulary, self._context_tokens = vocabulary, context_tokens
        self._pages: list[int] = []
        self._addresses: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.token_ids: list[int] = []
        self.accounts: list[Account] = [account]

    @property
    def ledger(self) -> LedgerTotals:
        """Sums over all steps that this sequence has taken so far."""
        return self.accounts[0].totals

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are kept."""
        return len(self.token_ids)

    def append(self, token_ids: Tokens[int], *, cancelled: Callable[[], bool] | None = None) -> npt.NDArray[np.float32]:
        """Computes tokens on top of what is there, in chunks; stops between chunks when `cancelled` says so.

        Returns:
            Logits of the last token computed, float32 [V]: a view that the next step overwrites.

        Raises:
            OptionError: no token is given, or an id is outside the vocabulary.
            ContextOverflowError: there is no room for all of them; nothing is computed.
        """
        logits: npt.NDArray[np.float32] | None = None
        for rows in self.steps(token_ids, cancelled=cancelled):
            logits = rows[-1]
        assert logits is not None
        return logits

    def run_ahead(self, token_id: int, steps: int) -> list[int]:
        """Computes a token and those that greedy decoding puts behind it, in one go.

        Args:
            token_id: the token to begin with.
            steps: how many tokens to compute, up to `ahead.MAX_STEPS`.

        Returns:
            The most likely token after each one computed; all but the last of them are part of the sequence now.

        Raises:
            ContextOverflowError: there is no room for all of them; nothing is computed.
            NumericError: logits are not finite.
        """
        past = self.num_tokens
        self._reserve(past + steps)
        chosen, program = self._executor.run_ahead(token_id, past, self._addresses, steps)
        if min(chosen) < 0:
            self.truncate(past)
            raise NumericError(_NOT_FINITE.format(first=past + chosen.index(-1), last=past + chosen.index(-1)))
        self.token_ids += [token_id, *chosen[:-1]]
        length = (len(program.stamps) - 1) // steps
        for step in range(steps):
            batch = (SequenceStep(1, past + step, chosen=True),)
            begin = step * length
            for account in self.accounts:
                # a step begins when the one before is complete; the place behind the last operation is the program's begin
                account.add(batch, program.stamps[begin : begin + length], program.stamps[begin - 1])
        return chosen

    def append_all(self, token_ids: Tokens[int]) -> npt.NDArray[np.float32]:
        """Like `append`, but gives the logits of every token: float32 [T, V], a copy.

        Raises as `append` does, and NumericError if a logit is not finite.
        """
        return np.concatenate([rows.copy() for rows in self.steps(token_ids, outputs=MAX_STEP_OUTPUTS)])

    def truncate(self, num_tokens: int) -> None:
        """Forgets all tokens but the first `num_tokens`."""
        del self.token_ids[num_tokens:]
        keep = pages_for(len(self.token_ids))
        for page in self._pages[keep:]:
            self._arena.release(page)
        del self._pages[keep:]
        self._addresses = self._addresses[:keep]

    def keep_common(self, token_ids: Tokens[int]) -> int:
        """Truncates to the longest common beginning with `token_ids`; returns its length."""
        common = 0
        for mine, other in zip(self.token_ids, token_ids, strict=False):
            if mine != other:
                break
            common += 1
        self.truncate(common)
        return common

    def close(self) -> None:
        """Gives the pages back."""
        self.truncate(0)

    def steps(
        self, token_ids: Tokens[int], *, outputs: int = 1, cancelled: Callable[[], bool] | None = None
    ) -> Iterator[npt.NDArray[np.float32]]:
        """Computes tokens chunk by chunk; gives the logits of the last `outputs` tokens of each chunk, or of all of it.

        Raises as `append` does, and NumericError if more than one output is asked for and one is not finite.
        """
        ids = list(token_ids)
        if not ids:
            raise OptionError("no token to compute: the prompt is empty")
        for token in ids:
            if not 0 <= token < self._vocabulary:
                raise OptionError(f"token {token} is outside the vocabulary of {self._vocabulary}: use ids from 0 on")
        self._reserve(self.num_tokens + len(ids))
        size = MAX_STEP_TOKENS if outputs == 1 else min(MAX_STEP_TOKENS, outputs)
        for start in range(0, len(ids), size):
            if start and cancelled is not None and cancelled():
                return
            chunk = ids[start : start + size]
            rows = self._step(chunk, min(outputs, len(chunk)))
            # a single row is for the sampler, which looks at every value anyway
            if outputs > 1 and not np.isfinite(rows).all():
                raise NumericError(_NOT_FINITE.format(first=start, last=start + len(chunk) - 1))
            yield rows

    def _reserve(self, num_tokens: int) -> None:
        """Takes pages for a number of tokens, all or none."""
        if num_tokens > self._context_tokens:
            raise ContextOverflowError(
                f"{num_tokens} tokens do not fit into a context of {self._context_tokens}: "
                "shorten the prompt or raise --context"
            )
        fresh: list[int] = []
        while len(self._pages) + len(fresh) < pages_for(num_tokens):
            page = self._arena.allocate()
            if page is None:
                for taken in fresh:
                    self._arena.release(taken)
                room = self.num_tokens + (pages_for(self.num_tokens) * PAGE_TOKENS - self.num_tokens)
                room += self._arena.num_free * PAGE_TOKENS
                raise ContextOverflowError(
                    f"{num_tokens} tokens do not fit: there is room for {room}; shorten the prompt or raise --context"
                )
            fresh.append(page)
        if fresh:
            self._pages += fresh
            self._addresses = np.array([self._arena.address(page) for page in self._pages], np.int64)

    def _step(self, ids: list[int], outputs: int) -> npt.NDArray[np.float32]:
        part = Slice(ids, self.num_tokens, self._addresses, outputs)
        logits = self._executor.run([part])
        self.token_ids += ids
        stamps = self._executor.last_program.stamps
        for account in self.accounts:
            account.add((SequenceStep(len(ids), part.past_tokens, outputs),), stamps[:-1], stamps[-1])
        return logits
