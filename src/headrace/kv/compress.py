"""Makes pages in memory smaller: into which format, and in which order, when room is needed.

    f16 ──> q8 ──> q4        as far as `formats` allow; the steps are the kernels' (`kernels/pages.py`)

A page that somebody else reads, or that is on its way to disk, stays as it is. Knows no worth: whom it hits is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from headrace.kernels.page_formats import F16
from headrace.kv.books import Page
from headrace.kv.counters import Counters
from headrace.kv.mover import CallJob, Mover
from headrace.kv.pages import PagePool, format_of
from headrace.kv.tree import Node
from headrace.model.step import PAGE_TOKENS

_PAGES_AT_ONCE = 8


class Narrow(Protocol):
    """What turns the bytes of a page into another format: see `kernels/narrow.py`."""

    def narrow(self, page_format: int, source: int, target: int) -> None:
        """From the page at one tagged address to a page of `page_format` at another address."""


class _Narrowed(NamedTuple):
    """A page that the mover compresses: `source` and `target` are handles, each held for it."""

    page: Page
    source: int
    target: int


class Compressor:
    """Compresses pages of one pool. `formats` are the codes of what pages may be, the most exact first."""

    def __init__(self, pool: PagePool, formats: Sequence[int], narrow: Narrow | None, counters: Counters) -> None:
        self.formats = tuple(formats)
        self.num_pending = 0  # pages that the mover is compressing
        self._pool, self._narrow, self._counters = pool, narrow, counters
        scratch: npt.NDArray[np.uint8] = np.zeros(max(pool.format_bytes) + 64, np.uint8)
        self._scratch = scratch[-int(scratch.ctypes.data) % 64 :]

    def next_format(self, page_format: int) -> int | None:
        """The format that a page is compressed to when memory is short; None if it is as small as it may be."""
        later = [each for each in self.formats if each > page_format]
        return later[0] if later else None

    def squeeze(self, tip: Node) -> bool:
        """Compresses pages of the use that `tip` is of, from the tip on; False if they are as small as they can be."""
        found = self._compressible(tip)
        for page, wanted in found:
            if page.handle is not None:
                page.handle = self.recode(page.handle, wanted)
        return bool(found)

    def squeeze_ahead(self, tip: Node, mover: Mover) -> None:
        """Has `squeeze` done by the mover, as far as there is room for both forms of a page meanwhile."""
        for page, wanted in self._compressible(tip):
            target = self._pool.allocate(wanted)
            if target is None or page.handle is None or self._narrow is None:
                return
            self._pool.share(page.handle)
            addresses = (self._pool.address(page.handle), self._pool.address(target))
            mover.call(partial(self._narrow.narrow, wanted, *addresses), _Narrowed(page, page.handle, target))
            self.num_pending += 1

    def settle(self, job: CallJob) -> None:
        """A page was compressed by the mover: takes the new form if the page is still what it was, and nobody else's."""
        narrowed: _Narrowed = job.tag
        page, pool = narrowed.page, self._pool
        self.num_pending -= 1
        pool.release(narrowed.source)
        if page.handle == narrowed.source and pool.owners(narrowed.source) == 1 and page.writing is None:
            pool.release(narrowed.source)
            page.handle = narrowed.target
            self._counters.compressed_bytes += pool.format_bytes[format_of(narrowed.target)]
        else:
            pool.release(narrowed.target)

    def _compressible(self, tip: Node) -> list[tuple[Page, int]]:
        """Pages of the use that `tip` is of, from the tip on, and what they can become; all go one step before any goes two."""
        node: Node = tip
        found: list[tuple[Page, int]] = []
        while node.parent is not None and node.use is tip.use and len(found) < _PAGES_AT_ONCE:
            page: Page = node.page
            whole = len(node.tokens) == PAGE_TOKENS
            if whole and page.handle is not None and self._pool.owners(page.handle) == 1 and page.writing is None:
                wanted = self.next_format(format_of(page.handle))
                if wanted is not None:
                    found.append((page, wanted))
            node = node.parent
        least = min((wanted for _, wanted in found), default=F16)
        return [(page, wanted) for page, wanted in found if wanted == least]

    def shrink(self, handle: int, page_format: int, node: Node | None) -> int:
        """A page in another format for a live request, and for the tree if `node` has it; the same page if others do, too."""
        page: Page | None = None if node is None else node.page
        if page is None or page.handle != handle:
            return self.recode(handle, page_format) if self._pool.owners(handle) == 1 else handle
        if self._pool.owners(handle) > 2 or page.writing is not None:
            return handle
        self._pool.release(handle)
        page.handle = self.recode(handle, page_format)
        self._pool.share(page.handle)
        return page.handle

    def recode(self, handle: int, page_format: int) -> int:
        """A page in another format, for a page with one owner, who gets the new one in its stead."""
        assert self._narrow is not None
        target = self._scratch[: self._pool.format_bytes[page_format]]
        self._narrow.narrow(page_format, self._pool.address(handle), int(target.ctypes.data))
        self._pool.release(handle)
        smaller = self._pool.allocate(page_format)
        assert smaller is not None, "a smaller page fits where a larger one was"
        self._pool.view(smaller)[:] = target
        self._counters.compressed_bytes += len(target)
        return smaller
