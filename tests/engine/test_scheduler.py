"""What the scheduler decides in situations of a few requests, turn by turn."""

from __future__ import annotations

import statistics
import time

import pytest

from headrace.engine.scheduler import (
    MEASURE_EVERY,
    OLDEST_EVERY,
    Limits,
    Refusal,
    Scheduler,
    StepCosts,
    StepObservation,
    Ticket,
    Turn,
)
from headrace.errors import OptionError
from tiny.scheduling import FakeEngine, learnt_costs, prompt_s, rows_s


def engine_of(costs: StepCosts | None = None, **options: object) -> FakeEngine:
    limits = Limits(**{"total_pages": 2000, **options})  # type: ignore[arg-type]
    return FakeEngine(limits, costs or learnt_costs())


def test_request_is_admitted_computed_and_decoded() -> None:
    engine = engine_of()
    engine.submit(70, 4)
    assert engine.turn() == Turn(admit=(0,))
    # Nobody is disturbed and nobody else waits: the whole prompt in one step, which gives the first token.
    assert engine.turn() == Turn(chunks=((0, 70),))
    # Three tokens are left: two in one go, as steps are a power of two, then one.
    assert engine.turn() == Turn(decode=(0,), steps=2)
    assert engine.turn() == Turn(decode=(0,), steps=1)
    assert engine.turn() == Turn()
    assert engine.turn().is_empty
    assert engine.ended[0].generated == 4


def test_chunks_end_where_pages_end() -> None:
    engine = engine_of()
    engine.submit(700, 1, known=40)
    engine.turn()
    # 40 tokens are known: 40 + 248 = 288 is the last end of a page within 256 tokens.
    assert [engine.turn().chunks for _ in range(3)] == [((0, 248),), ((0, 256),), ((0, 156),)]


def test_chunk_beside_decode_rows_fits_the_bound() -> None:
    engine = engine_of()
    for _ in range(8):
        engine.submit(1, 1000)
    engine.step()
    engine.submit(2000, 1)
    engine.turn()
    turn = engine.turn()
    assert set(turn.decode) == set(range(8))
    assert turn.steps == 1
    # 8 rows take 7.9 ms: 0.9 x 4 x 7.9 - 7.9 = 20.5 ms are left, which is 51 tokens: one whole page.
    assert turn.chunks == ((8, 32),)
    assert rows_s(8) + prompt_s(32, 0) < 0.9 * 4 * rows_s(8) < rows_s(8) + prompt_s(64, 0)


def test_given_bound_between_tokens_is_used() -> None:
    engine = engine_of(itl_s=0.1)
    engine.submit(1, 1000)
    engine.step()
    engine.submit(2000, 1)
    engine.turn()
    # 90 - 2 ms for the prompt, at 0.4 ms a token and some for attention: 192 tokens, in whole pages.
    assert engine.turn().chunks == ((1, 192),)


def test_prompt_advances_by_a_page_where_nothing_fits() -> None:
    engine = engine_of(itl_s=0.001)
    engine.submit(1, 1000)
    engine.step()
    engine.submit(72, 2)
    engine.turn()
    # 40 tokens are left after one page: no more than a quarter of a page above one, so that they end in one step.
    assert [engine.turn().chunks for _ in range(2)] == [((1, 32),), ((1, 40),)]


def test_time_between_tokens_must_be_positive() -> None:
    with pytest.raises(OptionError, match="itl_ms=-5 is no time"):
        Limits(total_pages=1, itl_s=-0.005)


def test_undisturbed_steps_are_measured_and_no_more_than_one_of_sixteen() -> None:
    engine = engine_of(StepCosts())
    engine.learns = False  # as if no measurement ever came
    engine.submit(1, 1000)
    engine.step()
    engine.submit(2000, 1)
    engine.turn()
    with_prompts = [bool(engine.turn().chunks) for _ in range(2 * MEASURE_EVERY)]
    assert with_prompts == [False, *[True] * (MEASURE_EVERY - 1)] * 2


