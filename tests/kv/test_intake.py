"""Pages of requests that still compute: known to others meanwhile, kept when the process dies, one use when all is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.page_formats import F16, FORMAT_NAMES
from headrace.kv.cache import PageCache
from headrace.kv.disk import DISK
from headrace.kv.pages import format_of
from headrace.kv.placement import Placement
from headrace.kv.residency import Residency
from headrace.kv.tree import PrefixTree
from headrace.model.step import PAGE_TOKENS
from tiny.caches import Open, Request, Ticks, ask, known, node_at, open_cache, places, take_pages, tokens

P = PAGE_TOKENS
Q8 = FORMAT_NAMES.index("q8")


def _killed(cache: PageCache) -> None:
    """What was not written is lost."""
    cache.mover.stop()
    assert cache.disk is not None
    cache.disk.store.close()


def _num_uses(cache: PageCache) -> int:
    return cache.rule.reuse._num_uses


def test_whole_pages_of_a_live_request_are_found_by_another(opened: Open) -> None:
    cache = opened(disk=False)
    past = tokens(1, 5 * P + 9)
    first = Request(cache, past).grow(2 * P + 5).share()
    assert known(cache, past) == (2 * P, 0)
    first.grow(2 * P).share()
    second = Request(cache, past)
    assert second.known_tokens == 4 * P
    assert second.pages == first.pages[:4]
    second.grow().end()
    assert first.grow().end() == 0
    assert known(cache, past) == (5 * P + 9, 0)


def test_second_of_two_equal_prompts_drops_its_own_pages(opened: Open) -> None:
    cache = opened(disk=False)
    past = tokens(1, 3 * P)
    first, second = (Request(cache, past).grow() for _ in range(2))
    assert cache.pool.num_owned() == 6
    first.share()
    second.share()
    assert cache.pool.num_owned() == 3
    assert second.pages == first.pages
    assert second.shared is not None
    assert second.shared.use is None
    second.end()
    first.end()


def test_pages_that_were_known_compressed_do_not_take_the_place_of_exact_ones(opened: Open) -> None:
    cache = opened(disk=False, formats=(F16, Q8))
    past = tokens(1, 2 * P)
    live = Request(cache, past).grow()
    ask(cache, past)
    node = node_at(cache, past, 1)
    assert cache.compressor.squeeze(node)
    mine = list(live.pages)
    live.share()
    assert live.pages == mine
    assert [format_of(page) for page in live.pages] == [F16, F16]
    live.end()


def test_shared_pages_stay_exact_and_in_memory_until_their_request_ends(opened: Open) -> None:
    cache = opened(disk=False, pages=8, formats=(F16, Q8))
    live = Request(cache, tokens(1, 4 * P)).grow().share()
    assert not cache.make_room(6 * cache.pool.format_bytes[F16])
    assert [format_of(page) for page in live.pages] == [F16] * 4
    live.end()
    assert cache.make_room(6 * cache.pool.format_bytes[F16])


def test_page_is_shared_in_place_of_its_beginning(opened: Open) -> None:
    cache = opened(disk=False)
    past = tokens(1, 3 * P)
    ask(cache, past[: 2 * P + 9])
    live = Request(cache, past).grow().share()
    cache.check()
    assert cache.tree.num_nodes == 3
    assert node_at(cache, past, 2).page.handle == live.pages[2]
    live.end()


def test_killed_process_has_kept_a_prompt_that_was_complete(opened: Open, folder: Path) -> None:
    cache = opened()
    past = tokens(1, 4 * P + 9)
    Request(cache, past).grow().share(complete=True)
    cache.flush()
    _killed(cache)
    assert known(opened(), past) == (0, 4 * P)


def test_use_that_was_written_in_two_runs_is_one_after_a_restart(opened: Open, clock: Ticks) -> None:
    cache = opened()
    past = tokens(1, 6 * P + 9)
    ask(cache, past[: 2 * P])
    clock.now_s += 100
    live = Request(cache, past).grow(2 * P).share(complete=True)
    cache.flush()
    clock.now_s += 50
    live.grow().end(answer=70)
    cache.check()
    use = cache.tree.match(past).last.use
    before = (cache.placement.use_facts(use), use.time_s, _num_uses(cache))
    assert len({place[0] for place in places(cache, past) if place}) == 2
    cache.close()
    again = opened()
    use = again.tree.match(past).last.use
    assert (again.placement.use_facts(use), use.time_s, _num_uses(again)) == before
    assert again.tree.match(past).nodes[0].use is use


def test_request_that_ends_without_a_commit_leaves_what_it_has_shared(opened: Open) -> None:
    cache = opened(disk=False)
    past = tokens(1, 3 * P)
    Request(cache, past).grow(2 * P).share().drop()
    assert known(cache, past) == (2 * P, 0)
    assert _num_uses(cache) == 1
    assert ask(cache, past) == 2 * P


def test_request_that_goes_another_way_leaves_two_uses(opened: Open) -> None:
    cache = opened(disk=False)
    past, other = tokens(1, 4 * P), [*tokens(1, 2 * P), *tokens(2, 2 * P)]
    live = Request(cache, past).grow().share()
    pages = [*live.pages[:2], *take_pages(cache, 2)]
    for page in live.pages[2:]:
        cache.pool.release(page)
    live.shared, live.pages = cache.share(other, pages, live.shared), pages
    cache.check()
    assert known(cache, past) == known(cache, other) == (4 * P, 0)
    assert _num_uses(cache) == 1
    live.past = other
    live.end()
    assert _num_uses(cache) == 2


def test_sharing_less_than_before_changes_nothing(opened: Open) -> None:
    cache = opened(disk=False)
    live = Request(cache, tokens(1, 4 * P)).grow().share()
    before = live.shared
    assert before is not None
    for count in (0, P, 3 * P):
        after = cache.share(live.past[:count], live.pages[: count // P], before)
        assert (after.last, after.use) == (before.last, before.use)
    live.end()


def test_commit_of_less_than_was_shared_ends_both(opened: Open) -> None:
    cache = opened(disk=False)
    past = tokens(1, 4 * P)
    live = Request(cache, past).grow().share()
    live.num_tokens = P + 3
    live.end()
    cache.check()
    assert known(cache, past) == (4 * P, 0)


def test_page_that_is_read_becomes_near_when_it_is_shared(opened: Open) -> None:
    cache = opened()
    past = tokens(1, 3 * P)
    ask(cache, past[: 2 * P])
    cache.flush()
    cache.demote_path(cache.tree.match(past).nodes, 0)
    mine = take_pages(cache, 3)
    for number, page in enumerate(mine):
        cache.pool.view(page)[:] = number
    shared = cache.share(past, mine)
    cache.check()
    assert known(cache, past) == (3 * P, 0)
    assert list(shared.handles) == mine
    cache.end(shared)
    for page in mine:
        cache.pool.release(page)


def test_pages_behind_some_that_are_only_on_disk_wait_for_the_commit(opened: Open) -> None:
    cache = opened()
    past = tokens(1, 4 * P)
    ask(cache, past[: 2 * P])
    cache.flush()
    cache.demote_path(cache.tree.match(past).nodes, 0)
    mine = take_pages(cache, 2)
    shared = cache.share(past, [None, None, *mine])
    assert known(cache, past) == (0, 2 * P)
    cache.commit(past, [None, None, *mine], num_answer_tokens=1, shared=shared)
    cache.check()
    assert known(cache, past) == (0, 4 * P)
    assert node_at(cache, past, 3).tier == DISK
    for page in mine:
        cache.pool.release(page)


# what is counted


def _counts(placement: Placement) -> Any:
    """All that the rule has learnt, and the order in which pages leave."""
    rule = placement.rule
    assert isinstance(rule, Residency)
    reuse = rule.reuse
    uses = {(node.depth_pages, node.page): node.use for node in placement.tree.nodes()}
    facts = {key: (placement.use_facts(use), use.serial, use.num_before) for key, use in uses.items()}
    order = []
    while (cheapest := placement.cheapest(0, 1e4)) is not None:
        order += placement.evict(cheapest[0], 1e4, demote=False).pages
    counted = {facts: (reuse._reached[cell].tolist(), reuse._reused[cell].tolist()) for facts, cell in reuse._cells.items()}
    return facts, order, {key: value for key, value in counted.items() if any(map(any, value))}, reuse._num_uses


requests = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 12), st.lists(st.integers(1, 5), max_size=4), st.integers(0, 40)), max_size=25
)


@settings(deadline=None)
@given(requests=requests, capacity=st.sampled_from((6, 20, 100)))
def test_sharing_changes_nothing_that_is_learnt_nor_who_leaves_first(
    requests: list[tuple[int, int, list[int], int]], capacity: int
) -> None:
    """Pages hold one token. Each request shares in some pieces, or not at all, and then ends."""
    results = []
    for shares in (False, True):
        placement = Placement(PrefixTree(1), [capacity], Residency())
        for number, (kind, length, pieces, answer) in enumerate(requests):
            past = tuple(100 * kind + at if at < 6 else 1000 * number + at for at in range(length))
            now_s, use, end = 10.0 * number, None, 0
            for piece in pieces if shares else []:
                end = min(end + piece, length)
                match = placement.tree.match(past[:end])
                if match.num_pages < end:
                    use, _ = placement.share(past[:end], match, past[match.num_pages : end], now_s=now_s, use=use)
                    placement.check()
            match = placement.tree.match(past)
            placement.record(past, match, past[match.num_pages :], num_answer_tokens=answer, now_s=now_s, use=use)
            placement.make_room(now_s)
            placement.check()
        results.append(_counts(placement))
    assert results[0] == results[1]


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_two_requests_for_one_prompt_count_as_they_would_one_after_the_other(folder: Path, first_ends_first: bool) -> None:
    """Who ends second continues the use of who ended first, whoever had made the pages known."""
    past = tokens(1, 3 * P)
    counts = []
    for shares in (True, False):
        cache = open_cache(None)
        both = [Request(cache, past).grow() for _ in range(2)]
        for each in both if shares else ():
            each.share()
        for each in both if first_ends_first else both[::-1]:
            each.end(answer=5)
        use = cache.tree.match(past).last.use
        counts.append((cache.placement.use_facts(use), _num_uses(cache)))
        cache.close()
    assert counts[0] == counts[1]
    assert counts[0][0]["turn"] == 2
