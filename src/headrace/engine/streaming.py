"""Steps whose past is not all in memory: what is missing is read layer by layer while the step runs.

A step is cut into pieces before each attention. A reader fills one half of a staging buffer while the team works with
the other; before a piece runs, the words of the cold pages in its page table point into the staging buffer:

    reader   [layer 0, half 0][layer 1, half 1]        [layer 2, half 0]       [layer 3, half 1] ...
    team     [embed .. rope 0][attention 0 .. rope 1  ][attention 1 .. rope 2 ][attention 2 .. rope 3 ] ...

Where pages are read by somebody else, into memory of their own (`arrival.py`), pieces wait for them, and that is all.
Layers with a window read the pages of their window only; small layers are read several at a time. The bits are those of
the same step with all pages in memory: attention finds the same bytes at other addresses.

Invariants: a page table, one for even attentions and one for odd ones, is changed only while nobody can be inside a piece
that reads it. A half is filled anew only when the attentions that read it are complete (what a late thread still reads of
it, it drops), and freed only when nobody is inside any piece. A step that failed can be repeated: it has written nothing
but activations and, in their pages, the slots of its own new tokens. Knows neither where cold pages are kept nor why.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.engine.batch import Arriving, Batch, ColdPages, Slice, Words
from headrace.engine.records import RecordBuilder
from headrace.engine.tables import StepTables, Tables
from headrace.kernels.page_formats import FORMAT_NAMES
from headrace.kernels.program import AFTER, NUM_BLOCKS
from headrace.kernels.runtime import Memory, Program, Team, round_up
from headrace.kv.pages import layer_bytes
from headrace.model.config import ModelConfig
from headrace.model.graph import Attention, Operation
from headrace.model.step import PAGE_TOKENS

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_SHAPES_KEPT = 4
_PAGES_STEP = 16  # staging has slots for a multiple of it, so that a growing past does not move it at every page
_GROUP_BYTES = 1 << 20  # read in one go, where several layers are smaller than that: waking the reader takes its time
_GROUPS_MIN = 4  # of a step: what the first one reads, nothing hides
_HALVES = 2  # of the staging buffer
_TABLES = 2  # so that a piece need not wait for a late thread of the piece before


class PageLostError(Exception):
    """A page of the past could not be read. Whoever gave the page has to get it from elsewhere and repeat the step."""

    def __init__(self, page: int, reason: str) -> None:
        super().__init__(f"page {page} cannot be read: {reason}")
        self.page, self.reason = page, reason


@dataclass(frozen=True)
class StreamedStep:
    """What a step did to get at its past.

    `stamps` is int64 [num_ops + 1]: when each operation was complete, and last when the step began; the wait for a layer is
    part of its attention's time. `chosen` are the likeliest tokens, int64 [outputs]. `read_s` is what the reads took,
    `waited_s` how much of it the team had to wait.
    """

    stamps: Words
    chosen: Words
    streamed_bytes: int
    read_s: float
    waited_s: float


class StreamRunner:
    """Runs steps of one sequence with cold pages; its staging buffer is as large as the last one needed, until `release`."""

    def __init__(
        self,
        config: ModelConfig,
        graph: Sequence[Operation],
        records: RecordBuilder,
        tables: Tables,
        team: Team,
    ) -> None:
        self._graph, self._records, self._tables, self._team = graph, records, tables, team
        self._attentions = [op for op in graph if isinstance(op, Attention)]
        self._group_layers = -(-len(self._attentions) // _GROUPS_MIN)
        self._slice_bytes = tuple(layer_bytes(config, code) for code in range(len(FORMAT_NAMES)))
        assert all(size % 64 == 0 for size in self._slice_bytes), "an address has a format in its low bits"
        self._shapes: dict[tuple[int, int], _Pieces] = {}
        self._staging: Memory | None = None
        self._layout: _Layout | None = None
        self._pool: ThreadPoolExecutor | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the staging buffer as it is."""
        return self._staging.num_bytes if self._staging is not None else 0

    def staging_bytes(self, num_cold: int) -> int:
        """Bytes of the staging buffer in a step with a number of cold pages, and from then on until the number changes."""
        layer = round_up(num_cold, _PAGES_STEP) * max(self._slice_bytes)
        return _HALVES * round_up(max(layer, min(self._group_layers * layer, _GROUP_BYTES)), 4096)

    def release(self) -> None:
        """Frees the staging buffer and forgets where pages came from; a later step takes a new one."""
        for pieces in self._shapes.values():
            self._wait_for(pieces.programs)
            pieces.forget()
        self._staging = self._layout = None

    def close(self) -> None:
        """Ends the reader and frees everything."""
        self.release()
        self._shapes.clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def run(self, batch: Batch) -> StreamedStep:
        """Runs a step of one slice; logits lie where those of other steps do.

        Raises:
            PageLostError: a page could not be read. The step may be repeated.
        """
        (part,) = batch.slices
        if part.arriving is not None:
            return self._run_arriving(batch, part.arriving)
        cold = part.cold
        assert cold is not None
        assert len(cold.indices) > 0
        assert int(cold.indices[-1]) < part.past_tokens // PAGE_TOKENS, "a page that a step writes lies in memory"
        pieces = self._pieces_of(len(part.token_ids), part.num_outputs)
        self._wait_for(pieces.programs)
        layout = self._layout_of(cold)
        self._fill(pieces, batch)
        needed = {window: self._first_needed(part, cold, window) for window in self._tables.windows}
        reads = _Reads(self._reader(), self._team, layout, [(op.layer, needed[op.window]) for op in self._attentions])
        try:
            self._run_pieces(pieces, layout, reads)
        finally:
            reads.close()
        ticks_per_s = self._team.ticks_per_us * 1e6
        chosen = pieces.chosen(self._tables)
        read_s, waited_s = reads.read_ticks / ticks_per_s, reads.waited_ticks / ticks_per_s
        return StreamedStep(pieces.stamps(), chosen, reads.num_bytes, read_s, waited_s)

    def _run_arriving(self, batch: Batch, arriving: Arriving) -> StreamedStep:
        """A step that somebody else reads for: the page tables are right from the start, and pieces only have to wait."""
        (part,) = batch.slices
        assert part.cold is None, "what is cold and what arrives is not waited for in one step"
        pieces = self._pieces_of(len(part.token_ids), part.num_outputs)
        self._wait_for(pieces.programs)
        self._fill(pieces, batch)
        self._team.run(pieces.programs[0])
        waited_ticks = 0
        for op, piece in zip(self._attentions, pieces.programs[1:], strict=True):
            start = self._team.read_ticks()
            arriving.wait_for(op.layer)
            waited_ticks += self._team.read_ticks() - start
            self._team.run(piece)
        waited_s = waited_ticks / (self._team.ticks_per_us * 1e6)
        return StreamedStep(pieces.stamps(), pieces.chosen(self._tables), 0, 0.0, waited_s)

    def _run_pieces(self, pieces: _Pieces, layout: _Layout, reads: _Reads) -> None:
        """All pieces in turn: piece n + 1 begins with attention n."""
        self._team.run(pieces.programs[0])
        pages_at = self._tables.offsets["pages"]
        for number, (op, piece) in enumerate(zip(self._attentions, pieces.programs[1:], strict=True)):
            first = reads.wait(number)
            # the piece that read this page table last
            self._wait_for(pieces.programs[max(0, number - 1) : number])
            words = pieces.tables[number % _TABLES].words
            words[pages_at + layout.cold.indices[first:]] = layout.words(number, op.layer, first)
            self._team.run(piece)
            reads.used(number)

    def _fill(self, pieces: _Pieces, batch: Batch) -> None:
        """Fills both sets of tables; the words of cold pages come later."""
        (part,) = batch.slices
        if pieces.cold is not part.cold:
            # what was cold before has to be a page's address again
            pieces.forget()
            pieces.cold = part.cold
        changed = [self._tables.write(tables, batch) for tables in pieces.tables]
        if any(changed):
            for op, piece in zip(self._attentions, pieces.programs[1:], strict=True):
                entries = pieces.tables[0].blocks[op.window].entries
                piece.ops[0, NUM_BLOCKS // 8] = entries.shape[0] * entries.shape[1]
                piece.assign_flags()

    @staticmethod
    def _first_needed(part: Slice, cold: ColdPages, window: int) -> int:
        """The first cold page, by its place among them, that layers of a window see."""
        lowest = max(0, part.past_tokens - window + 1) if window else 0
        return int(np.searchsorted(cold.indices, lowest // PAGE_TOKENS))

    def _pieces_of(self, tokens: int, outputs: int) -> _Pieces:
        """The pieces of a step of some shape, of those used last or new."""
        pieces = self._shapes.pop((tokens, outputs), None)
        if pieces is None:
            if len(self._shapes) >= _SHAPES_KEPT:
                oldest = next(iter(self._shapes))
                self._wait_for(self._shapes.pop(oldest).programs)
            pieces = _Pieces(self._graph, self._records, self._tables, tokens, outputs)
        self._shapes[tokens, outputs] = pieces
        return pieces

    def _layout_of(self, cold: ColdPages) -> _Layout:
        """Slots for cold pages, in a staging buffer of their size."""
        if self._layout is not None and self._layout.cold is cold:
            return self._layout
        needed_bytes = self.staging_bytes(len(cold.indices))
        if self._staging is None or self._staging.num_bytes != needed_bytes:
            self.release()
            self._staging = Memory(needed_bytes)
        self._layout = _Layout(cold, self._slice_bytes, self._staging, self._group_layers)
        return self._layout

    def _reader(self) -> ThreadPoolExecutor:
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(1, "headrace-reader")
        return self._pool

    def _wait_for(self, programs: Sequence[Program]) -> None:
        """Waits until nobody can be inside some programs."""
        for program in programs:
            while not self._team.is_free(program):
                time.sleep(0)


class _Pieces:
    """The programs of a step of one shape, cut before each attention, and two sets of tables that attentions use in turn."""

    def __init__(self, graph: Sequence[Operation], records: RecordBuilder, tables: Tables, tokens: int, outputs: int) -> None:
        size = 8 * tables.num_words
        self._outputs = outputs
        self._memory = Memory(_TABLES * size)
        self.tables = [
            StepTables(self._memory.words(number * size, tables.num_words), self._memory.address + number * size)
            for number in range(_TABLES)
        ]
        self.cold: ColdPages | None = None
        built = records.records(tokens, outputs)
        cuts = [number for number, op in enumerate(graph) if isinstance(op, Attention)]
        self.programs: list[Program] = []
        for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(built.ops)], strict=True)):
            # attention n begins piece n + 1; what stands before the first one reads no page table
            ops = np.zeros_like(built.ops)
            built.copy_to(ops, self.tables[(number - 1) % _TABLES].address)
            ops = ops[start:end]
            program = Program(len(ops), int(ops[:, NUM_BLOCKS // 8].sum()) + tables.max_blocks, 0)
            program.ops[:] = ops
            # what lies before a piece is complete when it begins
            program.ops[:, AFTER // 8] = np.maximum(0, ops[:, AFTER // 8] - start)
            program.assign_flags()
            self.programs.append(program)
        self._last_tables = self.tables[(len(cuts) - 1) % _TABLES]

    def forget(self) -> None:
        """Lets go of what the tables were filled for."""
        self.cold = None
        for tables in self.tables:
            tables.forget()

    def chosen(self, tables: Tables) -> Words:
        """The tokens that the last piece chose, a copy."""
        return tables.chosen(self._last_tables, self._outputs).copy()

    def stamps(self) -> Words:
        """Stamps of all pieces as if they had been one program."""
        parts = [program.stamps[:-1] for program in self.programs]
        return np.concatenate([*parts, self.programs[0].stamps[-1:]])


class _Layout:
    """Where cold pages lie in each half of a staging buffer: layer by layer of a group, one page behind the other."""

    def __init__(self, cold: ColdPages, slice_bytes: Sequence[int], staging: Memory, most_layers: int) -> None:
        self.cold = cold
        formats = np.zeros(len(cold.indices), np.int64) if cold.formats is None else cold.formats
        self._sizes: Words = np.array(slice_bytes, np.int64)[formats]
        self._ends = np.cumsum(self._sizes)
        self._tags = self._ends - self._sizes + formats
        self._layer_bytes = int(self._ends[-1])
        self._half_bytes = staging.num_bytes // _HALVES
        self.group_layers = max(1, min(most_layers, _GROUP_BYTES // self._layer_bytes))
        assert self._layer_bytes * self.group_layers <= self._half_bytes
        self._staging = staging
        self._targets: dict[int, list[npt.NDArray[np.uint8]]] = {}

    def targets(self, number: int) -> list[npt.NDArray[np.uint8]]:
        """Where the slices of attention `number` go, one for each cold page."""
        start = self._start(number)
        if start not in self._targets:
            self._targets[start] = np.split(self._staging.bytes[start : start + self._layer_bytes], self._ends[:-1])
        return self._targets[start]

    def words(self, number: int, layer: int, first: int) -> Words:
        """What stands in a page table for the cold pages from `first` on: where each would begin if all of it were there."""
        return self._staging.address + self._start(number) + self._tags[first:] - layer * self._sizes[first:]

    def _start(self, number: int) -> int:
        group, place = divmod(number, self.group_layers)
        return group % _HALVES * self._half_bytes + place * self._layer_bytes


class _Reads:
    """The reads of one step, in the order of its attentions; two groups at most are begun and not used up.

    `num_bytes` and `read_ticks` are the reader's, and right when it has ended; `waited_ticks` is the team's.
    """

    def __init__(self, pool: ThreadPoolExecutor, team: Team, layout: _Layout, wanted: Sequence[tuple[int, int]]) -> None:
        """`wanted`: layer and first cold page of each attention."""
        self._pool, self._team, self._layout, self._wanted = pool, team, layout, wanted
        self._begun: dict[int, Future[PageLostError | None]] = {}
        self.num_bytes = self.read_ticks = self.waited_ticks = 0
        for group in range(_HALVES):
            self._begin(group)

    def wait(self, number: int) -> int:
        """Waits for what an attention reads; returns its first cold page.

        Raises:
            PageLostError: it cannot be read.
        """
        group = number // self._layout.group_layers
        future = self._begun.get(group)
        if future is not None:
            if not future.done():
                start = self._team.read_ticks()
                future.exception()
                self.waited_ticks += self._team.read_ticks() - start
            lost = future.result()
            if lost is not None:
                raise lost
            del self._begun[group]
        return self._wanted[number][1]

    def used(self, number: int) -> None:
        """An attention is complete: after the last one of a group its half is filled anew."""
        group, place = divmod(number, self._layout.group_layers)
        if place == self._layout.group_layers - 1:
            self._begin(group + _HALVES)

    def close(self) -> None:
        """Waits until nothing is written any more."""
        for future in self._begun.values():
            if not future.cancel():
                future.exception()

    def _begin(self, group: int) -> None:
        """Has the reader read for a group of attentions, if they need anything."""
        size, num_cold = self._layout.group_layers, len(self._layout.cold.indices)
        numbers = range(group * size, min((group + 1) * size, len(self._wanted)))
        reading = [number for number in numbers if self._wanted[number][1] < num_cold]
        if reading:
            self._begun[group] = self._pool.submit(self._read, reading)

    def _read(self, numbers: Sequence[int]) -> PageLostError | None:
        """Reads what some attentions need; on the reader's thread."""
        start, cold = self._team.read_ticks(), self._layout.cold
        for number in numbers:
            cold.source.expect_layer(*self._wanted[number])
        for number in numbers:
            (layer, first), targets = self._wanted[number], self._layout.targets(number)
            for place in range(first, len(targets)):
                reason = cold.source.read_layer(layer, place, targets[place])
                if reason is not None:
                    return PageLostError(int(cold.indices[place]), reason)
                self.num_bytes += targets[place].nbytes
        self.read_ticks += self._team.read_ticks() - start
        return None
