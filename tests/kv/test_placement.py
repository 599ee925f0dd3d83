"""What an engine asks of a placement page by page, and after a restart; and a state machine over all of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.kv.placement import Placement
from headrace.kv.residency import LeastRecent, Prices, Residency, Standing
from headrace.kv.reuse import LAST_PAGE_CELL
from headrace.kv.tree import Node, PrefixTree
from tiny.placements import TWO_TIERS, known_tokens, new_placement, record_use


def _drain(placement: Placement, tier: int, now_s: float) -> list[object]:
    """The pages of a tier in the order in which they leave it for good."""
    pages = []
    while (cheapest := placement.cheapest(tier, now_s)) is not None:
        pages += placement.evict(cheapest[0], now_s, demote=False).pages
        placement.check()
    return pages


def _node(placement: Placement, *tokens: int) -> Node:
    """The page of the last token."""
    match = placement.tree.match(tokens)
    assert match.num_tokens == len(tokens)
    return match.nodes[-1]


def _kept(placement: Placement, tokens: tuple[int, ...], time_s: float, **facts: int) -> Node:
    """A stretch found after a restart, behind what is known of its path; its pages are its tokens."""
    nodes = placement.tree.match(tokens).nodes
    parent = nodes[-1] if nodes else placement.tree.root
    return placement.restore(parent, tokens[len(nodes) :], tokens[len(nodes) :], facts, time_s, 1000.0)


def test_cheapest_leaves_the_page_where_it_is_and_evict_takes_it() -> None:
    placement = new_placement(10, 10, rule=LeastRecent())
    record_use(placement, (1, 2), 0.0)
    record_use(placement, (3, 4), 1.0)
    first = placement.cheapest(0, 2.0)
    assert first == placement.cheapest(0, 2.0) == (_node(placement, 1, 2), 1.0)
    assert placement.evict(first[0], 2.0, demote=True) == ([2], 0, 1)
    assert placement.num_pages == [3, 1]
    assert placement.cheapest(0, 2.0) == (_node(placement, 1), 1.0)
    assert placement.cheapest(1, 2.0) == (_node(placement, 1, 2), 1.0)
    placement.check()


def test_evicting_one_by_one_takes_the_same_pages_in_the_same_order_as_making_room() -> None:
    orders = []
    for by_hand in (False, True):
        placement = new_placement(12)
        for turn in range(6):
            tokens = tuple(range(100 * (turn % 4), 100 * (turn % 4) + 4 + turn))
            match = placement.tree.match(tokens)
            placement.record(tokens, match, tokens[len(match.nodes) :], num_answer_tokens=5, now_s=20.0 * turn)
        pages = [] if by_hand else [page for move in placement.make_room(120.0) for page in move.pages]
        while placement.num_pages[0] > 12:
            cheapest = placement.cheapest(0, 120.0)
            assert cheapest is not None
            pages += placement.evict(cheapest[0], 120.0, demote=False).pages
        orders.append(pages)
        placement.check()
    assert orders[0] == orders[1]
    assert len(orders[0]) == 18


def test_evict_refuses_pages_that_others_need() -> None:
    placement = new_placement(10, 10)
    record_use(placement, (1, 2, 3), 0.0)
    with pytest.raises(AssertionError, match="tips"):
        placement.evict(_node(placement, 1), 1.0, demote=True)
    leaf = _node(placement, 1, 2, 3)
    placement.tree.pin(leaf)
    assert placement.cheapest(0, 1.0) is None
    with pytest.raises(AssertionError, match="pinned"):
        placement.evict(leaf, 1.0, demote=True)
    placement.tree.unpin(leaf)
    placement.evict(leaf, 1.0, demote=True)
    with pytest.raises(AssertionError, match="lost"):
        placement.evict(_node(placement, 1, 2), 1.0, demote=False)
    with pytest.raises(AssertionError, match="no next tier"):
        placement.evict(leaf, 1.0, demote=True)
    placement.check()


def test_pages_that_are_not_near_stay_where_they_are_and_what_is_new_goes_behind_them() -> None:
    placement = new_placement(10, 10)
    record_use(placement, (1, 2, 3, 4), 0.0)
    for page in (4, 3, 2):
        assert placement.evict(_node(placement, *range(1, page + 1)), 1.0, demote=True).pages == [page]
    tokens = (1, 2, 3, 4, 5, 6)
    match = placement.tree.match(tokens)
    recorded = placement.record(tokens, match, (5, 6), num_answer_tokens=1, now_s=2.0, num_near=2)
    assert recorded.moves == [([2], 1, 0)]
    assert recorded.last is _node(placement, *tokens)
    assert [node.tier for node in recorded.last.path()] == [0, 0, 1, 1, 1, 1]
    assert placement.num_pages == [2, 4]
    placement.check()
    assert _drain(placement, 1, 3.0) == [6, 5, 4, 3]


def test_all_matched_pages_near_means_new_pages_near() -> None:
    placement = new_placement(10, 10)
    recorded = placement.record((1, 2), placement.tree.match((1, 2)), (1, 2), num_answer_tokens=1, now_s=0.0, num_near=0)
    assert [node.tier for node in recorded.last.path()] == [0, 0]
    nothing = placement.record((), placement.tree.match(()), (), num_answer_tokens=1, now_s=0.0)
    assert nothing == ([], placement.tree.root)


def test_prefetched_page_is_near_and_ranked_there() -> None:
    placement = new_placement(10, 10, rule=LeastRecent())
    record_use(placement, (1, 2, 3), 0.0)
    record_use(placement, (7,), 1.0)
    for depth in (3, 2):
        placement.evict(_node(placement, *range(1, depth + 1)), 2.0, demote=True)
    assert placement.cheapest(0, 2.0) == (_node(placement, 1), 1.0)
    assert placement.promote(_node(placement, 1, 2)) == ([2], 1, 0)
    placement.check()
    with pytest.raises(AssertionError, match="in tier 0"):
        placement.promote(_node(placement, 1, 2))
    assert placement.cheapest(0, 2.0) == (_node(placement, 1, 2), 1.0)
    assert placement.cheapest(1, 2.0) == (_node(placement, 1, 2, 3), 1.0)


def test_lost_page_takes_all_behind_it_along() -> None:
    placement = new_placement(20, 20)
    record_use(placement, (1, 2, 3, 4), 0.0)
    record_use(placement, (1, 2, 5, 6), 1.0)
    record_use(placement, (1, 8), 2.0)
    placement.evict(_node(placement, 1, 2, 5, 6), 2.0, demote=True)
    held = _node(placement, 1, 2, 5, 6)
    placement.tree.pin(held)
    with pytest.raises(AssertionError, match="pinned"):
        placement.forget(_node(placement, 1, 2), 3.0)
    placement.tree.unpin(held)
    pages = placement.forget(_node(placement, 1, 2), 3.0)
    assert sorted(pages) == [2, 3, 4, 5, 6]
    assert pages.index(6) < pages.index(5) < pages.index(2) > pages.index(3) > pages.index(4)
    assert placement.num_pages == [2, 0]
    placement.check()
    placement.tree.check()
    assert _drain(placement, 0, 3.0) == [8, 1]


def test_pages_survive_that_they_are_replaced_or_get_more_tokens() -> None:
    placement = Placement(PrefixTree(4), [10, 10], Residency(TWO_TIERS))
    last = placement.record(
        (1, 2, 3, 4, 5), placement.tree.match((1, 2, 3, 4, 5)), ["a", "b"], num_answer_tokens=1, now_s=0.0
    ).last
    placement.tree.extend(last, (6, 7))
    last.page = "c"
    placement.check()
    placement.tree.check()
    assert placement.cheapest(0, 1.0) == (last, pytest.approx(placement.rule.worths([last], 0, 1.0)[0]))
    assert placement.evict(last, 1.0, demote=True).pages == ["c"]
    assert placement.evict(last, 1.0, demote=False).pages == ["c"]
    placement.check()


def test_restored_pages_teach_the_rule_what_a_request_would_have() -> None:
    """The same uses, seen and restored from what was kept of them, leave the same model behind."""
    seen, again = new_placement(1000, 1000), new_placement(1000, 1000)
    kept = []
    for turn in range(60):
        tokens = tuple(range(1000 * (turn % 20), 1000 * (turn % 20) + 5 + turn // 20 * 3 + turn % 3))
        known = known_tokens(seen, tokens)
        match = seen.tree.match(tokens)
        last = seen.record(tokens, match, tokens[known:], num_answer_tokens=turn, now_s=7.0 * turn).last
        kept.append((tokens, 7.0 * turn, Placement.use_facts(last.use)))
    for tokens, time_s, facts in kept:
        last = _kept(again, tokens, time_s, **facts)
        assert Placement.use_facts(last.use) == facts
        assert {node.tier for node in last.path()} == {1}
    again.check()
    again.tree.check()
    one, other = (placement.rule.reuse for placement in (seen, again))  # type: ignore[attr-defined]
    assert one._all_reused.sum() == 40
    for name in ("_reached", "_reused", "_facts", "_use_time_s", "_open", "_counted"):
        assert (getattr(one, name) == getattr(other, name)).all(), name


def test_restore_takes_facts_that_are_missing_from_the_pages() -> None:
    placement = new_placement(100, 100)
    first = _kept(placement, (1, 2, 3, 4, 5), 10.0)
    last = _kept(placement, (1, 2, 3, 4, 5, 6, 7), 20.0)
    assert last.use is first.use
    assert Placement.use_facts(last.use) == {
        "turn": 2, "repeats": 0, "known_pages": 5, "num_pages": 7, "num_answer_tokens": 0
    }  # fmt: skip


def test_use_that_was_kept_in_two_stretches_is_one_again() -> None:
    placement = new_placement(100, 100)
    first = _kept(placement, (1, 2, 3), 10.0, turn=1, num_pages=5)
    last = _kept(placement, (1, 2, 3, 4, 5), 10.0, turn=1, num_pages=5)
    assert last.use is first.use
    assert placement.rule.reuse._num_uses == 1  # type: ignore[attr-defined]
    assert last.use.at_last_page(last)
    branch = _kept(placement, (1, 2, 3, 9), 10.0)
    assert branch.use is not last.use
    placement.check()


def test_restored_use_does_not_take_pages_that_were_used_later() -> None:
    placement = new_placement(100, 100)
    _kept(placement, (1, 2, 3), 10.0)
    record_use(placement, (1, 2, 8), 500.0)
    late = _kept(placement, (1, 2, 3, 4), 20.0)
    assert [node.use.time_s for node in late.path()] == [500.0, 500.0, 20.0, 20.0]
    assert [node.tier for node in late.path()] == [0, 0, 1, 1]
    placement.check()
    placement.rule.reuse.check()  # type: ignore[attr-defined]


def test_prices_may_be_replaced_at_any_time() -> None:
    placement = new_placement(10)
    record_use(placement, (1, 2), 0.0)
    rule_ = placement.rule
    assert isinstance(rule_, Residency)
    node = _node(placement, 1, 2)
    before = rule_.worths([node], 0, 1.0)[0]
    rule_.prices = Prices(compute_s=3.0)
    assert rule_.worths([node], 0, 1.0)[0] == pytest.approx(3 * before)


def test_chance_of_a_page_heeds_its_owner() -> None:
    placement = new_placement(100)
    rule_ = placement.rule
    assert isinstance(rule_, Residency)
    record_use(placement, (1, 2, 3), 0.0)
    page = _node(placement, 1)
    assert rule_.chance(page, 1.0) == rule_.reuse.chance(page.use.cell, 1.0)
    assert rule_.chance(_node(placement, 1, 2, 3), 1.0) == rule_.reuse.chance(LAST_PAGE_CELL, 1.0)
    for standing, chance in (
        (Standing(pinned=True), 1.0),
        (Standing(soon_s=5.0), 1.0),
        (Standing(expires_s=1.0), 0.0),
        (Standing(soon_s=5.0, expires_s=1.0), 0.0),
    ):
        placement.set_standing(page, standing, 1.0)
        assert rule_.chance(page, 1.0) == chance


def test_hint_outranks_others_and_what_expired_leaves_first() -> None:
    """Though nothing has left since the ranking: times alone change it."""
    placement = new_placement(1000, rule=Residency())
    record_use(placement, (1, 2), 0.0, standing=Standing(expires_s=50.0, priority=1000.0))
    record_use(placement, (3, 4), 0.0, standing=Standing(hinted_s=0.0, soon_s=60.0))
    record_use(placement, (5, 6), 40.0)
    asked, plain = (_node(placement, *tokens) for tokens in ((3, 4), (5, 6)))
    assert placement.rule.worths([asked], 0, 41.0)[0] > placement.rule.worths([plain], 0, 41.0)[0]
    assert placement.cheapest(0, 41.0) == (plain, pytest.approx(placement.rule.worths([plain], 0, 41.0)[0]))
    assert placement.cheapest(0, 50.0) == (_node(placement, 1, 2), 0.0)
    assert _drain(placement, 0, 50.0) == [2, 1, 6, 5, 4, 3]


def test_pinned_past_leaves_last_but_leaves() -> None:
    placement = new_placement(1000, rule=Residency())
    record_use(placement, (1, 2), 0.0)
    record_use(placement, (3, 4), 1.0)
    placement.set_standing(_node(placement, 1, 2), Standing(pinned=True), 2.0)
    assert _drain(placement, 0, 3.0) == [4, 3, 2, 1]


def test_placement_does_not_grow_with_uses_where_nothing_leaves() -> None:
    placement = new_placement(10)
    for turn in range(5000):
        record_use(placement, (1, 2, 3), float(turn))
    assert len(placement._heaps[0]) + len(placement._resident[0]) < 5000
    assert placement.num_pages == [3]
    placement.check()


class EngineMachine(RuleBasedStateMachine):
    """What an engine does with pages of three tokens in two tiers: it evicts, prefetches, loses and restores by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.placement = Placement(PrefixTree(3, remembered=8), (6, 6), Residency(TWO_TIERS))
        self.tree = self.placement.tree
        self.pinned: list[Node] = []
        self.now_s = 100.0

    def _nodes(self) -> list[Node]:
        nodes = list(self.tree.root.children.values())
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes

    def _some(self, data: st.DataObject, nodes: list[Node]) -> Node | None:
        return nodes[data.draw(st.integers(0, len(nodes) - 1))] if nodes else None

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
        near=st.sampled_from([None, 0, 1, 2]),
        wait_s=st.sampled_from([0.0, 0.5, 30.0]),
        standing=st.sampled_from([Standing(), Standing(priority=3.0), Standing(expires_s=130.0), Standing(soon_s=150.0)]),
    )
    def record(self, tokens: tuple[int, ...], near: int | None, wait_s: float, standing: Standing) -> None:
        self.now_s += wait_s
        match = self.tree.match(tokens)
        tiers = [node.tier for node in match.nodes]
        new = [None] * (len(list(self.tree.split(tokens))) - len(tiers))
        moves, last = self.placement.record(
            tokens, match, new, num_answer_tokens=3, now_s=self.now_s, standing=standing, num_near=near
        )
        assert self.tree.match(tokens).nodes == last.path()
        assert sum(len(move.pages) for move in moves) == sum(tiers[:near])
        near = len(tiers) if near is None else near
        behind = 0 if near >= len(tiers) else 1
        assert [node.tier for node in last.path()] == [0 if i < near else t for i, t in enumerate(tiers)] + [behind] * len(new)

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=2).map(tuple))
    def extend(self, data: st.DataObject, more: tuple[int, ...]) -> None:
        node = self._some(data, [each for each in self._nodes() if len(each.tokens) + len(more) <= 3])
        if node is not None and node.parent is not None and node.tokens + more not in node.parent.children:
            self.tree.extend(node, more)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        node = self._some(data, self._nodes())
        if node is not None:
            self.tree.pin(node)
            self.pinned.append(node)

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            self.tree.unpin(self.pinned.pop())

    @rule(tier=st.integers(0, 1), demote=st.booleans(), count=st.integers(1, 5))
    def evict(self, tier: int, demote: bool, count: int) -> None:
        for _ in range(count):
            cheapest = self.placement.cheapest(tier, self.now_s)
            if cheapest is None:
                assert all(node.pins for node in self._nodes() if node.tier == tier and not node.num_tier_children)
                return
            tip = cheapest[0]
            assert (tip.tier, tip.pins, tip.num_tier_children) == (tier, 0, 0)
            to_tier = 1 if tier == 0 and (demote or tip.children) else None
            assert self.placement.evict(tip, self.now_s, demote=to_tier is not None) == ([tip.page], tier, to_tier)
            self.placement.check()

    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        nodes = [each for each in self._nodes() if each.tier and (each.parent is self.tree.root or not each.parent.tier)]
        node = self._some(data, nodes)
        if node is not None:
            assert self.placement.promote(node) == ([node.page], 1, 0)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        node = self._some(data, self._nodes())
        if node is None:
            return
        before, inside = self.tree.num_nodes, [each for each in self._nodes() if node in each.path()]
        if any(each.pins for each in inside):
            with pytest.raises(AssertionError):
                self.placement.forget(node, self.now_s)
        else:
            assert len(self.placement.forget(node, self.now_s)) == len(inside) == before - self.tree.num_nodes

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
        age_s=st.sampled_from([0.0, 1.0, 90.0]),
        facts=st.sampled_from(
            [{}, {"turn": 3, "known_pages": 1, "num_pages": 9}, {"turn": -1, "known_pages": 99, "repeats": -2}]
        ),
    )
    def restore(self, tokens: tuple[int, ...], age_s: float, facts: dict[str, int]) -> None:
        nodes = self.tree.match(tokens).nodes
        parent = nodes[-1] if nodes else self.tree.root
        rest = tokens[len(nodes) * 3 :]
        if rest and (not nodes or len(parent.tokens) == 3):
            pages = [None] * len(list(self.tree.split(rest)))
            last = self.placement.restore(parent, rest, pages, facts, self.now_s - age_s, self.now_s)
            assert last.use.time_s == self.now_s - age_s
            assert all(node.tier == 1 for node in last.path()[len(nodes) :])

    @rule(data=st.data(), standing=st.sampled_from([Standing(), Standing(pinned=True), Standing(expires_s=0.0)]))
    def set_standing(self, data: st.DataObject, standing: Standing) -> None:
        node = self._some(data, self._nodes())
        if node is not None:
            self.placement.set_standing(node, standing, self.now_s)
            free = [n for n in self._nodes() if n.tier == node.tier and not n.pins and not n.num_tier_children]
            cheapest = self.placement.cheapest(node.tier, self.now_s)
            assert (cheapest is None) == (not free)
            if cheapest is not None:  # ranked anew: really the cheapest
                assert cheapest[1] == self.placement.rule.worths(free, node.tier, self.now_s).min()

    @rule(wait_s=st.sampled_from([1.0, 40.0, 1e5]))
    def make_room(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.placement.make_room(self.now_s)
        for tier, (count, most) in enumerate(zip(self.placement.num_pages, self.placement.capacities, strict=True)):
            held = [node for node in self._nodes() if node.tier == tier]
            assert count <= most or all(node.pins or node.num_tier_children for node in held)

    @invariant()
    def books_agree(self) -> None:
        self.tree.check()
        self.placement.check()
        self.placement.rule.reuse.check()  # type: ignore[attr-defined]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
