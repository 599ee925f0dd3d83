"""Which parts of prompts a step computes. The rules are those of `scheduler.py`, which owns this."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from headrace.engine.pacing import StepCosts
from headrace.engine.running import Limits, Running
from headrace.engine.waiting import OLDEST_EVERY, FairShare, is_late

ITL_RATIO = 4.0
"""The bound on the time between tokens, in times of undisturbed steps, where none is given."""
ITL_SHARE = 0.9
"""Steps are planned to take this share of the bound: what was learnt is a middle, and half of the steps take longer."""
SHORT_PROMPT_TOKENS = 50
SHORT_PROMPT_RATIO = 3.0
"""In a crowd, a step takes no longer than so many times what a short prompt takes."""
_MANY_LANES = 64


class ChunkPlanner:
    """Orders prompts, shares steps out among them, and remembers what each client has had."""

    def __init__(self, limits: Limits, costs: StepCosts) -> None:
        self._limits, self._costs = limits, costs
        self._lanes: dict[float, FairShare] = {}
        self._since_oldest = 0
        self._fewest: Running | None = None  # who is first because its client has had the fewest tokens

    def join(self, new: Running, others: Collection[Running]) -> None:
        """A request has a prompt to be computed from now on, as `others` have."""
        ticket = new.ticket
        if len(self._lanes) >= _MANY_LANES:
            used = {other.ticket.priority for other in others}
            self._lanes = {priority: lane for priority, lane in self._lanes.items() if priority in used}
        lane = self._lanes.setdefault(ticket.priority, FairShare())
        if all((other.ticket.client, other.ticket.priority) != (ticket.client, ticket.priority) for other in others):
            lane.join(ticket.client)

    def computed(self, request: Running, tokens: int) -> None:
        """Tokens of a prompt were computed."""
        lane = self._lanes.setdefault(request.ticket.priority, FairShare())
        lane.charge(request.ticket.client, tokens, as_fewest=request is self._fewest)

    def order(self, prompts: Collection[Running], now_s: float) -> list[Running]:
        """Prompts, the next one first."""

        def key(request: Running) -> tuple[float, bool, float, float, int, float, int]:
            ticket = request.ticket
            deadline_s = math.inf if ticket.deadline_s is None or is_late(ticket, now_s) else ticket.deadline_s
            tokens = self._lanes[ticket.priority].of(ticket.client)
            return -ticket.priority, not request.was_preempted, deadline_s, tokens, request.prompt_left, *ticket.age_order

        ordered = sorted(prompts, key=key)
        first = ordered[0].ticket if ordered else None
        is_fair = first is not None and not ordered[0].was_preempted and (first.deadline_s is None or is_late(first, now_s))
        self._fewest = ordered[0] if is_fair else None
        return ordered

    def plan(self, ordered: Sequence[Running], rows: int, free_pages: int, *, crowded: bool) -> tuple[tuple[int, int], ...]:
        """Parts of prompts, (request id, tokens), for a step that has decode rows.

        `ordered` are prompts in the order of `order`; `free_pages` are theirs. `crowded`: more than one request waits or has
        a prompt.
        """
        if not ordered:
            return ()
        budget = _Budget(self._costs, self._limits.max_step_tokens - rows, self._step_s(rows, crowded=crowded), free_pages)
        chunks: dict[int, int] = {}
        oldest = min(ordered, key=lambda request: request.ticket.age_order)
        self._since_oldest += 1
        if self._since_oldest >= OLDEST_EVERY and oldest is not ordered[0]:
            # It gets one page, and the others the rest: a short prompt that has just come waits for no more than this.
            self._give(oldest, self._least(oldest, oldest.prompt_left), budget, chunks, must=True)
        for request in ordered:
            if budget.tokens <= 0:
                break
            if request.ticket.request_id not in chunks:
                is_first = not chunks
                self._give(request, request.prompt_left, budget, chunks, must=is_first)
                if not is_first and chunks.get(request.ticket.request_id, 0) < request.prompt_left:
                    break  # what is left of the step is too small for it: nobody passes it
        if oldest.ticket.request_id in chunks:
            self._since_oldest = 0
        return tuple(chunks.items())

    def _give(self, request: Running, tokens: int, budget: _Budget, chunks: dict[int, int], *, must: bool) -> None:
        """Adds a chunk of at most so many tokens, if there is one that fits; with `must` one page fits any time."""
        page_tokens = self._limits.page_tokens
        most = min(tokens, budget.tokens, max(0, request.room_tokens + budget.pages * page_tokens))
        chunk = self._largest(request, most, budget.seconds)
        if must:
            chunk = max(chunk, self._least(request, most))
        if budget.ends_prompt and chunk < request.prompt_left:
            chunk = self._largest(request, min(chunk, SHORT_PROMPT_TOKENS - budget.taken), budget.seconds)
        if chunk > 0:
            chunks[request.ticket.request_id] = chunk
            budget.take(request, chunk, page_tokens)

    def _largest(self, request: Running, most: int, seconds: float | None) -> int:
        """The largest chunk of at most `most` tokens that ends with the prompt, or where a page does, within so many seconds.

        0 if there is none, or if nobody knows how long one takes.
        """
        page_tokens, past = self._limits.page_tokens, request.num_tokens
        chunk = most if most == request.prompt_left else max(0, most - (past + most) % page_tokens)
        if seconds is None or chunk <= 0:
            return 0
        if seconds == math.inf:
            return chunk
        chunk_s = self._costs.prompt_s(chunk, past)
        if chunk_s is None or chunk_s <= seconds:
            return chunk if chunk_s is not None else 0
        # A token costs no less in a larger chunk: what is in proportion fits, and perhaps a page or two more.
        fits = int(chunk * seconds / chunk_s)
        fits = max(0, fits - (past + fits) % page_tokens)
        while (larger := fits + page_tokens - (past + fits) % page_tokens) < chunk:
            larger_s = self._costs.prompt_s(larger, past)
            if larger_s is None or larger_s > seconds:
                break
            fits = larger
        return fits

    def _least(self, request: Running, most: int) -> int:
        """By how much the first prompt of a step advances: to the end of its page, or to its own end if that is near it."""
        page_tokens = self._limits.page_tokens
        to_page_end = page_tokens - request.num_tokens % page_tokens
        near_end = to_page_end + page_tokens // 4
        return request.prompt_left if request.prompt_left <= min(most, near_end) else min(most, to_page_end)

    def _step_s(self, rows: int, *, crowded: bool) -> float | None:
        """Seconds for the prompts of a step: infinite without a bound; None: a bound holds, and what it allows is not known."""
        rows_s = self._costs.decode_s(rows)
        bound_s = math.inf
        if rows:
            if rows_s is None:
                return None
            bound_s = ITL_SHARE * (ITL_RATIO * rows_s if self._limits.itl_s is None else self._limits.itl_s)
        if crowded and (short_s := self._costs.step_s(0, SHORT_PROMPT_TOKENS, 0)) is not None:
            bound_s = min(bound_s, SHORT_PROMPT_RATIO * short_s)
        return max(0.0, bound_s - (self._costs.decode_s(max(1, rows)) or 0.0))


class _Budget:
    """What is left of a step for prompts: tokens, seconds (as `_step_s` gives them), pages."""

    def __init__(self, costs: StepCosts, tokens: int, seconds: float | None, pages: int) -> None:
        self._costs = costs
        self.tokens, self.seconds, self.pages = tokens, seconds, pages
        self.taken = 0
        self.ends_prompt = False

    def take(self, request: Running, chunk: int, page_tokens: int) -> None:
        self.tokens -= chunk
        self.taken += chunk
        self.pages -= request.pages_for(chunk, page_tokens)
        self.ends_prompt |= chunk == request.prompt_left
        if self.seconds is not None and self.seconds < math.inf:
            self.seconds = max(0.0, self.seconds - (self._costs.prompt_s(chunk, request.num_tokens) or 0.0))
