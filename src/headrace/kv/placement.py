"""Where the pages of the tree lie: capacities of tiers, and which pages leave when they are full.

Pages of a use that lie in a tier form one stretch of its path. Victims are taken from the tip of the stretch that is worth
least; a tip whose children lie in the same tier waits until they are gone. What leaves a tier goes to the next if it is
worth more there than the least that it would displace, else it is dropped.

    tier 0   [──────── use A ───────]        [use B]
    tier 1                [── use A (older) ──]         dropped: remembered by the tree

Decides and keeps the books; copying, writing and freeing are the caller's, by the moves that it is given.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from headrace.kv.residency import DEFAULT_STANDING, Rule, Standing, Use
from headrace.kv.tree import Match, Node, PrefixTree, Stretch

RANK_SHARE = 0.01
"""All that lies in a tier is ranked again when this share of its capacity has left it since: worths change slowly, and
what is new is ranked as it comes."""
FEW_LISTED = 1000
"""Entries of a ranking, beyond twice those that were valid, before it is tidied."""


class Move(NamedTuple):
    """Pages left a tier for another, or for none, in this order."""

    pages: list[Any]
    from_tier: int
    to_tier: int | None


class Recorded(NamedTuple):
    """What `Placement.record` did: the pages that came to tier 0, and the last page of the path (the root if it has none)."""

    moves: list[Move]
    last: Node


class Placement:
    """Pages in tiers of `capacities` pages each.

    `make_room` keeps to the capacities. A caller with bounds of its own asks for the `cheapest` page and evicts it instead.
    """

    def __init__(self, tree: PrefixTree, capacities: Sequence[int], rule: Rule) -> None:
        self.tree, self.capacities, self.rule = tree, tuple(capacities), rule
        self.num_pages = [0] * len(capacities)
        self._resident: list[dict[Use, None]] = [{} for _ in capacities]
        # worth, serial number, depth of the tip that it is the worth of, use
        self._heaps: list[list[tuple[float, int, int, Use]]] = [[] for _ in capacities]
        self._left = list(capacities)  # pages that left since the tier was ranked
        self._unlisted: list[Node] = []  # pages that came to tier 0 since it was looked at
        self._most_listed = [FEW_LISTED] * len(capacities)
        self._num_begun = 0  # uses that were not told to the rule when their first pages came
        self._due_s = [math.inf] * len(capacities)  # when an owner's wish changes what a ranked page is worth

    def record(
        self,
        tokens: Sequence[int],
        match: Match,
        pages: Sequence[Any],
        *,
        num_answer_tokens: int,
        now_s: float,
        standing: Standing = DEFAULT_STANDING,
        num_near: int | None = None,
        use: Use | None = None,
    ) -> Recorded:
        """A use of all pages of `tokens` ended: those of `match`, which holds still, and `pages` behind them.

        `use` is what `share` gave for pages of it that have come already: all ends as if they came now.

            matched [0, num_near)       come to tier 0, or are there
            matched [num_near, ...)     stay in the tier they are in
            new                         tier 0 if all matched are near (`num_near` None or their number), else tier 1

        A tier may be over its capacity then.
        """
        assert not match.num_pages or match.last.parent is not None, "what matched was removed since"
        tree = self.tree
        if use is None:
            use = Use(len(self.capacities))
            use.num_before = match.num_pages
        use.time_s, use.standing, use.num_answer_tokens = now_s, standing, num_answer_tokens
        all_near = num_near is None or num_near >= match.num_pages
        if not all_near:
            tree.stretches(match.nodes[num_near - 1] if num_near else tree.root)  # splits there
        moves = []
        path = tree.stretches(match.last)
        found, is_new = _found_on(path)
        for stretch in path:
            stretch.use = use
            if stretch.tier and (all_near or stretch.end <= num_near):  # type: ignore[operator] # None is all_near
                moves.append(self._promote(stretch))
        tree.join(path)
        node, recalled = self._add_pages(match, tokens, pages, use, all_near=all_near)
        for before, end in recalled if not is_new else ():
            _add_found(found, before, end)
        use.num_pages, use.recalled = node.depth_pages, None
        self.rule.ended(use, found)
        self._list_path(node, now_s)
        return Recorded(moves, node)

    def share(
        self,
        tokens: Sequence[int],
        match: Match,
        pages: Sequence[Any],
        *,
        now_s: float,
        num_near: int | None = None,
        use: Use | None = None,
    ) -> tuple[Use, Node]:
        """Pages of a use that goes on come into the tree behind those of `match`, to the tiers that `record` puts them in.

        Nothing is counted before `record` is told of the end of the use, and those that matched stay as they are. Until
        then the caller keeps the last page pinned. `use` is what an earlier call gave for the same use.

        Returns:
            The use, and the last page of the path (the root if it has none).
        """
        assert not match.num_pages or match.last.parent is not None, "what matched was removed since"
        if use is None:
            use = Use(len(self.capacities))
            use.num_before, use.recalled = match.num_pages, []
            self._num_begun += 1
            use.serial = -self._num_begun
        assert use.recalled is not None, "the use has ended"
        all_near = num_near is None or num_near >= match.num_pages
        path = self.tree.stretches(match.last)
        found, is_new = _found_on(path)
        self.tree.join(path)
        node, recalled = self._add_pages(match, tokens, pages, use, all_near=all_near)
        if not is_new:
            use.recalled += recalled
            for before, end in recalled:
                _add_found(found, before, end)
        use.time_s, use.num_pages = now_s, node.depth_pages
        if pages:
            use.tips[node.tier] = node
            self._resident[node.tier][use] = None
        self.rule.begun(use, found)
        return use, node

    def _add_pages(
        self, match: Match, tokens: Sequence[int], pages: Sequence[Any], use: Use, *, all_near: bool
    ) -> tuple[Node, list[tuple[Use, int]]]:
        """Puts pages behind those that matched; the last of the path, and what is remembered of them from before."""
        tree = self.tree
        rest = tokens[match.num_pages * tree.page_tokens :]
        fingerprints = tree.fingerprints(match.last, rest)
        evictions = tree.recalled(fingerprints)
        recalled: list[tuple[Use, int]] = []
        for depth, (evicted, behind) in enumerate(zip_longest(evictions, evictions[1:]), match.num_pages + 1):
            if evicted is not behind:  # pages that were evicted together share what is remembered
                _add_found(recalled, evicted.use, depth)
        tier = 0 if all_near else max(1, match.last.tier)
        node = tree.insert_path(match.last, rest, pages, use, tier=tier, fingerprints=fingerprints)
        self.num_pages[tier] += len(pages)
        return node, recalled

    def restore(
        self,
        parent: Node,
        tokens: Sequence[int],
        pages: Sequence[Any],
        facts: Mapping[str, int],
        time_s: float,
        now_s: float,
        *,
        tier: int = 1,
    ) -> Node:
        """Pages that were kept since before this run, of a use that ended at `time_s`; `facts` are its `use_facts`.

        To be called in the order of time, parents before children: then the rule learns as if it had seen the uses. A use
        of the same time whose last page is `parent` is the same use. None of the pages may be known; returns the last.
        """
        assert pages, "nothing to restore"
        use: Use | None = parent.use
        is_same = use is not None and use.recalled is None and use.time_s == time_s and self._last_page(use) is parent
        if use is None or not is_same:
            use = Use(len(self.capacities))
            use.time_s, use.num_answer_tokens = time_s, max(0, facts.get("num_answer_tokens", 0))
            use.num_before = parent.depth_pages
        found = self._take_over(parent, use)
        tier = max(tier, parent.tier)
        node = self.tree.insert_path(parent, tokens, pages, use, tier=tier)
        self.num_pages[tier] += len(pages)
        use.num_pages = max(use.num_pages, node.depth_pages, facts.get("num_pages", 0))
        if not is_same:
            self.rule.restored(use, found, facts)
        self._list_path(node, now_s)
        return node

    @staticmethod
    def use_facts(use: Use) -> dict[str, int]:
        """What is known of a use, to be kept with its pages and handed to `restore` after a restart."""
        return {
            "turn": use.turn,
            "repeats": use.repeats,
            "known_pages": use.known_pages,
            "num_pages": use.num_pages,
            "num_answer_tokens": use.num_answer_tokens,
        }

    def set_standing(self, last: Node, standing: Standing, now_s: float) -> None:
        """The owner of the path that ends with this page asks for something else; holds until the path's next use."""
        last.use.standing = standing
        self._due_s = [min(due_s, now_s) for due_s in self._due_s]

    def make_room(self, now_s: float) -> list[Move]:
        """Takes pages away until every tier holds at most its capacity, or all that is left is pinned."""
        moves: list[Move] = []
        for tier in range(len(self.capacities)):
            if self.num_pages[tier] > self.capacities[tier]:
                self._shrink(tier, now_s, moves)
        return moves

    def cheapest(self, tier: int, now_s: float) -> tuple[Node, float] | None:
        """The page that is worth least of those that may leave a tier, and its worth; None if none may.

        Neither pinned pages nor those with children in the same tier may leave. The worth is of the last ranking.
        """
        is_ranked = False
        while tier == 0 and self._unlisted:
            node = self._unlisted.pop()
            if self._tip(node.use, 0) is node:
                self._list(node, 0, now_s)
        if self._left[tier] > RANK_SHARE * self.capacities[tier] or now_s >= self._due_s[tier]:
            self._rank(tier, now_s)
            is_ranked = True
        while True:
            heap = self._heaps[tier]
            while heap:
                worth, _, depth_pages, use = heap[0]
                tip = self._tip(use, tier)
                if tip is not None and tip.depth_pages == depth_pages and tip.may_leave:
                    return tip, worth
                heapq.heappop(heap)
            if is_ranked:
                return None
            self._rank(tier, now_s)
            is_ranked = True

    def evict(self, tip: Node, now_s: float, *, demote: bool) -> Move:
        """Takes a page that may leave its tier, to the next one or, if there is no page behind it, out of the tree."""
        assert not tip.num_tier_children, "pages leave a tier from the tips on"
        assert not tip.pins, "the page is pinned"
        assert demote or not tip.children, "pages behind it would be lost"
        assert not demote or tip.tier + 1 < len(self.capacities), "there is no next tier"
        moves: list[Move] = []
        self._take(tip, 1, demote, now_s, moves)
        return moves[0]

    def promote(self, node: Node) -> Move:
        """A page behind one in tier 0, or behind none, comes to tier 0 from farther away before it is used."""
        use, tier = node.use, node.tier
        assert tier > 0, "the page is in tier 0"
        move = self._promote(node.isolate())
        self.tree.join([node.stretch])
        self._tip(use, tier)  # it may have been the last there
        use.tips[0] = node
        self._resident[0][use] = None
        self._unlisted.append(node)
        return move

    def forget(self, node: Node, now_s: float) -> list[Any]:
        """A page is lost, and with it all behind it, none of them pinned; gives the pages back, each after those behind it."""
        parent = node.parent
        assert parent is not None, "the root stays"
        doomed = [(stretch.tier, len(stretch.pages), stretch.use) for stretch in self.tree.subtree(node)]
        pages = self.tree.remove_subtree(node, now_s)
        for tier, num_pages, _ in doomed:
            self.num_pages[tier] -= num_pages
        self._reveal(parent, node.use, node.tier, now_s)
        for _, _, use in doomed:
            for tier in range(len(self.capacities)):
                self._tip(use, tier)
        return pages

    def check(self) -> None:
        """Asserts that books and tree agree and that every page can be reached from the use that it belongs to."""
        counts = [0] * len(self.capacities)
        for node in self.tree.nodes():
            counts[node.tier] += 1
            tip = node.use.tips[node.tier]
            assert node.use in self._resident[node.tier]
            assert tip is not None
            assert node in tip.path()
            assert tip.use is node.use
            assert tip.tier == node.tier
        assert counts == self.num_pages

    def _promote(self, stretch: Stretch) -> Move:
        move = Move(stretch.pages[:], stretch.tier, 0)
        self.num_pages[stretch.tier] -= len(stretch.pages)
        self.num_pages[0] += len(stretch.pages)
        stretch.set_tier(0)
        return move

    def _take_over(self, parent: Node, use: Use) -> list[tuple[Use, int]]:
        """A restored use takes over the pages before it that no later use has; whose they were, and to which page."""
        found: list[tuple[Use, int]] = []
        path = self.tree.stretches(parent)
        for stretch in reversed(path):
            # pages of a use that goes on stay its own: it will be the later one
            if stretch.use is use or stretch.use.recalled is not None or stretch.use.time_s > use.time_s:
                break
            if not found or found[-1][0] is not stretch.use:
                found.append((stretch.use, stretch.end))
            stretch.use = use
        self.tree.join(path)
        return found[::-1]

    def _last_page(self, use: Use) -> Node | None:
        """The deepest page of a use, wherever it lies."""
        for tier in reversed(range(len(self.capacities))):
            tip = self._tip(use, tier)
            if tip is not None:
                return tip
        return None

    def _list_path(self, last: Node, now_s: float) -> None:
        """Lists the last page in each tier of the use of a path that ends here."""
        use, tier = last.use, -1
        node: Node | None = last
        while node is not None and node.parent is not None and node.use is use:
            if node.tier != tier:
                tier = node.tier
                self._list(node, tier, now_s)
            node = node.stretch.node(node.stretch.start)

    def _tip(self, use: Use, tier: int) -> Node | None:
        """The deepest page of a use in a tier; a use that has none there any more is no longer listed."""
        tip = use.tips[tier]
        if tip is not None:
            stretch = tip.stretch
            if stretch.use is use and stretch.tier == tier and stretch.parent is not None:
                return tip
        use.tips[tier] = None
        self._resident[tier].pop(use, None)
        return None

    def _rank(self, tier: int, now_s: float) -> None:
        """Puts the pages of a tier that may leave it in order."""
        tips = [self._tip(use, tier) for use in list(self._resident[tier])]
        free = [tip for tip in tips if tip is not None and tip.may_leave]
        uses: list[Use] = [tip.use for tip in free]
        worths = self.rule.worths(free, tier, now_s).tolist() if free else []
        heap = [(worth, use.serial, tip.depth_pages, use) for worth, use, tip in zip(worths, uses, free, strict=True)]
        heapq.heapify(heap)
        self._heaps[tier], self._left[tier] = heap, 0
        asked = [use.standing for use in uses if use.standing is not DEFAULT_STANDING]
        self._due_s[tier] = min((standing.changes_s(now_s) for standing in asked), default=math.inf)

    def _list(self, tip: Node, tier: int, now_s: float) -> None:
        """A page became the deepest of its use in a tier, or is free to leave it now."""
        use: Use = tip.use
        use.tips[tier] = tip
        self._resident[tier][use] = None
        worth = self.rule.worth(tip, tier, now_s)
        heapq.heappush(self._heaps[tier], (worth, use.serial, tip.depth_pages, use))
        if use.standing is not DEFAULT_STANDING:
            self._due_s[tier] = min(self._due_s[tier], use.standing.changes_s(now_s))
        if len(self._heaps[tier]) > self._most_listed[tier]:
            self._tidy(tier)

    def _tidy(self, tier: int) -> None:
        """Drops what is outdated: where nothing ever has to leave, no ranking does."""
        for use in list(self._resident[tier]):
            self._tip(use, tier)
        heap = []
        for entry in self._heaps[tier]:
            tip = self._tip(entry[3], tier)
            if tip is not None and tip.depth_pages == entry[2]:
                heap.append(entry)
        heapq.heapify(heap)
        self._heaps[tier], self._most_listed[tier] = heap, 2 * len(heap) + FEW_LISTED

    def _shrink(self, tier: int, now_s: float, moves: list[Move]) -> None:
        floor = self._admission(tier + 1, now_s)
        while self.num_pages[tier] > self.capacities[tier]:
            cheapest = self.cheapest(tier, now_s)
            if cheapest is None:
                return
            tip = cheapest[0]
            admitted = floor < math.inf and self.rule.worth(tip, tier + 1, now_s) > floor
            most = 1 if tip.use.at_last_page(tip) else self.num_pages[tier] - self.capacities[tier]
            self._take(tip, most, admitted, now_s, moves)

    def _take(self, tip: Node, most: int, admitted: bool, now_s: float, moves: list[Move]) -> None:
        """Up to so many pages of one use leave a tier, from the tip on.

        A page that has others behind it in the next tier is never dropped before them.
        """
        use, tier = tip.use, tip.tier
        heap = self._heaps[tier]
        if heap and heap[0][3] is use:
            heapq.heappop(heap)
        num_taken = 0
        while True:
            stretch = tip.stretch
            count = stretch.num_unpinned(most - num_taken)
            parent = stretch.node(stretch.end - count)
            if admitted or stretch.children:
                self._demote(tip, count, moves)
            else:
                moves.append(Move(self.tree.remove_tail(stretch, count, now_s)[::-1], tier, None))
            num_taken += count
            if num_taken == most or parent.use is not use or parent.tier != tier or not parent.may_leave:
                break
            tip = parent
        self.num_pages[tier] -= num_taken
        self._left[tier] += num_taken
        self._reveal(parent, use, tier, now_s)
        below = use.tips[tier + 1] if tier + 1 < len(self.capacities) else None
        if below is not None and use not in self._resident[tier + 1]:
            self._list(below, tier + 1, now_s)

    def _reveal(self, parent: Node, use: Use, tier: int, now_s: float) -> None:
        """The deepest pages of a use have left a tier, down to this page."""
        if parent.use is use and parent.tier == tier and parent.parent is not None:
            use.tips[tier] = parent
        else:
            use.tips[tier] = None
            self._resident[tier].pop(use, None)
        if parent.parent is not None and parent.tier == tier and parent.may_leave:
            self._list(parent, tier, now_s)

    def _demote(self, tip: Node, count: int, moves: list[Move]) -> None:
        use, tier = tip.use, tip.tier
        if self._tip(use, tier + 1) is None:
            use.tips[tier + 1] = tip
        moves.append(Move(self.tree.move_tail(tip.stretch, count, tier + 1)[::-1], tier, tier + 1))
        self.num_pages[tier + 1] += count

    def _admission(self, tier: int, now_s: float) -> float:
        """The worth above which a tier takes a page: any while it has room, then the least that it holds."""
        if tier >= len(self.capacities) or self.capacities[tier] == 0:
            return math.inf
        if self.num_pages[tier] < self.capacities[tier]:
            return -1.0
        cheapest = self.cheapest(tier, now_s)
        if cheapest is None:
            return math.inf
        heapq.heappop(self._heaps[tier])
        self._list(cheapest[0], tier, now_s)  # ranked anew: the next request asks for the least again
        return cheapest[1]


def _found_on(path: Sequence[Stretch]) -> tuple[list[tuple[Use, int]], bool]:
    """The uses that stretches of a path belonged to before those that go on, and whether some page was new to all of them."""
    found: list[tuple[Use, int]] = []
    is_new = False
    for stretch in path:
        recalled = stretch.use.recalled
        for use, end in [(stretch.use, stretch.end)] if recalled is None else recalled:
            if end > stretch.start:
                _add_found(found, use, min(end, stretch.end))
        is_new = is_new or not found or found[-1][1] < stretch.end
    return found, is_new


def _add_found(found: list[tuple[Use, int]], use: Use, end: int) -> None:
    """A path goes on up to a page index with pages of a use."""
    if found and found[-1][0] is use:
        found[-1] = (use, end)
    else:
        found.append((use, end))
