"""Sequences that are longer than memory: what leaves it, what it costs, what comes back, and what is said when it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.engine import streaming
from headrace.engine.model import Model
from headrace.engine.sequence import Sequence as TokenSequence
from headrace.errors import ContextOverflowError
from headrace.kv.pages import format_of, pages_for
from headrace.model.step import PAGE_TOKENS
from tiny.memory import Reference, answer, fill_disk, plain_ids, run_files
from tiny.models import TinySpec
from tiny.runs import set_page_byte

SPECS = {
    "llama": TinySpec(ends=False, context=1536, layers=8, kv_heads=1, seed=34),
    "gemma3": TinySpec("gemma3", ends=False, context=1536, layers=8, kv_heads=1, window=72, seed=35),
}
P = PAGE_TOKENS

Open = Callable[..., Model]


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> TinySpec:
    return SPECS[request.param]


@pytest.fixture
def opened(opened: Open, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the model with memory for 20 pages. What reading takes is in proportion to that, as with models of real size."""
    monkeypatch.setattr(streaming, "_PAGES_STEP", 2)
    monkeypatch.setattr(streaming, "_GROUP_BYTES", 4096)
    return partial(opened, pages=20)


def _check_room(sequence: TokenSequence) -> None:
    """All pages are somewhere, and what reading those on disk takes is counted."""
    model_pool, cold = sequence.cache.pool, sequence.cold
    assert len(sequence.pages) == pages_for(sequence.num_tokens)
    assert [number for number, page in enumerate(sequence.pages) if page is None] == sorted(cold)
    assert model_pool.reserved_bytes == sequence.staging_bytes(len(cold))
    assert model_pool.owned_bytes + model_pool.reserved_bytes <= model_pool.limit_bytes
    sequence.cache.check()


def _same(row: Any, expected: Any) -> bool:
    return bool(np.array_equal(row.view(np.uint32), expected.view(np.uint32)))


