"""What a step costs in seconds, learnt from the steps that were run.

A step computes one token for each of its decode rows and some tokens of prompts. Its time is taken as

    time of the decode rows alone + n x (a + b x middle of the positions of the n prompt tokens)

The first part is learnt for each number of rows as the median of the last steps that computed nothing else, so that one
stall changes it by nothing; a and b are those of a `PriceBook`, where an outlier counts as four times what was expected.
A step of prompts alone is taken to cost at least what a step of one decode row costs: it reads the same weights.

What was never measured is None: nobody guesses. Between two numbers of rows that were measured, and beyond them, the
time of a step is taken from below: it grows with the rows, by less and less. A bound that is a multiple of it errs to
the safe side then.

Knows no clock: seconds are measured by the caller.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from headrace.kv.prices import PriceBook

KEPT_STEPS = 5
"""The time of decode rows is the median of so many steps: two stalls among them change nothing."""
FRESH_OBSERVATIONS = 128
"""A measured time is old when so many steps were observed after it: pasts have grown since."""
NEAR_ROWS_RATIO = 4 / 3
"""Numbers of rows count as near when they differ by no more than this factor."""
SMALLEST_SHARE = 0.1
"""The tokens of prompts take at least this share of a step that has some: a stall in the time of its rows may hide them."""


@dataclass(frozen=True)
class StepObservation:
    """What was computed in one go, and how long it took.

    `decode_rows` and `prompt_tokens` are those of one step, of which `steps` were run. `past_tokens` is how many tokens the
    prompt tokens of the step followed, on average over these tokens (for one chunk: the tokens before it). `seconds` is
    the time of all steps together.
    """

    decode_rows: int
    prompt_tokens: int
    past_tokens: float
    steps: int
    seconds: float


@dataclass
class _Rows:
    """Seconds of the last steps of one number of decode rows, and the number of the observation that came last."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    median_s: float = 0.0
    observation: int = 0


class StepCosts:
    """Learnt seconds of steps, by their decode rows and prompt tokens."""

    def __init__(self) -> None:
        self._rows: dict[int, _Rows] = {}
        self._measured: list[int] = []  # numbers of rows in `_rows`, ascending
        self._prompts = PriceBook()
        self._observations = 0

    def observe(self, seen: StepObservation) -> None:
        """Learns from steps that were run; a time or a number of steps that cannot be is left out."""
        if seen.steps <= 0 or not 0 < seen.seconds < math.inf:
            return
        self._observations += 1
        step_s = seen.seconds / seen.steps
        if seen.prompt_tokens:
            rows_s = self.decode_s(max(1, seen.decode_rows)) or 0.0
            prompt_s = max(step_s - rows_s, SMALLEST_SHARE * step_s)
            self._prompts.computed(seen.prompt_tokens, round(seen.past_tokens), prompt_s)
        elif seen.decode_rows:
            if seen.decode_rows not in self._rows:
                self._rows[seen.decode_rows] = _Rows()
                insort(self._measured, seen.decode_rows)
            rows = self._rows[seen.decode_rows]
            rows.last.append(step_s)
            rows.median_s = median_low(rows.last)
            rows.observation = self._observations

    def decode_s(self, rows: int) -> float | None:
        """Seconds of a step of decode rows alone, undisturbed by prompts; None before any was measured."""
        if rows <= 0:
            return 0.0
        if (exact := self._rows.get(rows)) is not None:
            return exact.median_s
        if not self._measured:
            return None
        at = bisect_left(self._measured, rows)
        if at == len(self._measured):
            return self._rows[self._measured[-1]].median_s
        above = self._measured[at]
        below = self._measured[at - 1] if at else 0
        below_s = self._rows[below].median_s if at else 0.0
        return below_s + (self._rows[above].median_s - below_s) * (rows - below) / (above - below)

    def is_measured(self, rows: int) -> bool:
        """Whether a step of about so many decode rows alone was measured not long ago."""
        fresh_from = self._observations - FRESH_OBSERVATIONS
        at = bisect_left(self._measured, rows / NEAR_ROWS_RATIO)
        while at < len(self._measured) and self._measured[at] <= rows * NEAR_ROWS_RATIO:
            if self._rows[self._measured[at]].observation > fresh_from:
                return True
            at += 1
        return False

    def prompt_s(self, tokens: int, past_tokens: int) -> float | None:
        """Seconds that tokens of a prompt add to a step; None before any were measured."""
        return self._prompts.compute_s(tokens, past_tokens) if tokens > 0 else 0.0

    def step_s(self, rows: int, prompt_tokens: int, past_tokens: int) -> float | None:
        """Seconds of a step of decode rows and prompt tokens that follow a past; None before both parts were measured."""
        rows_s = self.decode_s(max(1, rows) if prompt_tokens else rows)
        prompt_s = self.prompt_s(prompt_tokens, past_tokens)
        return None if rows_s is None or prompt_s is None else rows_s + prompt_s
