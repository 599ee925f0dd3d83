from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.options import LoadOptions
from headrace.errors import MemoryLimitError


def test_bench_json_holds_every_figure(headrace: Any) -> None:
    ending = headrace(
        "bench", "fake", "--prompt", "8", "--gen", "4", "--depth", "16", "--threads", "2", "--repeat", "3", "--json"
    )
    assert (ending.code, ending.err) == (0, "")
    document = ending.document
    assert headrace.loaded == [LoadOptions("fake", threads=2, context_tokens=24)]
    assert {key: document[key] for key in ("model", "threads", "prompt_tokens", "gen_tokens", "depth_tokens")} == {
        "model": "fake",
        "threads": 2,
        "prompt_tokens": 8,
        "gen_tokens": 4,
        "depth_tokens": 16,
    }
    assert len(document["prefill_tok_s_runs"]) == len(document["decode_tok_s_runs"]) == 3
    assert document["prefill_tok_s"] == sorted(document["prefill_tok_s_runs"])[1]
    assert document["decode_tok_s"] == sorted(document["decode_tok_s_runs"])[1]
    # Four tokens read 17, 18, 19 and 20 tokens of keys and values: 18.5 on average.
    assert document["bytes_per_token"] == {
        "weight": 100.0,
        "kv_read": 18.5,
        "kv_write": 1.0,
        "activation": 0.0,
        "total": 119.5,
    }
    assert document["read_bandwidth_gb_s"] == 10.0
    assert document["bandwidth_fraction"] == pytest.approx(document["gb_s"] / 10)
    assert document["first_token_s"] > document["load_s"] == 0.5
    assert document["rss_mb"] is None or document["rss_mb"] > 1
    assert document["cpu_level"] == "portable"
    assert document["machine"]["num_usable_cores"] >= 1
    assert set(document["versions"]) == {"python", "headrace", "numpy", "numba", "llvmlite", "tokenizers"}


def test_bench_prints_a_table(headrace: Any) -> None:
    ending = headrace("bench", "--prompt", "8", "--gen", "4", "--repeat", "1")
    assert ending.code == 0
    lines = ending.out.splitlines()
    assert lines[0].startswith("fake, 2 threads, portable, ")
    assert lines[2].startswith("prefill 8")
    assert lines[3].startswith("decode 4")
    assert "bytes per token: weight 100 B" in ending.out
    assert headrace.loaded[0].model == "smollm2"


def test_bench_leaves_out_what_is_not_asked_for(headrace: Any) -> None:
    document = headrace("bench", "--prompt", "8", "--gen", "0", "--repeat", "1", "--json").document
    assert [document[key] for key in ("decode_tok_s", "gb_s", "bandwidth_fraction", "bytes_per_token")] == [None] * 4
    document = headrace("bench", "--prompt", "0", "--gen", "2", "--repeat", "1", "--json").document
    assert [document["prefill_tok_s"], document["first_token_s"]] == [None, None]


@pytest.mark.parametrize(
    "arguments", [["--prompt", "-1"], ["--gen", "-1"], ["--depth", "-1"], ["--repeat", "0"], ["--prompt", "0", "--gen", "0"]]
)
def test_bench_bad_count_is_named_before_anything_is_loaded(headrace: Any, arguments: list[str]) -> None:
    ending = headrace("bench", *arguments)
    assert (ending.code, ending.out) == (2, "")
    assert f"={arguments[1]} " in ending.err
    assert arguments[0] in ending.err
    assert headrace.loaded == []


def test_bench_that_does_not_fit_the_context_says_so(headrace: Any) -> None:
    headrace.model.context_tokens = 10
    ending = headrace("bench", "--prompt", "8", "--gen", "4", "--depth", "4")
    assert ending.code == 2
    assert ending.err == (
        "headrace: the runs need 12 tokens of context and fake has 10: "
        "lower depth_tokens, prompt_tokens or gen_tokens (--depth, --prompt, --gen)\n"
    )


def test_bench_kv_measures_every_format_of_pages(headrace: Any) -> None:
    document = headrace("bench", "--kv", "--kv-tokens", "100", "--kv-memory", "1GB", "--json").document
    assert headrace.loaded == [LoadOptions("smollm2", context_tokens=100, kv_memory_bytes=10**9)]
    assert headrace.model.calls == [("perplexity", 100, 1, name) for name in ("f16", "q8", "q4")]
    assert (document["model"], document["num_tokens"], document["text"]) == ("fake", 100, "help topics of Python")
    assert [row["page_format"] for row in document["formats"]] == ["f16", "q8", "q4"]
    assert [row["perplexity"] for row in document["formats"]] == [20.0, 20.1, 21.0]
    assert [row["change"] for row in document["formats"]] == pytest.approx([0.0, 0.005, 0.05])
    assert [row["bytes_per_token"] for row in document["formats"]] == [1000.0, 500.0, 250.0]
    assert [row["fit_ratio"] for row in document["formats"]] == [1.0, 2.0, 4.0]


def test_bench_kv_prints_a_table(headrace: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("word " * 64)
    ending = headrace("bench", "--kv", "--kv-text", str(text))
    assert (ending.code, ending.err) == (0, "")
    lines = ending.out.splitlines()
    assert lines[0] == f"fake, 65 tokens of {text}"
    assert [line.split() for line in lines[2:]] == [
        ["f16", "20.0000", "+0.00", "%", "1,000", "1.00", "x"],
        ["q8", "20.1000", "+0.50", "%", "500", "2.00", "x"],
        ["q4", "21.0000", "+5.00", "%", "250", "4.00", "x"],
    ]


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot be read"), (b"caf\xe9 au lait", "at byte 3"), (b"three words only", "4 tokens")]
)
def test_bench_kv_text_that_cannot_be_used_is_one_line(headrace: Any, tmp_path: Path, content: bytes | None, said: str) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    ending = headrace("bench", "--kv", "--kv-text", str(text))
    assert (ending.code, ending.out) == (2, "")
    assert said in ending.err
    assert ending.err.count("\n") == 1


def test_bench_names_no_option_that_it_does_not_have(headrace: Any) -> None:
    def load(_options: Any, _progress: Any) -> Any:
        raise MemoryLimitError("it does not fit: lower the context", arguments=("context", "kv_memory"))

    headrace.load = load
    assert headrace("bench").err == "headrace: it does not fit: lower the context (--kv-memory)\n"
    assert headrace("bench", "--prompt", "-1").err == "headrace: prompt_tokens=-1 is too small: use 0 or more (--prompt)\n"
    assert headrace("bench", "--kv", "--kv-tokens", "1").err.endswith("(--kv-tokens)\n")


@pytest.mark.parametrize("arguments", [["--kv-tokens", "32"], ["--kv-formats", "f32"], ["--kv-disk", "lots"]])
def test_bench_kv_bad_value_is_named_before_anything_is_loaded(headrace: Any, arguments: list[str]) -> None:
    ending = headrace("bench", "--kv", *arguments)
    assert (ending.code, headrace.loaded) == (2, [])
    assert arguments[0] in ending.err


def test_bench_kv_says_when_the_text_does_not_fit_the_context(headrace: Any) -> None:
    headrace.model.context_tokens = 1000
    ending = headrace("bench", "--kv")
    assert ending.code == 2
    assert "2,048 tokens of text do not fit into the context of 1,000" in ending.err
