"""One page of the tree, where its data lies; and the running sums of what all of them take in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.kv.pages import format_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.kv.mover import WriteJob
    from headrace.kv.runs import Place


class MemoryBooks:
    """Bytes of the tree's pages in memory, and of those of them that live requests hold by pins. `format_bytes` by code."""

    def __init__(self, format_bytes: Sequence[int]) -> None:
        self.known_bytes = self.held_bytes = 0
        self._format_bytes = tuple(format_bytes)

    def size(self, handle: int | None) -> int:
        """Bytes of a page in memory; 0 of none."""
        return 0 if handle is None else self._format_bytes[format_of(handle)]

    def hold(self, page: Page | None, held: bool) -> None:  # as the tree calls it
        """A page is held from now on, or no longer; None for the root, which takes nothing."""
        if page is not None:
            page.held = held
            self.held_bytes += self.size(page.handle) if held else -self.size(page.handle)


class Page:
    """Where the data of one node lies: `handle` in memory, `place` on disk; `writing` while it is on its way there.

    `held` is whether a pin keeps it. One that is taken out of the tree has neither handle nor place.
    """

    __slots__ = ("_books", "_handle", "chain", "held", "place", "writing")

    def __init__(self, books: MemoryBooks, handle: int | None = None, place: Place | None = None) -> None:
        self._books = books
        self._handle: int | None = None
        self.place, self.chain, self.held = place, b"", False
        self.writing: WriteJob | None = None
        self.handle = handle

    @property
    def handle(self) -> int | None:
        """Its page of the pool."""
        return self._handle

    @handle.setter
    def handle(self, handle: int | None) -> None:
        books = self._books
        change = books.size(handle) - books.size(self._handle)
        books.known_bytes += change
        if self.held:
            books.held_bytes += change
        self._handle = handle
