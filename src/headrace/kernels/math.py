"""Elementary functions on 16 lanes, made of plain float32 arithmetic: the same bits on every thread and every call.

Each function states its largest error against the exact value, measured by tests over its whole domain.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.kernels.dots import inline
from headrace.kernels.vectors import (
    add_to_ints,
    bits_as_floats,
    floats_to_ints,
    fma,
    maximum,
    round_even,
    shift_ints_left,
    splat_float,
    zero_unless_greater,
)

_LOG2E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has few enough bits that n * _LN2_HIGH is exact
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
# below this e^x is no normal float32; it is returned as exactly zero
_SMALLEST = np.float32(-87.0)
_LARGEST = np.float32(88.0)
_ONE = np.float32(1.0)
_ZERO = np.float32(0.0)
# 1/n! for the Taylor terms of e^r; |r| <= ln(2)/2 leaves a remainder under 2^-26
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / f) for f in (2, 6, 24, 120, 720, 5040))
_GELU_IN = np.float32(0.7978845608028654)
_GELU_CUBE = np.float32(0.044715)


@inline
def exp(x: Any) -> Any:
    """e^x; 0 for x <= -87, e^88 for x >= 88. Relative error below 2^-22."""
    clamped = maximum(x, splat_float(_SMALLEST))
    clamped = splat_float(_ZERO) - maximum(splat_float(_ZERO) - clamped, splat_float(-_LARGEST))
    n = round_even(clamped * splat_float(_LOG2E))
    r = fma(n, splat_float(-_LN2_HIGH), clamped)
    r = fma(n, splat_float(-_LN2_LOW), r)
    p = fma(splat_float(_C7), r, splat_float(_C6))
    p = fma(p, r, splat_float(_C5))
    p = fma(p, r, splat_float(_C4))
    p = fma(p, r, splat_float(_C3))
    p = fma(p, r, splat_float(_C2))
    p = fma(p, r, splat_float(_ONE))
    p = fma(p, r, splat_float(_ONE))
    power = bits_as_floats(shift_ints_left(add_to_ints(floats_to_ints(n), 127), 23))
    return zero_unless_greater(x, splat_float(_SMALLEST), p * power)


@inline
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return splat_float(_ONE) / (splat_float(_ONE) + exp(splat_float(_ZERO) - x))


@inline
def silu(x: Any) -> Any:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@inline
def gelu(x: Any) -> Any:
    """x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): the tanh form of GELU."""
    u = splat_float(_GELU_IN) * fma(x * x * splat_float(_GELU_CUBE), x, x)
    return x * sigmoid(u + u)
