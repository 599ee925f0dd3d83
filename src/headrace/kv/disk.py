"""The disk tier: which pages of the tree have a copy on disk, which are written, and which make room.

Pages are written as runs (`store.py`) once their use has ended, parents before children, so what lies on disk are whole
beginnings. A copy stays when its page is also in memory: then leaving memory is free, and a crash loses nothing.

    path     [A][B][C][D]        [A][B][C] ─ run 1        [D] ─ queued, its owner share keeps it in memory
                                                                 until the mover has written it

Pages are written if the chance of their reuse times the seconds that reading them saves over computing them is more than
the processor time that writing them takes from others, and if they are worth more than what they displace. Moves run on the
mover's thread; tree and books change on the caller's thread only, when `settle` picks up what has been done.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.kv.books import MemoryBooks, Page
from headrace.kv.budget import Refusal
from headrace.kv.counters import Counters
from headrace.kv.mover import Mover, WriteJob
from headrace.kv.pages import PagePool, format_of
from headrace.kv.placement import Placement
from headrace.kv.prices import PriceBook
from headrace.kv.residency import Residency, Use
from headrace.kv.runs import Place, Run, RunDraft, chain
from headrace.kv.stores import PageStore
from headrace.kv.tree import Node

RUN_BYTES = 8 << 20
"""Bytes of a run at most: what is written without a pause, and read by nobody meanwhile."""
RETRY_S = 30.0
"""How long nothing is written after the disk refused for a reason that lasts."""
MEMORY, DISK = 0, 1
"""The tiers: pages in memory, and pages that are on disk only."""
_CONTINUES = "continues"
"""A fact of a run: the run that ends where it begins is of the same use, written while its request was still computing."""


@dataclass(frozen=True)
class _Written:
    """A page of a write job: its node and the tokens that it had."""

    node: Node
    tokens: tuple[int, ...]


def _can_be_written(node: Node) -> bool:
    page: Page = node.page
    return page.handle is not None and page.place is None and page.writing is None


class DiskTier:
    """What of the tree lies on disk, and where."""

    def __init__(
        self,
        placement: Placement,
        pool: PagePool,
        books: MemoryBooks,
        store: PageStore,
        mover: Mover,
        rule: Residency,
        prices: PriceBook,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.store, self.mover, self._books = store, mover, books
        self._placement, self._tree, self._pool = placement, placement.tree, pool
        self._rule, self._prices, self._counters, self._clock = rule, prices, counters, clock
        self._nodes: dict[int, list[Node | None]] = {}  # pages of each run; None: known by another run already
        self._formats: dict[int, int] = {}  # of each run
        self._names: dict[int, str] = {}
        self._is_outdated = False  # something was lost: others may have removed it for a copy of theirs
        self._dead: list[Node] = []  # lost while somebody held them
        self._silent_until = 0.0
        self.refusal: Refusal | None = None

    # what is there

    def attach(self, now_s: float) -> int:
        """Puts runs that are on disk, and not known yet, into the tree; the number of their pages."""
        runs = self.store.scan()
        if not runs:
            return 0
        whole = (node for node in self._tree.nodes() if len(node.tokens) == self._tree.page_tokens)
        nodes = {b"": self._tree.root, **{self.chain_of(node): node for node in whole}}
        told = _told(runs)
        return sum(self._attach(run, *told.get(run.id, (run.facts, run.time_s)), nodes, now_s) for run in runs)

    def chain_of(self, node: Node) -> bytes:
        """The strong hash of a page and all before."""
        unknown = []
        while node.parent is not None and not node.page.chain:
            unknown.append(node)
            node = node.parent
        chained: bytes = b"" if node.parent is None else node.page.chain
        for each in reversed(unknown):
            chained = each.page.chain = chain(chained, each.tokens)
        return chained

    def _attach(self, run: Run, facts: Mapping[str, int], time_s: float, nodes: dict[bytes, Node], now_s: float) -> int:
        node = nodes.get(run.parent)
        if node is None:
            return 0  # its beginning went away since it was listed
        keys = list(self._tree.split(run.tokens))[: run.num_pages]
        listed: list[Node | None] = []
        for index, key in enumerate(keys):
            child = node.children.get(key)
            if child is None:
                break
            listed.append(child if self._takes(child.page, run, index) else None)
            node = child
        start = len(listed)
        added: list[Node] = []
        if start < len(keys) and (node.parent is None or len(node.tokens) == self._tree.page_tokens):
            pages = [Page(self._books, place=Place(run.id, index)) for index in range(start, len(keys))]
            tokens = run.tokens[start * self._tree.page_tokens : len(keys) * self._tree.page_tokens]
            last = self._placement.restore(node, tokens, pages, facts, time_s, now_s)
            added = last.path()[-len(pages) :]
            for each in added:
                if len(each.tokens) == self._tree.page_tokens:
                    nodes[self.chain_of(each)] = each
        self._book(run, [*listed, *added])
        return len(added)

    def _takes(self, page: Page, run: Run, index: int) -> bool:
        """Whether the copy of a page in this run becomes the one that is kept of it.

        That is the more exact one, and of two alike the older: so processes that have written the same agree whose goes.
        """
        if page.place is not None:
            kept = page.place.run
            if (self._formats[kept], self._names[kept]) < (run.page_format, run.name):
                return False
            self.unback(page)
        page.place, page.writing = Place(run.id, index), None
        return True

    def format_of(self, place: Place) -> int:
        """The format code of a page on disk."""
        return self._formats[place.run]

    def _book(self, run: Run, nodes: list[Node | None]) -> None:
        """Takes a run's pages into the books; those that are None are freed if they are its last."""
        self._nodes[run.id], self._formats[run.id], self._names[run.id] = nodes, run.page_format, run.name
        self._trim(run.id)

    # writing

    def queue(self, last: Node, now_s: float, *, needed: bool = False) -> list[WriteJob]:
        """Queues what of a path is not on disk and is worth writing, or is `needed` there."""
        if (now_s < self._silent_until and not needed) or last.parent is None:
            return []
        if self._is_outdated:
            self._is_outdated = False
            self.attach(now_s)
        path = last.path()
        first = next((i for i, node in enumerate(path) if node.page.place is None and node.page.writing is None), len(path))
        groups = self._groups(path[first:])
        if not needed and groups and not self._pays(groups, now_s):
            if last.use.recalled is None:  # else it is asked again when the use has ended
                self._counters.refused_pages += sum(map(len, groups))
            return []
        jobs = []
        for number, group in enumerate(groups):
            worth = math.inf if needed else float(self._rule.worths([group[0]], DISK, now_s)[0])
            if not self._make_room(self._run_bytes(len(group), format_of(group[0].page.handle)), worth, now_s):
                self._counters.refused_pages += sum(map(len, groups[number:]))
                break  # nor its children: they could not be reached
            jobs.append(self._write(group, now_s))
        return jobs

    def _groups(self, nodes: Sequence[Node]) -> list[list[Node]]:
        """What of consecutive pages can be written, by runs."""
        unwritten = list(itertools.takewhile(_can_be_written, nodes))
        return [unwritten[start:end] for start, end in self._runs_of([node.page.handle for node in unwritten])]

    def _runs_of(self, handles: Sequence[int]) -> list[tuple[int, int]]:
        """How consecutive pages in memory are cut into runs: of one format each, and of RUN_BYTES at most."""
        found: list[tuple[int, int]] = []
        for at, handle in enumerate(handles):
            start = found[-1][0] if found else 0
            size = self._pool.format_bytes[format_of(handle)]
            if found and format_of(handles[start]) == format_of(handle) and (at + 1 - start) * size <= RUN_BYTES:
                found[-1] = (start, at + 1)
            else:
                found.append((at, at + 1))
        return found

    def _pays(self, groups: list[list[Node]], now_s: float) -> bool:
        """Whether pages are worth their writing: seconds that finding them would save, against those it takes from others."""
        first = groups[0][0]
        num_bytes = sum(self._run_bytes(len(group), format_of(group[0].page.handle)) for group in groups)
        num_tokens = sum(len(node.tokens) for group in groups for node in group)
        compute_s = self._prices.compute_s(num_tokens, (first.depth_pages - 1) * self._tree.page_tokens)
        write_s, read_s = self._prices.write_s(num_bytes), self._prices.read_s(num_bytes)
        if compute_s is None or write_s is None or read_s is None:
            return True  # what was never measured is tried: that is how it gets measured
        return self._rule.chance(first, now_s) * (compute_s - read_s) > write_s

    def _run_bytes(self, num_pages: int, page_format: int) -> int:
        return self.store.header_bytes(num_pages) + num_pages * self.store.page_bytes(page_format)

    def _make_room(self, need_bytes: int, worth: float, now_s: float) -> bool:
        """Forgets pages on disk that are worth less, until there is room; False if there is none."""
        while self.store.room_bytes < need_bytes:
            cheapest = self._placement.cheapest(DISK, now_s)
            if cheapest is None or cheapest[1] >= worth:
                return False
            self.forget(cheapest[0], now_s)
            self._counters.dropped_pages += 1
        return True

    def write_now(self, parent: Node, tokens: Sequence[int], handles: Sequence[int], now_s: float) -> list[Place]:
        """Writes pages that the tree does not know yet, and waits for it; where those before the first that was refused are.

        They are the caller's to put into the tree, and to book with `adopt`.
        """
        chained, places = self.chain_of(parent), []
        keys = list(self._tree.split(tokens))
        for start, end in self._runs_of(handles):
            page_format = format_of(handles[start])
            if not self._make_room(self._run_bytes(end - start, page_format), math.inf, now_s):
                break
            group = keys[start:end]
            views = [self._pool.view(handle) for handle in handles[start:end]]
            flat = tuple(token for key in group for token in key)
            draft = RunDraft(chained, parent.depth_pages + start, flat, page_format, views, {}, now_s)
            job = self.mover.write(draft, None)
            self.mover.wait_write(job)
            if not isinstance(job.outcome, Run):
                self.refusal = job.outcome
                break
            run = job.outcome
            self._nodes[run.id], self._formats[run.id], self._names[run.id] = [None] * len(group), run.page_format, run.name
            places += [Place(run.id, index) for index in range(len(group))]
            for key in group:
                chained = chain(chained, key)
        return places

    def adopt(self, last: Node, num_pages: int) -> None:
        """Books the last pages of a path, which `write_now` wrote."""
        for node in last.path()[-num_pages:]:
            place = node.page.place
            self._nodes[place.run][place.index] = node

    def _write(self, group: list[Node], now_s: float) -> WriteJob:
        parent = group[0].parent
        assert parent is not None
        handles = [node.page.handle for node in group]
        use: Use = group[0].use
        facts = self._placement.use_facts(use)
        if parent.use is use and parent.depth_pages > use.num_before:
            facts[_CONTINUES] = 1
        draft = RunDraft(
            parent=self.chain_of(parent),
            start_page=parent.depth_pages,
            tokens=tuple(token for node in group for token in node.tokens),
            page_format=format_of(handles[0]),
            pages=[self._pool.view(handle) for handle in handles],
            facts=facts,
            time_s=now_s,
        )
        for handle in handles:
            self._pool.share(handle)
        job = self.mover.write(draft, ([_Written(node, node.tokens) for node in group], handles))
        for node in group:
            node.page.writing = job
        return job

    # what has been done

    def settle(self, job: WriteJob) -> None:
        """Books a write that is done."""
        if isinstance(job.outcome, Run):
            self._counters.written_bytes += job.outcome.num_bytes
            self._prices.written(job.outcome.num_bytes, job.work_s)
        if job.tag is None:  # of `write_now`
            return
        written, handles = job.tag
        for handle in handles:
            self._pool.release(handle)
        live = [each for each in written if each.node.parent is not None and each.node.page.writing is job]
        for each in live:
            each.node.page.writing = None
        if isinstance(job.outcome, Refusal):
            self.refusal = job.outcome
            self._counters.refused_pages += len(written)
            if job.outcome.reason != "no room":
                self._silent_until = self._clock() + RETRY_S
            return
        run = job.outcome
        assert run is not None
        nodes: list[Node | None] = []
        for each in written:
            parent = each.node.parent
            # without its parent on disk, or with more tokens than were written, a page is of no use there
            if parent is None or each.node.tokens != each.tokens or (parent.parent is not None and parent.page.place is None):
                break
            if each.node.page.place is None:
                each.node.page.place = Place(run.id, len(nodes))
                nodes.append(each.node)
            else:  # another process was faster
                nodes.append(None)
        self._book(run, [*nodes, *[None] * (len(written) - len(nodes))])

    # forgetting

    def forget(self, node: Node, now_s: float) -> None:
        """Takes a page that is on disk only, and all behind it, out of the tree, and frees what they take."""
        for page in self._placement.forget(node, now_s):
            self.free(page)

    def free(self, page: Page) -> None:
        """Frees what a page takes that is no longer in the tree."""
        if page.handle is not None:
            self._pool.release(page.handle)
            page.handle = None
        page.writing = None
        self.unback(page)

    def unback(self, page: Page) -> None:
        """Frees a page's copy on disk."""
        if page.place is None:
            return
        run, index = page.place
        page.place = None
        nodes = self._nodes.get(run)
        if nodes is not None and index < len(nodes):
            nodes[index] = None
            self._trim(run)

    def lost(self, node: Node, now_s: float) -> None:
        """A page's copy is gone or damaged: frees it and all behind it in its run, and forgets what is nowhere else."""
        self._is_outdated = True
        place = node.page.place
        doomed = [node] if place is None else self._nodes[place.run][place.index :]
        for other in doomed:
            if other is None or other.parent is None:
                continue
            if other.page.handle is not None:
                self.unback(other.page)
            elif self._tree.is_held(other):
                self.unback(other.page)
                self._dead.append(other)
            else:
                self.forget(other, now_s)

    def bury(self, now_s: float) -> None:
        """Forgets pages that were lost while somebody held them, those that nobody holds any more."""
        dead, self._dead = self._dead, []
        for node in dead:
            if node.parent is None or node.page.handle is not None or node.page.place is not None:
                continue  # gone already, or computed again
            if self._tree.is_held(node):
                self._dead.append(node)
            else:
                self.forget(node, now_s)

    def repair(self, node: Node, view: npt.NDArray[np.uint8], now_s: float) -> None:
        """A damaged page was computed again: writes it over the damage if it is the same to the bit, else frees the copy."""
        place = node.page.place
        if place is not None and not self.store.repair(place, view):
            self.lost(node, now_s)

    def _trim(self, run: int) -> None:
        """Frees the end of a run that nobody needs any more."""
        nodes = self._nodes[run]
        places = []
        while nodes and nodes[-1] is None:
            nodes.pop()
            places.append(Place(run, len(nodes)))
        if places:
            self.store.drop(places[::-1])
        if not nodes:
            del self._nodes[run], self._formats[run], self._names[run]

    def check(self) -> None:
        """Asserts that books and tree agree."""
        for run, nodes in self._nodes.items():
            assert nodes
            assert nodes[-1] is not None
            for index, node in enumerate(nodes):
                assert node is None or node.page.place == Place(run, index)
        for each in self._tree.nodes():
            page: Page = each.page
            if page.place is not None:
                assert self._nodes[page.place.run][page.place.index] is each
            assert page.place is not None or page.handle is not None or each in self._dead
            assert (page.handle is None) == (each.tier == DISK)


def _told(runs: Sequence[Run]) -> dict[int, tuple[Mapping[str, int], float]]:
    """Facts and time of uses that were written in several runs, by run: the last one, written at the end, has them all."""
    told: dict[int, tuple[Mapping[str, int], float]] = {}
    later = [run for run in runs if run.facts.get(_CONTINUES)]
    if later:
        ends = {run.chain(run.num_pages - 1): run for run in runs}
        for run in sorted(later, key=lambda run: -run.start_page):
            before = ends.get(run.parent)
            if before is not None:
                told[before.id] = told.get(run.id, (run.facts, run.time_s))
    return told
