"""Which pages stay near: what a page is worth where it lies.

    worth = expected reuse per second (`reuse.py`) x seconds that keeping it saves x priority, per byte

What is saved by keeping a page in its tier is what it costs to need it from one tier below, or to compute it again where
there is none, less what it costs from here. Pages of one use share all but their place, so the rule ranks uses, and pages
leave a tier from the tips of their paths on (`placement.py`).

Pure: facts in, worth out; the time is the caller's. Simulator and engine use this one rule with the same settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """One request's use of a path of pages, as far as no later use took them over."""

    __slots__ = ("cell", "known_pages", "num_pages", "repeats", "serial", "standing", "time_s", "tips", "turn")

    def __init__(self, num_tiers: int) -> None:
        self.serial = self.cell = 0
        self.time_s = 0.0
        self.num_pages = self.known_pages = 0
        self.turn, self.repeats = 1, 0
        self.standing = DEFAULT_STANDING
        self.tips: list[Node | None] = [None] * num_tiers
        """Its deepest page in each tier; outdated once that page belongs to a later use."""

    def at_last_page(self, node: Node) -> bool:
        """Whether a page is the use's last, and not its only one."""
        return 1 < self.num_pages == node.depth_pages


class Rule(Protocol):
    """Ranks uses. `Residency` is the rule; `LeastRecent` is what it is compared with."""

    def ended(self, use: Use, found: Sequence[tuple[Use, int]], num_answer_tokens: int, now_s: float) -> None:
        """A use of `use.num_pages` pages ended, which took over pages of earlier uses.

        `found` are the stretches of the path by the use they belonged to, each with the page index where it ends, pages
        that were evicted but are remembered included.
        """

    def worths(self, pages: Sequence[Node], tier: int, now_s: float) -> npt.NDArray[np.float64]:
        """What each page would be worth in a tier now: float64 [pages]."""


class LeastRecent:
    """Least recently used first."""

    def __init__(self) -> None:
        self._num_uses = 0

    def ended(
        self,
        use: Use,
        found: Sequence[tuple[Use, int]],  # noqa: ARG002 # as the protocol has it
        num_answer_tokens: int,  # noqa: ARG002
        now_s: float,  # noqa: ARG002
    ) -> None:
        """Numbers the use."""
        self._num_uses += 1
        use.serial = self._num_uses

    def worths(self, pages: Sequence[Node], tier: int, now_s: float) -> npt.NDArray[np.float64]:  # noqa: ARG002
        """The order of the pages' uses."""
        return np.array([page.use.serial for page in pages], np.float64)


class Residency:
    """The rule. Learns from every use, so it needs them all, whatever is kept."""

    def __init__(self, prices: Prices | None = None) -> None:
        self.prices = prices or Prices()
        self.reuse = ReuseModel()

    def ended(self, use: Use, found: Sequence[tuple[Use, int]], num_answer_tokens: int, now_s: float) -> None:
        """Tells the model which uses were continued, and the facts of this one."""
        known_pages, turn, before = 0, 1, None
        for before, end in found:
            whole = end >= before.num_pages
            if whole or (before.num_pages > 2 and end >= CONTINUED_SHARE * (before.num_pages - 1)):
                self.reuse.continued(before.serial, now_s, last_page=False)
                turn = before.turn + 1
            if whole and before.num_pages > 1:
                self.reuse.continued(before.serial, now_s, last_page=True)
            known_pages = end
        repeats = before.repeats + 1 if before is not None and turn > 1 and before.known_pages == known_pages else 0
        use.known_pages, use.turn, use.repeats, use.time_s = known_pages, turn, repeats, now_s
        facts = UseFacts(turn, use.num_pages - known_pages, known_pages, num_answer_tokens, repeats)
        use.serial, use.cell = self.reuse.add(facts, now_s)

    def worths(self, pages: Sequence[Node], tier: int, now_s: float) -> npt.NDArray[np.float64]:
        """Seconds saved per second and byte, times priority; infinite for what is pinned."""
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
        if soon_s is not None and now_s <= soon_s + max(SOON_S, soon_s - standing.hinted_s):
            saved_s = self.prices.saved_s(tier, page.depth_pages - 1) / self.prices.page_bytes[tier]
            worth = max(worth, saved_s / max(soon_s - now_s, SOON_S))
        return worth * standing.priority
