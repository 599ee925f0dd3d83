"""A sequence of tokens whose keys and values are kept in pages.

    tokens   0 ......... num_tokens          all of them are computed: their keys and values lie in `pages`
    pages    ceil(num_tokens / 32)           the last one partly filled

Grows by steps, shrinks by truncation. Begins empty, or with what the cache knows (`recall.py`). What it holds becomes known
to others when it is committed; whole pages of a prompt that is shared do so after each chunk.

If memory cannot hold the whole past, its oldest pages stay on disk (`None` among the pages), and each step reads them layer
by layer (`streaming.py`). Pages that are only being read back arrive while the next step runs (`arrival.py`).
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.engine.batch import RowSampling, Slice
from headrace.engine.executor import MAX_STEP_OUTPUTS, Executor, StepRun
from headrace.engine.spill import Spill
from headrace.engine.streaming import PageLostError
from headrace.errors import ContextOverflowError, NumericError, OptionError
from headrace.kernels.page_formats import F16
from headrace.kv.cache import Found, PageCache
from headrace.kv.intake import SharedPast
from headrace.kv.pages import format_of, pages_for
from headrace.kv.residency import DEFAULT_STANDING, Standing
from headrace.kv.tree import Node
from headrace.model.step import MAX_STEP_TOKENS, PAGE_TOKENS, LedgerTotals, SequenceStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from headrace.engine.accounts import Account
    from headrace.engine.arrival import Arrival

P = ParamSpec("P")
R = TypeVar("R")
NOT_FINITE = (
    "the logits of tokens {first} to {last} are not finite: the model file is damaged or its values overflow; "
    "fetch or convert it again"
)


def _held(method: Callable[Concatenate[Sequence, P], R]) -> Callable[Concatenate[Sequence, P], R]:
    """A method during which nobody else computes."""

    @wraps(method)
    def held(self: Sequence, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._hold():
            return method(self, *args, **kwargs)

    return held


class Sequence:
    """Tokens and their past, of one conversation or one request. `page_format` is that of its whole pages."""

    def __init__(
        self,
        executor: Executor,
        cache: PageCache,
        accounts: Tokens[Account],
        vocabulary: int,
        context_tokens: int,
        page_format: int | None = None,
        hold: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`accounts` book its steps; `hold` is entered while it computes: steps and pages are one thread's at a time."""
        self._executor, self.cache = executor, cache
        self._vocabulary, self._context_tokens = vocabulary, context_tokens
        self._page_format = cache.formats[0] if page_format is None else page_format
        self.pages: list[int | None] = []
        self.cold: dict[int, Node] = {}
        self.found: Found | None = None
        self.shared: SharedPast | None = None
        self.arrival: Arrival | None = None
        self._spill = Spill(self, executor.streaming)
        self._addresses: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._known_formats: tuple[int, ...] | None = None  # None: to be looked up, as pages have come or moved
        self.token_ids: list[int] = []
        self.accounts: list[Account] = list(accounts)
        self._hold = hold
        self.streamed_bytes, self.streamed_s = 0, 0.0
        self.lost: list[tuple[str, int, int]] = []  # pages that could not be streamed: reason, first token, tokens made anew

    @property
    def ledger(self) -> LedgerTotals:
        """Sums over all steps that this sequence has taken so far."""
        return self.accounts[0].totals

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are kept."""
        return len(self.token_ids)

    @_held
    def append(self, token_ids: Tokens[int], *, cancelled: Callable[[], bool] | None = None) -> npt.NDArray[np.float32]:
        """Computes tokens on top of what is there, in chunks; stops between chunks when `cancelled` says so.

        Returns:
            Logits of the last token computed, float32 [V].

        Raises:
            OptionError: no token is given, or an id is outside the vocabulary.
            ContextOverflowError: there is no room for all of them; nothing is computed.
        """
        logits: npt.NDArray[np.float32] | None = None
        for rows in self.steps(token_ids, cancelled=cancelled):
            logits = rows[-1]
        assert logits is not None
        return logits

    @property
    def is_alone(self) -> bool:
        """Whether its steps cannot be shared with others: part of its past is on disk, or on its way from there."""
        return bool(self.cold) or self.arrival is not None

    def slice(self, token_ids: Tokens[int], num_outputs: int, sampling: RowSampling | None = None) -> Slice:
        """Its part of a step for which pages are reserved."""
        return Slice(token_ids, self.num_tokens, self._addresses, num_outputs, sampling=sampling)

    def took(self, token_ids: Tokens[int]) -> None:
        """A step has computed these tokens behind those that were here."""
        self.token_ids += token_ids
        self._seal()

    def run_alone(self, token_ids: Tokens[int], sampling: RowSampling | None = None) -> StepRun:
        """A step of its own, for which pages are reserved; `took` follows."""
        run = self._run(self.slice(token_ids, 1, sampling))
        assert run is not None, "new tokens come behind all others"
        return run

    @contextmanager
    def booked_on(self, account: Account) -> Iterator[None]:
        """Steps that the sequence takes by itself inside are booked on this account too."""
        self.accounts.append(account)
        try:
            yield
        finally:
            self.accounts.remove(account)

    @_held
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
        self.reserve(past + steps)
        self.arrive()
        if self.cold:
            return self._run_one_by_one(token_id, steps)
        run = self._executor.run([Slice([token_id], past, self._addresses)], steps)
        chosen: list[int] = run.chosen[:, 0].tolist()
        if min(chosen) < 0:
            self.truncate(past)
            raise NumericError(NOT_FINITE.format(first=past + chosen.index(-1), last=past + chosen.index(-1)))
        self.token_ids += [token_id, *chosen[:-1]]
        formats = self.formats()
        for step, stamps in enumerate(run.stamps):
            batch = (SequenceStep(1, past + step, chosen=True, page_formats=formats),)
            for account in self.accounts:
                account.add(batch, stamps[:-1], int(stamps[-1]))
        self._seal()
        return chosen

    @_held
    def append_all(self, token_ids: Tokens[int]) -> npt.NDArray[np.float32]:
        """Like `append`, but gives the logits of every token: float32 [T, V], a copy.

        Raises as `append` does, and NumericError if a logit is not finite.
        """
        return np.concatenate(list(self.steps(token_ids, outputs=MAX_STEP_OUTPUTS)))

    @_held
    def truncate(self, num_tokens: int) -> None:
        """Forgets all tokens but the first `num_tokens`."""
        if num_tokens:
            self.arrive()
        elif self.arrival is not None:
            self.arrival.abandon()
            self.arrival = None
        del self.token_ids[num_tokens:]
        keep = pages_for(len(self.token_ids))
        for number, page in enumerate(self.pages[keep:], keep):
            self.cold.pop(number, None)
            if page is not None:
                self.cache.pool.release(page)
        del self.pages[keep:]
        self._addresses, self._known_formats = self._addresses[:keep], None
        if self.shared is not None and keep < self.shared.num_pages and not self.cold:
            self.let_go()
        self._spill.resize(len(self.cold))

    @_held
    def keep_common(self, token_ids: Tokens[int]) -> int:
        """Truncates to the longest common beginning with `token_ids`; returns its length."""
        common = 0
        for mine, other in zip(self.token_ids, token_ids, strict=False):
            if mine != other:
                break
            common += 1
        self.truncate(common)
        return common

    def share(self, *, complete: bool) -> None:
        """Makes whole pages known to other requests; with `complete` the prompt is all there, and goes to disk if that pays."""
        self.arrive()
        whole = self.num_tokens // PAGE_TOKENS
        if self.shared is None and whole <= (0 if self.found is None else len(self.found.nodes)):
            return  # nothing that is not known
        if self.found is not None:  # the pages are held by their owner counts
            self.cache.let_go(self.found)
        tokens = self.token_ids[: whole * PAGE_TOKENS]
        self.take_shared(self.cache.share(tokens, self.pages[:whole], self.shared, complete=complete))

    def take_shared(self, shared: SharedPast) -> None:
        """Goes on with pages that are known to others now, some of which are theirs."""
        if self.found is not None:
            self.cache.let_go(self.found)
        self.found, self.shared = None, shared
        count = len(shared.handles)
        if tuple(self.pages[:count]) != shared.handles:
            self.pages[:count] = shared.handles
            self.readdress()

    def known_nodes(self) -> list[Node]:
        """What the tree has of the first pages."""
        if self.shared is not None:
            return [] if self.shared.last is None else self.shared.last.path()
        return [] if self.found is None else self.found.nodes

    def let_go(self) -> None:
        """Holds nothing of what others know any longer."""
        found, shared = self.found, self.shared
        self.found = self.shared = None
        if found is not None:
            self.cache.let_go(found)
        if shared is not None:
            self.cache.end(shared)

    @_held
    def commit(self, num_answer_tokens: int, standing: Standing = DEFAULT_STANDING) -> None:
        """Makes what is here known to later requests."""
        self.arrive()
        if self.found is not None:  # the pages are held by their owner counts
            self.cache.let_go(self.found)
        if self.token_ids:
            shared, self.shared = self.shared, None
            self.cache.commit(self.token_ids, self.pages, num_answer_tokens=num_answer_tokens, standing=standing, shared=shared)

    @_held
    def close(self) -> None:
        """Gives the pages back."""
        self.truncate(0)
        self.let_go()

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
        self._check_context(self.num_tokens + len(ids))
        size = MAX_STEP_TOKENS if outputs == 1 else min(MAX_STEP_TOKENS, outputs)
        whole = self.num_tokens + len(ids)
        # where pages can be compressed or left on disk, room is found chunk by chunk
        at_once = self._page_format == F16 and not self._spill.is_possible
        for start in range(0, len(ids), size):
            if start and cancelled is not None and cancelled():
                return
            chunk = ids[start : start + size]
            with self._hold():
                self.reserve(whole if at_once else self.num_tokens + len(chunk))
                rows = self._step(chunk, min(outputs, len(chunk))).copy()
            # a single row is for the sampler, which looks at every value anyway
            if outputs > 1 and not np.isfinite(rows).all():
                raise NumericError(NOT_FINITE.format(first=start, last=start + len(chunk) - 1))
            yield rows

    def compute_pages(self, first: int, count: int, token_ids: Tokens[int]) -> bool:
        """Computes whole pages again that lie in the middle of what is here: their tokens are `token_ids`.

        False if a page before them was lost meanwhile: then all behind that one, these included, has been computed.
        """
        for at in range(first, first + count, MAX_STEP_TOKENS // PAGE_TOKENS):
            end = min(at + MAX_STEP_TOKENS // PAGE_TOKENS, first + count)
            ids = list(token_ids[(at - first) * PAGE_TOKENS : (end - first) * PAGE_TOKENS])
            formats = self._make_exact(at, end)
            if self._run(Slice(ids, at * PAGE_TOKENS, self._addresses)) is None:
                return False
            for number, page_format in formats.items():
                page = self.pages[number]
                assert page is not None
                self.pages[number] = self.cache.compressor.recode(page, page_format)
            if formats:
                self.readdress()
        return True

    def _make_exact(self, first: int, end: int) -> dict[int, int]:
        """Makes pages that are going to be computed exact, as steps write no others; the formats of those that were not."""
        formats: dict[int, int] = {}
        for number in range(first, end):
            page = self.pages[number]
            if page is not None and format_of(page) != F16:
                formats[number] = format_of(page)
                self.cache.pool.release(page)
                self.pages[number] = None
        for number in formats:
            self.pages[number] = self.cache.allocate()
            if self.pages[number] is None:
                raise self._no_room(self.num_tokens)
        if formats:
            self.readdress()
        return formats

    def adopt(self, token_ids: Tokens[int], pages: Tokens[int | None], cold: dict[int, Node]) -> None:
        """Begins with a known past; the pages become this sequence's, `cold` holds those that are on disk only."""
        assert not self.pages
        self.token_ids, self.pages, self.cold = list(token_ids), list(pages), dict(cold)
        self.readdress()
        if not self._spill.resize(len(cold)):
            self.truncate(min(cold) * PAGE_TOKENS)  # no room for what reading them takes

    def staging_bytes(self, num_cold: int) -> int:
        """Bytes that steps need beside the pages in memory to read so many pages from disk."""
        return self._spill.staging_bytes(num_cold)

    def readdress(self) -> None:
        """Makes new tables of addresses, since pages have moved. A new array: old steps may still be reading the other."""
        address = self.cache.pool.address
        self._known_formats = None
        self._addresses = np.array([0 if page is None else address(page) for page in self.pages], np.int64)

    def arrive(self) -> None:
        """Waits for pages that are still being read, and computes those that cannot be."""
        arrival, self.arrival = self.arrival, None
        if arrival is not None:
            try:
                arrival.end()
            except BaseException:
                arrival.abandon()
                self.truncate(0)  # nobody may take what was not read for what it should be
                raise

    def _check_context(self, num_tokens: int) -> None:
        if num_tokens > self._context_tokens:
            raise ContextOverflowError(
                f"{num_tokens} tokens do not fit into a context of {self._context_tokens}: "
                "shorten the prompt or raise the context",
                arguments=("context",),
            )

    def reserve(self, num_tokens: int) -> None:
        """Takes pages for a number of tokens, all or none."""
        self._check_context(num_tokens)
        self._own_last_page()
        fresh: list[int] = []
        missing = pages_for(num_tokens) - len(self.pages)
        if missing > self.cache.pool.num_free and not self._spill.is_possible and missing > self.cache.num_room():
            raise self._no_room(num_tokens)  # before others have lost their pages for nothing
        while len(self.pages) + len(fresh) < pages_for(num_tokens):
            page = self.cache.allocate()
            if page is None:
                self.arrive()  # only what is there can be moved
            if page is None and self._spill.make_room(pages_for(num_tokens) - len(self.pages) - len(fresh)):
                page = self.cache.allocate()
            if page is None:
                for taken in fresh:
                    self.cache.pool.release(taken)
                raise self._no_room(num_tokens)
            fresh.append(page)
        if fresh:
            self.pages += fresh
            self.readdress()

    def _own_last_page(self) -> None:
        """What is partly filled will be written to. What was cut from a page that others have, or a small one, is made anew."""
        number, rest = divmod(self.num_tokens, PAGE_TOKENS)
        page = self.pages[number] if rest else None
        if rest and (page is None or format_of(page) != F16 or self.cache.pool.owners(page) > 1):
            ids = self.token_ids[-rest:]
            self.truncate(number * PAGE_TOKENS)
            self.append(ids)

    def _no_room(self, num_tokens: int) -> ContextOverflowError:
        room = (len(self.pages) + self.cache.num_room()) * PAGE_TOKENS
        reason = f"there is room for {room}" if room < num_tokens else "memory is too small to read so long a past from disk"
        return ContextOverflowError(
            f"{num_tokens} tokens do not fit: {reason}; shorten the prompt, or raise kv_memory{self._spill.refusal}",
            arguments=("kv_memory", "kv_disk"),
        )

    def _step(self, ids: list[int], outputs: int) -> npt.NDArray[np.float32]:
        run = self._run(Slice(ids, self.num_tokens, self._addresses, outputs))
        assert run is not None, "new tokens come behind all others"
        self.token_ids += ids
        self._seal()
        return run.logits

    def _run(self, part: Slice) -> StepRun | None:
        """Runs a step and books it; a page that cannot be read any more is computed again first, with all behind it.

        None if that was all there was to do: the step's tokens are behind the lost page, and among those that were here.
        """
        count = len(part.token_ids)
        written = self.pages[part.past_tokens // PAGE_TOKENS : pages_for(part.past_tokens + count)]
        assert all(page is not None and format_of(page) == F16 for page in written), "a step writes to exact pages in memory"
        while self.cold or self.arrival is not None:
            cold = self._spill.cold_pages() if self.cold else None
            late = replace(part, page_addresses=self._addresses, cold=cold, arriving=self.arrival)
            try:
                run = self._executor.run([late])
            except PageLostError as lost:
                if cold is None:
                    self.arrive()
                else:
                    first = lost.page * PAGE_TOKENS
                    self.lost.append((lost.reason, first, self.num_tokens - first))
                    self._spill.repair(lost.page)
                    if part.past_tokens < self.num_tokens:
                        return None
                    self.reserve(self.num_tokens + count)
            else:
                assert run.streamed is not None
                if cold is not None:
                    self.streamed_bytes += run.streamed.streamed_bytes
                    self.streamed_s += run.streamed.waited_s
                break
        else:
            # the pages may have moved since the caller looked
            run = self._executor.run([replace(part, page_addresses=self._addresses)])
        stamps = run.stamps[0]
        step = SequenceStep(count, part.past_tokens, part.num_outputs, chosen=True, page_formats=self.formats())
        for account in self.accounts:
            account.add((step,), stamps[:-1], int(stamps[-1]))
        if run.streamed is None and part.num_outputs == 1:
            seconds = float(stamps[:-1].max() - stamps[-1]) / self._executor.team.ticks_per_us / 1e6
            self.cache.prices.computed(count, part.past_tokens, seconds)
        self.arrive()
        return run

    def _run_one_by_one(self, token_id: int, steps: int) -> list[int]:
        chosen: list[int] = []
        for _ in range(steps):
            self.reserve(self.num_tokens + 1)  # a page that was lost took those reserved behind it along
            logits = self._step([token_id if not chosen else chosen[-1]], 1)[-1]
            if not np.isfinite(logits).all():
                raise NumericError(NOT_FINITE.format(first=self.num_tokens - 1, last=self.num_tokens - 1))
            chosen.append(int(logits.argmax()))
        return chosen

    def _seal(self) -> None:
        """Compresses the pages that are full now, where pages are not kept exact."""
        if self._page_format == F16:
            return
        changed = False
        for number in range(self.num_tokens // PAGE_TOKENS - 1, -1, -1):
            page = self.pages[number]
            if page is None or format_of(page) != F16 or self.cache.pool.owners(page) > 1:
                break
            self.pages[number] = self.cache.compressor.recode(page, self._page_format)
            changed = True
        if changed:
            self.readdress()

    def formats(self) -> tuple[int, ...]:
        """Formats of the pages, as the ledger has them: () if all are exact."""
        if self._page_format == F16 and len(self.cache.formats) == 1:
            return ()
        if self._known_formats is None:
            found = tuple(self._spill.format_of(number) for number in range(len(self.pages)))
            self._known_formats = found if any(found) else ()
        return self._known_formats
