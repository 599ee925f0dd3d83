"""Tables of rope angles: for each position, cosines and sines as the kernels read them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.model.config import RopeConfig

_POSITIONS_AT_ONCE = 4096


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
