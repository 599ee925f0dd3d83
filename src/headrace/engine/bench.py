"""Speed of a model on this machine, measured as llama-bench does: prefill and decode of random tokens at a given depth.

Before anything is timed, `depth` tokens are put into the sequence. One prefill run appends `prompt` tokens in one call, one
decode run generates `gen` tokens greedily, as an answer does; after each run the sequence is cut back to `depth`. Prompts are
random (seeded): speed does not depend on what they say. The first run of each kind is a warm-up and is not counted, except
that its prefill is what a process that starts now waits for (`first_token_s`).

Does not know: the command line, and how the bandwidth is measured. The clock is injected.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.engine.ahead import MAX_STEPS
from headrace.engine.machine import resident_bytes
from headrace.errors import ContextOverflowError, OptionError
from headrace.model.step import LedgerTotals

_SEED = 20_240_229


class BenchSequence(Protocol):
    """A sequence of tokens whose keys and values are kept: what a benchmark needs of it."""

    @property
    def ledger(self) -> LedgerTotals:
        """Sums over all steps that this sequence has taken so far."""

    def append(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Computes `token_ids` on top of what is there; logits of the last one, float32[V]."""

    def run_ahead(self, token_id: int, steps: int) -> list[int]:
        """Computes a token and those that greedy decoding puts behind it; the most likely token after each."""

    def truncate(self, num_tokens: int) -> None:
        """Forgets all tokens but the first `num_tokens`."""

    def close(self) -> None:
        """Gives its pages back."""


