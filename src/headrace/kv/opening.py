"""Puts the memory of the past together: what `PageCache` works with, as it is by default."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.kernels.page_formats import F16
from headrace.kv.books import MemoryBooks
from headrace.kv.cache import PageCache, Parts, SteadyClock
from headrace.kv.compress import Compressor, Narrow
from headrace.kv.counters import Counters, merge_counters
from headrace.kv.disk import DiskTier
from headrace.kv.mover import Mover
from headrace.kv.pages import PagePool
from headrace.kv.placement import Placement
from headrace.kv.prices import PriceBook, read_prices, save_prices
from headrace.kv.residency import Residency
from headrace.kv.stores import Journal, PageStore
from headrace.kv.tree import PrefixTree
from headrace.model.step import PAGE_TOKENS


def open_cache(
    pool: PagePool,
    *,
    formats: Sequence[int] = (F16,),
    narrow: Narrow | None = None,
    store: PageStore | None = None,
    journal: Journal | None = None,
    prices: PriceBook | None = None,
    threads: int = 1,
    wall_clock: Callable[[], float],
    timer: Callable[[], float],
) -> PageCache:
    """The past of one model, with what the store holds of it.

    Args:
        pool: memory for pages.
        formats: codes of the formats of pages in memory, the most exact first.
        narrow: what compresses pages, needed for formats other than f16.
        store: pages on disk, if there are any.
        journal: what earlier processes have counted and measured; nothing is kept without one.
        prices: what moving and computing cost; measured by default.
        threads: threads that compute, on which prices depend.
        wall_clock: seconds since the epoch, for uses that outlive the process.
        timer: seconds that only grow, for prices.
    """
    prices, counters, clock = prices or PriceBook(), Counters(), SteadyClock(wall_clock)
    books = MemoryBooks(pool.format_bytes)
    rule = Residency(prices.of_pages(pool.format_bytes[F16]))
    # pool and store bound bytes; these numbers of pages only say how often the ranking is renewed
    disk_bytes = 0 if store is None else store.used_bytes + store.room_bytes
    most = [max(1, size // min(pool.format_bytes)) for size in (pool.limit_bytes, disk_bytes)]
    placement = Placement(PrefixTree(PAGE_TOKENS, on_hold=books.hold), most, rule)
    mover = Mover(store, timer)
    disk = None
    if store is not None:
        disk = DiskTier(placement, pool, books, store, mover, rule, prices, counters, clock)
        disk.attach(clock())
    if journal is not None:
        prices.resume(read_prices(journal, threads))

    def keep() -> None:
        if journal is not None:
            merge_counters(journal, counters)
            save_prices(journal, threads, prices)

    compressor = Compressor(pool, formats, narrow, counters)
    return PageCache(Parts(pool, books, placement, rule, prices, counters, compressor, mover, disk, clock, keep))
