"""Takes the pages of requests into the tree: whole ones while the request still computes, all of them when it has ended.

    tokens    0 ........ known before ........ | computed and shared ....... | being computed
    tree      [page][page][page][page]           [page][page][page]            not yet known
    use       of earlier requests                of this one, which goes on    told to the rule of residency when it ends

What a request shares is one use with what it leaves at its end, so what is counted, and the order in which pages leave, is
what it would be if all pages came at the end. The last page that is shared is pinned until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.kv.books import MemoryBooks, Page
from headrace.kv.disk import DISK, MEMORY, DiskTier
from headrace.kv.pages import PagePool, format_of
from headrace.kv.placement import Placement
from headrace.kv.residency import DEFAULT_STANDING, Standing, Use
from headrace.kv.runs import Place
from headrace.kv.tree import Match, Node
from headrace.model.step import PAGE_TOKENS


@dataclass(frozen=True)
class SharedPast:
    """What a live request has made known.

    `handles` are its pages, one for each that it gave: where another request had made the same page known before, the other's.
    `last` is the deepest page, pinned; None if no page is known. `use` is None as long as nothing was known by this request
    first.
    """

    handles: tuple[int | None, ...]
    last: Node | None
    use: Use | None

    @property
    def num_pages(self) -> int:
        """Pages that are held by this."""
        return 0 if self.last is None else self.last.depth_pages


def num_near(nodes: Sequence[Node]) -> int:
    """How many of the pages of a path are in memory: those before the first that is not."""
    return next((number for number, node in enumerate(nodes) if node.tier == DISK), len(nodes))


class Intake:
    """What requests have computed becomes known. `now_s` gives seconds since the epoch, never less than before."""

    def __init__(
        self,
        placement: Placement,
        pool: PagePool,
        books: MemoryBooks,
        disk: DiskTier | None,
        now_s: Callable[[], float],
    ) -> None:
        self._placement, self._tree, self._books = placement, placement.tree, books
        self._pool, self._disk, self._now_s = pool, disk, now_s

    def promote(self, node: Node, handle: int) -> None:
        """A page on disk is in memory too now, as `handle`, which gets the tree as one more owner."""
        page: Page = node.page
        if page.handle is None and node.parent is not None and node.parent.tier == MEMORY:
            self._pool.share(handle)
            page.handle = handle
            self._placement.promote(node)

    def share(
        self, tokens: Sequence[int], handles: Sequence[int | None], shared: SharedPast | None, *, needed: bool
    ) -> SharedPast:
        """Makes the whole pages of a live request known: see `PageCache.share`. With `needed`, on disk if not otherwise."""
        now_s = self._now_s()
        tokens = self._grow_last(list(tokens[: len(tokens) // PAGE_TOKENS * PAGE_TOKENS]), handles)
        match = self._tree.match(tokens)
        handles = self._swap(match.nodes, handles)
        use = None if shared is None else shared.use
        if shared is not None and shared.last is not None and not _goes_through(match, shared.last):
            if len(tokens) == match.num_tokens and match.nodes == shared.last.path()[: match.num_pages]:
                return SharedPast(tuple(handles), shared.last, use)  # it has given more before
            self._end_use(shared)  # what it goes on with is another path
            use = None
        fresh = list(handles[match.num_pages : len(tokens) // PAGE_TOKENS])
        near = num_near(match.nodes)
        last = match.last
        if fresh and (needed or (near == match.num_pages and None not in fresh)):
            pages = self._pages_for(tokens, match, fresh, near, now_s)
            if pages:
                known = tokens[: (match.num_pages + len(pages)) * PAGE_TOKENS]
                use, last = self._placement.share(known, match, pages, now_s=now_s, num_near=near, use=use)
                self._book(last, pages)
        if last.parent is not None:
            self._tree.pin(last)
        if shared is not None and shared.last is not None:
            self._tree.unpin(shared.last)
        return SharedPast(tuple(handles), last if last.parent is not None else None, use)

    def commit(
        self,
        tokens: Sequence[int],
        handles: Sequence[int | None],
        shared: SharedPast | None,
        *,
        num_answer_tokens: int,
        standing: Standing = DEFAULT_STANDING,
    ) -> Node:
        """Makes all pages of a request that ended known; the last of them, the root if there are none."""
        now_s = self._now_s()
        tokens = self._grow_last(list(tokens), handles)
        match = self._tree.match(tokens)
        use = None
        if shared is not None:
            if _goes_through(match, shared.last):
                use = shared.use
                if shared.last is not None:
                    self._tree.unpin(shared.last)
            else:
                self.end(shared)
        for node, handle in zip(match.nodes, handles, strict=False):
            if handle is not None:
                self.promote(node, handle)
        near = num_near(match.nodes)
        fresh = list(handles[match.num_pages : -(-len(tokens) // PAGE_TOKENS)])
        pages = self._pages_for(tokens, match, fresh, near, now_s)
        if len(pages) < len(fresh):
            tokens = tokens[: (match.num_pages + len(pages)) * PAGE_TOKENS]
        recorded = self._placement.record(
            tokens,
            match,
            pages,
            num_answer_tokens=num_answer_tokens,
            now_s=now_s,
            standing=standing,
            num_near=near,
            use=use,
        )
        self._book(recorded.last, pages)
        return recorded.last

    def end(self, shared: SharedPast) -> None:
        """A request leaves nothing more than what it has shared."""
        self._end_use(shared)
        if shared.last is not None:
            self._tree.unpin(shared.last)

    def _end_use(self, shared: SharedPast) -> None:
        if shared.use is not None:
            assert shared.last is not None, "a use has pages"
            match = Match(shared.last, None, 0, shared.num_pages * PAGE_TOKENS)
            near, now_s = num_near(match.nodes), self._now_s()
            self._placement.record([], match, [], num_answer_tokens=0, now_s=now_s, num_near=near, use=shared.use)

    def _swap(self, nodes: Sequence[Node], handles: Sequence[int | None]) -> list[int | None]:
        """The pages that a request goes on with: those of the tree where it knows them, which get one more owner."""
        mine = list(handles)
        for number, (node, handle) in enumerate(zip(nodes, handles, strict=False)):
            if handle is None:
                continue
            self.promote(node, handle)
            known: int | None = node.page.handle
            if known is not None and known != handle and format_of(known) == format_of(handle):
                self._pool.share(known)
                self._pool.release(handle)
                mine[number] = known
        return mine

    def _pages_for(self, tokens: list[int], match: Match, fresh: list[int | None], near: int, now_s: float) -> list[Page]:
        """What the tree gets for pages behind those that matched: as many as it can have."""
        if near == match.num_pages and None not in fresh:
            pages = []
            for handle in fresh:
                assert handle is not None
                self._pool.share(handle)
                pages.append(Page(self._books, handle))
            return pages
        return [Page(self._books, place=place) for place in self._write(tokens, match, fresh, now_s)]

    def _write(self, tokens: list[int], match: Match, fresh: list[int | None], now_s: float) -> list[Place]:
        """Writes pages behind a past of which a part is on disk only: they have to be there before the tree may know them."""
        parent = match.last
        if self._disk is None or not fresh or None in fresh or len(parent.tokens) not in (0, PAGE_TOKENS):
            return []
        self._tree.pin(parent)  # making room on disk must not take the past away that this continues
        wanted = tokens[match.num_pages * PAGE_TOKENS :]
        places = self._disk.write_now(parent, wanted, [handle for handle in fresh if handle is not None], now_s)
        self._tree.unpin(parent)
        return places

    def _book(self, last: Node, pages: list[Page]) -> None:
        if self._disk is not None and pages and pages[0].place is not None:
            self._disk.adopt(last, len(pages))

    def _grow_last(self, tokens: list[int], handles: Sequence[int | None]) -> list[int]:
        """Where the tree has the beginning of a page that is longer now, its page takes the place; shorter ones go."""
        match = self._tree.match(tokens)
        partial, known = match.partial, match.partial_tokens
        start = match.num_pages * PAGE_TOKENS
        if partial is None or start >= len(tokens):
            return tokens
        longer = tokens[start : start + PAGE_TOKENS]
        handle = handles[match.num_pages]
        if known == len(longer):  # the tree knows more than this
            return tokens[:start]
        if known < len(partial.tokens) or partial.children or handle is None:
            return tokens
        page: Page = partial.page
        if page.handle is None:
            if self._disk is not None and not partial.pins:
                self._disk.forget(partial, self._now_s())
            return tokens
        if self._disk is not None:
            page.writing = None  # what is on its way to disk is the shorter page, which is dropped when it gets there
            self._disk.unback(page)
        self._pool.share(handle)
        self._pool.release(page.handle)
        page.handle, page.chain = handle, b""
        self._tree.extend(partial, tuple(longer[known:]))
        return tokens


def _goes_through(match: Match, node: Node | None) -> bool:
    """Whether a page is on the path that matched."""
    return node is None or (node.depth_pages <= match.num_pages and match.nodes[node.depth_pages - 1] is node)
