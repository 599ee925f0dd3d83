"""The prefix tree: a state machine against a plain set of known pasts, and each promise on its own."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kv.tree import Evicted, Node, PrefixTree, common_tokens

PAGE = 3
TOKEN_LISTS = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)


def _add(tree: PrefixTree, tokens: tuple[int, ...], *, tier: int = 0) -> Node:
    """What an engine does after a request: pages behind the whole pages that are known."""
    match = tree.match(tokens)
    node = match.nodes[-1] if match.nodes else tree.root
    for key in tree.split(tokens[len(match.nodes) * tree.page_tokens :]):
        node = node.children.get(key) or tree.insert(node, key, key, tier=max(tier, node.tier))
    return node


class TreeMachine(RuleBasedStateMachine):
    """`known` holds the tokens from the start to the end of each node; a match is checked against all of them.

    `given` holds what the caller gave to each, to see that it stays with its page, whatever happens to others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(PAGE, remembered=4)
        self.known: dict[tuple[int, ...], Node] = {}
        self.given: dict[Node, tuple[object, object, int]] = {}  # page, use, tier
        self.pinned: list[Node] = []
        self.removed: dict[tuple[int, ...], int] = {}
        self.now = 0

    @rule(tokens=TOKEN_LISTS)
    def add(self, tokens: tuple[int, ...]) -> None:
        node = _add(self.tree, tokens)
        for each in node.path():
            self.known[_tokens_of(each)] = each
            self.given.setdefault(each, (each.tokens, None, each.tier))
            self.removed.pop(_tokens_of(each), None)

    @rule(tokens=TOKEN_LISTS, use=st.integers(0, 1), tier=st.integers(0, 2))
    def add_path(self, tokens: tuple[int, ...], use: int, tier: int) -> None:
        match = self.tree.match(tokens)
        assert match.num_pages == len(match.nodes)
        rest = tokens[match.num_pages * PAGE :]
        pages = list(self.tree.split(rest))
        if not pages or match.last.tier > tier:
            return
        node = self.tree.insert_path(match.last, rest, pages, use, tier=tier)
        assert node.path()[: match.num_pages] == match.nodes
        for each in node.path()[match.num_pages :]:
            self.known[_tokens_of(each)] = each
            self.given[each] = (each.tokens, use, tier)
            self.removed.pop(_tokens_of(each), None)

    @rule(tokens=TOKEN_LISTS, use=st.integers(0, 1))
    def use(self, tokens: tuple[int, ...], use: int) -> None:
        """All pages of a path get one use, as at the end of a request."""
        match = self.tree.match(tokens)
        path = self.tree.stretches(match.last)
        for stretch in path:
            stretch.use = use
        self.tree.join(path)
        for node in match.nodes:
            self.given[node] = (node.page, use, node.tier)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), use=st.integers(0, 1), page=st.integers())
    def give(self, data: st.DataObject, use: int, page: int) -> None:
        node = self.known[data.draw(st.sampled_from(sorted(self.known)))]
        node.use, node.page = use, page
        self.given[node] = (page, use, node.tier)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove_subtree(self, data: st.DataObject) -> None:
        tokens = data.draw(st.sampled_from(sorted(self.known)))
        doomed = [each for each in self.known if self.known[tokens] in self.known[each].path()]
        if any(self.known[each].pins for each in doomed):
            with pytest.raises(AssertionError):
                self.tree.remove_subtree(self.known[tokens], self.now)
            return
        self.now += 1
        pages = self.tree.remove_subtree(self.known[tokens], self.now)
        assert sorted(map(repr, pages)) == sorted(repr(self.given[self.known[each]][0]) for each in doomed)
        for each in doomed:
            self._gone(each)

    def _gone(self, tokens: tuple[int, ...]) -> None:
        node = self.known.pop(tokens)
        assert node.parent is None
        assert (node.page, node.use, node.tier) == self.given.pop(node)
        assert node.tokens == tokens[(len(tokens) - 1) // PAGE * PAGE :]
        self.removed[tokens] = self.now

    @rule(tokens=TOKEN_LISTS)
    def match(self, tokens: tuple[int, ...]) -> None:
        match = self.tree.match(tokens)
        assert match.num_tokens == max((common_tokens(each, tokens) for each in self.known), default=0)
        assert [_tokens_of(node) for node in match.nodes] == [
            tokens[:end]
            for end in range(1, match.num_tokens + 1)
            if tokens[:end] in self.known and (end % PAGE == 0 or end == len(tokens))
        ]
        assert match.nodes == [self.known[_tokens_of(node)] for node in match.nodes]  # the same objects as ever
        assert match.num_tokens == sum(len(node.tokens) for node in match.nodes) + match.partial_tokens
        if match.partial is not None:
            assert _tokens_of(match.partial)[: match.num_tokens] == tokens[: match.num_tokens]
        miss = self.tree.explain(tokens, match)
        assert (miss is None) == (match.num_tokens == len(tokens))
        if miss is not None and miss.reason == "diverged":
            assert miss.known_tokens[:1] != tokens[match.num_tokens : match.num_tokens + 1]
            assert any(each[match.num_tokens :][: len(miss.known_tokens)] == miss.known_tokens for each in self.known)
        if miss is not None and miss.evicted is not None:
            page_end = min(len(tokens), (len(match.nodes) + 1) * PAGE)
            assert miss.evicted.time_s == self.removed[tokens[:page_end]]

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        tokens = data.draw(st.sampled_from(sorted(self.known)))
        node = self.known[tokens]
        if node.children or node.pins:
            with pytest.raises(AssertionError):
                self.tree.remove(node, self.now)
        else:
            self.now += 1
            assert self.tree.remove(node, self.now) == node.page
            self._gone(tokens)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=2).map(tuple))
    def extend(self, data: st.DataObject, more: tuple[int, ...]) -> None:
        tokens = data.draw(st.sampled_from(sorted(self.known)))
        node = self.known[tokens]
        longer = tokens + more
        if len(node.tokens) + len(more) <= PAGE and longer not in self.known:
            self.tree.extend(node, more)
            del self.known[tokens]
            self.known[longer] = node
            self.removed.pop(longer, None)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        node = self.known[data.draw(st.sampled_from(sorted(self.known)))]
        self.tree.pin(node)
        self.pinned.append(node)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.tree.unpin(self.pinned.pop())

    @precondition(lambda self: self.known)
    @rule(data=st.data(), tier=st.integers(0, 2))
    def move(self, data: st.DataObject, tier: int) -> None:
        node = self.known[data.draw(st.sampled_from(sorted(self.known)))]
        above = node.parent is self.tree.root or node.parent.tier <= tier
        below = all(child.tier >= tier for child in node.children.values())
        if above and below:
            self.tree.move(node, tier, "moved")
            self.given[node] = ("moved", node.use, tier)
        else:
            with pytest.raises(AssertionError):
                self.tree.move(node, tier, node.page)

    @invariant()
    def holds_what_was_added(self) -> None:
        self.tree.check()
        assert self.tree.num_nodes == len(self.known)
        assert set(self.tree.nodes()) == set(self.known.values())
        for tokens, node in self.known.items():
            assert _tokens_of(node) == tokens
            assert (node.page, node.use, node.tier) == self.given[node]
            assert (node.depth_pages, node.fingerprint) == (len(node.path()), self._fingerprint(tokens))
            children = {key: self.known[tokens + key] for key in node.children}
            assert node.children == children
            assert node.num_tier_children == sum(child.tier == node.tier for child in children.values())
            assert all(child.parent is node for child in children.values())
            assert node.may_leave == (not node.pins and not node.num_tier_children)
        assert sum(node.pins for node in self.known.values()) == len(self.pinned)

    def _fingerprint(self, tokens: tuple[int, ...]) -> int:
        fingerprint = 0
        for page in self.tree.split(tokens):
            fingerprint = hash((fingerprint, page))
        return fingerprint


