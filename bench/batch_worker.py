"""One engine in one process, for what `batch.py` measures: many requests at once, driven by JSON lines.

    python bench/batch_worker.py [--path FOLDER] headrace | llama.cpp | llama.cpp-no-fa | build | build-no-fa

A request names a method of the engine and its arguments; the answer is what it returns. `--path` is looked into first for
packages, so that llama.cpp can be another build of xllamacpp than the installed one. Prompts are random tokens, named by the
number of the first of them: no two requests of a run have the same ones unless they name the same number.

Does not know: what is compared with what, how often, and what the figures are for.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from workers import llama_params, prompt, serve

MEMORY_BYTES = 2_000_000_000
"""For pages of the past of all requests at once: 64 of some 600 tokens and what the sections before left."""
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
OPS = ("load", "know", "decode", "burst", "probe")


class Engine(Protocol):
    """What a worker can do with an engine. Speeds are tokens per second of all streams together."""

    def load(self, path: str, threads: int, slots: int, context: int) -> dict[str, Any]:
        """Loads a model for `slots` requests at once, of `context` tokens each."""

    def know(self, first: int, count: int, shared: int, own: int) -> dict[str, Any]:
        """Computes `prompts` and keeps them, so that `decode` begins with all streams at once."""

    def decode(self, first: int, count: int, shared: int, own: int, tokens: int, sampled: bool) -> dict[str, Any]:
        """Speed of `count` streams that generate `tokens` tokens each behind a first one, on top of known `prompts`."""

    def burst(self, first: int, count: int, own: int, tokens: int) -> dict[str, Any]:
        """Seconds from submitting `prompts` that nobody knows until the last answer ends."""

    def probe(self, name: str, **arguments: int) -> dict[str, Any]:
        """Measures something inside the engine: see `batch_probes.py`."""


def prompts(first: int, count: int, shared: int, own: int) -> list[list[int]]:
    """`count` prompts that begin with the same `shared` tokens and go on with `own` tokens of their own."""
    head = prompt(shared, first)
    return [head + prompt(own, first + 1 + number) for number in range(count)]


def read_in_turn(answers: Sequence[Any], stop: Callable[[], bool] = lambda: False) -> list[list[float]]:
    """Reads a piece of each answer in turn until all have ended, or `stop` says so; the time of each answer's tokens."""
    times: list[list[float]] = [[] for _ in answers]
    running = dict(enumerate(answers))
    while running and not stop():
        for number in list(running):
            piece = next(running[number], None)
            if piece is None:
                del running[number]
            else:
                times[number] += [time.perf_counter()] * len(piece.token_ids)
    return times