def test_short_prompt_goes_before_long_ones_of_its_client_and_is_not_padded() -> None:
    engine = engine_of()
    for _ in range(4):
        engine.submit(4000, 1)
    engine.step()
    short = engine.submit(50, 1)
    assert engine.turn() == Turn(admit=(short,))
    # Its step computes nothing but the short prompt: a part of another one would make it wait.
    assert engine.turn() == Turn(chunks=((short, 50),))


@pytest.mark.parametrize("before", range(2 * OLDEST_EVERY))
def test_short_prompt_waits_at_most_five_times_its_own_time(before: int) -> None:
    engine = engine_of()
    for _ in range(4):
        engine.submit(4000, 1)
    for _ in range(3 + before):
        engine.step()
    submitted_s = engine.now_s
    engine.step()  # it comes when a step has just begun
    short = engine.submit(50, 1)
    while short in engine.requests:
        engine.turn()
    alone_s = rows_s(1) + prompt_s(50, 0)
    assert engine.ended[short].first_token_s - submitted_s <= 5 * alone_s


def test_prompts_go_by_priority_then_deadline_then_fairness_then_length_then_arrival() -> None:
    engine = engine_of()
    ids = [
        engine.submit(300, 1, client="a"),
        engine.submit(300, 1, client="a"),
        engine.submit(290, 1, client="a"),
        engine.submit(310, 1, client="b"),
        engine.submit(320, 1, deadline_s=9.0, client="a"),
        engine.submit(330, 1, deadline_s=8.0, client="a"),
        engine.submit(340, 1, priority=2.0, client="a"),
    ]
    ended: list[int] = []
    while engine.requests:
        engine.turn()
        ended += [key for key in engine.ended if key not in ended]
        engine.scheduler._chunks._since_oldest = 0  # the oldest has no turn here
    # By priority 6, by deadline 5 and 4, which was charged to client a: then b, and of a the shortest, then the oldest.
    assert ended == [ids[6], ids[5], ids[4], ids[3], ids[2], ids[0], ids[1]]


def test_missed_deadline_counts_no_more() -> None:
    engine = engine_of(max_running=1)
    engine.submit(10, 1)
    late = engine.submit(20, 1, deadline_s=1.0)
    soon = engine.submit(30, 1, deadline_s=2.0)
    engine.now_s = 1.5
    engine.run(20)
    # The late one has lost its claim, and is served as the others are, by length.
    assert engine.admissions == [soon, 0, late]


def test_oldest_has_every_eighth_admission() -> None:
    engine = engine_of(max_running=1)
    engine.submit(100, 1, priority=0.5)
    for _ in range(10):
        engine.submit(1, 1)
    engine.run(100)
    assert engine.admissions.index(0) == OLDEST_EVERY - 1


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = engine_of(total_pages=10)
    assert engine.offer(9 * 32 + 1)[1] == Refusal("can never fit", 11, 10, 0, 1024)
    assert engine.offer(9 * 32)[1] is None  # nine pages, and one for the answer
    assert engine_of(total_pages=10, may_spill=True).offer(1000)[1] is None


def test_full_queue_refuses() -> None:
    engine = engine_of(max_waiting=2)
    engine.submit(1)
    engine.submit(1)
    assert engine.offer(1)[1] == Refusal("queue full", 2, 2000, 2, 2)
    engine.turn()
    assert engine.offer(1)[1] is None


def test_request_waits_for_the_memory_of_its_whole_prompt() -> None:
    engine = engine_of(total_pages=10)
    engine.submit(3 * 32, 40)
    engine.submit(6 * 32, 4)
    # The first is promised 3 pages and one more; the second asks for 6 and one: 11 of 10.
    assert engine.turn() == Turn(admit=(0,))
    assert engine.turn() == Turn(chunks=((0, 96),))
    while 0 in engine.requests:
        assert not engine.turn().admit
    assert engine.turn() == Turn(admit=(1,))


