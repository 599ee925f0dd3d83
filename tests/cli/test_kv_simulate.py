"""`headrace kv simulate`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.kv_simulate import MAX_TIERS, parse_capacities
from headrace.errors import OptionError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten sessions in turn, each a block longer every time."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 1000 * turn,
            "output_length": 10,
            "block_tokens": 16,
            "hash_ids": list(range(start, start + 2 + turn // 10)),
        }
        for turn in range(100)
        for start in (1000 * (turn % 10),)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize("policy", ["headrace", "lru", "best"])
def test_simulate_prints_one_document(headrace: Any, trace: Path, policy: str) -> None:
    document = headrace("kv", "simulate", str(trace), "--capacity", "20,40", "--policy", policy, "--json").document
    assert (document["policy"], document["requests"], document["blocks"]) == (policy, 100, 650)
    assert document["capacity_blocks"] == [20, 40]
    assert document["block_tokens"] == 16
    assert document["requests_per_s"] > 0
    assert sum(document["tier_hit_rates"]) == pytest.approx(document["hit_rate"])
    assert document["hit_rate"] <= document["best_hit_rate"]
    if policy in {"lru", "best"}:
        assert document["hit_rate"] == document[f"{policy}_hit_rate"]


def test_simulate_counts_bytes_by_the_size_of_a_token(headrace: Any, trace: Path) -> None:
    arguments = ("kv", "simulate", str(trace), "--capacity", "20,40", "--policy", "lru", "--json")
    documents = [headrace(*arguments, "--token-bytes", size).document for size in ("1KB", "3KB")]
    assert documents[0]["written_bytes"] > 0
    assert documents[0]["written_bytes"] % 16_000 == 0
    assert documents[1]["written_bytes"] == 3 * documents[0]["written_bytes"]
    assert documents[0]["moved_bytes"] == documents[0]["written_bytes"] + documents[0]["promoted_bytes"]


def test_simulate_shows_a_table_with_both_references(headrace: Any, trace: Path) -> None:
    ending = headrace("kv", "simulate", str(trace), "--capacity", "30")
    assert (ending.code, ending.err) == (0, "")
    assert [line.split()[0] for line in ending.out.splitlines()[:4]] == ["policy", "headrace", "lru", "best"]
    assert "100 requests" in ending.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--capacity", "0"), "--capacity='0'"),
        (("--capacity", "10,x"), "'10,x'"),
        (("--capacity", "10", "--policy", "fifo"), "'fifo'"),
        (("--capacity", "10", "--token-bytes", "many"), "'many'"),
    ],
)
def test_simulate_refuses_bad_options_in_one_line(headrace: Any, trace: Path, options: tuple[str, ...], said: str) -> None:
    ending = headrace("kv", "simulate", str(trace), *options)
    assert (ending.code, ending.out) == (2, "")
    assert ending.err.count("\n") == 1
    assert said in ending.err


def test_simulate_says_what_is_wrong_with_a_trace(headrace: Any, tmp_path: Path) -> None:
    ending = headrace("kv", "simulate", str(tmp_path / "none"), "--capacity", "10")
    assert (ending.code, ending.out) == (2, "")
    assert "none" in ending.err


def test_capacities_are_whole_numbers_for_a_few_tiers() -> None:
    assert parse_capacities("1000, 10000") == [1000, 10000]
    for text in ("", "1,", "-1", "1.5", "²", ",".join("1" * (MAX_TIERS + 1)), str(2**40)):
        with pytest.raises(OptionError, match="--capacity"):
            parse_capacities(text)
