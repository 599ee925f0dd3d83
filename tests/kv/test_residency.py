"""The rule: what counting learns, what the owner asks for, and which pages leave which tier."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.kv.placement import Placement
from headrace.kv.residency import LeastRecent, Prices, Residency, Standing
from headrace.kv.reuse import LAST_PAGE_CELL, NUM_AGES, ReuseModel, UseFacts
from headrace.kv.tree import PrefixTree
from tiny.placements import known_tokens, new_placement, record_use

SHORT, LONG = UseFacts(1, 2, 0, 10, 0), UseFacts(1, 200, 0, 1000, 0)


def test_model_without_data_ranks_the_recent_above_the_old() -> None:
    model = ReuseModel()
    _, cell = model.add(SHORT, 0.0)
    rates = [model.rate(cell, age_s) for age_s in (0.0, 5.0, 10.0, 60.0, 600.0, 6000.0, 1e9)]
    assert all(newer > older for newer, older in pairwise(rates)), rates


def test_model_learns_which_facts_come_back() -> None:
    model = ReuseModel()
    for index in range(400):
        now_s = index * 10.0
        serial, short = model.add(SHORT, now_s)
        _, long = model.add(LONG, now_s)
        model.continued(serial, now_s + 5.0, last_page=False)
        model.check()
    assert model.rate(short, 1.0) > 10 * model.rate(long, 1.0)


def test_model_learns_how_long_people_think() -> None:
    """All come back, but after a minute: what has just been used is worth less than what will be needed next."""
    model = ReuseModel()
    events = sorted(
        [(2.0 * index, 0, index) for index in range(600)] + [(2.0 * index + 60.0, 1, index) for index in range(600)]
    )
    for now_s, is_reuse, index in events:
        if is_reuse:
            model.continued(index, now_s, last_page=False)
        else:
            _, cell = model.add(SHORT, now_s)
    assert model.rate(cell, 45.0) > 2 * model.rate(cell, 1.0)
    assert model.rate(cell, 300.0) < model.rate(cell, 1.0)


def test_chance_of_reuse_is_learnt_and_falls_with_age() -> None:
    model = ReuseModel()
    for index in range(400):
        serial, short = model.add(SHORT, index * 10.0)
        _, long = model.add(LONG, index * 10.0)
        model.continued(serial, index * 10.0 + 5.0, last_page=False)
    assert model.chance(short, 0.0) > 0.95
    assert model.chance(long, 0.0) < 0.4
    chances = [model.chance(long, age_s) for age_s in (0.0, 10.0, 1e3, 1e4, 1e9)]
    assert all(0 <= older <= newer <= 1 for newer, older in pairwise(chances)), chances


@pytest.mark.parametrize(
    ("standing", "times_s"),
    [
        (Standing(), []),
        (Standing(pinned=True, expires_s=50.0), []),
        (Standing(expires_s=50.0), [50.0]),
        (Standing(soon_s=8.0), [4.0, 6.0, 7.0, math.nextafter(16.0, 17.0)]),
        (Standing(soon_s=8.0, expires_s=5.0), [4.0, 5.0]),
    ],
)
def test_standing_says_when_it_changes(standing: Standing, times_s: list[float]) -> None:
    found, now_s = [], 0.0
    while (now_s := standing.changes_s(now_s)) < math.inf:
        found.append(now_s)
    assert found == times_s


def test_model_counts_a_continuation_once() -> None:
    model = ReuseModel()
    serial, _ = model.add(SHORT, 0.0)
    for _ in range(3):
        model.continued(serial, 1.0, last_page=False)
    assert model._all_reused.sum() == 1.0
    assert model._reached[LAST_PAGE_CELL].sum() == 0.0
    model.check()


def test_model_forgets_uses_that_are_too_old_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kv.reuse.MAX_TRACKED_USES", 500)
    model = ReuseModel()
    for index in range(3000):
        model.add(SHORT, float(index))
    model.continued(0, 3000.0, last_page=False)
    assert model._all_reused.sum() == 0.0
    assert len(model._use_time_s) <= 2048
    model.check()


def test_rates_do_not_depend_on_how_many_are_asked_for_at_once() -> None:
    model = ReuseModel()
    cells = [model.add(UseFacts(turn, 2**turn, 0, 10, 0), float(turn))[1] for turn in range(1, 6)]
    ages_s = np.linspace(0.0, 500.0, 5)
    together = model.rates(np.array(cells), ages_s)
    assert together.tolist() == [model.rate(cell, age_s) for cell, age_s in zip(cells, ages_s.tolist(), strict=True)]


def test_ages_grow_by_a_constant_factor() -> None:
    ends_s = ReuseModel()._ends_s
    assert len(ends_s) == NUM_AGES
    assert np.allclose(ends_s[6:] / ends_s[5:-1], 1.3)


def test_worth_is_per_byte_and_by_price_of_its_depth() -> None:
    prices = Prices(fetch_s=(0.0, 0.5), compute_s=1.0, compute_s_per_past_page=0.1, page_bytes=(4, 2))
    assert prices.saved_s(0, 0) == 0.5
    assert prices.saved_s(1, 0) == 0.5
    assert prices.saved_s(1, 10) == pytest.approx(1.5)
    placement = Placement(PrefixTree(1), (10, 10), Residency(prices))
    record_use(placement, (1, 2, 3), 0.0)
    nodes = placement.tree.match((1, 2, 3)).nodes
    near, far = (placement.rule.worths(nodes[:2], tier, 1.0) for tier in (0, 1))
    assert near[0] == near[1]
    assert far[1] / far[0] == pytest.approx(0.6 / 0.5)
    assert far[0] == 2 * near[0]


def test_fetching_dearer_than_computing_saves_nothing_below() -> None:
    assert Prices(fetch_s=(0.0, 5.0), compute_s=1.0, page_bytes=(1, 1)).saved_s(1, 0) == 0.0


@pytest.mark.parametrize(
    ("standing", "now_s", "above_plain"),
    [
        (Standing(pinned=True), 9.0, True),
        (Standing(priority=2.0), 9.0, True),
        (Standing(priority=0.5), 9.0, False),
        (Standing(expires_s=8.0), 9.0, False),
        (Standing(hinted_s=0.0, soon_s=10.0), 9.0, True),
    ],
)
def test_owner_changes_the_worth(standing: Standing, now_s: float, above_plain: bool) -> None:
    placement = new_placement(10)
    record_use(placement, (1, 2), 0.0)
    record_use(placement, (3, 4), 0.0, standing=standing)
    nodes = [placement.tree.match(tokens).nodes[0] for tokens in ((1, 2), (3, 4))]
    plain, asked = placement.rule.worths(nodes, 0, now_s)
    assert (asked > plain) == above_plain
    assert not (standing.pinned and asked != math.inf)


def test_hint_that_passed_counts_no_more() -> None:
    placement = new_placement(10)
    record_use(placement, (1, 2), 0.0, standing=Standing(hinted_s=0.0, soon_s=10.0))
    record_use(placement, (3, 4), 0.0)
    nodes = [placement.tree.match(tokens).nodes[0] for tokens in ((1, 2), (3, 4))]
    hinted, plain = placement.rule.worths(nodes, 0, 21.0)
    assert hinted == plain


def test_least_recent_evicts_in_order_of_use_from_the_tip() -> None:
    placement = new_placement(4, rule=LeastRecent())
    for now_s, tokens in enumerate([(1, 2), (3, 4), (1, 2), (5,)]):
        record_use(placement, tokens, float(now_s))
    assert [known_tokens(placement, tokens) for tokens in ((1, 2), (3, 4), (5,))] == [2, 1, 1]
    placement.check()


def test_cyclic_set_just_larger_than_the_cache_keeps_most_of_it() -> None:
    """Twelve conversations in turn and room for ten: LRU finds nothing, ever."""
    hits = {}
    for name, rule_ in (("lru", LeastRecent()), ("headrace", Residency())):
        placement = new_placement(100, rule=rule_)
        hits[name] = 0
        for turn in range(600):
            tokens = tuple(range(100 * (turn % 12), 100 * (turn % 12) + 10))
            hits[name] += known_tokens(placement, tokens) if turn >= 240 else 0
            record_use(placement, tokens, 5.0 * turn)
    assert hits["lru"] == 0
    assert hits["headrace"] > 0.5 * 3600 * 10 / 12


def test_one_oversized_request_neither_breaks_the_bound_nor_takes_everything() -> None:
    placement = new_placement(100)
    for turn in range(200):
        tokens = tuple(range(100 * (turn % 4), 100 * (turn % 4) + 10 + turn // 4 % 5))
        record_use(placement, tokens, 5.0 * turn)
    record_use(placement, tuple(range(10_000, 10_500)), 1001.0)
    assert placement.num_pages == [100]
    assert sum(known_tokens(placement, tuple(range(100 * each, 100 * each + 10))) >= 9 for each in range(4)) >= 3
    placement.check()


def test_side_requests_do_not_displace_the_main_conversation() -> None:
    """Each turn is followed by a title request of its own that nobody ever reads again."""
    placement = new_placement(60)
    missing = 0
    for turn in range(300):
        main = tuple(range(1000 * (turn // 20), 1000 * (turn // 20) + 20 + turn % 20))
        if turn >= 150 and turn % 20:
            missing += 19 + turn % 20 - known_tokens(placement, main)
        record_use(placement, main, 60.0 * turn)
        record_use(placement, tuple(range(10**6 + 40 * turn, 10**6 + 40 * turn + 40)), 60.0 * turn + 1)
    assert missing == 0


def test_page_in_use_is_never_a_victim() -> None:
    placement = new_placement(3)
    record_use(placement, (1, 2, 3), 0.0)
    held = placement.tree.match((1, 2, 3)).nodes[1]
    placement.tree.pin(held)
    record_use(placement, (4, 5, 6), 1.0)
    record_use(placement, (7, 8, 9), 2.0)
    assert known_tokens(placement, (1, 2, 3)) >= 2
    placement.tree.unpin(held)
    placement.make_room(3.0)
    assert placement.num_pages == [3]
    placement.check()


def test_pages_demote_from_the_tip_and_promote_on_use() -> None:
    placement = new_placement(2, 4, rule=LeastRecent())
    assert record_use(placement, (1, 2), 0.0) == []
    moves = record_use(placement, (3, 4), 1.0)
    assert moves == [([2], 0, 1), ([1], 0, 1)]
    moves = record_use(placement, (1, 2), 2.0)
    assert moves == [([1, 2], 1, 0), ([4], 0, 1), ([3], 0, 1)]
    placement.check()


def test_full_cold_tier_takes_only_what_is_worth_more_than_what_it_holds() -> None:
    placement = new_placement(2, 2)
    record_use(placement, (1, 2), 0.0, standing=Standing(priority=100.0))
    record_use(placement, (3, 4), 1.0)
    assert known_tokens(placement, (1, 2)) == 2
    for turn in range(20):
        record_use(placement, (10 + 2 * turn, 11 + 2 * turn), 2.0 + turn, standing=Standing(priority=0.01))
    assert known_tokens(placement, (1, 2)) == 2
    placement.check()


def test_placement_takes_partly_filled_pages_and_their_repetition() -> None:
    placement = Placement(PrefixTree(4), [10], Residency())
    tree = placement.tree
    for now_s, (tokens, new_pages) in enumerate([((1, 2, 3, 4, 5), 2), ((1, 2, 3, 4, 5), 0), ((1, 2, 3, 4, 5, 6), 1)]):
        match = tree.match(tokens)
        placement.record(tokens, match, [None] * new_pages, num_answer_tokens=1, now_s=float(now_s))
    assert placement.num_pages == [3]
    tree.check()
    placement.check()


def test_owner_may_change_a_standing_later() -> None:
    placement = new_placement(3, rule=Residency())
    record_use(placement, (1, 2), 0.0)
    placement.set_standing(placement.tree.match((1, 2)).nodes[-1], Standing(pinned=True), 1.0)
    for turn in range(5):
        record_use(placement, (10 * turn, 10 * turn + 3), 2.0 + turn)
    assert known_tokens(placement, (1, 2)) == 2
    placement.set_standing(placement.tree.match((1, 2)).nodes[-1], Standing(expires_s=0.0), 8.0)
    record_use(placement, (8, 9), 9.0)
    assert known_tokens(placement, (1, 2)) == 0


class PlacementMachine(RuleBasedStateMachine):
    """Small tiers and few tokens, so that everything collides; the bounds hold after every request."""

    def __init__(self) -> None:
        super().__init__()
        self.placement = new_placement(4, 3)
        self.now_s = 0.0

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple),
        wait_s=st.sampled_from([0.0, 0.5, 30.0, 1e5]),
        standing=st.sampled_from([Standing(), Standing(pinned=True), Standing(priority=3.0), Standing(expires_s=10.0)]),
    )
    def use(self, tokens: tuple[int, ...], wait_s: float, standing: Standing) -> None:
        self.now_s += wait_s
        before = self.placement.tree.num_nodes + len(tokens) - known_tokens(self.placement, tokens)
        moves = record_use(self.placement, tokens, self.now_s, standing=standing)
        assert self.placement.tree.num_nodes == before - sum(len(move.pages) for move in moves if move.to_tier is None)

    @invariant()
    def bounds_hold_and_books_agree(self) -> None:
        self.placement.tree.check()
        self.placement.check()
        held = zip(self.placement.num_pages, self.placement.capacities, strict=True)
        assert all(count <= capacity for count, capacity in held)


TestPlacementMachine = PlacementMachine.TestCase
TestPlacementMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
