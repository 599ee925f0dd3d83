"""The prefix tree: a state machine against a plain set of known pasts, and each promise on its own."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
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
    """`known` holds the tokens from the start to the end of each node; a match is checked against all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(PAGE, remembered=4)
        self.known: dict[tuple[int, ...], Node] = {}
        self.pinned: list[Node] = []
        self.removed: dict[tuple[int, ...], int] = {}
        self.now = 0

    @rule(tokens=TOKEN_LISTS)
    def add(self, tokens: tuple[int, ...]) -> None:
        node = _add(self.tree, tokens)
        for each in node.path():
            self.known[_tokens_of(each)] = each
            self.removed.pop(_tokens_of(each), None)

    @rule(tokens=TOKEN_LISTS)
    def match(self, tokens: tuple[int, ...]) -> None:
        match = self.tree.match(tokens)
        assert match.num_tokens == max((common_tokens(each, tokens) for each in self.known), default=0)
        assert [_tokens_of(node) for node in match.nodes] == [
            tokens[:end]
            for end in range(1, match.num_tokens + 1)
            if tokens[:end] in self.known and (end % PAGE == 0 or end == len(tokens))
        ]
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
            del self.known[tokens]
            self.removed[tokens] = self.now

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
            self.tree.move(node, tier, node.page)
            assert node.tier == tier
        else:
            with pytest.raises(AssertionError):
                self.tree.move(node, tier, node.page)

    @invariant()
    def holds_what_was_added(self) -> None:
        self.tree.check()
        assert self.tree.num_nodes == len(self.known)


def _tokens_of(node: Node) -> tuple[int, ...]:
    return tuple(token for each in node.path() for token in each.tokens)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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
        assert (miss.reason, miss.at_token) == ("first seen", 0 if tokens[0] == 9 else 4)


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
