"""Figures of a comparison: medians and spreads, what they have to reach, and the table that people read.

Does not know how a figure is measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "headrace"
LLAMA_VARIANTS = ("llama.cpp", "llama.cpp-no-fa")
TITLES = {
    "headrace": "Headrace",
    "llama.cpp": "llama.cpp",
    "llama.cpp-no-fa": "llama.cpp, no flash attention",
    "openvino": "OpenVINO GenAI",
}
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


@dataclass(frozen=True)
class Row:
    """One figure: all runs by engine, the goal in words, and how far it is reached.

    `ratio` is how many times better Headrace's median is than llama.cpp's as it comes (or another rival's, named in the
    goal), and `best_ratio` than llama.cpp's with the better of its settings.
    """

    section: str
    name: str
    unit: str
    runs: Mapping[str, Sequence[float]]
    goal: str = ""
    ratio: float | None = None
    reached: bool | None = None
    best_ratio: float | None = None

    def document(self) -> dict[str, Any]:
        """For the JSON line: medians, and every run."""
        return {
            "section": self.section,
            "figure": self.name,
            "unit": self.unit,
            "median": {engine: statistics.median(runs) for engine, runs in self.runs.items()},
            "runs": {engine: [float(f"{run:.5g}") for run in runs] for engine, runs in self.runs.items()},
            "ratio": self.ratio,
            "best_ratio": self.best_ratio,
            "goal": self.goal,
            "reached": self.reached,
        }


def against(
    section: str,
    name: str,
    unit: str,
    runs: Mapping[str, Sequence[float]],
    goal_ratio: float,
    rivals: Sequence[str] = LLAMA_VARIANTS,
) -> Row:
    """A speed that has to be `goal_ratio` times that of the first of `rivals`; the others are its other settings."""
    medians = [statistics.median(runs[rival]) for rival in rivals if rival in runs]
    goal = f"{goal_ratio:g}x" if tuple(rivals) == LLAMA_VARIANTS else f"{goal_ratio:g}x {TITLES[rivals[0]]}"
    if OURS not in runs or rivals[0] not in runs:
        return Row(section, name, unit, runs, goal)
    ours = statistics.median(runs[OURS])
    ratio = ours / medians[0]
    return Row(section, name, unit, runs, goal, ratio, ratio >= goal_ratio, ours / max(medians))


def at_least(section: str, name: str, unit: str, runs: Sequence[float], floor: float, ceiling: float = math.inf) -> Row:
    """A figure of ours alone that must not be below `floor`; a run above `ceiling` cannot be true and voids the answer."""
    reached = None if max(runs) > ceiling else statistics.median(runs) >= floor
    return Row(section, name, unit, {OURS: runs}, f"at least {floor:g}", None, reached)


def at_most(section: str, name: str, unit: str, runs: Sequence[float], ceiling: float) -> Row:
    """A figure of ours alone that must not be above `ceiling`."""
    return Row(section, name, unit, {OURS: runs}, f"at most {ceiling:g}", None, statistics.median(runs) <= ceiling)


def number(value: float) -> str:
    """1234.5 -> '1,234', 12.34 -> '12.3', 0.8512 -> '0.851': three or more digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def spread(runs: Sequence[float]) -> str:
    """The median, and from where to where the runs went."""
    middle = number(statistics.median(runs))
    return middle if len(runs) == 1 else f"{middle} ({number(min(runs))} to {number(max(runs))})"


def table(rows: Sequence[Row], notes: Sequence[str], *, quiet: bool = True) -> str:
    """A Markdown table and the notes below it, one line each. No goal counts as reached unless the machine was `quiet`."""
    engines = [engine for engine in TITLES if any(engine in row.runs for row in rows)]
    head = ["figure", *(TITLES[engine] for engine in engines), "times better", "goal", "reached", "times its better setting"]
    body = []
    for row in rows:
        cells = [spread(row.runs[engine]) if engine in row.runs else "" for engine in engines]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        reached = {True: "yes", False: "no", None: "not measured" if row.goal else ""}[row.reached]
        reached = reached if quiet or not row.goal else "machine busy"
        best = "" if row.best_ratio is None else f"{row.best_ratio:.2f}"
        body.append([f"{row.name}, {row.unit}", *cells, ratio, row.goal, reached, best])
    lines = [head, ["---"] + ["---:"] * len(engines) + ["---:", "---", "---", "---:"], *body]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return text + "\n\n" + "\n".join(notes) + "\n"


def rewritten(text: str, new: str) -> str:
    """`text` with what lies between its two bench marks replaced.

    Raises:
        ValueError: the marks are not there once each, in their order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the file needs one line {BEGIN} and after it one line {END}: put them where the table belongs")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{new.strip()}\n{END}{after}"
