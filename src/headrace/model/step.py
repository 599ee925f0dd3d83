"""The step and its ledger: for any batch, what each operation computes and which bytes it moves.

Every reader of a step shares these rows: the engine fills in measured time, `explain` compares them with the machine,
`plan` prices them elsewhere, `fabric` maps the kernels behind them.

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

from headrace.kernels.packed import quantised_row_bytes
from headrace.kernels.page_formats import F16, FORMAT_NAMES, used_bytes
from headrace.kernels.tables import SEGMENT_TOKENS, state_bytes
from headrace.model.config import ModelConfig
from headrace.model.graph import Attention, Choose, Embed, Find, Merge, Operation, Product, Rope, Rows, activation_row_bytes

PAGE_TOKENS = 32
"""Tokens in a page of keys and values."""
ATTENTION_ROWS = 48  # query rows in a block of attention, about
_BLOCKS_PER_THREAD = 4
MAX_STEP_TOKENS = 256
_MIN_STATES_BYTES = 16 << 20
CHOICE_PARTS = 16  # blocks that look for the most likely token


@dataclass(frozen=True)
class SequenceStep:
    """One sequence's part of a step: `new_tokens` on top of `past_tokens`, logits of the last `outputs` of them.

    `chosen`: the step also chooses the most likely token. `page_formats`: the formats of the sequence's pages, from the
    first one on; pages that are not named are f16, as those are that new tokens go to.
    """

    new_tokens: int
    past_tokens: int = 0
    outputs: int = 1
    chosen: bool = False
    page_formats: tuple[int, ...] = ()


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


@dataclass(frozen=True)
class AttentionParts:
    """How one sequence's attention is shared out in layers of one window.

    `tiles` blocks of `tile_tokens` tokens for each KV head, over segments [first_segment, first_segment + segments) of
    256 tokens; each segment is a block of its own if `split`.
    """

    tile_tokens: int
    tiles: int
    first_segment: int
    segments: int
    split: bool

    @property
    def states(self) -> int:
        """Partial states of each row."""
        return self.segments if self.split else 1


def states_buffer_bytes(config: ModelConfig) -> int:
    """Room for attention's partial states: one for each token of the largest step, and enough to split long pasts."""
    return max(MAX_STEP_TOKENS * config.heads * state_bytes(config.head_width), _MIN_STATES_BYTES)


def attention_parts(
    config: ModelConfig, part: SequenceStep, window: int, threads: int, states_budget_bytes: int
) -> AttentionParts:
    """Shares out attention: segments become blocks of their own where tiles alone would leave threads idle."""
    tile_tokens = max(1, ATTENTION_ROWS // config.group)
    tiles = -(-part.new_tokens // tile_tokens)
    last = part.past_tokens + part.new_tokens - 1
    first_segment = max(0, part.past_tokens - window + 1) // SEGMENT_TOKENS if window else 0
    segments = last // SEGMENT_TOKENS + 1 - first_segment
    extra = (segments - 1) * part.new_tokens * config.heads * state_bytes(config.head_width)
    few = tiles * config.kv_heads < _BLOCKS_PER_THREAD * threads
    return AttentionParts(tile_tokens, tiles, first_segment, segments, few and segments > 1 and extra <= states_budget_bytes)


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

    def rows(self, batch: Sequence[SequenceStep]) -> tuple[LedgerRow, ...]:
        """One row per operation, in the order of the step; choosing a token only where it is done."""
        return tuple(self._row(op, batch) for op in self._graph if _takes_part(op, batch))

    def totals(self, batch: Sequence[SequenceStep]) -> LedgerTotals:
        """The sum of `rows`, quicker: what does not depend on the past is remembered."""
        tokens = sum(part.new_tokens for part in batch)
        total = self._fixed(tokens, sum(part.outputs for part in batch), any(part.chosen for part in batch))
        for window, layers in self._attention_layers.items():
            for row in (self._attention(window, batch), self._merge_reads(window, batch)):
                total = replace(
                    total,
                    macs=total.macs + layers * row.macs,
                    kv_read_bytes=total.kv_read_bytes + layers * row.kv_read_bytes,
                    activation_bytes=total.activation_bytes + layers * row.activation_bytes,
                )
        return total

    def _fixed_totals(self, tokens: int, outputs: int, chosen: bool) -> LedgerTotals:
        batch = (SequenceStep(tokens, 0, outputs, chosen),)
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
            return LedgerRow(op.name, op.layer, "f32", activation_bytes=4 * self._config.vocabulary)
        if isinstance(op, Choose):
            # the parts' winners lie with the program, as ids and tables do
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

    def _parts(self, window: int, batch: Sequence[SequenceStep]) -> list[AttentionParts]:
        config, made = self._config, []
        rows = sum(part.new_tokens for part in batch)
        size = config.heads * state_bytes(config.head_width)
        budget = states_buffer_bytes(config) - rows * size
        for part in batch:
            parts = attention_parts(config, part, window, self._threads, budget)
            budget -= (parts.states - 1) * part.new_tokens * size
            made.append(parts)
        return made

    def _attention(self, window: int, batch: Sequence[SequenceStep]) -> LedgerRow:
        config = self._config
        visible = read = states = 0
        for part, parts in zip(batch, self._parts(window, batch), strict=True):
            first, end = part.past_tokens, part.past_tokens + part.new_tokens
            visible += _visible_tokens(first, end, window)
            lowest = max(0, first - window + 1) if window else 0
            read += self._read_bytes(part.page_formats, lowest // PAGE_TOKENS, (end - 1) // PAGE_TOKENS + 1)
            states += part.new_tokens * parts.states
        tokens = sum(part.new_tokens for part in batch)
        return LedgerRow(
            "attention",
            -1,
            "f16",
            macs=2 * visible * config.heads * config.head_width,
            kv_read_bytes=read,
            activation_bytes=config.heads * (4 * tokens * config.head_width + states * state_bytes(config.head_width)),
        )

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
        for part, shared in zip(batch, self._parts(window, batch), strict=True):
            states += part.new_tokens * shared.states
            outputs += _seen_segments(part, window) if shared.split else part.new_tokens
        read = self._config.heads * (8 * states + 4 * self._config.head_width * outputs)
        return LedgerRow("merge", -1, "f32", activation_bytes=read)

    def _merge_writes(self, op: Operation, batch: Sequence[SequenceStep]) -> LedgerRow:
        assert isinstance(op, Merge)
        tokens = sum(part.new_tokens for part in batch)
        columns = self._config.heads * self._config.head_width
        written = tokens * sum(activation_row_bytes(columns, quantised=op.quantised, floats=op.floats))
        return LedgerRow(op.name, op.layer, "f32", activation_bytes=written)


def _takes_part(op: Operation, batch: Sequence[SequenceStep]) -> bool:
    return not isinstance(op, Find | Choose) or any(part.chosen for part in batch)


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
