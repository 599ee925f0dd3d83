"""Tables of rope angles: for each position, cosines and sines as the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.kernels.runtime import Memory
from headrace.model.config import RopeConfig

_POSITIONS_AT_ONCE = 1024


class AngleTables:
    """One table per rope, filled as far as positions have been used: a long context costs neither time nor memory before."""

    def __init__(self, ropes: Sequence[RopeConfig], context_tokens: int) -> None:
        self._ropes, self._num_positions, self._num_filled = tuple(ropes), context_tokens, 0
        self._memories = [Memory(4 * rope.rotated * context_tokens) for rope in ropes]
        self.addresses = tuple(memory.address for memory in self._memories)

    def cover(self, num_positions: int) -> None:
        """Makes the rows of positions [0, num_positions) ready to be read; rows that are there are not touched."""
        if num_positions <= self._num_filled:
            return
        assert num_positions <= self._num_positions, "the tables were made for a shorter context"
        rounded = -(-num_positions // _POSITIONS_AT_ONCE) * _POSITIONS_AT_ONCE
        end = min(rounded, self._num_positions)
        for rope, memory in zip(self._ropes, self._memories, strict=True):
            table = memory.floats(0, self._num_positions * rope.rotated).reshape(-1, rope.rotated)
            fill_angles(rope, table[self._num_filled : end], self._num_filled)
        self._num_filled = end


def fill_angles(rope: RopeConfig, out: npt.NDArray[np.float32], start: int = 0) -> None:
    """Fills rows of [cos: rotated / 2][sin: rotated / 2] for positions from `start` on.

    Angles are computed in float64: in float32 a position of 100,000 would already be off by a hundredth of a turn.

    Args:
        rope: base, scale and factors.
        out: float32 [positions, rotated].
        start: position of the first row.
    """
    half = rope.rotated // 2
    frequencies = rope.base ** (-np.arange(half, dtype=np.float64) / half) * rope.scale
    if rope.factors:
        frequencies /= np.array(rope.factors)
    for first in range(0, len(out), _POSITIONS_AT_ONCE):
        part = out[first : first + _POSITIONS_AT_ONCE]
        angles = np.arange(start + first, start + first + len(part), dtype=np.float64)[:, None] * frequencies
        part[:, :half] = np.cos(angles)
        part[:, half:] = np.sin(angles)
