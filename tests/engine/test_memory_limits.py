"""Bounds, prices and pasts that are longer than memory: what is kept, read, computed and streamed; every answer is exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.engine import streaming
from headrace.engine.model import Model
from headrace.kv.disk import RETRY_S
from headrace.kv.pages import pages_for
from tiny.memory import Clock, FixedPrices, Reference, answer, fill_disk, known_tokens, plain_ids, run_files
from tiny.runs import disk_bytes, set_page_byte

Open = Callable[..., Model]


# bounds


def test_full_disk_costs_only_what_would_have_been_kept(
    opened: Open, reference: Reference, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    clock = Clock()
    model = opened(wall_clock=clock)
    fill_disk(monkeypatch)
    answer(model, reference, plain_ids(200), 4)
    model.cache.flush()
    refusal = model.cache.disk.refusal
    assert refusal is not None
    assert refusal.reason == "disk full"
    assert run_files(folder) == []
    assert known_tokens(answer(model, reference, plain_ids(200), 4)) == 199
    monkeypatch.undo()
    # it is not tried again at once, but after a while
    answer(model, reference, plain_ids(200, 1), 4)
    model.cache.flush()
    assert run_files(folder) == []
    clock.ahead_s += RETRY_S + 1
    answer(model, reference, plain_ids(200, 2), 4)
    model.cache.flush()
    assert len(run_files(folder)) == 2  # the prompt's whole pages when it was complete, and what came behind them


def test_bounds_hold_whatever_is_asked(opened: Open, reference: Reference, folder: Path) -> None:
    limit = 3 * 10**6
    model = opened(pages=24, disk_bytes=limit)
    rng = np.random.default_rng(0)
    most = 0
    for number in range(40):
        prompt = plain_ids(int(rng.integers(1, 700)), int(rng.integers(12)))
        answer(model, reference, prompt, 3, every=False)
        if number % 4 == 0:
            model.session(f"session {number}", "and " * 200).send("the", max_tokens=1).text()
        model.cache.pool.check()
        assert model.cache.pool.owned_bytes + model.cache.pool.reserved_bytes <= 24 * model.page_bytes()
        most = max(most, disk_bytes(folder))
        assert most <= limit
    assert most > limit / 2  # it was used
    model.close()
    assert disk_bytes(folder) <= limit


def test_sessions_keep_to_the_bound_too(opened: Open, folder: Path) -> None:
    limit = 300_000
    model = opened(disk_bytes=limit)
    for number in range(120):
        model.session(f"session {number}", "and so on in the end " * 40).reset()
        assert disk_bytes(folder) <= limit
    assert len(list(folder.glob("sessions/*/*.json"))) > 20


# load or recompute


def _slow(monkeypatch: pytest.MonkeyPatch, model: Model, page_s: float) -> list[int]:
    """Makes reads slow; returns the pages of each."""
    store, asked = model.cache.disk.store, []
    real = store.read_many

    def read_many(places: Sequence[Any], *rest: Any) -> Any:
        asked.append(len(places))
        time.sleep(page_s * len(places))
        return real(places, *rest)

    monkeypatch.setattr(store, "read_many", read_many)
    return asked


@pytest.fixture
def kept(opened: Open, reference: Reference) -> list[int]:
    """A prompt of 24 pages that is known on disk, and nowhere else."""
    prompt = plain_ids(24 * 32 + 1)
    model = opened()
    answer(model, reference, prompt, 1)
    model.close()
    return prompt


def test_front_is_computed_while_the_tail_is_read(
    opened: Open, reference: Reference, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = 4 * 2 * 32 * 32 * 4
    model = opened(prices=FixedPrices(token_s=2e-3 / 32, position_s=0.0, byte_s=2e-3 / page_bytes))  # 2 ms a page, both
    assert model.page_bytes() == page_bytes
    _slow(monkeypatch, model, 2e-3)
    generation = answer(model, reference, kept, 4)
    reuse = generation.result.reuse
    computed = [miss for miss in reuse.misses if miss.reason == "recompute_is_quicker"]
    assert computed[0].at_token == 0
    assert reuse.disk_tokens + sum(miss.num_tokens for miss in computed) == 24 * 32
    # about half of each; the mover reads 8 pages at a time
    assert 4 * 32 <= reuse.disk_tokens <= 20 * 32
    # and all is known now
    assert known_tokens(answer(model, reference, kept, 4)) == 24 * 32


def test_everything_is_computed_where_reading_is_very_slow(
    opened: Open, reference: Reference, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(prices=FixedPrices(token_s=1e-5, byte_s=1.0))
    asked = _slow(monkeypatch, model, 10.0)
    generation = answer(model, reference, kept, 4)
    assert {miss.reason for miss in generation.result.reuse.misses} == {"recompute_is_quicker"}
    assert sum(miss.num_tokens for miss in generation.result.reuse.misses) == 24 * 32
    assert known_tokens(generation) == 0
    assert asked == []


@pytest.mark.parametrize("length", [24 * 32 + 1, 24 * 32 + 20, 90])
def test_last_part_of_a_page_is_computed_where_reading_is_very_slow(
    opened: Open, reference: Reference, kept: list[int], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    model = opened(prices=FixedPrices(token_s=1e-5, byte_s=1.0))
    asked = _slow(monkeypatch, model, 10.0)
    generation = answer(model, reference, [*kept, *plain_ids(40)][:length], 4)
    assert sum(miss.num_tokens for miss in generation.result.reuse.misses) == length - 1
    assert asked == []


def test_quick_disk_is_read_and_nothing_computed(opened: Open, reference: Reference, kept: list[int]) -> None:
    reuse = answer(opened(), reference, kept, 4).result.reuse
    assert (reuse.disk_tokens, reuse.misses) == (24 * 32, ())
    assert reuse.load_s > 0


def test_reuse_says_what_it_saved(opened: Open, reference: Reference) -> None:
    model = opened(prices=None)
    assert answer(model, reference, plain_ids(300), 4).result.reuse.saved_s == 0
    first = answer(model, reference, plain_ids(300), 4).result.reuse
    # computing a part of it would have taken less
    part = answer(model, reference, plain_ids(300)[:100], 4).result.reuse
    assert first.saved_s > part.saved_s > 0
    assert model.cache.counters.saved_s == pytest.approx(first.saved_s + part.saved_s, rel=0.5)


# pasts that are longer than memory


@pytest.fixture
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for pages that are read anew for each step is taken for two at a time: pages are small here."""
    monkeypatch.setattr(streaming, "_PAGES_STEP", 2)


