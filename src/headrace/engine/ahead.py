"""Programs of one step, or of several in a row in which each sequence computes the token that the step before chose.

Between two steps somebody has to choose tokens, and while the thread that does it waits for a core, the whole team waits.
Here the choice is an operation of the step, so a run of steps is one program that any thread can carry on.

A program has room for the largest step and is used again for others: records of another shape are copied into it, and
tables are rewritten where they change.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.engine.batch import Batch, Words
from headrace.engine.records import RecordBuilder
from headrace.engine.tables import StepTables, Tables
from headrace.kernels.fields import choose
from headrace.kernels.program import NUM_BLOCKS
from headrace.kernels.runtime import Program

MAX_STEPS = 8


class StepProgram(Program):
    """A program of up to MAX_STEPS steps, and what it was written for."""

    def __init__(
        self, records: RecordBuilder, tables: Tables, attentions: dict[int, npt.NDArray[np.intp]], num_ops: int, num_flags: int
    ) -> None:
        super().__init__(MAX_STEPS * num_ops, num_flags, MAX_STEPS * tables.num_words)
        self._records, self._tables, self._attentions = records, tables, attentions
        self.shape = (0, 0)
        self._step_ops = self._num_written = 0
        size = tables.num_words
        self._step_tables = [
            StepTables(self.tables[step * size : (step + 1) * size], self.tables_address + 8 * step * size)
            for step in range(MAX_STEPS)
        ]

    def prepare(self, batch: Batch, steps: int) -> None:
        """Writes the program for a batch; nobody may be inside it."""
        changed = self._prepare_records(batch, steps)
        paged = self._step_tables[0]
        for step in range(steps):
            changed |= self._tables.write(self._step_tables[step], batch, paged=paged, ahead=step)
        if not changed:
            return
        for step in range(steps):
            for window, numbers in self._attentions.items():
                entries = self._step_tables[step].blocks[window].entries
                self.ops[step * self._step_ops + numbers, NUM_BLOCKS // 8] = entries.shape[0] * entries.shape[1]
        self.assign_flags()

    def _prepare_records(self, batch: Batch, steps: int) -> bool:
        """Has the records of `steps` steps in place; whether they are others than in the last run."""
        shape = (batch.num_tokens, batch.num_outputs)
        if shape != self.shape:
            self._num_written = 0
        records = self._records.records(*shape)
        length = self._step_ops = len(records.ops)
        changed = shape != self.shape or len(self.ops) != steps * length
        self.shape = shape
        self.resize(steps * length)
        for step in range(self._num_written, steps):
            ops = self.ops[step * length : (step + 1) * length]
            records.copy_to(ops, self._step_tables[step].address, step * length)
            if not batch.num_outputs:
                continue
            # how tokens are drawn is written once, for the first step
            for choosing in (ops[-2], ops[-1]):
                choosing[choose.SAMPLES // 8] = self._step_tables[0].address + 8 * self._tables.offsets["sampling"]
                choosing[choose.STEP // 8] = step
            if step + 1 < MAX_STEPS:
                ops[-1, choose.NEXT // 8] = self._step_tables[step + 1].address + 8 * self._tables.offsets["tokens"]
        self._num_written = max(self._num_written, steps)
        return changed

    def step_stamps(self, steps: int) -> Words:
        """When each operation of each step was complete, and last when the step began: int64 [steps, num_ops + 1], a copy."""
        stamps: Words = np.empty((steps, self._step_ops + 1), np.int64)
        stamps[:, :-1] = self.stamps[:-1].reshape(steps, -1)
        # a step begins when the one before is complete; the place behind the last operation is the program's begin
        stamps[0, -1] = self.stamps[-1]
        stamps[1:, -1] = stamps[:-1, -2]
        return stamps

    def chosen(self, steps: int, num_outputs: int) -> Words:
        """The tokens that each step chose, int64 [steps, outputs], a copy."""
        at = self._tables.offsets["chosen"]
        return self.tables.reshape(MAX_STEPS, -1)[:steps, at : at + num_outputs].copy()
