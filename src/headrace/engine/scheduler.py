"""Decides what is done next: who is admitted, who is preempted, and what the next step computes.

A turn either changes who runs or computes: what is known of a newcomer's prompt, and what memory that takes, is not known
before the loop has looked. Such a turn is planned again at once; turns that change who runs come to an end by themselves.

**Decode.** Everyone who decodes computes a token in each step that is computed, unless its reader is slow, its past is
being read, or memory is short; when more decode than fit into a step, whoever was served longest ago goes first.

**Prompts** share what is left of the step, in this order: the highest priority; then those that were preempted, whose
readers have begun; then the earliest deadline that has not passed; then whoever's client has had the fewest prompt tokens
computed; of one client the prompt with the fewest tokens left; then the earliest arrival. A chunk ends where a page ends,
or with its prompt. A prompt that ends in a step is not made to wait for much of another one: besides it, only prompts that
end in the step too are added, and a part of another only while the step has no more than 50 tokens of prompts.

Chunks are as large as learnt costs allow (`StepCosts`):
- beside decode rows a step is planned to take at most 0.9 of the bound on the time between tokens: `Limits.itl_s`, or
  4 times what the decode rows take alone. The first prompt of a step advances to the end of its page even if that takes
  longer, or if nothing was measured yet; and to its own end, if that is no more than a quarter of a page farther;
- while several requests wait or have prompts, a step takes no longer than 3 times what a prompt of 50 tokens takes,
  so that a short newcomer waits for little.
To know what decode rows take alone, prompts are left out of a step when no time near theirs was measured lately, and of
no more than one step in `MEASURE_EVERY`.

**Memory.** What could never fit is refused. A request is admitted when there are pages for its whole prompt and one more,
besides those that the running ones need for the rest of their prompts and one page each; nobody passes the one that is
next. When pages for this step and the next are short, running requests are preempted: first those whose reader is slow,
then the lowest priority, then the latest arrival; never the best of those that compute, so never one that is alone. A
request that waits displaces, where that makes room for it, those whose reader is slow, and those of a lower priority that
have generated a token and were not preempted before.

**Fairness.** Of two clients with prompts of the same priority and without deadlines none gets more than 2 x
`max_step_tokens` prompt tokens more than the other, however many requests it has.

**Nobody starves.** Of n = `OLDEST_EVERY` admissions, and of n steps with prompts, one goes to the oldest first. Hence
- a request is admitted as number n (k + 1) at the latest, where k counts how often older ones are admitted meanwhile, those
  that come back after a preemption included; for a higher priority, each is made to come back once at most;
- a prompt is computed after n steps with prompts for each page of it and of the prompts older than it, at the latest; of
  `MEASURE_EVERY` steps all but one have prompts while one is to be computed and has its pages;
- a request that was preempted is not preempted again before it has generated a token (unless its reader is slow, or nobody
  could go on otherwise); when pages were short, nobody is admitted before the next step, unless nobody is left who computes.

Not known here: tokens, arrays, pages by name, a clock. Times are passed in. Not thread-safe: the loop owns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace.engine.chunks import ChunkPlanner
from headrace.engine.pacing import StepCosts, StepObservation
from headrace.engine.running import Limits, Running
from headrace.engine.waiting import OLDEST_EVERY, Entry, Ticket, WaitingQueue

__all__ = ["MEASURE_EVERY", "OLDEST_EVERY", "Limits", "Refusal", "Scheduler", "StepCosts", "StepObservation", "Ticket", "Turn"]

MEASURE_EVERY = 16
"""Of so many steps with decode rows, prompts are left out of no more than one to measure it."""


@dataclass(frozen=True)
class Refusal:
    """Why a request does not even wait, with the numbers: its pages against those there are, and who waits already."""

    reason: Literal["queue full", "can never fit"]
    needed_pages: int
    total_pages: int
    num_waiting: int
    max_waiting: int


@dataclass(frozen=True)
class Turn:
    """What the loop does next. Either it changes who runs, or it computes; a turn that is empty waits for news.

    Attributes:
        admit: requests to begin: what is known of their prompts is found, then `Scheduler.admitted` is called.
        preempt: requests to stop: their pages are committed, then `Scheduler.preempted` is called.
        decode: requests that compute one token in each step.
        chunks: (request, tokens): parts of prompts that are computed in the step.
        steps: how many steps are run in one go; more than 1 only without chunks.
    """

    admit: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    steps: int = 1

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be done before a request comes, is read, is taken up again or gives pages back."""
        return not (self.admit or self.preempt or self.decode or self.chunks)


