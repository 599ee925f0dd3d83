"""Accounts of what was done: ledger rows of the steps that ran, with the time that stamps show for each operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.kernels.program import AFTER
from headrace.kernels.runtime import Program
from headrace.model.graph import Operation
from headrace.model.step import LedgerRow, LedgerTotals, SequenceStep, StepLedger


@dataclass(frozen=True)
class OperationAccount:
    """All runs of one class of operation in one phase, summed."""

    phase: str
    operation: str
    calls: int
    macs: int
    total_bytes: int
    time_s: float


class Account:
    """Adds up steps of one phase of one request: totals at once, rows when asked."""

    def __init__(self, ledger: StepLedger, graph: tuple[Operation, ...], ticks_per_us: float, phase: str) -> None:
        self._ledger, self._graph, self._ticks_per_us = ledger, graph, ticks_per_us
        self.phase = phase
        self.totals = LedgerTotals()
        self._batches: list[tuple[SequenceStep, ...]] = []
        self._ticks: npt.NDArray[np.int64] = np.zeros(len(graph), np.int64)

    def add(self, batch: tuple[SequenceStep, ...], program: Program) -> None:
        """Books a step that has run."""
        self.totals = self.totals + self._ledger.totals(batch)
        self._batches.append(batch)
        self._ticks += operation_ticks(program)

    def operations(self) -> list[OperationAccount]:
        """Sums by class of operation, in the order of the step."""
        sums: dict[str, list[float]] = {}
        for batch in self._batches:
            for row in self._ledger.rows(batch):
                entry = sums.setdefault(_label(row), [0, 0, 0, 0.0])
                entry[0] += 1
                entry[1] += row.macs
                entry[2] += row.total_bytes
        if self._batches:
            for row, ticks in zip(self._ledger.rows(self._batches[-1]), self._ticks, strict=True):
                sums[_label(row)][3] += float(ticks) / self._ticks_per_us / 1e6
        return [
            OperationAccount(self.phase, label, int(calls), int(macs), int(moved), time_s)
            for label, (calls, macs, moved, time_s) in sums.items()
        ]


def operation_ticks(program: Program) -> npt.NDArray[np.int64]:
    """Ticks of each operation of the step a program ran last: from when it could start to when it was complete."""
    stamps = program.stamps
    after = program.ops[:, AFTER // 8]
    # an operation that runs beside the one before starts when what both wait for is complete
    starts = np.where(after > 0, stamps[after - 1], stamps[-1])
    return np.maximum(stamps[:-1] - starts, 0)


def timed_rows(
    ledger: StepLedger, batch: Sequence[SequenceStep], program: Program, ticks_per_us: float
) -> tuple[LedgerRow, ...]:
    """The ledger of the step a program ran last, with measured time."""
    from dataclasses import replace

    ticks = operation_ticks(program)
    rows = ledger.rows(batch)
    return tuple(replace(row, time_us=float(t) / ticks_per_us) for row, t in zip(rows, ticks, strict=True))


def _label(row: LedgerRow) -> str:
    return f"{row.operation} {row.format.lower()}"
