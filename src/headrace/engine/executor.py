"""Executes steps: makes a batch of what is asked for, writes a free program for it, runs it on the team, hands out results.

Invariant: a program is written only while no thread can be reading it. Knows pages by their addresses and tokens by
their ids; knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.engine.ahead import MAX_STEPS, StepProgram
from headrace.engine.batch import Batch, BatchMaker, Slice, Words
from headrace.engine.records import Buffers, Places, RecordBuilder, kernels_of
from headrace.engine.streaming import StreamedStep, StreamRunner
from headrace.engine.tables import Tables, attention_numbers
from headrace.kernels.library import KernelLibrary
from headrace.kernels.runtime import Team
from headrace.kv.pages import pages_for
from headrace.model.config import ModelConfig
from headrace.model.graph import Operation, choosing_graph
from headrace.model.step import MAX_STEP_TOKENS, SequenceStep

MAX_STEP_OUTPUTS = 64


@dataclass(frozen=True, eq=False)
class StepRun:
    """What a step, or several in a row, gave.

    `logits` are float32 [outputs, V], of the last step, a view that the next run overwrites. `chosen` are the most likely
    tokens of the rows wanted in each step, int64 [steps, outputs], -1 where a logit is not finite; rows have the order of
    the slices. `stamps` are int64 [steps, num_ops + 1]: when each operation was complete, and last when the step began; a
    step without outputs has fewer operations. `streamed` is what was done to get at pages that were not there, if any.
    """

    logits: npt.NDArray[np.float32]
    chosen: Words
    stamps: Words
    streamed: StreamedStep | None
    batch: Batch

    def sequence_steps(self, step: int = 0) -> tuple[SequenceStep, ...]:
        """One of the steps as the ledger has it: sequences that share pages lie next to each other."""
        return self.batch.sequence_steps(step)


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
        self._config, self._angles = config, places.angles
        graph = choosing_graph(graph)
        library.prepare(kernels_of(graph, config.group))
        self.buffers = Buffers(config, graph, MAX_STEP_TOKENS, MAX_STEP_OUTPUTS)
        max_pages = MAX_STEP_OUTPUTS * pages_for(context_tokens) + MAX_STEP_TOKENS
        states = self.buffers.address("states")
        self._tables = Tables(config, MAX_STEP_TOKENS, MAX_STEP_OUTPUTS, max_pages, states, threads)
        self._records = RecordBuilder(config, graph, places, self.buffers, self._tables, library.address, threads)
        flags = self._records.max_flags(MAX_STEP_TOKENS, MAX_STEP_OUTPUTS)
        self._num_ops, self._num_flags = len(graph), MAX_STEPS * flags
        self.team = Team(library, threads, self._records.scratch_bytes(), MAX_STEPS * len(graph))
        self._programs: list[StepProgram] = []
        self._attentions = attention_numbers(graph, self._tables.windows)
        self._batches = BatchMaker()
        self._last: StepRun | None = None
        self.streaming = StreamRunner(config, graph, self._records, self._tables, self.team)

    def run(self, slices: Sequence[Slice], steps: int = 1) -> StepRun:
        """Runs one step of at most MAX_STEP_TOKENS tokens and MAX_STEP_OUTPUTS outputs, or several such steps in a row.

        Args:
            slices: what the step computes. Pages may be cold or arriving in a step of one slice.
            steps: up to MAX_STEPS. Each but the first computes what the one before chose: every slice has one token and
                one output then, and pages for all steps.

        Raises:
            PageLostError: a page could not be read. The step may be repeated.
        """
        batch = self._batches.make(slices)
        assert batch.num_tokens <= MAX_STEP_TOKENS
        assert batch.num_outputs <= MAX_STEP_OUTPUTS
        assert steps == 1 or (batch.decodes and batch.num_outputs == batch.num_tokens and steps <= MAX_STEPS)
        self._angles.cover(int(batch.positions.max()) + steps)
        logits = self.buffers.logits(batch.num_outputs, self._config.vocabulary)
        if any(part.cold is not None or part.arriving is not None for part in slices):
            assert len(slices) == 1, "only a step of one slice can wait for pages"
            assert steps == 1, "only a step at a time can wait for pages"
            streamed = self.streaming.run(batch)
            self._last = StepRun(logits, streamed.chosen[None], streamed.stamps[None], streamed, batch)
            return self._last
        program = self._free_program((batch.num_tokens, batch.num_outputs))
        program.prepare(batch, steps)
        self.team.run(program)
        chosen = program.chosen(steps, batch.num_outputs)
        self._last = StepRun(logits, chosen, program.step_stamps(steps), None, batch)
        return self._last

    @property
    def last(self) -> StepRun:
        """What the last `run` gave."""
        assert self._last is not None, "no step has run"
        return self._last

    def close(self) -> None:
        """Stops the team; weights and pages may be freed afterwards."""
        self.streaming.close()
        self.team.close()

    def _free_program(self, shape: tuple[int, int]) -> StepProgram:
        """A program nobody reads; one that was last used for steps of a shape, if there is one."""
        free = [program for program in self._programs if self.team.is_free(program)]
        for program in free:
            if program.shape == shape:
                return program
        # every late thread can hold one program back, so one of threads + 1 is always free
        if len(self._programs) <= self.team.threads:
            program = StepProgram(self._records, self._tables, self._attentions, self._num_ops, self._num_flags)
            self._programs.append(program)
            return program
        return min(free, key=lambda each: each.serial)
