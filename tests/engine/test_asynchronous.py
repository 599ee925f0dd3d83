"""Answers under asyncio: the loop goes on, tasks take turns, and whoever is cancelled leaves nothing that runs."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from headrace.engine.asynchronous import next_piece, result_of
from headrace.engine.model import Model
from headrace.errors import NumericError
from tiny.models import TinySpec

if TYPE_CHECKING:
    from conftest import TinyModels

PROMPT = "the user and the"


class Letters:
    """Pieces that come when the test lets them; says what was done to it, and on which thread."""

    def __init__(self, text: str, failure: Exception | None = None) -> None:
        self.left, self.failure = list(text), failure
        self.go = threading.Semaphore(0)
        self.waits, self.computing = threading.Event(), False
        self.cancelled = self.closed = False
        self.threads: set[str] = set()

    def __next__(self) -> str:
        assert not self.computing
        self.computing = True
        self.threads.add(threading.current_thread().name)
        self.waits.set()
        self.go.acquire(timeout=30)
        self.computing = False
        if self.failure is not None:
            raise self.failure
        if self.cancelled or not self.left:
            raise StopIteration
        return self.left.pop(0)

    def __iter__(self) -> Letters:
        return self

    def wait(self) -> str:
        return "".join(self)

    def cancel(self) -> None:
        self.cancelled = True
        self.go.release()

    def close(self) -> None:
        assert not self.computing
        self.closed = True


def test_event_loop_goes_on_while_a_piece_is_waited_for() -> None:
    async def main() -> str:
        letters = Letters("a")
        piece = asyncio.ensure_future(next_piece(letters))
        assert await asyncio.to_thread(letters.waits.wait, 30)  # would never come here if the loop's own thread waited
        letters.go.release()
        assert threading.current_thread().name not in letters.threads
        return await piece

    assert asyncio.run(main()) == "a"


def test_end_and_errors_come_through() -> None:
    async def main() -> None:
        letters = Letters("ab")
        for _ in range(3):
            letters.go.release()
        assert [await next_piece(letters), await next_piece(letters)] == ["a", "b"]
        with pytest.raises(StopAsyncIteration):
            await next_piece(letters)
        broken = Letters("a", NumericError("not finite"))
        broken.go.release()
        with pytest.raises(NumericError, match="not finite"):
            await result_of(broken)

    asyncio.run(main())


@pytest.mark.parametrize("wanted", [next_piece, result_of])
def test_cancelled_task_cancels_its_answer_and_waits_for_the_step_that_runs(wanted: Callable[[Letters], object]) -> None:
    async def main() -> None:
        letters, other = Letters("abc"), Letters("x")
        task = asyncio.ensure_future(wanted(letters))  # type: ignore[arg-type]
        assert await asyncio.to_thread(letters.waits.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (letters.cancelled, letters.closed, letters.computing) == (True, True, False)
        other.go.release()
        assert await next_piece(other) == "x"  # the thread is free again

    asyncio.run(main())


def test_answer_that_waits_for_another_is_cancelled_before_it_computes() -> None:
    async def main() -> None:
        first, second = Letters("a"), Letters("b")
        tasks = [asyncio.ensure_future(next_piece(letters)) for letters in (first, second)]
        assert await asyncio.to_thread(first.waits.wait, 30)
        tasks[1].cancel()
        await asyncio.sleep(0)
        first.go.release()
        assert await tasks[0] == "a"
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert (second.threads, second.closed) == (set(), True)

    asyncio.run(main())


def test_threads_end_with_their_loops() -> None:
    def ours() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("headrace-asyncio")]

    async def main() -> None:
        letters = Letters("a")
        letters.go.release()
        await next_piece(letters)
        assert ours()

    asyncio.run(main())
    deadline = time.monotonic() + 10
    while ours() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert ours() == []


@pytest.fixture
def model(tiny_models: TinyModels, checked_memory: Callable[[Model], None]) -> Iterator[Model]:
    """A model whose pages must all have come back after the test."""
    model = tiny_models.load(TinySpec(seed=5, ends=False), context=128)
    model.cache.clear()  # other tests share it
    yield model
    checked_memory(model)


def test_async_for_and_await_give_what_a_plain_loop_gives(model: Model) -> None:
    expected = model.generate(PROMPT, raw=True, max_tokens=12).wait()

    async def main() -> None:
        generation = model.generate(PROMPT, raw=True, max_tokens=12)
        pieces = [piece async for piece in generation]
        assert "".join(piece.text for piece in pieces) == generation.result.text == expected.text
        result = await model.generate(PROMPT, raw=True, max_tokens=12)
        assert (result.token_ids, result.finish_reason) == (expected.token_ids, "length")

    asyncio.run(main())


def test_many_answers_awaited_together_are_those_of_each_alone(model: Model) -> None:
    prompts = [PROMPT, "and", "the other", "in the end"]
    expected = [model.generate(prompt, max_tokens=8).wait().token_ids for prompt in prompts]

    async def main() -> None:
        results = await asyncio.gather(*(model.generate(prompt, max_tokens=8) for prompt in prompts))
        assert [result.token_ids for result in results] == expected

        async def read(prompt: str) -> tuple[int, ...]:
            return tuple([token async for piece in model.generate(prompt, max_tokens=8) for token in piece.token_ids])

        assert await asyncio.gather(*map(read, prompts)) == expected

    asyncio.run(main())


def test_task_that_runs_out_of_time_keeps_what_was_computed(model: Model) -> None:
    async def main() -> None:
        generation = model.generate(PROMPT, raw=True, max_tokens=100)
        read = 0

        async def reader() -> None:
            nonlocal read
            async for piece in generation:
                read += len(piece.token_ids)
                if read > 2:
                    asyncio.get_running_loop().call_soon(task.cancel)

        task = asyncio.ensure_future(reader())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert generation.result.finish_reason == "cancelled"
        assert 2 < len(generation.token_ids) < 100
        again = await model.generate_ids([*model.tokenize(PROMPT), *generation.token_ids[:2], 7], max_tokens=1)
        assert again.usage.cached_tokens >= len(model.tokenize(PROMPT))

    asyncio.run(main())
