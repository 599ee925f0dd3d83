"""How attention is shared out: whatever the batch, each row's segments end up in its states, once and in their order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.tables import SEGMENT_TOKENS
from headrace.model.attention_parts import ATTENTION_ROWS, AttentionParts, attention_parts
from headrace.model.config import LayerConfig, ModelConfig, RopeConfig
from tiny.models import TinySpec

if TYPE_CHECKING:
    from conftest import Plan

CONFIG = ModelConfig("llama", "tiny", 4096, 100, 64, 64, 6, 2, 32, 1e-5, (LayerConfig(),), (RopeConfig(1e4, 32),))
TILE = ATTENTION_ROWS // CONFIG.group


def _row_segments(parts: AttentionParts, num_rows: int) -> list[list[tuple[int, int, int]]]:
    """What each row merges: (first segment, end, block) of its states in order."""
    written: dict[int, tuple[int, int, int]] = {}
    for block in range(parts.num_blocks):
        for row in range(int(parts.num_rows[block])):
            state = int(parts.states[block]) + row
            assert state not in written, "two blocks write one state"
            written[state] = (int(parts.segments[block]), int(parts.ends[block]), block)
    merged = []
    for row in range(num_rows):
        first, count, stride = (int(each[row]) for each in (parts.row_states, parts.row_counts, parts.row_strides))
        merged.append([written.pop(first + number * stride) for number in range(count)])
    assert not written, "a state that nobody merges"
    return merged


def _check(parts: AttentionParts, new: np.ndarray, past: np.ndarray, window: int, room: int) -> None:
    owners, positions = (
        np.repeat(np.arange(len(new)), new),
        np.concatenate([np.arange(p, p + n) for p, n in zip(past, new, strict=False)]),
    )
    for row, states in enumerate(_row_segments(parts, len(owners))):
        own = positions[row]
        lowest = max(0, own - window + 1) if window else 0
        # in order, without a gap, all that the row sees; only the first state may stand for several segments
        assert states[0][0] <= lowest // SEGMENT_TOKENS
        assert states[-1][1] >= own // SEGMENT_TOKENS + 1
        assert all(left[1] == right[0] for left, right in itertools.pairwise(states))
        assert all(end == first + 1 for first, end, _ in states[1:])
        for first, end, block in states:
            assert parts.rows[block] <= row < parts.rows[block] + parts.num_rows[block]
            if not parts.own[block]:
                # no row masks anything of what several of them see
                place = int(parts.offsets[block]) + row - int(parts.rows[block])
                assert own >= end * SEGMENT_TOKENS
                assert place >= end * SEGMENT_TOKENS - 1
                if window:
                    assert own - window + 1 <= first * SEGMENT_TOKENS
                    assert place - window + 1 <= first * SEGMENT_TOKENS
            else:
                assert parts.owners[block] == owners[row]
    assert int((parts.states + parts.num_rows).max()) <= room
    assert int(parts.num_rows.max()) <= TILE


@given(
    sequences=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 48)), min_size=1, max_size=40),
    window=st.sampled_from([0, 1, 40, 255, 256, 257, 270, 512, 700]),
    threads=st.integers(1, 8),
    room=st.integers(40, 500),
)
@settings(max_examples=300, deadline=None)
def test_rows_that_share_pages_merge_all_their_segments_in_order(
    sequences: list[tuple[int, int]], window: int, threads: int, room: int
) -> None:
    past, shared = (np.array(each, np.int64) for each in zip(*sequences, strict=True))
    new = np.ones_like(past)
    parts = attention_parts(CONFIG, new, past, window, threads, shared_pages=shared, room=room)
    _check(parts, new, past, window, room)


@given(
    sequences=st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 60)), min_size=1, max_size=8),
    window=st.sampled_from([0, 1, 40, 256, 700]),
    threads=st.integers(1, 8),
    room=st.integers(480, 1000),
)
@settings(max_examples=200, deadline=None)
def test_chunks_of_prompts_merge_all_their_segments_in_order(
    sequences: list[tuple[int, int]], window: int, threads: int, room: int
) -> None:
    past, new = (np.array(each, np.int64) for each in zip(*sequences, strict=True))
    _check(attention_parts(CONFIG, new, past, window, threads, room=room), new, past, window, room)


def _parts(past: list[int], shared: list[int], window: int = 0, threads: int = 2) -> AttentionParts:
    pasts = np.array(past, np.int64)
    return attention_parts(CONFIG, np.ones_like(pasts), pasts, window, threads, shared_pages=np.array(shared, np.int64))


def _blocks(parts: AttentionParts) -> set[tuple[int, int, int]]:
    """(first row, rows, segment) of each block of one segment."""
    return set(zip(parts.rows.tolist(), parts.num_rows.tolist(), parts.segments.tolist(), strict=True))


def test_shared_segments_are_blocks_of_all_rows_that_have_them() -> None:
    # all share 2 segments, the middle two a third one; tails are everybody's own
    parts = _parts([600, 800, 900, 513], [0, 16, 24, 16])
    tails = {(0, 1, 2), (1, 1, 3), (2, 1, 3), (3, 1, 2)}
    assert _blocks(parts) == {(0, 4, 0), (0, 4, 1), (1, 2, 2), *tails}


def test_partly_shared_segments_are_everybodys_own() -> None:
    assert _blocks(_parts([300, 300], [0, 7])) == {(0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1)}
    assert _blocks(_parts([300, 300], [0, 9])) == {(0, 2, 0), (0, 1, 1), (1, 1, 1)}


def test_more_rows_than_a_block_holds_share_in_several_blocks() -> None:
    parts = _parts([256] * (2 * TILE + 3), [0, *[8] * (2 * TILE + 2)])
    shared = {(0, TILE, 0), (TILE, TILE, 0), (2 * TILE, 3, 0)}
    assert {block for block in _blocks(parts) if block[2] == 0} == shared


def test_segments_that_a_window_cuts_are_not_shared() -> None:
    # the second row's window begins within segment 1
    parts = _parts([900, 1000, 1000], [0, 24, 24], window=600)
    assert {block for block in _blocks(parts) if block[1] > 1} == {(0, 3, 2)}
    assert int(_parts([900, 1000], [0, 24], window=200).num_rows.max()) == 1


def test_sharing_is_given_up_where_states_have_no_room() -> None:
    past, new = np.full(4, 1000, np.int64), np.ones(4, np.int64)
    shared = np.array([0, 24, 24, 24], np.int64)
    parts = attention_parts(CONFIG, new, past, 0, 1, shared_pages=shared, room=16)
    assert int(parts.num_rows.max()) == 4
    parts = attention_parts(CONFIG, new, past, 0, 1, shared_pages=shared, room=15)
    assert int(parts.num_rows.max()) == 1


def test_segments_are_split_where_blocks_are_few_or_one_is_far_longer_than_the_others() -> None:
    def counts(past: list[int], threads: int) -> list[int]:
        return _parts(past, [0] * len(past), threads=threads).row_counts.tolist()

    assert counts([700], 2) == [3]
    assert counts([700] * 3, 2) == [3] * 3
    # 4 blocks per thread
    assert counts([700] * 4, 2) == [1] * 4
    assert counts([*[200] * 20, 2600], 2) == [*[1] * 20, 11]


def test_one_sequence_is_shared_out_over_its_tokens_and_segments(make_plan: Callable[..., Plan]) -> None:
    config = make_plan(TinySpec()).config
    tile = ATTENTION_ROWS // config.group

    def parts(new: int, past: int, window: int = 0, threads: int = 2, room: int = 1000) -> tuple[int, int, int]:
        made = attention_parts(config, np.array([new]), np.array([past]), window, threads, room=room)
        return made.num_blocks, int(made.segments[0]), int(made.row_counts[0])

    assert parts(1, 0) == (1, 0, 1)
    assert parts(1, 700) == (3, 0, 3)
    assert parts(1, 700, room=2) == (1, 0, 1)
    assert parts(1, 700, window=100) == (1, 2, 1)
    assert parts(256, 0, threads=1) == (-(-256 // tile), 0, 1)


def test_parts_are_int64(make_plan: Callable[..., Plan]) -> None:
    parts = _parts([600, 800], [0, 16])
    assert {getattr(parts, each.name).dtype for each in dataclasses.fields(parts)} == {np.dtype(np.int64)}


@pytest.mark.parametrize("window", [0, 300])
def test_batch_of_one_shares_nothing(window: int) -> None:
    assert _blocks(_parts([700], [0], window)) == _blocks(_parts([700], [20], window))
