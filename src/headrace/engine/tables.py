"""The tables of a step, as kernels read them: tokens, page addresses, wanted rows, attention's blocks, states to merge.

What depends on positions only through segments of 256 tokens (blocks and states) is made once and kept; between two steps
of a batch it is enough to write new positions, tokens and slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine.batch import Batch, Paging, Words
from headrace.kernels.fields.sample import SAMPLE_WORDS
from headrace.kernels.program import MAX_BLOCKS
from headrace.kernels.tables import ENTRY_WORDS, MERGE_ENTRY_WORDS, SEGMENT_TOKENS, TOKEN_WORDS, state_bytes
from headrace.model.attention_parts import SEGMENT_PAGES, AttentionParts, attention_parts, states_room
from headrace.model.config import ModelConfig
from headrace.model.graph import Attention, Operation
from headrace.model.step import PAGE_TOKENS

_BLOCKS_KEPT = 32


@dataclass(frozen=True, eq=False)
class Blocks:
    """Attention of a batch in layers of one window: entries, int64 [N, G, ENTRY_WORDS], and what rows merge.

    Page tables are counted from the start of all of them. The first query of block n has position
    offsets[n] + own[n] * (known tokens of sequence owners[n]).
    """

    entries: Words
    merges: Words
    owners: Words
    offsets: Words
    own: Words


class StepTables:
    """The tables of one step in some memory, and what they were written for."""

    def __init__(self, words: Words, address: int) -> None:
        self.words, self.address = words, address
        self.blocks: dict[int, Blocks] = {}
        self.paging: Paging | None = None
        self._num_sampled = 0

    def forget(self) -> None:
        """Lets go of what the tables were written for."""
        self.blocks.clear()
        self.paging = None

    def write_sampling(self, batch: Batch, start: int) -> None:
        """Writes how each wanted row's token is drawn; records of zeros where it is the likeliest."""
        sampled = any(part.sampling is not None for part in batch.slices)
        # also what an earlier, larger batch has left
        self._num_sampled = max(self._num_sampled, batch.num_outputs if sampled else 0)
        if not self._num_sampled:
            return
        records = self.words[start : start + self._num_sampled * SAMPLE_WORDS].reshape(-1, SAMPLE_WORDS)
        records[:] = 0
        if not sampled:
            self._num_sampled = 0
        output = 0
        for part in batch.slices:
            end = part.past_tokens + len(part.token_ids)
            for position in range(end - part.num_outputs, end):
                if part.sampling is not None:
                    part.sampling.write(records[output], position + 1)
                output += 1


