"""The simulator: hit rates against a plain count, the bounds between policies, and traces that are no traces."""

from __future__ import annotations

import gzip
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.kv.simulator import POLICIES, simulate, timed
from headrace.kv.trace import MAX_BLOCKS, TraceRequest, read_trace


def _requests(paths: list[tuple[int, ...]]) -> list[TraceRequest]:
    """Requests whose blocks are told apart by all blocks before them, as in real traces."""
    ids: dict[tuple[int, ...], int] = {}
    blocks = [tuple(ids.setdefault(path[: end + 1], len(ids)) for end in range(len(path))) for path in paths]
    return [TraceRequest(10.0 * index, each, 100, 512) for index, each in enumerate(blocks)]


PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), min_size=1, max_size=40).filter(any)


def _plain_lru(requests: list[TraceRequest], capacity: int) -> int:
    """Found blocks, counted block by block: the least recently used goes first, the deeper of two."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in request.block_ids:
            if block not in held:
                break
            hits += 1
        for block in reversed(request.block_ids):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits


def _plain_best(requests: list[TraceRequest], capacity: int) -> int:
    held: set[int] = set()
    hits = 0
    for index, request in enumerate(requests):
        for block in request.block_ids:
            if block not in held:
                break
            hits += 1
        held.update(request.block_ids)
        depths = {block: depth for each in requests for depth, block in enumerate(each.block_ids)}
        later = {
            block: next((i for i in range(index + 1, len(requests)) if block in requests[i].block_ids), len(requests))
            for block in held
        }
        while len(held) > capacity:
            held.remove(max(held, key=lambda block: (later[block], depths[block])))
    return hits


@settings(max_examples=60, deadline=None)
@given(paths=PATHS, capacity=st.integers(1, 12))
def test_references_count_as_a_plain_replay_does(paths: list[tuple[int, ...]], capacity: int) -> None:
    requests = _requests(paths)
    assert simulate(requests, [capacity], "lru").tier_hit_blocks == (_plain_lru(requests, capacity),)
    assert simulate(requests, [capacity], "best").tier_hit_blocks == (_plain_best(requests, capacity),)


@settings(max_examples=40, deadline=None)
@given(paths=PATHS, capacities=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_no_policy_beats_the_best_and_all_find_everything_with_room_for_all(
    paths: list[tuple[int, ...]], capacities: list[int]
) -> None:
    requests = _requests(paths)
    best = simulate(requests, capacities, "best").hit_rate
    for policy in POLICIES:
        assert simulate(requests, capacities, policy).hit_rate <= best + 1e-12
    assert len({simulate(requests, [10_000], policy).tier_hit_blocks for policy in POLICIES}) == 1


def test_two_tiers_tell_where_blocks_were_found_and_what_was_moved() -> None:
    requests = _requests([(1, 1), (2, 2), (1, 1), (1, 1)])
    result = simulate(requests, [2, 2], "lru")
    assert (result.num_blocks, result.tier_hit_blocks, result.tier_hit_rates) == (8, (2, 2), (0.25, 0.25))
    assert (result.promoted_blocks, result.written_blocks, result.dropped_blocks) == (2, 4, 0)
    assert simulate(requests, [2, 2], "best").tier_hit_blocks == (4, 0)


def test_simulation_is_repeatable() -> None:
    requests = _requests([(index * index % 7, index % 5, index % 3) for index in range(300)])
    assert simulate(requests, [5, 5], "headrace") == simulate(requests, [5, 5], "headrace")


def test_timing_uses_the_clock_it_is_given() -> None:
    ticks = iter([1.0, 3.0])
    assert timed(_requests([(1,)] * 10), [5], "lru", lambda: next(ticks))[1] == 5.0


@pytest.mark.parametrize(("capacities", "policy"), [([], "lru"), ([0], "lru"), ([3, -1], "best"), ([3], "fifo")])
def test_simulation_rejects_what_it_cannot_do(capacities: list[int], policy: Any) -> None:
    with pytest.raises(OptionError):
        simulate(_requests([(1, 2)]), capacities, policy)


def test_trace_without_blocks_is_rejected() -> None:
    with pytest.raises(OptionError, match="no blocks"):
        simulate(_requests([()]), [3], "lru")


@pytest.mark.parametrize("pack", [False, True])
def test_trace_reads_ids_and_runs_plain_and_packed(tmp_path: Path, pack: bool) -> None:
    lines = [
        {"timestamp": 0, "input_length": 900, "output_length": 7, "hash_ids": [4, 5]},
        {"timestamp": 1500, "output_length": 8, "block_tokens": 64, "hash_id_runs": [[4, 5], [9, 9], [1, 3]], "session": 3},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(text.encode()) if pack else text.encode())
    assert read_trace(path) == [TraceRequest(0.0, (4, 5), 7, 512), TraceRequest(1.5, (4, 5, 9, 1, 2, 3), 8, 64)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no request"),
        ("{", "line 1 is no JSON"),
        ("[1]", "no JSON object"),
        ('{"timestamp": 1}', "either hash_ids or hash_id_runs"),
        ('{"hash_ids": [1]}', "timestamp=None"),
        ('{"timestamp": -1, "hash_ids": [1]}', "timestamp=-1"),
        ('{"timestamp": 1, "output_length": "x", "hash_ids": [1]}', "output_length='x'"),
        ('{"timestamp": 1, "hash_ids": [1.5]}', "no list of whole numbers"),
        ('{"timestamp": 1, "hash_ids": 3}', "no list of whole numbers"),
        ('{"timestamp": 1, "hash_id_runs": [[3, 1]]}', r"run \[3, 1\]"),
        (f'{{"timestamp": 1, "hash_id_runs": [[0, {MAX_BLOCKS}]]}}', "at most"),
        ('{"timestamp": 1, "hash_id_runs": [3]}', "run 3"),
        ('{"timestamp": 1, "hash_id_runs": 3}', "no list"),
        ('{"timestamp": 5, "hash_ids": [1]}\n{"timestamp": 4, "hash_ids": [1]}', "line 2 is earlier"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_bad_trace_is_one_clear_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(OptionError, match=said):
        read_trace(path)


def test_unreadable_traces_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(OptionError, match="cannot be read"):
        read_trace(tmp_path)
    packed = gzip.compress(b'{"timestamp": 1, "hash_ids": [1]}\n' * 1000)
    for name, content in (
        ("short", packed[: len(packed) // 2]),
        ("text", b"\xff\xfe\x00"),
        ("bits", packed[:12] + b"\xff" * 40),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OptionError, match=r"cannot be read|is no text"):
            read_trace(tmp_path / name)
