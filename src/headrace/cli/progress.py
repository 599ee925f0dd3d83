"""Progress on standard error: a bar on a terminal, one line a task elsewhere. rich is imported when a task starts."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headrace.cli.errors import say
from headrace.units import format_bytes
from headrace.weights.progress import BYTES

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


class ConsoleProgress:
    """Shows one task after another: `start`, some `advance`, `done`. It is what `weights` and `engine` report to."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._task: TaskID | None = None

    def start(self, label: str, total: int | None, unit: str = BYTES) -> None:
        """A task begins; one that is still shown ends first. Without a total, the bar only shows that something moves."""
        self.done()
        if not sys.stderr.isatty():
            size = format_bytes(total or 0) if unit == BYTES else f"{total} {unit.removesuffix('s') if total == 1 else unit}"
            say(f"{label} ({size})" if total else label)
            return
        self._bars = _bars(unit)
        self._task = self._bars.add_task(label, total=total or None)
        self._bars.start()

    def advance(self, amount: int) -> None:
        """So much more of the task is done."""
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task, amount)

    def done(self) -> None:
        """The task has ended; its bar goes away."""
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._task = None

    def notice(self, text: str) -> None:
        """A line that stays, such as a model's terms of use."""
        if self._bars is not None:
            self._bars.console.print(f"headrace: {text}", markup=False, highlight=False, soft_wrap=True)
        else:
            say(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.done()


def _bars(unit: str) -> Bars:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    # bytes come evenly, so that the time that is left can be told; other things differ in size
    amount: tuple[ProgressColumn, ...] = (DownloadColumn(), TimeRemainingColumn())
    if unit != BYTES:
        amount = (MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *amount)
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False)
