"""What is measured inside Headrace with many requests: the machine's limits, gaps between tokens, waiting, and overhead.

Each probe gets a loaded model and gives back a document. An engine with a loop serves several threads; where there is none
yet, requests are read one after the other, which is what its users would have to do.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from batch_worker import prompts, read_in_turn, streams_tok_s
from kv_probes import Stopwatch
from workers import prompt

UNDISTURBED_TOKENS = 32
"""What each stream generates before it is disturbed."""
STREAM_TOKENS_MAX = 1500
"""More than a stream generates while a long prompt is computed, were it not disturbed at all."""
PRODUCT_ROUNDS = 5
PRODUCT_TOKENS = 256
HEAD_START_S = 0.2
"""How long the waiting prompts have been computed when the short one comes: some chunks."""
TURNS = 400


def serves_threads() -> bool:
    """Whether several threads may ask one model at once: since there is a loop that owns all requests."""
    return importlib.util.find_spec("headrace.engine.loop") is not None


def limits(model: Any, counts: Sequence[int], depth: int) -> dict[str, Any]:
    """This machine's limits, and what a step of each of `counts` streams on top of `depth` tokens moves and computes.

    `bytes_per_s` is what the team reads from memory. `macs_per_s` is what the matrix products of a step of 256 tokens reach,
    by their stamps, all other operations left out; the best of some runs, as a limit is what is there when nobody disturbs.
    """
    from headrace.model.graph import Product
    from headrace.model.step import SequenceStep

    names = {op.name for op in model.graph if isinstance(op, Product)}
    speeds = []
    for number in range(PRODUCT_ROUNDS):
        sequence = model.sequence()
        account = model._account("products")
        sequence.accounts.append(account)
        sequence.append(prompt(PRODUCT_TOKENS, 9_000 + number))
        # The products of the last rows have as many as there are outputs, one here: those are no products of many rows.
        rows = [row for row in account.operations() if row.operation.split(" ")[0] in names]
        widest = [row for row in rows if row.macs >= max(each.macs for each in rows) // 100]
        speeds.append(sum(row.macs for row in widest) / sum(row.time_s for row in widest))
        sequence.close()
    steps = []
    for count in counts:
        totals = model.step_ledger.totals([SequenceStep(1, depth)] * count)
        steps.append({"streams": count, "bytes": totals.total_bytes, "macs": totals.macs})
    return {"bytes_per_s": model.read_bandwidth(), "macs_per_s": max(speeds), "steps": steps}


def first_token(model: Any, number: int, tokens: int) -> dict[str, Any]:
    """Seconds from submitting a prompt to its first token, with nothing beside it."""
    return {"first_token_s": _first_token_s(model, prompt(tokens, number))}


def beside(model: Any, first: int, streams: int, own: int, tokens: int) -> dict[str, Any]:
    """A prompt of `tokens` tokens comes while `streams` streams run: its first token, and the gaps between theirs.

    `undisturbed_s` is their time per token before it came, `gaps_s` are all gaps of all streams that end while it is computed.
    """
    running = [
        model.generate_ids(ids, max_tokens=STREAM_TOKENS_MAX, ignore_end=True) for ids in prompts(first + 1, streams, 0, own)
    ]
    times = _read_to(running, UNDISTURBED_TOKENS)
    undisturbed_s = streams / streams_tok_s(times)
    done = threading.Event()
    took: list[float] = []
    arrived = time.perf_counter()

    def ask() -> None:
        try:
            took.append(_first_token_s(model, prompt(tokens, first)))
        finally:
            done.set()

    if serves_threads():
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        during = read_in_turn(running, done.is_set)
        asking.join()
    else:
        ask()
        during = [[] for _ in running]
    after = _read_to(running, 1)
    for answer in running:
        answer.cancel()
        answer.close()
    if not took:
        raise RuntimeError("the prompt was not answered")
    gaps_s = []
    for before, disturbed, later in zip(times, during, after, strict=True):
        all_times = [*before, *disturbed, *later]
        gaps_s += [b - a for a, b in pairwise(all_times) if b > arrived]
    return {"undisturbed_s": undisturbed_s, "gaps_s": gaps_s, "first_token_s": took[0]}


def queue(model: Any, first: int, waiting: int, waiting_tokens: int, tokens: int) -> dict[str, Any]:
    """First token of a short prompt that comes while long ones wait."""
    long = [model.generate_ids(ids, max_tokens=1, ignore_end=True) for ids in prompts(first + 1, waiting, 0, waiting_tokens)]
    ids = prompt(tokens, first)
    if not serves_threads():
        read_in_turn(long)
        # It was submitted when the others were: it has waited for all of them.
        waited_s = sum(answer.result.timings.prefill_s for answer in long)
        return {"first_token_s": waited_s + _first_token_s(model, ids)}
    reading = threading.Thread(target=read_in_turn, args=(long,), daemon=True)
    reading.start()
    time.sleep(HEAD_START_S)
    seconds = _first_token_s(model, ids)
    for answer in long:
        answer.cancel()
    reading.join()
    return {"first_token_s": seconds}


def outside(model: Any, first: int, streams: int, own: int, tokens: int) -> dict[str, Any]:
    """Share of the time that is spent outside of compiled programs while streams run, reading their pieces included."""
    from headrace.kernels.runtime import Team

    answers = [model.generate_ids(ids, max_tokens=tokens + 8, ignore_end=True) for ids in prompts(first, streams, 0, own)]
    _read_to(answers, 8)
    watch = Stopwatch()
    start = time.perf_counter()
    with watch.on((Team, "run")):
        read_in_turn(answers)
    seconds = time.perf_counter() - start
    return {"share": 1 - watch.seconds["run"] / seconds, "seconds": seconds}


def turn(model: Any, waiting: int, running: int) -> dict[str, Any]:
    """Microseconds per turn of the scheduler alone; nothing where there is none.

    See `batch_turns.py`: the mean of `TURNS` turns, with all that the scheduler is told in them.
    """
    del model
    if importlib.util.find_spec("headrace.engine.scheduler") is None:
        return {"turn_us": None}
    import batch_turns

    return {"turn_us": batch_turns.turn_us(waiting, running, TURNS)}


def _first_token_s(model: Any, ids: Sequence[int]) -> float:
    start = time.perf_counter()
    answer = model.generate_ids(ids, max_tokens=1, ignore_end=True)
    next(answer)
    seconds = time.perf_counter() - start
    answer.text()
    return seconds


def _read_to(answers: Sequence[Any], count: int) -> list[list[float]]:
    """Reads pieces in turn until each answer has given `count` tokens or ended; the time of each answer's tokens."""
    times: list[list[float]] = [[] for _ in answers]
    ended: set[int] = set()
    while any(len(each) < count and number not in ended for number, each in enumerate(times)):
        for number, answer in enumerate(answers):
            piece = next(answer, None)
            if piece is None:
                ended.add(number)
            else:
                times[number] += [time.perf_counter()] * len(piece.token_ids)
    return times


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "limits": limits,
    "first_token": first_token,
    "beside": beside,
    "queue": queue,
    "outside": outside,
    "turn": turn,
}
