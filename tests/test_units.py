from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (1234, "1.23 KB"),
        (999_499, "999 KB"),
        (999_600, "1000 KB"),
        (98_362_432, "98.4 MB"),
        (2_000_000_000, "2 GB"),
        (3.5e12, "3.5 TB"),
        (-1234, "-1.23 KB"),
    ],
)
def test_format_bytes_keeps_three_digits(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ns"), (5e-9, "5 ns"), (2.5e-5, "25 µs"), (0.00123, "1.23 ms"), (12.34, "12.3 s"), (1.0, "1 s")],
)
def test_format_seconds_chooses_the_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("0", 0),
        ("2GB", 2_000_000_000),
        ("1.5 GiB", 1_610_612_736),
        (" 512 mib ", 536_870_912),
        ("1_000 KB", 1_000_000),
        ("7B", 7),
        ("2TiB", 2 << 40),
    ],
)
def test_parse_bytes_reads_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1", "2XB", "2 PB", "nan", "inf", "1e999", "1.2.3", "9e18 GB", "two GB", "5BB"])
def test_parse_bytes_rejects_and_names_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 2**53))
def test_parse_bytes_reads_what_it_is_given_exactly(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == num_bytes


@given(st.floats(1, 1e14))
def test_format_bytes_is_within_half_a_percent_of_its_value(num_bytes: float) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.005, abs=0.5)
