"""Beginning with a known past: what is shared, read, computed, and given up; and what an interruption leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.engine import arrival, streaming
from headrace.engine.model import Model
from headrace.engine.results import MissReport
from headrace.kv.disk import DISK
from headrace.kv.mover import READ_GROUP_PAGES
from headrace.kv.pages import format_of
from headrace.model.step import PAGE_TOKENS
from tiny.caches import give_back, take_pages
from tiny.memory import Reference, answer, plain_ids, run_files
from tiny.runs import set_page_byte

P = PAGE_TOKENS

Open = Callable[..., Model]


def _told(misses: Sequence[MissReport]) -> list[tuple[str, int, int]]:
    return [(miss.reason, miss.at_token, miss.num_tokens) for miss in misses]


@pytest.fixture
def keep(opened: Open, reference: Reference) -> Callable[..., None]:
    """Has pasts on disk, and nowhere else."""

    def kept(*prompts: list[int]) -> None:
        model = opened()
        for prompt in prompts:
            answer(model, reference, prompt, 1)
        model.close()

    return kept


def _damage(model: Model, past: Sequence[int], *numbers: int) -> None:
    """Flips a byte of the copies on disk of some pages of a past."""
    match = model.cache.tree.match(past)
    nodes = [*match.nodes, match.partial]
    for number in numbers:
        node = nodes[number]
        assert node is not None
        set_page_byte(model.cache.disk.store, node.page.place, 77)


# what is found


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 100, 256, 257, 300, 513])
@pytest.mark.parametrize("restart", [False, True])
def test_known_past_of_any_length_gives_the_same_bits(opened: Open, reference: Reference, length: int, restart: bool) -> None:
    model = opened()
    answer(model, reference, plain_ids(length), 1)
    if restart:
        model.close()
        model = opened()
    generation = answer(model, reference, plain_ids(length), 6)
    reuse = generation.result.reuse
    assert (reuse.memory_tokens, reuse.disk_tokens) == ((0, length - 1) if restart else (length - 1, 0))
    assert (reuse.computed_tokens, reuse.misses) == (1, ())
    assert generation.result.usage.cached_tokens == length - 1
    assert (reuse.load_s > 0) == (restart and length > 1)


@pytest.mark.parametrize("near", [1, 3, 5])
def test_past_that_is_partly_in_memory_is_read_from_where_it_is(
    opened: Open, reference: Reference, keep: Callable[..., None], near: int
) -> None:
    keep(plain_ids(10 * P))
    model = opened()
    answer(model, reference, plain_ids(near * P + 1), 1)
    reuse = answer(model, reference, plain_ids(10 * P), 4).result.reuse
    assert (reuse.memory_tokens, reuse.disk_tokens) == (near * P, 10 * P - 1 - near * P)


def test_every_token_of_a_prompt_is_counted_once(opened: Open, reference: Reference, keep: Callable[..., None]) -> None:
    keep(plain_ids(300), plain_ids(90, 1))
    model = opened()
    _damage(model, plain_ids(90, 1), 1)
    prompts = [
        plain_ids(300)[:200],
        plain_ids(300),
        [*plain_ids(300)[:70], *plain_ids(70, 2)],
        plain_ids(90, 1),
        plain_ids(50, 3),
    ]
    for prompt in prompts:
        answer(model, reference, prompt, 4)
    counters = model.cache.counters
    assert counters.lookups == 5
    assert counters.prompt_tokens == sum(len(prompt) for prompt in prompts)
    found = counters.memory_tokens + counters.disk_tokens
    assert found + sum(counters.missed_tokens.values()) + 5 == counters.prompt_tokens
    # the second prompt's first 192 tokens were in memory by then, and the third shares 70
    assert counters.memory_tokens == 192 + 64 + 6
    assert counters.missed_tokens == {"diverged": 69, "damaged": 32, "first_seen": 49}
    assert counters.read_bytes >= counters.disk_tokens // P * model.page_bytes()


# what cannot be read


@pytest.mark.parametrize("length", [3 * P + 1, 4 * P + 9, 12 * P + 9])
@pytest.mark.parametrize("number", [0, 2, -1])
def test_damaged_page_is_computed_told_and_put_right(
    opened: Open, reference: Reference, keep: Callable[..., None], folder: Path, length: int, number: int
) -> None:
    """By the mover page by page, or while the step runs; whole pages, and the last one of which only a part is known."""
    prompt = plain_ids(length)
    keep(prompt)
    model = opened()
    pages = (length - 1 + P - 1) // P
    number %= pages
    _damage(model, prompt[:-1], number)
    generation = answer(model, reference, prompt, 4)
    lost = min(length - 1, (number + 1) * P) - number * P
    assert _told(generation.result.reuse.misses) == [("damaged", number * P, lost)]
    assert generation.result.reuse.disk_tokens == length - 1 - lost
    assert answer(model, reference, prompt, 4).result.reuse.memory_tokens == length - 1
    model.close()
    again = answer(opened(), reference, prompt, 4).result.reuse
    assert (again.disk_tokens, again.misses) == (length - 1, ())


def test_several_lost_pages_are_computed_in_order(opened: Open, reference: Reference, keep: Callable[..., None]) -> None:
    for length, damaged in ((6 * P + 5, (1, 2, 4, 6)), (14 * P + 5, (0, 7, 8, 13, 14))):
        prompt = plain_ids(length, length)
        keep(prompt)
        model = opened()
        _damage(model, prompt[:-1], *damaged)
        reuse = answer(model, reference, prompt, 4).result.reuse
        assert [miss.at_token for miss in sorted(reuse.misses, key=lambda miss: miss.at_token)] == [
            number * P for number in damaged
        ]
        assert reuse.disk_tokens + sum(miss.num_tokens for miss in reuse.misses) == length - 1
        model.close()


@pytest.mark.parametrize("count", [3 * P + 20, 12 * P + 20])
def test_damaged_page_of_which_only_a_part_is_wanted_takes_nothing_along(
    opened: Open, reference: Reference, keep: Callable[..., None], count: int
) -> None:
    """Whoever asks for all of it puts it right; what lies behind it on disk is not given up before."""
    prompt = plain_ids(20 * P)
    keep(prompt)
    model = opened()
    number = count // P
    _damage(model, prompt[:-1], number)
    reuse = answer(model, reference, [*prompt[:count], 7, 8], 4).result.reuse
    assert ("damaged", number * P, 20) in _told(reuse.misses)
    reuse = answer(model, reference, prompt, 4).result.reuse
    assert _told(reuse.misses) == [("damaged", number * P, P)]
    model.close()
    assert answer(opened(), reference, prompt, 4).result.reuse.disk_tokens == len(prompt) - 1


@pytest.mark.parametrize("num_pages", [5, 12])
@pytest.mark.parametrize("number", [0, 3])
def test_damaged_page_that_is_compressed_is_computed_without_touching_others(opened: Open, num_pages: int, number: int) -> None:
    """It is computed exactly, which takes more memory than the page has, and compressed again."""
    formats = ("f16", "q8", "q4")
    prompt = plain_ids(num_pages * P + 9)
    model = opened(formats=formats)
    model.cache.disk._silent_until = float("inf")
    model.generate_ids(prompt, max_tokens=1).text()
    cache = model.cache
    pages = []
    nodes = cache.tree.match(prompt).nodes[:num_pages]
    for at, node in enumerate(nodes):
        node.page.handle = cache.compressor.recode(node.page.handle, 1 + at % 2)
        pages.append(cache.pool.view(node.page.handle).copy())
    cache.disk.queue(nodes[-1], cache.now_s(), needed=True)
    model.close()
    again = opened(formats=formats)
    _damage(again, prompt[: num_pages * P], number)
    generation = again.generate_ids([*prompt[: num_pages * P], 7], max_tokens=4, temperature=0.0, ignore_end=True)
    generation.text()
    assert _told(generation.result.reuse.misses) == [("damaged", number * P, P)]
    again.cache.check()
    nodes = again.cache.tree.match(prompt[: num_pages * P]).nodes
    for at, (node, page) in enumerate(zip(nodes, pages, strict=True)):
        assert format_of(node.page.handle) == 1 + at % 2
        if at != number:
            assert np.array_equal(again.cache.pool.view(node.page.handle), page)


def test_past_that_another_request_lost_is_not_given_to_anybody(
    opened: Open, reference: Reference, keep: Callable[..., None]
) -> None:
    """Two requests hold the same last page, of which only a part is known; it is damaged."""
    prompt = plain_ids(3 * P + 20)
    keep(prompt)
    model = opened()
    first = model.generate_ids([*prompt, 7], max_tokens=8, temperature=0.0, ignore_end=True)
    next(first)
    _damage(model, prompt[:-1], 3)
    reuse = answer(model, reference, [*prompt[:-4], 8], 4).result.reuse
    assert ("damaged", 3 * P, 16) in _told(reuse.misses)
    model.cache.check()
    answer(model, reference, [*prompt[:-2], 9], 4)
    first.text()
    reference.check([*prompt, 7], first.token_ids, [])
    model.cache.check()


# what memory has no room for


@pytest.mark.parametrize("known", [63, 64])
def test_past_that_memory_has_no_room_to_read_is_computed_and_not_mistaken_for_another(
    opened: Open, reference: Reference, keep: Callable[..., None], known: int
) -> None:
    """Another sequence holds nearly all memory: there is room for the prompt, but not for what reading pages anew takes."""
    keep(plain_ids(400), plain_ids(200, 1))
    model = opened(pages=16)
    other = model.sequence()
    other.append([*plain_ids(400), 7])
    reuse = answer(model, reference, [*plain_ids(200, 1)[:known], 8, 7, 6], 8).result.reuse
    assert "no_room" in {miss.reason for miss in reuse.misses}
    assert reuse.disk_tokens + sum(miss.num_tokens for miss in reuse.misses) == known + 2
    model.cache.check()
    other.close()
    reference.check([*plain_ids(400), 7], other.token_ids, [])


def test_page_lost_on_disk_while_others_are_read_from_it(
    opened: Open, reference: Reference, keep: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The past is longer than memory: one page that should be read is damaged, and one that should stay on disk."""
    monkeypatch.setattr(streaming, "_PAGES_STEP", 2)
    prompt = plain_ids(700)
    keep(prompt)
    for damaged in ((0, 20), (3, 15, 20), (0, 1, 2, 21)):
        model = opened(pages=16)
        _damage(model, prompt[:-1], *damaged)
        generation = answer(model, reference, prompt, 4)
        assert generation.result.reuse.streamed_bytes > 0
        model.cache.check()
        model.close()
        keep(prompt)


