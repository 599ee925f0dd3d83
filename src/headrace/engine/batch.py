"""What one step is asked to do, and the tables of it that kernels read.

For each sequence of a batch, `num_tokens` new tokens follow `past_tokens` known ones; rows of the step are the new
tokens of all sequences, one sequence after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.kernels.program import MAX_BLOCKS
from headrace.kernels.tables import (
    ENTRY_WORDS,
    MERGE_ENTRY_WORDS,
    SEGMENT_TOKENS,
    TOKEN_WORDS,
    state_bytes,
)
from headrace.model.config import ModelConfig
from headrace.model.graph import Attention, Operation
from headrace.model.step import PAGE_TOKENS, SequenceStep, attention_parts

Words = npt.NDArray[np.int64]


class ColdSource(Protocol):
    """Where cold pages are read from: called by one thread at a time, which is not the one that runs steps."""

    def expect_layer(self, layer: int, first: int) -> None:
        """Says that one layer of all cold pages from number `first` on is read next; a disk can be asked for them at once.

        May do nothing.
        """

    def read_layer(self, layer: int, number: int, target: npt.NDArray[np.uint8]) -> str | None:
        """Reads one layer of the number-th cold page into all of `target`; why not, if it fails."""


@dataclass(frozen=True, eq=False)
class ColdPages:
    """Pages of a sequence that are not in memory: whole ones, before the page that new tokens go to.

    `indices` are their places in the sequence, int64 [num_cold], ascending; `formats` their format codes, all exact if
    None. Steps with the same object are cheaper than with an equal one.
    """

    indices: Words
    source: ColdSource
    formats: Words | None = None


class Arriving(Protocol):
    """Pages of a sequence that are read, layer by layer, into memory of theirs while a step runs."""

    def wait_for(self, layer: int) -> None:
        """Waits until one layer of all of them is there; raises if it will never be."""


@dataclass(frozen=True)
class Slice:
    """New tokens of one sequence: their ids, how many tokens are known before them, and the addresses of its pages.

    `num_outputs` logits rows are wanted, for the last tokens of the slice. The addresses of `cold` pages, if there are
    any, are not used; those of pages that are `arriving` are.
    """

    token_ids: Sequence[int]
    past_tokens: int
    page_addresses: Words
    num_outputs: int = 1
    cold: ColdPages | None = None
    arriving: Arriving | None = None


def attention_numbers(graph: Sequence[Operation], windows: Sequence[int]) -> dict[int, npt.NDArray[np.intp]]:
    """The numbers of a graph's attention operations, by window."""
    return {
        window: np.array([i for i, op in enumerate(graph) if isinstance(op, Attention) and op.window == window])
        for window in windows
    }


