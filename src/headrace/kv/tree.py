"""The prefix tree: which pasts are known, page by page.

A node is one page: at most `page_tokens` tokens on top of its parent's. Only the last page of a path may be partly
filled, so only leaves are. Paths that share a beginning share its nodes:

    root ─ [the system prompt] ─┬─ [first question, page 1] ─ [page 2, partly filled]
                                └─ [other question]

A match is exact to the token: after the last whole page found, the child with the longest common beginning lends its
page up to the token that differs; whoever continues from there writes to a copy.

    tokens   0 ........... nodes ........... | partial ... | missing ...... end

A page lies in a tier (0 is the nearest). A child is never nearer than its parent, so pages leave a tier from the tips of
its paths on, and the pages of a tier and those nearer always form whole beginnings.

Knows nothing of what a page holds, where it lies or who reads it: pages, uses and times are the caller's. What was
removed is remembered for a while by fingerprints, so that a miss has a reason.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

DEFAULT_REMEMBERED = 1 << 16
"""Removed pages that are remembered: about 160 bytes each."""

Tokens = tuple[int, ...]
MissReason = Literal["first seen", "diverged", "evicted"]


class Node:
    """One page of a known past. Made, moved and removed by its tree only; `page` and `use` are the caller's."""

    __slots__ = (
        "children",
        "depth_pages",
        "fingerprint",
        "num_tier_children",
        "order",
        "page",
        "parent",
        "pins",
        "tier",
        "tokens",
        "use",
    )

    def __init__(self, tokens: Tokens, parent: Node | None, page: Any, tier: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.page = page
        self.tier = tier
        self.use: Any = None
        self.pins = 0
        self.children: dict[Tokens, Node] = {}
        self.order: list[Tokens] | None = None  # keys of the children, sorted; made when there are two
        self.num_tier_children = 0  # children in the same tier
        if parent is None:
            self.depth_pages, self.fingerprint = 0, 0
        else:
            self.depth_pages, self.fingerprint = parent.depth_pages + 1, hash((parent.fingerprint, tokens))

    def path(self) -> list[Node]:
        """The nodes from the first page to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class Match:
    """The longest known past of some tokens: the pages `nodes`, then the first `partial_tokens` tokens of the page `partial`.

    The last of `nodes` is partly filled if the tokens end exactly where it does.
    """

    nodes: list[Node]
    partial: Node | None
    partial_tokens: int
    num_tokens: int


class Evicted(NamedTuple):
    """What is remembered of a removed page: the tier it was removed from, when, and its last use."""

    tier: int
    time_s: float
    use: Any


@dataclass(frozen=True)
class Miss:
    """Why the tokens from `at_token` on were not found.

    `known_tokens` is how the known past goes on there if it diverged; `evicted` is set if it was known once.
    """

    reason: MissReason
    at_token: int
    known_tokens: Tokens = ()
    evicted: Evicted | None = None


class PrefixTree:
    """Pages by their tokens and all tokens before."""

    def __init__(self, page_tokens: int, *, remembered: int = DEFAULT_REMEMBERED) -> None:
        assert page_tokens > 0
        self.page_tokens = page_tokens
        self.root = Node((), None, None, 0)
        self.num_nodes = 0
        self._remembered = remembered
        self._evicted: dict[int, Evicted] = {}  # by fingerprint, oldest first

    def split(self, tokens: Sequence[int]) -> Iterator[Tokens]:
        """The tokens page by page; the last may be partly filled."""
        whole = len(tokens) // self.page_tokens * self.page_tokens
        yield from zip(*[iter(tokens)] * self.page_tokens, strict=False)
        if whole < len(tokens):
            yield tuple(tokens[whole:])

    # look

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest known past. Touches nothing."""
        node = self.root
        nodes: list[Node] = []
        add = nodes.append
        for key in zip(*[iter(tokens)] * self.page_tokens, strict=False):
            child = node.children.get(key)
            if child is None:
                break
            add(child)
            node = child
        num_tokens = len(nodes) * self.page_tokens
        rest = tuple(tokens[num_tokens : num_tokens + self.page_tokens])
        if rest in node.children:
            return Match([*nodes, node.children[rest]], None, 0, len(tokens))
        partial, common = self._nearest(node, rest) if self.page_tokens > 1 else (None, 0)
        return Match(nodes, partial, common, num_tokens + common)

    def explain(self, tokens: Sequence[int], match: Match) -> Miss | None:
        """Why the rest of the tokens was not found, as things stand since `match`; None if nothing is missing."""
        if match.num_tokens == len(tokens):
            return None
        start = len(match.nodes) * self.page_tokens
        node = match.nodes[-1] if match.nodes else self.root
        evicted = self._evicted.get(hash((node.fingerprint, tuple(tokens[start : start + self.page_tokens]))))
        if evicted is not None:
            return Miss("evicted", match.num_tokens, evicted=evicted)
        known: Tokens = ()
        if match.partial is not None:
            known = match.partial.tokens[match.partial_tokens :]
        elif node.children and match.num_tokens:
            known = next(reversed(node.children))  # the newest of those that share nothing
        return Miss("diverged", match.num_tokens, known_tokens=known) if known else Miss("first seen", match.num_tokens)

    def recall(self, tokens: Sequence[int], match: Match) -> list[Evicted]:
        """What is remembered of the pages behind a match, in their order, up to the first that is not."""
        fingerprint = match.nodes[-1].fingerprint if match.nodes else self.root.fingerprint
        found = []
        for key in self.split(tokens[len(match.nodes) * self.page_tokens :]):
            fingerprint = hash((fingerprint, key))
            evicted = self._evicted.get(fingerprint)
            if evicted is None:
                break
            found.append(evicted)
        return found

    # change

    def insert(self, parent: Node, tokens: Tokens, page: Any, *, tier: int = 0) -> Node:
        """A new page on top of a whole one."""
        assert 0 < len(tokens) <= self.page_tokens, "a page holds 1 to page_tokens tokens"
        assert parent.parent is None or len(parent.tokens) == self.page_tokens, "a partly filled page has no children"
        assert tokens not in parent.children, "the page is known already"
        assert parent.parent is None or parent.tier <= tier, "a child is never nearer than its parent"
        node = Node(tokens, parent, page, tier)
        self._attach(node)
        self.num_nodes += 1
        if node.fingerprint in self._evicted:
            del self._evicted[node.fingerprint]
        return node

    def insert_path(self, parent: Node, tokens: Sequence[int], pages: Sequence[Any], use: Any, *, tier: int = 0) -> Node:
        """New pages behind one, all in one tier and of one use; the last of them, or the one itself if there are none."""
        node = parent
        for key, page in zip(self.split(tokens), pages, strict=True):
            if node is parent:
                child = self.insert(node, key, page, tier=tier)
            else:  # the first child of its parent, and in its tier
                child = Node(key, node, page, tier)
                node.children[key] = child
                node.num_tier_children = 1
                if child.fingerprint in self._evicted:
                    del self._evicted[child.fingerprint]
            child.use = use
            node = child
        self.num_nodes += max(0, len(pages) - 1)
        return node

    def extend(self, node: Node, tokens: Tokens) -> None:
        """More tokens for a partly filled page, written by its only owner."""
        assert node.parent is not None
        assert not node.children
        longer = node.tokens + tokens
        assert len(longer) <= self.page_tokens, "the page is full"
        assert longer not in node.parent.children, "the page is known already"
        self._detach(node)
        node.tokens, node.fingerprint = longer, hash((node.parent.fingerprint, longer))
        self._attach(node)
        self._evicted.pop(node.fingerprint, None)

    def remove(self, node: Node, now_s: float) -> Any:
        """Forgets a leaf that nobody has pinned; gives its page back."""
        assert node.parent is not None, "the root stays"
        assert not node.children, "pages behind it would be lost"
        assert node.pins == 0, "the page is pinned"
        self._detach(node)
        self.num_nodes -= 1
        evicted = self._evicted
        evicted[node.fingerprint] = Evicted(node.tier, now_s, node.use)
        if len(evicted) > self._remembered:
            del evicted[next(iter(evicted))]
        node.parent = None
        return node.page

    def remove_subtree(self, node: Node, now_s: float) -> list[Any]:
        """Forgets a page and all behind it, none of them pinned; gives the pages back, each after those behind it."""
        doomed = [node]
        for each in doomed:
            doomed.extend(each.children.values())
        assert not any(each.pins for each in doomed), "a page behind is pinned"
        return [self.remove(each, now_s) for each in reversed(doomed)]

    def move(self, node: Node, tier: int, page: Any) -> None:
        """The page now lies in another tier, as `page`. From there on no child may be nearer, nor the parent farther."""
        parent = node.parent
        assert parent is not None
        assert parent.parent is None or parent.tier <= tier, "a child is never nearer than its parent"
        assert all(child.tier >= tier for child in node.children.values()), "pages leave a tier from the tips on"
        if parent.tier == node.tier:
            parent.num_tier_children -= 1
        node.tier, node.page = tier, page
        if parent.tier == tier:
            parent.num_tier_children += 1
        node.num_tier_children = sum(child.tier == tier for child in node.children.values())

    def pin(self, node: Node) -> None:
        """Keeps a page, and with it all pages before. A fork of a session is one more pin of its last page."""
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """Takes one pin away."""
        assert node.pins > 0, "the page is not pinned"
        node.pins -= 1

    def check(self) -> None:
        """Asserts the invariants above, for every node."""
        count, stack = 0, [self.root]
        while stack:
            node = stack.pop()
            keys = list(node.children)
            assert node.order is None or node.order == sorted(keys)
            assert node.order is not None or len(keys) < 2 or self.page_tokens == 1
            assert node.num_tier_children == sum(child.tier == node.tier for child in node.children.values())
            for key, child in node.children.items():
                assert child.tokens == key
                assert child.parent is node
                assert 0 < len(key) <= self.page_tokens
                assert len(key) == self.page_tokens or not child.children
                assert child.depth_pages == node.depth_pages + 1
                assert child.fingerprint == hash((node.fingerprint, key))
                assert child.fingerprint not in self._evicted
                assert child.tier >= node.tier
                assert child.pins >= 0
                stack.append(child)
                count += 1
        assert count == self.num_nodes
        assert len(self._evicted) <= self._remembered

    def _attach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        parent.children[node.tokens] = node
        if parent.tier == node.tier:
            parent.num_tier_children += 1
        if self.page_tokens > 1:  # pages of one token have no parts to find
            if parent.order is not None:
                insort(parent.order, node.tokens)
            elif len(parent.children) > 1:
                parent.order = sorted(parent.children)

    def _detach(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        if parent.tier == node.tier:
            parent.num_tier_children -= 1
        if parent.order is not None:
            del parent.order[bisect_left(parent.order, node.tokens)]

    @staticmethod
    def _nearest(node: Node, tokens: Tokens) -> tuple[Node | None, int]:
        """The child that shares the longest beginning with the tokens, and its length.

        In sorted order it stands right before or right after the place of the tokens.
        """
        if node.order is None:
            candidates = list(node.children)
        else:
            at = bisect_left(node.order, tokens)
            candidates = node.order[max(0, at - 1) : at + 1]
        best, best_common = None, 0
        for key in candidates:
            common = common_tokens(key, tokens)
            if common > best_common:
                best, best_common = node.children[key], common
        return best, best_common


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