class BenchModel(Protocol):
    """A loaded model: what a benchmark needs of it."""

    @property
    def name(self) -> str:
        """Name for people."""

    @property
    def threads(self) -> int:
        """Threads of the worker team."""

    @property
    def context_tokens(self) -> int:
        """Most tokens a sequence can hold."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def load_s(self) -> float:
        """Seconds that loading took."""

    def sequence(self) -> BenchSequence:
        """A new, empty sequence."""

    def read_bandwidth(self) -> float:
        """Bytes per second that the worker team reads from memory, measured now."""


@dataclass(frozen=True)
class BenchResult:
    """Medians, and every run. None where nothing was asked for (`prompt_tokens` or `gen_tokens` is 0).

    `bytes_per_token` and `gb_s` are those of decoding; GB is 10^9 bytes, MB is 10^6.
    """

    model: str
    threads: int
    prompt_tokens: int
    gen_tokens: int
    depth_tokens: int
    prefill_tok_s: float | None
    prefill_tok_s_runs: tuple[float, ...]
    decode_tok_s: float | None
    decode_tok_s_runs: tuple[float, ...]
    bytes_per_token: dict[str, float] | None
    gb_s: float | None
    read_bandwidth_gb_s: float
    bandwidth_fraction: float | None
    rss_mb: float | None
    load_s: float
    first_token_s: float | None


def run_bench(
    model: BenchModel,
    *,
    prompt_tokens: int = 512,
    gen_tokens: int = 128,
    depth_tokens: int = 0,
    repeat: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    on_run: Callable[[str, int], None] | None = None,
) -> BenchResult:
    """Measures prefill and decode, `repeat` times each after one warm-up.

    `on_run` is told the kind of run ("prefill" or "decode") and its number before each run, warm-up 0 included.

    Raises:
        OptionError: a count is negative, both are 0, or `repeat` is below 1.
        ContextOverflowError: depth and run do not fit into the model's context.
    """
    check_counts(prompt_tokens, gen_tokens, depth_tokens, repeat)
    _check_room(model, depth_tokens + max(prompt_tokens, gen_tokens))
    tokens = _random_tokens(model.vocab_size, max(prompt_tokens, gen_tokens, depth_tokens))
    notify = on_run or (lambda kind, run: None)
    sequence = model.sequence()
    try:
        if depth_tokens:
            sequence.append(tokens[:depth_tokens])

        def timed(kind: str, run_once: Callable[[], None]) -> list[float]:
            seconds = []
            for run in range(repeat + 1):
                notify(kind, run)
                start = clock()
                run_once()
                seconds.append(clock() - start)
                sequence.truncate(depth_tokens)
            return seconds

        prefill_s = timed("prefill", lambda: _prefill(sequence, tokens[:prompt_tokens])) if prompt_tokens else []
        before = sequence.ledger
        decode_s = timed("decode", lambda: _decode(sequence, tokens[0], gen_tokens)) if gen_tokens else []
        per_token = _per_token(before, sequence.ledger, gen_tokens * (repeat + 1))
    finally:
        sequence.close()
    return _result(model, (prompt_tokens, gen_tokens, depth_tokens), prefill_s, decode_s, per_token)


def _prefill(sequence: BenchSequence, tokens: Sequence[int]) -> None:
    sequence.append(tokens)


def _decode(sequence: BenchSequence, token: int, count: int) -> None:
    """Generates `count` tokens, in runs of steps as long as an answer would take them."""
    while count:
        steps = 1 << (min(count, MAX_STEPS).bit_length() - 1)
        token = sequence.run_ahead(token, steps)[-1]
        count -= steps


def _result(
    model: BenchModel,
    counts: tuple[int, int, int],
    prefill_s: list[float],
    decode_s: list[float],
    per_token: dict[str, float] | None,
) -> BenchResult:
    prompt_tokens, gen_tokens, depth_tokens = counts
    prefill = tuple(prompt_tokens / seconds for seconds in prefill_s[1:])
    decode = tuple(gen_tokens / seconds for seconds in decode_s[1:])
    bandwidth = model.read_bandwidth()
    bytes_per_s = statistics.median(decode) * per_token["total"] if per_token else None
    rss = resident_bytes()
    return BenchResult(
        model=model.name,
        threads=model.threads,
        prompt_tokens=prompt_tokens,
        gen_tokens=gen_tokens,
        depth_tokens=depth_tokens,
        prefill_tok_s=statistics.median(prefill) if prefill else None,
        prefill_tok_s_runs=prefill,
        decode_tok_s=statistics.median(decode) if decode else None,
        decode_tok_s_runs=decode,
        bytes_per_token=per_token,
        gb_s=None if bytes_per_s is None else bytes_per_s / 1e9,
        read_bandwidth_gb_s=bandwidth / 1e9,
        bandwidth_fraction=None if bytes_per_s is None else bytes_per_s / bandwidth,
        rss_mb=None if rss is None else rss / 1e6,
        load_s=model.load_s,
        first_token_s=model.load_s + prefill_s[0] if prefill_s else None,
    )


def _per_token(before: LedgerTotals, after: LedgerTotals, num_tokens: int) -> dict[str, float] | None:
    """Bytes of each class that one decoded token moves, on average, and their total."""
    if not num_tokens:
        return None
    classes = [field.name for field in fields(LedgerTotals) if field.name.endswith("_bytes")]
    moved = {name.removesuffix("_bytes"): (getattr(after, name) - getattr(before, name)) / num_tokens for name in classes}
    return {**moved, "total": sum(moved.values())}


def _random_tokens(vocab_size: int, count: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(_SEED).integers(0, vocab_size, count).tolist()
    return drawn


def check_counts(prompt_tokens: int, gen_tokens: int, depth_tokens: int, repeat: int) -> None:
    """What can be said of the counts before a model is loaded.

    Raises:
        OptionError: a count is too small, or nothing is left to measure.
    """
    zero = {"prompt_tokens": prompt_tokens, "gen_tokens": gen_tokens, "depth_tokens": depth_tokens}
    least = {**{name: (value, 0) for name, value in zero.items()}, "repeat": (repeat, 1)}
    for name, (value, lowest) in least.items():
        if value < lowest:
            raise OptionError(f"{name}={value} is too small: use {lowest} or more", arguments=(name,))
    if not prompt_tokens and not gen_tokens:
        raise OptionError(
            "prompt_tokens=0 and gen_tokens=0 leave nothing to measure: set one of them",
            arguments=("prompt_tokens", "gen_tokens"),
        )


def _check_room(model: BenchModel, needed_tokens: int) -> None:
    if needed_tokens > model.context_tokens:
        raise ContextOverflowError(
            f"the runs need {needed_tokens} tokens of context and {model.name} has {model.context_tokens}: "
            "lower depth_tokens, prompt_tokens or gen_tokens",
            arguments=("depth_tokens", "prompt_tokens", "gen_tokens"),
        )
