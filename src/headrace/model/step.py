"""The step and its ledger: for any batch, what each operation computes and which bytes it moves.

Every reader of a step shares these rows: the engine books them for each answer, with the time that was measured for each
operation (`engine/accounts.py`), and `headrace run --stats` and `bench` show them beside the machine's bandwidth.

Bytes are those that an operation's kernel touches outside its thread's own scratch, each address once per operation;
a test counts them by an instrumented build. Two things are taken as a whole: the 16-byte record of a block of quantised
activations, of which each format reads other fields, and the tokens of a batch, as if no two had one id or position.
Sharing work out among threads is part of a step, since attention's partial states are bytes too: `attention_parts`
decides it, and the engine follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from headrace.kernels.fields.choose import STRETCH
from headrace.kernels.packed import quantised_row_bytes
from headrace.kernels.page_formats import F16, FORMAT_NAMES, used_bytes
from headrace.kernels.tables import SEGMENT_TOKENS, state_bytes
from headrace.model.attention_parts import MAX_STEP_TOKENS, PAGE_TOKENS, attention_parts, states_buffer_bytes
from headrace.model.config import ModelConfig
from headrace.model.graph import Attention, Choose, Embed, Find, Merge, Operation, Product, Rope, Rows, activation_row_bytes

__all__ = [
    "CHOICE_PARTS",
    "MAX_STEP_TOKENS",
    "PAGE_TOKENS",
    "LedgerRow",
    "LedgerTotals",
    "SequenceStep",
    "StepLedger",
    "choice_part",
    "states_buffer_bytes",
]
CHOICE_PARTS = 16  # blocks that look at each row of logits whose token is chosen


@dataclass(frozen=True)
class SequenceStep:
    """One sequence's part of a step: `new_tokens` on top of `past_tokens`, logits of the last `outputs` of them.

    `chosen`: the step also chooses the tokens that follow; `edited`: from logits with biases, penalties or a mask.
    `page_formats`: the formats of the sequence's pages, from the first one on; pages that are not named are f16, as those
    are that new tokens go to. `shared_pages`: the leading pages that are the same as those of the sequence before it in the
    batch.
    """

    new_tokens: int
    past_tokens: int = 0
    outputs: int = 1
    chosen: bool = False
    edited: bool = False
    page_formats: tuple[int, ...] = ()
    shared_pages: int = 0


@dataclass(frozen=True)
class LedgerRow:
    """One operation of a step. `time_us` is None until it was measured."""

    operation: str
    layer: int
    format: str
    macs: int = 0
    weight_bytes: int = 0
    kv_read_bytes: int = 0
    kv_write_bytes: int = 0
    activation_bytes: int = 0
    time_us: float | None = None

    @property
    def total_bytes(self) -> int:
        """All classes together."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes


@dataclass(frozen=True)
class LedgerTotals:
    """Sums over ledger rows of one or more steps: what they cost to move and to compute."""

    steps: int = 0
    macs: int = 0
    weight_bytes: int = 0
    kv_read_bytes: int = 0
    kv_write_bytes: int = 0
    activation_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All classes together."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes

    def __add__(self, other: LedgerTotals) -> LedgerTotals:
        return LedgerTotals(
            self.steps + other.steps,
            self.macs + other.macs,
            self.weight_bytes + other.weight_bytes,
            self.kv_read_bytes + other.kv_read_bytes,
            self.kv_write_bytes + other.kv_write_bytes,
            self.activation_bytes + other.activation_bytes,
        )


