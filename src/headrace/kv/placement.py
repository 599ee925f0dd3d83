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
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace.kv.residency import DEFAULT_STANDING, Rule, Standing, Use
from headrace.kv.tree import Match, Node, PrefixTree

RANK_SHARE = 0.01
"""All that lies in a tier is ranked again when this share of its capacity has left it since: worths change slowly, and
what is new is ranked as it comes."""


class Move(NamedTuple):
    """A page left a tier for another, or for none."""

    page: Any
    from_tier: int
    to_tier: int | None


class Placement:
    """Pages in tiers of `capacities` pages each."""

    def __init__(self, tree: PrefixTree, capacities: Sequence[int], rule: Rule) -> None:
        self.tree, self.capacities, self.rule = tree, tuple(capacities), rule
        self.num_pages = [0] * len(capacities)
        self._resident: list[dict[Use, None]] = [{} for _ in capacities]
        self._heaps: list[list[tuple[float, int, Use]]] = [[] for _ in capacities]  # worth, serial number, use
        self._left = list(capacities)  # pages that left since the tier was ranked

    def record(
        self,
        tokens: Sequence[int],
        match: Match,
        pages: Sequence[Any],
        *,
        num_answer_tokens: int,
        now_s: float,
        standing: Standing = DEFAULT_STANDING,
    ) -> list[Move]:
        """A use of all pages of `tokens` ended: the matched ones are now in tier 0, and `pages` are those behind them.

        Returns the promotions. Tier 0 may be over its capacity until `make_room`.
        """
        use = Use(len(self.capacities))
        use.standing = standing
        found: list[tuple[Use, int]] = []
        moves = []
        last: Use | None = None
        for node in match.nodes:
            if node.use is not last:
                if last is not None:
                    found.append((last, node.depth_pages - 1))
                last = node.use
            node.use = use
            if node.tier:
                moves.append(self._promote(node))
        if last is not None:
            found.append((last, len(match.nodes)))
        end = len(match.nodes)
        for evicted in self.tree.recall(tokens, match):
            end += 1
            if found and found[-1][0] is evicted.use:
                found[-1] = (evicted.use, end)
            else:
                found.append((evicted.use, end))
        node = match.nodes[-1] if match.nodes else self.tree.root
        node = self.tree.insert_path(node, tokens[len(match.nodes) * self.tree.page_tokens :], pages, use)
        self.num_pages[0] += len(pages)
        use.num_pages = node.depth_pages
        self.rule.ended(use, found, num_answer_tokens, now_s)
        if node.parent is not None:
            self._list(node, 0, now_s)
        return moves

    def set_standing(self, last: Node, standing: Standing, now_s: float) -> None:
        """The owner of the path that ends with this page asks for something else; holds until the path's next use."""
        use: Use = last.use
        use.standing = standing
        for tier in range(len(self.capacities)):
            tip = self._tip(use, tier)
            if tip is not None:
                self._list(tip, tier, now_s)

    def make_room(self, now_s: float) -> list[Move]:
        """Takes pages away until every tier holds at most its capacity, or all that is left is pinned."""
        moves: list[Move] = []
        for tier in range(len(self.capacities)):
            if self.num_pages[tier] > self.capacities[tier]:
                self._shrink(tier, now_s, moves)
        return moves

    def check(self) -> None:
        """Asserts that books and tree agree and that every page can be reached from the use that it belongs to."""
        counts = [0] * len(self.capacities)
        stack = list(self.tree.root.children.values())
        while stack:
            node = stack.pop()
            counts[node.tier] += 1
            tip = node.use.tips[node.tier]
            assert node.use in self._resident[node.tier]
            assert tip is not None
            assert node in tip.path()
            stack.extend(node.children.values())
        assert counts == self.num_pages

    def _promote(self, node: Node) -> Move:
        move = Move(node.page, node.tier, 0)
        self.num_pages[node.tier] -= 1
        self.tree.move(node, 0, node.page)
        self.num_pages[0] += 1
        return move

    def _tip(self, use: Use, tier: int) -> Node | None:
        """The deepest page of a use in a tier; a use that has none there any more is no longer listed."""
        tip = use.tips[tier]
        if tip is not None and tip.use is use and tip.tier == tier and tip.parent is not None:
            return tip
        use.tips[tier] = None
        self._resident[tier].pop(use, None)
        return None

    def _rank(self, tier: int, now_s: float) -> None:
        """Puts the pages of a tier that may leave it in order."""
        tips = [self._tip(use, tier) for use in list(self._resident[tier])]
        free = [tip for tip in tips if tip is not None and not tip.num_tier_children and not tip.pins]
        worths = self.rule.worths(free, tier, now_s).tolist() if free else []
        heap = [(worth, tip.use.serial, tip.use) for worth, tip in zip(worths, free, strict=True)]
        heapq.heapify(heap)
        self._heaps[tier], self._left[tier] = heap, 0

    def _list(self, tip: Node, tier: int, now_s: float) -> None:
        """A page became the deepest of its use in a tier, or is free to leave it now."""
        use: Use = tip.use
        use.tips[tier] = tip
        self._resident[tier][use] = None
        heapq.heappush(self._heaps[tier], (float(self.rule.worths([tip], tier, now_s)[0]), use.serial, use))

    def _cheapest(self, tier: int, now_s: float) -> tuple[float, Node] | None:
        """Takes the page of a tier that is worth least off the heap, and gives its worth when it was ranked."""
        ranked = False
        while True:
            if not ranked and (not self._heaps[tier] or self._left[tier] > RANK_SHARE * self.capacities[tier]):
                self._rank(tier, now_s)
                ranked = True
            if not self._heaps[tier]:
                return None
            worth, _, use = heapq.heappop(self._heaps[tier])
            tip = self._tip(use, tier)
            if tip is not None and not tip.num_tier_children and not tip.pins:
                return worth, tip

    def _shrink(self, tier: int, now_s: float, moves: list[Move]) -> None:
        floor = self._admission(tier + 1, now_s)
        while self.num_pages[tier] > self.capacities[tier]:
            cheapest = self._cheapest(tier, now_s)
            if cheapest is None:
                return
            tip = cheapest[1]
            admitted = floor < np.inf and self.rule.worths([tip], tier + 1, now_s)[0] > floor
            self._take(tip, tier, admitted, now_s, moves)

    def _take(self, tip: Node, tier: int, admitted: bool, now_s: float, moves: list[Move]) -> None:
        """Pages of one use leave a tier, from the tip on, until there is room; the last page of a use leaves alone.

        A page that has others behind it in the next tier is never dropped before them.
        """
        use: Use = tip.use
        excess = 1 if use.at_last_page(tip) else self.num_pages[tier] - self.capacities[tier]
        num_taken = 0
        while True:
            parent = tip.parent
            assert parent is not None
            if admitted or tip.children:
                moves.append(self._demote(tip))
            else:
                moves.append(Move(self.tree.remove(tip, now_s), tier, None))
            num_taken += 1
            if num_taken == excess or parent.use is not use or parent.tier != tier or parent.num_tier_children or parent.pins:
                break
            tip = parent
        self.num_pages[tier] -= num_taken
        self._left[tier] += num_taken
        if parent.use is use and parent.tier == tier:
            use.tips[tier] = parent
        else:
            use.tips[tier] = None
            self._resident[tier].pop(use, None)
        if parent.parent is not None and parent.tier == tier and not parent.num_tier_children and not parent.pins:
            self._list(parent, tier, now_s)
        below = use.tips[tier + 1] if tier + 1 < len(self.capacities) else None
        if below is not None and use not in self._resident[tier + 1]:
            self._list(below, tier + 1, now_s)

    def _demote(self, node: Node) -> Move:
        use, tier = node.use, node.tier
        if self._tip(use, tier + 1) is None:
            use.tips[tier + 1] = node
        self.tree.move(node, tier + 1, node.page)
        self.num_pages[tier + 1] += 1
        return Move(node.page, tier, tier + 1)

    def _admission(self, tier: int, now_s: float) -> float:
        """The worth above which a tier takes a page: any while it has room, then the least that it holds."""
        if tier >= len(self.capacities) or self.capacities[tier] == 0:
            return np.inf
        if self.num_pages[tier] < self.capacities[tier]:
            return -1.0
        cheapest = self._cheapest(tier, now_s)
        if cheapest is None:
            return np.inf
        self._list(cheapest[1], tier, now_s)
        return cheapest[0]
