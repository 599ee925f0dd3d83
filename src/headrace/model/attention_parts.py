"""How a step's attention is shared out: blocks over segments of 256 tokens, and the states that blocks leave for `merge`.

    tokens of a sequence   |  segment 0  |  segment 1  |  segment 2  |
    not split               [              one block                ]   one state for each row
    split                   [ block ][ block ][ block ]                 one state for each row and segment
    shared with others      [ block of all ][ of all ][ own block   ]   pages of a shared beginning are read once

A row's segments are merged in their order, either by the one block that folds them or state by state, so a row has the
same bits either way. What a row shares with others is therefore always split: only the first of a row's states may stand
for more than one segment. Sequences that share pages lie next to each other, so how many pages each shares with the one
before it says all about who shares what. Knows no addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from headrace.kernels.tables import SEGMENT_TOKENS, state_bytes
from headrace.model.config import ModelConfig

Words = npt.NDArray[np.int64]

PAGE_TOKENS = 32
"""Tokens in a page of keys and values."""
ATTENTION_ROWS = 48  # query rows in a block of attention, about
_BLOCKS_PER_THREAD = 4
MAX_STEP_TOKENS = 256
_MIN_STATES_BYTES = 16 << 20
SEGMENT_PAGES = SEGMENT_TOKENS // PAGE_TOKENS


@dataclass(frozen=True)
class AttentionParts:
    """Blocks of attention in layers of one window, each for every KV head, and what is merged; N blocks, T rows.

    The queries of rows [rows, rows + num_rows) see segments [segments, ends) through the page table of sequence `owners`.
    The first of them has position past + `offsets` if the block is the owner's alone (`own` is 1), else `offsets`: then
    all rows see all of it. States of tokens (of all heads) are counted from the start of their buffer: a block's rows
    have theirs at `states` and behind it; a row has `row_counts` states, from `row_states` on, `row_strides` apart.
    All int64; the first eight [N], the last three [T].
    """

    rows: Words
    num_rows: Words
    owners: Words
    offsets: Words
    own: Words
    segments: Words
    ends: Words
    states: Words
    row_states: Words
    row_counts: Words
    row_strides: Words

    @property
    def num_blocks(self) -> int:
        """Blocks for each KV head."""
        return len(self.rows)


@dataclass(frozen=True)
class _Spans:
    """What each sequence of a step needs: its first row, and segments [first, end) that its rows see something of."""

    new: Words
    past: Words
    rows: Words
    first: Words
    end: Words
    lowest: Words

    @property
    def lengths(self) -> Words:
        return self.end - self.first


def states_buffer_bytes(config: ModelConfig) -> int:
    """Room for attention's partial states: one for each token of the largest step, and enough to split long pasts."""
    return max(MAX_STEP_TOKENS * config.heads * state_bytes(config.head_width), _MIN_STATES_BYTES)


def states_room(config: ModelConfig) -> int:
    """States of a token, with all its heads, that the buffer holds."""
    return states_buffer_bytes(config) // (config.heads * state_bytes(config.head_width))