class Tables:
    """Where the tables of a step lie in its words, and how they are written."""

    def __init__(
        self, config: ModelConfig, max_tokens: int, max_outputs: int, max_pages: int, states_address: int, threads: int
    ) -> None:
        self._config, self._threads, self._states_address = config, threads, states_address
        self._state_bytes = state_bytes(config.head_width)
        self._max_pages = max_pages
        # a block leaves a state of its own at least
        self.max_blocks = min(MAX_BLOCKS, config.kv_heads * (max_tokens + states_room(config)))
        self.windows = tuple(dict.fromkeys(layer.window for layer in config.layers))
        sizes = {
            "tokens": max_tokens * TOKEN_WORDS,
            "outputs": max_outputs,
            "chosen": max_outputs,
            "sampling": max_outputs * SAMPLE_WORDS,
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
        self._parts: dict[tuple[int, bytes], AttentionParts] = {}

    def chosen(self, step: StepTables, num_outputs: int) -> Words:
        """The tokens that a step chose: a view."""
        at = self.offsets["chosen"]
        return step.words[at : at + num_outputs]

    def write(self, step: StepTables, batch: Batch, *, paged: StepTables | None = None, ahead: int = 0) -> bool:
        """Writes the tables of a batch, `ahead` steps from now: tokens that earlier steps choose are left to them.

        Args:
            step: what is written.
            batch: for one new token of each sequence, if `ahead`.
            paged: whose page table the step uses; its own by default.
            ahead: steps before this one.

        Returns:
            Whether the blocks of attention are others than before.
        """
        words, paging = step.words, batch.paging
        paged = step if paged is None else paged
        positions = batch.positions + ahead
        starts = paging.starts if batch.decodes else paging.starts[batch.owners]
        at = self.offsets["tokens"]
        tokens = words[at : at + batch.num_tokens * TOKEN_WORDS].reshape(-1, TOKEN_WORDS)
        tokens[:, 0] = positions
        tokens[:, 1] = paging.words[starts + positions // PAGE_TOKENS]
        tokens[:, 2] = positions % PAGE_TOKENS
        if not ahead:
            tokens[:, 3] = batch.token_ids
        at = self.offsets["outputs"]
        words[at : at + batch.num_outputs] = batch.output_rows
        if not ahead:  # later steps read the records of the first
            step.write_sampling(batch, self.offsets["sampling"])
        if paged.paging is not paging:
            assert len(paging.words) <= self._max_pages, "more pages than the tables hold"
            at = self.offsets["pages"]
            paged.words[at : at + len(paging.words)] = paging.words
            paged.paging = paging
        changed = False
        for window in self.windows:
            changed |= self._write_blocks(step, batch, window, paged.address + 8 * self.offsets["pages"], ahead)
        return changed

    def _write_blocks(self, step: StepTables, batch: Batch, window: int, pages: int, ahead: int) -> bool:
        """Writes blocks of attention and entries of merge for layers of one window; whether they are new ones."""
        past = batch.past_tokens + ahead
        blocks = self._blocks(batch, past, window, ahead)
        at = self.offsets[f"attention:{window}"]
        entries = step.words[at : at + blocks.entries.size].reshape(blocks.entries.shape)
        changed = step.blocks.get(window) is not blocks
        if changed:
            entries[:] = blocks.entries
            entries[:, :, 4] += pages
            at = self.offsets[f"merge:{window}"]
            step.words[at : at + blocks.merges.size] = blocks.merges.reshape(-1)
            step.blocks[window] = blocks
        entries[:, :, 3] = (blocks.offsets + blocks.own * past[blocks.owners])[:, None]
        return changed

    def _blocks(self, batch: Batch, past: Words, window: int, ahead: int) -> Blocks:
        """Blocks of a batch, of those that were made for these page tables or new."""
        last = past + batch.new_tokens - 1
        marks = [last // SEGMENT_TOKENS]
        if window:
            lowest = np.maximum(0, past - window + 1)
            marks += [lowest // SEGMENT_TOKENS, -(-lowest // SEGMENT_TOKENS)]
        if not batch.decodes:
            marks += [batch.new_tokens, past]
        key = (window, b"".join(each.tobytes() for each in marks))
        known = batch.paging.blocks
        blocks = known.get(key)
        if blocks is None:
            if len(known) >= _BLOCKS_KEPT:
                known.clear()
            shared = batch.shared_pages(ahead)
            # page tables change far more often than what is shared out
            parts_key = (window, key[1] + (b"" if shared is None else (shared // SEGMENT_PAGES).tobytes()))
            if len(self._parts) >= _BLOCKS_KEPT:
                self._parts.clear()
            if parts_key not in self._parts:
                self._parts[parts_key] = attention_parts(
                    self._config, batch.new_tokens, past, window, self._threads, shared_pages=shared
                )
            blocks = known[key] = self._make_blocks(batch, self._parts[parts_key])
        return blocks

    def _make_blocks(self, batch: Batch, parts: AttentionParts) -> Blocks:
        config = self._config
        token_bytes = config.heads * self._state_bytes
        heads = np.arange(config.kv_heads)
        entries: Words = np.zeros((parts.num_blocks, config.kv_heads, ENTRY_WORDS), np.int64)
        entries[:, :, 0] = parts.rows[:, None]
        entries[:, :, 1] = parts.num_rows[:, None]
        entries[:, :, 2] = heads
        entries[:, :, 4] = 8 * batch.paging.starts[parts.owners][:, None]
        entries[:, :, 5] = parts.segments[:, None]
        entries[:, :, 6] = parts.ends[:, None]
        first_states = self._states_address + parts.states * token_bytes
        entries[:, :, 7] = first_states[:, None] + heads * (config.group * self._state_bytes)
        assert entries.shape[0] * entries.shape[1] <= self.max_blocks, "more attention blocks than the tables hold"
        merges: Words = np.zeros((batch.num_tokens, MERGE_ENTRY_WORDS), np.int64)
        merges[:, 0] = self._states_address + parts.row_states * token_bytes
        merges[:, 1] = parts.row_counts
        merges[:, 2] = parts.row_strides * token_bytes
        return Blocks(entries, merges, parts.owners, parts.offsets, parts.own)


def attention_numbers(graph: Sequence[Operation], windows: Sequence[int]) -> dict[int, npt.NDArray[np.intp]]:
    """The numbers of a graph's attention operations, by window."""
    return {
        window: np.array([i for i, op in enumerate(graph) if isinstance(op, Attention) and op.window == window], np.intp)
        for window in windows
    }
