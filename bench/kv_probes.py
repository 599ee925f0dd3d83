"""What is measured inside the engine's process: decoding beside moves, the memory's own time, forks, page formats.

Each probe takes a loaded model and gives plain figures, one per round. Each asks the engine as its own callers do; only
`moves` reaches one level lower, as nobody else has a reason to write or read the same past twice.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from workers import prompt

MOST_WINDOW_TOKENS = 1024
FIRST_WINDOW_TOKENS = 256


def moves(model: Any, past_tokens: int, live_tokens: int, rounds: int) -> dict[str, Any]:
    """Decoding of one answer, in tokens per second, while another past of `past_tokens` is written, and read back.

    A window lasts as long as the move does; before and behind it stands one without a move, and the two are averaged. The
    past is computed once: its pages get other tokens in each round, so that they are a new past to write.
    """
    other, live = model.sequence(), model.sequence()
    other.append(prompt(past_tokens, 1))
    beside = functools.partial(_decode, model, live, prompt(live_tokens, 2))
    _, made = beside(lambda: False, FIRST_WINDOW_TOKENS)  # warm-up
    speeds: dict[str, list[float]] = {"write": [], "write_undisturbed": [], "read": [], "read_undisturbed": []}
    window_tokens: dict[str, list[int]] = {"write": [], "read": []}
    for number in range(rounds):
        moved = _Moved(model.cache, prompt(past_tokens, 1_000 + number), other.pages)
        for name, begin, is_done in (("write", moved.write, moved.is_written), ("read", moved.read, moved.is_read)):
            before, _ = beside(lambda: False, made)
            begin()
            speed, made = beside(is_done, MOST_WINDOW_TOKENS)
            model.cache.flush()
            behind, _ = beside(lambda: False, made)
            speeds[name].append(speed)
            speeds[f"{name}_undisturbed"].append((before + behind) / 2)
            window_tokens[name].append(made)
    past_bytes = len(other.pages) * model.page_bytes()
    other.close()
    live.close()
    return {**speeds, "window_tokens": window_tokens, "past_bytes": past_bytes}


class _Moved:
    """A past that goes to disk and comes back."""

    def __init__(self, cache: Any, tokens: list[int], pages: list[int]) -> None:
        self._cache, self._tokens, self._pages = cache, tokens, pages
        self._last: Any = None

    def write(self) -> None:
        """Queues all of it to be written."""
        self._last = self._cache.commit(self._tokens, self._pages, num_answer_tokens=0, needed=True)

    def is_written(self) -> bool:
        """Whether nothing is left to write."""
        return self._cache.disk.mover.pending_writes == 0

    def read(self) -> None:
        """Takes it out of memory, and asks for it as a session that expects a turn does."""
        from headrace.kv.residency import DEFAULT_STANDING

        path = self._last.path()
        assert all(node.page.place is not None for node in path), "all of it was written"
        self._cache.demote_path(path, 0)
        assert self._last.page.handle is None, "none of it is in memory"
        self._cache.expect(self._tokens, 0.0, DEFAULT_STANDING)

    def is_read(self) -> bool:
        """Whether all of it is in memory again."""
        self._cache.settle()
        return self._last.page.handle is not None


def _decode(model: Any, live: Any, ids: list[int], is_done: Callable[[], bool], most: int) -> tuple[float, int]:
    """Tokens per second of an answer that goes on until something is done, and how many there were."""
    generation = model.generate_ids(ids, sequence=live, max_tokens=most + 1, ignore_end=True)
    for _piece in generation:
        if is_done():
            generation.cancel()
    made = len(generation.token_ids) - 1  # the first belongs to the prompt
    return made / generation.result.timings.decode_s, made


class Stopwatch:
    """Time inside of wrapped calls; a call inside of another counts there only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed under a name."""

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return function(*arguments, **options)
            self._inside = True
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
                self._inside = False

        return timed

    @contextmanager
    def on(self, *targets: tuple[Any, str]) -> Iterator[None]:
        """Times functions, named by their owner and their name there, while the block runs."""
        with ExitStack() as stack:
            for owner, name in targets:
                stack.enter_context(mock.patch.object(owner, name, self.wrap(name, getattr(owner, name))))
            yield


def overhead(model: Any, past_tokens: int, new_tokens: int, answer_tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of all that the memory does in an answer on top of a known past, and of the answer's decoding.

    That is to find the past and begin with it, to take and give back pages, and to make the answer known and queue it for the
    disk: everything that happens on the thread that decodes. What the mover does beside it is measured by `moves`.
    """
    from headrace.engine import generation
    from headrace.engine.sequence import Sequence

    targets = ((generation, "recall"), *((Sequence, name) for name in ("_reserve", "truncate", "commit", "close")))
    past = prompt(past_tokens, 3)
    model.generate_ids(past, max_tokens=1, ignore_end=True).text()
    overheads: list[float] = []
    decodes: list[float] = []
    by_call: list[dict[str, float]] = []
    for number in range(rounds + 1):
        watch = Stopwatch()
        with watch.on(*targets):
            answer = model.generate_ids(
                past + prompt(new_tokens, 2_000 + number), max_tokens=answer_tokens + 1, ignore_end=True
            )
            answer.text()
        model.cache.flush()
        result = answer.result
        assert result.reuse.memory_tokens == past_tokens, f"the past is known: {result.reuse}"
        if number:  # the first is a warm-up
            overheads.append(sum(watch.seconds.values()))
            decodes.append(result.timings.decode_s)
            by_call.append(watch.seconds)
    return {"overhead_s": overheads, "decode_s": decodes, "by_call_s": by_call}


def forks(model: Any, past_tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds to fork a session, with a name and without, and the bytes of pages that this takes."""
    from headrace.engine.kv_bench import default_text

    text = model.detokenize(model.tokenize(default_text()[: 16 * past_tokens])[:past_tokens])
    session = model.session("original")
    session.send(text, max_tokens=1).text()
    before_bytes = model.cache.pool.owned_bytes
    named_s: list[float] = []
    unnamed_s: list[float] = []
    copies = []
    for number in range(rounds + 1):
        for name, seconds in ((f"fork {number}", named_s), (None, unnamed_s)):
            start = time.perf_counter()
            copies.append(session.fork(name))
            seconds.append(time.perf_counter() - start)
    copied_bytes = model.cache.pool.owned_bytes - before_bytes
    answer = copies[-1].send("Go on.", max_tokens=1)
    answer.text()
    for copy in copies:
        copy.close(keep=False)
    num_tokens = len(session.token_ids)
    session.close(keep=False)
    return {
        "named_s": named_s[1:],  # the first is a warm-up
        "unnamed_s": unnamed_s[1:],
        "copied_bytes": copied_bytes,
        "num_tokens": num_tokens,
        "reused_tokens": answer.result.usage.cached_tokens,
    }


def formats(model: Any, num_tokens: int) -> dict[str, Any]:
    """Perplexity and bytes per token by page format; none where pages cannot be compressed yet."""
    from headrace.engine.kv_bench import run_kv_bench
    from headrace.kernels.narrow import NARROW_KERNELS

    if not NARROW_KERNELS:
        return {"formats": []}
    result = run_kv_bench(model, num_tokens=num_tokens)
    return {
        "num_tokens": result.num_tokens,
        "formats": [
            {
                "name": each.page_format,
                "perplexity": each.perplexity,
                "change": each.change,
                "bytes_per_token": each.bytes_per_token,
                "fit_ratio": each.fit_ratio,
            }
            for each in result.formats
        ],
    }


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "moves": moves,
    "overhead": overhead,
    "forks": forks,
    "formats": formats,
}
