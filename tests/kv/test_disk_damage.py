"""Damage to what lies on disk: what is put right, what is lost with it, and what those who hold it see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.kv.cache import PageCache
from headrace.kv.runs import parse_header
from headrace.model.step import PAGE_TOKENS
from tiny.caches import PAGE_BYTES, Request, Ticks, ask, check_nothing_is_held, known, open_cache, page_of, tokens
from tiny.memory import run_files
from tiny.runs import set_byte

P = PAGE_TOKENS

Open = Callable[..., PageCache]


@pytest.fixture
def clock() -> Ticks:
    return Ticks()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def opened(folder: Path, clock: Ticks) -> Iterator[Open]:
    """Opens caches on one folder; nothing may be held at the end."""
    caches: list[PageCache] = []

    def load(**options: Any) -> PageCache:
        caches.append(open_cache(folder, **{"clock": clock, **options}))
        return caches[-1]

    yield load
    for cache in caches:
        if not cache.mover._stopped:
            check_nothing_is_held(cache)
            cache.close()


def _places(cache: PageCache, past: list[int]) -> list[tuple[int, int] | None]:
    return [None if node.page.place is None else tuple(node.page.place) for node in cache.tree.match(past).nodes]


def _pages_on_disk(folder: Path) -> list[int]:
    """Pages of each run, oldest first."""
    return [parse_header(path.read_bytes()).pages_in(path.stat().st_size) for path in run_files(folder)]


# damage


@pytest.mark.parametrize("number", [0, 1, 3])
def test_damaged_page_is_put_right_on_disk(opened: Open, folder: Path, number: int) -> None:
    past = tokens(1, 4 * P)
    cache = opened()
    ask(cache, past)
    cache.close()
    (path,) = run_files(folder)
    content = path.read_bytes()
    set_byte(path, len(content) - (4 - number) * PAGE_BYTES + 100)
    again = opened()
    assert ask(again, past) == 4 * P
    again.close()
    assert path.read_bytes() == content


def test_page_that_is_lost_takes_what_is_behind_it_along(opened: Open, folder: Path) -> None:
    past = tokens(1, 4 * P)
    cache = opened()
    ask(cache, past)
    cache.close()
    again = opened()
    again.disk.lost(again.tree.match(past).nodes[1], again.now_s())
    again.check()
    assert known(again, past) == (0, P)
    assert _pages_on_disk(folder) == [1]
    found = again.find(past)
    assert found.miss is not None
    assert found.miss.evicted is not None
    assert (found.miss.reason, found.miss.evicted.tier) == ("evicted", 1)
    again.let_go(found)


def test_lost_page_that_is_in_memory_too_stays_there(opened: Open, folder: Path) -> None:
    past = tokens(1, 4 * P)
    cache = opened()
    ask(cache, past)
    cache.flush()
    cache.disk.lost(cache.tree.match(past).nodes[1], cache.now_s())
    cache.check()
    assert known(cache, past) == (4 * P, 0)
    assert _pages_on_disk(folder) == [1]
    # the next use writes it anew
    ask(cache, past)
    cache.flush()
    assert _pages_on_disk(folder) == [1, 3]
    assert all(_places(cache, past))


def test_lost_page_that_somebody_holds_is_forgotten_when_it_is_let_go(opened: Open) -> None:
    past = tokens(1, 4 * P)
    cache = opened()
    ask(cache, past)
    cache.close()
    again = opened()
    held = again.find(past)
    again.disk.lost(held.nodes[1], again.now_s())
    again.check()
    assert held.nodes[1].parent is not None
    # nobody is given it any more
    found = again.find(past)
    assert (found.num_tokens, found.unused) == (P, ("gone", 3 * P))
    again.let_go(found)
    again.let_go(held)
    again.check()
    again.settle()
    assert held.nodes[1].parent is None
    assert again.tree.num_nodes == 1
    again.check()


def test_lost_page_that_is_computed_again_meanwhile_stays(opened: Open) -> None:
    past = tokens(1, 3 * P)
    cache = opened()
    ask(cache, past)
    cache.close()
    again = opened()
    held = again.find(past)
    again.disk.lost(held.nodes[0], again.now_s())
    page = again.allocate()
    assert page is not None
    again.pool.view(page)[:] = page_of(past[:P])
    again.promote(held.nodes[0], page)
    again.pool.release(page)
    again.let_go(held)
    again.settle()
    again.check()
    assert known(again, past) == (P, 0)


def test_live_request_outlives_the_loss_of_its_past(opened: Open) -> None:
    past = tokens(1, 5 * P)
    cache = opened(pages=10)
    ask(cache, past[: 3 * P])
    cache.flush()
    live = Request(cache, past)
    cache.disk.lost(live.found.nodes[0], cache.now_s())
    cache.check()
    live.grow().end()
    cache.check()
    assert known(cache, past) == (5 * P, 0)
    cache.close()
    assert ask(opened(), past) == 5 * P
