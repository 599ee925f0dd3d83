"""Random numbers that depend on a seed and a position and on nothing else: Philox 4x64 with 10 rounds.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (2011). The words are those of NumPy's `Philox`
with the seed as key and the position as the second word of the counter, see `uniform` in `engine/sampler.py`.
"""

from __future__ import annotations

from headrace.kernels.dots import inline
from headrace.kernels.scalars import multiply_high

# the constants of the paper, as signed words
_MULTIPLIER_0 = 0xD2E7470EE14C6C93 - 2**64
_MULTIPLIER_1 = 0xCA5A826395121157 - 2**64
_WEYL_0 = 0x9E3779B97F4A7C15 - 2**64
_WEYL_1 = 0xBB67AE8584CAA73B - 2**64
_ROUNDS = 10
_MANTISSA_BITS = 53


@inline
def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) of one position under one seed; `seed` is the word of 64 bits, whatever its sign."""
    # NumPy adds one to the counter before it makes the first block
    c0, c1, c2, c3 = 1, position, 0, 0
    k0, k1 = seed, 0
    for _ in range(_ROUNDS):
        high0, low0 = multiply_high(_MULTIPLIER_0, c0), _MULTIPLIER_0 * c0
        high1, low1 = multiply_high(_MULTIPLIER_1, c2), _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += _WEYL_0
        k1 += _WEYL_1
    return ((c0 >> 11) & ((1 << _MANTISSA_BITS) - 1)) * (1.0 / (1 << _MANTISSA_BITS))
