from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from headrace.engine.bench import run_bench
from headrace.engine.results import LedgerTotals
from headrace.errors import ContextOverflowError, OptionError


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Sequence1:
    """Each step takes a second and a tenth of a second a token; the first step of all takes five seconds more."""

    def __init__(self, model: Model) -> None:
        self.ledger = LedgerTotals()
        self.model = model
        self.num_tokens = 0

    def append(self, token_ids: Sequence[int]) -> np.ndarray:
        self.model.clock.now_s += 1 + 0.1 * len(token_ids) + (0 if self.model.steps else 5)
        self.model.steps.append((self.num_tokens, len(token_ids)))
        self.num_tokens += len(token_ids)
        self.ledger += LedgerTotals(1, 0, 1000, self.num_tokens, len(token_ids), 7)
        return np.zeros(self.model.vocab_size, np.float32)

    def run_ahead(self, token_id: int, steps: int) -> list[int]:
        for _ in range(steps):
            self.append([token_id])
        return [token_id] * steps

    def truncate(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def close(self) -> None:
        self.model.closed += 1


class Model:
    name = "m"
    threads = 1
    context_tokens = 100
    vocab_size = 10
    load_s = 2.0

    def __init__(self) -> None:
        self.clock = Clock()
        self.steps: list[tuple[int, int]] = []
        self.closed = 0

    def sequence(self) -> Sequence1:
        return Sequence1(self)

    def read_bandwidth(self) -> float:
        return 2e9


def test_bench_takes_the_steps_it_says() -> None:
    model = Model()
    runs: list[tuple[str, int]] = []
    run_bench(
        model,
        prompt_tokens=10,
        gen_tokens=2,
        depth_tokens=20,
        repeat=2,
        clock=model.clock,
        on_run=lambda kind, run: runs.append((kind, run)),
    )
    assert model.steps == [(0, 20), *[(20, 10)] * 3, *[(20, 1), (21, 1)] * 3]
    assert runs == [("prefill", 0), ("prefill", 1), ("prefill", 2), ("decode", 0), ("decode", 1), ("decode", 2)]
    assert model.closed == 1


def test_bench_result_holds_rates_bytes_and_the_first_token() -> None:
    model = Model()
    result = run_bench(model, prompt_tokens=10, gen_tokens=4, repeat=3, clock=model.clock)
    assert result.prefill_tok_s_runs == pytest.approx((5.0,) * 3)
    assert result.prefill_tok_s == pytest.approx(5.0)
    assert result.decode_tok_s == pytest.approx(1 / 1.1)
    assert result.first_token_s == pytest.approx(2 + 7)
    assert result.bytes_per_token == {"weight": 1000, "kv_read": 2.5, "kv_write": 1, "activation": 7, "total": 1010.5}
    assert result.gb_s == pytest.approx(1010.5 / 1.1 / 1e9)
    assert result.bandwidth_fraction == pytest.approx(1010.5 / 1.1 / 2e9)
    assert result.read_bandwidth_gb_s == 2.0


def test_bench_gives_pages_back_when_a_step_fails() -> None:
    model = Model()

    def fail() -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_bench(model, prompt_tokens=1, gen_tokens=1, repeat=1, clock=fail)
    assert model.closed == 1


def test_bench_checks_the_room_before_the_first_step() -> None:
    model = Model()
    with pytest.raises(ContextOverflowError, match="need 101 tokens of context and m has 100"):
        run_bench(model, prompt_tokens=91, gen_tokens=1, depth_tokens=10)
    assert model.steps == []


def test_bench_of_nothing_is_an_error() -> None:
    with pytest.raises(OptionError, match="nothing to measure"):
        run_bench(Model(), prompt_tokens=0, gen_tokens=0)
