"""How likely a past is to be used again, and when: learnt by counting, from nothing but what this run has seen.

A *use* is one request: it reads a path of pages and adds to it. What is counted is how long after a use the next one
continued it. Uses are put into cells by what is known the moment they end (turn, new pages, tokens answered, repeats,
pages found), and ages into buckets that grow by AGE_GROWTH, so that a bucket is a constant step in log(age):

    reached[cell, bucket]   uses that got to this age without having been continued
    reused[cell, bucket]    those of them that were continued at this age

A cell rarely has enough uses of its own. Its hazard (chance of being continued in a bucket, once it is reached) is the
hazard of all uses at that age, times one relative risk per fact, times a correction of the cell itself. Relative risks
are fitted by iterative proportional fitting, one for each AGE_GROUP buckets, and drawn towards 1 by pseudo-counts: with
no data every cell has the same constant hazard per step of log(age), which falls as 1 / age, so the order is LRU's.

What a page is worth is not its hazard now: a person who reads an answer for a minute has none at first. It is the best
rate of hits that keeping the page can yield, over all times to keep it until (the Gittins index of the stopping problem):

    rate(cell, age) = max over b > age of  P(continued before b) / E(time kept until continued or b)

With S the chance to get to an age and A its integral, that is the steepest chord (S(age) - S(b)) / (A(b) - A(age)).

Pure: time is the caller's, nothing is drawn at random. Knows no pages, tiers or prices.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_AGES = 40
FIRST_AGE_S = 1.0
AGE_GROWTH = 1.3
AGE_GROUP = 8
"""Buckets that share their relative risks: an octave and a half each."""

PRIOR_HAZARD = 0.05
"""Chance per bucket before anything is known; the same in all, which is LRU's order."""
PRIOR_USES = 20.0
PRIOR_FACT = 3.0
PRIOR_PAIR = 5.0
PRIOR_CELL = 10.0
"""Pseudo-counts: uses behind the prior hazard, and expected reuses behind a relative risk of 1."""
NEIGHBOUR_SHARE = 0.5
"""Weight that neighbouring values of a fact (8 to 15 new pages, 16 to 31) have in each other's relative risk."""
MAX_HAZARD = 0.95
FITTING_ROUNDS = 2
REFRESH_USES = 50
"""Uses between two fits; the first fits come after fewer."""
MAX_TRACKED_USES = 1 << 16
"""Uses whose continuation is still waited for; older ones count no more."""

_TURNS, _SIZES, _ANSWERS, _REPEATS, _DEPTHS = 4, 11, 13, 5, 6
_FACTS = 7  # of the table below; the last two are a pair and the kind
_WIDTH = 64  # values of a fact, with room between those of use and those of last pages
GITTINS_CELLS = 64
"""Cells at a time: as many as keep the chords between all ages in the cache."""
_LATER = np.arange(NUM_AGES + 1) > np.arange(NUM_AGES)[:, None]  # [age, b]
LAST_PAGE_CELL = 0
"""The cell of last pages: mostly only partly filled, they are continued differently from the pages before."""


@dataclass(frozen=True)
class UseFacts:
    """What is known of a use when it ends.

    `turn` is 1 for a past seen for the first time and grows by one with each use that continues the one before;
    `repeats` counts uses in a row that parted from the path at the same page, as questions about one document do.
    """

    turn: int
    num_new_pages: int
    num_known_pages: int
    num_answer_tokens: int
    repeats: int


