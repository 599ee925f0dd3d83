"""What a sequence does when memory cannot hold its past: its oldest pages stay on disk, and are read by each step.

    pages    [disk][disk][disk] ... [memory][memory] ... [being written]

The pages are written into the store as those of a request that ended are, so nothing is written twice, and a later turn
finds them. Which pages are on disk does not matter for speed, since every step reads them all; the oldest are taken, as
layers with a window never look at them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.engine.batch import ColdPages
from headrace.engine.streaming import StreamRunner
from headrace.kernels.page_formats import F16
from headrace.kv.cache import PageCache
from headrace.kv.pages import format_of
from headrace.kv.runs import Place
from headrace.kv.tree import Node
from headrace.model.step import PAGE_TOKENS

if TYPE_CHECKING:
    from headrace.engine.sequence import Sequence

_SPILLED_SHARE = 8
"""One in so many pages leaves at a time, so that not every page that is needed causes a move."""


class _ColdReader:
    """Reads slices of the layers of pages that lie on disk: `nodes` in their order."""

    def __init__(self, cache: PageCache, nodes: list[Node]) -> None:
        assert cache.disk is not None
        self._store = cache.disk.store
        self._places: list[Place | None] = [node.page.place for node in nodes]
        self.formats = np.array([F16 if place is None else cache.disk.format_of(place) for place in self._places], np.int64)

    def expect_layer(self, layer: int, first: int) -> None:
        """Has the disk begin to read a layer of all pages from one on."""
        self._store.prefetch_layer([place for place in self._places[first:] if place is not None], layer)

    def read_layer(self, layer: int, number: int, target: npt.NDArray[np.uint8]) -> str | None:
        """Reads one layer of a page; why it could not be read, or None."""
        place = self._places[number]
        return "gone" if place is None else self._store.read_layer(place, layer, target)


class Spill:
    """The part of one sequence that is on disk only."""

    def __init__(self, sequence: Sequence, runner: StreamRunner) -> None:
        self._sequence, self._runner = sequence, runner
        self._reserved_bytes = 0
        self._cold: ColdPages | None = None

    @property
    def is_possible(self) -> bool:
        """Whether a sequence can be longer than memory."""
        cache = self._sequence.cache
        return cache.disk is not None or len(cache.formats) > 1

    @property
    def refusal(self) -> str:
        """Why the disk did not help, as the end of a sentence; empty if it was not asked."""
        disk = self._sequence.cache.disk
        if disk is None:
            return ", or allow kv_disk"
        return "" if disk.refusal is None else f" (the disk took no pages: {disk.refusal.reason}, {disk.refusal.detail})"

    def cold_pages(self) -> ColdPages:
        """The pages on disk, as a step has them."""
        cold = self._sequence.cold
        if self._cold is None or len(self._cold.indices) != len(cold):
            numbers = sorted(cold)
            reader = _ColdReader(self._sequence.cache, [cold[number] for number in numbers])
            self._cold = ColdPages(np.array(numbers, np.int64), reader, reader.formats)
        return self._cold

    def format_of(self, number: int) -> int:
        """The format code of a page of the sequence."""
        page = self._sequence.pages[number]
        if page is not None:
            return format_of(page)
        disk, node = self._sequence.cache.disk, self._sequence.cold[number]
        return F16 if disk is None or node.page.place is None else disk.format_of(node.page.place)

    def make_room(self, num_pages: int) -> bool:
        """Compresses pages, or leaves them on disk, so that `num_pages` more fit into memory; False if that cannot be done."""
        sequence, cache = self._sequence, self._sequence.cache
        needed_bytes = num_pages * cache.pool.format_bytes[F16]
        if self._compress(needed_bytes):
            return True
        whole = sequence.num_tokens // PAGE_TOKENS
        if cache.disk is None or whole == 0:
            return False
        shared = cache.back(sequence.token_ids[: whole * PAGE_TOKENS], sequence.pages[:whole], sequence.shared)
        sequence.take_shared(shared)
        if shared.last is None:
            return False
        path = shared.last.path()
        near = self._leaving(path, needed_bytes)
        if not near:
            return False
        cache.tree.unpin(shared.last)
        cache.demote_path(path, near[0])
        cache.tree.pin(shared.last)
        for number in near:
            page = sequence.pages[number]
            assert page is not None
            cache.pool.release(page)
            sequence.pages[number], sequence.cold[number] = None, path[number]
        sequence.readdress()
        return self.resize(len(sequence.cold))

    def _leaving(self, path: list[Node], needed_bytes: int) -> list[int]:
        """The oldest pages of a path that make enough room when they leave, and reading them has its own; none if none do."""
        sequence, cache = self._sequence, self._sequence.cache
        sizes = cache.pool.format_bytes
        near: list[int] = []
        more = len(sequence.pages) // _SPILLED_SHARE * sizes[F16]
        freed = missing = 0
        for number in range(self._num_held(path), len(path)):
            page, copy = sequence.pages[number], path[number].page
            missing = needed_bytes + self.staging_bytes(len(sequence.cold) + len(near)) - self._reserved_bytes - freed
            if missing + more <= 0:
                break
            if page is not None and copy.place is not None and cache.pool.owners(page) == 1 + (copy.handle == page):
                near.append(number)
                freed += sizes[format_of(page)]
                missing = needed_bytes + self.staging_bytes(len(sequence.cold) + len(near)) - self._reserved_bytes - freed
        return near if missing <= 0 else []

    def _num_held(self, path: list[Node]) -> int:
        """Pages at the beginning of a path that others hold, themselves or by one behind them, and so keep in memory.

        The sequence itself holds the last one.
        """
        behind: Node | None = None
        is_held = self._sequence.cache.tree.is_held
        for node in reversed(path):
            if node.pins > (node is path[-1]) or any(is_held(each) for each in node.children.values() if each is not behind):
                return node.depth_pages
            behind = node
        return 0

    def _compress(self, needed_bytes: int) -> bool:
        """Makes the oldest whole pages smaller, one format further, as far as formats allow it and nobody else reads them."""
        sequence, cache = self._sequence, self._sequence.cache
        nodes = sequence.known_nodes()
        changed = False
        for page_format in cache.formats[1:]:
            for number, page in enumerate(sequence.pages[: sequence.num_tokens // PAGE_TOKENS]):
                if cache.pool.free_bytes >= needed_bytes:
                    break
                if page is None or cache.compressor.next_format(format_of(page)) != page_format:
                    continue
                smaller = cache.compressor.shrink(page, page_format, nodes[number] if number < len(nodes) else None)
                changed = changed or smaller != page
                sequence.pages[number] = smaller
        if changed:
            sequence.readdress()
        return cache.pool.free_bytes >= needed_bytes

    def resize(self, num_cold: int) -> bool:
        """Counts the buffers that steps with so many pages on disk need."""
        cache = self._sequence.cache
        wanted = self.staging_bytes(num_cold)
        self._cold = None
        if wanted < self._reserved_bytes:
            self._runner.release()
        if wanted > self._reserved_bytes:
            if not cache.reserve(wanted - self._reserved_bytes):
                return False
        else:
            cache.pool.unreserve(self._reserved_bytes - wanted)
        self._reserved_bytes = wanted
        return True

    def staging_bytes(self, num_cold: int) -> int:
        """Bytes of the buffers for so many pages on disk."""
        return self._runner.staging_bytes(num_cold) if num_cold else 0

    def repair(self, number: int) -> None:
        """A page on disk is lost: it and all behind it are computed again."""
        sequence, cache = self._sequence, self._sequence.cache
        lost, ids = sequence.cold[number], sequence.token_ids[number * PAGE_TOKENS :]
        before = lost.parent
        sequence.let_go()
        sequence.truncate(number * PAGE_TOKENS)
        cache.lost(lost)
        if before is not None and before.parent is not None and sequence.cold:
            sequence.shared = cache.hold(before)
        sequence.append(ids)
