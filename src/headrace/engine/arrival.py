"""Pages of a known past that are read while the first step on top of them runs already.

The step needs layer 0 of all pages first, and the last layer last, so pages are read in bands of layers, each straight to
where it belongs, and every attention waits for its band:

    disk   [layers 0-9 of all pages][layers 10-19          ][layers 20-29          ]
    team                            [step up to layer 9    ][up to layer 19        ][up to the end]

Page tables are right from the start. A page that cannot be read ends the step, is computed, and the step repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.engine.streaming import PageLostError
from headrace.kv.disk import DiskTier
from headrace.kv.prices import PriceBook
from headrace.kv.tree import Node
from headrace.model.step import MAX_STEP_TOKENS, PAGE_TOKENS

if TYPE_CHECKING:
    from headrace.engine.recall import Recalled
    from headrace.engine.sequence import Sequence as TokenSequence

FEWEST_PAGES = 8
"""Fewer are read before a step could be cut into pieces."""
NUM_BANDS = 3
"""With fewer, less is computed meanwhile; with more, a disk has to gather too small pieces."""


class Arrival:
    """Pages of a sequence that are on their way into it. Whoever needs the sequence for more than a step ends it first."""

    def __init__(
        self,
        sequence: TokenSequence,
        disk: DiskTier,
        numbers: Sequence[int],
        nodes: Sequence[Node],
        recalled: Recalled,
        timer: Callable[[], float],
    ) -> None:
        """Begins to read.

        Args:
            sequence: has memory for the pages already.
            disk: where they are.
            numbers: their places in the sequence, ascending.
            nodes: what the tree has of each.
            recalled: is told of waiting, and of pages that could not be read.
            timer: seconds that only grow.
        """
        self._sequence, self._disk, self._numbers, self._nodes = sequence, disk, numbers, nodes
        self._recalled, self._timer = recalled, timer
        pool = sequence.cache.pool
        pages = [sequence.pages[number] for number in numbers]
        views = [pool.view(page) for page in pages if page is not None]
        assert len(views) == len(numbers), "pages arrive in memory"
        self._job = disk.mover.read_layers([node.page.place for node in nodes], views, NUM_BANDS)

    def wait_for(self, layer: int) -> None:
        """Waits until a layer of all pages is there.

        Raises:
            PageLostError: a page cannot be read.
        """
        self._wait(layer)
        if self._job.failures:
            at, failure = min(self._job.failures.items())
            raise PageLostError(self._numbers[at], failure)

    def end(self) -> None:
        """Waits for everything; pages that could not be read are computed. The tree knows them all then."""
        job, cache, disk = self._job, self._sequence.cache, self._disk
        self._wait(job.num_layers - 1)
        cache.prices.read(job.num_bytes, job.seconds)
        cache.counters.read_bytes += job.num_bytes
        lost = PAGE_TOKENS * len(job.failures)
        self._recalled.disk_tokens -= lost
        cache.counters.disk_tokens -= lost
        for at, failure in sorted(job.failures.items()):
            first = self._numbers[at] * PAGE_TOKENS
            self._recalled.misses.append((failure, first, PAGE_TOKENS))
            self._sequence.compute_pages(self._numbers[at], 1, self._sequence.token_ids[first : first + PAGE_TOKENS])
        for at, (number, node) in enumerate(zip(self._numbers, self._nodes, strict=True)):
            page = self._sequence.pages[number]
            assert page is not None
            cache.promote(node, page)
            if at in job.failures:
                disk.repair(node, cache.pool.view(page), cache.now_s())

    def abandon(self) -> None:
        """Reads no more; when it returns, the pages may be freed."""
        self._disk.mover.abandon(self._job)

    def _wait(self, layer: int) -> None:
        start = self._timer()
        self._disk.mover.wait_layer(self._job, layer)
        self._recalled.load_s += self._timer() - start


def should_arrive(prices: PriceBook, numbers: Sequence[int], page_bytes: int, num_new: int, past_tokens: int) -> bool:
    """Whether pages are better read while the next step runs than before it, with the first ones computed meanwhile.

    Args:
        prices: what is measured here; without it, reading is taken to be quick.
        numbers: places of consecutive pages.
        page_bytes: bytes of each.
        num_new: tokens to be computed on top of them.
        past_tokens: tokens before those.
    """
    count = len(numbers)
    if count < FEWEST_PAGES:
        return False
    read_s = prices.read_s(page_bytes)
    step_s = prices.compute_s(min(num_new, MAX_STEP_TOKENS), past_tokens)
    if read_s is None or step_s is None:
        return True
    computed, most = 0, count  # pages that would be computed by the time the others are read
    while computed < most:
        middle = (computed + most + 1) // 2
        compute_s = prices.compute_s(middle * PAGE_TOKENS, numbers[0] * PAGE_TOKENS)
        if compute_s is not None and compute_s <= (count - middle) * read_s:
            computed = middle
        else:
            most = middle - 1
    # the first band of layers is waited for; what is computed from then on takes no time of its own
    return computed * read_s <= (1 - 1 / NUM_BANDS) * step_s
