"""The memory of the past without a model: what is read ahead, compressed, and left on disk by a request that goes on."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.kernels.page_formats import F16, Q4, Q8
from headrace.kv.cache import PageCache
from headrace.kv.pages import format_of
from headrace.kv.residency import Standing
from headrace.model.step import PAGE_TOKENS
from tiny.caches import (
    PAGE_BYTES,
    Open,
    Request,
    Shorten,
    Ticks,
    ask,
    give_back,
    known,
    leave_on_disk,
    node_at,
    page_of,
    restarted,
    take_pages,
    tokens,
)
from tiny.memory import run_files
from tiny.runs import set_byte

P = PAGE_TOKENS
PINNED = Standing(pinned=True)


# reading ahead


def test_expected_past_is_read_ahead(opened: Open, clock: Ticks) -> None:
    past = tokens(1, 4 * P + 9)
    cache = restarted(opened, past, pages=20)
    assert known(cache, past) == (0, 4 * P + 9)
    cache.expect(past, 5.0, Standing())
    cache.flush()
    cache.check()
    assert known(cache, past) == (4 * P, 9)
    assert cache.counters.read_bytes == 4 * PAGE_BYTES
    assert node_at(cache, past, 0).use.standing.soon_s == clock.now_s + 5.0
    assert ask(cache, past) == 4 * P + 9


def test_reading_ahead_displaces_nothing_that_is_worth_more(opened: Open, clock: Ticks) -> None:
    past = tokens(1, 3 * P)
    cache = restarted(opened, past, pages=4)
    ask(cache, tokens(2, 3 * P), PINNED)
    cache.expect(past, 5.0, Standing())
    cache.flush()
    assert known(cache, tokens(2, 3 * P)) == (3 * P, 0)
    assert known(cache, past) == (P, 2 * P)


def test_page_that_cannot_be_read_ahead_stays_where_it_is(opened: Open) -> None:
    cache = opened()
    past = tokens(1, 3 * P)
    ask(cache, past)
    cache.close()
    (path,) = run_files(cache.disk.store.folder)
    set_byte(path, path.stat().st_size - 2 * PAGE_BYTES + 7)  # the second page
    cache = opened()
    cache.expect(past, 5.0, Standing())
    cache.flush()
    cache.check()
    assert known(cache, past) == (P, 2 * P)
    # whoever asks for it computes that page, and it is right on disk again
    assert ask(cache, past) == 3 * P
    cache.close()
    assert ask(opened(), past) == 3 * P


def test_past_that_is_forgotten_while_it_is_read_ahead(opened: Open) -> None:
    past = tokens(1, 3 * P)
    cache = restarted(opened, past)
    cache.expect(past, 5.0, Standing())
    cache.clear()
    cache.flush()
    assert known(cache, past) == (0, 0)
    assert cache.pool.owned_bytes == 0


# compression


def test_pages_are_compressed_before_they_leave_step_by_step(opened: Open, clock: Ticks) -> None:
    cache = opened(disk=False, pages=4, formats=(F16, Q8, Q4))
    ask(cache, tokens(1, 4 * P))
    clock.now_s += 100
    page = cache.allocate()
    cache.flush()
    formats = [format_of(node.page.handle) for node in cache.tree.match(tokens(1, 4 * P)).nodes]
    assert formats == [Q8, Q8, Q8, Q8]
    cache.check()
    more = [page, *(cache.allocate() for _ in range(2))]
    formats = [format_of(node.page.handle) for node in cache.tree.match(tokens(1, 4 * P)).nodes]
    assert formats == [Q4, Q4, Q4, Q4]
    assert ask_formats(cache, tokens(1, 4 * P)) == 4 * P
    for each in more:
        cache.pool.release(each)  # type: ignore[arg-type]


def ask_formats(cache: PageCache, past: list[int]) -> int:
    """A request that reads compressed pages and leaves nothing new."""
    request = Request(cache, past)
    request.end()
    return request.known_tokens


def test_compressed_page_is_not_gone_on_with(opened: Open) -> None:
    """A page that is partly known begins exact for whoever goes on from it; of a compressed one nothing can be taken."""
    cache = opened(disk=False, pages=4, formats=(F16, Q8))
    past = tokens(1, 2 * P)
    ask(cache, past)
    node = node_at(cache, past, 1)
    node.page.handle = cache.compressor.recode(node.page.handle, Q8)
    found = cache.find(past[:50])
    assert (found.num_tokens, found.partial, found.unused) == (P, None, ("format_changed", 18))
    cache.let_go(found)
    assert known(cache, past) == (2 * P, 0)


def test_pages_that_others_read_or_that_are_partly_filled_stay_exact(opened: Open) -> None:
    cache = opened(disk=False, pages=5, formats=(F16, Q8))
    past = tokens(1, 3 * P + 4)
    ask(cache, past)
    live = Request(cache, past[:P])
    assert cache.compressor.squeeze(cache.tree.match(past).nodes[-1])
    formats = [format_of(node.page.handle) for node in cache.tree.match(past).nodes]
    assert formats == [F16, Q8, Q8, F16]
    live.end()


def test_compression_ahead_gives_way_to_whoever_took_the_page_meanwhile(opened: Open) -> None:
    cache = opened(disk=False, pages=16, formats=(F16, Q8))
    past = tokens(1, 4 * P)
    ask(cache, past)
    cache.compressor.squeeze_ahead(cache.tree.match(past).nodes[-1], cache.mover)
    live = Request(cache, past[: 2 * P])
    cache.flush()
    formats = [format_of(node.page.handle) for node in cache.tree.match(past).nodes]
    assert formats == [F16, F16, Q8, Q8]
    live.end()
    assert cache.compressor.num_pending == 0


def test_page_is_narrowed_from_the_form_that_it_has(opened: Open) -> None:
    cache = opened(disk=False, pages=4, formats=(F16, Q8, Q4))
    ask(cache, tokens(1, P))
    node = node_at(cache, tokens(1, P), 0)
    for wanted in (Q8, Q4):
        node.page.handle = cache.compressor.recode(node.page.handle, wanted)
    narrow = cache.compressor._narrow
    assert isinstance(narrow, Shorten)
    assert narrow.steps == [(F16, Q8), (Q8, Q4)]
    assert np.array_equal(cache.pool.view(node.page.handle), page_of(tokens(1, P))[: cache.pool.format_bytes[Q4]])


# pasts that are longer than memory


def test_live_pages_are_backed_and_let_go_of(opened: Open) -> None:
    cache = opened(pages=8)
    past = tokens(1, 4 * P + 9)
    request = Request(cache, past).grow()
    request.shared = cache.back(past[: 4 * P], request.pages[:4])
    assert request.shared.last is not None
    path = request.shared.last.path()
    assert [node.page.place is not None for node in path] == [True] * 4
    cache.tree.unpin(path[-1])
    cache.demote_path(path, 0)
    cache.tree.pin(path[-1])
    cache.check()
    assert known(cache, past) == (0, 4 * P)
    assert cache.pool.num_owned() == 5
    request.end()
    assert known(cache, past) == (4 * P + 9, 0)


def test_page_that_a_path_continues_in_one_of_its_own_does_not_keep_it_in_memory(opened: Open) -> None:
    cache = opened(pages=8)
    past = tokens(1, 2 * P + 9)
    ask(cache, past)
    cache.flush()
    path = cache.tree.match(past[: 2 * P]).nodes
    cache.demote_path(path, 0)
    cache.check()
    assert cache.pool.owned_bytes == 0
    assert known(cache, past) == (0, 2 * P + 9)


def test_past_of_which_a_part_is_on_disk_only_is_committed_there(opened: Open) -> None:
    cache = opened(pages=8)
    past = tokens(1, 6 * P)
    leave_on_disk(cache, past[: 3 * P])
    pages = take_pages(cache, 3)
    for number, page in enumerate(pages, 3):
        cache.pool.view(page)[:] = page_of(past[: (number + 1) * P])
    cache.commit(past, [None] * 3 + pages, num_answer_tokens=1)
    cache.check()
    give_back(cache, pages)
    assert known(cache, past) == (0, 6 * P)
    assert ask(cache, past) == 6 * P
    cache.close()
    assert ask(opened(), past) == 6 * P


def test_past_that_the_disk_does_not_take_is_known_as_far_as_it_was(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(pages=8)
    past = tokens(1, 6 * P)
    leave_on_disk(cache, past[: 3 * P])
    monkeypatch.setattr(type(cache.disk.store), "room_bytes", 0)
    pages = take_pages(cache, 3)
    cache.commit(past, [None] * 3 + pages, num_answer_tokens=1)
    cache.check()
    give_back(cache, pages)
    assert known(cache, past) == (0, 3 * P)
