"""The memory of the past: finds what is known of some tokens, takes in what was computed, decides what stays where.

A live request owns the pages it reads and writes by owner counts of the pool; between requests the tree owns them, so a
conversation is no more than its tokens:

    find       the longest known past; its last page is held, so nothing of it leaves the tree meanwhile
    allocate   a page to write to; makes room by compressing, moving to disk, or forgetting what is worth least
    commit     the pages of a request that ended become part of the tree, and are queued for the disk

    tokens   0 ... pages in memory ... | ... pages on disk ... | ... first part of a page ... | missing ...

Every bound is hard: memory by the pool, disk by the store. Knows no requests, no kernels but the one that compresses, and
no prompt but as tokens. Not for several threads at once; the mover works beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.kernels.page_formats import F16
from headrace.kv.compress import Compressor, Narrow
from headrace.kv.counters import Counters, merge_counters
from headrace.kv.disk import DISK, DiskTier, Page
from headrace.kv.mover import CallJob, Mover, ReadJob
from headrace.kv.pages import PagePool, format_of
from headrace.kv.placement import Placement
from headrace.kv.prices import PriceBook, read_prices, save_prices
from headrace.kv.residency import DEFAULT_STANDING, Residency, Standing
from headrace.kv.runs import Place
from headrace.kv.stores import PageStore
from headrace.kv.tree import Miss, Node, PrefixTree
from headrace.model.step import PAGE_TOKENS

MEMORY = 0
_AHEAD_SHARE = 16
"""Pages are compressed ahead when less than one in so many bytes of memory is free."""


@dataclass
class Found:
    """What is known of some tokens: whole pages `nodes`, then the first `partial_tokens` tokens of `partial`.

    The first `num_near` of `nodes` are in memory, the others on disk. `miss` says why the rest is not known; `unused` why,
    and how many, tokens behind these are known but of no use. The past is held until `PageCache.let_go`.
    """

    tokens: tuple[int, ...]
    nodes: list[Node]
    num_near: int
    partial: Node | None
    partial_tokens: int
    miss: Miss | None
    held: list[Node]
    unused: tuple[Literal["gone", "format changed"], int] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return sum(len(node.tokens) for node in self.nodes) + self.partial_tokens


def _num_near(nodes: Sequence[Node]) -> int:
    """How many of the pages of a path are in memory: those before the first that is not."""
    return next((number for number, node in enumerate(nodes) if node.tier == DISK), len(nodes))


class PageCache:
    """The known past of one model. `formats` are the codes of what pages in memory may be, the most exact first."""

    def __init__(
        self,
        pool: PagePool,
        *,
        formats: Sequence[int] = (F16,),
        narrow: Narrow | None = None,
        store: PageStore | None = None,
        threads: int = 1,
        wall_clock: Callable[[], float],
        timer: Callable[[], float],
    ) -> None:
        """Finds again what the store holds.

        Args:
            pool: memory for pages.
            formats: codes of the formats of pages in memory.
            narrow: what compresses pages, needed for formats other than f16.
            store: pages on disk, if there are any.
            threads: threads that compute, on which prices depend.
            wall_clock: seconds since the epoch, for uses that outlive the process.
            timer: seconds that only grow, for prices.
        """
        self.pool, self.prices, self.counters = pool, PriceBook(), Counters()
        self.compressor = Compressor(pool, formats, narrow, self.counters)
        self.rule = Residency(self.prices.of_pages(pool.format_bytes[F16]))
        self.tree = PrefixTree(PAGE_TOKENS)
        # pool and store bound bytes; these numbers of pages only say how often the ranking is renewed
        disk_bytes = 0 if store is None else store.used_bytes + store.room_bytes
        most = [max(1, size // min(pool.format_bytes)) for size in (pool.limit_bytes, disk_bytes)]
        self.placement = Placement(self.tree, most, self.rule)
        self._wall_clock, self._now_s, self._threads = wall_clock, 0.0, threads
        self.mover = Mover(store, timer)
        self.disk: DiskTier | None = None
        if store is not None:
            self.disk = DiskTier(self.placement, pool, store, self.mover, self.rule, self.prices, self.counters, wall_clock)
            self.disk.attach(self.now_s())
            self.prices.resume(read_prices(store.key_folder, threads))

    @property
    def formats(self) -> tuple[int, ...]:
        """Codes of the formats of pages in memory, the most exact first."""
        return self.compressor.formats

    def now_s(self) -> float:
        """Seconds since the epoch, never less than before."""
        self._now_s = max(self._now_s, self._wall_clock())
        return self._now_s

    # finding

    def find(self, tokens: Sequence[int]) -> Found:
        """The longest known past of some tokens. Holds it, and touches nothing else."""
        self.settle()
        match = self.tree.match(tokens)
        if self.disk is not None and match.num_tokens < len(tokens) and self.disk.attach(self.now_s()):
            match = self.tree.match(tokens)  # another process had written it
        nodes = self._readable(match.nodes)
        near = _num_near(nodes)
        partial, partial_tokens = match.partial, match.partial_tokens
        reason: Literal["gone", "format changed"] = "gone"
        if len(nodes) < len(match.nodes) or (partial is not None and not self._readable([partial])):
            partial, partial_tokens = None, 0
        if nodes and len(nodes[-1].tokens) < PAGE_TOKENS:
            partial = nodes.pop()
            partial_tokens, near = len(partial.tokens), min(near, len(nodes))
        if partial is not None and self._lossy(partial):
            partial, partial_tokens = None, 0  # the page that goes on from it must begin exact
            reason = "format changed"
        held = [node for node in (nodes[-1] if nodes else None, partial) if node is not None]
        for node in held:
            self.tree.pin(node)
        miss = self.tree.explain(tokens, match)
        num_unused = match.num_tokens - len(nodes) * PAGE_TOKENS - partial_tokens
        unused = (reason, num_unused) if num_unused else None
        return Found(tuple(tokens), nodes, near, partial, partial_tokens, miss, held, unused)

    def let_go(self, found: Found) -> None:
        """Holds a past no longer."""
        for node in found.held:
            self.tree.unpin(node)
        found.held = []

    def _readable(self, nodes: Sequence[Node]) -> list[Node]:
        """Nodes up to the first whose data was lost while somebody held it; that one is forgotten as soon as nobody does."""
        for number, node in enumerate(nodes):
            if node.page.handle is None and node.page.place is None:
                if self.disk is not None:
                    self.disk.lost(node, self.now_s())
                return list(nodes[:number])
        return list(nodes)

    def _lossy(self, node: Node) -> bool:
        page: Page = node.page
        if page.handle is not None:
            return format_of(page.handle) != F16
        return self.disk is not None and page.place is not None and self.disk.format_of(page.place) != F16

    # memory

    def allocate(self, page_format: int = F16) -> int | None:
        """A page with one owner; None if all there is belongs to live requests."""
        handle = self.pool.allocate(page_format)
        if handle is None and self.make_room(self.pool.format_bytes[page_format]):
            handle = self.pool.allocate(page_format)
        if len(self.formats) > 1 and self.pool.free_bytes < self.pool.limit_bytes // _AHEAD_SHARE:
            self._compress_ahead()
        return handle

    def _compress_ahead(self) -> None:
        """Has the past that is worth least compressed beside the computation, before somebody has to wait for it."""
        self.settle()
        if self.compressor.num_pending == 0:
            cheapest = self.placement.cheapest(MEMORY, self.now_s())
            if cheapest is not None:
                self.compressor.squeeze_ahead(cheapest[0], self.mover)

    def reserve(self, num_bytes: int) -> bool:
        """Takes bytes of the bound for something beside pages, making room if need be."""
        return self.make_room(num_bytes) and self.pool.reserve(num_bytes)

    def make_room(self, num_bytes: int) -> bool:
        """Makes so many bytes free in memory; False if what is left belongs to live requests."""
        if self.pool.free_bytes >= num_bytes:
            return True
        self.settle()
        now_s = self.now_s()
        stuck: list[Node] = []
        is_settled = False
        try:
            while self.pool.free_bytes < num_bytes:
                cheapest = self.placement.cheapest(MEMORY, now_s)
                if cheapest is None and is_settled:
                    return False
                if cheapest is None:
                    self.flush()  # what is on its way somewhere holds memory, too
                    is_settled = True
                elif not self.compressor.squeeze(cheapest[0]) and not self._leave(cheapest[0], now_s):
                    self.tree.pin(cheapest[0])
                    stuck.append(cheapest[0])
        finally:
            for node in stuck:
                self.tree.unpin(node)
        return True

    def num_room(self, page_format: int = F16) -> int:
        """Pages that could be had at most: free ones, and those that no live request holds."""
        held: set[Node] = set()
        size = 0
        for node in self.tree.nodes():
            if node.pins:
                held.update(node.path())
            if node.page.handle is not None:
                size += self.pool.format_bytes[format_of(node.page.handle)]
        size -= sum(self.pool.format_bytes[format_of(node.page.handle)] for node in held if node.page.handle is not None)
        return (self.pool.free_bytes + size) // self.pool.format_bytes[page_format]

    def _leave(self, tip: Node, now_s: float) -> bool:
        """A page leaves memory: to the disk if it is, or is about to be, there; else out of the tree. False if it may not."""
        page: Page = tip.page
        if self.disk is not None and page.writing is not None:
            self.mover.wait_write(page.writing)
            self.settle()
            if tip.parent is None or not tip.may_leave:  # what was read ahead meanwhile is behind it now
                return True
        backed = page.place is not None
        if not backed:
            behind = list(tip.children.values())  # on disk, and out of reach without this one
            if any(self.tree.is_held(node) for node in behind):
                return False
            for node in behind:
                assert self.disk is not None
                self.disk.forget(node, now_s)
        self.placement.evict(tip, now_s, demote=backed)
        assert page.handle is not None
        self.pool.release(page.handle)
        page.handle = None
        if backed:
            self.counters.demoted_pages += 1
        else:
            self.counters.dropped_pages += 1
        return True

    # taking in

    def promote(self, node: Node, handle: int) -> None:
        """A page on disk is in memory too now, as `handle`, which gets the tree as one more owner."""
        page: Page = node.page
        if page.handle is None and node.parent is not None and node.parent.tier == MEMORY:
            self.pool.share(handle)
            page.handle = handle
            self.placement.promote(node)

    def commit(
        self,
        tokens: Sequence[int],
        handles: Sequence[int | None],
        *,
        num_answer_tokens: int,
        standing: Standing = DEFAULT_STANDING,
        needed: bool = False,
    ) -> Node | None:
        """The pages of a request that ended become part of the tree; the last of them.

        Args:
            tokens: all tokens of the request whose keys and values were computed.
            handles: the page of each PAGE_TOKENS of them; None where it is on disk only. They stay the caller's to release.
            num_answer_tokens: how many of the tokens were generated.
            standing: what the owner of this past asks for.
            needed: they must go to disk, whatever they are worth.
        """
        self.settle()
        now_s = self.now_s()
        self.rule.prices = self.prices.of_pages(self.pool.format_bytes[F16])
        tokens = self._grow_last(list(tokens), handles)
        match = self.tree.match(tokens)
        for node, handle in zip(match.nodes, handles, strict=False):
            if handle is not None:
                self.promote(node, handle)
        near = _num_near(match.nodes)
        fresh = list(handles[len(match.nodes) : -(-len(tokens) // PAGE_TOKENS)])
        if near < len(match.nodes) or None in fresh:
            return self._commit_far(tokens, fresh, num_answer_tokens, standing, now_s)
        pages = []
        for handle in fresh:
            assert handle is not None
            self.pool.share(handle)
            pages.append(Page(handle))
        recorded = self.placement.record(
            tokens, match, pages, num_answer_tokens=num_answer_tokens, now_s=now_s, standing=standing
        )
        if self.disk is not None:
            self.disk.queue(recorded.last, now_s, needed=needed)
        return recorded.last if recorded.last.parent is not None else None

    def _grow_last(self, tokens: list[int], handles: Sequence[int | None]) -> list[int]:
        """Where the tree has the beginning of a page that is longer now, its page takes the place; shorter ones go."""
        match = self.tree.match(tokens)
        partial, known = match.partial, match.partial_tokens
        start = len(match.nodes) * PAGE_TOKENS
        if partial is None or start >= len(tokens):
            return tokens
        longer = tokens[start : start + PAGE_TOKENS]
        handle = handles[len(match.nodes)]
        if known == len(longer):  # the tree knows more than this
            return tokens[:start]
        if known < len(partial.tokens) or partial.children or handle is None:
            return tokens
        page: Page = partial.page
        if page.handle is None:
            if self.disk is not None and not partial.pins:
                self.disk.forget(partial, self.now_s())
            return tokens
        if self.disk is not None:
            page.writing = None  # what is on its way to disk is the shorter page, which is dropped when it gets there
            self.disk.unback(page)
        self.pool.share(handle)
        self.pool.release(page.handle)
        page.handle, page.chain = handle, b""
        self.tree.extend(partial, tuple(longer[known:]))
        return tokens

    def _commit_far(
        self, tokens: list[int], fresh: list[int | None], num_answer_tokens: int, standing: Standing, now_s: float
    ) -> Node | None:
        """Commits a past of which a part is on disk only: what is new has to go there too before the tree may know it."""
        match = self.tree.match(tokens)
        near = _num_near(match.nodes)
        parent = match.nodes[-1] if match.nodes else self.tree.root
        wanted = tokens[len(match.nodes) * PAGE_TOKENS :]
        places: list[Place] = []
        self.tree.pin(parent)  # making room on disk must not take the past away that this continues
        if self.disk is not None and fresh and None not in fresh and len(parent.tokens) in (0, PAGE_TOKENS):
            places = self.disk.write_now(parent, wanted, [handle for handle in fresh if handle is not None], now_s)
        self.tree.unpin(parent)
        if len(places) < len(fresh):
            tokens = tokens[: (len(match.nodes) + len(places)) * PAGE_TOKENS]
        recorded = self.placement.record(
            tokens,
            match,
            [Page(place=place) for place in places],
            num_answer_tokens=num_answer_tokens,
            now_s=now_s,
            standing=standing,
            num_near=near,
        )
        if self.disk is not None and places:
            self.disk.adopt(recorded.last, len(places))
        return recorded.last if recorded.last.parent is not None else None

    # pasts that are longer than memory

    def back(self, tokens: Sequence[int], handles: Sequence[int | None]) -> list[Node]:
        """Makes whole pages of a live request known, and waits until they are on disk, as far as it takes them; their nodes."""
        last = self.commit(tokens, handles, num_answer_tokens=0, needed=True)
        path = [] if last is None else last.path()
        if self.disk is not None and path:
            for job in {id(node.page.writing): node.page.writing for node in path if node.page.writing is not None}.values():
                self.mover.wait_write(job)
            self.settle()
        return path

    def demote_path(self, path: Sequence[Node], first: int) -> None:
        """The tree lets go of the memory of a path's pages from one on, where they are on disk and no other past needs them."""
        now_s = self.now_s()
        for node in reversed(path[first:]):
            page: Page = node.page
            if page.handle is None:
                continue
            for child in [each for each in node.children.values() if each.tier == MEMORY and each.may_leave]:
                self._leave(child, now_s)  # such as the page that the path continues in one of its own
            if page.place is None or not node.may_leave:
                break
            self.placement.evict(node, now_s, demote=True)
            self.pool.release(page.handle)
            page.handle = None

    def lost(self, node: Node) -> None:
        """A page cannot be read any more: it, and what can only be reached through it, is forgotten."""
        if self.disk is not None:
            self.disk.lost(node, self.now_s())

    # asking for something

    def set_standing(self, tokens: Sequence[int], standing: Standing) -> int:
        """The owner of a past asks for something: how many of its tokens are known here."""
        match = self.tree.match(tokens)
        last = match.partial if match.partial is not None and match.partial_tokens == len(match.partial.tokens) else None
        if last is None and match.nodes:
            last = match.nodes[-1]
        if last is not None:
            self.placement.set_standing(last, standing, self.now_s())
        return match.num_tokens

    def expect(self, tokens: Sequence[int], in_s: float, standing: Standing) -> None:
        """Tokens will be needed in about so many seconds: brings their past into memory meanwhile, if it is worth it."""
        now_s = self.now_s()
        self.set_standing(tokens, replace(standing, hinted_s=now_s, soon_s=now_s + in_s))
        found = self.find(tokens)
        if self.disk is None or found.num_near == len(found.nodes):
            self.let_go(found)
            return
        handles: list[int] = []
        for node in found.nodes[found.num_near :]:
            handle = self.pool.allocate(self.disk.format_of(node.page.place))
            if handle is None:
                worth = float(self.rule.worths([node], MEMORY, now_s)[0])
                cheapest = self.placement.cheapest(MEMORY, now_s)
                if cheapest is None or cheapest[1] >= worth:
                    break
                handle = self.allocate(self.disk.format_of(node.page.place))
                if handle is None:
                    break
            handles.append(handle)
        cold = found.nodes[found.num_near : found.num_near + len(handles)]
        places = [node.page.place for node in cold]
        views = [self.pool.view(handle) for handle in handles]
        if places:
            self.mover.read(places, views, (found, cold, handles), urgent=False)
        else:
            self.let_go(found)

    def settle(self) -> None:
        """Books what the mover has done since the last time."""
        for job in self.mover.finished():
            if isinstance(job, ReadJob):
                self._settle_ahead(job)
            elif isinstance(job, CallJob):
                self.compressor.settle(job)
            elif self.disk is not None:
                self.disk.settle(job)
        if self.disk is not None:
            self.disk.bury(self.now_s())

    def _settle_ahead(self, job: ReadJob) -> None:
        found, cold, handles = job.tag
        self.prices.read(job.num_bytes, job.seconds)
        self.counters.read_bytes += job.num_bytes
        intact = True
        for index, (node, handle) in enumerate(zip(cold, handles, strict=True)):
            intact = intact and job.outcomes.get(index, "gone") is None
            if intact and node.parent is not None:
                self.promote(node, handle)
            self.pool.release(handle)
        self.let_go(found)

    def clear(self) -> None:
        """Forgets every past that no live request holds, on disk as well."""
        self.flush()
        now_s = self.now_s()
        for node in list(self.tree.root.children.values()):
            if not self.tree.is_held(node):
                for page in self.placement.forget(node, now_s):
                    self._free(page)

    def _free(self, page: Page) -> None:
        if page.handle is not None:
            self.pool.release(page.handle)
            page.handle = None
        if self.disk is not None:
            self.disk.unback(page)

    def flush(self) -> None:
        """Waits until everything that is to go to disk is there."""
        self.mover.flush()
        self.settle()

    def close(self) -> None:
        """Writes what is queued, and lets go of the store."""
        self.flush()
        self.mover.stop()
        if self.disk is not None:
            merge_counters(self.disk.store.key_folder, self.counters)
            save_prices(self.disk.store.key_folder, self._threads, self.prices)
            self.disk.store.close()

    def check(self) -> None:
        """Asserts that pages, tree, placement and disk agree."""
        self.pool.check()
        self.tree.check()
        self.placement.check()
        if self.disk is not None:
            self.disk.check()
        for node in self.tree.nodes():
            page: Page = node.page
            assert (page.handle is not None) == (node.tier == MEMORY)
            assert page.handle is None or self.pool.owners(page.handle) > 0
