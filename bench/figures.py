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


def titled(name: str, unit: str) -> str:
    """A figure's name with its unit, if it has one."""
    return f"{name}, {unit}" if unit else name


def verdict(goal: str, reached: bool | None, *, quiet: bool) -> str:
    """What the table says of a goal; none counts as reached unless the machine was `quiet`."""
    if not goal:
        return ""
    return {True: "yes", False: "no", None: "not measured"}[reached] if quiet else "machine busy"


def markdown(head: Sequence[str], columns: Sequence[str], body: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """A Markdown table whose `columns` are aligned as `---` or `---:` says, and the notes below it, one line each."""
    text = "\n".join("| " + " | ".join(line) + " |" for line in (head, columns, *body))
    return text + "\n\n" + "\n".join(notes) + "\n"


def table(rows: Sequence[Row], notes: Sequence[str], *, quiet: bool = True) -> str:
    """A Markdown table and the notes below it, one line each. No goal counts as reached unless the machine was `quiet`."""
    engines = [engine for engine in TITLES if any(engine in row.runs for row in rows)]
    head = ["figure", *(TITLES[engine] for engine in engines), "times better", "goal", "reached", "times its better setting"]
    body = []
    for row in rows:
        cells = [spread(row.runs[engine]) if engine in row.runs else "" for engine in engines]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        reached = verdict(row.goal, row.reached, quiet=quiet)
        best = "" if row.best_ratio is None else f"{row.best_ratio:.2f}"
        body.append([titled(row.name, row.unit), *cells, ratio, row.goal, reached, best])
    return markdown(head, ["---", *["---:"] * len(engines), "---:", "---", "---", "---:"], body, notes)


def rewritten(text: str, new: str, mark: str) -> str:
    """`text` with what lies between its two marks, `<!-- mark:begin -->` and `<!-- mark:end -->`, replaced.

    Raises:
        ValueError: the marks are not there once each, in their order.
    """
    begin, end = (f"<!-- {mark}:{side} -->" for side in ("begin", "end"))
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the file needs one line {begin} and after it one line {end}: put them where the table belongs")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{new.strip()}\n{end}{after}"