def attention_parts(
    config: ModelConfig,
    new_tokens: Words,
    past_tokens: Words,
    window: int,
    threads: int,
    *,
    shared_pages: Words | None = None,
    room: int | None = None,
) -> AttentionParts:
    """Shares out the attention of a step.

    Args:
        config: the model.
        new_tokens: tokens of each sequence in this step, int64 [B].
        past_tokens: tokens known before them, int64 [B].
        window: tokens that a query sees, itself included; 0: all.
        threads: of the team.
        shared_pages: leading pages of each sequence that are those of the one before it, int64 [B]; the first is not used.
            Only in steps of one token for each sequence.
        room: states of tokens that there is room for; by default `states_room`.
    """
    room = states_room(config) if room is None else room
    lowest = np.maximum(0, past_tokens - window + 1) if window else np.zeros_like(past_tokens)
    end = (past_tokens + new_tokens - 1) // SEGMENT_TOKENS + 1
    rows = np.cumsum(new_tokens) - new_tokens
    spans = _Spans(new_tokens, past_tokens, rows, lowest // SEGMENT_TOKENS, end, lowest)
    if shared_pages is not None:
        linked = _links(spans, shared_pages // SEGMENT_PAGES, window)
        if linked.any():
            assert len(new_tokens) == int(new_tokens.sum()), "only steps of one token for each sequence share"
            clustered: npt.NDArray[np.bool_] = np.any(linked, axis=1)
            clustered[:-1] |= clustered[1:]
            alone = _alone(config, spans, ~clustered, threads, room - int(spans.lengths[clustered].sum()))
            taken = int((spans.new * _counts(alone, spans))[~clustered].sum())
            tile = _tile_tokens(config)
            together = _together(spans, linked, clustered, min(tile, window - SEGMENT_TOKENS + 1) if window else tile, taken)
            if together is not None and int((together.states + together.num_rows).max()) <= room:
                return _joined(alone, together, clustered)
    return _alone(config, spans, np.ones(len(rows), bool), threads, room)


def _tile_tokens(config: ModelConfig) -> int:
    return max(1, ATTENTION_ROWS // config.group)


def _counts(parts: AttentionParts, spans: _Spans) -> Words:
    """States of a row of each sequence."""
    return parts.row_counts[spans.rows]


def _alone(config: ModelConfig, spans: _Spans, wanted: npt.NDArray[np.bool_], threads: int, room: int) -> AttentionParts:
    """Blocks of the wanted sequences, each for itself; segments become blocks where those would be few or far too large."""
    tile, lengths, new = _tile_tokens(config), spans.lengths, spans.new
    tiles = -(-new // tile)
    work = lengths * np.minimum(new, tile)
    split = wanted & (lengths > 1) & (work * (_BLOCKS_PER_THREAD * threads) > int((tiles * work).sum()) * config.kv_heads)
    extra = np.where(split, (lengths - 1) * new, 0)
    split &= np.cumsum(extra) <= room - int(new.sum())
    parts = np.where(split, lengths, 1)
    sizes = np.where(wanted, parts * new, 0)
    base = np.cumsum(sizes) - sizes
    made = np.where(wanted, tiles * parts, 0)
    owners = np.repeat(np.arange(len(new)), made)
    number = np.arange(len(owners)) - (np.cumsum(made) - made)[owners]
    tile_number, part = np.divmod(number, parts[owners])
    token = tile_number * tile
    segments = spans.first[owners] + part
    row_owners = np.repeat(np.arange(len(new)), new)
    return AttentionParts(
        rows=spans.rows[owners] + token,
        num_rows=np.minimum(tile, new[owners] - token),
        owners=owners,
        offsets=token,
        own=np.ones_like(token),
        segments=segments,
        ends=np.where(split[owners], segments + 1, spans.end[owners]),
        states=base[owners] + part * new[owners] + token,
        row_states=base[row_owners] + np.arange(len(row_owners)) - spans.rows[row_owners],
        row_counts=parts[row_owners],
        row_strides=new[row_owners],
    )


def _links(spans: _Spans, shared: Words, window: int) -> npt.NDArray[np.bool_]:
    """Which segments each row can have computed together with the row before it, bool [B, segments]."""
    segments = np.arange(int(spans.end.max()))
    whole = np.minimum(spans.past[1:], spans.past[:-1]) // SEGMENT_TOKENS
    # the first segment that a row's window covers as a whole
    covered = -(-spans.lowest // SEGMENT_TOKENS)
    linked = np.zeros((len(shared), len(segments)), bool)
    if window == 0 or window > SEGMENT_TOKENS:
        linked[1:] = segments < np.minimum(shared[1:], whole)[:, None]
        linked[1:] &= segments >= np.maximum(covered[1:], covered[:-1])[:, None]
    return linked


def _together(
    spans: _Spans, linked: npt.NDArray[np.bool_], clustered: npt.NDArray[np.bool_], tile: int, base: int
) -> AttentionParts | None:
    """Blocks of rows that share something: one for each segment and stretch of rows that have it in common.

    A cluster is a stretch of rows of which each shares something with the next. Its states lie segment by segment, one for
    each of its rows, from `base` on, one cluster behind the other.
    """
    members = np.flatnonzero(clustered)
    first_of_cluster: npt.NDArray[np.bool_] = ~np.any(linked, axis=1)
    starts = np.flatnonzero(first_of_cluster[members])
    cluster = np.zeros(len(clustered), np.int64)
    cluster[members] = np.searchsorted(starts, np.arange(len(members)), side="right") - 1
    sizes = np.diff(np.append(starts, len(members)))
    origins = np.minimum.reduceat(spans.first[members], starts)
    places = (np.maximum.reduceat(spans.end[members], starts) - origins) * sizes
    bases = base + np.cumsum(places) - places
    segments, numbers = np.arange(linked.shape[1]), np.arange(len(clustered))[:, None]
    seen = clustered[:, None] & (segments >= spans.first[:, None]) & (segments < spans.end[:, None])
    leaders = np.maximum.accumulate(np.where(linked, -1, numbers), axis=0)
    begins: npt.NDArray[np.bool_] = np.equal((numbers - leaders) % tile, 0).T[seen.T]
    # segment by segment, so that the rows of a block are neighbours
    segment, row = np.nonzero(seen.T)
    at = np.flatnonzero(begins)
    num_rows = np.diff(np.append(at, len(begins)))
    segment, row = segment[at], row[at]
    own = (num_rows == 1).astype(np.int64)
    of = cluster[row]
    row_of, size = cluster[members], sizes[cluster[members]]
    first_state = bases[of] + (segment - origins[of]) * sizes[of] + row - members[starts[of]]
    return AttentionParts(
        rows=row,
        num_rows=num_rows,
        owners=row,
        # the last token of the segment: all rows see all of it, and the pages asked for early belong to every row
        offsets=np.where(own, 0, segment * SEGMENT_TOKENS + SEGMENT_TOKENS - 1),
        own=own,
        segments=segment,
        ends=segment + 1,
        states=first_state,
        row_states=bases[row_of] + (spans.first[members] - origins[row_of]) * size + members - members[starts[row_of]],
        row_counts=spans.lengths[members],
        row_strides=size,
    )


def _joined(alone: AttentionParts, together: AttentionParts, clustered: npt.NDArray[np.bool_]) -> AttentionParts:
    """All blocks; rows of clusters merge what their blocks left."""
    joined: dict[str, Words] = {}
    for field in fields(AttentionParts):
        mine, theirs = getattr(alone, field.name), getattr(together, field.name)
        if field.name.startswith("row_"):
            joined[field.name] = mine.copy()
            joined[field.name][clustered] = theirs
        else:
            joined[field.name] = np.concatenate([mine, theirs])
    return AttentionParts(**joined)
