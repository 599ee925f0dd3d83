"""Turns a step's operations into the records that kernels read.

A record has fields that never change (addresses of weights and buffers, widths) and fields that follow from the number
of tokens and of wanted logits; both are computed here, once per shape, as if the tables lay at address 0: a program gets a
copy with its own address added. What changes from step to step (tables, blocks of attention) is `tables.py`'s. Knows
where things lie; decides nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine.tables import Tables
from headrace.kernels.fields import attention, choose, embed, matmul, rope, rows
from headrace.kernels.program import (
    AFTER,
    AHEAD,
    AHEAD_BLOCKS,
    AHEAD_BYTES,
    COMMIT,
    COMPUTE,
    GELU,
    MAX_BLOCKS,
    NONE,
    NUM_BLOCKS,
    OP_FIELDS,
    SILU,
)
from headrace.kernels.runtime import Memory, round_up
from headrace.kernels.tables import state_bytes
from headrace.kv.pages import layer_bytes
from headrace.model.angles import AngleTables
from headrace.model.config import ModelConfig
from headrace.model.graph import Attention, Choose, Embed, Find, Merge, Operation, Product, Rope, Rows, activation_row_bytes
from headrace.model.step import CHOICE_PARTS, PAGE_TOKENS, choice_part, states_buffer_bytes

_ACTIVATIONS = {"": NONE, "silu": SILU, "gelu": GELU}
_BLOCK_BYTES = 64 * 1024  # of weights in a block when one token is computed: a few microseconds of reading
_FEWEST_BLOCKS = 6  # per thread and product, where the matrix has as many groups
_TOKENS_PER_BLOCK = 8  # of row-wise work
_SCRATCH_TOKENS = 256  # tokens of a product's block at most
_SCRATCH_BYTES = 1 << 20
_SHAPES_KEPT = 80  # every number of sequences that decode together, and some chunks of prompts


@dataclass(frozen=True)
class Places:
    """Where a model's weights lie: addresses of matrices and vectors by name; tables of rope angles."""

    matrices: Mapping[str, int]
    vectors: Mapping[str, int]
    angles: AngleTables


class Buffers:
    """The rows of activations that operations pass on, see `model/graph.py`; addresses and strides by name."""

    def __init__(self, config: ModelConfig, graph: tuple[Operation, ...], max_tokens: int, max_outputs: int) -> None:
        self.strides = _strides(config, graph)
        self.states_bytes = states_buffer_bytes(config)
        of_outputs = ("last", "logits", "scores")
        sizes = {name: stride * (max_outputs if name in of_outputs else max_tokens) for name, stride in self.strides.items()}
        sizes["states"] = self.states_bytes
        self.offsets: dict[str, int] = {}
        offset = 0
        for name, size in sizes.items():
            self.offsets[name] = offset
            offset += round_up(size, 4096)
        self.memory = Memory(offset)
        # what `find` says of the parts of each row; no activations, and written and read within one step
        self.parts = Memory(max_outputs * CHOICE_PARTS * choose.part_bytes(choice_part(config.vocabulary)))
        width = self.strides["logits"] // 4
        self._logits = self.memory.floats(self.offsets["logits"], max_outputs * width).reshape(max_outputs, width)

    def address(self, name: str) -> int:
        """Where a buffer starts."""
        return self.memory.address + self.offsets[name]

    def logits(self, num_outputs: int, vocabulary: int) -> npt.NDArray[np.float32]:
        """The logits rows of the last step: a view, float32 [num_outputs, V]."""
        return self._logits[:num_outputs, :vocabulary]


def _strides(config: ModelConfig, graph: tuple[Operation, ...]) -> dict[str, int]:
    strides = {"x0": 4 * config.embedding_width, "x1": 4 * config.embedding_width}
    strides["queries"] = 4 * config.heads * config.head_width

    def widen(name: str, num_bytes: int) -> None:
        strides[name] = max(strides.get(name, 0), num_bytes)

    for op in graph:
        if isinstance(op, Product):
            width = op.matrix.groups * 16 // (2 if op.activation else 1)
            widen(op.output, 4 * op.at + 4 * width)
        elif isinstance(op, Rows):
            widen(op.output, sum(activation_row_bytes(op.columns, quantised=op.quantised, floats=op.floats)))
        elif isinstance(op, Merge):
            columns = config.heads * config.head_width
            widen("attended", sum(activation_row_bytes(columns, quantised=op.quantised, floats=op.floats)))
    strides["scores"] = strides["logits"]
    return strides


