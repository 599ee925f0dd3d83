"""Many requests of one model at once: each has the answer it has alone, whoever reads, drops, cancels or interrupts what."""

from __future__ import annotations

import gc
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.engine.generation import Generation
from headrace.engine.model import Model
from headrace.engine.sampler import SamplingParams
from headrace.errors import ContextOverflowError
from headrace.kv.pages import pages_for
from tiny.memory import Reference, known_tokens, plain_ids
from tiny.models import TinySpec

if TYPE_CHECKING:
    from conftest import TinyModels

SPECS = {
    "llama": TinySpec(ends=False, context=1536, layers=4, seed=31),
    "gemma3": TinySpec("gemma3", ends=False, context=1536, layers=6, window=40, heads=4, kv_heads=2, seed=32),
}


@pytest.fixture(params=sorted(SPECS))
def spec(request: pytest.FixtureRequest) -> TinySpec:
    return SPECS[request.param]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of all lengths around the ends of pages, segments and steps."""
    lengths = itertools.cycle((1, 31, 33, 64, 100, 200, 255, 257, 300, 7))
    return [plain_ids(length, seed=seed + number) for number, length in zip(range(count), lengths, strict=False)]


def ask(model: Model, prompt: list[int], max_tokens: int = 20, **options: object) -> Generation:
    return model.generate_ids(prompt, max_tokens=max_tokens, ignore_end=True, **options)  # type: ignore[arg-type]


def ask_for_slow_reader(model: Model, prompt: list[int], max_tokens: int, outbox_tokens: int) -> Generation:
    """An answer of which few tokens wait for their reader before it does."""
    params = SamplingParams(temperature=0.0)
    return model.answer(prompt, max_tokens, params, (), lambda _: None, ignore_end=True, outbox_tokens=outbox_tokens)


def check(reference: Reference, prompt: list[int], answer: Sequence[int], count: int = 20) -> None:
    """An answer has so many tokens, and they are what the model says when it computes all of it alone, from nothing."""
    assert len(answer) == count
    reference.check(prompt, answer, [])


def turns(generations: list[Generation]) -> Iterator[int]:
    """Reads a piece of each in turn until all have ended; the number of each that gave one."""
    left = dict(enumerate(generations))
    while left:
        for number in list(left):
            try:
                next(left[number])
            except StopIteration:
                del left[number]
            else:
                yield number


@pytest.mark.parametrize("count", [2, 5, 17])
def test_answers_read_in_turn_are_those_that_each_has_alone(
    opened: Callable[..., Model], reference: Reference, count: int
) -> None:
    model = opened(pages=400)
    asked = prompts(count)
    generations = [ask(model, prompt) for prompt in asked]
    for _ in turns(generations):
        model.cache.check()
    for prompt, generation in zip(asked, generations, strict=True):
        check(reference, prompt, generation.token_ids, 20)


def test_requests_are_computed_together(opened: Callable[..., Model]) -> None:
    model = opened(pages=400)
    steps: list[int] = []
    real = model._executor.run

    def run(slices: list[object], *rest: object) -> object:
        steps.append(len(slices))
        return real(slices, *rest)  # type: ignore[arg-type]

    model._executor.run = run  # type: ignore[method-assign, assignment]
    generations = [ask(model, plain_ids(40, seed=seed), 30) for seed in range(8)]
    for generation in generations:
        generation.text()
    assert max(steps) == 8
    # 30 tokens each: alone they would take 8 prompts and 8 times 29 tokens, or 4 programs of several tokens each
    assert len(steps) < 50


def test_threads_that_share_a_model_get_their_own_answers(opened: Callable[..., Model], reference: Reference) -> None:
    model = opened(pages=400)
    asked = prompts(12, seed=50)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: ask(model, prompt).wait().token_ids, asked))
    for prompt, answer in zip(asked, answers, strict=True):
        check(reference, prompt, answer)


def test_answer_may_be_read_by_several_threads_in_turn(opened: Callable[..., Model], reference: Reference) -> None:
    model, prompt = opened(), plain_ids(90)
    generation = ask(model, prompt)
    for _ in range(4):
        thread = threading.Thread(target=lambda: [next(generation) for _ in range(5)])
        thread.start()
        thread.join()
    assert list(generation) == []
    check(reference, prompt, generation.token_ids, 20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_that_dies_while_it_reads_leaves_the_others_alone(opened: Callable[..., Model], reference: Reference) -> None:
    model = opened(pages=400)
    asked = prompts(3, seed=70)
    first, second, third = (ask(model, prompt) for prompt in asked)

    def die() -> None:
        next(first)
        sys.exit()

    thread = threading.Thread(target=die)
    thread.start()
    thread.join()
    second.text()
    third.text()
    check(reference, asked[1], second.token_ids, 20)
    check(reference, asked[2], third.token_ids, 20)
    first.text()
    check(reference, asked[0], first.token_ids, 20)


def test_answers_that_are_dropped_give_their_pages_back_and_stay_known(
    opened: Callable[..., Model], checked_memory: Callable[[Model], None], reference: Reference
) -> None:
    """Memory for two conversations, and sixty of them: each is left after its first piece."""
    model = opened(pages=24)
    for number in range(60):
        for _ in ask(model, plain_ids(300, seed=number % 7)):
            break
    gc.collect()
    prompt = plain_ids(300, seed=59 % 7)
    again = ask(model, prompt)
    again.text()
    assert known_tokens(again) == 299
    check(reference, prompt, again.token_ids, 20)
    checked_memory(model)


@pytest.mark.parametrize("how", ["dropped", "cancelled", "cancelled elsewhere", "closed"])
def test_answer_that_is_not_read_to_its_end_is_known_after_the_model_was_closed(opened: Callable[..., Model], how: str) -> None:
    prompt = plain_ids(400)
    model = opened()
    generation = ask(model, prompt)
    for _ in range(3):
        next(generation)
    if how == "dropped":
        del generation
    elif how == "cancelled":
        generation.cancel()
    elif how == "cancelled elsewhere":
        thread = threading.Thread(target=generation.cancel)
        thread.start()
        thread.join()
    else:
        generation.close()
    model.close()
    again = ask(opened(), prompt)
    again.text()
    assert known_tokens(again) == 399


def test_cancelled_answer_keeps_no_token_that_nobody_read(opened: Callable[..., Model], reference: Reference) -> None:
    """Tokens are computed several at a time; a conversation goes on from what its user saw."""
    model, prompt = opened(), plain_ids(70)
    generation = ask(model, prompt, 60)
    read = [next(generation) for _ in range(11)]
    generation.close()
    seen = tuple(token for piece in read for token in piece.token_ids)
    assert generation.token_ids == seen
    check(reference, prompt, seen, 11)
    following = ask(model, [*prompt, *seen, *plain_ids(20, seed=9)], 2)
    following.text()
    assert known_tokens(following) >= 70 + 10


def test_nothing_is_committed_inside_the_garbage_collector(
    opened: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened()
    generation = ask(model, plain_ids(40))
    next(generation)
    committed: list[int] = []
    real = model.cache.commit

    def commit(*arguments: object, **options: object) -> object:
        committed.append(threading.get_ident())
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(model.cache, "commit", commit)
    loop = [generation]
    loop.append(loop)  # type: ignore[arg-type] # only the collector can free it
    del generation, loop
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert committed == []
    ask(model, plain_ids(3)).text()
    assert committed[:1] == [threading.get_ident()]


def test_slow_reader_pauses_its_own_request_only(opened: Callable[..., Model], reference: Reference) -> None:
    model = opened(pages=400)
    slow = ask_for_slow_reader(model, plain_ids(40, seed=1), 100, 16)
    quick = ask(model, plain_ids(50, seed=2), 100)
    quick.text()
    check(reference, plain_ids(50, seed=2), quick.token_ids, 100)
    live = slow._live
    assert 16 <= len(live.answer.token_ids) < 32
    assert live.is_paused
    slow.text()
    check(reference, plain_ids(40, seed=1), slow.token_ids, 100)


def test_requests_that_do_not_fit_together_are_answered_all_the_same(
    opened: Callable[..., Model], reference: Reference, checked_memory: Callable[[Model], None]
) -> None:
    """Memory for about one and a half of them, nothing on disk: some wait, some give up their pages and find them again."""
    model = opened(folder=None, pages=30)
    asked = [plain_ids(length, seed=length) for length in (500, 300, 420, 64, 200)]
    generations = [ask(model, prompt, 150) for prompt in asked]
    for _ in turns(generations):
        model.cache.check()
    for prompt, generation in zip(asked, generations, strict=True):
        check(reference, prompt, generation.token_ids, 150)
    checked_memory(model)


def test_request_whose_reader_sleeps_gives_its_memory_to_those_who_wait(
    opened: Callable[..., Model], reference: Reference
) -> None:
    model = opened(folder=None, pages=20)
    asleep = ask_for_slow_reader(model, plain_ids(500, seed=1), 30, 4)
    next(asleep)
    other = ask(model, plain_ids(500, seed=2), 30)
    other.text()
    check(reference, plain_ids(500, seed=2), other.token_ids, 30)
    asleep.text()
    check(reference, plain_ids(500, seed=1), asleep.token_ids, 30)


def test_request_that_can_never_fit_is_refused_with_the_numbers(opened: Callable[..., Model]) -> None:
    model = opened(folder=None, pages=18)
    with pytest.raises(ContextOverflowError, match=r"a prompt of 600 tokens and its answer need 20 pages .* memory holds 18"):
        ask(model, plain_ids(600)).text()
    ask(model, plain_ids(100)).text()


def test_equal_prompts_at_once_are_computed_once(opened: Callable[..., Model], reference: Reference) -> None:
    model = opened(pages=400)
    prompt = plain_ids(700)
    generations = [ask(model, [*prompt, 5 + number], 5) for number in range(6)]
    for generation in generations:
        generation.text()
    computed = [generation.result.reuse.computed_tokens for generation in generations]
    # whole pages are shared; what follows the last one is each request's own
    assert sorted(computed)[:5] == [701 - 700 // 32 * 32] * 5
    assert max(computed) == 701
    for number, generation in enumerate(generations):
        check(reference, [*prompt, 5 + number], generation.token_ids, 5)


def test_request_that_waits_for_an_equal_prompt_goes_on_when_that_one_is_cancelled(
    opened: Callable[..., Model], reference: Reference
) -> None:
    model = opened(pages=400)
    prompt = plain_ids(900)
    first, second = ask(model, prompt, 5), ask(model, prompt, 5)
    model._loop.settle()
    with model._loop.hold():
        for _ in range(3):
            model._loop.turn()
    first.cancel()
    second.text()
    check(reference, prompt, second.token_ids, 5)


def test_two_models_answer_in_turn(opened: Callable[..., Model], tiny_models: TinyModels) -> None:
    one, other = opened(), tiny_models.load(TinySpec(ends=False, context=1536, layers=2, seed=77))
    prompt = plain_ids(60)
    expected = [(ask(model, prompt).text()) for model in (one, other)]
    generations = [ask(one, prompt), ask(other, prompt)]
    for _ in turns(generations):
        pass
    assert [generation.result.text for generation in generations] == expected


def test_interrupts_at_any_moment_leave_the_model_as_good_as_before(
    opened: Callable[..., Model], reference: Reference, checked_memory: Callable[[Model], None]
) -> None:
    """As a notebook's stop button: KeyboardInterrupt wherever the main thread is, again and again."""
    model = opened(pages=40)
    random = np.random.default_rng(1)
    interrupted = 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    alarms = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        for number in range(80):
            prompt = plain_ids(int(random.integers(1, 400)), seed=number % 5)
            try:
                signal.setitimer(signal.ITIMER_REAL, float(random.uniform(1e-4, 2e-2)))
                ask(model, prompt, 12, temperature=0.0).text()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            if number % 10 == 0:
                generation = ask(model, prompt, 3)
                generation.text()
                check(reference, prompt, generation.token_ids, 3)
    finally:
        signal.signal(signal.SIGALRM, alarms)
        signal.signal(signal.SIGINT, before)
    assert interrupted > 20
    gc.collect()
    model._loop.settle()
    checked_memory(model)


