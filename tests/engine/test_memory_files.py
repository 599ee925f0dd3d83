"""Files of the past that are lost, damaged or foreign, and several processes on one folder: at worst a recompute."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace.engine import memory as engine_memory
from headrace.engine.model import Model
from tiny.memory import Clock, Reference, answer, known_tokens, only_miss, plain_ids, run_files
from tiny.models import TinySpec
from tiny.runs import set_byte

if TYPE_CHECKING:
    from conftest import TinyModels

OTHER_SPEC = TinySpec(ends=False, context=1536, layers=4, seed=32)

Open = Callable[..., Model]


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
    reference.check(turn.prompt_ids, turn.token_ids, [])
    assert live.messages[: len(messages)] == messages
    assert live.token_ids[: len(ids)] == ids
    assert known_tokens(turn) == len(ids) - 1  # it is in memory
    live.close()
    model.close()
    if harm is _remove and which != "pages":
        assert live.problem == "it was deleted by another process"  # and does not come back
        return
    # and is kept as it is now, whatever became of what was kept before
    clock.ahead_s += 100
    again = opened(wall_clock=clock).session("live")
    assert again.messages[: len(messages)] == messages
    turn = again.send("the", max_tokens=4, temperature=0.0)
    turn.text()
    reference.check(turn.prompt_ids, turn.token_ids, [])


def test_folder_that_vanishes_under_a_running_model_is_made_again(opened: Open, reference: Reference, folder: Path) -> None:
    model = opened()
    first = answer(model, reference, plain_ids(200), 4)
    model.cache.flush()
    shutil.rmtree(folder)
    assert known_tokens(answer(model, reference, [*plain_ids(200), *first.token_ids], 4)) == 203
    answer(model, reference, plain_ids(200, 1), 4)
    model.close()
    assert known_tokens(answer(opened(), reference, plain_ids(200, 1), 4)) == 199


@pytest.mark.parametrize("length", [75, 96, 400])
@pytest.mark.parametrize("reason", ["gone", "damaged"])
def test_page_that_is_lost_between_lookup_and_read_is_computed_and_the_reason_told(
    opened: Open, reference: Reference, monkeypatch: pytest.MonkeyPatch, folder: Path, length: int, reason: str
) -> None:
    prompt = plain_ids(length)
    model = opened()
    answer(model, reference, prompt, 1)
    model.close()
    again = opened()
    store = again.cache.disk.store
    real = store.read_many

    harmed: list[Path] = []
    set_bytes: list[None] = []

    def late(*asked: Any) -> Any:
        for path in run_files(folder) if not harmed else []:
            harmed.append(path)
            if reason == "gone":
                path.unlink()
        if reason == "damaged" and not set_bytes:
            largest = max(run_files(folder), key=lambda path: path.stat().st_size)
            set_bytes.append(set_byte(largest, largest.stat().st_size - 4096 * 8 + 5))  # in the last whole page
        return real(*asked)

    monkeypatch.setattr(store, "read_many", late)
    generation = answer(again, reference, [*prompt, 7], 4)
    reuse = generation.result.reuse
    lost = [miss for miss in reuse.misses if miss.reason == reason]
    assert lost
    assert sum(miss.num_tokens for miss in lost) == (length if reason == "gone" else 32)
    assert known_tokens(generation) == length - sum(miss.num_tokens for miss in lost)
    monkeypatch.undo()
    # what was computed again is known again, in memory and on disk
    assert known_tokens(answer(again, reference, [*prompt, 7], 4)) == length
    again.close()
    assert known_tokens(answer(opened(), reference, [*prompt, 7], 4)) == length


def test_pages_of_another_model_are_not_used_and_that_is_told(opened: Open, open_kept: Open, reference: Reference) -> None:
    other = open_kept(OTHER_SPEC)
    other.generate_ids(plain_ids(100), max_tokens=1).text()
    other.close()
    generation = answer(opened(), reference, plain_ids(100), 4)
    miss = only_miss(generation)
    assert (known_tokens(generation), miss.reason, miss.num_tokens) == (0, "model_changed", 99)
    assert "of another model (tiny llama, with content" in miss.detail


def test_pages_of_other_numbers_are_not_used_and_that_is_told(
    opened: Open, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = plain_ids(100)
    model = opened()
    answer(model, reference, prompt, 1)
    model.close()
    monkeypatch.setattr(engine_memory, "numbers_of", lambda library, formats: "kernels x, steps y")
    newer = opened()
    generation = answer(newer, reference, prompt, 4)
    miss = only_miss(generation)
    assert (known_tokens(generation), miss.reason) == (0, "format_changed")
    assert miss.detail.startswith("the pages kept for these tokens are of other numbers (kernels ")
    # what comes behind pages that are known here is not said to be known there
    generation = answer(newer, reference, [*prompt, *plain_ids(20, 1)], 4)
    miss = only_miss(generation)
    assert (miss.reason, miss.at_token) == ("diverged", 100)
    newer.cache.clear()
    answer(newer, reference, prompt[:96], 1)
    generation = answer(newer, reference, [*prompt[:96], *plain_ids(20, 1)], 4)
    assert only_miss(generation).reason == "first_seen"
    newer.close()
    monkeypatch.undo()
    assert known_tokens(answer(opened(), reference, prompt, 4)) == 99


@pytest.mark.parametrize("options", [{"context": 700}, {"threads": 2}, {"pages": 24}, {"disk_bytes": 10**8}])
def test_context_threads_and_bounds_are_no_part_of_the_key(opened: Open, reference: Reference, options: dict[str, Any]) -> None:
    model = opened()
    answer(model, reference, plain_ids(300), 1)
    model.close()
    assert known_tokens(answer(opened(**options), reference, plain_ids(300), 4)) == 299


# several processes


def test_second_process_finds_what_the_first_has_written(opened: Open, reference: Reference) -> None:
    one, two = opened(), opened()
    prompt = plain_ids(200)
    first = answer(one, reference, prompt, 4)
    assert known_tokens(answer(two, reference, plain_ids(200, 1), 4)) == 0
    one.cache.flush()
    prompt += [*first.token_ids, 7]
    second = answer(two, reference, prompt, 4)
    assert second.result.reuse.disk_tokens == 203
    two.cache.flush()
    assert known_tokens(answer(one, reference, [*prompt, *second.token_ids], 4)) == 208
    assert known_tokens(answer(one, reference, plain_ids(200, 1), 4)) == 199


def test_processes_that_write_the_same_leave_one_copy_of_it(opened: Open, reference: Reference, folder: Path) -> None:
    one, two = opened(), opened()
    prompt = plain_ids(320)
    both = [model.generate_ids(prompt, max_tokens=1) for model in (one, two)]
    for model in (one, two):
        with model._loop.hold():
            model._loop.turn()  # they are begun: neither knows of what the other is going to have
    for generation, model in zip(both, (one, two), strict=True):
        generation.text()
        model.cache.flush()
    assert len(run_files(folder)) == 2
    for seed, model in enumerate((one, two, one, two), 1):
        model.cache.disk.store._listed_ns = -1  # as if a second had passed
        answer(model, reference, plain_ids(40, seed), 1)
        model.cache.flush()
        model.cache.check()
    assert len(run_files(folder)) == 1 + 2 * 4  # a page of the prompt, and one of what came behind it
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
    opened: Open, reference: Reference, folder: Path, spec: TinySpec, tiny_models: TinyModels
) -> None:
    one = opened()
    prompt = plain_ids(300)
    first = answer(one, reference, prompt, 4)
    one.cache.flush()
    prompt += [*first.token_ids, 7]
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", PROCESS, str(tests / "engine/conftest.py"), str(tiny_models.path(spec)), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *filter(None, sys.path)])}
    with subprocess.Popen(
        [*command, json.dumps(prompt)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        tokens, disk_tokens = json.loads(process.stdout.readline())
        reference.check(prompt, tokens, [])
        assert disk_tokens == 303
        # while it runs, this one goes on in the same folder
        answer(one, reference, plain_ids(100, 1), 4)
        one.cache.flush()
        process.communicate("\n")
    assert process.returncode == 0
    assert known_tokens(answer(one, reference, [*prompt, *tokens], 4)) == len(prompt) + len(tokens) - 1