def _tokens_of(node: Node) -> tuple[int, ...]:
    return tuple(token for each in node.path() for token in each.tokens)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(one=st.lists(st.integers(0, 1), max_size=12), other=st.lists(st.integers(0, 1), max_size=12), same=st.integers(0, 40))
def test_common_tokens_count_the_common_beginning(one: list[int], other: list[int], same: int) -> None:
    one, other = [7] * same + one, [7] * same + other
    expected = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_tokens(one, tuple(other)) == common_tokens(tuple(one), tuple(other)) == expected


def test_tree_makes_no_object_per_page_that_nobody_looks_at() -> None:
    """What a replay of long requests depends on for its speed."""
    tree = PrefixTree(1)
    for turn in range(5):
        tokens = range(1000 + 100 * turn)
        last = tree.match(tokens).last
        tree.insert_path(last, tokens[last.depth_pages :], [None] * (len(tokens) - last.depth_pages), None)
    (stretch,) = tree.stretches(tree.match(range(1400)).last)
    assert len(stretch.pages) == tree.num_nodes == 1400
    assert len(stretch.nodes) <= 5
    tree.remove_tail(stretch, 1390, 0.0)
    assert tree.num_nodes == 10
    assert len(tree.recall(range(1400), tree.match(range(10)))) == 1390
    tree.check()