# interruptions


class _Gate:
    """Reads of a store wait here; whether one has begun, and is done."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        store = model.cache.disk.store
        real = store.read_many
        self.begun, self.open = threading.Event(), threading.Event()
        self.targets: list[Any] = []

        def read_many(places: Sequence[Any], targets: Sequence[Any], *rest: Any) -> Any:
            self.begun.set()
            assert self.open.wait(20)
            self.targets += targets
            return real(places, targets, *rest)

        monkeypatch.setattr(store, "read_many", read_many)


@pytest.mark.parametrize(("num_pages", "rounds"), [(5, 0), (5, 1), *((READ_GROUP_PAGES + 5, rounds) for rounds in range(4))])
def test_interrupted_reading_leaves_no_unread_page_behind(
    opened: Open,
    reference: Reference,
    keep: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    num_pages: int,
    rounds: int,
) -> None:
    """Ctrl-C while somebody waits for the disk: nobody may take what was not read for what it should be."""
    prompt = plain_ids(num_pages * P + 9)
    keep(prompt)
    model = opened()
    gate = _Gate(model, monkeypatch)
    mover = model.cache.mover
    waits = {"wait_read": mover.wait_read, "wait_layer": mover.wait_layer}
    seen = []

    def interrupted(name: str) -> Callable[..., None]:
        def wait(*rest: Any) -> None:
            seen.append(name)
            if len(seen) > rounds:
                threading.Timer(0.02, gate.open.set).start()
                assert gate.begun.wait(20)
                raise KeyboardInterrupt
            gate.open.set()
            waits[name](*rest)

        return wait

    for name in waits:
        monkeypatch.setattr(mover, name, interrupted(name))
    generation = model.generate_ids(prompt, max_tokens=4, temperature=0.0, ignore_end=True)
    with pytest.raises(KeyboardInterrupt):
        generation.text()
    gate.open.set()
    # nothing is read into memory that others have by now
    taken = take_pages(model.cache, 40)
    for page in taken:
        model.cache.pool.view(page)[:] = 0
    model.cache.flush()
    assert not any(model.cache.pool.view(page).any() for page in taken)
    give_back(model.cache, taken)
    monkeypatch.undo()
    model.cache.check()
    assert all(node.pins == 0 for node in model.cache.tree.nodes())
    answer(model, reference, prompt, 4)


def test_interrupted_wait_for_pages_of_which_one_is_lost_leaves_no_unread_page_behind(
    opened: Open, reference: Reference, keep: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is damaged in its first layers, so all are waited for before the step is repeated; somebody loses patience."""
    prompt = plain_ids(12 * P + 9)
    keep(prompt)
    model = opened()
    _damage(model, prompt[:-1], 3)
    store, mover, may_go_on = model.cache.disk.store, model.cache.mover, threading.Event()
    read_many, wait_layer, num_bands = store.read_many, mover.wait_layer, [0]

    def first_band_only(places: Sequence[Any], targets: Sequence[Any], layers: range | None = None) -> Any:
        num_bands[0] += layers is not None
        assert num_bands[0] < 2 or may_go_on.wait(20)
        return read_many(places, targets, layers)

    def interrupted(job: Any, layer: int) -> None:
        if layer == len(model.config.layers) - 1 and job.failures:
            threading.Timer(0.05, may_go_on.set).start()
            raise KeyboardInterrupt
        wait_layer(job, layer)

    monkeypatch.setattr(store, "read_many", first_band_only)
    monkeypatch.setattr(mover, "wait_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate_ids(prompt, max_tokens=4, temperature=0.0, ignore_end=True).text()
    monkeypatch.undo()
    model.cache.check()
    reuse = answer(model, reference, prompt, 4).result.reuse
    assert reuse.disk_tokens > 0
    assert {miss.reason for miss in reuse.misses} == {"damaged"}


def test_answer_that_is_cancelled_while_pages_arrive_ends_at_once(
    opened: Open, reference: Reference, keep: Callable[..., None]
) -> None:
    prompt = plain_ids((arrival.FEWEST_PAGES + 4) * P)
    keep(prompt)
    model = opened()
    generation = model.generate_ids(prompt, max_tokens=4)
    generation.cancel()
    assert list(generation) == []
    model.cache.check()
    answer(model, reference, prompt, 4)


# how it is read


def test_pages_arrive_while_the_step_runs_where_there_are_enough(
    opened: Open, reference: Reference, keep: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = plain_ids((arrival.FEWEST_PAGES - 1) * P), plain_ids((arrival.FEWEST_PAGES + 2) * P, 1)
    keep(few, many)
    model = opened()
    made = []
    real = arrival.Arrival.__init__

    def init(self: Any, sequence: Any, disk: Any, numbers: Sequence[int], *rest: Any) -> None:
        made.append(len(numbers))
        real(self, sequence, disk, numbers, *rest)

    monkeypatch.setattr(arrival.Arrival, "__init__", init)
    answer(model, reference, few, 4)
    assert made == []
    reuse = answer(model, reference, many, 4).result.reuse
    assert made == [arrival.FEWEST_PAGES + 1]  # the last page is known in part only: one token is computed
    assert reuse.disk_tokens == len(many) - 1
    assert {node.tier for node in model.cache.tree.match(many[:-1]).nodes} == {0}


def test_nothing_is_read_without_a_folder(opened: Open, reference: Reference) -> None:
    model = opened(folder=None)
    answer(model, reference, plain_ids(300), 4)
    reuse = answer(model, reference, plain_ids(300), 4).result.reuse
    assert (reuse.memory_tokens, reuse.load_s) == (299, 0.0)
    assert model.cache.disk is None
    assert all(node.tier < DISK for node in model.cache.tree.nodes())


def test_unused_files_of_a_run_stay_as_they_are(
    opened: Open, reference: Reference, keep: Callable[..., None], folder: Path
) -> None:
    keep(plain_ids(300))
    before = [path.read_bytes() for path in run_files(folder)]
    model = opened()
    answer(model, reference, plain_ids(300), 1)
    model.close()
    assert [path.read_bytes() for path in run_files(folder)] == before