class Tables:
    """Fills the tables of a program: tokens, page addresses, output rows, attention blocks, states to merge."""

    def __init__(self, config: ModelConfig, max_tokens: int, max_pages: int, states_bytes: int, threads: int) -> None:
        self._config, self._threads = config, threads
        self._state_bytes = state_bytes(config.head_width)
        self._states_bytes = states_bytes
        self.max_tokens, self._max_pages = max_tokens, max_pages
        # a block per token and head, and one more per head for each further state that the buffer has room for
        states_room = states_bytes // (config.heads * self._state_bytes)
        self.max_blocks = min(MAX_BLOCKS, config.kv_heads * (max_tokens + states_room))
        self.windows = tuple(dict.fromkeys(layer.window for layer in config.layers))
        sizes = {
            "tokens": max_tokens * TOKEN_WORDS,
            "outputs": max_tokens,
            "pages": max_pages,
        }
        for window in self.windows:
            sizes[f"attention:{window}"] = self.max_blocks * ENTRY_WORDS
            sizes[f"merge:{window}"] = max_tokens * MERGE_ENTRY_WORDS
        self.offsets: dict[str, int] = {}
        offset = 0
        for name, words in sizes.items():
            self.offsets[name] = offset
            offset += -(-words // 8) * 8
        self.num_words = offset

    def fill(self, tables: Words, base: int, slices: Sequence[Slice], states: int) -> dict[int, int]:
        """Writes the tables of a batch; `base` is their address, `states` that of the buffer of states.

        Returns:
            Attention blocks by window.
        """
        row = page = outputs = 0
        page_tables = []
        for part in slices:
            count = len(part.token_ids)
            start = self.offsets["tokens"] + row * TOKEN_WORDS
            tokens = tables[start : start + count * TOKEN_WORDS].reshape(count, TOKEN_WORDS)
            positions = np.arange(part.past_tokens, part.past_tokens + count)
            tokens[:, 0] = positions
            tokens[:, 1] = part.page_addresses[positions // PAGE_TOKENS]
            tokens[:, 2] = positions % PAGE_TOKENS
            tokens[:, 3] = part.token_ids
            assert page + len(part.page_addresses) <= self._max_pages, "more pages than the tables hold"
            at = self.offsets["pages"] + page
            tables[at : at + len(part.page_addresses)] = part.page_addresses
            page_tables.append(base + 8 * at)
            page += len(part.page_addresses)
            wanted = self.offsets["outputs"] + outputs
            tables[wanted : wanted + part.num_outputs] = range(row + count - part.num_outputs, row + count)
            outputs += part.num_outputs
            row += count
        return {window: self._attention(tables, slices, page_tables, states, window) for window in self.windows}

    def advance(self, tables: Words, part: Slice, blocks: dict[int, int]) -> None:
        """Rewrites what changed in the tables of one new token since the same sequence's token before: see `shape`."""
        at, past = self.offsets["tokens"], part.past_tokens
        tables[at] = past
        tables[at + 1] = part.page_addresses[past // PAGE_TOKENS]
        tables[at + 2] = past % PAGE_TOKENS
        tables[at + 3] = part.token_ids[0]
        for window, count in blocks.items():
            entries = self.offsets[f"attention:{window}"]
            tables[entries + 3 : entries + count * ENTRY_WORDS : ENTRY_WORDS] = past

    def shape(self, slices: Sequence[Slice]) -> tuple[int, ...] | None:
        """What `advance` cannot change, if it can be used for a batch at all: equal shapes differ in one position only."""
        if len(slices) != 1 or len(slices[0].token_ids) != 1:
            return None
        past = slices[0].past_tokens
        first = tuple(max(0, past - window + 1) // SEGMENT_TOKENS if window else 0 for window in self.windows)
        return (id(slices[0].page_addresses), past // SEGMENT_TOKENS, *first)

    def _attention(self, tables: Words, slices: Sequence[Slice], page_tables: list[int], states: int, window: int) -> int:
        """Blocks of attention and entries of merge for layers with one window; returns the number of blocks."""
        config = self._config
        token_bytes = config.heads * self._state_bytes
        entries_at, merge_at = self.offsets[f"attention:{window}"], self.offsets[f"merge:{window}"]
        blocks = row = 0
        state = states
        budget = self._states_bytes - token_bytes * sum(len(part.token_ids) for part in slices)
        for part, pages in zip(slices, page_tables, strict=True):
            count = len(part.token_ids)
            shared = attention_parts(config, SequenceStep(count, part.past_tokens), window, self._threads, budget)
            parts, first, per_block = shared.states, shared.first_segment, shared.tile_tokens
            budget -= token_bytes * count * (parts - 1)
            shape = (shared.tiles, config.kv_heads, parts)
            made = shared.tiles * config.kv_heads * parts
            tile, head, number = (index.reshape(-1) for index in np.indices(shape))
            token = tile * per_block
            at = entries_at + blocks * ENTRY_WORDS
            entries = tables[at : at + made * ENTRY_WORDS].reshape(made, ENTRY_WORDS)
            entries[:, 0] = row + token
            entries[:, 1] = np.minimum(per_block, count - token)
            entries[:, 2] = head
            entries[:, 3] = part.past_tokens + token
            entries[:, 4] = pages
            entries[:, 5] = first + number
            entries[:, 6] = first + number + 1 if shared.split else first + shared.segments
            entries[:, 7] = state + number * count * token_bytes + token * token_bytes + head * config.group * self._state_bytes
            at = merge_at + row * MERGE_ENTRY_WORDS
            merges = tables[at : at + count * MERGE_ENTRY_WORDS].reshape(count, MERGE_ENTRY_WORDS)
            merges[:, 0] = state + np.arange(count) * token_bytes
            merges[:, 1] = parts
            merges[:, 2] = count * token_bytes
            blocks += made
            row += count
            state += parts * count * token_bytes
        assert blocks <= self.max_blocks, "more attention blocks than the tables hold"
        return blocks