class Scheduler:
    """Owns the states of all requests: waiting, named for admission, running, leaving.

    `shared_pages(request_id)` is how many pages of its prompt requests that run hold already, so that it needs none for
    them; it is asked for the request that is next only.
    """

    def __init__(self, limits: Limits, costs: StepCosts, shared_pages: Callable[[int], int] = lambda request_id: 0) -> None:
        self.costs = costs
        self._limits, self._shared_pages = limits, shared_pages
        self._queue = WaitingQueue()
        self._parked: dict[int, Entry] = {}  # waiting, and their readers are slow: they were preempted
        self._running: dict[int, Running] = {}
        self._prompts: dict[int, Running] = {}  # those that compute: their prompts,
        self._decoding: dict[int, Running] = {}  # or one token after the other
        self._chunks = ChunkPlanner(limits, costs)
        self._turn = 0
        self._measured_turn = -MEASURE_EVERY
        self._is_settling = False  # pages were short, and no step was computed since

    @property
    def num_waiting(self) -> int:
        """Requests that were submitted, or preempted, and are not named for admission."""
        return len(self._queue) + len(self._parked)

    @property
    def num_running(self) -> int:
        """Requests that were named for admission, and those that run."""
        return len(self._running)

    def submit(self, ticket: Ticket) -> Refusal | None:
        """A request waits from now on, unless it is refused."""
        assert ticket.request_id not in self._running
        assert ticket.request_id not in self._parked
        assert ticket.request_id not in self._queue
        assert ticket.prompt_tokens >= 1
        limits = self._limits
        needed_pages = limits.pages(ticket.prompt_tokens) + 1
        if needed_pages > limits.total_pages and not limits.may_spill:
            return self._refusal("can never fit", needed_pages)
        if self.num_waiting >= limits.max_waiting:
            return self._refusal("queue full", needed_pages)
        self._queue.add(Entry(ticket, ticket.prompt_tokens))
        return None

    def cancel(self, request_id: int) -> None:
        """Forgets a request, in whatever state it is; nothing happens to one that is not known."""
        self._queue.remove(request_id)
        for states in (self._parked, self._running, self._prompts, self._decoding):
            states.pop(request_id, None)

    def finished(self, request_id: int) -> None:
        """A request has all its tokens, and gave its pages back."""
        assert request_id in self._running
        self.cancel(request_id)

    def admitted(self, request_id: int, prompt_left: int, held_pages: int) -> None:
        """A request named in `Turn.admit` runs: so many tokens of its prompt, at least 1, are not known, it holds pages."""
        request = self._running[request_id]
        assert not request.is_admitted
        assert 1 <= prompt_left <= request.prompt_tokens
        request.admit(prompt_left, held_pages, self._limits.page_tokens)
        self._place(request)

    def reading(self, request_id: int) -> None:
        """What is known of a prompt is read from disk: the request takes no part until it has arrived."""
        request = self._running[request_id]
        request.is_reading = True
        self._place(request)

    def arrived(self, request_id: int) -> None:
        """What was read for a request is there."""
        request = self._running[request_id]
        request.is_reading = False
        self._place(request)

    def pause(self, request_id: int, paused: bool) -> None:
        """The reader of a request is slow, or no more: a paused request keeps its pages and takes no part.

        If it is preempted, it waits until it is not paused.
        """
        if (request := self._running.get(request_id)) is not None:
            request.is_paused = paused
            self._place(request)
        elif paused and (entry := self._queue.remove(request_id)) is not None:
            self._park(entry)
        elif not paused and (entry := self._parked.pop(request_id, None)) is not None:
            self._queue.add(Entry(entry.ticket, entry.prompt_tokens, entry.resumes))

    def computed(self, request_id: int, tokens: int, held_pages: int, now_s: float) -> None:
        """Tokens of a request were computed, of its prompt or one after the other; it holds pages now."""
        request = self._running[request_id]
        request.hold(tokens, held_pages, self._limits.page_tokens)
        request.served_s = now_s
        self._is_settling = False
        if request.prompt_left:
            assert tokens <= request.prompt_left
            self._chunks.computed(request, tokens)
            request.prompt_left -= tokens
            if request.prompt_left == 0:  # the step that ends a prompt gives the first token
                request.has_generated = True
                self._place(request)

    def preempted(self, request_id: int, prompt_tokens: int) -> None:
        """A request was stopped and waits again; its prompt, its answer so far included, has so many tokens."""
        request = self._running[request_id]
        self.cancel(request_id)
        # One that could not be begun after all is as it was.
        entry = Entry(request.ticket, prompt_tokens, resumes=request.is_admitted or request.was_preempted)
        if request.is_paused:
            self._park(entry)
        else:
            self._queue.add(entry)

    def observe(self, seen: StepObservation) -> None:
        """Learns what a step cost."""
        self.costs.observe(seen)

    def plan(self, now_s: float, free_pages: int) -> Turn:
        """What to do next. `free_pages` could be had now without taking any from requests that run."""
        prompts = self._chunks.order(self._prompts.values(), now_s)
        if preempt := self._short_of(free_pages, prompts):
            self._is_settling = True
            return Turn(preempt=self._leave(preempt))
        if self._queue and not (self._is_settling and (self._prompts or self._decoding)):
            admit, displaced = self._admission(free_pages, now_s)
            if admit or displaced:
                return Turn(admit=admit, preempt=self._leave(displaced))
        return self._step(free_pages, prompts)

    # Memory

    def _short_of(self, free_pages: int, prompts: list[Running]) -> list[Running]:
        """Whom to preempt so that the others have pages for this step and the next; nobody if they have them."""
        wanted = sum(1 for request in self._decoding.values() if request.room_tokens < 2)
        if prompts and prompts[0].room_tokens < 1:
            wanted += 1
        if wanted <= free_pages or len(self._running) == 1:
            return []
        if any(request.is_leaving or not request.is_admitted for request in self._running.values()):
            return []  # their pages, or what they take, are not known yet
        candidates = sorted(
            (request for request in self._running.values() if not request.is_reading), key=lambda request: request.victim_order
        )
        if candidates and not candidates[-1].is_paused:
            candidates.pop()  # the best goes on
        victims: list[Running] = []
        for request in (each for each in candidates if each.may_be_preempted):
            if wanted <= free_pages:
                break
            victims.append(request)
            free_pages += request.held_pages
            wanted -= request.computes and request.room_tokens < 2
        return victims or self._stuck(free_pages, candidates)

    def _stuck(self, free_pages: int, candidates: list[Running]) -> list[Running]:
        """The first of those that were promised to go on, if nobody can."""
        can_go_on = free_pages > 0 or any(
            request.is_reading or (request.computes and request.room_tokens > 0) for request in self._running.values()
        )
        return [] if can_go_on else candidates[:1]

    def _admission(self, free_pages: int, now_s: float) -> tuple[tuple[int, ...], list[Running]]:
        """Whom to admit now, in their order; if nobody, whom to preempt so that the next one can be."""
        limits = self._limits
        admit: list[int] = []
        left_pages = free_pages
        if len(self._running) < limits.max_running:  # else nobody needs to know
            left_pages -= sum(self._promised(request) for request in self._running.values())
        while (entry := self._queue.first(now_s)) is not None:
            # Who is alone may hold all there is, and more on disk.
            needed = min(limits.pages(entry.prompt_tokens) + 1, limits.total_pages)
            needed = max(1, needed - self._shared_pages(entry.ticket.request_id))
            has_place, has_room = len(self._running) < limits.max_running, needed <= left_pages or not self._running
            if not (has_place and has_room):
                return tuple(admit), [] if admit else self._displaced(entry, needed - free_pages)
            self._queue.admit_first(now_s)
            request = Running(entry.ticket, entry.prompt_tokens, entry.resumes, needed)
            self._running[entry.ticket.request_id] = request
            admit.append(entry.ticket.request_id)
            left_pages -= needed
        return tuple(admit), []

    def _promised(self, request: Running) -> int:
        """Pages that a request will take soon: for the rest of its prompt, and one more."""
        if not request.is_admitted:
            return request.needed_pages
        return 0 if request.is_leaving else request.pages_for(request.prompt_left, self._limits.page_tokens) + 1

    def _displaced(self, entry: Entry, missing_pages: int) -> list[Running]:
        """Whom to preempt so that a request that waits has a place and its pages; nobody if that does not suffice."""
        priority = entry.ticket.priority
        candidates = [
            request
            for request in self._running.values()
            if request.is_paused or (request.ticket.priority < priority and request.has_generated and not request.was_preempted)
        ]
        if not candidates or any(request.is_leaving or not request.is_admitted for request in self._running.values()):
            return []  # those who leave give pages back, those who come may need fewer than was thought: wait for that
        candidates = sorted(
            (request for request in candidates if not request.is_reading), key=lambda request: request.victim_order
        )
        missing_pages += sum(self._promised(request) for request in self._running.values())
        for number, request in enumerate(candidates, 1):
            missing_pages -= request.held_pages + self._promised(request)
            if missing_pages <= 0:
                return candidates[:number]
        return []

    # A step

    def _step(self, free_pages: int, prompts: list[Running]) -> Turn:
        self._turn += 1
        if len(self._running) == 1:
            # Nobody else has any pages: it spills, or ends where memory does.
            free_pages = self._limits.total_pages + self._limits.max_step_tokens
        rows, free_pages = self._rows(free_pages)
        decode = tuple(request.ticket.request_id for request in rows)
        if not prompts:
            return Turn(decode=decode, steps=self._steps_ahead(rows, free_pages) if rows else 1)
        is_measuring = rows and self._turn - self._measured_turn >= MEASURE_EVERY and not self.costs.is_measured(len(rows))
        if is_measuring:
            self._measured_turn = self._turn
            return Turn(decode=decode)
        crowded = len(prompts) + len(self._queue) > 1
        return Turn(decode=decode, chunks=self._chunks.plan(prompts, len(rows), free_pages, crowded=crowded))

    def _rows(self, free_pages: int) -> tuple[list[Running], int]:
        """Those that decode in this step, and the pages that they leave."""
        rows = list(self._decoding.values())
        if len(rows) > self._limits.max_rows:
            rows = sorted(rows, key=lambda request: request.served_s)[: self._limits.max_rows]
        wanted = sum(1 for request in rows if request.room_tokens < 1)
        if wanted <= free_pages:
            return rows, free_pages - wanted
        served = []
        for request in sorted(rows, key=lambda request: request.victim_order, reverse=True):
            if request.room_tokens > 0 or free_pages > 0:
                free_pages -= request.room_tokens < 1
                served.append(request)
        return served, max(0, free_pages)

    def _steps_ahead(self, rows: list[Running], free_pages: int) -> int:
        """How many steps to run in one go: a power of two; `free_pages` are left beside one step."""
        limits = self._limits
        step_s = self.costs.decode_s(len(rows))
        somebody_may_come = self._is_settling and len(self._queue) > 0
        if step_s is None or somebody_may_come or len(self._decoding) > len(rows):
            return 1
        within_s = limits.ahead_s if limits.itl_s is None else min(limits.ahead_s, limits.itl_s)
        most = min(limits.max_steps, int(within_s / step_s), *(request.tokens_to_end for request in rows))
        steps = 1
        while 2 * steps <= most:
            more = sum(request.pages_for(2 * steps, limits.page_tokens) - (request.room_tokens < 1) for request in rows)
            if more > free_pages:
                break
            steps *= 2
        return steps

    # States

    def _place(self, request: Running) -> None:
        """Puts a request where its state belongs."""
        request_id = request.ticket.request_id
        had_prompt = self._prompts.pop(request_id, None) is not None
        self._decoding.pop(request_id, None)
        if not request.computes:
            return
        if not request.prompt_left:
            self._decoding[request_id] = request
            return
        if not had_prompt:
            self._chunks.join(request, self._prompts.values())
        self._prompts[request_id] = request

    def _leave(self, requests: list[Running]) -> tuple[int, ...]:
        for request in requests:
            request.is_leaving = True
            self._place(request)
        return tuple(request.ticket.request_id for request in requests)

    def _park(self, entry: Entry) -> None:
        self._parked[entry.ticket.request_id] = entry

    def _refusal(self, reason: Literal["queue full", "can never fit"], needed_pages: int) -> Refusal:
        limits = self._limits
        return Refusal(reason, needed_pages, limits.total_pages, self.num_waiting, limits.max_waiting)
