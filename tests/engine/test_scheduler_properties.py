"""The scheduler drives an engine that only counts: whatever comes, memory and times are kept, and everybody is served."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from headrace.engine.scheduler import OLDEST_EVERY, Limits, StepCosts
from tiny.scheduling import FakeEngine, learnt_costs

PAGE = 8
"""Tokens of a page in these tests: small, so that pages end often."""

numbers = st.integers
priorities = st.sampled_from([0.5, 1.0, 1.0, 2.0])


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are read, paused and cancelled in any order; `FakeEngine` checks every turn."""

    @initialize(pages=numbers(3, 24), rows=numbers(1, 6), running=numbers(1, 8), may_spill=st.booleans(), learnt=st.booleans())
    def begin(self, pages: int, rows: int, running: int, may_spill: bool, learnt: bool) -> None:
        limits = Limits(
            total_pages=pages,
            max_step_tokens=rows + 5 * PAGE,
            max_rows=rows,
            max_running=running,
            max_waiting=6,
            page_tokens=PAGE,
            may_spill=may_spill,
        )
        self.engine = FakeEngine(limits, learnt_costs(rows) if learnt else StepCosts())
        self.paused: set[int] = set()

    @rule(
        prompt=numbers(1, 120),
        answer=numbers(1, 30),
        known=numbers(0, 60),
        is_read=st.booleans(),
        priority=priorities,
        client=st.sampled_from(["", "a", "b"]),
        within_s=st.none() | st.floats(0.0, 0.5),
    )
    def submit(
        self, prompt: int, answer: int, known: int, is_read: bool, priority: float, client: str, within_s: float | None
    ) -> None:
        deadline_s = None if within_s is None else self.engine.now_s + within_s
        limits, num_waiting = self.engine.limits, self.engine.scheduler.num_waiting
        _, refusal = self.engine.offer(
            prompt, answer, known=known, is_read=is_read, priority=priority, client=client, deadline_s=deadline_s
        )
        fits = limits.may_spill or -(-prompt // PAGE) + 1 <= limits.total_pages
        expected = "can never fit" if not fits else "queue full" if num_waiting >= limits.max_waiting else None
        assert (refusal and refusal.reason) == expected

    @rule(turns=numbers(1, 12))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.turn()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.engine.requests)))
        self.engine.cancel(request_id)

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.engine.running))
        self.engine.pause(request.ticket.request_id, True)

    @precondition(lambda self: any(request.is_paused for request in self.engine.requests.values()))
    @rule(data=st.data())
    def take_up(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([key for key, each in self.engine.requests.items() if each.is_paused]))
        self.engine.pause(request_id, False)

    @precondition(lambda self: any(request.is_reading for request in self.engine.requests.values()))
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from([key for key, each in self.engine.requests.items() if each.is_reading]))
        self.engine.arrive(request_id)

    @rule(pages=numbers(0, 3))
    def take_pages(self, pages: int) -> None:
        """Somebody else takes pages, or gives them back."""
        self.engine.taken_pages = pages

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.taken_pages = 0
        for request_id, request in engine.requests.items():
            if request.is_paused:
                engine.pause(request_id, False)
        tokens = sum(request.ticket.prompt_tokens + request.ticket.max_tokens for request in engine.requests.values())
        # Every third turn computes at least one token, even when everybody is preempted after each of their tokens.
        for _ in range(20 + 3 * OLDEST_EVERY * tokens):
            for request_id, request in engine.requests.items():
                if request.is_reading:
                    engine.arrive(request_id)
            if not engine.requests:
                break
            engine.turn()
        assert not engine.requests
        assert engine.scheduler.num_waiting == engine.scheduler.num_running == 0


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.tuples(numbers(1, 600), numbers(1, 40), priorities), min_size=1, max_size=12),
    itl_s=st.none() | st.floats(0.002, 0.2),
)
def test_steps_beside_decode_rows_stay_within_the_bound_where_they_can(
    prompts: list[tuple[int, int, float]], itl_s: float | None
) -> None:
    limits = Limits(total_pages=4000, page_tokens=32, itl_s=itl_s)
    engine = FakeEngine(limits, learnt_costs(), learns=False)
    for prompt, answer, priority in prompts:
        engine.submit(prompt, answer, priority=priority)
        engine.step()
    engine.run(20_000)
    for turn, seconds in engine.steps:
        if turn.decode and turn.chunks:
            # Where not even a page fits, one prompt advances by a page, or by a page and its last quarter of one.
            is_least = len(turn.chunks) == 1 and turn.chunks[0][1] <= 32 + 32 // 4
            assert is_least or seconds <= 1.000001 * engine.itl_bound_s(len(turn.decode))


