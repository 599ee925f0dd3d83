"""Situations that users of other engines have met, and what the memory of the past makes of each; every answer is exact."""

from __future__ import annotations

import errno
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace.engine import memory as engine_memory
from headrace.engine import streaming
from headrace.engine.generation import Generation
from headrace.engine.model import Model
from headrace.engine.results import MissReport
from headrace.engine.sampler import Sampled, Sampler
from headrace.errors import ContextOverflowError
from headrace.kv import runs
from headrace.kv.disk import RETRY_S
from headrace.kv.pages import pages_for
from tiny import models as tiny
from tiny.memory import Clock, FixedPrices, Reference, answer, run_files
from tiny.models import TinySpec, write_model
from tiny.runs import disk_bytes, set_byte

if TYPE_CHECKING:
    from conftest import TinyModels

SPEC = TinySpec(ends=False, context=1536, layers=4, seed=31)
OTHER_SPEC = TinySpec(ends=False, context=1536, layers=4, seed=32)

Open = Callable[..., Model]


class Ticks:
    """A wall clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


def _ids(count: int, seed: int = 0) -> list[int]:
    """Tokens that no special token is among."""
    return np.random.default_rng(seed).integers(5, 200, count).tolist()


def _known(generation: Generation) -> int:
    """Tokens of the prompt that were not computed."""
    return generation.result.reuse.memory_tokens + generation.result.reuse.disk_tokens


def _only(misses: Sequence[MissReport]) -> MissReport:
    assert len(misses) == 1, misses
    return misses[0]


@pytest.fixture
def reference(tiny_models: TinyModels) -> Reference:
    return Reference(tiny_models.load(SPEC))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def opened(open_tiny: Open, folder: Path, checked_memory: Callable[[Model], None]) -> Iterator[Open]:
    """Opens the model on the folder, with memory for 64 pages and computing that is dear."""
    models: list[Model] = []

    def load(spec: TinySpec = SPEC, **options: object) -> Model:
        models.append(open_tiny(spec, **{"folder": folder, "pages": 64, "prices": FixedPrices(), **options}))
        return models[-1]

    yield load
    for model in models:
        if not model._closed:
            checked_memory(model)


# what stays


def test_cyclic_set_just_larger_than_memory_is_not_evicted_whole(opened: Open, reference: Reference) -> None:
    """Ten conversations would fit; of twelve in turn, least recently used first would always drop the one that is next."""
    clock = Ticks()
    model = opened(folder=None, pages=40, wall_clock=clock)
    conversations = [_ids(4 * 32, seed) for seed in range(12)]
    hits = []
    for _ in range(8):
        for conversation in conversations:
            clock.now_s += 10
            hits.append(_known(answer(model, reference, conversation, 1)) / len(conversation))
    assert np.mean(hits[:12]) == 0
    assert np.mean(hits[-48:]) > 0.5


def test_oversized_prompt_breaks_no_bound_and_leaves_what_is_used_again(opened: Open, reference: Reference) -> None:
    clock = Ticks()
    model = opened(folder=None, pages=24, wall_clock=clock)
    conversations = [_ids(4 * 32, seed) for seed in range(5)]
    for _ in range(3):
        for conversation in conversations:
            clock.now_s += 10
            answer(model, reference, conversation, 1)
    clock.now_s += 10
    answer(model, reference, _ids(16 * 32, 99), 1)
    model.cache.check()
    known = [model.cache.find(conversation) for conversation in conversations]
    for found in known:
        model.cache.let_go(found)
    # 16 of 24 pages were needed: the other 8 hold what was in use before, not what is left of one
    assert sum(found.num_tokens for found in known) >= 7 * 32


def test_pinned_conversation_outlives_an_oversized_prompt(opened: Open, reference: Reference) -> None:
    model = opened(folder=None, pages=24)
    chat = model.chat("and")
    chat.send("the user " * 30, max_tokens=4, temperature=0.0).text()
    chat.pin()
    for seed in range(4):
        answer(model, reference, _ids(14 * 32, seed), 1)
    again = chat.send("in the end", max_tokens=2, temperature=0.0)
    known = len(chat.token_ids) - 1
    again.text()
    assert again.result.usage.cached_tokens == known


def test_prompt_that_cannot_fit_is_refused_before_anything_is_evicted(opened: Open, reference: Reference) -> None:
    model = opened(folder=None, pages=24)
    conversations = [_ids(4 * 32, seed) for seed in range(5)]
    for conversation in conversations:
        answer(model, reference, conversation, 1)
    with pytest.raises(ContextOverflowError, match=r"800 tokens do not fit: there is room for 768.*--kv-disk"):
        model.generate_ids(_ids(800, 99)).text()
    model.cache.check()
    for conversation in conversations:
        assert _known(answer(model, reference, conversation, 1)) == 4 * 32 - 1


def test_side_requests_do_not_displace_the_main_conversation(opened: Open, reference: Reference) -> None:
    """A title, a summary: other prompts, each used once, later than the conversation, and too large to stay beside it."""
    clock = Ticks()
    model = opened(folder=None, pages=24, wall_clock=clock)
    main = _ids(6 * 32)
    for turn in range(8):
        clock.now_s += 30
        generation = answer(model, reference, main, 4)
        # but for the last pages, until the rule has seen enough
        assert turn == 0 or _known(generation) >= len(main) - 1 - 64
        main += [*generation.token_ids, *_ids(12, turn)]
        clock.now_s += 1
        answer(model, reference, _ids(12 * 32, 100 + turn), 2)


@pytest.mark.parametrize("shared", [460, 448])
def test_prompt_that_shares_most_of_another_does_not_overwrite_it(opened: Open, reference: Reference, shared: int) -> None:
    model = opened(folder=None)
    first = _ids(500)
    begun = answer(model, reference, first, 8)
    other = answer(model, reference, [*first[:shared], *_ids(40, 1)], 8)
    assert _known(other) == shared
    assert _only(other.result.reuse.misses).at_token == shared
    again = answer(model, reference, [*first, *begun.token_ids, *_ids(5, 2)], 8)
    assert _known(again) == len(first) + len(begun.token_ids) - 1


def test_clock_at_the_start_of_a_prompt_is_the_place_of_divergence_with_both_texts(opened: Open) -> None:
    model = opened(folder=None)
    prompts = [f"It is {time}. Answer the user in the end, and then the other one." for time in ("12:41:07", "12:41:52")]
    model.generate(prompts[0], raw=True, max_tokens=2).text()
    generation = model.generate(prompts[1], raw=True, max_tokens=2)
    generation.text()
    miss = _only(generation.result.reuse.misses)
    at = len(model.tokenize("It is 12:41:"))
    assert (miss.reason, miss.at_token) == ("diverged", at)
    assert miss.num_tokens == len(model.tokenize(prompts[1])) - 1 - at
    assert miss.detail == "behind 's 12:41:' comes '52. Answ', where '07. Answ' is known"
    assert _known(generation) == at


def test_newlines_that_read_back_as_one_token_are_found_again(
    tmp_path: Path, open_file: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "_MERGES", (*tiny._MERGES, "Ċ Ċ"))
    model = open_file(write_model(tmp_path / "newlines.gguf", SPEC))
    (newline,), (double,) = model.tokenize("\n"), model.tokenize("\n\n")
    assert newline != double
    monkeypatch.setattr(Sampler, "sample", lambda *_: Sampled(newline))
    chat = model.chat()
    chat.send("the", max_tokens=2, temperature=0.0, logprobs=1).text()
    assert chat.messages[-1].content == "\n\n"
    assert chat.token_ids[-2:] == (newline, newline)
    known = len(chat.token_ids) - 1
    again = chat.send("user", max_tokens=1, temperature=0.0, logprobs=1)
    again.text()
    assert again.result.usage.cached_tokens == known


# what becomes of files


def _empty(paths: Sequence[Path]) -> None:
    for path in paths:
        path.write_bytes(b"")


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink()


def _garble(paths: Sequence[Path]) -> None:
    for path in paths:
        path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))


def _swap(paths: Sequence[Path]) -> None:
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)


@pytest.mark.parametrize("harm", [_empty, _remove, _garble, _swap])
@pytest.mark.parametrize("which", ["sessions", "pages", "all"])
def test_snapshots_that_are_no_longer_what_they_were_leave_the_live_session_untouched(
    opened: Open, reference: Reference, folder: Path, harm: Callable[[Sequence[Path]], None], which: str
) -> None:
    clock = Clock()
    model = opened(wall_clock=clock)
    live, other = model.session("live", "and"), model.session("other", "and")
    live.send("the user " * 20, max_tokens=4, temperature=0.0).text()
    other.send("in the end " * 20, max_tokens=4, temperature=0.0).text()
    model.cache.flush()
    messages, ids = live.messages, live.token_ids
    found = {
        "sessions": sorted(folder.glob("sessions/*/*.json")),
        "pages": run_files(folder),
        "all": [path for path in sorted(folder.rglob("*")) if path.is_file()],
    }
    assert len(found[which]) > 1
    harm(found[which])
    turn = live.send("user", max_tokens=4, temperature=0.0)
    turn.text()
    reference.check(turn._plan.prompt_ids, turn.token_ids, [])
    assert live.messages[: len(messages)] == messages
    assert live.token_ids[: len(ids)] == ids
    assert _known(turn) == len(ids) - 1  # it is in memory
    live.close()
    model.close()
    # and is kept as it is now, whatever became of what was kept before
    clock.ahead_s += 100
    again = opened(wall_clock=clock).session("live")
    assert again.messages[: len(messages)] == messages
    turn = again.send("the", max_tokens=4, temperature=0.0)
    turn.text()
    reference.check(turn._plan.prompt_ids, turn.token_ids, [])


def test_folder_that_vanishes_under_a_running_model_is_made_again(opened: Open, reference: Reference, folder: Path) -> None:
    model = opened()
    first = answer(model, reference, _ids(200), 4)
    model.cache.flush()
    shutil.rmtree(folder)
    assert _known(answer(model, reference, [*_ids(200), *first.token_ids], 4)) == 203
    answer(model, reference, _ids(200, 1), 4)
    model.close()
    assert _known(answer(opened(), reference, _ids(200, 1), 4)) == 199


@pytest.mark.parametrize("length", [75, 96, 400])
@pytest.mark.parametrize("reason", ["gone", "damaged"])
def test_page_that_is_lost_between_lookup_and_read_is_computed_and_the_reason_told(
    opened: Open, reference: Reference, monkeypatch: pytest.MonkeyPatch, folder: Path, length: int, reason: str
) -> None:
    prompt = _ids(length)
    model = opened()
    answer(model, reference, prompt, 1)
    model.close()
    again = opened()
    store = again.cache.disk.store
    real = store.read_many

    harmed: list[Path] = []

    def late(*asked: Any) -> Any:
        for path in run_files(folder) if not harmed else []:
            harmed.append(path)
            if reason == "gone":
                path.unlink()
            else:
                set_byte(path, path.stat().st_size - 4096 * 8 * 2 + 5)  # in the last page but one
        return real(*asked)

    monkeypatch.setattr(store, "read_many", late)
    generation = answer(again, reference, [*prompt, 7], 4)
    reuse = generation.result.reuse
    lost = [miss for miss in reuse.misses if miss.reason == reason]
    assert lost
    assert sum(miss.num_tokens for miss in lost) == (length if reason == "gone" else 32)
    assert _known(generation) == length - sum(miss.num_tokens for miss in lost)
    monkeypatch.undo()
    # what was computed again is known again, in memory and on disk
    assert _known(answer(again, reference, [*prompt, 7], 4)) == length
    again.close()
    assert _known(answer(opened(), reference, [*prompt, 7], 4)) == length


def test_pages_of_another_model_are_not_used_and_that_is_told(opened: Open, reference: Reference) -> None:
    other = opened(OTHER_SPEC)
    other.generate_ids(_ids(100), max_tokens=1).text()
    other.close()
    generation = answer(opened(), reference, _ids(100), 4)
    miss = _only(generation.result.reuse.misses)
    assert (_known(generation), miss.reason, miss.num_tokens) == (0, "model changed", 99)
    assert "of another model (tiny llama, with content" in miss.detail


def test_pages_of_other_numbers_are_not_used_and_that_is_told(
    opened: Open, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = _ids(100)
    model = opened()
    answer(model, reference, prompt, 1)
    model.close()
    monkeypatch.setattr(engine_memory, "numbers_of", lambda library, formats: "kernels x, steps y")
    newer = opened()
    generation = answer(newer, reference, prompt, 4)
    miss = _only(generation.result.reuse.misses)
    assert (_known(generation), miss.reason) == (0, "format changed")
    assert miss.detail.startswith("the pages kept for these tokens are of other numbers (kernels ")
    # what comes behind pages that are known here is not said to be known there
    generation = answer(newer, reference, [*prompt, *_ids(20, 1)], 4)
    miss = _only(generation.result.reuse.misses)
    assert (miss.reason, miss.at_token) == ("diverged", 100)
    newer.cache.clear()
    answer(newer, reference, prompt[:96], 1)
    generation = answer(newer, reference, [*prompt[:96], *_ids(20, 1)], 4)
    assert _only(generation.result.reuse.misses).reason == "first seen"
    newer.close()
    monkeypatch.undo()
    assert _known(answer(opened(), reference, prompt, 4)) == 99


@pytest.mark.parametrize("options", [{"context": 700}, {"threads": 2}, {"pages": 24}, {"disk_bytes": 10**8}])
def test_context_threads_and_bounds_are_no_part_of_the_key(
    opened: Open, reference: Reference, options: dict[str, Any]
) -> None:
    model = opened()
    answer(model, reference, _ids(300), 1)
    model.close()
    assert _known(answer(opened(**options), reference, _ids(300), 4)) == 299


# several processes


def test_second_process_finds_what_the_first_has_written(opened: Open, reference: Reference) -> None:
    one, two = opened(), opened()
    prompt = _ids(200)
    first = answer(one, reference, prompt, 4)
    assert _known(answer(two, reference, _ids(200, 1), 4)) == 0
    one.cache.flush()
    prompt += [*first.token_ids, 7]
    second = answer(two, reference, prompt, 4)
    assert second.result.reuse.disk_tokens == 203
    two.cache.flush()
    assert _known(answer(one, reference, [*prompt, *second.token_ids], 4)) == 208
    assert _known(answer(one, reference, _ids(200, 1), 4)) == 199


def test_processes_that_write_the_same_leave_one_copy_of_it(opened: Open, reference: Reference, folder: Path) -> None:
    one, two = opened(), opened()
    prompt = _ids(320)
    both = [model.generate_ids(prompt, max_tokens=1) for model in (one, two)]
    for generation in both:
        next(generation)  # neither knows yet of what the other has
    for generation, model in zip(both, (one, two), strict=True):
        generation.text()
        model.cache.flush()
    assert len(run_files(folder)) == 2
    for seed, model in enumerate((one, two, one, two), 1):
        model.cache.disk.store._listed_ns = -1  # as if a second had passed
        answer(model, reference, _ids(40, seed), 1)
        model.cache.flush()
        model.cache.check()
    assert len(run_files(folder)) == 1 + 4
    for model in (one, two):
        for node in model.cache.tree.match(prompt).nodes:
            assert node.page.place is not None
        model.close()
    assert answer(opened(), reference, prompt, 4).result.reuse.disk_tokens == 319


PROCESS = """
import importlib.util, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("engine_conftest", sys.argv[1])
conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conftest)
from tiny.memory import FixedPrices
path, folder, prompt = Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
model = conftest.open_model(path, folder=folder, pages=64, prices=FixedPrices())
generation = model.generate_ids(prompt, max_tokens=8, temperature=0.0, ignore_end=True)
generation.text()
print(json.dumps([list(generation.token_ids), generation.result.reuse.disk_tokens]), flush=True)
sys.stdin.readline()
model.close()
"""


def test_another_process_beside_this_one(
    opened: Open, reference: Reference, folder: Path, tiny_models: TinyModels
) -> None:
    one = opened()
    prompt = _ids(300)
    first = answer(one, reference, prompt, 4)
    one.cache.flush()
    prompt += [*first.token_ids, 7]
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", PROCESS, str(tests / "engine/conftest.py"), str(tiny_models.path(SPEC)), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *filter(None, sys.path)])}
    with subprocess.Popen(
        [*command, json.dumps(prompt)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        tokens, disk_tokens = json.loads(process.stdout.readline())
        reference.check(prompt, tokens, [])
        assert disk_tokens == 303
        # while it runs, this one goes on in the same folder
        answer(one, reference, _ids(100, 1), 4)
        one.cache.flush()
        process.communicate("\n")
    assert process.returncode == 0
    assert _known(answer(one, reference, [*prompt, *tokens], 4)) == len(prompt) + len(tokens) - 1


# bounds


def test_full_disk_costs_only_what_would_have_been_kept(
    opened: Open, reference: Reference, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    clock = Clock()
    model = opened(wall_clock=clock)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runs, "_write", full)
    answer(model, reference, _ids(200), 4)
    model.cache.flush()
    refusal = model.cache.disk.refusal
    assert refusal is not None
    assert refusal.reason == "disk full"
    assert run_files(folder) == []
    assert _known(answer(model, reference, _ids(200), 4)) == 199
    monkeypatch.undo()
    # it is not tried again at once, but after a while
    answer(model, reference, _ids(200, 1), 4)
    model.cache.flush()
    assert run_files(folder) == []
    clock.ahead_s += RETRY_S + 1
    answer(model, reference, _ids(200, 2), 4)
    model.cache.flush()
    assert len(run_files(folder)) == 1


def test_bounds_hold_whatever_is_asked(opened: Open, reference: Reference, folder: Path) -> None:
    limit = 3 * 10**6
    model = opened(pages=24, disk_bytes=limit)
    rng = np.random.default_rng(0)
    most = 0
    for number in range(40):
        prompt = _ids(int(rng.integers(1, 700)), int(rng.integers(12)))
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
    for number in range(60):
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
    prompt = _ids(24 * 32 + 1)
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
    computed = [miss for miss in reuse.misses if miss.reason == "recompute is quicker"]
    assert computed[0].at_token == 0
    assert reuse.disk_tokens + sum(miss.num_tokens for miss in computed) == 24 * 32
    # about half of each; the mover reads 8 pages at a time
    assert 4 * 32 <= reuse.disk_tokens <= 20 * 32
    # and all is known now
    assert _known(answer(model, reference, kept, 4)) == 24 * 32


def test_everything_is_computed_where_reading_is_very_slow(
    opened: Open, reference: Reference, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(prices=FixedPrices(token_s=1e-5, byte_s=1.0))
    asked = _slow(monkeypatch, model, 10.0)
    generation = answer(model, reference, kept, 4)
    assert {miss.reason for miss in generation.result.reuse.misses} == {"recompute is quicker"}
    assert sum(miss.num_tokens for miss in generation.result.reuse.misses) == 24 * 32
    assert _known(generation) == 0
    assert asked == []


@pytest.mark.parametrize("length", [24 * 32 + 1, 24 * 32 + 20, 90])
def test_last_part_of_a_page_is_computed_where_reading_is_very_slow(
    opened: Open, reference: Reference, kept: list[int], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    model = opened(prices=FixedPrices(token_s=1e-5, byte_s=1.0))
    asked = _slow(monkeypatch, model, 10.0)
    generation = answer(model, reference, [*kept, *_ids(40)][:length], 4)
    assert sum(miss.num_tokens for miss in generation.result.reuse.misses) == length - 1
    assert asked == []


def test_quick_disk_is_read_and_nothing_computed(opened: Open, reference: Reference, kept: list[int]) -> None:
    reuse = answer(opened(), reference, kept, 4).result.reuse
    assert (reuse.disk_tokens, reuse.misses) == (24 * 32, ())
    assert reuse.load_s > 0


def test_reuse_says_what_it_saved(opened: Open, reference: Reference) -> None:
    model = opened(prices=None)
    assert answer(model, reference, _ids(300), 4).result.reuse.saved_s == 0
    first = answer(model, reference, _ids(300), 4).result.reuse
    # computing a part of it would have taken less
    part = answer(model, reference, _ids(300)[:100], 4).result.reuse
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
        prompt += _ids(180, turn)
        generation = answer(model, reference, prompt, 20, every=every)
        reuse = generation.result.reuse
        assert _known(generation) == known
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


def test_conversation_longer_than_memory_goes_on_with_the_room_it_takes_in_earnest(
    opened: Open, reference: Reference
) -> None:
    model = opened(pages=32)
    generation = answer(model, reference, _ids(1400), 10)
    assert generation.result.reuse.streamed_bytes > 0
    assert _known(answer(model, reference, [*_ids(1400), *generation.token_ids], 4)) == 1409


@pytest.mark.usefixtures("small_staging")
@pytest.mark.parametrize("which", ["all", "first page", "last page on disk"])
def test_page_that_is_lost_while_it_is_streamed_is_computed_again(
    opened: Open, reference: Reference, folder: Path, which: str
) -> None:
    model = opened(pages=20)
    prompt = _ids(700)
    generation = model.generate_ids(prompt, max_tokens=60, temperature=0.0, ignore_end=True)
    next(generation)
    assert generation._sequence.cold
    for path in run_files(folder):
        if which == "all":
            path.unlink()
    if which != "all":
        node = generation._sequence.cold[min(generation._sequence.cold) if which == "first page" else max(generation._sequence.cold)]
        run = model.cache.disk.store._runs[node.page.place.run]
        set_byte(run.path, run.payload_offset + node.page.place.index * run.stride + 4000)
    generation.text()
    reference.check(prompt, generation.token_ids, [])
    assert len(generation.token_ids) == 60
    model.cache.check()
    assert _known(answer(model, reference, [*prompt, *generation.token_ids], 4)) == 759


# sessions


def test_fork_copies_no_page_and_takes_no_time(opened: Open, reference: Reference) -> None:
    model = opened()
    chat = model.session("long", "and")
    chat.send("the user and " * 120, max_tokens=8, temperature=0.0).text()
    assert len(chat.token_ids) > 700
    model.cache.flush()
    owned = model.cache.pool.owned_bytes
    times, named = [], []
    for number in range(60):
        start = time.perf_counter()
        copy = chat.fork()
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
        chat.fork(f"copy {number}")
        named.append(time.perf_counter() - start)
        assert (copy.messages, copy.token_ids) == (chat.messages, chat.token_ids)
    assert model.cache.pool.owned_bytes == owned
    assert statistics.median(times) < 1e-3
    # each goes on with all of it, and none knows what the others say
    turns = [each.send(text, max_tokens=6, temperature=0.0) for each, text in ((chat, "the"), (copy, "in the end"))]
    known = len(copy.token_ids) - 1
    for turn in turns:
        turn.text()
        reference.check(turn._plan.prompt_ids, turn.token_ids, [])
        assert turn.result.usage.cached_tokens >= known
