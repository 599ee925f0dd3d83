"""The memory of the past: finds what is known of some tokens, takes in what was computed, decides what stays where.

A live request owns the pages it reads and writes by owner counts of the pool; between requests the tree owns them, so a
conversation is no more than its tokens:

    find       the longest known past; its last page is held, so nothing of it leaves the tree meanwhile
    allocate   a page to write to; makes room by compressing, moving to disk, or forgetting what is worth least
    share      the whole pages that a request has computed so far become part of the tree: others find them meanwhile
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
from headrace.kv.books import MemoryBooks, Page
from headrace.kv.compress import Compressor
from headrace.kv.counters import Counters
from headrace.kv.disk import MEMORY, DiskTier
from headrace.kv.intake import Intake, SharedPast, num_near
from headrace.kv.mover import CallJob, Mover, ReadJob
from headrace.kv.pages import PagePool, format_of
from headrace.kv.placement import Placement
from headrace.kv.prices import PriceBook
from headrace.kv.residency import DEFAULT_STANDING, Residency, Standing
from headrace.kv.tree import Miss, Node
from headrace.model.step import PAGE_TOKENS

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
    unused: tuple[Literal["gone", "format_changed"], int] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return len(self.nodes) * PAGE_TOKENS + self.partial_tokens


class SteadyClock:
    """Seconds since the epoch, never less than before."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock, self._now_s = wall_clock, 0.0

    def __call__(self) -> float:
        """The time now."""
        self._now_s = max(self._now_s, self._wall_clock())
        return self._now_s


@dataclass(frozen=True)
class Parts:
    """What a `PageCache` works with, all of it of one pool: `opening.py` makes them. `keep` is called at the end."""

    pool: PagePool
    books: MemoryBooks
    placement: Placement
    rule: Residency
    prices: PriceBook
    counters: Counters
    compressor: Compressor
    mover: Mover
    disk: DiskTier | None
    clock: SteadyClock
    keep: Callable[[], None]


