"""Pages without a model: caches of small pages whose bytes follow from their tokens, and requests that check every one."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headrace.kernels.page_formats import F16, FORMAT_BITS
from headrace.kv import opening
from headrace.kv.cache import Found, PageCache
from headrace.kv.disk import DISK
from headrace.kv.intake import SharedPast
from headrace.kv.pages import PagePool, format_of, pages_for
from headrace.kv.prices import PriceBook
from headrace.kv.residency import DEFAULT_STANDING, Standing
from headrace.kv.runs import PageShape
from headrace.model.step import PAGE_TOKENS
from tiny.memory import FixedPrices, Ticks
from tiny.runs import NOW, journal_of, open_store

LAYER_BYTES = (4096, 2048, 1024)
LAYERS = 2
PAGE_BYTES = LAYERS * LAYER_BYTES[F16]
SHAPE = PageShape(LAYERS, LAYER_BYTES)

Open = Callable[..., PageCache]
"""What the fixture `opened` is: `open_cache` for a folder and a clock that the caches of a test share."""


class Gate:
    """Some calls of a store wait until it is opened, which is soon at the latest when somebody waits for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Any, name: str) -> None:
        self._opened = threading.Event()
        real = getattr(store, name)

        def wait(*rest: Any) -> Any:
            assert self._opened.wait(20)
            return real(*rest)

        monkeypatch.setattr(store, name, wait)

    def open(self, in_s: float = 0.0) -> None:
        threading.Timer(in_s, self._opened.set).start()


