"""Makes pages in memory smaller: into which format, and in which order, when room is needed.

    f16 ──> q8 ──> q4        as far as `formats` allow; the steps are the kernels' (`kernels/pages.py`)

A page that somebody else reads, or that is on its way to disk, stays as it is. Knows no worth: whom it hits is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.kernels.page_formats import F16
from headrace.kv.counters import Counters
from headrace.kv.disk import Page
from headrace.kv.pages import PagePool, format_of
from headrace.kv.tree import Node
from headrace.model.step import PAGE_TOKENS

_PAGES_AT_ONCE = 8


class Narrow(Protocol):
    """What turns the bytes of a page into another format: see `kernels/narrow.py`."""

    def narrow(self, page_format: int, source: int, target: int) -> None:
        """From the page at one tagged address to a page of `page_format` at another address."""


class Compressor:
    """Compresses pages of one pool. `formats` are the codes of what pages may be, the most exact first."""

    def __init__(self, pool: PagePool, formats: Sequence[int], narrow: Narrow | None, counters: Counters) -> None:
        self.formats = tuple(formats)
        self._pool, self._narrow, self._counters = pool, narrow, counters
        scratch: npt.NDArray[np.uint8] = np.zeros(max(pool.format_bytes) + 64, np.uint8)
        self._scratch = scratch[-int(scratch.ctypes.data) % 64 :]

    def next_format(self, page_format: int) -> int | None:
        """The format that a page is compressed to when memory is short; None if it is as small as it may be."""
        later = [each for each in self.formats if each > page_format]
        return later[0] if later else None

    def squeeze(self, tip: Node) -> bool:
        """Compresses pages of the use that `tip` is of, from the tip on; False if they are as small as they can be."""
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
        # all of a use goes one step before any of it goes two
        least = min((wanted for _, wanted in found), default=F16)
        for page, wanted in found:
            if wanted == least and page.handle is not None:
                page.handle = self.recode(page.handle, wanted)
        return bool(found)

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