def choice_part(vocabulary: int) -> int:
    """Values in a part of a row of logits."""
    return -(-vocabulary // (CHOICE_PARTS * STRETCH)) * STRETCH


class StepLedger:
    """The ledger of one model on a team of a number of threads."""

    def __init__(self, config: ModelConfig, graph: tuple[Operation, ...], threads: int) -> None:
        self._config, self._graph, self._threads = config, graph, threads
        self._attention_layers: dict[int, int] = {}
        for op in graph:
            if isinstance(op, Attention):
                self._attention_layers[op.window] = self._attention_layers.get(op.window, 0) + 1
        self._page_bytes = tuple(
            config.kv_heads * used_bytes(page_format, config.head_width, PAGE_TOKENS)
            for page_format in range(len(FORMAT_NAMES))
        )
        self._fixed = lru_cache(maxsize=1024)(self._fixed_totals)
        self._shared_out = lru_cache(maxsize=1024)(self._share_out)

    def rows(self, batch: Sequence[SequenceStep]) -> tuple[LedgerRow, ...]:
        """One row per operation, in the order of the step; choosing a token only where it is done."""
        return tuple(self._row(op, batch) for op in self._graph if _takes_part(op, batch))

    def totals(self, batch: Sequence[SequenceStep]) -> LedgerTotals:
        """The sum of `rows`, quicker: what does not depend on the past is remembered."""
        tokens = sum(part.new_tokens for part in batch)
        chosen = tuple(sum(part.outputs for part in batch if part.chosen and part.edited == edited) for edited in (False, True))
        total = self._fixed(tokens, sum(part.outputs for part in batch), chosen)
        for window, layers in self._attention_layers.items():
            for row in (self._attention(window, batch), self._merge_reads(window, batch)):
                total = replace(
                    total,
                    macs=total.macs + layers * row.macs,
                    kv_read_bytes=total.kv_read_bytes + layers * row.kv_read_bytes,
                    activation_bytes=total.activation_bytes + layers * row.activation_bytes,
                )
        return total

    def _fixed_totals(self, tokens: int, outputs: int, chosen: tuple[int, ...]) -> LedgerTotals:
        """`chosen`: rows whose token is chosen, from logits as they are and from edited ones."""
        plain, edited = chosen
        batch = (
            SequenceStep(tokens, 0, outputs - plain - edited),
            SequenceStep(0, 0, plain, chosen=plain > 0),
            SequenceStep(0, 0, edited, chosen=edited > 0, edited=True),
        )
        total = LedgerTotals(steps=1)
        for op in self._graph:
            if isinstance(op, Attention) or not _takes_part(op, batch):
                continue
            row = self._merge_writes(op, batch) if isinstance(op, Merge) else self._row(op, batch)
            total += LedgerTotals(0, row.macs, row.weight_bytes, 0, row.kv_write_bytes, row.activation_bytes)
        return total

    def _row(self, op: Operation, batch: Sequence[SequenceStep]) -> LedgerRow:
        tokens = sum(part.new_tokens for part in batch)
        outputs = sum(part.outputs for part in batch)
        if isinstance(op, Product):
            return self._product(op, outputs if op.last_rows else tokens)
        if isinstance(op, Rows):
            return self._rows(op, outputs if op.last_rows else tokens)
        if isinstance(op, Rope):
            return self._rope(op, tokens)
        if isinstance(op, Attention):
            return replace(self._attention(op.window, batch), layer=op.layer)
        if isinstance(op, Merge):
            window = self._config.layers[op.layer].window
            reads, writes = self._merge_reads(window, batch), self._merge_writes(op, batch)
            return replace(writes, activation_bytes=reads.activation_bytes + writes.activation_bytes)
        if isinstance(op, Find):
            # reads the logits, and writes scores where a row has edits
            rows = sum(part.outputs * (2 if part.edited else 1) for part in batch if part.chosen)
            return LedgerRow(op.name, op.layer, "f32", activation_bytes=4 * self._config.vocabulary * rows)
        if isinstance(op, Choose):
            # what is known of parts lies beside the activations, and how many candidates a draw looks at is up to the logits
            return LedgerRow(op.name, op.layer, "f32")
        assert isinstance(op, Embed)
        row_bytes = op.matrix.columns // op.matrix.layout.unit_columns * op.matrix.layout.unit_bytes // 16
        written = 4 * tokens * op.matrix.columns
        return LedgerRow(op.name, op.layer, op.matrix.format, weight_bytes=tokens * row_bytes, activation_bytes=written)

    @staticmethod
    def _product(op: Product, tokens: int) -> LedgerRow:
        matrix = op.matrix
        read = quantised_row_bytes(matrix.columns) if matrix.layout.integer_activations else 4 * matrix.columns
        written = 64 * matrix.groups // (2 if op.activation else 1)
        return LedgerRow(
            op.name,
            op.layer,
            matrix.format,
            macs=tokens * matrix.rows * matrix.columns,
            weight_bytes=matrix.num_bytes,
            activation_bytes=tokens * (read + written),
        )

    @staticmethod
    def _rows(op: Rows, tokens: int) -> LedgerRow:
        row = 4 * op.columns
        written = sum(activation_row_bytes(op.columns, quantised=op.quantised, floats=op.floats))
        moved = row * (1 + bool(op.addend) + bool(op.total)) + written
        weights = row * (bool(op.weight) + bool(op.addend_norm))
        return LedgerRow(op.name, op.layer, "f32", weight_bytes=weights, activation_bytes=tokens * moved)

    def _rope(self, op: Rope, tokens: int) -> LedgerRow:
        config = self._config
        head = 4 * config.head_width
        angles = 4 * config.ropes[config.layers[op.layer].rope].rotated
        moved = head * (2 * config.heads + 2 * config.kv_heads) + angles
        return LedgerRow(
            op.name,
            op.layer,
            "f32",
            weight_bytes=head * (bool(op.query_norm) + bool(op.key_norm)),
            kv_write_bytes=tokens * head * config.kv_heads,
            activation_bytes=tokens * moved,
        )

    def _states(self, window: int, batch: Sequence[SequenceStep]) -> tuple[int, ...]:
        """How many partial states a row of each sequence has."""
        pasts = tuple(_shared_out_alike(part, window) for part in batch)
        return self._shared_out(
            window, tuple(part.new_tokens for part in batch), pasts, tuple(part.shared_pages for part in batch)
        )

    def _share_out(self, window: int, new: tuple[int, ...], past: tuple[int, ...], shared: tuple[int, ...]) -> tuple[int, ...]:
        new_tokens, pages = np.array(new, np.int64), np.array(shared, np.int64) if any(shared) else None
        parts = attention_parts(self._config, new_tokens, np.array(past, np.int64), window, self._threads, shared_pages=pages)
        return tuple(parts.row_counts[np.cumsum(new_tokens) - new_tokens].tolist())

    def _attention(self, window: int, batch: Sequence[SequenceStep]) -> LedgerRow:
        config = self._config
        visible = states = 0
        for part, row_states in zip(batch, self._states(window, batch), strict=True):
            visible += _visible_tokens(part.past_tokens, part.past_tokens + part.new_tokens, window)
            states += part.new_tokens * row_states
        tokens = sum(part.new_tokens for part in batch)
        return LedgerRow(
            "attention",
            -1,
            "f16",
            macs=2 * visible * config.heads * config.head_width,
            kv_read_bytes=self._shared_bytes(window, batch)
            if any(part.shared_pages for part in batch[1:])
            else sum(self._read_bytes(part.page_formats, *_seen_pages(part, window)) for part in batch),
            activation_bytes=config.heads * (4 * tokens * config.head_width + states * state_bytes(config.head_width)),
        )

    def _shared_bytes(self, window: int, batch: Sequence[SequenceStep]) -> int:
        """Bytes of one layer of all pages that the sequences see, shared ones once."""
        seen = np.zeros(max(_seen_pages(part, window)[1] for part in batch), bool)
        read = 0
        for part in batch:
            # what was seen so far of pages that are this sequence's too
            seen[part.shared_pages :] = False
            first, end = _seen_pages(part, window)
            fresh = first + np.flatnonzero(~seen[first:end])
            named = [part.page_formats[page] for page in fresh[fresh < len(part.page_formats)].tolist()]
            read += sum(self._page_bytes[page_format] for page_format in named)
            read += (len(fresh) - len(named)) * self._page_bytes[F16]
            seen[first:end] = True
        return read

    def _read_bytes(self, page_formats: tuple[int, ...], first: int, end: int) -> int:
        """Bytes of one layer of the pages [first, end)."""
        named = page_formats[first:end]
        compressed = sum(
            named.count(page_format) * (num_bytes - self._page_bytes[F16])
            for page_format, num_bytes in enumerate(self._page_bytes)
        )
        return (end - first) * self._page_bytes[F16] + compressed

    def _merge_reads(self, window: int, batch: Sequence[SequenceStep]) -> LedgerRow:
        """Maximum and sum of every state, and the output of those that are not of a segment the token does not see."""
        states = outputs = 0
        for part, row_states in zip(batch, self._states(window, batch), strict=True):
            states += part.new_tokens * row_states
            outputs += _seen_segments(part, window) if row_states > 1 else part.new_tokens
        read = self._config.heads * (8 * states + 4 * self._config.head_width * outputs)
        return LedgerRow("merge", -1, "f32", activation_bytes=read)

    def _merge_writes(self, op: Operation, batch: Sequence[SequenceStep]) -> LedgerRow:
        assert isinstance(op, Merge)
        tokens = sum(part.new_tokens for part in batch)
        columns = self._config.heads * self._config.head_width
        written = tokens * sum(activation_row_bytes(columns, quantised=op.quantised, floats=op.floats))
        return LedgerRow(op.name, op.layer, "f32", activation_bytes=written)


def _takes_part(op: Operation, batch: Sequence[SequenceStep]) -> bool:
    """A step that needs no logits ends before them; a token is chosen only where that is said."""
    if isinstance(op, Find | Choose):
        return any(part.chosen and part.outputs for part in batch)
    return not (isinstance(op, Rows | Product) and op.last_rows) or any(part.outputs for part in batch)


def _shared_out_alike(part: SequenceStep, window: int) -> int:
    """The shortest past with which attention is shared out as with this one, so that steps in a row look it up."""
    past = part.past_tokens
    if part.new_tokens > 1:
        return past
    # where the token begins a segment, and where its window begins to leave one or has left it
    events = (0, window - 1, window) if window else (0,)
    return max(event + (past - event) // SEGMENT_TOKENS * SEGMENT_TOKENS for event in events if event <= past)


def _seen_pages(part: SequenceStep, window: int) -> tuple[int, int]:
    """The pages [first, end) that the new tokens see something of."""
    lowest = max(0, part.past_tokens - window + 1) if window else 0
    return lowest // PAGE_TOKENS, (part.past_tokens + part.new_tokens - 1) // PAGE_TOKENS + 1


def _visible_tokens(first: int, end: int, window: int) -> int:
    """The tokens that the queries at positions [first, end) see, themselves included, added up."""
    if not window:
        return (end * (end + 1) - first * (first + 1)) // 2
    return sum(min(position + 1, window) for position in range(first, end))


def _seen_segments(part: SequenceStep, window: int) -> int:
    """The segments that each new token sees something of, added up."""
    positions = range(part.past_tokens, part.past_tokens + part.new_tokens)
    lowest = (max(0, position - window + 1) if window else 0 for position in positions)
    return sum(position // SEGMENT_TOKENS + 1 - low // SEGMENT_TOKENS for position, low in zip(positions, lowest, strict=True))
