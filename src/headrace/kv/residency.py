"""Which pages stay near: what a page is worth where it lies.

    worth = expected reuse per second (`reuse.py`) x seconds that keeping it saves x priority, per byte

What is saved by keeping a page in its tier is what it costs to need it from one tier below, or to compute it again where
there is none, less what it costs from here. Pages of one use share all but their place, so the rule ranks uses, and pages
leave a tier from the tips of their paths on (`placement.py`).

Pure: facts in, worth out; the time is the caller's. Simulator and engine use this one rule with the same settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.kv.reuse import LAST_PAGE_CELL, ReuseModel, UseFacts
from headrace.kv.tree import Node

CONTINUED_SHARE = 0.8
"""A use counts as continued if this share of its pages but the last is found again; less is a shared beginning."""
SOON_S = 1.0
"""A hint for a time that is this near, or just past, counts as this near."""


@dataclass(frozen=True)
class Standing:
    """What the owner of a past asks for. Times are on the caller's clock.

    A pinned past leaves after all others; after `expires_s` it is worth nothing; at about `soon_s` it will be needed, which
    holds until twice the time that the hint was ahead.
    """

    priority: float = 1.0
    pinned: bool = False
    expires_s: float = math.inf
    hinted_s: float = 0.0
    soon_s: float | None = None

    def changes_s(self, now_s: float) -> float:
        """When it asks for something else than it does now, or for much more; infinite if never."""
        if self.pinned or now_s >= self.expires_s:
            return math.inf
        if self.soon_s is None or now_s > self.soon_until_s:
            return self.expires_s
        ahead_s = self.soon_s - now_s
        # past the end: a hint holds until its end, and that moment included
        next_s = now_s + ahead_s / 2 if ahead_s > SOON_S else math.nextafter(self.soon_until_s, math.inf)
        return min(next_s, self.expires_s)

    @property
    def soon_until_s(self) -> float:
        """The last moment at which a hint holds; minus infinity without one."""
        return -math.inf if self.soon_s is None else self.soon_s + max(SOON_S, self.soon_s - self.hinted_s)


DEFAULT_STANDING = Standing()


@dataclass(frozen=True)
class Prices:
    """Measured costs of a page: seconds to fetch it from each tier, seconds to compute it again on top of its past."""

    fetch_s: tuple[float, ...] = (0.0,)
    compute_s: float = 1.0
    compute_s_per_past_page: float = 0.0
    page_bytes: tuple[int, ...] = (1,)

    def saved_s(self, tier: int, past_pages: float) -> float:
        """Seconds that a page in this tier saves over one in the next, or over none. Never fetched dearer than computed."""
        compute_s = self.compute_s + self.compute_s_per_past_page * past_pages
        here_s = min(self.fetch_s[tier], compute_s)
        below_s = min(self.fetch_s[tier + 1], compute_s) if tier + 1 < len(self.fetch_s) else compute_s
        return max(0.0, below_s - here_s)


class Use:
    """One request's use of a path of pages, as far as no later use took them over.

    While its request lives, `recalled` lists what the pages that it has added were known as before, as `Found` does; it is
    None once the use has ended. `num_before` counts the pages that were known when it added its first.
    """

    __slots__ = (
        "cell",
        "known_pages",
        "num_answer_tokens",
        "num_before",
        "num_pages",
        "recalled",
        "repeats",
        "serial",
        "standing",
        "time_s",
        "tips",
        "turn",
    )

    def __init__(self, num_tiers: int) -> None:
        self.serial = self.cell = 0
        self.time_s = 0.0
        self.num_pages = self.known_pages = self.num_answer_tokens = 0
        self.turn, self.repeats = 1, 0
        self.standing = DEFAULT_STANDING
        self.num_before = 0
        self.recalled: list[tuple[Use, int]] | None = None
        self.tips: list[Node | None] = [None] * num_tiers
        """Its deepest page in each tier; outdated once that page belongs to a later use."""

    def at_last_page(self, node: Node) -> bool:
        """Whether a page is the use's last, and not its only one."""
        return 1 < self.num_pages == node.depth_pages


Found = Sequence[tuple[Use, int]]
"""Stretches of a path by the use they belonged to, each with the page index where it ends, pages that were evicted but are
remembered included."""


class Rule(Protocol):
    """Ranks uses. `Residency` is the rule; `LeastRecent` is what it is compared with."""

    def begun(self, use: Use, found: Found) -> None:
        """A use goes on that has added pages already, and will take over those that were found. Nothing is counted yet."""

    def ended(self, use: Use, found: Found) -> None:
        """A use of `use.num_pages` pages ended at `use.time_s`, which took over those that were found."""

    def restored(self, use: Use, found: Found, facts: Mapping[str, int]) -> None:
        """The same of a use that ended before this run and is known again, with those of its facts that were kept."""

    def worth(self, page: Node, tier: int, now_s: float) -> float:
        """What a page would be worth in a tier now."""

    def worths(self, pages: Sequence[Node], tier: int, now_s: float) -> npt.NDArray[np.float64]:
        """The same of many: float64 [pages]."""


class LeastRecent:
    """Least recently used first."""

    def __init__(self) -> None:
        self._num_uses = 0

    def begun(self, use: Use, found: Found) -> None:
        """Nothing: what lives is older than all that has ended, and held."""

    def ended(self, use: Use, found: Found) -> None:  # noqa: ARG002 # as the protocol has it
        """Numbers the use."""
        self._num_uses += 1
        use.serial = self._num_uses

    def restored(self, use: Use, found: Found, facts: Mapping[str, int]) -> None:  # noqa: ARG002
        """Numbers the use: the order of the calls is the order of the times."""
        self.ended(use, found)

    def worth(self, page: Node, tier: int, now_s: float) -> float:  # noqa: ARG002
        """The order of the pages' uses."""
        return float(page.use.serial)

    def worths(self, pages: Sequence[Node], tier: int, now_s: float) -> npt.NDArray[np.float64]:  # noqa: ARG002
        """The same of many."""
        return np.array([page.use.serial for page in pages], np.float64)


