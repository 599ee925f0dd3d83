from __future__ import annotations

import pytest

from headrace.cli.report import Speeds, closing_line, miss_lines, result_document
from headrace.engine.results import GenerationResult, LedgerTotals, MissReport, Reuse, Timings, Usage

NO_REUSE = Reuse()


def _result(usage: Usage, timings: Timings, decode_bytes: int, reuse: Reuse = NO_REUSE) -> GenerationResult:
    ledgers = (LedgerTotals(), LedgerTotals(weight_bytes=decode_bytes))
    return GenerationResult("", (), "stop", usage, timings, *ledgers, reuse=reuse)


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


@pytest.mark.parametrize(
    ("reuse", "said"),
    [
        (Reuse(memory_tokens=2000), " (2,000 known)"),
        (Reuse(memory_tokens=1960, disk_tokens=40, load_s=0.003), " (2,000 known, 40 from disk in 3 ms)"),
        (Reuse(memory_tokens=2000, saved_s=0.009), " (2,000 known)"),
        (Reuse(memory_tokens=2000, saved_s=0.421), " (2,000 known, 0.42 s saved)"),
        (Reuse(disk_tokens=2000, load_s=0.5, saved_s=12.34), " (2,000 known, 2,000 from disk in 500 ms, 12.3 s saved)"),
    ],
)
def test_closing_line_says_where_the_past_came_from_and_what_that_saved(reuse: Reuse, said: str) -> None:
    result = _result(Usage(2024, 2000, 1), Timings(), 0, reuse)
    assert closing_line(result, Speeds.of(result, float)) == f"prompt 2,024 tokens{said}, generated 1 token"


def test_closing_line_says_what_was_read_from_disk_while_decoding() -> None:
    result = _result(Usage(10, 0, 1), Timings(), 0, Reuse(streamed_bytes=12_000_000, streamed_s=0.03))
    assert closing_line(result, Speeds.of(result, float)) == (
        "prompt 10 tokens, generated 1 token, 12 MB of the past read from disk in 30 ms"
    )


def test_every_miss_is_one_line_with_its_reason() -> None:
    misses = (MissReport("diverged", 20, 35, "'12:01'\nwhere '12:00' was"), MissReport("first_seen", 1055, 1, ""))
    assert miss_lines(Reuse(misses=misses)) == [
        "computed 35 tokens from token 20 on: diverged, '12:01' where '12:00' was",
        "computed 1 token from token 1,055 on: first seen",
    ]
    assert miss_lines(Reuse()) == []


def test_document_holds_all_of_the_reuse() -> None:
    misses = (MissReport("evicted", 0, 32, "from disk at 12:00"),)
    result = _result(Usage(40, 8, 1), Timings(), 0, Reuse(3, 5, 32, 0.1, 0.2, misses, 7, 0.3))
    assert result_document(result, Speeds.of(result, float))["reuse"] == {
        "memory_tokens": 3,
        "compressed_tokens": 0,
        "disk_tokens": 5,
        "computed_tokens": 32,
        "load_s": 0.1,
        "saved_s": 0.2,
        "misses": ({"reason": "evicted", "at_token": 0, "num_tokens": 32, "detail": "from disk at 12:00"},),
        "streamed_bytes": 7,
        "streamed_s": 0.3,
    }
