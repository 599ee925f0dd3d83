from __future__ import annotations

import sys
from collections.abc import Sequence
from pydoc_data.topics import topics

import pytest

from headrace.engine.kv_bench import KvFormatResult, default_text, run_kv_bench
from headrace.errors import ContextOverflowError, OptionError


class Tokenizer:
    """A token a character, behind a BOS token."""

    def __init__(self) -> None:
        self.longest_text = 0

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        self.longest_text = max(self.longest_text, len(text))
        return [0] * add_bos + [ord(character) for character in text]


class Model:
    """Perplexity 10 with exact pages; compressed ones add 1 and 5 %."""

    name = "m"
    context_tokens = 1000

    def __init__(self) -> None:
        self.tokenizer = Tokenizer()
        self.read: list[tuple[str, list[int]]] = []

    def perplexity_of(self, token_ids: Sequence[int], *, page_format: str) -> float:
        self.read.append((page_format, list(token_ids)))
        return {"f16": 10.0, "q8": 10.1, "q4": 10.5}[page_format]

    def page_bytes(self, page_format: str) -> int:
        return {"f16": 3200, "q8": 1664, "q4": 896}[page_format]


def test_kv_bench_reads_the_same_tokens_with_every_format() -> None:
    model = Model()
    shown: list[str] = []
    result = run_kv_bench(model, "abc" * 50, num_tokens=100, on_format=shown.append)
    ids = [0, *(ord(character) for character in "abc" * 33)]
    assert model.read == [(name, ids) for name in ("f16", "q8", "q4")]
    assert shown == ["f16", "q8", "q4"]
    assert (result.model, result.num_tokens) == ("m", 100)
    assert result.formats[0] == KvFormatResult("f16", 10.0, 0.0, 100.0, 1.0)
    assert [row.change for row in result.formats] == pytest.approx([0, 0.01, 0.05])
    assert [row.bytes_per_token for row in result.formats] == [100, 52, 28]
    assert [row.fit_ratio for row in result.formats] == pytest.approx([1, 100 / 52, 100 / 28])


def test_kv_bench_takes_a_short_text_whole_and_tokenizes_no_more_than_it_needs() -> None:
    model = Model()
    assert run_kv_bench(model, "x" * 40, num_tokens=500).num_tokens == 41
    run_kv_bench(model, num_tokens=500)
    assert model.tokenizer.longest_text == 16 * 500
    assert len(model.read[-1][1]) == 500


def test_kv_bench_refuses_what_fills_no_page_or_does_not_fit() -> None:
    model = Model()
    with pytest.raises(OptionError, match="num_tokens=32"):
        run_kv_bench(model, num_tokens=32)
    with pytest.raises(OptionError, match="the text has 32 tokens"):
        run_kv_bench(model, "x" * 31, num_tokens=500)
    with pytest.raises(ContextOverflowError, match="1,001 tokens"):
        run_kv_bench(model, num_tokens=1001)
    assert model.read == []


def test_default_text_is_all_topics_in_order() -> None:
    text = default_text()
    at = 0
    for name in sorted(topics):
        assert text.startswith(topics[name], at)
        at += len(topics[name]) + 1
    assert at == len(text) + 1


def test_default_text_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(OptionError, match="text of your own"):
        default_text()
