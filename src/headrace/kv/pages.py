"""Pages of keys and values in memory, of any format, under one bound of bytes.

A page holds PAGE_TOKENS tokens of all layers and KV heads in one contiguous buffer (layouts: `kernels/page_formats.py`), so
moving it anywhere is one copy. Each format has a range of addresses of its own, of which only the pages in use, and the free
ones kept for their next use, take memory:

    f16   [owned][owned][free][untouched ..................................]
    q8    [owned][free][given back][untouched ................]              owned + free + reserved <= limit

Pages are named by handles. They have owner counts: a page with several owners is shared and read-only but for its last
free slots; a page with none is free. Knows nothing of tokens' meaning, of sequences or of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.kernels.page_formats import F16, FORMAT_NAMES, head_bytes
from headrace.kernels.runtime import Memory
from headrace.model.config import ModelConfig
from headrace.model.step import PAGE_TOKENS

_FORMAT_BITS = 2  # of a handle
_FORMAT_MASK = (1 << _FORMAT_BITS) - 1


def page_bytes(config: ModelConfig, page_format: int = F16) -> int:
    """Bytes of a page."""
    return len(config.layers) * layer_bytes(config, page_format)


def layer_bytes(config: ModelConfig, page_format: int = F16) -> int:
    """Bytes of one layer within a page."""
    return config.kv_heads * head_bytes(page_format, config.head_width, PAGE_TOKENS)


def pages_for(num_tokens: int) -> int:
    """Pages that hold a number of tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def format_of(handle: int) -> int:
    """The format code of a page."""
    return handle & _FORMAT_MASK


class PagePool:
    """Pages within `limit_bytes`. The system grants memory when a page is first written."""

    def __init__(self, limit_bytes: int, format_bytes: Sequence[int]) -> None:
        """Reserves addresses only.

        Args:
            limit_bytes: the bound of everything: owned pages, free ones that are kept, and what is reserved beside them.
            format_bytes: bytes of a page by format code, multiples of 64.
        """
        assert len(format_bytes) <= len(FORMAT_NAMES)
        assert all(size % 64 == 0 for size in format_bytes), "an address has a format in its low bits"
        self.limit_bytes, self.format_bytes = limit_bytes, tuple(format_bytes)
        self.reserved_bytes = 0
        self._arenas = [_Arena(limit_bytes // size, size) for size in format_bytes]

    @property
    def owned_bytes(self) -> int:
        """Bytes of all pages that somebody owns."""
        return sum(len(arena.owners) * arena.page_bytes for arena in self._arenas)

    @property
    def free_bytes(self) -> int:
        """Bytes that pages or reservations may still take."""
        return self.limit_bytes - self.owned_bytes - self.reserved_bytes

    @property
    def num_free(self) -> int:
        """Exact pages for which there is room."""
        return self.free_bytes // self.format_bytes[F16]

    def num_owned(self, page_format: int = F16) -> int:
        """Pages of a format that somebody owns."""
        return len(self._arenas[page_format].owners)

    def allocate(self, page_format: int = F16) -> int | None:
        """A page with one owner, or None if there is no room."""
        arena = self._arenas[page_format]
        if not arena.free and not self._grow(arena.page_bytes):
            return None
        index = arena.take()
        return None if index is None else index << _FORMAT_BITS | page_format

    def reserve(self, num_bytes: int) -> bool:
        """Takes bytes for something beside pages, if there is room."""
        if not self._grow(num_bytes):
            return False
        self.reserved_bytes += num_bytes
        return True

    def unreserve(self, num_bytes: int) -> None:
        """Gives bytes back that `reserve` took."""
        assert num_bytes <= self.reserved_bytes
        self.reserved_bytes -= num_bytes

    def share(self, handle: int) -> None:
        """Adds an owner."""
        owners = self._arenas[handle & _FORMAT_MASK].owners
        assert handle >> _FORMAT_BITS in owners, "a free page cannot be shared"
        owners[handle >> _FORMAT_BITS] += 1

    def release(self, handle: int) -> None:
        """Takes an owner away; without owners the page is free."""
        arena, index = self._arenas[handle & _FORMAT_MASK], handle >> _FORMAT_BITS
        assert index in arena.owners, "the page is free already"
        arena.owners[index] -= 1
        if arena.owners[index] == 0:
            del arena.owners[index]
            arena.free.append(index)

    def owners(self, handle: int) -> int:
        """Owners of a page."""
        return self._arenas[handle & _FORMAT_MASK].owners.get(handle >> _FORMAT_BITS, 0)

    def address(self, handle: int) -> int:
        """Where a page lies, with its format code in the low 6 bits: what the tables of attention hold."""
        arena = self._arenas[handle & _FORMAT_MASK]
        return arena.memory.address + (handle >> _FORMAT_BITS) * arena.page_bytes | handle & _FORMAT_MASK

    def view(self, handle: int) -> npt.NDArray[np.uint8]:
        """The bytes of a page."""
        arena = self._arenas[handle & _FORMAT_MASK]
        start = (handle >> _FORMAT_BITS) * arena.page_bytes
        return arena.memory.bytes[start : start + arena.page_bytes]

    def check(self) -> None:
        """Asserts the invariants: every page is free or owned, none is both, and all within the bound."""
        for arena in self._arenas:
            arena.check()
        kept = sum(arena.resident_bytes for arena in self._arenas)
        assert kept + self.reserved_bytes <= self.limit_bytes
        assert self.free_bytes >= 0

    def _grow(self, num_bytes: int) -> bool:
        """Makes sure that so many more bytes may be taken, giving free pages back to the system if need be."""
        if self.free_bytes < num_bytes:
            return False
        excess = sum(arena.resident_bytes for arena in self._arenas) + self.reserved_bytes + num_bytes - self.limit_bytes
        for arena in self._arenas:
            while excess > 0 and arena.free:
                arena.give_back()
                excess -= arena.page_bytes
        return excess <= 0


class _Arena:
    """Pages of one format: `owners` by index; `free` are resident, `returned` are not; from `fresh` on never touched."""

    def __init__(self, num_pages: int, num_page_bytes: int) -> None:
        self.num_pages, self.page_bytes = num_pages, num_page_bytes
        self.owners: dict[int, int] = {}
        self.free: list[int] = []
        self.returned: list[int] = []
        self.fresh = 0
        self._memory: Memory | None = None

    @property
    def memory(self) -> Memory:
        """The range of addresses, taken when the first page is."""
        if self._memory is None:
            self._memory = Memory(self.num_pages * self.page_bytes, huge_pages=True)
        return self._memory

    @property
    def resident_bytes(self) -> int:
        """Bytes of owned and free pages."""
        return (len(self.owners) + len(self.free)) * self.page_bytes

    def take(self) -> int | None:
        if self.free:
            index = self.free.pop()
        elif self.returned:
            index = self.returned.pop()
        elif self.fresh < self.num_pages:
            index = self.fresh
            self.fresh += 1
        else:
            return None
        self.owners[index] = 1
        return index

    def give_back(self) -> None:
        index = self.free.pop()
        self.memory.discard(index * self.page_bytes, self.page_bytes)
        self.returned.append(index)

    def check(self) -> None:
        assert sorted([*self.free, *self.returned, *self.owners]) == list(range(self.fresh))
        assert self.fresh <= self.num_pages
        assert all(count > 0 for count in self.owners.values())