def test_page_keeps_its_neighbours_when_it_moves_alone() -> None:
    tree = PrefixTree(1)
    nodes = tree.insert_path(tree.root, range(6), list("abcdef"), "use").path()
    for tier, order in ((1, (5, 4, 3, 2)), (0, (2, 3, 4, 5))):
        for index in order:
            tree.move(nodes[index], tier, nodes[index].page)
            tree.check()
            assert [node.page for node in nodes] == list("abcdef")
    assert len(tree.stretches(nodes[-1])) == 1  # joined again
    assert tree.match(range(6)).nodes == nodes


def test_match_is_exact_to_the_token_within_a_partly_filled_page() -> None:
    tree = PrefixTree(4)
    _add(tree, (1, 2, 3, 4, 5, 6))
    match = tree.match((1, 2, 3, 4, 5, 9, 9))
    assert (len(match.nodes), match.partial_tokens, match.num_tokens) == (1, 1, 5)
    assert match.partial is not None
    assert match.partial.tokens == (5, 6)


def test_match_takes_the_branch_with_the_longest_common_beginning() -> None:
    tree = PrefixTree(4)
    for branch in ((1, 1, 1, 1), (1, 2, 3, 4), (1, 2, 9, 9), (3, 3, 3, 3)):
        _add(tree, branch)
    match = tree.match((1, 2, 3, 5))
    assert match.partial is tree.root.children[1, 2, 3, 4]
    assert match.num_tokens == 3


def test_match_ends_with_a_partly_filled_page_that_is_found_whole() -> None:
    tree = PrefixTree(4)
    leaf = _add(tree, (1, 2, 3, 4, 5, 6))
    match = tree.match((1, 2, 3, 4, 5, 6))
    assert (match.nodes[-1], match.partial, match.num_tokens) == (leaf, None, 6)
    assert tree.explain((1, 2, 3, 4, 5, 6), match) is None


def test_branches_keep_their_own_pages_when_one_shares_most_of_the_other() -> None:
    tree = PrefixTree(4)
    one = tuple(range(50))
    other = (*range(46), 99, 98, 97, 96)  # 92 % of it
    _add(tree, one)
    _add(tree, other)
    assert tree.match(one).num_tokens == tree.match(other).num_tokens == 50


def test_miss_says_where_a_clock_at_the_start_of_a_prompt_diverged() -> None:
    tree = PrefixTree(4)
    _add(tree, (7, 7, 12, 30, 1, 2, 3, 4))
    tokens = (7, 7, 12, 31, 1, 2, 3, 4)
    miss = tree.explain(tokens, tree.match(tokens))
    assert miss is not None
    assert (miss.reason, miss.at_token, miss.known_tokens) == ("diverged", 3, (30,))


def test_miss_says_first_seen_for_new_text_and_for_text_that_goes_on() -> None:
    tree = PrefixTree(4)
    _add(tree, (1, 2, 3, 4))
    for tokens in ((9, 9), (1, 2, 3, 4, 5, 6)):
        miss = tree.explain(tokens, tree.match(tokens))
        assert miss is not None
        assert (miss.reason, miss.at_token) == ("first_seen", 0 if tokens[0] == 9 else 4)


def test_miss_says_from_where_and_when_a_page_was_evicted() -> None:
    tree = PrefixTree(2)
    leaf = _add(tree, (1, 2, 3, 4))
    leaf.use = "turn 1"
    tree.move(leaf, 1, leaf.page)
    tree.remove(leaf, 12.5)
    tokens = (1, 2, 3, 4, 5)
    miss = tree.explain(tokens, tree.match(tokens))
    assert miss is not None
    assert (miss.reason, miss.at_token, miss.evicted) == ("evicted", 2, Evicted(1, 12.5, "turn 1"))


def test_tree_forgets_the_oldest_of_what_was_evicted() -> None:
    tree = PrefixTree(1, remembered=2)
    for token in range(3):
        tree.remove(_add(tree, (token,)), float(token))
    assert [len(tree.recall((token,), tree.match((token,)))) for token in range(3)] == [0, 1, 1]


def test_fork_of_a_long_session_takes_under_a_millisecond_and_no_page() -> None:
    tree = PrefixTree(32)
    tokens = tuple(range(4000))
    last = _add(tree, tokens)
    before = tree.num_nodes
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        tree.pin(last)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1e-3
    assert tree.num_nodes == before == 125
    assert tree.match((*tokens, 1)).nodes[-1].pins == 20
