"""The disk tier of the tree: what is written and when, what is found again, and what makes room."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.kernels.page_formats import F16, Q8
from headrace.kv import disk
from headrace.kv.disk import RETRY_S
from headrace.kv.residency import Standing
from headrace.model.step import PAGE_TOKENS
from tiny.caches import PAGE_BYTES, Open, Request, Ticks, ask, known, places, restarted, tokens
from tiny.memory import FixedPrices, fill_disk, pages_on_disk, run_files
from tiny.runs import disk_bytes

P = PAGE_TOKENS

# writing


def test_each_turn_writes_what_it_added_and_nothing_twice(opened: Open, folder: Path) -> None:
    cache = opened()
    past = tokens(1, 10 * P)
    written = 0
    for count in (2 * P, 2 * P, 5 * P, 10 * P):
        ask(cache, past[:count])
        cache.flush()
        cache.check()
        assert all(places(cache, past[:count]))
        written = cache.disk.store.written_bytes
    assert pages_on_disk(folder) == [2, 3, 5]
    assert written == cache.disk.store.written_bytes == cache.counters.written_bytes
    assert sum(path.stat().st_size for path in run_files(folder)) == written


def test_partly_filled_page_is_written_again_when_it_has_grown(opened: Open, folder: Path) -> None:
    cache = opened()
    past = tokens(1, 3 * P + 20)
    ask(cache, past[: 2 * P + 5])
    cache.flush()
    assert pages_on_disk(folder) == [3]
    ask(cache, past)
    cache.flush()
    assert pages_on_disk(folder) == [2, 2]


def test_page_that_grew_while_it_was_written_is_not_taken_for_what_it_was(opened: Open, folder: Path) -> None:
    cache = opened()
    past = tokens(1, 2 * P + 20)
    ask(cache, past[: P + 5])
    ask(cache, past)  # before the books know of the write
    cache.flush()
    cache.check()
    assert all(places(cache, past))
    cache.close()
    assert ask(opened(), past) == len(past)


def test_long_pasts_are_written_in_several_runs(opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "RUN_BYTES", 4 * PAGE_BYTES + 100)
    cache = opened()
    past = tokens(1, 10 * P + 5)
    ask(cache, past)
    cache.flush()
    assert pages_on_disk(folder) == [4, 4, 3]
    cache.close()
    assert known(opened(), past) == (0, len(past))


def test_pages_of_different_formats_are_different_runs(opened: Open, folder: Path) -> None:
    cache = opened(formats=(F16, Q8), pages=50)
    cache.disk._silent_until = float("inf")
    past = tokens(1, 5 * P)
    ask(cache, past)
    for node in cache.tree.match(past).nodes[2:4]:
        node.page.handle = cache.compressor.recode(node.page.handle, Q8)
    cache.disk._silent_until = 0.0
    cache.disk.queue(cache.tree.match(past).last, cache.now_s())
    cache.flush()
    assert pages_on_disk(folder) == [2, 2, 1]
    assert [cache.disk.format_of(node.page.place) for node in cache.tree.match(past).nodes] == [F16, F16, Q8, Q8, F16]
    cache.close()
    again = opened(formats=(F16, Q8))
    assert ask(again, past) == len(past)


@pytest.mark.parametrize(
    ("prices", "is_written"),
    [
        (FixedPrices(token_s=1e-3, byte_s=1e-10), True),
        (FixedPrices(token_s=1e-6, byte_s=1e-6), False),  # 8 ms to write what takes 32 us to compute
        (FixedPrices(token_s=1e-3, byte_s=3e-6), False),  # computing takes longer than reading, but not by the price of writing
    ],
)
def test_pages_are_written_if_that_is_worth_it(opened: Open, folder: Path, prices: FixedPrices, is_written: bool) -> None:
    cache = opened(prices=prices)
    ask(cache, tokens(1, 4 * P))
    cache.flush()
    assert bool(run_files(folder)) == is_written
    assert cache.counters.refused_pages == (0 if is_written else 4)


def test_what_was_never_measured_is_tried(opened: Open, folder: Path) -> None:
    prices = FixedPrices(token_s=1e-6)
    prices.read_s_per_byte = prices.write_s_per_byte = None
    cache = opened(prices=prices)
    ask(cache, tokens(1, 4 * P))
    cache.flush()
    assert run_files(folder)


def test_past_that_nobody_wants_is_not_written(opened: Open, folder: Path) -> None:
    cache = opened()
    ask(cache, tokens(1, 4 * P), Standing(expires_s=0.0))
    cache.flush()
    assert run_files(folder) == []
    # but what is needed there is
    cache.disk.queue(cache.tree.match(tokens(1, 4 * P)).last, cache.now_s(), needed=True)
    cache.flush()
    assert len(run_files(folder)) == 1


def test_disk_that_refused_is_left_alone_for_a_while(
    opened: Open, folder: Path, clock: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened()
    fill_disk(monkeypatch)
    ask(cache, tokens(1, 4 * P))
    cache.flush()
    cache.check()
    assert cache.disk.refusal is not None
    assert cache.disk.refusal.reason == "disk full"
    assert cache.counters.refused_pages == 4
    monkeypatch.undo()
    clock.now_s += RETRY_S - 1
    ask(cache, tokens(2, 4 * P))
    cache.flush()
    assert run_files(folder) == []
    clock.now_s += 2
    ask(cache, tokens(1, 4 * P))
    cache.flush()
    assert pages_on_disk(folder) == [4]


# finding again


def test_pasts_are_found_again_with_what_is_known_of_their_use(opened: Open, clock: Ticks) -> None:
    cache = opened()
    past = tokens(1, 6 * P + 3)
    for count, answer in ((2 * P, 7), (4 * P + 1, 9), (6 * P + 3, 11)):
        clock.now_s += 60
        ask(cache, past[:count], answer=answer)
    use = cache.tree.match(past).last.use
    cache.close()
    clock.now_s += 3600
    again = opened()
    found = again.tree.match(past).last.use
    for name in ("time_s", "turn", "num_pages", "known_pages", "num_answer_tokens", "repeats"):
        assert getattr(found, name) == getattr(use, name), name
    assert found.time_s == clock.now_s - 3600
    again.check()
    assert known(again, past) == (0, 6 * P + 3)


def test_branches_are_found_again(opened: Open) -> None:
    stem = tokens(1, 2 * P)
    pasts = [[*stem, *tokens(seed, 40)] for seed in range(2, 6)] + [[*stem[:50], *tokens(9, 30)]]
    again = restarted(opened, *pasts)
    again.check()
    assert [known(again, past) for past in pasts] == [(0, len(past)) for past in pasts]
    for past in pasts:
        assert ask(again, past) == len(past)


def test_runs_of_another_process_are_found_when_something_is_missing(opened: Open) -> None:
    one, two = opened(), opened()
    past = tokens(1, 4 * P)
    ask(one, past)
    one.flush()
    assert ask(two, past) == 4 * P
    ask(two, [*past, *tokens(2, P)])
    two.flush()
    assert ask(one, [*past, *tokens(2, P)]) == 5 * P
    assert all(places(one, [*past, *tokens(2, P)]))


@pytest.mark.parametrize("first", [0, 1])
def test_page_that_two_processes_wrote_stays_once(opened: Open, folder: Path, first: int) -> None:
    """The older copy stays in the books of both, and the younger file goes, whoever looks first."""
    caches = [opened(), opened()]
    past = tokens(1, 4 * P)
    for request in [Request(cache, past).grow() for cache in caches]:
        request.end()
        request.cache.flush()
    older = run_files(folder)[:1]
    assert pages_on_disk(folder) == [4, 4]
    for cache in (caches[first], caches[1 - first]):
        cache.disk.attach(cache.now_s())
        cache.check()
        assert run_files(folder) == older
        assert known(cache, past) == (4 * P, 0)
    for cache in caches:
        assert cache.make_room(cache.pool.limit_bytes)
        assert ask(cache, past) == 4 * P  # read from the one copy
        cache.check()


def test_copy_of_another_process_replaces_one_that_is_on_its_way(opened: Open, folder: Path) -> None:
    one, two = opened(), opened()
    past = tokens(1, 4 * P)
    request = Request(two, past).grow()
    ask(one, past)
    one.flush()
    request.end()  # queued
    two.disk.attach(two.now_s())
    two.check()
    two.flush()
    two.check()
    assert len(run_files(folder)) == 1
    assert all(places(two, past))


def test_process_whose_copy_was_removed_uses_the_other_one_and_writes_no_third(opened: Open, folder: Path) -> None:
    one, two = opened(), opened()
    past = tokens(1, 4 * P)
    both = [Request(cache, past).grow() for cache in (one, two)]
    for request in both:
        request.end()
        request.cache.flush()
    one.disk.attach(one.now_s())
    assert len(run_files(folder)) == 1
    assert two.make_room(two.pool.limit_bytes)  # to its copy on disk, which is gone
    ask(two, past)
    two.flush()
    two.check()
    assert len(run_files(folder)) == 1
    assert all(places(two, past))


def test_more_exact_copy_is_the_one_that_stays(opened: Open, folder: Path) -> None:
    one, two = opened(formats=(F16, Q8)), opened(formats=(F16, Q8))
    past = tokens(1, 2 * P)
    both = [Request(cache, past).grow() for cache in (one, two)]
    one.disk._silent_until = float("inf")
    both[0].end()
    for node in one.tree.match(past).nodes:
        node.page.handle = one.compressor.recode(node.page.handle, Q8)
    one.disk._silent_until = 0.0
    one.disk.queue(one.tree.match(past).last, one.now_s())
    one.flush()
    both[1].end()
    two.flush()
    exact = run_files(folder)[1:]
    assert len(exact) == 1
    for cache in (one, two):
        cache.disk.attach(cache.now_s())
        cache.check()
        assert run_files(folder) == exact
        assert {cache.disk.format_of(node.page.place) for node in cache.tree.match(past).nodes} == {F16}


def test_run_whose_beginning_has_gone_is_not_found(opened: Open, folder: Path, clock: Ticks) -> None:
    cache = opened()
    past = tokens(1, 4 * P)
    ask(cache, past[: 2 * P])
    cache.flush()
    clock.now_s += 1
    ask(cache, past)
    cache.close()
    run_files(folder)[0].unlink()
    again = opened()
    assert known(again, past) == (0, 0)
    assert again.tree.num_nodes == 0


# room


def _limit_of(num_pages: int) -> int:
    """A bound for so many pages in runs of two, and what is kept free beside them."""
    return (num_pages // 2 * (2 * PAGE_BYTES + 4096) + (32 << 10) + 4096) * 64 // 63 + 1


def test_least_worth_on_disk_makes_room_for_what_is_worth_more(opened: Open, folder: Path, clock: Ticks) -> None:
    limit = _limit_of(8)
    cache = opened(pages=2, limit_bytes=limit)
    for seed in range(6):
        clock.now_s += 100
        ask(cache, tokens(seed, 2 * P))
        cache.flush()
        assert disk_bytes(folder) <= limit
    assert known(cache, tokens(5, 2 * P)) == (2 * P, 0)
    kept = [sum(known(cache, tokens(seed, 2 * P))) for seed in range(6)]
    assert kept[:2] == [0, 0]
    assert kept[3:] == [2 * P] * 3
    cache.close()
    again = opened(pages=2, limit_bytes=limit)
    assert [sum(known(again, tokens(seed, 2 * P))) for seed in range(6)] == kept


def test_pinned_past_is_not_displaced_on_disk(opened: Open, clock: Ticks) -> None:
    cache = opened(pages=2, limit_bytes=_limit_of(6))
    ask(cache, tokens(0, 2 * P), Standing(pinned=True))
    for seed in range(1, 8):
        clock.now_s += 100
        ask(cache, tokens(seed, 2 * P))
        cache.flush()
        assert sum(known(cache, tokens(0, 2 * P))) == 2 * P


def test_what_is_worth_less_than_all_that_is_kept_is_not_written(opened: Open, folder: Path, clock: Ticks) -> None:
    cache = opened(pages=20, limit_bytes=_limit_of(4) + 8192)
    for seed in range(2):
        ask(cache, tokens(seed, 2 * P), Standing(pinned=True))
    cache.flush()
    assert cache.make_room(cache.pool.limit_bytes)
    for seed in range(2, 5):
        clock.now_s += 100
        ask(cache, tokens(seed, 2 * P))
        cache.flush()
    assert pages_on_disk(folder) == [2, 2]
    assert [known(cache, tokens(seed, 2 * P)) for seed in range(2)] == [(0, 2 * P)] * 2
    assert cache.counters.refused_pages == 6


def test_page_that_fits_nowhere_is_dropped_and_the_bound_stays(opened: Open, folder: Path) -> None:
    limit = _limit_of(4)
    cache = opened(pages=20, limit_bytes=limit)
    ask(cache, tokens(1, 2 * P))
    cache.flush()
    ask(cache, tokens(2, 18 * P))
    cache.flush()
    assert disk_bytes(folder) <= limit
    assert known(cache, tokens(1, 2 * P)) == (2 * P, 0)
    assert cache.counters.refused_pages > 0
    ask(cache, tokens(3, 18 * P))
    assert sum(known(cache, tokens(2, 18 * P))) < 18 * P
    cache.check()


def test_forgotten_pages_free_their_bytes(opened: Open, folder: Path) -> None:
    cache = opened()
    stem = tokens(1, 2 * P)
    one, other = [*stem, *tokens(2, 2 * P)], [*stem, *tokens(3, 2 * P)]
    ask(cache, one)
    ask(cache, other)
    cache.flush()
    cache.demote_path(cache.tree.match(one).nodes, 2)
    cache.disk.forget(cache.tree.match(one).nodes[2], cache.now_s())
    cache.check()
    assert known(cache, one) == (2 * P, 0)
    assert known(cache, other) == (4 * P, 0)
    assert pages_on_disk(folder) == [2, 2]
    assert cache.disk.store.used_bytes == disk_bytes(folder)