class ReuseModel:
    """Counts, fits and gives rates. Uses are named by serial numbers that grow by one."""

    def __init__(self) -> None:
        widths = FIRST_AGE_S * np.ones(NUM_AGES)
        for age in range(1, NUM_AGES):
            widths[age] = max(FIRST_AGE_S, (AGE_GROWTH - 1) * widths[:age].sum())
        self._widths_s = widths
        self._ends_s = np.cumsum(widths)
        self._bounds_s: list[float] = self._ends_s.tolist()
        self._cells: dict[tuple[int, ...], int] = {}
        self._facts = np.zeros((64, _FACTS), np.int64)
        self._reached = np.zeros((64, NUM_AGES))
        self._reused = np.zeros((64, NUM_AGES))
        self._rates = np.zeros((64, NUM_AGES + 1))
        self._fitted = np.zeros(64, np.int64)  # the fit that a row of _rates was computed by
        self._all_reached, self._all_reused = np.zeros(NUM_AGES), np.zeros(NUM_AGES)
        self._risk = np.ones((_FACTS, _WIDTH, NUM_AGES // AGE_GROUP))
        self._hazard = np.full(NUM_AGES, PRIOR_HAZARD)
        self._fit = 1
        self._next_fit = 1
        # uses that are waited for: row serial - _first
        self._first = 0
        self._num_uses = 0
        self._use_cell = np.zeros(1024, np.int64)
        self._use_time_s = np.zeros(1024)
        self._open = np.zeros((1024, 2))  # 1 until continued: the pages before the last, the last page
        self._counted = np.zeros(NUM_AGES, np.int64)  # uses before this serial were counted as reaching the bucket's end
        self._cell_of((_WIDTH - 1,) * _FACTS)

    # what happened

    def add(self, facts: UseFacts, now_s: float) -> tuple[int, int]:
        """A use ended now; its serial number and its cell. One that ended before those already known counts as the last."""
        cell = self.cell(facts)
        row = self._num_uses - self._first
        if row:
            now_s = max(now_s, float(self._use_time_s[row - 1]))  # survivors are counted from the oldest on
        if row == len(self._use_cell):
            self._use_cell = np.concatenate([self._use_cell, np.zeros_like(self._use_cell)])
            self._use_time_s = np.concatenate([self._use_time_s, np.zeros_like(self._use_time_s)])
            self._open = np.concatenate([self._open, np.zeros_like(self._open)])
        self._use_cell[row], self._use_time_s[row], self._open[row] = cell, now_s, 1.0
        self._num_uses += 1
        if self._num_uses >= self._next_fit:
            self._count_survivors(now_s)
            self._fit_risks()
            self._next_fit = self._num_uses + min(REFRESH_USES, 1 + self._num_uses // 4)
        return self._num_uses - 1, cell

    def continued(self, serial: int, now_s: float, *, last_page: bool) -> None:
        """A use was continued now, by the pages before its last or by its last page; only the first time counts."""
        row = serial - self._first
        if row < 0 or not self._open[row, int(last_page)]:
            return
        self._open[row, int(last_page)] = 0.0
        bucket = self._bucket(now_s - float(self._use_time_s[row]))
        if bucket == NUM_AGES:
            return
        waiting = self._counted[: bucket + 1] <= serial
        cell = LAST_PAGE_CELL if last_page else int(self._use_cell[row])
        self._reused[cell, bucket] += 1.0
        self._reached[cell, : bucket + 1] += waiting
        if not last_page:
            self._all_reused[bucket] += 1.0
            self._all_reached[: bucket + 1] += waiting

    # what it means

    def cell(self, facts: UseFacts) -> int:
        """The cell of uses with these facts. Counts nothing."""
        turn = min(facts.turn, _TURNS) - 1
        size = min(max(1, facts.num_new_pages).bit_length() - 1, _SIZES - 1)
        answer = min(max(1, facts.num_answer_tokens).bit_length() - 1, _ANSWERS - 1)
        depth = 0 if facts.num_known_pages <= 1 else min(_DEPTHS - 1, (facts.num_known_pages.bit_length() + 1) // 2)
        return self._cell_of((turn, size, answer, min(facts.repeats, _REPEATS - 1), depth, turn * _SIZES + size, 0))

    def rates(self, cells: npt.NDArray[np.int64], ages_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Expected reuses per second of keeping, for cells [N] at ages [N]."""
        stale = np.unique(cells)
        stale = stale[self._fitted[stale] != self._fit]
        if stale.size:
            self._rates[stale] = self._gittins(stale)
            self._fitted[stale] = self._fit
        return self._rates[cells, np.searchsorted(self._ends_s, ages_s, side="right")]

    def rate(self, cell: int, age_s: float) -> float:
        """`rates` of one."""
        if self._fitted[cell] != self._fit:
            self._rates[cell] = self._gittins(np.array([cell]))[0]
            self._fitted[cell] = self._fit
        return float(self._rates[cell, self._bucket(age_s)])

    def chance(self, cell: int, age_s: float) -> float:
        """Probability that a use that got to this age without having been continued will be, before it is beyond all ages.

        Beyond them it is half of what it is in the last bucket.
        """
        alive = self._alive(np.array([cell]))[0]
        age = self._bucket(age_s)
        return float(1.0 - alive[-1] / alive[age]) if age < NUM_AGES else float(1.0 - alive[-1] / alive[-2]) / 2

    def check(self) -> None:
        """Asserts that nothing is reused more often than it is reached."""
        assert (self._reused <= self._reached + 1e-9).all()
        assert (self._all_reused <= self._all_reached + 1e-9).all()
        assert (np.diff(self._counted) <= 0).all()

    def _cell_of(self, facts: tuple[int, ...]) -> int:
        cell = self._cells.get(facts)
        if cell is not None:
            return cell
        cell = self._cells[facts] = len(self._cells)
        if cell == len(self._facts):
            for name in ("_facts", "_reached", "_reused", "_rates", "_fitted"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self._facts[cell] = facts
        return cell

    def _bucket(self, age_s: float) -> int:
        return bisect_right(self._bounds_s, age_s)

    def _count_survivors(self, now_s: float) -> None:
        """Counts every use that got beyond a bucket as having reached it; forgets those that got beyond all."""
        known = self._num_uses - self._first
        ended = np.searchsorted(self._use_time_s[:known], now_s - self._ends_s, side="right") + self._first
        for bucket in range(NUM_AGES):
            start, end = int(self._counted[bucket]), int(ended[bucket])
            if end <= start:
                continue
            rows = slice(start - self._first, end - self._first)
            reached = np.bincount(self._use_cell[rows], self._open[rows, 0], len(self._reached))
            self._reached[:, bucket] += reached
            self._reached[LAST_PAGE_CELL, bucket] += self._open[rows, 1].sum()
            self._all_reached[bucket] += reached.sum()
            self._counted[bucket] = end
        forget = max(int(self._counted[-1]), self._num_uses - MAX_TRACKED_USES) - self._first
        if forget > known // 2:
            self._use_cell[: known - forget] = self._use_cell[forget:known]
            self._use_time_s[: known - forget] = self._use_time_s[forget:known]
            self._open[: known - forget] = self._open[forget:known]
            self._first += forget
            np.maximum(self._counted, self._first, out=self._counted)

    def _fit_risks(self) -> None:
        """The hazard of all uses by age, and the relative risk of each value of each fact by group of ages."""
        near = np.ones(3)
        reached = np.convolve(self._all_reached * self._widths_s, near, "same") / self._widths_s
        reused = np.convolve(self._all_reused, near, "same")
        self._hazard = (reused + PRIOR_USES * PRIOR_HAZARD) / (reached + PRIOR_USES)
        count = len(self._cells)
        groups = (count, NUM_AGES // AGE_GROUP, AGE_GROUP)
        seen = self._reused[:count].reshape(groups).sum(axis=2)
        expected = (self._reached[:count] * self._hazard).reshape(groups).sum(axis=2)
        facts = self._facts[:count]
        for _ in range(FITTING_ROUNDS):
            risks = self._risk[np.arange(_FACTS), facts]  # [cells, facts, groups]
            for fact in range(_FACTS):
                risks[:, fact] = 1.0
                others = expected * risks.prod(axis=1)
                numerator, denominator = (_sums(facts[:, fact], each) for each in (seen, others))
                if fact < 5:
                    numerator, denominator = _with_neighbours(numerator), _with_neighbours(denominator)
                prior = PRIOR_PAIR if fact == 5 else PRIOR_FACT
                self._risk[fact] = (numerator + prior) / (denominator + prior)
                risks[:, fact] = self._risk[fact][facts[:, fact]]
        self._fit += 1

    def _gittins(self, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Rates by age: float64 [cells, NUM_AGES + 1]; the last column is for ages beyond the buckets."""
        alive = self._alive(cells)
        kept_s = np.cumsum(self._widths_s * (alive[:, :-1] + alive[:, 1:]) / 2, axis=1)
        kept_s = np.concatenate([np.zeros((len(cells), 1)), kept_s], axis=1)  # A at bucket starts
        rates = np.empty((len(cells), NUM_AGES + 1))
        for start in range(0, len(cells), GITTINS_CELLS):  # [cells, age, b]
            some = slice(start, start + GITTINS_CELLS)
            lost = alive[some, :-1, None] - alive[some, None, :]
            spent_s = kept_s[some, None, :] - kept_s[some, :-1, None]
            chords = np.divide(lost, spent_s, out=np.zeros_like(lost), where=_LATER)
            rates[some, :NUM_AGES] = chords.max(axis=2)
        rates[:, NUM_AGES] = rates[:, NUM_AGES - 1] / 2
        return rates

    def _alive(self, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Chance to get to the start of each bucket without having been continued: float64 [cells, NUM_AGES + 1]."""
        risks = self._risk[np.arange(_FACTS), self._facts[cells]].prod(axis=1)
        hazards = self._hazard * np.repeat(risks, AGE_GROUP, axis=1)
        expected = (self._reached[cells] * hazards).sum(axis=1)
        own = (self._reused[cells].sum(axis=1) + PRIOR_CELL) / (expected + PRIOR_CELL)
        hazards = np.minimum(hazards * own[:, None], MAX_HAZARD)
        return np.cumprod(np.concatenate([np.ones((len(cells), 1)), 1.0 - hazards], axis=1), axis=1)


def _sums(values: npt.NDArray[np.int64], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sums of weights [cells, groups] by value: [_WIDTH, groups]."""
    return np.stack([np.bincount(values, column, _WIDTH) for column in weights.T], axis=1)


def _with_neighbours(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    mixed = sums.copy()
    mixed[1:-1] += NEIGHBOUR_SHARE * (sums[:-2] + sums[2:])
    return mixed
