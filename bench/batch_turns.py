"""The scheduler alone, driven by a fake engine: requests come, are admitted, compute and end, and only its own calls are timed.

Every request that ends is followed by a new one, so that as many wait and run all the time as were asked for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

PROMPT_TOKENS = (50, 600)
ANSWER_TOKENS = (30, 200)
CLIENTS = 8
STEP_S, ROW_S, PROMPT_TOKEN_S = 2e-3, 3e-4, 3e-5


class FakeEngine:
    """Requests that compute nothing, and what the scheduler is told of them; `spent_s` is the time that its calls took."""

    def __init__(self, waiting: int, running: int) -> None:
        from headrace.engine.scheduler import Limits, Scheduler, StepCosts

        pages = (waiting + running) * (PROMPT_TOKENS[1] + ANSWER_TOKENS[1])
        self._limits = Limits(total_pages=pages, max_running=running, max_rows=running, max_waiting=2 * (waiting + running))
        self.scheduler = Scheduler(self._limits, StepCosts())
        self.spent_s, self.num_turns = 0.0, 0
        self._random = random.Random(7)
        self._now_s, self._next_id = 0.0, 0
        self._left: dict[int, tuple[int, int, int]] = {}  # tokens that are there, of the prompt and of the answer to come
        for _ in range(waiting + running):
            self._submit()()

    def _timed(self, *calls: Callable[[], Any]) -> Any:
        """Makes calls and adds the processor time they took, which does not depend on what else the machine does."""
        result = None
        start = time.thread_time()
        for call in calls:
            result = call()
        self.spent_s += time.thread_time() - start
        return result

    def _submit(self) -> Callable[[], Any]:
        """Makes a request; the call that submits it."""
        from headrace.engine.scheduler import Ticket

        prompt, answer = self._random.randint(*PROMPT_TOKENS), self._random.randint(*ANSWER_TOKENS)
        self._left[self._next_id] = (0, prompt, answer)
        client = f"client {self._random.randrange(CLIENTS)}"
        ticket = Ticket(self._next_id, prompt, answer, self._now_s, client=client)
        self._next_id += 1
        return partial(self.scheduler.submit, ticket)

    def turn(self) -> None:
        """One turn, and all that the scheduler is told after it."""
        from headrace.engine.scheduler import StepObservation

        held = sum(self._pages(there) for there, _, _ in self._left.values())
        turn = self._timed(partial(self.scheduler.plan, self._now_s, self._limits.total_pages - held))
        self.num_turns += 1
        assert not turn.is_empty
        assert not turn.preempt, "there is room for all"
        calls = [partial(self.scheduler.admitted, request, self._left[request][1], 0) for request in turn.admit]
        computed = [(request, turn.steps) for request in turn.decode] + list(turn.chunks)
        if computed:
            prompt_tokens = sum(tokens for _, tokens in turn.chunks)
            seconds = turn.steps * (STEP_S + ROW_S * len(turn.decode) + PROMPT_TOKEN_S * prompt_tokens)
            self._now_s += seconds
            calls += [call for request, tokens in computed for call in self._computed(request, tokens)]
            observation = StepObservation(len(turn.decode), prompt_tokens, 0.0, turn.steps, seconds)
            calls.append(partial(self.scheduler.observe, observation))
        self._timed(*calls)

    def _computed(self, request: int, tokens: int) -> list[Callable[[], Any]]:
        """What the scheduler is told of a request that has computed tokens; if it has ended, another one comes."""
        there, prompt, answer = self._left[request]
        if prompt:
            prompt -= tokens
            answer -= prompt == 0  # the step that ends a prompt gives the first token
        else:
            answer -= tokens
        self._left[request] = (there + tokens, prompt, answer)
        calls: list[Callable[[], Any]] = [
            partial(self.scheduler.computed, request, tokens, self._pages(there + tokens), self._now_s)
        ]
        if answer <= 0:
            del self._left[request]
            calls += [partial(self.scheduler.finished, request), self._submit()]
        return calls

    def _pages(self, tokens: int) -> int:
        return self._limits.pages(tokens)


def turn_us(waiting: int, running: int, turns: int) -> float:
    """Microseconds of the scheduler per turn, all that it is told included, once as many run as there may be."""
    engine = FakeEngine(waiting, running)
    while engine.scheduler.num_running < running:
        engine.turn()
    engine.spent_s, engine.num_turns = 0.0, 0
    for _ in range(turns):
        engine.turn()
    return engine.spent_s / engine.num_turns * 1e6