class Shorten:
    """Compresses pages so that their bytes say what they were, and from which format they came."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def narrow(self, page_format: int, source: int, target: int) -> None:
        was = source & FORMAT_BITS
        self.steps.append((was, page_format))
        size = LAYERS * LAYER_BYTES[page_format]
        ctypes.memmove(target, source - was, size)


def tokens(seed: int, count: int) -> list[int]:
    """A past that shares nothing with those of other seeds."""
    return [seed, *np.random.default_rng(seed).integers(0, 1 << 20, count - 1).tolist()]


def page_of(past: Sequence[int]) -> npt.NDArray[np.uint8]:
    """The bytes of the last page of a past: slots of its tokens behind each other, then what was never written."""
    start = (len(past) - 1) // PAGE_TOKENS * PAGE_TOKENS
    page = np.zeros(PAGE_BYTES, np.uint8).reshape(PAGE_TOKENS, -1)
    for number in range(start, len(past)):
        digest = hashlib.blake2b(np.array(past[: number + 1], np.int64).tobytes(), digest_size=16).digest()
        page[number - start] = np.resize(np.frombuffer(digest, np.uint8), page.shape[1])
    return page.reshape(-1)


def open_cache(
    folder: Path | None = None,
    *,
    pages: int = 100,
    formats: Sequence[int] = (F16,),
    limit_bytes: int = 10**9,
    clock: Callable[[], float] | None = None,
    prices: PriceBook | None = None,
) -> PageCache:
    """A cache with memory for some exact pages, and with a folder one that keeps them."""
    clock = clock or Ticks(NOW)
    pool = PagePool(pages * PAGE_BYTES, [LAYERS * size for size in LAYER_BYTES])
    store = None if folder is None else open_store(folder, shape=SHAPE, limit_bytes=limit_bytes, clock=clock)
    return opening.open_cache(
        pool,
        formats=formats,
        narrow=Shorten(),
        store=store,
        journal=None if store is None else journal_of(store),
        prices=prices or FixedPrices(),
        wall_clock=clock,
        timer=lambda: 0.0,
    )


def restarted(opened: Open, *pasts: Sequence[int], **options: Any) -> PageCache:
    """A cache opened anew after requests for pasts, which are on disk and nowhere else."""
    before = opened(**options)
    for past in pasts:
        ask(before, past)
    before.close()
    return opened(**options)


class Request:
    """What a request does with a cache: takes what is known, checks it, makes the rest, and leaves it behind."""

    def __init__(self, cache: PageCache, past: Sequence[int]) -> None:
        self.cache, self.past = cache, list(past)
        self.found: Found = cache.find(self.past)
        self.pages: list[int] = []
        self.num_read = 0
        self.shared: SharedPast | None = None
        for number, node in enumerate(self.found.nodes):
            if node.page.handle is not None:
                cache.pool.share(node.page.handle)
                self.pages.append(node.page.handle)
            else:
                self.pages.append(self._read(number))
        self.known_tokens = len(self.pages) * PAGE_TOKENS
        partial = self.found.partial
        if partial is not None:
            page = self._allocate()
            if partial.page.handle is not None:
                cache.pool.view(page)[:] = cache.pool.view(partial.page.handle)
            else:
                assert self._fetch(partial.page.place, page) is None
            self.pages.append(page)
            self.known_tokens += self.found.partial_tokens
        self._check()
        self.num_tokens = self.known_tokens

    def grow(self, count: int | None = None) -> Request:
        """Makes the next tokens of the past, or all that are missing."""
        end = len(self.past) if count is None else self.num_tokens + count
        while len(self.pages) < pages_for(end):
            self.pages.append(self._allocate())
        for number in range(self.num_tokens // PAGE_TOKENS, pages_for(end)):
            slots = self.cache.pool.view(self.pages[number]).reshape(PAGE_TOKENS, -1)
            made = page_of(self.past[: min(end, (number + 1) * PAGE_TOKENS)]).reshape(PAGE_TOKENS, -1)
            first, last = max(0, self.num_tokens - number * PAGE_TOKENS), min(PAGE_TOKENS, end - number * PAGE_TOKENS)
            slots[first:last] = made[first:last]
        self.num_tokens = end
        return self

    def share(self, *, complete: bool = False) -> Request:
        """Lets others find the whole pages that are made."""
        self.cache.let_go(self.found)
        self.shared = self.cache.share(self.past[: self.num_tokens], self.pages, self.shared, complete=complete)
        self.pages = list(self.shared.handles)  # type: ignore[arg-type] # all are in memory
        return self

    def end(self, standing: Standing = DEFAULT_STANDING, *, answer: int = 1) -> int:
        """Leaves what was made to others; the tokens that were known."""
        self.cache.let_go(self.found)
        made, shared = self.past[: self.num_tokens], self.shared
        self.cache.commit(made, self.pages, num_answer_tokens=answer, standing=standing, shared=shared)
        self.shared = None
        self.drop()
        return self.known_tokens

    def drop(self) -> None:
        """Ends without leaving anything more than what was shared."""
        self.cache.let_go(self.found)
        if self.shared is not None:
            self.cache.end(self.shared)
            self.shared = None
        give_back(self.cache, self.pages)
        self.pages = []

    def _allocate(self) -> int:
        page = self.cache.allocate()
        assert page is not None, "no room"
        return page

    def _fetch(self, place: object, page: int) -> str | None:
        assert self.cache.disk is not None
        self.num_read += 1
        (failure,) = self.cache.disk.store.read_many([place], [self.cache.pool.view(page)])  # type: ignore[list-item]
        return failure

    def _read(self, number: int) -> int:
        node = self.found.nodes[number]
        assert self.cache.disk is not None
        assert node.tier == DISK
        place = node.page.place  # None if a page before it took it along when it was lost
        page = self.cache.allocate(F16 if place is None else self.cache.disk.format_of(place))
        assert page is not None, "no room"
        failure = "gone" if place is None else self._fetch(place, page)
        if failure is not None:  # computed again, and put right on disk
            self.cache.pool.view(page)[:] = page_of(self.past[: (number + 1) * PAGE_TOKENS])
        self.cache.promote(node, page)
        if failure is not None:
            self.cache.disk.repair(node, self.cache.pool.view(page), self.cache.now_s())
        return page

    def _check(self) -> None:
        """Every slot that is known is what it should be."""
        for number, page in enumerate(self.pages):
            end = min(self.known_tokens, (number + 1) * PAGE_TOKENS)
            size = (end - number * PAGE_TOKENS) * (PAGE_BYTES // PAGE_TOKENS)
            expected = page_of(self.past[:end])[: min(size, len(self.cache.pool.view(page)))]
            assert np.array_equal(self.cache.pool.view(page)[: len(expected)], expected), f"page {number}"
            if end % PAGE_TOKENS:
                assert format_of(page) == F16


def ask(cache: PageCache, past: Sequence[int], standing: Standing = DEFAULT_STANDING, *, answer: int = 1) -> int:
    """One request for a past, checked; the tokens that were known."""
    known = Request(cache, past).grow().end(standing, answer=answer)
    cache.check()
    return known


def leave_on_disk(cache: PageCache, past: Sequence[int], num_near: int = 0) -> None:
    """One request for a past, of which all but the first pages are on disk only afterwards."""
    ask(cache, past)
    cache.flush()
    cache.demote_path(cache.tree.match(past).nodes, num_near)


def known(cache: PageCache, past: Sequence[int]) -> tuple[int, int]:
    """Tokens of a past that are known in memory, and on disk only."""
    found = cache.find(past)
    near = min(found.num_near * PAGE_TOKENS, found.num_tokens)
    if found.partial is not None and found.partial.page.handle is not None:
        near += found.partial_tokens
    cache.let_go(found)
    return near, found.num_tokens - near


def node_at(cache: PageCache, past: Sequence[int], number: int) -> Any:
    """The node of one page of a past."""
    return cache.tree.match(past).nodes[number]


def places(cache: PageCache, past: Sequence[int]) -> list[tuple[int, int] | None]:
    """Where the pages of a past are on disk."""
    return [None if node.page.place is None else tuple(node.page.place) for node in cache.tree.match(past).nodes]


def take_pages(cache: PageCache, count: int) -> list[int]:
    """Pages for which there is room."""
    pages = [cache.allocate() for _ in range(count)]
    assert None not in pages, "no room"
    return pages  # type: ignore[return-value]


def give_back(cache: PageCache, pages: Sequence[int]) -> None:
    """Ends the ownership of pages."""
    for page in pages:
        cache.pool.release(page)


def check_nothing_is_held(cache: PageCache) -> None:
    """Books agree, and all memory that is taken belongs to the tree."""
    cache.flush()
    cache.check()
    handles = [node.page.handle for node in cache.tree.nodes() if node.page.handle is not None]
    assert all(cache.pool.owners(handle) == 1 for handle in handles)
    assert all(node.pins == 0 for node in cache.tree.nodes())
    assert cache.pool.owned_bytes == sum(cache.pool.format_bytes[format_of(handle)] for handle in handles)
    assert cache.pool.reserved_bytes == 0
