"""Several steps of one sequence in one go, each with the most likely token of the one before.

Between two steps somebody has to choose a token, and while the thread that does it waits for a core, the whole team
waits. Here the choice is an operation of the step, so a run of steps is one program that any thread can carry on: for
greedy decoding, which needs nothing of the logits but the largest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.engine.batch import Slice, Tables, Words, attention_numbers
from headrace.engine.records import Buffers, Places, RecordBuilder
from headrace.kernels.fields import choose
from headrace.kernels.library import KernelLibrary
from headrace.kernels.program import AFTER, NUM_BLOCKS
from headrace.kernels.runtime import Program, Team
from headrace.kernels.tables import TOKEN_ID
from headrace.model.config import ModelConfig
from headrace.model.graph import Operation
from headrace.model.step import CHOICE_PARTS

MAX_STEPS = 8
_CHOSEN_WORDS = MAX_STEPS
_PARTS_WORDS = CHOICE_PARTS * choose.PART_BYTES // 8


class AheadProgram(Program):
    """A program of `steps` steps, and what the tables of each were filled for."""

    def __init__(self, graph_length: int, steps: int, num_flags: int, tables: Tables) -> None:
        self.steps = steps
        self.tables_words = tables.num_words
        super().__init__(steps * graph_length, steps * num_flags, steps * tables.num_words + _CHOSEN_WORDS + _PARTS_WORDS)
        self.shapes: list[tuple[int, ...] | None] = [None] * steps
        self.blocks: list[dict[int, int]] = [{} for _ in range(steps)]
        self.kept: Words | None = None

    def tables_of(self, step: int) -> Words:
        """The tables of one step."""
        return self.tables[step * self.tables_words : (step + 1) * self.tables_words]

    def address_of(self, step: int) -> int:
        """Where the tables of one step lie."""
        return self.tables_address + 8 * step * self.tables_words

    @property
    def chosen_at(self) -> int:
        """The word behind the tables where the first chosen token goes."""
        return self.steps * self.tables_words


class AheadRunner:
    """Runs a sequence ahead by 1 to MAX_STEPS tokens."""

    def __init__(
        self,
        config: ModelConfig,
        graph: tuple[Operation, ...],
        places: Places,
        library: KernelLibrary,
        buffers: Buffers,
        team: Team,
        max_pages: int,
    ) -> None:
        self._graph, self._buffers, self._team = graph, buffers, team
        self._tables = Tables(config, 1, max_pages, buffers.states_bytes, team.threads)
        self._records = RecordBuilder(config, graph, places, buffers, self._tables, library.address, team.threads)
        self._num_flags = self._records.max_flags(1, 1)
        self._programs: list[AheadProgram] = []
        self._windows = attention_numbers(graph, self._tables.windows)

    def run(self, token: int, past_tokens: int, page_addresses: Words, steps: int) -> tuple[list[int], AheadProgram]:
        """Computes `token` and all but the last of the tokens that follow it.

        Returns:
            The `steps` tokens chosen, -1 where logits were not finite, and the program with its stamps.
        """
        program = self._free_program(steps)
        changed = False
        for step in range(steps):
            part = Slice([token if step == 0 else 0], past_tokens + step, page_addresses)
            shape = self._tables.shape([part])
            tables = program.tables_of(step)
            if shape == program.shapes[step]:
                self._tables.advance(tables, part, program.blocks[step])
                continue
            states = self._buffers.address("states")
            blocks = self._tables.fill(tables, program.address_of(step), [part], states)
            for window, numbers in self._windows.items():
                program.ops[step * len(self._graph) + numbers, NUM_BLOCKS // 8] = blocks[window]
            program.shapes[step], program.blocks[step] = shape, blocks
            changed = True
        if changed:
            program.assign_flags()
            # the addresses are kept alive, so that their identity cannot be taken by others
            program.kept = page_addresses
        self._team.run(program)
        at = program.chosen_at
        return program.tables[at : at + steps].tolist(), program

    def _free_program(self, steps: int) -> AheadProgram:
        for program in self._programs:
            if program.steps == steps and self._team.is_free(program):
                return program
        program = AheadProgram(len(self._graph), steps, self._num_flags, self._tables)
        for step in range(steps):
            self._build(program, step)
        self._records.ask_ahead(program.ops)
        self._programs.append(program)
        return program

    def _build(self, program: AheadProgram, step: int) -> None:
        """Writes the records of one step, which waits for the step before and hands its token to the next."""
        length = len(self._graph)
        records: npt.NDArray[np.int64] = self._records.build(1, 1, program.address_of(step))
        records[:, AFTER // 8] += step * length
        chosen = program.tables_address + 8 * program.chosen_at
        find, last = records[-2], records[-1]
        find[choose.PARTS // 8] = last[choose.PARTS // 8] = chosen + 8 * _CHOSEN_WORDS
        last[choose.CHOSEN // 8] = chosen + 8 * step
        if step + 1 < program.steps:
            token_table = program.address_of(step + 1) + 8 * self._tables.offsets["tokens"]
            last[choose.NEXT // 8] = token_table + TOKEN_ID
        program.ops[step * length : (step + 1) * length] = records
