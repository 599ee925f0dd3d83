"""Accounts of what was done: ledger rows of the steps that ran, with the time that stamps show for each operation.

Booking a step costs a copy of its stamps; sums are made when somebody asks, or when the buffer of stamps is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.model.graph import Operation
from headrace.model.step import LedgerRow, LedgerTotals, SequenceStep, StepLedger

_BUFFERED_STEPS = 128


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
    """Adds up steps of one phase of one request."""

    def __init__(self, ledger: StepLedger, graph: tuple[Operation, ...], ticks_per_us: float, phase: str) -> None:
        self._ledger, self._graph, self._ticks_per_us = ledger, graph, ticks_per_us
        self.phase = phase
        self._totals = LedgerTotals()
        self._batches: list[tuple[SequenceStep, ...]] = []
        self._sharers: list[int] = []
        self._num_summed = 0
        self._stamps: npt.NDArray[np.int64] = np.zeros((_BUFFERED_STEPS, len(graph) + 1), np.int64)
        self._num_stamps = 0
        self._ticks: npt.NDArray[np.int64] = np.zeros(len(graph), np.int64)

    def add(self, batch: tuple[SequenceStep, ...], stamps: npt.NDArray[np.int64], began: int, *, sharers: int = 1) -> None:
        """Books a step that has run, or this request's part of it.

        Args:
            batch: what was computed for whom.
            stamps: when each of its operations was complete, int64 [num_ops].
            began: when the first could begin.
            sharers: requests that the weights of the step were read for; each books an equal share of them.
        """
        self._batches.append(batch)
        self._sharers.append(sharers)
        row = self._stamps[self._num_stamps]
        row[: len(stamps)] = stamps
        row[len(stamps) :] = began  # operations that took no part, and the last place: when the step began
        self._num_stamps += 1
        if self._num_stamps == _BUFFERED_STEPS:
            self._sum_ticks()

    @property
    def totals(self) -> LedgerTotals:
        """The ledger's totals of all steps so far."""
        for batch, sharers in zip(self._batches[self._num_summed :], self._sharers[self._num_summed :], strict=True):
            totals = self._ledger.totals(batch)
            self._totals += replace(totals, weight_bytes=totals.weight_bytes // sharers)
        self._num_summed = len(self._batches)
        return self._totals

    def operations(self) -> list[OperationAccount]:
        """Sums by class of operation, in the order of the step."""
        self._sum_ticks()
        sums: dict[str, list[float]] = {}
        for batch, sharers in zip(self._batches, self._sharers, strict=True):
            for row in self._ledger.rows(batch):
                entry = sums.setdefault(_label(row), [0, 0, 0, 0.0])
                entry[0] += 1
                entry[1] += row.macs
                entry[2] += row.total_bytes - row.weight_bytes + row.weight_bytes // sharers
        every_operation = self._ledger.rows((SequenceStep(1, chosen=True),))
        for row, ticks in zip(every_operation, self._ticks, strict=True):
            if ticks:
                sums[_label(row)][3] += float(ticks) / self._ticks_per_us / 1e6
        return [
            OperationAccount(self.phase, label, int(calls), int(macs), int(moved), time_s)
            for label, (calls, macs, moved, time_s) in sums.items()
        ]

    def _sum_ticks(self) -> None:
        if self._num_stamps:
            self._ticks += ticks_between(self._stamps[: self._num_stamps]).sum(axis=0)
            self._num_stamps = 0


def ticks_between(stamps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Ticks of each operation; they add up to those of the step.

    An operation lasts from when all before it were complete to when it was; if it ran beside them and was complete
    before they were, nothing is left for it.

    Args:
        stamps: int64 [..., num_ops + 1], when each operation was complete, and last when the step began.
    """
    return np.diff(np.maximum.accumulate(np.roll(stamps, 1, axis=-1), axis=-1), axis=-1)


def timed_rows(
    ledger: StepLedger, batch: Sequence[SequenceStep], stamps: npt.NDArray[np.int64], ticks_per_us: float
) -> tuple[LedgerRow, ...]:
    """The ledger of a step with measured time, out of its stamps as `ticks_between` takes them."""
    rows = ledger.rows(batch)
    return tuple(
        replace(row, time_us=float(ticks) / ticks_per_us) for row, ticks in zip(rows, ticks_between(stamps), strict=True)
    )


def _label(row: LedgerRow) -> str:
    return f"{row.operation} {row.format.lower()}"
