"""Prices are learnt from what was done: exactly where it is regular, and unmoved by what happens once."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.kv.journal import FolderJournal
from headrace.kv.prices import FEWEST_TOKENS, OUTLIER_RATIO, PriceBook, read_prices, save_prices
from headrace.model.step import PAGE_TOKENS

BASE_S, SLOPE_S = 2e-4, 5e-8


def _seconds(num_tokens: int, past_tokens: int) -> float:
    return num_tokens * (BASE_S + SLOPE_S * (past_tokens + num_tokens / 2))


def _journal(folder: Path) -> FolderJournal:
    return FolderJournal(folder, folder)


def _prefilled(tokens: int = 4096, chunk: int = 256) -> PriceBook:
    book = PriceBook()
    for past in range(0, tokens, chunk):
        book.computed(chunk, past, _seconds(chunk, past))
    return book


def test_nothing_is_known_before_anything_was_measured() -> None:
    book = PriceBook()
    assert book.compute_s(100, 0) is None
    assert book.read_s(1000) is None
    assert book.write_s(1000) is None


def test_compute_price_recovers_the_line_that_the_chunks_lie_on() -> None:
    book = _prefilled()
    for num_tokens, past in ((32, 0), (256, 1000), (2000, 0), (20, 100_000)):
        assert book.compute_s(num_tokens, past) == pytest.approx(_seconds(num_tokens, past), rel=1e-6)


def test_one_chunk_gives_a_price_that_does_not_grow_with_the_past() -> None:
    book = PriceBook()
    book.computed(256, 0, 0.1)
    assert book.compute_s(256, 0) == pytest.approx(0.1)
    assert book.compute_s(256, 9000) == pytest.approx(0.1)


def test_steps_of_few_tokens_say_nothing_of_a_prefill() -> None:
    book = PriceBook()
    book.computed(FEWEST_TOKENS - 1, 0, 1.0)
    assert book.compute_s(1, 0) is None
    book.computed(FEWEST_TOKENS, 0, 1.0)
    assert book.compute_s(FEWEST_TOKENS, 0) == pytest.approx(1.0)


def test_prices_are_never_negative() -> None:
    book = PriceBook()
    for past, seconds in ((0, 1e-6), (256, 1.0), (512, 4.0), (768, 9.0)):
        book.computed(256, past, seconds)
    price = book.compute_s(256, 0)
    assert price is not None
    assert price >= 0


def test_prices_follow_a_machine_that_became_slower() -> None:
    book = _prefilled()
    for past in range(0, 60_000, 256):
        book.computed(256, past % 4096, 3 * _seconds(256, past % 4096))
    price = book.compute_s(256, 1000)
    assert price == pytest.approx(3 * _seconds(256, 1000), rel=0.02)


def test_one_stalled_write_does_not_decide_for_long() -> None:
    book = PriceBook()
    for _ in range(20):
        book.written(8 << 20, 0.01)
    book.written(8 << 20, 30.0)
    price = book.write_s(8 << 20)
    assert price is not None
    assert price <= 0.01 * (1 + 0.2 * (OUTLIER_RATIO - 1)) * 1.001
    for _ in range(20):
        book.written(8 << 20, 0.01)
    assert book.write_s(8 << 20) == pytest.approx(0.01, rel=0.02)


def test_one_stalled_chunk_does_not_decide_for_long() -> None:
    book = _prefilled()
    book.computed(256, 1000, 60.0)
    price = book.compute_s(256, 1000)
    assert price is not None
    assert price < 2 * _seconds(256, 1000)


def test_reads_and_writes_of_nothing_change_nothing() -> None:
    book = PriceBook()
    book.read(0, 1.0)
    book.written(0, 1.0)
    assert (book.read_s_per_byte, book.write_s_per_byte) == (None, None)
    book.read(1000, 1.0)
    assert book.read_s(2000) == pytest.approx(2.0)


def test_prices_of_pages_are_the_measured_ones() -> None:
    book = _prefilled()
    book.read(10**6, 1e-3)
    prices = book.of_pages(10**5)
    assert prices.fetch_s == (0.0, pytest.approx(1e-4))
    assert prices.compute_s + prices.compute_s_per_past_page * 10 == pytest.approx(
        PAGE_TOKENS * (BASE_S + SLOPE_S * 10 * PAGE_TOKENS), rel=1e-6
    )
    unknown = PriceBook().of_pages(10**5)
    assert unknown.fetch_s[1] == pytest.approx(unknown.compute_s / 10)


def test_next_process_begins_with_the_prices_of_the_last_one(tmp_path: Path) -> None:
    book = _prefilled()
    book.read(10**6, 1e-3)
    book.written(10**6, 2e-3)
    save_prices(_journal(tmp_path), 2, book)
    save_prices(_journal(tmp_path), 4, PriceBook())
    again = PriceBook()
    again.resume(read_prices(_journal(tmp_path), 2))
    assert again.compute_s(32, 1000) == pytest.approx(_seconds(32, 1000), rel=1e-6)
    assert (again.read_s(10**6), again.write_s(10**6)) == (pytest.approx(1e-3), pytest.approx(2e-3))
    # what is measured now weighs as much as all that was measured then
    again.computed(256, 0, 2 * _seconds(256, 0))
    price = again.compute_s(256, 0)
    assert price is not None
    assert 1.3 * _seconds(256, 0) < price < 1.8 * _seconds(256, 0)


@pytest.mark.parametrize("threads", [2, 3])
def test_prices_of_another_number_of_threads_are_not_taken(tmp_path: Path, threads: int) -> None:
    save_prices(_journal(tmp_path), 2, _prefilled())
    again = PriceBook()
    again.resume(read_prices(_journal(tmp_path), threads))
    assert (again.compute_s(32, 0) is not None) == (threads == 2)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        '{"2": 5}',
        '{"2": {"compute": [1, 2], "read": "x", "write": -1}}',
        '{"2": {"compute": [1, 2, 3, 4, null]}}',
        '{"2": {"compute": [0, 0, 0, 0, 0], "read": true, "write": 1e999}}',
        '{"2": {"compute": [-1, 2, 3, 4, 5], "read": NaN}}',
    ],
)
def test_prices_that_are_damaged_are_left_out(tmp_path: Path, content: str) -> None:
    (tmp_path / "prices.json").write_text(content)
    book = PriceBook()
    book.resume(read_prices(_journal(tmp_path), 2))
    assert (book.compute_s(1, 0), book.read_s(1), book.write_s(1)) == (None, None, None)
    save_prices(_journal(tmp_path), 2, _prefilled())
    book.resume(read_prices(_journal(tmp_path), 2))
    assert book.compute_s(1, 0) is not None
