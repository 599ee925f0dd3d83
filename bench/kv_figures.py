"""Figures of the memory of the past: what was measured, what it is compared with, the goal, and the table that people read.

Does not know how a figure is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from figures import markdown, spread, titled, verdict


@dataclass(frozen=True)
class Figure:
    """One figure: all its runs, those it is compared with, the goal in words, and whether it is reached.

    `ratio` is how many times better the median is than that of `against_runs`.
    """

    section: str
    name: str
    unit: str
    runs: Sequence[float]
    against: str = ""
    against_runs: Sequence[float] = ()
    ratio: float | None = None
    goal: str = ""
    reached: bool | None = None

    def beside(self, against: str, against_runs: Sequence[float]) -> Self:
        """The same figure, shown with what it depends on."""
        return replace(self, against=against, against_runs=against_runs)

    def document(self) -> dict[str, Any]:
        """For the JSON line: medians, and every run."""
        return {
            "section": self.section,
            "figure": self.name,
            "unit": self.unit,
            "median": statistics.median(self.runs),
            "runs": [float(f"{run:.5g}") for run in self.runs],
            "against": self.against,
            "against_runs": [float(f"{run:.5g}") for run in self.against_runs],
            "ratio": self.ratio,
            "goal": self.goal,
            "reached": self.reached,
        }


def quicker(
    section: str, name: str, runs: Sequence[float], against: str, against_runs: Sequence[float], goal_ratio: float | None = None
) -> Figure:
    """Seconds that have to be `goal_ratio` times fewer than those of something else; without a goal, a comparison only."""
    ratio = statistics.median(against_runs) / statistics.median(runs)
    if goal_ratio is None:
        return Figure(section, name, "s", runs, against, against_runs, ratio)
    return Figure(section, name, "s", runs, against, against_runs, ratio, f"{goal_ratio:g}x", ratio >= goal_ratio)


def faster(
    section: str,
    name: str,
    unit: str,
    runs: Sequence[float],
    against: str,
    against_runs: Sequence[float],
    goal_ratio: float | None = None,
) -> Figure:
    """A speed that has to be `goal_ratio` times that of something else; without a goal, a comparison only."""
    ratio = statistics.median(runs) / statistics.median(against_runs)
    if goal_ratio is None:
        return Figure(section, name, unit, runs, against, against_runs, ratio)
    return Figure(section, name, unit, runs, against, against_runs, ratio, f"{goal_ratio:g}x", ratio >= goal_ratio)


def at_most(section: str, name: str, unit: str, runs: Sequence[float], ceiling: float) -> Figure:
    """A figure whose median must not be above `ceiling`."""
    return Figure(section, name, unit, runs, goal=f"at most {ceiling:g}", reached=statistics.median(runs) <= ceiling)


def at_least(section: str, name: str, unit: str, runs: Sequence[float], floor: float) -> Figure:
    """A figure whose median must not be below `floor`."""
    return Figure(section, name, unit, runs, goal=f"at least {floor:g}", reached=statistics.median(runs) >= floor)


def table(figures: Sequence[Figure], notes: Sequence[str], *, quiet: bool = True) -> str:
    """A Markdown table and the notes below it, one line each. No goal counts as reached unless the machine was `quiet`."""
    head = ["figure", "measured", "compared with", "times better", "goal", "reached"]
    body = []
    for figure in figures:
        against = figure.against
        if figure.against_runs:
            against = f"{against}: {spread(figure.against_runs)}"
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
        reached = verdict(figure.goal, figure.reached, quiet=quiet)
        body.append([titled(figure.name, figure.unit), spread(figure.runs), against, ratio, figure.goal, reached])
    return markdown(head, ["---", "---:", "---", "---:", "---", "---"], body, notes)
