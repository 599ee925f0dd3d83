"""Begins a sequence with what is known of its tokens: shares what is in memory, reads what is on disk, computes the rest.

    pages   0 ... in memory ... | ... on disk .................. | partly known | missing ...
                                  computed -->      <-- read

Pages on disk are read from the last to the first by the mover, while this thread computes from the first on, as long as
that is quicker than waiting; they meet where both together are done soonest. With a quick disk nothing is computed, with a
slow one nothing but the last pages is read. A page that cannot be read is computed, and the reason reported.

Where nothing is gained by computing them, pages are not waited for: they arrive while the next step runs (`arrival.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.engine.arrival import Arrival, should_arrive
from headrace.engine.results import MissReason
from headrace.engine.sequence import Sequence as TokenSequence
from headrace.kernels.page_formats import F16
from headrace.kv.cache import Found, PageCache
from headrace.kv.disk import DiskTier
from headrace.kv.mover import READ_GROUP_PAGES, ReadJob
from headrace.kv.pages import format_of, pages_for
from headrace.kv.tree import Node
from headrace.model.step import PAGE_TOKENS

_MOST_PAGES = 8
"""Pages that are computed at once while others are read."""
_SPARE_PAGES = 2
"""Pages left free beside those of the prompt when memory is short, for the first tokens of the answer."""


@dataclass
class Recalled:
    """What a sequence began with. `compressed_tokens` are those of `memory_tokens` that compressed pages hold.

    `misses` holds (reason, first token, tokens) of what was known and is computed anyway.
    """

    found: Found
    memory_tokens: int = 0
    compressed_tokens: int = 0
    disk_tokens: int = 0
    load_s: float = 0.0
    misses: list[tuple[MissReason, int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens that were known, those that could not be used included."""
        return self.memory_tokens + self.disk_tokens + sum(count for _, _, count in self.misses)


