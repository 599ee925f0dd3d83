"""What it costs to compute, fetch and write a page here, learnt from what was done so far.

Computing n tokens on top of `past` takes about n x (a + b x middle of their positions): a from the weights, b from
attention. Both are fitted by least squares over the chunks that were computed, older ones counting less. Reading and
writing are seconds per byte, as moving averages: of reading those that somebody waits, of writing, which nobody waits for,
those that the processor is taken from others. What was never measured is None: nobody guesses.

What a process has measured is where the next one begins (`read_prices`, `save_prices`), by the number of its threads: the past
that it finds on disk has a price before it has computed anything. Seconds are measured by the caller.
"""

from __future__ import annotations

import math
from typing import Any

from headrace.kv.residency import Prices
from headrace.kv.stores import Journal
from headrace.model.step import PAGE_TOKENS

_NAME = "prices"

FORGETTING = 0.98
"""Weight of all measurements so far when a new one comes: half is forgotten after 34 chunks."""
MOVING_SHARE = 0.2
"""Weight of the newest read or write."""
OUTLIER_RATIO = 4.0
"""A measurement counts as no more, and no less, than so many times what was expected: a process that lost its core, or a disk
that stalled once, must not decide what is done for the next minutes, and without being done nothing is measured again."""
RESUMED_TOKENS = 256.0
"""What an earlier process measured counts as one chunk of so many tokens: the first one of this process weighs as much."""
FEWEST_TOKENS = 8
"""Chunks of fewer tokens are bound by the weights and say nothing of a prefill."""


class PriceBook:
    """Measured prices. Tokens are new tokens of one sequence; seconds are of the whole step."""

    def __init__(self) -> None:
        # sums of w, w x, w x^2, w y, w x y over chunks: x the middle position, y seconds per token, w tokens
        self._sums = [0.0] * 5
        self.read_s_per_byte: float | None = None
        self.write_s_per_byte: float | None = None

    def computed(self, num_tokens: int, past_tokens: int, seconds: float) -> None:
        """A chunk of a prompt was computed."""
        if num_tokens < FEWEST_TOKENS or seconds <= 0:
            return
        x, y = past_tokens + num_tokens / 2, seconds / num_tokens
        expected_s = self.compute_s(num_tokens, past_tokens)
        if expected_s is not None:
            y = _within(y, expected_s / num_tokens)
        news = (1.0, x, x * x, y, x * y)
        self._sums = [FORGETTING * old + num_tokens * new for old, new in zip(self._sums, news, strict=True)]

    def read(self, num_bytes: int, seconds: float) -> None:
        """Bytes were read from disk and checked."""
        self.read_s_per_byte = _moved(self.read_s_per_byte, num_bytes, seconds)

    def written(self, num_bytes: int, work_s: float) -> None:
        """Bytes were written to disk, which took so many seconds of a processor."""
        self.write_s_per_byte = _moved(self.write_s_per_byte, num_bytes, work_s)

    def compute_s(self, num_tokens: int, past_tokens: int) -> float | None:
        """Seconds to compute tokens on top of a past; None before anything was computed."""
        line = self._line()
        return None if line is None else num_tokens * (line[0] + line[1] * (past_tokens + num_tokens / 2))

    def read_s(self, num_bytes: int) -> float | None:
        """Seconds to read bytes from disk; None before anything was read."""
        return None if self.read_s_per_byte is None else num_bytes * self.read_s_per_byte

    def write_s(self, num_bytes: int) -> float | None:
        """Seconds of a processor to write bytes to disk; None before anything was written."""
        return None if self.write_s_per_byte is None else num_bytes * self.write_s_per_byte

    def state(self) -> dict[str, Any]:
        """What was measured, for `resume`."""
        return {"compute": self._sums, "read": self.read_s_per_byte, "write": self.write_s_per_byte}

    def resume(self, state: object) -> None:
        """Begins with the `state` of an earlier process; whatever is no such state is left out."""
        if not isinstance(state, dict):
            return
        sums = state.get("compute")
        if isinstance(sums, list) and len(sums) == len(self._sums) and all(map(_is_price, sums)) and sums[0] > 0:
            self._sums = [RESUMED_TOKENS / sums[0] * each for each in sums]
        read, write = state.get("read"), state.get("write")
        self.read_s_per_byte = read if _is_price(read) else None
        self.write_s_per_byte = write if _is_price(write) else None

    def of_pages(self, page_bytes: int) -> Prices:
        """Prices of a page in memory and on disk, for the rule of residency.

        The rule needs some figures from the start, and only their ratios matter to it: before a prefill was measured, a page
        costs one second to compute; before a read was, a tenth of that to fetch. No moves are decided by these two alone.
        """
        line = self._line()
        compute_s, slope_s = (1.0, 0.0) if line is None else (PAGE_TOKENS * line[0], PAGE_TOKENS**2 * line[1])
        fetch_s = self.read_s(page_bytes)
        return Prices((0.0, 0.1 * compute_s if fetch_s is None else fetch_s), compute_s, slope_s, (page_bytes, page_bytes))

    def _line(self) -> tuple[float, float] | None:
        """Seconds per token at position 0, and what each position adds; neither is negative."""
        w, wx, wxx, wy, wxy = self._sums
        if w <= 0:
            return None
        spread = wxx - wx * wx / w
        slope = max(0.0, (wxy - wx * wy / w) / spread) if spread > 1e-6 * wxx else 0.0
        base = (wy - slope * wx) / w
        if base <= 0:  # a line through the origin, rather than a negative price
            return 0.0, wxy / wxx
        return base, slope


def _moved(old: float | None, num_bytes: int, seconds: float) -> float | None:
    if num_bytes <= 0 or seconds < 0:
        return old
    new = seconds / num_bytes
    return new if old is None else old + MOVING_SHARE * (_within(new, old) - old)


def _within(measured: float, expected: float) -> float:
    return min(max(measured, expected / OUTLIER_RATIO), expected * OUTLIER_RATIO)


def _is_price(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def read_prices(journal: Journal, threads: int) -> object:
    """The state of prices that a process with so many threads has left, if one has."""
    content = journal.read(_NAME)
    return content.get(str(threads)) if isinstance(content, dict) else None


def save_prices(journal: Journal, threads: int, prices: PriceBook) -> bool:
    """Leaves prices for the next process: those of the last one that ended count. False if they are not kept."""

    def put(content: object) -> object:
        return {**(content if isinstance(content, dict) else {}), str(threads): prices.state()}

    return journal.merge(_NAME, put)