@pytest.mark.usefixtures("small_staging")
@pytest.mark.parametrize("every", [True, False])
def test_conversation_longer_than_memory_goes_on_exactly(opened: Open, reference: Reference, every: bool) -> None:
    model = opened(pages=24)
    prompt: list[int] = []
    for turn in range(5):
        known = max(0, len(prompt) - 1)
        prompt += plain_ids(180, turn)
        generation = answer(model, reference, prompt, 20, every=every)
        reuse = generation.result.reuse
        assert known_tokens(generation) == known
        assert (reuse.streamed_bytes > 0) == (pages_for(len(prompt)) > 22)
        prompt += generation.token_ids
        model.cache.check()
        assert model.cache.pool.reserved_bytes == 0
    assert pages_for(len(prompt)) > 30
    model.close()
    # the next process finds everything, too
    again = opened(pages=24)
    generation = answer(again, reference, prompt, 4)
    assert generation.result.reuse.disk_tokens == len(prompt) - 1
    assert generation.result.reuse.streamed_bytes > 0


def test_conversation_longer_than_memory_goes_on_with_the_room_it_takes_in_earnest(opened: Open, reference: Reference) -> None:
    model = opened(pages=32)
    generation = answer(model, reference, plain_ids(1400), 10)
    assert generation.result.reuse.streamed_bytes > 0
    assert known_tokens(answer(model, reference, [*plain_ids(1400), *generation.token_ids], 4)) == 1409


@pytest.mark.usefixtures("small_staging")
@pytest.mark.parametrize("which", ["all", "first page", "last page on disk"])
def test_page_that_is_lost_while_it_is_streamed_is_computed_again(
    opened: Open, reference: Reference, folder: Path, which: str
) -> None:
    model = opened(pages=20)
    prompt = plain_ids(700)
    generation = model.generate_ids(prompt, max_tokens=60, temperature=0.0, ignore_end=True)
    next(generation)
    assert generation._live.sequence.cold
    for path in run_files(folder):
        if which == "all":
            path.unlink()
    if which != "all":
        cold = generation._live.sequence.cold
        node = cold[min(cold) if which == "first page" else max(cold)]
        set_page_byte(model.cache.disk.store, node.page.place, 4000)
    generation.text()
    reference.check(prompt, generation.token_ids, [])
    assert len(generation.token_ids) == 60
    model.cache.check()
    assert known_tokens(answer(model, reference, [*prompt, *generation.token_ids], 4)) == 759