class PageCache:
    """The known past of one model.

    find, let_go                   look for a past and hold it; hold it no longer
    allocate, reserve, make_room   memory
    promote                        a page that was read from disk
    share, commit, end             pages that were computed, while their request lives and when it has ended
    back, hold, demote_path        a past that is longer than memory
    set_standing, expect, lost     what the owner of a past wishes; what happened to a page
    settle, flush, clear, close    what the mover has done; all it has to do; nothing is known; nothing is open
    """

    def __init__(self, parts: Parts) -> None:
        self.pool, self.placement, self.tree = parts.pool, parts.placement, parts.placement.tree
        self.rule, self.prices, self.counters = parts.rule, parts.prices, parts.counters
        self.compressor, self.mover, self.disk = parts.compressor, parts.mover, parts.disk
        self._books, self._clock, self._keep = parts.books, parts.clock, parts.keep
        self._intake = Intake(parts.placement, parts.pool, parts.books, parts.disk, parts.clock)

    @property
    def formats(self) -> tuple[int, ...]:
        """Codes of the formats of pages in memory, the most exact first."""
        return self.compressor.formats

    def now_s(self) -> float:
        """Seconds since the epoch, never less than before."""
        return self._clock()

    # finding

    def find(self, tokens: Sequence[int]) -> Found:
        """The longest known past of some tokens. Holds it, and touches nothing else."""
        self.settle()
        match = self.tree.match(tokens)
        if self.disk is not None and match.num_tokens < len(tokens) and self.disk.attach(self.now_s()):
            match = self.tree.match(tokens)  # another process had written it
        nodes = self._readable(match.nodes)
        near = num_near(nodes)
        partial, partial_tokens = match.partial, match.partial_tokens
        reason: Literal["gone", "format_changed"] = "gone"
        if len(nodes) < len(match.nodes) or (partial is not None and not self._readable([partial])):
            partial, partial_tokens = None, 0
        if nodes and len(nodes[-1].tokens) < PAGE_TOKENS:
            partial = nodes.pop()
            partial_tokens, near = len(partial.tokens), min(near, len(nodes))
        if partial is not None and self._lossy(partial):
            partial, partial_tokens = None, 0  # the page that goes on from it must begin exact
            reason = "format_changed"
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
        not_held_bytes = self._books.known_bytes - self._books.held_bytes
        return (self.pool.free_bytes + not_held_bytes) // self.pool.format_bytes[page_format]

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
        self._intake.promote(node, handle)

    def share(
        self,
        tokens: Sequence[int],
        handles: Sequence[int | None],
        shared: SharedPast | None = None,
        *,
        complete: bool = False,
    ) -> SharedPast:
        """The whole pages that a live request has computed so far become part of the tree, held until its end.

        Counted is nothing yet: all that one request shares and commits is one use.

        Args:
            tokens: all tokens of the request whose keys and values were computed.
            handles: the page of each PAGE_TOKENS of them; None where it is on disk only.
            shared: what the call before gave, which ends with this one; None at first.
            complete: the prompt is all there: it is queued for the disk, so that a killed process has kept it.

        Returns:
            What is shared now. Its `handles` are the request's pages from here on: where the tree knew a page already, that one
            has come in place of the request's own. To be handed to the next `share`, then to `commit` or `end`.
        """
        self.settle()
        self.rule.prices = self.prices.of_pages(self.pool.format_bytes[F16])
        shared = self._intake.share(tokens, handles, shared, needed=False)
        if complete and self.disk is not None and shared.last is not None:
            self.disk.queue(shared.last, self.now_s())
        return shared

    def commit(
        self,
        tokens: Sequence[int],
        handles: Sequence[int | None],
        *,
        num_answer_tokens: int,
        standing: Standing = DEFAULT_STANDING,
        shared: SharedPast | None = None,
    ) -> Node | None:
        """The pages of a request that ended become part of the tree; the last of them.

        Args:
            tokens: all tokens of the request whose keys and values were computed.
            handles: the page of each PAGE_TOKENS of them; None where it is on disk only. They stay the caller's to release.
            num_answer_tokens: how many of the tokens were generated.
            standing: what the owner of this past asks for.
            shared: what the request has made known before; it ends.
        """
        self.settle()
        self.rule.prices = self.prices.of_pages(self.pool.format_bytes[F16])
        last = self._intake.commit(tokens, handles, shared, num_answer_tokens=num_answer_tokens, standing=standing)
        if self.disk is not None:
            self.disk.queue(last, self.now_s())
        return last if last.parent is not None else None

    def end(self, shared: SharedPast) -> None:
        """A request ends and leaves no more than what it has shared; nobody holds that any longer."""
        self._intake.end(shared)

    # pasts that are longer than memory

    def back(self, tokens: Sequence[int], handles: Sequence[int | None], shared: SharedPast | None = None) -> SharedPast:
        """As `share`, and waits until the pages are on disk, as far as it takes them."""
        self.settle()
        shared = self._intake.share(tokens, handles, shared, needed=True)
        if self.disk is not None and shared.last is not None:
            self.disk.queue(shared.last, self.now_s(), needed=True)
            path = shared.last.path()
            for job in {id(node.page.writing): node.page.writing for node in path if node.page.writing is not None}.values():
                self.mover.wait_write(job)
            self.settle()
        return shared

    def hold(self, node: Node) -> SharedPast:
        """Keeps a page and all before for a live request that adds nothing to them."""
        self.tree.pin(node)
        return SharedPast((), node, None)

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
            self._keep()
            self.disk.store.close()

    def check(self) -> None:
        """Asserts that pages, tree, placement and disk agree."""
        self.pool.check()
        self.tree.check()
        self.placement.check()
        if self.disk is not None:
            self.disk.check()
        known_bytes = held_bytes = 0
        for node in self.tree.nodes():
            page: Page = node.page
            assert (page.handle is not None) == (node.tier == MEMORY)
            assert page.handle is None or self.pool.owners(page.handle) > 0
            assert page.held == (node.holds > 0)
            known_bytes += self._books.size(page.handle)
            held_bytes += self._books.size(page.handle) if page.held else 0
        assert (known_bytes, held_bytes) == (self._books.known_bytes, self._books.held_bytes)
