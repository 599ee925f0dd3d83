"""The prefix tree: which pasts are known, page by page.

A node is one page: at most `page_tokens` tokens on top of its parent's. Only the last page of a path may be partly
filled, so only leaves are. Paths that share a beginning share its nodes; `stretch.py` is how they are stored.

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

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, repeat, takewhile
from typing import Any, Literal, NamedTuple

from headrace.kv.stretch import Node, Stretch, Tokens, chain, common_tokens, paged

__all__ = ["Evicted", "Match", "Miss", "MissReason", "Node", "PrefixTree", "Stretch", "Tokens", "common_tokens"]

DEFAULT_REMEMBERED = 1 << 16
"""Removed pages that are remembered: 150 bytes each, half of it where many were removed at once."""

MissReason = Literal["first_seen", "diverged", "evicted"]


@dataclass(frozen=True)
class Match:
    """The longest known past of some tokens: whole pages up to `last`, then the first `partial_tokens` tokens of `partial`.

    `last` is the root if there are none; it is partly filled if the tokens end exactly where it does.
    """

    last: Node
    partial: Node | None
    partial_tokens: int
    num_tokens: int

    @property
    def num_pages(self) -> int:
        """Pages up to `last`."""
        return self.last.depth_pages

    @cached_property
    def nodes(self) -> list[Node]:
        """The pages up to `last`, as they were when first asked for."""
        return self.last.path()


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

    def __init__(
        self,
        page_tokens: int,
        *,
        remembered: int = DEFAULT_REMEMBERED,
        on_hold: Callable[[Any, bool], None] = lambda page, held: None,
    ) -> None:
        """`on_hold` is told of each page that is held from now on, by a pin of it or of one behind it, or no longer."""
        assert page_tokens > 0
        self._on_hold = on_hold
        self.page_tokens = page_tokens
        self._trunk = Stretch(page_tokens, 0, 0, None, [], [], [])
        self.root = self._trunk.node(0)
        self.num_nodes = 0
        self._remembered = remembered
        self._evicted: dict[int, Evicted] = {}  # by fingerprint, oldest first

    def split(self, tokens: Sequence[int]) -> list[Tokens]:
        """The tokens page by page; the last may be partly filled."""
        return paged(tokens, self.page_tokens)

    # look

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest known past. Touches nothing."""
        tokens = list(tokens)
        page_tokens, num_tokens = self.page_tokens, len(tokens)
        stretch, at = self._trunk, 0
        while (child := stretch.children.get(tuple(tokens[at : at + page_tokens]))) is not None:
            there = tokens[at : at + len(child.tokens)]
            if there == child.tokens and (at + len(there) == num_tokens or not len(there) % page_tokens):
                stretch, at = child, at + len(there)
                continue
            num_pages, common = divmod(common_tokens(there, child.tokens), page_tokens)
            depth = child.start + num_pages
            partial = child.node(depth + 1) if common else None
            return Match(child.node(depth), partial, common, at + num_pages * page_tokens + common)
        partial, common = self._nearest(stretch, tuple(tokens[at : at + page_tokens])) if page_tokens > 1 else (None, 0)
        return Match(stretch.node(stretch.end), partial, common, at + common)

    def explain(self, tokens: Sequence[int], match: Match) -> Miss | None:
        """Why the rest of the tokens was not found, as things stand since `match`; None if nothing is missing."""
        if match.num_tokens == len(tokens):
            return None
        start = match.num_pages * self.page_tokens
        node = match.last
        evicted = self._evicted.get(hash((node.fingerprint, tuple(tokens[start : start + self.page_tokens]))))
        if evicted is not None:
            return Miss("evicted", match.num_tokens, evicted=evicted)
        known: Tokens = ()
        if match.partial is not None:
            known = match.partial.tokens[match.partial_tokens :]
        elif match.num_tokens:
            known = next(reversed(node.children), ())  # the newest of those that share nothing
        return Miss("diverged", match.num_tokens, known_tokens=known) if known else Miss("first_seen", match.num_tokens)

    def fingerprints(self, parent: Node, tokens: Sequence[int]) -> list[int]:
        """What pages behind one are remembered by, once they are removed."""
        return chain(parent.fingerprint, paged(tokens, self.page_tokens))

    def recall(self, tokens: Sequence[int], match: Match) -> list[Evicted]:
        """What is remembered of the pages behind a match, in their order, up to the first that is not."""
        return self.recalled(self.fingerprints(match.last, tokens[match.num_pages * self.page_tokens :]))

    def recalled(self, fingerprints: Sequence[int]) -> list[Evicted]:
        """What is remembered by fingerprints, up to the first by which nothing is."""
        evicted = self._evicted
        return list(map(evicted.__getitem__, takewhile(evicted.__contains__, fingerprints)))

    def nodes(self) -> Iterator[Node]:
        """All pages, each before those behind it. The tree must not change meanwhile."""
        for stretch in self._below(self._trunk):
            yield from (stretch.node(depth) for depth in range(stretch.start + 1, stretch.end + 1))

    # change

    def insert(self, parent: Node, tokens: Tokens, page: Any, *, tier: int = 0) -> Node:
        """A new page on top of a whole one."""
        assert 0 < len(tokens) <= self.page_tokens, "a page holds 1 to page_tokens tokens"
        return self.insert_path(parent, tokens, [page], None, tier=tier)

    def insert_path(
        self,
        parent: Node,
        tokens: Sequence[int],
        pages: Sequence[Any],
        use: Any,
        *,
        tier: int = 0,
        fingerprints: list[int] | None = None,
    ) -> Node:
        """New pages behind one, all in one tier and of one use; the last of them, or the one itself if there are none.

        `fingerprints` are theirs, if they are known already.
        """
        if fingerprints is None:
            fingerprints = self.fingerprints(parent, tokens)
        assert len(pages) == len(fingerprints), "as many pages as the tokens fill"
        if not pages:
            return parent
        stretch, depth = parent.stretch, parent.depth_pages
        assert not depth or len(parent.tokens) == self.page_tokens, "a partly filled page has no children"
        assert not depth or stretch.tier <= tier, "a child is never nearer than its parent"
        added = Stretch(self.page_tokens, depth, tier, use, list(tokens), list(pages), fingerprints)
        if depth < stretch.end:
            assert added.key not in parent.children, "the page is known already"
            stretch.split(depth)
        assert added.key not in stretch.children, "the page is known already"
        stretch.attach(added)
        stretch = stretch.join()
        self.num_nodes += len(pages)
        for fingerprint in filter(self._evicted.__contains__, fingerprints):
            del self._evicted[fingerprint]
        return (stretch if stretch.end == depth + len(pages) else added).node(depth + len(pages))

    def extend(self, node: Node, tokens: Tokens) -> None:
        """More tokens for a partly filled page, written by its only owner."""
        stretch, parent = node.stretch, node.parent
        assert parent is not None
        assert node.depth_pages == stretch.end
        assert not stretch.children
        longer = node.tokens + tokens
        assert len(longer) <= self.page_tokens, "the page is full"
        assert longer not in parent.children, "the page is known already"
        before = stretch.parent if len(stretch.pages) == 1 else None
        if before is not None:
            before.detach(stretch)  # which has it by its tokens
        stretch.tokens += tokens
        stretch.fingerprints[-1] = hash((parent.fingerprint, longer))
        if before is not None:
            before.attach(stretch)
        self._evicted.pop(stretch.fingerprints[-1], None)

    def remove(self, node: Node, now_s: float) -> Any:
        """Forgets a leaf that nobody has pinned; gives its page back."""
        assert node.parent is not None, "the root stays"
        assert node.depth_pages == node.stretch.end, "pages behind it would be lost"
        assert node.pins == 0, "the page is pinned"
        return self.remove_tail(node.stretch, 1, now_s)[0]

    def remove_tail(self, stretch: Stretch, count: int, now_s: float) -> list[Any]:
        """Forgets the last pages of a stretch, none of them pinned and none behind; gives them back in their order."""
        assert not stretch.children, "pages behind it would be lost"
        pages, fingerprints = stretch.cut(count)
        self.num_nodes -= count
        self._evicted.update(zip(reversed(fingerprints), repeat(Evicted(stretch.tier, now_s, stretch.use))))
        for fingerprint in list(islice(self._evicted, max(0, len(self._evicted) - self._remembered))):
            del self._evicted[fingerprint]
        return pages

    def subtree(self, node: Node) -> list[Stretch]:
        """The stretches of a page and all behind it, each before those behind it."""
        stretch = node.stretch
        if node.depth_pages - 1 > stretch.start:
            stretch = stretch.split(node.depth_pages - 1)
        return [stretch, *self._below(stretch)]

    def remove_subtree(self, node: Node, now_s: float) -> list[Any]:
        """Forgets a page and all behind it, none of them pinned; gives the pages back, each after those behind it."""
        assert node.parent is not None, "the root stays"
        doomed = self.subtree(node)
        assert not any(each.pins for stretch in doomed for each in stretch.nodes.values()), "a page behind is pinned"
        pages = []
        for stretch in reversed(doomed):
            pages += reversed(self.remove_tail(stretch, len(stretch.pages), now_s))
        return pages

    def move(self, node: Node, tier: int, page: Any) -> None:
        """The page now lies in another tier, as `page`. From there on no child may be nearer, nor the parent farther."""
        parent = node.parent
        assert parent is not None
        assert parent.parent is None or parent.tier <= tier, "a child is never nearer than its parent"
        assert all(child.tier >= tier for child in node.children.values()), "pages leave a tier from the tips on"
        stretch = node.isolate()
        stretch.pages[0] = page
        stretch.set_tier(tier)
        self.join([stretch])

    def move_tail(self, stretch: Stretch, count: int, tier: int) -> list[Any]:
        """The last pages of a stretch move to a tier farther away; the pages in their order."""
        assert stretch.tier < tier
        assert all(child.tier >= tier for child in stretch.children.values()), "pages leave a tier from the tips on"
        if count < len(stretch.pages):
            stretch = stretch.split(stretch.end - count)
        pages = stretch.pages[:]
        stretch.set_tier(tier)
        self.join([stretch])
        return pages

    def stretches(self, last: Node) -> list[Stretch]:
        """The stretches of the path that ends with a page, from the first on; they are split there.

        The caller may change uses and, keeping to the order, tiers; then it should `join` them.
        """
        stretch = last.stretch
        if last.depth_pages < stretch.end:
            stretch.split(last.depth_pages)
        found = []
        while stretch.parent is not None:
            found.append(stretch)
            stretch = stretch.parent
        return found[::-1]

    @staticmethod
    def join(stretches: Sequence[Stretch]) -> None:
        """Joins stretches that follow each other, the one before and the one behind, where they are alike."""
        stretch = stretches[0].parent if stretches else None
        if stretch is None:
            return
        for following in stretches:
            end = following.end
            joined = stretch.join()
            stretch = joined if joined.end == end else following
        stretch.join()

    def is_held(self, node: Node) -> bool:
        """Whether a page, or one behind it, is pinned."""
        return node.holds > 0

    def pin(self, node: Node) -> None:
        """Keeps a page, and with it all pages before. A fork of a session is one more pin of its last page."""
        node.pins += 1
        each: Node | None = node
        while each is not None:
            each.holds += 1
            if each.holds > 1:
                return
            self._on_hold(each.page, True)
            each = each.parent

    def unpin(self, node: Node) -> None:
        """Takes one pin away."""
        assert node.pins > 0, "the page is not pinned"
        node.pins -= 1
        each: Node | None = node
        while each is not None:
            each.holds -= 1
            if each.holds:
                return
            self._on_hold(each.page, False)
            each = each.parent

    def check(self) -> None:
        """Asserts the invariants above, for every page."""
        count = 0
        for stretch in [self._trunk, *self._below(self._trunk)]:
            stretch.check()
            assert self._evicted.keys().isdisjoint(stretch.fingerprints)
            count += len(stretch.pages)
        assert count == self.num_nodes
        assert len(self._evicted) <= self._remembered

    @staticmethod
    def _below(stretch: Stretch) -> list[Stretch]:
        """All stretches behind one, each before those behind it."""
        found = list(stretch.children.values())
        for each in found:
            found.extend(each.children.values())
        return found

    @staticmethod
    def _nearest(stretch: Stretch, tokens: Tokens) -> tuple[Node | None, int]:
        """The page behind a stretch that shares the longest beginning with the tokens, and its length.

        In sorted order it stands right before or right after the place of the tokens.
        """
        if stretch.order is None:
            candidates = list(stretch.children)
        else:
            at = bisect_left(stretch.order, tokens)
            candidates = stretch.order[max(0, at - 1) : at + 1]
        best, best_common = None, 0
        for key in candidates:
            common = common_tokens(key, tokens)
            if common > best_common:
                best, best_common = stretch.children[key], common
        return (None if best is None else best.node(best.start + 1)), best_common