def test_pages_that_others_hold_are_not_asked_for_again() -> None:
    scheduler = Scheduler(Limits(total_pages=10), learnt_costs(), shared_pages=lambda request_id: 5)
    for request_id in range(3):
        scheduler.submit(Ticket(request_id, 6 * 32, 40, 0.0))
    # Each needs 7 pages, of which it shares 5: five of them would fit.
    assert scheduler.plan(0.0, 6) == Turn(admit=(0, 1, 2))


def test_lowest_priority_then_latest_arrival_is_preempted() -> None:
    engine = engine_of(total_pages=12)
    first, low, last = engine.submit(32, 200), engine.submit(32, 200, priority=0.5), engine.submit(32, 200)
    preempted = []
    while engine.requests:
        preempted += engine.turn().preempt
    # Three need 8 pages each at last: the low one makes room first, then the younger of the others.
    assert preempted == [low, last]
    assert list(engine.ended) == [first, last, low]


def test_preempted_request_is_resumed_before_newcomers_and_makes_progress() -> None:
    engine = engine_of(total_pages=8)
    engine.submit(64, 100)
    engine.submit(64, 100)
    while not (preempt := engine.turn().preempt):
        pass
    assert preempt == (1,)
    assert engine.scheduler.num_waiting == 1
    engine.submit(1, 1)  # shorter, but nobody reads an answer of it yet
    engine.run(1000)
    assert engine.admissions[:3] == [0, 1, 1]


def test_request_that_is_alone_is_never_preempted() -> None:
    engine = engine_of(total_pages=4)
    engine.submit(64, 300)
    engine.run(400)  # `FakeEngine` checks that
    assert engine.ended[0].preempted_at == []


def test_paused_request_takes_no_part_and_leaves_first() -> None:
    engine = engine_of(total_pages=8, max_running=2)
    engine.submit(32, 100, priority=2.0)
    engine.submit(32, 100)
    engine.step()
    engine.pause(0, True)
    turn = engine.turn()
    assert turn.decode == (1,)
    assert turn.steps == 8  # it does not hold the others up
    # Somebody waits for its place: it is given up, whatever its priority, as its reader is behind anyway.
    engine.submit(10, 2)
    assert engine.turn() == Turn(preempt=(0,))
    assert engine.turn() == Turn(admit=(2,))
    while 2 in engine.requests:
        engine.turn()
    # There is a place now, but it waits for its reader.
    assert engine.turn().decode == (1,)
    engine.pause(0, False)
    assert engine.turn() == Turn(admit=(0,))


def test_higher_priority_displaces_a_lower_one_that_has_generated() -> None:
    engine = engine_of(max_running=2)
    engine.submit(300, 20)
    engine.submit(300, 20, priority=0.5)
    engine.step()
    engine.submit(10, 2)
    while not (preempt := engine.turn().preempt):
        pass
    assert preempt == (1,)
    assert engine.requests[1].generated >= 1
    assert engine.turn() == Turn(admit=(2,))


def test_request_that_is_read_takes_no_part_until_it_has_arrived() -> None:
    engine = engine_of()
    engine.submit(100, 1, known=64, is_read=True)
    assert engine.turn() == Turn(admit=(0,))
    assert engine.turn().is_empty
    engine.arrive(0)
    assert engine.turn() == Turn(chunks=((0, 36),))


def test_no_steps_ahead_beside_a_prompt_but_beside_one_that_cannot_be_admitted() -> None:
    engine = engine_of(max_running=2)
    engine.submit(1, 100)
    engine.submit(1000, 100)
    engine.step()
    while not engine.requests[1].decodes:
        assert engine.turn().steps == 1
    engine.submit(1, 1)  # there is no place for it
    assert engine.turn().steps == 8


def test_steps_ahead_are_bounded_by_time_and_by_the_first_to_end() -> None:
    engine = engine_of(ahead_s=0.009)
    engine.submit(1, 100)
    engine.step()
    assert engine.turn().steps == 4  # 4 steps of 2 ms, not 8
    engine.submit(1, 3)
    engine.step()
    assert engine.turn().steps == 2  # the second has two more tokens to generate


