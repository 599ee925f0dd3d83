"""The memory of the past without a model: what is found, what is kept, what has to leave, and who holds what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.kv.books import Page
from headrace.kv.counters import read_counters
from headrace.kv.disk import DISK
from headrace.kv.opening import open_cache as open_cache_of
from headrace.kv.pages import PagePool
from headrace.kv.residency import Standing
from headrace.kv.stores import PageStore
from headrace.model.step import PAGE_TOKENS
from tiny.caches import (
    LAYER_BYTES,
    LAYERS,
    PAGE_BYTES,
    SHAPE,
    Gate,
    Open,
    Request,
    Ticks,
    ask,
    give_back,
    known,
    leave_on_disk,
    node_at,
    restarted,
    take_pages,
    tokens,
)
from tiny.memory import run_files
from tiny.runs import disk_bytes, open_store

P = PAGE_TOKENS
PINNED = Standing(pinned=True)


# finding and taking in


def test_past_is_found_to_the_token(opened: Open) -> None:
    cache = opened(disk=False)
    past = tokens(1, 100)
    assert ask(cache, past) == 0
    for count in (1, 31, 32, 33, 64, 99, 100):
        found = cache.find(past[:count])
        assert (found.num_tokens, found.miss, found.unused) == (count, None, None)
        assert len(found.nodes) == count // P
        assert (found.partial is None) == (count % P == 0)
        cache.let_go(found)
    other = [*past[:70], -1]
    found = cache.find(other)
    assert (found.num_tokens, len(found.nodes), found.partial_tokens) == (70, 2, 6)
    assert found.miss is not None
    assert (found.miss.reason, found.miss.at_token, found.miss.known_tokens) == ("diverged", 70, tuple(past[70:96]))
    cache.let_go(found)


def test_found_past_is_held_until_it_is_let_go(opened: Open) -> None:
    cache = opened(disk=False, pages=6)
    past = tokens(1, 100)
    ask(cache, past)
    found = cache.find(past)
    assert not cache.make_room(6 * PAGE_BYTES)
    assert known(cache, past) == (100, 0)
    cache.let_go(found)
    cache.let_go(found)
    assert cache.make_room(6 * PAGE_BYTES)
    assert known(cache, past) == (0, 0)


def test_page_that_is_longer_now_takes_the_place_of_its_beginning(opened: Open) -> None:
    cache = opened()
    past = tokens(1, 150)
    for count, was in ((40, 0), (50, 40), (64, 50), (150, 64)):
        assert ask(cache, past[:count]) == was
        cache.flush()
        cache.check()
    # on disk, too, nothing but the longest is left
    assert cache.pool.num_owned() == 5
    cache.close()
    again = opened()
    assert known(again, past) == (0, 150)
    assert again.tree.num_nodes == 5


def test_shorter_past_leaves_the_longer_one_alone(opened: Open) -> None:
    cache = opened()
    past = tokens(1, 60)
    ask(cache, past)
    owned = cache.pool.owned_bytes
    for count in (20, 50, 60):
        assert ask(cache, past[:count]) == count
        assert cache.pool.owned_bytes == owned
    assert known(cache, past) == (60, 0)


def test_pasts_that_part_within_a_page_both_stay(opened: Open) -> None:
    cache = opened(disk=False)
    one = tokens(1, 60)
    other = [*one[:45], *tokens(2, 15)]
    ask(cache, one)
    assert ask(cache, other) == 45
    assert known(cache, one) == (60, 0)
    assert known(cache, other) == (60, 0)
    assert cache.pool.num_owned() == 3  # one page shared


def test_page_that_grows_while_another_request_has_its_beginning(opened: Open) -> None:
    cache = opened(pages=10)
    past = tokens(1, 200)
    ask(cache, past[:40])
    one, two = Request(cache, past[:60]), Request(cache, [*past[:40], *tokens(2, 60)])
    assert (one.known_tokens, two.known_tokens) == (40, 40)
    one.grow().end()
    two.grow().end()
    cache.check()
    assert known(cache, past[:60]) == (60, 0)
    assert known(cache, [*past[:40], *tokens(2, 60)]) == (100, 0)


def test_requests_at_once_for_the_same_past_leave_it_once(opened: Open) -> None:
    cache = opened()
    past = tokens(1, 100)
    both = [Request(cache, past).grow() for _ in range(2)]
    for request in both:
        request.end()
        cache.check()
    assert cache.pool.num_owned() == 4
    cache.flush()
    assert len(run_files(cache.disk.store.folder)) == 1


# leaving memory


def test_least_worth_leaves_first_and_goes_to_disk(opened: Open, clock: Ticks) -> None:
    cache = opened(pages=8)
    for seed in range(4):
        ask(cache, tokens(seed, 2 * P))
        clock.now_s += 100
    cache.flush()
    ask(cache, tokens(9, 3 * P))
    cache.check()
    found = [known(cache, tokens(seed, 2 * P)) for seed in range(4)]
    assert found == [(0, 2 * P), (P, P), (2 * P, 0), (2 * P, 0)]
    assert cache.counters.demoted_pages == 3
    assert ask(cache, tokens(0, 2 * P)) == 2 * P


def test_what_is_not_on_disk_is_dropped_and_that_is_remembered(opened: Open, clock: Ticks) -> None:
    cache = opened(disk=False, pages=4)
    ask(cache, tokens(1, 2 * P))
    clock.now_s += 100
    ask(cache, tokens(2, 4 * P))
    assert cache.counters.dropped_pages == 2
    clock.now_s += 5
    found = cache.find(tokens(1, 2 * P))
    assert found.miss is not None
    assert found.miss.evicted is not None
    assert (found.miss.reason, found.miss.evicted.tier, found.miss.evicted.time_s) == ("evicted", 0, clock.now_s - 5)
    cache.let_go(found)


def test_pinned_past_leaves_after_all_others(opened: Open, clock: Ticks) -> None:
    cache = opened(disk=False, pages=6)
    ask(cache, tokens(1, 2 * P), PINNED)
    for seed in range(2, 8):
        clock.now_s += 100
        ask(cache, tokens(seed, 3 * P))
        assert known(cache, tokens(1, 2 * P)) == (2 * P, 0)
    # but it goes before a request fails
    ask(cache, tokens(9, 6 * P))
    assert known(cache, tokens(1, 2 * P)) == (0, 0)


def test_released_past_leaves_before_all_others(opened: Open, clock: Ticks) -> None:
    cache = opened(disk=False, pages=6)
    for seed in (1, 2):
        ask(cache, tokens(seed, 2 * P))
        clock.now_s += 100
    assert cache.set_standing(tokens(2, 2 * P), Standing(expires_s=0.0)) == 2 * P
    assert cache.set_standing(tokens(3, 2 * P), PINNED) == 0
    ask(cache, tokens(4, 4 * P))
    assert known(cache, tokens(1, 2 * P)) == (2 * P, 0)
    assert known(cache, tokens(2, 2 * P)) == (0, 0)


def test_wish_for_a_past_with_one_more_token_reaches_its_last_page(opened: Open) -> None:
    """The last token of an answer is sampled and never computed, so a conversation has one more than the tree."""
    cache = opened(disk=False, pages=4)
    past = tokens(1, 40)
    ask(cache, past)
    assert cache.set_standing([*past, 7], PINNED) == 40
    assert node_at(cache, past, 1).use.standing == PINNED


def test_page_on_its_way_to_disk_is_waited_for_and_not_lost(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(pages=4)
    gate = Gate(monkeypatch, cache.disk.store, "write")
    ask(cache, tokens(1, 3 * P))
    assert node_at(cache, tokens(1, 3 * P), 0).page.writing is not None
    gate.open(0.05)
    ask(cache, tokens(2, 3 * P))
    assert known(cache, tokens(1, 3 * P)) == (P, 2 * P)


def test_page_that_grows_while_its_beginning_is_written_is_written_too(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened()
    gate = Gate(monkeypatch, cache.disk.store, "write")
    past = tokens(1, 2 * P)
    ask(cache, past[: P + 5])
    ask(cache, past[: P + 9])
    gate.open()
    cache.flush()
    cache.check()
    assert known(cache, past) == (P + 9, 0)
    assert node_at(cache, past[: P + 9], 1).page.place is not None
    cache.close()
    assert ask(opened(), past[: P + 9]) == P + 9


def test_bound_counts_what_is_reserved(opened: Open) -> None:
    cache = opened(disk=False, pages=6)
    ask(cache, tokens(1, 4 * P))
    assert cache.num_room() == 6
    assert cache.reserve(3 * PAGE_BYTES)
    assert cache.num_room() == 3
    assert known(cache, tokens(1, 4 * P)) == (3 * P, 0)
    cache.check()
    assert not cache.reserve(4 * PAGE_BYTES)
    cache.pool.unreserve(3 * PAGE_BYTES)


@pytest.mark.parametrize("disk", [False, True])
def test_room_is_what_can_be_had(opened: Open, disk: bool) -> None:
    cache = opened(disk=disk, pages=12)
    for seed in range(3):
        ask(cache, tokens(seed, 3 * P))
    live = Request(cache, tokens(1, 3 * P)[: 2 * P]).grow()
    room = cache.num_room()
    assert room == 10  # all but the two pages that the request reads
    taken = []
    while (page := cache.allocate()) is not None:
        taken.append(page)
    assert len(taken) == room
    cache.check()
    give_back(cache, taken)
    live.end()


def test_memory_that_is_being_read_into_is_waited_for_before_a_request_fails(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = tokens(1, 3 * P)
    cache = restarted(opened, past, pages=4)
    gate = Gate(monkeypatch, cache.disk.store, "read_many")
    cache.expect(past, 5.0, Standing())
    assert cache.num_room() == 1
    gate.open(0.05)
    give_back(cache, take_pages(cache, 4))


def test_page_that_others_need_on_disk_behind_it_stays(opened: Open) -> None:
    """Its copy on disk was lost, and a request reads what comes behind it: it can neither move nor be dropped."""
    cache = opened(pages=8)
    past = tokens(1, 4 * P)
    leave_on_disk(cache, past, 1)
    assert known(cache, past) == (P, 3 * P)
    first = node_at(cache, past, 0)
    held = cache.find(past)
    cache.disk.unback(first.page)
    cache.check()
    assert not cache.make_room(8 * PAGE_BYTES)
    assert cache.make_room(7 * PAGE_BYTES)
    assert known(cache, past) == (P, 3 * P)
    cache.let_go(held)
    assert cache.make_room(8 * PAGE_BYTES)
    assert known(cache, past) == (0, 0)
    cache.check()


def test_page_behind_which_others_arrive_while_its_write_is_waited_for_stays(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(pages=5)
    past = tokens(1, 3 * P)
    leave_on_disk(cache, past, 1)
    first = node_at(cache, past, 0)
    cache.disk.unback(first.page)
    gate = Gate(monkeypatch, cache.disk.store, "write")
    cache.disk.queue(first, cache.now_s(), needed=True)
    cache.expect(past, 0.0, Standing())  # two pages, which are read when the first has been written
    wait_write = cache.mover.wait_write

    def wait_longer(job: Any) -> None:
        gate.open()
        wait_write(job)
        cache.mover.flush()

    monkeypatch.setattr(cache.mover, "wait_write", wait_longer)
    taken = take_pages(cache, 3)  # the last one needs room, and the first page is all that may leave
    cache.check()
    give_back(cache, taken)


# all of it


def test_clear_forgets_all_but_what_is_held(opened: Open, folder: Path) -> None:
    cache = opened()
    for seed in range(3):
        ask(cache, tokens(seed, 100))
    live = Request(cache, tokens(1, 100)[:40])
    cache.clear()
    cache.check()
    assert [sum(known(cache, tokens(seed, 100))) for seed in range(3)] == [0, 100, 0]
    live.end()
    cache.clear()
    assert cache.tree.num_nodes == cache.pool.owned_bytes == 0
    assert run_files(folder) == []
    assert cache.disk.store.used_bytes == disk_bytes(folder)


def test_counts_are_kept_on_disk_when_a_cache_is_closed(opened: Open) -> None:
    cache = opened()
    ask(cache, tokens(1, 100))
    cache.close()
    path = cache.disk.store.key_folder / "counters.json"
    assert f'"written_bytes":{cache.counters.written_bytes}' in path.read_text()
    assert cache.counters.written_bytes > 4 * PAGE_BYTES


@pytest.mark.parametrize("what", ["handle", "owner", "tier", "place", "pages"])
def test_check_finds_books_that_do_not_agree(opened: Open, what: str) -> None:
    cache = opened()
    past = tokens(1, 3 * P)
    ask(cache, past)
    cache.flush()
    node = node_at(cache, past, 1)
    page: Page = node.page
    handle, place, spare = page.handle, page.place, cache.allocate()
    if what == "handle":
        page.handle = None
    elif what == "owner":
        cache.pool.release(handle)
    elif what == "tier":
        cache.placement.num_pages[DISK] += 1
    elif what == "place":
        page.place = place._replace(index=0)
    else:
        cache.pool.reserved_bytes = cache.pool.limit_bytes
    with pytest.raises(AssertionError):
        cache.check()
    page.handle, page.place = handle, place
    if what == "owner":
        page.handle = spare  # the other one is gone
        spare = None
    cache.placement.num_pages[DISK] = cache.pool.reserved_bytes = 0
    if spare is not None:
        cache.pool.release(spare)
    cache.check()


def test_time_never_goes_back(clock: Ticks, opened: Open) -> None:
    cache = opened(disk=False)
    now = cache.now_s()
    clock.now_s -= 50
    assert cache.now_s() == now
    clock.now_s += 60
    assert cache.now_s() == now + 10


def test_room_is_counted_while_pages_come_go_and_are_held(opened: Open) -> None:
    """`check` compares the running sums with the tree."""
    cache = opened(pages=8)
    live = Request(cache, tokens(1, 3 * P)).grow(2 * P).share()
    cache.check()
    assert cache.num_room() == 6
    ask(cache, tokens(2, 2 * P))
    assert cache.num_room() == 6
    cache.tree.pin(node_at(cache, tokens(2, 2 * P), 0))
    cache.check()
    assert cache.num_room() == 5
    cache.tree.unpin(node_at(cache, tokens(2, 2 * P), 0))
    live.end()
    cache.check()
    assert cache.num_room() == 8


def test_store_beyond_the_disk_needs_no_folder(folder: Path) -> None:
    """Whatever has the methods of the protocols can stand in the place of files, for pages and for what is counted."""

    class Notes:
        def __init__(self) -> None:
            self.kept: dict[str, object] = {}

        def read(self, name: str) -> object:
            return self.kept.get(name)

        def merge(self, name: str, change: Callable[[object], object]) -> bool:
            self.kept[name] = change(self.kept.get(name))
            return True

    class Elsewhere:
        """A store that shows what `PageStore` has, and no more."""

        def __init__(self, store: Any) -> None:
            for name in (each for each in dir(PageStore) if not each.startswith("_")):
                if not isinstance(getattr(PageStore, name), property):
                    setattr(self, name, getattr(store, name))
            self.num_layers, self.used_bytes, self.room_bytes = store.num_layers, store.used_bytes, store.room_bytes

    notes, past = Notes(), tokens(1, 3 * P)
    for expected in (0, 3 * P):
        pool = PagePool(8 * PAGE_BYTES, [LAYERS * size for size in LAYER_BYTES])
        store: Any = Elsewhere(open_store(folder, shape=SHAPE))
        cache = open_cache_of(pool, store=store, journal=notes, wall_clock=Ticks(), timer=lambda: 0.0)
        assert ask(cache, past) == expected
        cache.close()
    assert read_counters(notes).written_bytes > 3 * PAGE_BYTES