class Residency:
    """The rule. Learns from every use, so it needs them all, whatever is kept.

    `prices` may be replaced at any time: worths are computed from them each time they are asked for.
    """

    def __init__(self, prices: Prices | None = None) -> None:
        self.prices = prices or Prices()
        self.reuse = ReuseModel()

    def ended(self, use: Use, found: Found) -> None:
        """Tells the model which uses were continued, and the facts of this one."""
        use.known_pages, use.turn, use.repeats = self._continue(found, use.time_s)
        use.serial, use.cell = self.reuse.add(_facts(use), use.time_s)

    def begun(self, use: Use, found: Found) -> None:
        """Puts the use where it would be if it ended now."""
        use.known_pages, use.turn, use.repeats = _continues(found)
        use.cell = self.reuse.cell(_facts(use))

    def restored(self, use: Use, found: Found, facts: Mapping[str, int]) -> None:
        """As if the use had ended then; facts that were not kept are what can be told from the pages."""
        known_pages, turn, repeats = self._continue(found, use.time_s)
        use.known_pages = min(max(0, facts.get("known_pages", known_pages)), use.num_pages)
        use.turn, use.repeats = max(1, facts.get("turn", turn)), max(0, facts.get("repeats", repeats))
        use.serial, use.cell = self.reuse.add(_facts(use), use.time_s)

    def _continue(self, found: Found, now_s: float) -> tuple[int, int, int]:
        """Counts which of the uses found are hereby continued; pages known, turn and repeats of who continues them."""
        for before, end in found:
            if _is_continued(before, end):
                self.reuse.continued(before.serial, now_s, last_page=False)
            if end >= before.num_pages > 1:
                self.reuse.continued(before.serial, now_s, last_page=True)
        return _continues(found)

    def chance(self, page: Node, now_s: float) -> float:
        """Probability that a page is used again from now on; 1 for what is pinned or will be needed soon, 0 once expired."""
        use: Use = page.use
        if use.standing.pinned:
            return 1.0
        if now_s >= use.standing.expires_s:
            return 0.0
        if now_s <= use.standing.soon_until_s:
            return 1.0
        return self.reuse.chance(LAST_PAGE_CELL if use.at_last_page(page) else use.cell, now_s - use.time_s)

    def worth(self, page: Node, tier: int, now_s: float) -> float:
        """Seconds saved per second and byte, times priority; infinite for what is pinned."""
        use: Use = page.use
        rate = self.reuse.rate(LAST_PAGE_CELL if use.at_last_page(page) else use.cell, now_s - use.time_s)
        worth = rate * self.prices.saved_s(tier, page.depth_pages - 1) / self.prices.page_bytes[tier]
        return worth if use.standing is DEFAULT_STANDING else self._asked(use.standing, page, worth, tier, now_s)

    def worths(self, pages: Sequence[Node], tier: int, now_s: float) -> npt.NDArray[np.float64]:
        """The same of many."""
        uses: list[Use] = [page.use for page in pages]
        cells = [
            LAST_PAGE_CELL if 1 < use.num_pages == page.depth_pages else use.cell for use, page in zip(uses, pages, strict=True)
        ]
        times_s = np.array([use.time_s for use in uses], np.float64)
        worths = self.reuse.rates(np.array(cells, np.int64), now_s - times_s)
        prices = self.prices
        if prices.compute_s_per_past_page:
            worths *= [prices.saved_s(tier, page.depth_pages - 1) for page in pages]
        else:
            worths *= prices.saved_s(tier, 0)
        worths /= prices.page_bytes[tier]
        for index, use in enumerate(uses):
            if use.standing is not DEFAULT_STANDING:
                worths[index] = self._asked(use.standing, pages[index], float(worths[index]), tier, now_s)
        return worths

    def _asked(self, standing: Standing, page: Node, worth: float, tier: int, now_s: float) -> float:
        """A worth, as the owner's wishes change it."""
        if standing.pinned:
            return math.inf
        if now_s >= standing.expires_s:
            return 0.0
        soon_s = standing.soon_s
        if soon_s is not None and now_s <= standing.soon_until_s:
            saved_s = self.prices.saved_s(tier, page.depth_pages - 1) / self.prices.page_bytes[tier]
            worth = max(worth, saved_s / max(soon_s - now_s, SOON_S))
        return worth * standing.priority


def _is_continued(before: Use, end: int) -> bool:
    """Whether a use is continued by one that found it up to a page index."""
    few = before.num_pages <= 2
    return end >= before.num_pages or (not few and end >= CONTINUED_SHARE * (before.num_pages - 1))


def _continues(found: Found) -> tuple[int, int, int]:
    """Pages known, turn and repeats of a use that found these."""
    known_pages, turn, before = 0, 1, None
    for before, end in found:
        if _is_continued(before, end):
            turn = before.turn + 1
        known_pages = end
    repeats = before.repeats + 1 if before is not None and turn > 1 and before.known_pages == known_pages else 0
    return known_pages, turn, repeats


def _facts(use: Use) -> UseFacts:
    return UseFacts(use.turn, use.num_pages - use.known_pages, use.known_pages, use.num_answer_tokens, use.repeats)