def test_more_requests_than_rows_take_turns() -> None:
    engine = engine_of(max_rows=2)
    for _ in range(4):
        engine.submit(1, 100)
    while not all(request.decodes for request in engine.requests.values()) or len(engine.requests) < 4:
        engine.turn()
    served = [engine.turn().decode for _ in range(4)]
    assert [set(one) | set(other) for one, other in zip(served[::2], served[1::2], strict=True)] == [{0, 1, 2, 3}] * 2


def test_cancel_forgets_a_request_in_any_state() -> None:
    engine = engine_of(max_running=3)
    for tokens in (1, 2000, 5, 1):
        engine.submit(tokens, 50)
    engine.submit(1, 1, known=0)
    engine.scheduler.cancel(99)  # nobody
    engine.turn()
    engine.step()
    for request_id in list(engine.requests):
        engine.cancel(request_id)
    assert engine.turn().is_empty
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0


def test_costs_know_nothing_before_the_first_measurement() -> None:
    costs = StepCosts()
    costs.observe(StepObservation(1, 0, 0.0, 0, 1.0))
    costs.observe(StepObservation(1, 0, 0.0, 1, 0.0))
    assert costs.decode_s(1) is None
    assert costs.prompt_s(32, 0) is None
    assert costs.step_s(1, 32, 0) is None
    assert costs.decode_s(0) == 0.0
    assert not costs.is_measured(1)


def test_costs_take_unmeasured_rows_from_below() -> None:
    costs = StepCosts()
    costs.observe(StepObservation(4, 0, 0.0, 2, 0.012))
    costs.observe(StepObservation(16, 0, 0.0, 1, 0.018))
    assert costs.decode_s(4) == pytest.approx(0.006)  # of two steps
    assert costs.decode_s(2) == pytest.approx(0.003)  # in proportion
    assert costs.decode_s(10) == pytest.approx(0.012)  # on the line between
    assert costs.decode_s(64) == pytest.approx(0.018)  # no less than fewer rows take
    assert costs.is_measured(5)
    assert not costs.is_measured(8)


def test_stalls_change_learnt_costs_by_little() -> None:
    costs = learnt_costs(8)
    for seconds in (rows_s(8), rows_s(8), 1.0, 1.0):
        costs.observe(StepObservation(8, 0, 0.0, 1, seconds))
    assert costs.decode_s(8) == pytest.approx(rows_s(8))
    before = costs.prompt_s(64, 1000)
    costs.observe(StepObservation(8, 64, 1000.0, 1, 5.0))
    assert before == pytest.approx(prompt_s(64, 1000), rel=0.01)
    assert costs.prompt_s(64, 1000) < 1.5 * before


def test_old_measurements_are_made_again() -> None:
    costs = learnt_costs(8)
    assert costs.is_measured(8)
    for _ in range(128):
        costs.observe(StepObservation(8, 32, 0.0, 1, rows_s(8) + prompt_s(32, 0)))
    assert not costs.is_measured(8)


def test_plan_takes_little_time_with_a_thousand_waiting_and_64_running() -> None:
    engine = engine_of(total_pages=100_000)
    for number in range(64):
        engine.submit(100 if number < 60 else 100_000, 10_000, client=f"c{number % 7}")
    while sum(request.decodes for request in engine.requests.values()) < 60:
        engine.turn()
    for number in range(1000):
        engine.submit(100 + number, 100, client=f"c{number % 31}")
    scheduler, taken_s = engine.scheduler, []
    for _ in range(200):
        begin_s = time.perf_counter()
        turn = scheduler.plan(engine.now_s, 90_000)
        for request_id in turn.decode:
            scheduler.computed(request_id, 1, 10, engine.now_s)
        for request_id, tokens in turn.chunks:
            scheduler.computed(request_id, tokens, 10, engine.now_s)
        scheduler.observe(StepObservation(len(turn.decode), 32, 0.0, 1, 0.05))
        taken_s.append(time.perf_counter() - begin_s)
    assert scheduler.num_waiting == 1000
    # Under 0.2 ms on an idle machine; a busy one must not fail here, but a walk over the queue would.
    assert statistics.median(taken_s) < 0.002