def recall(sequence: TokenSequence, token_ids: Sequence[int], num_more: int, timer: Callable[[], float]) -> Recalled:
    """Fills an empty sequence with the known past of tokens.

    Args:
        sequence: where it goes.
        token_ids: what is wanted; no more than this is recalled.
        num_more: tokens that will be computed next, for which memory must be left.
        timer: seconds that only grow.
    """
    cache = sequence.cache
    found = cache.find(token_ids)
    recalled = Recalled(found)
    sequence.found = found
    handles: list[int | None] = []
    for node in found.nodes[: found.num_near]:
        cache.pool.share(node.page.handle)
        handles.append(node.page.handle)
    cold = found.nodes[found.num_near :]
    start = timer() if cold or (found.partial is not None and found.partial.page.handle is None) else None
    loading = _Loading(sequence, cache, found, recalled)
    handles += loading.take(cold, pages_for(len(token_ids) + num_more) + _SPARE_PAGES)
    partial = loading.take_partial()
    num_whole = len(found.nodes) * PAGE_TOKENS
    on_disk = {number: found.nodes[number] for number, handle in enumerate(handles) if handle is None}
    sequence.adopt(token_ids[:num_whole], handles, on_disk)
    recalled.memory_tokens = found.num_near * PAGE_TOKENS
    recalled.disk_tokens = len(cold) * PAGE_TOKENS
    if sequence.num_tokens < num_whole:
        loading.give_up(len(sequence.pages), partial)
        partial = None
    in_memory = sequence.pages[: recalled.memory_tokens // PAGE_TOKENS]
    recalled.compressed_tokens = PAGE_TOKENS * sum(page is not None and format_of(page) != F16 for page in in_memory)
    late = loading.leave_late(len(token_ids) + num_more - found.num_tokens)
    loading.run(partial)
    if late and cache.disk is not None:
        nodes = [found.nodes[number] for number in late]
        sequence.arrival = Arrival(sequence, cache.disk, late, nodes, recalled, timer)
    if found.unused is not None:
        recalled.misses.append((found.unused[0], found.num_tokens, found.unused[1]))
    if start is not None:
        recalled.load_s = timer() - start
    cache.counters.lookups += 1
    cache.counters.prompt_tokens += len(token_ids) + 1
    cache.counters.memory_tokens += recalled.memory_tokens
    cache.counters.compressed_tokens += recalled.compressed_tokens
    cache.counters.disk_tokens += recalled.disk_tokens
    return recalled


class _Loading:
    """Reads the pages of one past that are on disk."""

    def __init__(self, sequence: TokenSequence, cache: PageCache, found: Found, recalled: Recalled) -> None:
        self._sequence, self._cache, self._found, self._recalled = sequence, cache, found, recalled
        self._numbers: list[int] = []  # pages to read, the first first
        self._partial = found.partial

    def take(self, cold: list[Node], num_needed: int) -> list[int | None]:
        """Memory for pages on disk: None for those that have to stay there, the first of them."""
        if not cold:
            return []
        cache, disk = self._cache, self._cache.disk
        assert disk is not None
        first = self._found.num_near
        fresh = num_needed - len(self._found.nodes)
        # pages of the past go before those of the answer, but the prompt's own must find room
        spare = max(0, cache.num_room() - max(0, fresh))
        stay = max(0, len(cold) - spare)
        while stay < len(cold):  # reading pages anew for each step takes memory, too
            staging = -(-self._sequence.staging_bytes(stay) // cache.pool.format_bytes[F16])
            if len(cold) - stay + staging <= spare:
                break
            stay += 1
        handles: list[int | None] = [None] * stay
        handles += [cache.allocate(disk.format_of(node.page.place)) for node in cold[stay:]]
        self._numbers = [first + at for at, handle in enumerate(handles) if handle is not None]
        return handles

    def take_partial(self) -> int | None:
        """A page of its own for the part of a page that is known: copied if it is in memory."""
        node, cache = self._partial, self._cache
        if node is None:
            return None
        known: int | None = node.page.handle
        if known is not None:
            cache.pool.share(known)  # making room must not compress it
        handle = cache.allocate()
        if known is not None:
            if handle is not None:
                cache.pool.view(handle)[:] = cache.pool.view(known)
            cache.pool.release(known)
        return handle

    def give_up(self, num_pages: int, partial: int | None) -> None:
        """Memory had no room for what comes behind so many pages: it is computed, where there may be room for less."""
        found, recalled = self._found, self._recalled
        if partial is not None:
            self._cache.pool.release(partial)
        self._partial = None
        self._numbers = [number for number in self._numbers if number < num_pages]
        near = min(num_pages, found.num_near)
        recalled.memory_tokens, recalled.disk_tokens = near * PAGE_TOKENS, (num_pages - near) * PAGE_TOKENS
        recalled.misses.append(("no_room", num_pages * PAGE_TOKENS, found.num_tokens - num_pages * PAGE_TOKENS))

    def leave_late(self, num_new: int) -> list[int]:
        """The pages that are best read while the next step runs, which has `num_new` tokens: `run` does not read them."""
        late = self._numbers
        if not late or self._sequence.cold:
            return []
        page = self._sequence.pages[late[0]]
        assert page is not None
        page_bytes = self._cache.pool.format_bytes[format_of(page)]
        if not should_arrive(self._cache.prices, late, page_bytes, num_new, self._found.num_tokens):
            return []
        self._numbers = []
        return late

    def run(self, partial: int | None) -> None:
        """Reads, and computes meanwhile; then the sequence has all that was found, and the tree what was read."""
        sequence, cache, disk = self._sequence, self._cache, self._cache.disk
        node = self._partial
        reads_partial = node is not None and partial is not None and node.page.handle is None
        failure: MissReason | None = None if partial is not None else "no_room"
        if reads_partial and disk is not None and self._is_computed_sooner(disk):
            cache.pool.release(partial)  # type: ignore[arg-type]
            partial, reads_partial, failure = None, False, "recompute_is_quicker"
        if disk is not None and (self._numbers or reads_partial):
            numbers = self._numbers[::-1]
            nodes = [self._found.nodes[number] for number in numbers]
            pages = [sequence.pages[number] for number in numbers]
            if reads_partial:
                nodes, pages = [node, *nodes], [partial, *pages]  # type: ignore[list-item]
            places = [each.page.place for each in nodes]
            views = [cache.pool.view(page) for page in pages if page is not None]
            job = disk.mover.read(places, views, end=int(reads_partial) + self._num_read(disk))
            try:
                failed = self._meet(job, int(reads_partial), disk)
            except BaseException:
                disk.mover.abandon(job)  # whoever ends the sequence frees what is being read into
                if partial is not None:
                    cache.pool.release(partial)
                sequence.truncate(0)  # nobody may take what was not read for what it should be
                raise
            cache.prices.read(job.num_bytes, job.seconds)
            cache.counters.read_bytes += job.num_bytes
            self._book(failed, disk)
            if reads_partial:
                failure = job.outcomes[0]
            if failure is not None and node is not None and partial is not None:
                cache.pool.release(partial)
                if failure == "gone":  # what is damaged can be put right by whoever computes all of it
                    disk.lost(node, cache.now_s())
        if node is not None:
            self._add_partial(partial, failure, from_disk=reads_partial)

    def _meet(self, job: ReadJob, offset: int, disk: DiskTier) -> list[int]:
        """Waits for the pages in their order, computing from the front; the numbers of those that could not be read."""
        numbers, failed = self._numbers, []
        at, computed, intact = 0, 0, True
        while at < len(numbers):
            position = offset + len(numbers) - 1 - at  # of this page in the job
            if position in job.outcomes:
                failure = job.outcomes[position]
                if failure is not None:
                    intact = intact and self._compute(at, 1)
                    failed.append(numbers[at])
                    self._recalled.misses.append((failure, numbers[at] * PAGE_TOKENS, PAGE_TOKENS))
                at += 1
                continue
            never_read = max(0, position + 1 - job.end)
            count = min(never_read, _MOST_PAGES) or self._worth_computing(job, at)
            if never_read or (count and disk.mover.cut(job, count)):
                self._compute(at, count)
                self._recalled.misses.append(("recompute_is_quicker", numbers[at] * PAGE_TOKENS, count * PAGE_TOKENS))
                at, computed = at + count, computed + count
            else:
                disk.mover.wait_read(job, len(job.outcomes))
        if offset:
            disk.mover.wait_read(job, 0)
        self._recalled.disk_tokens -= PAGE_TOKENS * (len(failed) + computed)
        return failed

    def _num_read(self, disk: DiskTier) -> int:
        """Pages, the last ones, that are begun to be read: all, or those few that are there before the others are computed.

        What the mover has begun cannot be taken back, and it begins with READ_GROUP_PAGES at once.
        """
        numbers, prices = self._numbers, self._cache.prices
        if numbers and not self._sequence.cold:
            read_s = self._read_s(self._found.nodes[numbers[0]], disk)
            for count in range(min(len(numbers), READ_GROUP_PAGES)):
                compute_s = prices.compute_s((len(numbers) - count) * PAGE_TOKENS, numbers[0] * PAGE_TOKENS)
                if read_s is not None and compute_s is not None and compute_s <= (count + 1) * read_s:
                    return count
        return len(numbers)

    def _is_computed_sooner(self, disk: DiskTier) -> bool:
        """Whether computing the known part of the last page takes less than reading that page."""
        found = self._found
        assert found.partial is not None
        read_s = self._read_s(found.partial, disk)
        compute_s = self._cache.prices.compute_s(found.partial_tokens, len(found.nodes) * PAGE_TOKENS)
        return read_s is not None and compute_s is not None and compute_s < read_s

    def _read_s(self, node: Node, disk: DiskTier) -> float | None:
        return self._cache.prices.read_s(self._cache.pool.format_bytes[disk.format_of(node.page.place)])

    def _worth_computing(self, job: ReadJob, at: int) -> int:
        """Pages from the front on that are computed sooner than those behind them are read; 0 if waiting is quicker."""
        numbers, prices = self._numbers, self._cache.prices
        first = numbers[at]
        read_s = prices.read_s(len(job.targets[0]))
        if self._sequence.cold or read_s is None:
            return 0
        left = job.end - len(job.outcomes)
        count = min(_MOST_PAGES, len(numbers) - at, left)
        while count:
            compute_s = prices.compute_s(count * PAGE_TOKENS, first * PAGE_TOKENS)
            if compute_s is not None and compute_s <= (left - count) * read_s:
                return count
            if compute_s is not None and count == left == 1 and compute_s < read_s:
                return 1
            count //= 2
        return 0

    def _compute(self, at: int, count: int) -> bool:
        """Computes pages; False if all others that cannot be read were computed with them."""
        first = self._numbers[at]
        tokens = self._sequence.token_ids[first * PAGE_TOKENS : (first + count) * PAGE_TOKENS]
        return self._sequence.compute_pages(first, count, tokens)

    def _book(self, failed: list[int], disk: DiskTier) -> None:
        """What is in memory now is so for the tree, too; pages that could not be read are put right on disk."""
        sequence, nodes = self._sequence, self._found.nodes
        for number in self._numbers:
            page = sequence.pages[number]
            if page is not None:  # it is on disk again if all was computed anew, for a page that got lost meanwhile
                self._cache.promote(nodes[number], page)
        for number in failed:
            page = sequence.pages[number]
            if nodes[number].page.place is not None and page is not None:
                disk.repair(nodes[number], self._cache.pool.view(page), self._cache.now_s())

    def _add_partial(self, partial: int | None, failure: MissReason | None, *, from_disk: bool) -> None:
        sequence, found = self._sequence, self._found
        start = len(found.nodes) * PAGE_TOKENS
        if partial is None or failure is not None:
            self._recalled.misses.append((failure or "no_room", start, found.partial_tokens))
            return
        sequence.token_ids += found.tokens[start : start + found.partial_tokens]
        sequence.pages.append(partial)
        sequence.readdress()
        if from_disk:
            self._recalled.disk_tokens += found.partial_tokens
        else:
            self._recalled.memory_tokens += found.partial_tokens