def _damage(model: Model, sequence: TokenSequence, *numbers: int) -> None:
    """Flips a byte of each layer of pages that are on disk only."""
    for number in numbers:
        place = sequence.cold[number].page.place
        layers = len(model.config.layers)
        for layer in range(layers):
            set_page_byte(model.cache.disk.store, place, layer * model.page_bytes() // layers + 9)


# growing and shrinking


def test_oldest_pages_leave_as_the_sequence_grows_and_nothing_of_them_is_kept(opened: Open, reference: Reference) -> None:
    model = opened()
    ids = plain_ids(1100)
    expected = reference.logits(ids)
    sequence = model.sequence()
    num_cold = [0]
    for start in range(0, 1100, 50):
        row = sequence.append(ids[start : start + 50])
        assert _same(row, expected[start + 49])
        _check_room(sequence)
        assert sorted(sequence.cold) == list(range(len(sequence.cold)))  # the oldest
        num_cold.append(len(sequence.cold))
    assert num_cold == sorted(num_cold)
    assert num_cold[11] == 0  # 550 tokens fit
    assert num_cold[-1] > 15
    assert sequence.streamed_bytes > 0
    sequence.close()
    assert model.cache.pool.reserved_bytes == 0


def test_shrinking_gives_room_back_and_growing_again_is_exact(opened: Open, reference: Reference) -> None:
    model = opened()
    ids, other = plain_ids(1000), plain_ids(1000, 1)
    sequence = model.sequence()
    sequence.append(ids)
    for kept in (900, 500, 33, 5):
        sequence.truncate(kept)
        _check_room(sequence)
        both = [*ids[:kept], *other[:400]]
        assert _same(sequence.append(other[:400]), reference.logits(both)[-1])
        _check_room(sequence)
        sequence.truncate(kept)
    sequence.truncate(0)
    assert model.cache.pool.reserved_bytes == 0
    sequence.close()


def test_shrinking_into_a_page_that_others_know_leaves_it_to_them(opened: Open, reference: Reference) -> None:
    """What left the sequence for the disk became known on the way; a sequence that goes on otherwise must not write to it."""
    model = opened()
    ids = plain_ids(800)
    sequence = model.sequence()
    sequence.append(ids)
    for kept in (790, 700, 50):
        sequence.truncate(kept)
        both = [*ids[:kept], *plain_ids(70, kept)]
        assert _same(sequence.append(both[kept:]), reference.logits(both)[-1])
        sequence.truncate(kept)
        sequence.append(ids[kept:])
    sequence.close()
    assert answer(model, reference, ids[:770], 4).result.reuse.disk_tokens > 0
    answer(model, reference, ids[:80], 4)


def test_all_logits_of_a_long_prompt_are_exact(opened: Open, reference: Reference) -> None:
    model = opened()
    ids = plain_ids(900)
    sequence = model.sequence()
    assert _same(sequence.append_all(ids), reference.logits(ids))
    sequence.close()


@pytest.mark.parametrize("every", [True, False])
def test_two_long_answers_take_turns(opened: Open, reference: Reference, every: bool) -> None:
    model = opened(pages=48)
    prompts = [plain_ids(800), plain_ids(700, 1)]
    both = [
        model.generate_ids(prompt, max_tokens=60, temperature=0.0, ignore_end=True, logprobs=int(every)) for prompt in prompts
    ]
    ended = 0
    while ended < 2:
        ended = 0
        for generation in both:
            ended += next(generation, None) is None
            model.cache.check()
    for prompt, generation in zip(prompts, both, strict=True):
        assert len(generation.token_ids) == 60
        reference.check(prompt, generation.token_ids, [])


def test_pages_that_others_share_stay_with_them(opened: Open, reference: Reference) -> None:
    """What a long answer leaves on disk may be what another one reads in memory."""
    model = opened(pages=32)
    stem = plain_ids(300)
    answer(model, reference, stem, 1)
    short = model.generate_ids([*stem, *plain_ids(20, 1)], max_tokens=40, temperature=0.0, ignore_end=True)
    next(short)
    long = [*stem, *plain_ids(800, 2)]
    answer(model, reference, long, 20)
    short.text()
    reference.check([*stem, *plain_ids(20, 1)], short.token_ids, [])


@pytest.mark.parametrize("disk", [False, True])
def test_pages_are_compressed_before_any_stays_on_disk(opened: Open, folder: Path, disk: bool) -> None:
    model = opened(folder=folder if disk else None, formats=("f16", "q8", "q4"))
    prompt = plain_ids(1000)
    generation = model.generate_ids(prompt, max_tokens=30, temperature=0.0, ignore_end=True)
    next(generation)
    sequence = generation._live.sequence
    formats = [format_of(page) for page in sequence.pages if page is not None]
    assert len(formats) == len(sequence.pages)
    assert formats == sorted(formats, reverse=True)  # the oldest are the smallest
    assert formats[-1] == 0
    generation.text()
    assert len(generation.token_ids) == 30
    assert generation.result.reuse.streamed_bytes == 0
    again = model.generate_ids([*prompt, *generation.token_ids], max_tokens=4, temperature=0.0, ignore_end=True)
    again.text()
    assert again.result.reuse.memory_tokens >= 1024  # the page behind must begin exact
    model.cache.check()


# no room


def test_without_a_disk_it_says_what_would_help(opened: Open) -> None:
    model = opened(folder=None)
    sequence = model.sequence()
    sequence.append(plain_ids(600))
    with pytest.raises(ContextOverflowError, match=r"700 tokens do not fit: there is room for 640;.*kv_disk"):
        sequence.append(plain_ids(100))
    assert sequence.num_tokens == 600
    _check_room(sequence)
    sequence.close()


def test_disk_that_refuses_is_named_and_the_next_answer_goes_on(
    opened: Open, reference: Reference, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    model = opened()
    with monkeypatch.context() as patched:
        fill_disk(patched)
        with pytest.raises(ContextOverflowError, match=r"the disk took no pages: disk full, .*No space left"):
            model.generate_ids(plain_ids(900), max_tokens=4).text()
        model.cache.check()
        assert model.cache.pool.reserved_bytes == 0
        assert run_files(folder) == []
        answer(model, reference, plain_ids(500), 4)
    assert answer(model, reference, plain_ids(900), 4).result.reuse.streamed_bytes > 0


def test_disk_that_is_too_small_ends_in_one_sentence_and_keeps_to_its_bound(opened: Open, reference: Reference) -> None:
    model = opened(disk_bytes=8 * 40_000)
    with pytest.raises(ContextOverflowError, match="do not fit"):
        model.generate_ids(plain_ids(1300), max_tokens=4).text()
    model.cache.check()
    answer(model, reference, plain_ids(400), 4)


# what is lost


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("which", [(0,), (-1,), (2, 5), (0, 1, 2, 3, 4)])
def test_page_that_is_lost_on_disk_is_computed_again(
    opened: Open, reference: Reference, which: Sequence[int], every: bool
) -> None:
    model = opened()
    prompt = plain_ids(900)
    generation = model.generate_ids(prompt, max_tokens=60, temperature=0.0, ignore_end=True, logprobs=int(every))
    next(generation)
    sequence = generation._live.sequence
    cold = sorted(sequence.cold)
    _damage(model, sequence, *(cold[number] for number in which))
    for _ in range(3):
        next(generation)
        _check_room(sequence)
    generation.text()
    reference.check(prompt, generation.token_ids, [])
    assert len(generation.token_ids) == 60
    lost = [miss for miss in generation.result.reuse.misses if miss.reason == "damaged"]
    assert cold[min(which)] * P in {miss.at_token for miss in lost}
    assert all("lost on disk while it was read for a step" in miss.detail for miss in lost)
    # it is whole again, in memory and on disk
    assert answer(model, reference, [*prompt, *generation.token_ids], 4).result.reuse.disk_tokens > 0


@pytest.mark.parametrize("length", range(917, 924))
def test_page_that_is_lost_while_several_tokens_are_computed_ahead(opened: Open, reference: Reference, length: int) -> None:
    """The pages taken for the tokens to come lie behind the lost one, and go with it."""
    model = opened()
    prompt = plain_ids(length)
    sequence = model.sequence()
    made = [int(sequence.append(prompt).argmax())]
    _damage(model, sequence, 1)
    while len(made) < 30:
        made += sequence.run_ahead(made[-1], 8)
    assert sequence.lost
    reference.check(prompt, made, [])
    sequence.close()


@pytest.mark.parametrize("how", ["held", "shared"])
def test_pages_that_stay_in_memory_for_others_are_passed_over(opened: Open, reference: Reference, how: str) -> None:
    """Leaving them makes no room: somebody holds the past that they are the beginning of, or works with them."""
    model = opened()
    stem = plain_ids(6 * P)
    answer(model, reference, stem, 1)
    cache = model.cache
    found, pages = cache.find(stem), []
    if how == "shared":
        cache.let_go(found)
        pages = [node.page.handle for node in cache.tree.match(stem).nodes]
        for page in pages:
            cache.pool.share(page)
    generation = answer(model, reference, [*stem, *plain_ids(500, 1)], 20)
    assert generation.result.reuse.streamed_bytes > 0
    cache.let_go(found)
    for page in pages:
        cache.pool.release(page)


@pytest.mark.parametrize("every", [True, False])
def test_page_that_is_lost_when_there_is_room_for_all_again(opened: Open, reference: Reference, every: bool) -> None:
    """Nothing stays on disk then, so the pages that the step was to read have other addresses."""
    model = opened(pages=40)
    other = model.sequence()
    other.append(plain_ids(25 * P, 1))
    prompt = plain_ids(700)
    generation = model.generate_ids(prompt, max_tokens=40, temperature=0.0, ignore_end=True, logprobs=int(every))
    next(generation)
    sequence = generation._live.sequence
    assert sequence.cold
    other.close()
    _damage(model, sequence, 0)
    next(generation)
    assert not sequence.cold
    _check_room(sequence)
    generation.text()
    reference.check(prompt, generation.token_ids, [])


def test_files_that_vanish_again_and_again(opened: Open, reference: Reference, folder: Path) -> None:
    model = opened()
    prompt = plain_ids(800)
    generation = model.generate_ids(prompt, max_tokens=60, temperature=0.0, ignore_end=True, logprobs=1)
    for number, _ in enumerate(generation):
        if number % 7 == 0:
            for path in run_files(folder):
                path.unlink()
        model.cache.check()
    reference.check(prompt, generation.token_ids, [])
    assert len(generation.token_ids) == 60


def test_past_on_disk_that_another_answer_finds_lost(opened: Open, reference: Reference) -> None:
    model = opened(pages=28)
    prompt = plain_ids(900)
    long = model.generate_ids(prompt, max_tokens=30, temperature=0.0, ignore_end=True)
    next(long)
    cold = sorted(long._live.sequence.cold)
    _damage(model, long._live.sequence, cold[1])
    answer(model, reference, [*prompt[:70], 7], 4)
    model.cache.check()
    long.text()
    reference.check(prompt, long.token_ids, [])