@settings(max_examples=25, deadline=None)
@given(older=numbers(0, 4), data=st.data())
def test_everybody_is_admitted_after_a_bounded_number_of_admissions(older: int, data: st.DataObject) -> None:
    # One request runs at a time; before each turn somebody comes who is more urgent in every way.
    engine = FakeEngine(Limits(total_pages=100, page_tokens=PAGE, max_running=1), learnt_costs())
    low = [engine.submit(data.draw(numbers(1, 60)), 2, priority=0.5, client="low") for _ in range(older + 1)]
    engine.now_s += 1.0
    while low[-1] not in engine.admissions:
        while len(engine.requests) < 8:
            engine.submit(1, 1, priority=data.draw(st.sampled_from([1.0, 2.0])), client="high")
        engine.turn()
        # Each older one is displaced once at most, and comes back then.
        assert len(engine.admissions) <= OLDEST_EVERY * (2 * older + 1)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(numbers(1, 200), min_size=1, max_size=3), data=st.data())
def test_every_prompt_is_computed_after_a_bounded_number_of_steps(lengths: list[int], data: st.DataObject) -> None:
    engine = FakeEngine(Limits(total_pages=10_000, page_tokens=PAGE), learnt_costs())
    decoding = engine.submit(1, 10_000, priority=2.0)
    engine.step()
    low = [engine.submit(tokens, 2, priority=0.5) for tokens in lengths]
    engine.now_s += 1.0
    before = len(engine.steps)
    pages = sum(-(-tokens // PAGE) for tokens in lengths)
    while any(engine.requests[request_id].generated == 0 for request_id in low if request_id in engine.requests):
        while sum(not request.decodes for request in engine.requests.values()) < 8:
            engine.submit(data.draw(numbers(50, 400)), 1, priority=2.0)
        engine.turn()
        with_prompts = sum(1 for turn, _ in engine.steps[before:] if turn.chunks)
        assert with_prompts <= OLDEST_EVERY * (pages + 1)
    assert decoding in engine.requests


@settings(max_examples=25, deadline=None)
@given(
    a=st.lists(numbers(1, 900), min_size=6, max_size=10),
    b=st.lists(numbers(1, 900), min_size=6, max_size=10),
    learnt=st.booleans(),
)
def test_two_clients_get_the_same_number_of_prompt_tokens(a: list[int], b: list[int], learnt: bool) -> None:
    limits = Limits(total_pages=10_000)
    engine = FakeEngine(limits, learnt_costs() if learnt else StepCosts())
    owner = {engine.submit(tokens, 1, client="a"): "a" for tokens in a}
    owner |= {engine.submit(tokens, 1, client="b"): "b" for tokens in b}
    served = {"a": 0, "b": 0}
    while True:
        turn = engine.step()
        for request_id, tokens in turn.chunks:
            served[owner[request_id]] += tokens
        left = {owner[request_id] for request_id in engine.requests}
        if len(left) < 2:
            break
        assert abs(served["a"] - served["b"]) <= 2 * limits.max_step_tokens


@settings(max_examples=25, deadline=None)
@given(a=st.lists(numbers(1, 200), min_size=12, max_size=20), b=st.lists(numbers(1, 200), min_size=12, max_size=20))
def test_two_clients_are_admitted_with_the_same_number_of_tokens(a: list[int], b: list[int]) -> None:
    engine = FakeEngine(Limits(total_pages=10_000, max_running=1), learnt_costs())
    owner = {engine.submit(tokens, 1, client="a"): ("a", tokens) for tokens in a}
    owner |= {engine.submit(tokens, 1, client="b"): ("b", tokens) for tokens in b}
    served = {"a": 0, "b": 0}
    while {owner[key][0] for key, each in engine.requests.items() if not each.is_running} == {"a", "b"}:
        engine.turn()
        served = {name: sum(owner[key][1] for key in engine.admissions if owner[key][0] == name) for name in served}
        # One prompt ahead, and one more whenever the oldest has its turn, which the client then pays back.
        assert abs(served["a"] - served["b"]) <= 2 * 200


@settings(max_examples=25, deadline=None)
@given(pages=numbers(4, 12), answers=st.lists(numbers(10, 60), min_size=2, max_size=6), data=st.data())
def test_requests_that_preempt_each_other_all_end(pages: int, answers: list[int], data: st.DataObject) -> None:
    engine = FakeEngine(Limits(total_pages=pages, page_tokens=PAGE, may_spill=True), learnt_costs())
    for answer in answers:
        engine.submit(data.draw(numbers(1, 16)), answer, priority=data.draw(priorities))
    # Who was preempted comes back after the others have got on: there are no more turns than a few for each token.
    engine.run(10 + 4 * sum(answers) + 40 * len(answers))
    assert all(request.generated == request.ticket.max_tokens for request in engine.ended.values())
    assert len(engine.ended) == len(answers)
    assert math.isfinite(engine.now_s)