def streams_tok_s(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second from when the last stream has begun until the last one ends: a stream that lags counts against it."""
    start, end = max(each[0] for each in times), max(each[-1] for each in times)
    return sum(at > start for each in times for at in each) / (end - start)


def at_once(calls: Iterable[Callable[[], None]]) -> float:
    """Makes calls in threads of their own; seconds until the last one returns.

    Raises:
        Exception: what the first call that failed has raised.
    """
    errors: list[Exception] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001, raised again below, in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if errors:
        raise errors[0]
    return seconds


class Headrace(Engine):
    """This project, as its users drive it: all requests are submitted, then their pieces are asked for in turn."""

    def __init__(self) -> None:
        self._model: Any = None

    def load(self, path: str, threads: int, slots: int, context: int) -> dict[str, Any]:
        """Loads a model, after closing the one before; any number of requests may come."""
        import headrace

        del slots, context  # pages are shared out as they are needed
        if self._model is not None:
            self._model.close()
        self._model = headrace.load(path, threads=threads, kv_memory=MEMORY_BYTES, kv_disk=0)
        return {
            "version": headrace.__version__,
            "build": f"kernels {self._model.cpu_level}",
            "context_tokens": self._model.context_tokens,
        }

    def _answers(self, texts: Sequence[Sequence[int]], max_tokens: int, sampled: bool = False) -> list[Any]:
        options: list[dict[str, Any]] = [{**SAMPLING, "seed": number} if sampled else {} for number in range(len(texts))]
        return [
            self._model.generate_ids(ids, max_tokens=max_tokens, ignore_end=True, **each)
            for ids, each in zip(texts, options, strict=True)
        ]

    def know(self, first: int, count: int, shared: int, own: int) -> dict[str, Any]:
        """Answers each prompt with one token; a shared beginning is computed with the first one."""
        start = time.perf_counter()
        texts = prompts(first, count, shared, own)
        read_in_turn(self._answers(texts[:1], 1))
        read_in_turn(self._answers(texts[1:], 1))
        return {"seconds": time.perf_counter() - start}

    def decode(self, first: int, count: int, shared: int, own: int, tokens: int, sampled: bool) -> dict[str, Any]:
        """Reads all answers in turn."""
        answers = self._answers(prompts(first, count, shared, own), tokens + 1, sampled)
        times = read_in_turn(answers)
        assert all(len(each) == tokens + 1 for each in times), f"answers have {[len(each) for each in times]} tokens"
        computed = max(answer.result.reuse.computed_tokens for answer in answers)
        return {"tok_s": streams_tok_s(times), "computed_tokens": computed}

    def burst(self, first: int, count: int, own: int, tokens: int) -> dict[str, Any]:
        """Submits all, then reads all answers in turn."""
        texts = prompts(first, count, 0, own)
        start = time.perf_counter()
        read_in_turn(self._answers(texts, tokens))
        return {"seconds": time.perf_counter() - start}

    def probe(self, name: str, **arguments: int) -> dict[str, Any]:
        """Runs one of the probes."""
        import batch_probes

        return batch_probes.PROBES[name](self._model, **arguments)


class LlamaCpp(Engine):
    """llama.cpp as a build of xllamacpp has it, with a slot for each stream; one thread of ours waits for each answer."""

    def __init__(self, flash_attention: str = "AUTO") -> None:
        self._flash_attention = flash_attention
        self._server: Any = None

    def load(self, path: str, threads: int, slots: int, context: int) -> dict[str, Any]:
        """Starts a server, after ending the one before."""
        import importlib.metadata

        import xllamacpp

        self._server = None
        params = llama_params(path, threads, slots * context, self._flash_attention)
        params.n_parallel = slots
        self._server = xllamacpp.Server(params)
        build = " ".join(part for part in xllamacpp.get_system_info().split(" | ") if part.endswith("= 1"))
        return {"version": importlib.metadata.version("xllamacpp"), "build": build.replace(" = 1", "").replace("CPU : ", "")}

    def _ask(self, texts: Sequence[Sequence[int]], num_tokens: int, *, sampled: bool, known: bool) -> tuple[float, list[Any]]:
        """Answers prompts at once, each in a slot of its own; seconds until the last one ends, and the server's timings."""
        timings: list[Any] = [None] * len(texts)

        def answer(number: int) -> None:
            samplers = {**SAMPLING, "samplers": ["top_p", "temperature"], "seed": number + 1}
            request = {
                "prompt": list(texts[number]),
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "cache_prompt": known,
                "id_slot": number,
                **(samplers if sampled else {"temperature": 0, "samplers": ["temperature"]}),
            }
            reply = self._server.handle_completions(request)
            if "timings" not in reply:
                raise RuntimeError(f"llama.cpp answers {reply}")
            timings[number] = reply["timings"]

        seconds = at_once([lambda number=number: answer(number) for number in range(len(texts))])  # type: ignore[misc]
        return seconds, timings

    def know(self, first: int, count: int, shared: int, own: int) -> dict[str, Any]:
        """Answers each prompt with one token; its slot keeps it."""
        return {"seconds": self._ask(prompts(first, count, shared, own), 1, sampled=False, known=True)[0]}

    def decode(self, first: int, count: int, shared: int, own: int, tokens: int, sampled: bool) -> dict[str, Any]:
        """Adds up the speeds that the server says its slots had, which leaves out whatever is not decoding."""
        _, timings = self._ask(prompts(first, count, shared, own), tokens + 1, sampled=sampled, known=True)
        # The first token belongs to the prompt's time: llama.cpp counts one token less than it predicts.
        speed = sum(each["predicted_per_second"] for each in timings)
        return {"tok_s": speed, "computed_tokens": max(each["prompt_n"] for each in timings)}

    def burst(self, first: int, count: int, own: int, tokens: int) -> dict[str, Any]:
        """Asks for all at once."""
        return {"seconds": self._ask(prompts(first, count, 0, own), tokens, sampled=False, known=False)[0]}

    def probe(self, name: str, **arguments: int) -> dict[str, Any]:
        """There are none.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"no probe {name} {arguments} in llama.cpp")


ENGINES: dict[str, Callable[[], Engine]] = {
    "headrace": Headrace,
    "llama.cpp": LlamaCpp,
    "llama.cpp-no-fa": lambda: LlamaCpp("DISABLED"),
    "build": LlamaCpp,
    "build-no-fa": lambda: LlamaCpp("DISABLED"),
}


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Does what one request asks for."""
    op = request.pop("op")
    if op not in OPS:
        raise ValueError(f"unknown request {op!r}")
    done: dict[str, Any] = getattr(engine, op)(**request)
    return done


if __name__ == "__main__":
    if "--path" in sys.argv:
        sys.path.insert(0, sys.argv[sys.argv.index("--path") + 1])
    serve(ENGINES[sys.argv[-1]](), answer)