_EXITS = """
import sys
from pathlib import Path
from headrace.engine.loading import load_weights
from headrace.engine.model import Model
from headrace.engine.sampler import SamplingParams
from headrace.kernels.level import host_levels
from headrace.kernels.library import KernelLibrary
from headrace.config import Config
from headrace.weights.progress import NullProgress
path = Path(sys.argv[1])
library = KernelLibrary(Config.from_environment().kernels_dir, host_levels()[-1])
model = Model(path, load_weights(path, None, NullProgress()), library, threads=2, context=512, progress=NullProgress())
generations = [model.generate_ids([5, 6, 7, number], max_tokens=100, ignore_end=True) for number in range(5, 9)]
for generation in generations:
    next(generation)
print("read", flush=True)
if sys.argv[2] == "raise":
    raise RuntimeError("in the middle")
"""


@pytest.mark.parametrize("how", ["exit", "raise"])
def test_interpreter_may_exit_in_the_middle_of_answers(tiny_models: TinyModels, spec: TinySpec, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EXITS, str(tiny_models.path(spec)), how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "read\n"
    assert done.returncode == (1 if how == "raise" else 0), done.stderr
    assert "Fatal" not in done.stderr
    assert done.stderr.count("Traceback") == (1 if how == "raise" else 0)


def test_pages_of_a_batch_are_taken_as_it_grows(opened: Callable[..., Model]) -> None:
    model = opened(pages=100)
    generations = [ask(model, plain_ids(30, seed=seed), 10) for seed in range(4)]
    for generation in generations:
        next(generation)
    held = [len(generation._live.sequence.pages) for generation in generations if generation._live.sequence is not None]
    assert held
    assert all(1 <= pages <= pages_for(30 + 10) for pages in held)
    for generation in generations:
        generation.close()
