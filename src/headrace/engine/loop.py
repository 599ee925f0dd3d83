"""The loop: one owner of scheduler, pages and executor, which serves every request of a model.

    post      other threads leave what they want: submit, cancel, pin ...; they read outboxes, and touch nothing else
    admit     a request begins with what is known of its prompt
    schedule  the scheduler says who takes part in the next step, and for how many steps
    execute   one program for everybody; a request whose past is partly on disk has a step of its own
    sample    the next token of everyone whose prompt is complete
    commit    tokens become text in outboxes; whole pages of prompts, and requests that ended, become known to others

In library use the loop has no thread: it turns when somebody asks for a piece (`drive`), on that somebody's thread. A turn
holds the lock, and Ctrl-C waits for its end, so nothing ever sees it half done.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.engine.accounts import Account
from headrace.engine.answer import Answer
from headrace.engine.executor import Executor, StepRun
from headrace.engine.interrupts import deferred_interrupts
from headrace.engine.live import Live
from headrace.engine.outbox import Outbox
from headrace.engine.past import Past, count_reuse, lost_reports, reuse_of
from headrace.engine.recall import recall
from headrace.engine.request import Request
from headrace.engine.results import FinishReason, Reuse
from headrace.engine.sampler import Sampled, Sampler
from headrace.engine.sampling_rows import SamplingRow
from headrace.engine.scheduler import Refusal, Scheduler, StepObservation, Ticket
from headrace.engine.sequence import NOT_FINITE
from headrace.engine.sequence import Sequence as TokenSequence
from headrace.errors import BusyError, ContextOverflowError, HeadraceError, NumericError
from headrace.kv.cache import PageCache
from headrace.model.step import PAGE_TOKENS, SequenceStep
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Part:
    """One request's part of a step: the tokens it computes; `wants` the one that follows them."""

    live: Live
    token_ids: tuple[int, ...]
    wants: bool

    @property
    def sequence(self) -> TokenSequence:
        """Where its tokens go."""
        assert self.live.sequence is not None
        return self.live.sequence


