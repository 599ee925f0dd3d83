"""Damage to what lies on disk: what is put right, what is lost with it, and what those who hold it see."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.model.step import PAGE_TOKENS
from tiny.caches import PAGE_BYTES, Open, Request, ask, known, page_of, places, restarted, tokens
from tiny.memory import pages_on_disk, run_files
from tiny.runs import set_byte

P = PAGE_TOKENS

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
    again = restarted(opened, past)
    again.disk.lost(again.tree.match(past).nodes[1], again.now_s())
    again.check()
    assert known(again, past) == (0, P)
    assert pages_on_disk(folder) == [1]
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
    assert pages_on_disk(folder) == [1]
    # the next use writes it anew
    ask(cache, past)
    cache.flush()
    assert pages_on_disk(folder) == [1, 3]
    assert all(places(cache, past))


def test_lost_page_that_somebody_holds_is_forgotten_when_it_is_let_go(opened: Open) -> None:
    past = tokens(1, 4 * P)
    again = restarted(opened, past)
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
    again = restarted(opened, past)
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
