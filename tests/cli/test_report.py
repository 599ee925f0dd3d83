from __future__ import annotations

from headrace.cli.report import Speeds, closing_line
from headrace.engine.results import GenerationResult, LedgerTotals, Timings, Usage


def _result(usage: Usage, timings: Timings, decode_bytes: int) -> GenerationResult:
    return GenerationResult("", (), "stop", usage, timings, LedgerTotals(), LedgerTotals(weight_bytes=decode_bytes))


def test_speeds_count_uncached_prompt_tokens_and_tokens_after_the_first() -> None:
    result = _result(Usage(100, 40, 11), Timings(prefill_s=0.5, decode_s=2.0), 4_000_000_000)
    assert Speeds.of(result, lambda: 8e9) == Speeds(120.0, 5.0, 2.0, 8.0, 0.25)


def test_speeds_of_what_was_not_measured_are_none() -> None:
    result = _result(Usage(10, 10, 1), Timings(), 0)
    speeds = Speeds.of(result, lambda: 8e9)
    assert speeds == Speeds(None, None, None, None, None)
    assert closing_line(result, speeds) == "prompt 10 tokens (10 known), generated 1 token"


def test_closing_line_shows_slow_speeds_with_digits() -> None:
    result = _result(Usage(3000, 0, 2), Timings(prefill_s=100, decode_s=0.8), 10**9)
    assert closing_line(result, Speeds.of(result, lambda: 5e9)) == (
        "prompt 3,000 tokens at 30 tok/s, generated 2 tokens at 1.25 tok/s, 1.25 GB/s, 25 % of the machine's read bandwidth"
    )