def _bits(value: float) -> int:
    """The bits of a float32, as the kernels take scalars."""
    number: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return number


@dataclass(frozen=True, eq=False)
class Records:
    """Records of a step of one shape, int64 [num_ops, OP_FIELDS], and which of all their fields are addresses of tables."""

    ops: npt.NDArray[np.int64]
    table_fields: npt.NDArray[np.intp]

    def copy_to(self, target: npt.NDArray[np.int64], base: int, first: int = 0) -> None:
        """Writes them for tables at an address, and for a program in which `first` operations come before them."""
        target[:] = self.ops
        target.reshape(-1)[self.table_fields] += base
        target[:, AFTER // 8] += first


class RecordBuilder:
    """Records for steps of any number of tokens and outputs; the graph's last operation is to choose tokens."""

    def __init__(
        self,
        config: ModelConfig,
        graph: tuple[Operation, ...],
        places: Places,
        buffers: Buffers,
        tables: Tables,
        address_of: Callable[[str], int],
        threads: int,
    ) -> None:
        self._config, self._graph, self._places, self._buffers = config, graph, places, buffers
        self._tables, self._address_of, self._threads = tables, address_of, threads
        self._forms = _forms(config, graph)
        self._known: dict[tuple[int, int], Records] = {}
        head = (index for index, op in enumerate(graph) if isinstance(op, Rows | Product) and op.last_rows)
        self.body_length = next(head)
        """Operations of a step that needs no logits."""
        # the fields that move with the tables do so in every shape
        self._table_fields = np.flatnonzero(self._build(1, 1, 8) - self._build(1, 1, 0))

    def records(self, tokens: int, outputs: int) -> Records:
        """Records of a step of some shape; those of `body_length` operations if it has no outputs."""
        found = self._known.pop((tokens, outputs), None)
        if found is None:
            if len(self._known) >= _SHAPES_KEPT:
                del self._known[next(iter(self._known))]
            length = len(self._graph) if outputs else self.body_length
            ops = self._build(tokens, max(outputs, 1), 0)[:length]
            found = Records(ops, self._table_fields[self._table_fields < ops.size])
        self._known[tokens, outputs] = found
        return found

    def _build(self, tokens: int, outputs: int, base: int) -> npt.NDArray[np.int64]:
        """Records [num_ops, OP_FIELDS] for tables at `base`; attention's blocks are left at 0."""
        records = np.zeros((len(self._graph), OP_FIELDS), np.int64)
        after = 0
        for index, op in enumerate(self._graph):
            if op.waits:
                after = index
            kernel, commit, fields = self._fields(op, tokens, outputs, base)
            record = records[index]
            record[COMPUTE // 8], record[COMMIT // 8] = self._address_of(kernel), self._address_of(commit)
            record[AFTER // 8] = after
            for offset, value in fields.items():
                record[offset // 8] = value
        if tokens == 1:
            self._ask_ahead(records)
        assert int(records[:, NUM_BLOCKS // 8].max()) <= MAX_BLOCKS, "an operation has too many blocks"
        return records

    def _ask_ahead(self, records: npt.NDArray[np.int64]) -> None:
        """Tells every operation where the next product's weights lie; after the last one that is the next step's first."""
        ahead = (0, 0, 0)
        for index in reversed([*range(len(records)), *range(len(records))]):
            op, record = self._graph[index], records[index]
            if isinstance(op, Product):
                block_bytes = int(record[matmul.BLOCK_GROUPS // 8] * record[matmul.UNITS // 8]) * op.matrix.layout.unit_bytes
                ahead = (int(record[matmul.WEIGHTS // 8]), block_bytes, int(record[NUM_BLOCKS // 8]))
            record[AHEAD // 8], record[AHEAD_BYTES // 8], record[AHEAD_BLOCKS // 8] = ahead

    def max_flags(self, max_tokens: int, max_outputs: int) -> int:
        """Flags that a program for any number of tokens up to `max_tokens` needs."""
        shapes = [(1, 1), (max_tokens, max_outputs), (min(16, max_tokens), min(16, max_outputs))]
        most = max(int(self._build(*shape, 0)[:, NUM_BLOCKS // 8].sum()) for shape in shapes)
        attentions = sum(isinstance(op, Attention) for op in self._graph)
        return 2 * most + attentions * self._tables.max_blocks

    def scratch_bytes(self) -> int:
        """Scratch that a thread needs for the largest block of any operation."""
        config = self._config
        widest = max(config.embedding_width, config.feed_forward_width, config.heads * config.head_width)
        row_work = (_TOKENS_PER_BLOCK + 1) * 4 * widest * 4
        attention_rows = max(64, config.group)
        attend = attention_rows * (state_bytes(config.head_width) + 4 * config.head_width) + (1 << 14)
        attend += 16 * config.head_width
        ropes = _TOKENS_PER_BLOCK * 8 * config.head_width * (config.heads + 2 * config.kv_heads)
        return max(_SCRATCH_BYTES + (1 << 16), row_work, attend, ropes, choose.scratch_bytes(config.vocabulary, CHOICE_PARTS))

    def _fields(self, op: Operation, tokens: int, outputs: int, base: int) -> tuple[str, str, dict[int, int]]:
        if isinstance(op, Product):
            return f"matmul:{op.matrix.format}", "matmul.commit", self._product(op, outputs if op.last_rows else tokens)
        if isinstance(op, Rows):
            return "rows", "rows.commit", self._rows(op, outputs if op.last_rows else tokens, base)
        if isinstance(op, Rope):
            return "rope", "rope.commit", self._rope(op, tokens, base)
        if isinstance(op, Attention):
            return f"attention:{self._config.group}", "attention.commit", self._attention(op, base)
        if isinstance(op, Merge):
            return "merge", "merge.commit", self._merge(op, tokens, base)
        if isinstance(op, Find):
            return "find", "find.commit", {NUM_BLOCKS: CHOICE_PARTS * outputs, **self._choice(base)}
        if isinstance(op, Choose):
            return "choose", "choose.commit", {NUM_BLOCKS: outputs, **self._choice(base)}
        assert isinstance(op, Embed)
        return f"embed:{op.matrix.format}", "embed.commit", self._embed(op, tokens, base)

    def _product(self, op: Product, tokens: int) -> dict[int, int]:
        matrix, layout = op.matrix, op.matrix.layout
        units = matrix.columns // layout.unit_columns
        group_step = 2 if op.activation else 1
        token_step = min(tokens, _SCRATCH_TOKENS)
        if tokens == 1:
            groups = max(1, _BLOCK_BYTES // (units * layout.unit_bytes))
            groups = min(groups, max(1, matrix.groups // (_FEWEST_BLOCKS * self._threads)))
        else:
            groups = max(1, min(_SCRATCH_BYTES // (64 * token_step), 16))
            groups = min(groups, max(1, matrix.groups // (_FEWEST_BLOCKS * self._threads)))
        groups = max(groups, -(-matrix.groups // (MAX_BLOCKS // 4)))
        groups = round_up(groups, group_step)
        form = self._forms[op]
        source = self._buffers.address(op.source)
        return {
            NUM_BLOCKS: -(-matrix.groups // groups) * -(-tokens // token_step),
            matmul.WEIGHTS: self._places.matrices[matrix.name],
            matmul.GROUPS: matrix.groups,
            matmul.UNITS: units,
            matmul.TOKENS: tokens,
            matmul.INPUT: source if layout.integer_activations else source + form[0],
            matmul.INPUT_STRIDE: self._buffers.strides[op.source],
            matmul.RECORDS: matrix.columns,
            matmul.OUTPUT: self._buffers.address(op.output) + 4 * op.at,
            matmul.OUTPUT_STRIDE: self._buffers.strides[op.output],
            matmul.BLOCK_GROUPS: groups,
            matmul.BLOCK_TOKENS: token_step,
            matmul.ACTIVATION: _ACTIVATIONS[op.activation],
        }

    def _rows(self, op: Rows, tokens: int, base: int) -> dict[int, int]:
        vectors, buffers = self._places.vectors, self._buffers
        quantised, floats = activation_row_bytes(op.columns, quantised=op.quantised, floats=op.floats)
        step = 1 if tokens == 1 else _TOKENS_PER_BLOCK
        return {
            NUM_BLOCKS: -(-tokens // step),
            rows.INPUT: buffers.address(op.source),
            rows.INPUT_STRIDE: buffers.strides[op.source],
            rows.COLUMNS: op.columns,
            rows.TOKENS: tokens,
            rows.BLOCK_TOKENS: step,
            rows.ROW_TABLE: base + 8 * self._tables.offsets["outputs"] if op.last_rows else 0,
            rows.ADDEND: buffers.address(op.addend) if op.addend else 0,
            rows.ADDEND_STRIDE: buffers.strides[op.addend] if op.addend else 0,
            rows.ADDEND_NORM: vectors[op.addend_norm] if op.addend_norm else 0,
            rows.WEIGHT: vectors[op.weight] if op.weight else 0,
            rows.EPSILON: _bits(self._config.norm_epsilon),
            rows.SUM: buffers.address(op.total) if op.total else 0,
            rows.SUM_STRIDE: buffers.strides[op.total] if op.total else 0,
            rows.OUTPUT: buffers.address(op.output),
            rows.OUTPUT_STRIDE: buffers.strides[op.output],
            rows.QUANTISED: quantised,
            rows.FLOATS: floats,
            rows.COMBINE: _ACTIVATIONS[op.combine],
        }

    def _rope(self, op: Rope, tokens: int, base: int) -> dict[int, int]:
        config, buffers, vectors = self._config, self._buffers, self._places.vectors
        head = 4 * config.head_width
        qkv, stride = buffers.address("qkv"), buffers.strides["qkv"]
        number = config.layers[op.layer].rope
        step = 1 if tokens == 1 else _TOKENS_PER_BLOCK
        return {
            NUM_BLOCKS: -(-tokens // step),
            rope.QUERIES: qkv,
            rope.QUERIES_STRIDE: stride,
            rope.KEYS: qkv + config.heads * head,
            rope.KEYS_STRIDE: stride,
            rope.VALUES: qkv + (config.heads + config.kv_heads) * head,
            rope.VALUES_STRIDE: stride,
            rope.QUERY_NORM: vectors[op.query_norm] if op.query_norm else 0,
            rope.KEY_NORM: vectors[op.key_norm] if op.key_norm else 0,
            rope.EPSILON: _bits(config.norm_epsilon),
            rope.HEADS: config.heads,
            rope.KV_HEADS: config.kv_heads,
            rope.WIDTH: config.head_width,
            rope.ROTATED: config.ropes[number].rotated,
            rope.ANGLES: self._places.angles.addresses[number],
            rope.TOKEN_TABLE: base + 8 * self._tables.offsets["tokens"],
            rope.TOKENS: tokens,
            rope.BLOCK_TOKENS: step,
            rope.OUTPUT: buffers.address("queries"),
            rope.OUTPUT_STRIDE: buffers.strides["queries"],
            rope.LAYER_OFFSET: op.layer * layer_bytes(config),
            rope.PAGE_TOKENS: PAGE_TOKENS,
            rope.QUERY_SCALE: _bits(config.query_scale),
        }

    def _attention(self, op: Attention, base: int) -> dict[int, int]:
        config = self._config
        return {
            attention.ENTRIES: base + 8 * self._tables.offsets[f"attention:{op.window}"],
            attention.QUERIES: self._buffers.address("queries"),
            attention.QUERIES_STRIDE: self._buffers.strides["queries"],
            attention.GROUP: config.group,
            attention.WIDTH: config.head_width,
            attention.PAGE_TOKENS: PAGE_TOKENS,
            attention.LAYER_OFFSET: op.layer * layer_bytes(config),
            attention.WINDOW: op.window,
            attention.HEADS: config.heads,
        }

    def _merge(self, op: Merge, tokens: int, base: int) -> dict[int, int]:
        config = self._config
        columns = config.heads * config.head_width
        quantised, floats = activation_row_bytes(columns, quantised=op.quantised, floats=op.floats)
        step = 1 if tokens == 1 else _TOKENS_PER_BLOCK
        window = config.layers[op.layer].window
        return {
            NUM_BLOCKS: -(-tokens // step),
            attention.MERGE_ENTRIES: base + 8 * self._tables.offsets[f"merge:{window}"],
            attention.MERGE_HEADS: config.heads,
            attention.MERGE_WIDTH: config.head_width,
            attention.MERGE_TOKENS: tokens,
            attention.MERGE_BLOCK_TOKENS: step,
            attention.MERGE_OUTPUT: self._buffers.address("attended"),
            attention.MERGE_OUTPUT_STRIDE: self._buffers.strides["attended"],
            attention.MERGE_QUANTISED: quantised,
            attention.MERGE_FLOATS: floats,
        }

    def _choice(self, base: int) -> dict[int, int]:
        """What `find` and `choose` share; the program says which step this is, and where chosen tokens are looked up next."""
        offsets = self._tables.offsets
        return {
            choose.LOGITS: self._buffers.address("logits"),
            choose.STRIDE: self._buffers.strides["logits"],
            choose.COUNT: self._config.vocabulary,
            choose.PART: choice_part(self._config.vocabulary),
            choose.NUM_PARTS: CHOICE_PARTS,
            choose.PARTS: self._buffers.parts.address,
            choose.SCORES: self._buffers.address("scores"),
            choose.SAMPLES: base + 8 * offsets["sampling"],
            choose.CHOSEN: base + 8 * offsets["chosen"],
            choose.ROW_TABLE: base + 8 * offsets["outputs"],
            choose.DRAW: self._address_of("choose.draw"),
            choose.DRAW_FLAT: self._address_of("choose.draw_flat"),
        }

    def _embed(self, op: Embed, tokens: int, base: int) -> dict[int, int]:
        return {
            NUM_BLOCKS: tokens,
            embed.WEIGHTS: self._places.matrices[op.matrix.name],
            embed.UNITS: op.matrix.columns // op.matrix.layout.unit_columns,
            embed.COLUMNS: op.matrix.columns,
            embed.TOKEN_TABLE: base + 8 * self._tables.offsets["tokens"],
            embed.TOKENS: tokens,
            embed.SCALE: _bits(self._config.embedding_scale),
            embed.OUTPUT: self._buffers.address(op.output),
            embed.OUTPUT_STRIDE: self._buffers.strides[op.output],
        }


def _forms(config: ModelConfig, graph: tuple[Operation, ...]) -> dict[Product, tuple[int, int]]:
    """Bytes of the two parts of the activation rows that each product reads.

    A buffer's rows have other parts in each layer, if the formats of the matrices that read it differ.
    """
    forms: dict[Product, tuple[int, int]] = {}
    written: dict[str, tuple[int, int]] = {}
    for op in graph:
        if isinstance(op, Rows):
            written[op.output] = activation_row_bytes(op.columns, quantised=op.quantised, floats=op.floats)
        elif isinstance(op, Merge):
            columns = config.heads * config.head_width
            written["attended"] = activation_row_bytes(columns, quantised=op.quantised, floats=op.floats)
        elif isinstance(op, Product):
            forms[op] = written[op.source]
    return forms


def kernels_of(graph: tuple[Operation, ...], group: int) -> list[str]:
    """The kernels that a graph's steps call; `group` query heads share a KV head."""
    names = ["rows", "rows.commit", "rope", "rope.commit", "attention.commit", "merge", "merge.commit"]
    names += [f"attention:{group}", "matmul.commit", "embed.commit"]
    for op in graph:
        if isinstance(op, Find):
            names += ["find", "find.commit", "choose", "choose.commit", "choose.draw", "choose.draw_flat"]
        elif isinstance(op, Product):
            names.append(f"matmul:{op.matrix.format}")
        elif isinstance(op, Embed):
            names.append(f"embed:{op.matrix.format}")
    return list(dict.fromkeys(names))
