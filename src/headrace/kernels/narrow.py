"""Turns pages of keys and values into compressed formats, a page in one call: for a thread beside the worker team.

Knows nothing of who owns a page; source and target must stay where they are during the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from headrace.kernels.fields import pages
from headrace.kernels.library import KernelLibrary
from headrace.kernels.page_formats import F16, FORMAT_BITS, FORMAT_NAMES, Q4, Q8, head_bytes
from headrace.kernels.program import OP_BYTES, OP_FIELDS
from headrace.kernels.runtime import Memory

PAGE_TOKENS = 32
_NAMES = {Q8: "narrow:q8", Q4: "narrow:q4"}
NARROW_KERNELS = tuple(_NAMES.values())
"""The names of the kernels."""


def scratch_bytes(width: int, page_tokens: int) -> int:
    """Scratch that narrowing needs: a head of f16, and two rows of float32 (see `kernels/pages.py`)."""
    return head_bytes(F16, width, page_tokens) + 8 * max(width, page_tokens)


class Narrower:
    """Narrows pages of one model. Threads take turns; the interpreter's lock is free meanwhile."""

    def __init__(
        self, library: KernelLibrary, num_layers: int, kv_heads: int, width: int, page_tokens: int = PAGE_TOKENS
    ) -> None:
        """Prepares nothing yet: kernels that `library` has not prepared by then are at the first page.

        Args:
            library: where the kernels come from.
            num_layers: L.
            kv_heads: G.
            width: D.
            page_tokens: P.
        """
        self._library = library
        self._functions: dict[int, Callable[[int, int, int], None]] = {}
        self._memory = Memory(OP_BYTES + scratch_bytes(width, page_tokens))
        self._record = self._memory.words(0, OP_FIELDS)
        heads = num_layers * kv_heads
        for field, value in (
            (pages.WIDTH, width),
            (pages.PAGE_TOKENS, page_tokens),
            (pages.HEADS, heads),
            (pages.BLOCK_HEADS, heads),
        ):
            self._record[field // 8] = value
        self._lock = threading.Lock()

    def narrow(self, page_format: int, source: int, target: int) -> None:
        """Writes the page at `source` to `target` in a smaller format.

        Args:
            page_format: Q8, or Q4.
            source: tagged address of a page of format F16, or of Q8 where Q4 is made.
            target: address of room for the new page, tagged or not.

        Raises:
            KernelError: the kernel is not prepared yet, and the compiler failed.
            StorageError: the kernel is not prepared yet, and the cache folder cannot be written.
        """
        source_format = source & FORMAT_BITS
        names = f"{FORMAT_NAMES[source_format]} to {FORMAT_NAMES[page_format]}"
        assert source_format == F16 or (source_format, page_format) == (Q8, Q4), f"a page cannot be narrowed from {names}"
        with self._lock:
            self._record[pages.SOURCE // 8] = source
            self._record[pages.TARGET // 8] = target & ~FORMAT_BITS
            if page_format not in self._functions:
                self._library.prepare([_NAMES[page_format]])
                self._functions[page_format] = self._library.function(_NAMES[page_format])
            self._functions[page_format](self._memory.address, 0, self._memory.address + OP_BYTES)