class Loop:
    """Serves the requests of one model. Every method may be called from any thread.

    Attributes:
        watch: is shown the logits that a token is chosen from, where a step was taken by itself; nobody by default.
    """

    watch: Callable[[Live, npt.NDArray[np.float32]], None] | None = None

    def __init__(
        self,
        executor: Executor,
        cache: PageCache,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        new_sequence: Callable[[], TokenSequence],
        new_account: Callable[[str], Account],
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        """`new_sequence` makes an empty sequence, `new_account` an account of a phase; `clock` gives seconds that only grow."""
        self._executor, self._cache, self._scheduler, self._tokenizer = executor, cache, scheduler, tokenizer
        self._new_sequence, self._new_account = new_sequence, new_account
        self._vocab_size, self._clock = vocab_size, clock
        self._lock = threading.RLock()
        self._posts: deque[Callable[[], None]] = deque()
        self._lives: dict[int, Live] = {}
        self._followers: dict[int, list[Live]] = {}
        self._numbers = itertools.count()

    # what other threads call

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, no turn is taken by anybody else, and Ctrl-C waits."""
        with deferred_interrupts(), self._lock:
            yield

    def submit(self, request: Request, sequence: TokenSequence | None = None) -> Live:
        """Leaves a request; it is begun by one of the next turns. With a `sequence` of its owner's it goes on from that."""
        accounts = (self._new_account("prefill"), self._new_account("decode"))
        answer, sampler = Answer(request, self._tokenizer), Sampler(request.params, self._vocab_size)
        params, row = request.params, None
        if params.temperature > 0.0 or params.has_edits:
            row = SamplingRow(params, self._vocab_size, request.context_tokens)
        live = Live(next(self._numbers), request, answer, sampler, row, accounts)
        if sequence is not None:
            live.sequence, live.kept_tokens = sequence, sequence.num_tokens
        self._posts.append(lambda: self._queue(live))
        return live

    def cancel(self, live: Live) -> None:
        """Leaves word that nobody wants more of a request than was read; never waits, and takes no lock."""
        live.is_cancelled = True
        self._posts.append(lambda: self._cancel(live))

    def post(self, call: Callable[[], None]) -> None:
        """Leaves something to be done at the beginning of the next turn."""
        self._posts.append(call)

    def drive(self, outbox: Outbox) -> None:
        """Takes turns until an outbox has news; whoever else is served meanwhile finds theirs."""
        while not outbox.has_news:
            with self.hold():
                # somebody else may have brought news while this thread waited for its turn
                if not outbox.has_news:
                    self._turn_for(outbox)

    def _turn_for(self, outbox: Outbox) -> None:
        if not self.turn() and not outbox.has_news:
            self._unblock(outbox)

    def settle(self) -> None:
        """Does what was posted, without computing anything."""
        with self.hold():
            self._hear()

    def close(self) -> None:
        """Ends every request; what they computed is kept."""
        with self.hold():
            self._hear()
            for live in list(self._lives.values()):
                self._finish(live, "cancelled")

    def reuse_of(self, live: Live) -> Reuse:
        """Where the past of a request came from."""
        if live.reuse is not None:
            return live.reuse
        with self.hold():
            return self._reuse(live)

    # a turn

    def turn(self) -> bool:
        """One turn; False if there was nothing to do. Its caller holds the lock."""
        self._hear()
        turn = self._scheduler.plan(self._clock(), self._cache.num_room())
        for number in turn.preempt:
            self._preempt(self._lives[number])
        for number in turn.admit:
            self._admit(self._lives[number])
        parts = self._schedule(turn.decode, turn.chunks)
        for group, steps in self._groups(self._reserve(parts, turn.steps), turn.steps):
            run = self._execute(group, steps)
            if run is not None:
                self._commit(group, self._sample(group, run))
        return bool(parts or turn.preempt or turn.admit)

    def _hear(self) -> None:
        while self._posts:
            self._posts.popleft()()
        for live in [live for live in self._lives.values() if live.is_paused]:
            if not live.outbox.is_full:
                live.is_paused = False
                self._scheduler.pause(live.number, False)

    def _queue(self, live: Live) -> None:
        if live.state == "done":
            return
        self._lives[live.number] = live
        request = live.request
        refusal = self._scheduler.submit(
            Ticket(
                live.number,
                prompt_tokens=len(request.prompt_ids),
                max_tokens=request.max_tokens,
                arrived_s=self._clock(),
                priority=request.priority,
                client=request.client,
                deadline_s=request.deadline_s,
            )
        )
        if refusal is not None:
            del self._lives[live.number]
            live.state = "done"
            live.outbox.close(None, _refused(refusal, request))

    def _cancel(self, live: Live) -> None:
        """What was computed and read stays; tokens that nobody read are forgotten, so that a next turn goes on from there."""
        if live.state == "done":
            return
        num_read = live.outbox.num_read_tokens
        del live.answer.token_ids[num_read:]
        del live.answer.history[len(live.request.prompt_ids) + num_read :]
        if live.sequence is not None:
            live.sequence.truncate(min(live.sequence.num_tokens, len(live.answer.history)))
        self._finish(live, "cancelled")

    def _admit(self, live: Live) -> None:
        """Begins a request, or goes on with one that was preempted: with what is known of its tokens."""
        tokens = live.answer.history
        leader = self._leader(live, tokens)
        if leader is not None:
            live.state = "reading"
            self._scheduler.admitted(live.number, len(tokens), 0)
            self._scheduler.reading(live.number)
            self._followers.setdefault(leader.number, []).append(live)
            return
        self._begin(live)

    def _begin(self, live: Live) -> None:
        """Finds what is known of its tokens; the rest is computed by the steps that follow."""
        was_following, tokens, start = live.state == "reading", live.answer.history, self._clock()
        try:
            self._find(live, tokens)
        except BaseException as error:
            self._finish(live, None, error)
            return
        live.prefill_s += self._clock() - start
        assert live.sequence is not None
        live.state = "prefill"
        known, held = live.sequence.num_tokens, len(live.sequence.pages)
        if was_following:
            self._scheduler.arrived(live.number)
            self._scheduler.computed(live.number, known, held, self._clock())
        else:
            self._scheduler.admitted(live.number, len(tokens) - known, held)

    def _find(self, live: Live, tokens: Sequence[int]) -> None:
        if live.request.recalls:
            live.sequence = self._new_sequence()
            with live.sequence.booked_on(live.prefill):
                # the last token is always computed anew: its logits are needed
                recalled = recall(live.sequence, tokens[:-1], 1, self._clock)
            if live.past is None:
                live.past = Past(recalled, self._cache.now_s())
        else:
            assert live.sequence is not None
            live.sequence.keep_common(tokens[:-1])
        if live.row is not None:
            live.row.note(tokens, 0)

    def _leader(self, live: Live, tokens: Sequence[int]) -> Live | None:
        """A request that is computing the beginning of these tokens just now: what it computes need not be computed twice."""
        if not live.request.recalls:
            return None
        for other in self._lives.values():
            if other.state != "prefill" or other is live or other.sequence is None or not other.request.recalls:
                continue
            computed, whole = other.sequence.num_tokens, (len(other.answer.history) - 1) // PAGE_TOKENS * PAGE_TOKENS
            end = min(whole, (len(tokens) - 1) // PAGE_TOKENS * PAGE_TOKENS)
            if end > computed and other.answer.history[:end] == list(tokens[:end]):
                return other
        return None

    def _release_followers(self, leader: Live) -> None:
        """A prompt is complete, or will never be: those who waited for it begin with what is known now."""
        for live in self._followers.pop(leader.number, []):
            if live.state == "reading":
                self._begin(live)

    def _schedule(self, decode: Sequence[int], chunks: Sequence[tuple[int, int]]) -> list[Part]:
        """What everybody computes next."""
        parts = [Part(live, live.left, wants=True) for live in (self._lives[number] for number in decode)]
        for number, count in chunks:
            live = self._lives.get(number)
            if live is not None:
                left = live.left
                parts.append(Part(live, left[:count], wants=count >= len(left)))
        return parts

    def _reserve(self, parts: list[Part], steps: int) -> list[Part]:
        """Takes pages for what everybody computes; those for whom there are none are over."""
        reserved = []
        for part in parts:
            try:
                part.sequence.reserve(part.sequence.num_tokens + len(part.token_ids) + steps - 1)
            except BaseException as error:
                self._finish(part.live, None, error)
            else:
                reserved.append(part)
        return reserved

    @staticmethod
    def _groups(parts: list[Part], steps: int) -> list[tuple[list[Part], int]]:
        """Those who can share a step, then one by one those whose past is partly on disk; and how many steps each takes."""
        together = [part for part in parts if not part.sequence.is_alone]
        # log-probabilities are told from the logits of each step
        ahead = all(part.live.request.params.logprobs == 0 and len(part.token_ids) == 1 for part in together)
        alone = [([part], 1) for part in parts if part.sequence.is_alone]
        return [(together, steps if ahead and not alone else 1), *alone] if together else alone

    def _execute(self, parts: list[Part], steps: int) -> StepRun | None:
        """Runs a step of some requests, for which pages are reserved."""
        start, alone = self._clock(), parts[0].sequence.is_alone
        try:
            if alone:
                with parts[0].sequence.booked_on(self._account(parts[0].live)):
                    run = parts[0].sequence.run_alone(parts[0].token_ids, parts[0].live.row)
            else:
                slices = [part.sequence.slice(part.token_ids, int(part.wants), part.live.row) for part in parts]
                run = self._executor.run(slices, steps)
                self._book(parts, run)
        except BaseException as error:
            for part in parts:
                self._finish(part.live, None, error)
            return None
        seconds = self._clock() - start
        for part in parts:
            part.live.took_part(seconds)
        if not alone:  # what reading took is no part of anybody's pace
            self._observe(parts, steps, seconds)
        return run

    def _sample(self, parts: list[Part], run: StepRun) -> list[list[Sampled]]:
        """The tokens that follow each part: none behind a chunk that does not complete its prompt."""
        tokens: list[list[Sampled]] = []
        row = 0
        for part in parts:
            if not part.wants:
                tokens.append([])
                continue
            live = part.live
            if self.watch is not None and len(run.chosen) == 1:
                self.watch(live, run.logits[row])
            chosen = run.chosen[:, row].tolist()
            if live.request.params.logprobs and chosen[0] >= 0:
                tokens.append([live.sampler.tell(run.logits[row], chosen[0])])
            else:
                tokens.append([Sampled(token) for token in chosen])
            row += 1
        return tokens

    def _commit(self, parts: list[Part], tokens: list[list[Sampled]]) -> None:
        """Tokens go to their readers, pages to the memory of the past."""
        for part, sampled in zip(parts, tokens, strict=True):
            try:
                self._take(part, sampled)
            except BaseException as error:
                self._finish(part.live, None, error)

    def _take(self, part: Part, sampled: list[Sampled]) -> None:
        live, sequence = part.live, part.sequence
        wrong = next((each.token_id for each in sampled if each.token_id < 0), None)
        if wrong is not None:
            self._finish(live, None, self._not_chosen(live, wrong))
            return
        sequence.took([*part.token_ids, *(each.token_id for each in sampled[:-1])])
        if live.state == "prefill" and live.request.recalls:
            sequence.share(complete=part.wants)
        for each in sampled:
            piece = live.answer.take(each)
            if piece.text or piece.token_ids:
                live.outbox.put(piece)
            if live.answer.finish_reason is not None:
                break
        if live.answer.finish_reason is not None:
            sequence.truncate(min(sequence.num_tokens, len(live.answer.history)))
            self._finish(live, live.answer.finish_reason)
        else:
            self._computed(live, len(part.token_ids) + max(0, len(sampled) - 1))

    @staticmethod
    def _not_chosen(live: Live, code: int) -> HeadraceError:
        """Why a step has chosen no token."""
        try:
            if live.row is not None:
                live.row.check(code)
        except HeadraceError as error:
            return error
        at = len(live.answer.history)
        return NumericError(NOT_FINITE.format(first=at - 1, last=at - 1))

    def _computed(self, live: Live, num_tokens: int) -> None:
        assert live.sequence is not None
        self._scheduler.computed(live.number, num_tokens, len(live.sequence.pages), self._clock())
        if live.state == "prefill" and live.answer.token_ids and len(live.left) == 1:
            live.state = "decode"
            self._release_followers(live)
        if live.outbox.is_full:
            live.is_paused = True
            self._scheduler.pause(live.number, True)

    def _finish(self, live: Live, reason: FinishReason | None, error: BaseException | None = None) -> None:
        """A request is over: what it computed becomes known, its pages are let go, its reader is told."""
        if live.state == "done":
            return
        live.state = "done"
        self._lives.pop(live.number, None)
        self._scheduler.cancel(live.number)
        try:
            if live.sequence is not None and live.request.recalls:
                live.reuse = self._reuse(live)
                count_reuse(self._cache.counters, live.reuse)
                if error is None:  # an error leaves no answer that anybody would go on from
                    live.sequence.commit(len(live.answer.token_ids), live.request.standing())
        except BaseException as late:
            reason, error = None, error or late
        finally:
            if live.sequence is not None and live.request.recalls:
                live.sequence.close()
            live.outbox.close(reason, error)
            self._release_followers(live)

    def _preempt(self, live: Live) -> None:
        """A request makes room for others: its pages become part of what is known, where it finds them when it goes on."""
        if not live.request.recalls:
            self._finish(
                live, None, ContextOverflowError("other requests need the memory: give more for the past, or ask later")
            )
            return
        assert live.sequence is not None
        live.sequence.commit(len(live.answer.token_ids), live.request.standing())
        live.sequence.close()
        live.sequence, live.state = None, "waiting"
        self._scheduler.preempted(live.number, len(live.answer.history))
        self._release_followers(live)

    def _unblock(self, outbox: Outbox) -> None:
        """Somebody waits and nothing can be done: those whose readers are slow give up their memory, the least urgent first."""
        paused = [live for live in self._lives.values() if live.is_paused and live.request.recalls]
        if paused:
            self._preempt(min(paused, key=lambda live: (live.request.priority, -live.number)))
            return
        for live in list(self._lives.values()):
            if live.outbox is outbox:
                self._finish(live, None, self._no_room(live))
                return
        raise AssertionError("a request that is neither known nor done is waited for")

    def _no_room(self, live: Live) -> ContextOverflowError:
        room = self._cache.num_room() * PAGE_TOKENS
        return ContextOverflowError(
            f"{len(live.answer.history)} tokens do not fit: there is room for {room}; shorten the prompt, close sequences that "
            "are not needed, or give more memory for the past"
        )

    def _book(self, parts: list[Part], run: StepRun) -> None:
        """Books a step on the accounts of everybody who took part, each with a share of the weights that were read."""
        for part in parts:
            count, past, formats = len(part.token_ids), part.sequence.num_tokens, part.sequence.formats()
            edited = part.live.row is not None and part.live.row.is_edited
            for number, stamps in enumerate(run.stamps):
                step = SequenceStep(
                    count, past + number, int(part.wants), chosen=part.wants, edited=edited, page_formats=formats
                )
                for account in (self._account(part.live), *part.sequence.accounts):
                    account.add((step,), stamps[:-1], int(stamps[-1]), sharers=len(parts))

    @staticmethod
    def _account(live: Live) -> Account:
        return live.decode if live.state == "decode" else live.prefill

    def _observe(self, parts: list[Part], steps: int, seconds: float) -> None:
        """What a step took teaches the scheduler its pace, and the memory of the past the price of computing."""
        prompts = [part for part in parts if part.live.state != "decode"]
        computed = sum(len(part.token_ids) for part in prompts)
        # on average over the prompts' tokens
        behind = sum(len(part.token_ids) * part.sequence.num_tokens for part in prompts) / max(1, computed)
        self._scheduler.observe(StepObservation(len(parts) - len(prompts), computed, behind, steps, seconds))
        if len(parts) == 1:
            self._cache.prices.computed(len(parts[0].token_ids), parts[0].sequence.num_tokens, seconds / steps)

    def _reuse(self, live: Live) -> Reuse:
        prompt, sequence = live.request.prompt_ids, live.sequence
        if live.past is None:
            reuse = Reuse(memory_tokens=live.kept_tokens, computed_tokens=len(prompt) - live.kept_tokens)
        else:
            reuse = reuse_of(live.past, prompt, self._tokenizer, self._cache)
        if sequence is None:
            return reuse
        misses = (*reuse.misses, *lost_reports(sequence.lost))
        return replace(reuse, misses=misses, streamed_bytes=sequence.streamed_bytes, streamed_s=sequence.streamed_s)


def _refused(refusal: Refusal, request: Request) -> HeadraceError:
    """Why a request does not even wait, for whoever reads its answer."""
    if refusal.reason == "queue full":
        return BusyError(
            f"{refusal.num_waiting} requests wait already, and no more than {refusal.max_waiting} may: ask again later"
        )
    return ContextOverflowError(
        f"a prompt of {len(request.prompt_ids)} tokens and its answer need {refusal.needed_pages} pages of "
        f"{PAGE_TOKENS} tokens and memory holds {refusal.total_pages}: shorten the prompt, give more memory for the past, "
        "or allow kv_disk"
    )
