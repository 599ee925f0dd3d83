"""Answers under asyncio: pieces are waited for on a thread, so that the event loop goes on meanwhile.

Each event loop has one thread of its own, which takes every step that its tasks ask for, one after the other: two tasks never
compute at the same time. A task that is cancelled while it waits cancels its answer, and is told of it when the step that was
running is over and what was computed is kept; so a model may be closed as soon as its tasks have ended.

Works on anything that is iterated for pieces and can be cancelled. Knows no model.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

T = TypeVar("T")
P_co = TypeVar("P_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)

_END: Final = object()
_threads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadPoolExecutor] = weakref.WeakKeyDictionary()
_lock: Final = threading.Lock()


class Pieces(Protocol[P_co]):
    """What can be iterated under asyncio."""

    def __next__(self) -> P_co:
        """The next piece; takes as long as computing it does."""

    def cancel(self) -> None:
        """Ends it after the step that is running; called from the event loop's thread, so it must return at once."""

    def close(self) -> None:
        """Ends it now, and keeps what was computed."""


class Answer(Pieces[P_co], Protocol[P_co, R_co]):
    """What can be awaited."""

    def wait(self) -> R_co:
        """Runs to the end; the result."""


async def next_piece(pieces: Pieces[P_co]) -> P_co:
    """What `__anext__` gives.

    Raises:
        StopAsyncIteration: there are no more.
        asyncio.CancelledError: the task was cancelled; so is the answer, and nothing of it runs any more.
    """
    found = await _on_thread(lambda: next(pieces, _END), pieces)  # StopIteration cannot pass through a future
    if found is _END:
        raise StopAsyncIteration
    return found  # type: ignore[return-value] # what is not the end is a piece


async def result_of(answer: Answer[P_co, R_co]) -> R_co:
    """What `await` gives: the result, when the answer has come to its end.

    Raises:
        asyncio.CancelledError: the task was cancelled; so is the answer, and nothing of it runs any more.
    """
    return await _on_thread(answer.wait, answer)


async def _on_thread(compute: Callable[[], T], pieces: Pieces[P_co]) -> T:
    loop = asyncio.get_running_loop()
    thread = _thread_of(loop)
    try:
        return await loop.run_in_executor(thread, compute)
    except asyncio.CancelledError:
        pieces.cancel()
        await loop.run_in_executor(thread, pieces.close)  # behind the step that is running, since there is one thread
        raise


def _thread_of(loop: asyncio.AbstractEventLoop) -> ThreadPoolExecutor:
    with _lock:
        if loop not in _threads:
            _threads[loop] = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-asyncio")
        return _threads[loop]
