"""Pages of keys and values in one arena of memory.

A page holds PAGE_TOKENS tokens of all layers and KV heads in one contiguous buffer (layout: `kernels/rope.py`), so
moving it anywhere is one copy. Pages have owner counts: a page with several owners is shared and read-only but for
its last free slots; a page with none is free.

    arena:  [page 0][page 1] ... [page n - 1]       free + owned = n

Knows nothing of tokens' meaning, of sequences or of requests.
"""

from __future__ import annotations

from headrace.kernels.runtime import Memory
from headrace.model.config import ModelConfig
from headrace.model.step import PAGE_TOKENS


def page_bytes(config: ModelConfig) -> int:
    """Bytes of a page: keys and values in float16."""
    return len(config.layers) * layer_bytes(config)


def layer_bytes(config: ModelConfig) -> int:
    """Bytes of one layer within a page."""
    return config.kv_heads * config.head_width * 2 * 2 * PAGE_TOKENS


def pages_for(num_tokens: int) -> int:
    """Pages that hold a number of tokens."""
    return -(-num_tokens // PAGE_TOKENS)


class PageArena:
    """`num_pages` pages; pages are named by their index. The system grants memory when a page is first written."""

    def __init__(self, num_pages: int, num_page_bytes: int) -> None:
        self.num_pages, self.page_bytes = num_pages, num_page_bytes
        self._memory = Memory(num_pages * num_page_bytes, huge_pages=True)
        self._owners = [0] * num_pages
        # the last is taken first, so low pages are used, and made resident, before high ones
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    def allocate(self) -> int | None:
        """A page with one owner, or None if there is no room."""
        if not self._free:
            return None
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def share(self, page: int) -> None:
        """Adds an owner."""
        assert self._owners[page] > 0, "a free page cannot be shared"
        self._owners[page] += 1

    def release(self, page: int) -> None:
        """Takes an owner away; without owners the page is free."""
        assert self._owners[page] > 0, "the page is free already"
        self._owners[page] -= 1
        if self._owners[page] == 0:
            self._free.append(page)

    def owners(self, page: int) -> int:
        """Owners of a page."""
        return self._owners[page]

    def address(self, page: int) -> int:
        """Where a page lies."""
        return self._memory.address + page * self.page_bytes

    def check(self) -> None:
        """Asserts the invariant: every page is free or owned, none is both."""
        assert sorted(self._free) == [page for page in range(self.num_pages) if self._owners[page] == 0]
        assert all(count >= 0 for count in self._owners)
