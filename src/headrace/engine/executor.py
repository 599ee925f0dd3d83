"""Executes steps: picks a free program, fills its tables, runs it on the team, hands out logits.

Invariant: a program is written only while no thread can be reading it. Knows pages by their addresses and tokens by
their ids; knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.engine.ahead import MAX_STEPS, AheadProgram, AheadRunner
from headrace.engine.batch import Slice, Tables, Words, attention_numbers
from headrace.engine.records import Buffers, Places, RecordBuilder, kernels_of
from headrace.engine.streaming import StreamedStep, StreamRunner
from headrace.kernels.library import KernelLibrary
from headrace.kernels.program import NUM_BLOCKS
from headrace.kernels.runtime import Program, Team
from headrace.kv.pages import pages_for
from headrace.model.config import ModelConfig
from headrace.model.graph import Operation, greedy_graph
from headrace.model.step import MAX_STEP_TOKENS

MAX_STEP_OUTPUTS = 64
_SHAPES_KEPT = 6


class Executor:
    """One model's steps on one team of threads."""

    def __init__(
        self,
        config: ModelConfig,
        graph: tuple[Operation, ...],
        places: Places,
        library: KernelLibrary,
        threads: int,
        context_tokens: int,
    ) -> None:
        self._config, self._graph, self._angles = config, graph, places.angles
        ahead = greedy_graph(graph)
        library.prepare(kernels_of(ahead, config.group))
        self.buffers = Buffers(config, graph, MAX_STEP_TOKENS, MAX_STEP_OUTPUTS)
        max_pages = pages_for(context_tokens) + MAX_STEP_TOKENS
        self._tables = Tables(config, MAX_STEP_TOKENS, max_pages, self.buffers.states_bytes, threads)
        self._records = RecordBuilder(config, graph, places, self.buffers, self._tables, library.address, threads)
        self._num_flags = self._records.max_flags(MAX_STEP_TOKENS, MAX_STEP_OUTPUTS)
        self.team = Team(library, threads, self._records.scratch_bytes(), MAX_STEPS * len(ahead))
        self._programs: list[_StepProgram] = []
        self._shapes: dict[int, tuple[int, int]] = {}
        self._windows = attention_numbers(graph, self._tables.windows)
        self._last: Program | None = None
        self._last_streamed: StreamedStep | None = None
        self._ahead = AheadRunner(config, ahead, places, library, self.buffers, self.team, max_pages)
        states = self.buffers.address("states")
        self.streaming = StreamRunner(config, graph, self._records, self._tables, states, self.team)

    def run(self, slices: Sequence[Slice]) -> npt.NDArray[np.float32]:
        """Runs one step of at most MAX_STEP_TOKENS tokens; pages may be cold or arriving in a step of one slice.

        Returns:
            Logits of the wanted tokens, float32 [outputs, V]: a view that the next step overwrites.

        Raises:
            PageLostError: a page could not be read. The step may be repeated.
        """
        tokens = sum(len(part.token_ids) for part in slices)
        outputs = sum(part.num_outputs for part in slices)
        assert 0 < tokens <= MAX_STEP_TOKENS
        assert 0 < outputs <= MAX_STEP_OUTPUTS
        self._angles.cover(max(part.past_tokens + len(part.token_ids) for part in slices))
        if any(part.cold is not None or part.arriving is not None for part in slices):
            assert len(slices) == 1, "only a step of one slice can wait for pages"
            self._last_streamed = self.streaming.run(slices[0])
            return self.buffers.logits(outputs, self._config.vocabulary)
        program = self._free_program((tokens, outputs))
        shape = self._tables.shape(slices)
        if shape is not None and shape == program.table_shape:
            self._tables.advance(program.tables, slices[0], program.attention_blocks)
        else:
            blocks = self._tables.fill(program.tables, program.tables_address, slices, self.buffers.address("states"))
            for window, numbers in self._windows.items():
                program.ops[numbers, NUM_BLOCKS // 8] = blocks[window]
            program.assign_flags()
            # the addresses are kept alive, so that their identity cannot be taken by others
            program.table_shape, program.attention_blocks, program.kept = shape, blocks, slices
        self.team.run(program)
        self._last, self._last_streamed = program, None
        return self.buffers.logits(outputs, self._config.vocabulary)

    def run_ahead(self, token: int, past_tokens: int, page_addresses: Words, steps: int) -> tuple[list[int], AheadProgram]:
        """Runs up to MAX_STEPS steps of one sequence, each with the most likely token of the one before; see `ahead`."""
        self._angles.cover(past_tokens + steps)
        return self._ahead.run(token, past_tokens, page_addresses, steps)

    @property
    def last_program(self) -> Program:
        """The program of the last `run` without cold pages, with its stamps."""
        assert self._last is not None, "no step has run"
        return self._last

    @property
    def last_streamed(self) -> StreamedStep | None:
        """What the last `run` did to get at cold pages; None if there were none."""
        return self._last_streamed

    @property
    def last_stamps(self) -> Words:
        """Stamps of the last `run`, int64 [num_ops + 1]: when each operation was complete, and last when the step began."""
        return self._last_streamed.stamps if self._last_streamed is not None else self.last_program.stamps

    def close(self) -> None:
        """Stops the team; weights and pages may be freed afterwards."""
        self.streaming.close()
        self.team.close()

    def _free_program(self, shape: tuple[int, int]) -> _StepProgram:
        """A program nobody reads, with the records of a shape; one of that shape if there is one."""
        for number, program in enumerate(self._programs):
            if self._shapes[number] == shape and self.team.is_free(program):
                return program
        free = [number for number, program in enumerate(self._programs) if self.team.is_free(program)]
        # every late thread can hold one program back, so one of threads + 1 is always free
        if not free or len(self._programs) < self.team.threads + _SHAPES_KEPT:
            self._programs.append(_StepProgram(len(self._graph), self._num_flags, self._tables.num_words))
            free = [len(self._programs) - 1]
        number = min(free, key=lambda index: self._programs[index].serial)
        program = self._programs[number]
        program.ops[:] = self._records.build(*shape, program.tables_address)
        program.table_shape = None
        self._shapes[number] = shape
        return program


class _StepProgram(Program):
    """A program, and what its tables were filled for."""

    table_shape: tuple[int, ...] | None = None
    attention_blocks: dict[int, int]
    kept: Sequence[Slice] = ()
