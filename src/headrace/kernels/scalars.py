"""Single numbers for kernels that decide rather than stream: float64, bits of floats, halves of wide products.

What is written here in plain arithmetic has the same bits on every machine, which a call of the C library would not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headrace.kernels.dots import inline
from headrace.kernels.vectors import F32, I32, I64, LANES, Floats, _loader, _same, _storer, constant

F64 = ir.DoubleType()
_I16 = ir.IntType(16)
_I128 = ir.IntType(128)

load_i32 = _loader(types.int64, I32, 4, lambda b, v: b.sext(v, I64))
load_f64 = _loader(types.float64, F64, 8, _same)
store_f64 = _storer(types.float64, 8, _same)

_LOG2E = 1.4426950408889634
# ln 2 in two parts: the first has few enough bits that n * _LN2_HIGH is exact
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_SMALLEST = -700.0
# 1/n! from n = 13 down to 1; |r| <= ln(2)/2 leaves a remainder under 2^-57
_C13, _C12, _C11, _C10, _C9, _C8 = (1 / f for f in (6227020800, 479001600, 39916800, 3628800, 362880, 40320))
_C7, _C6, _C5, _C4, _C3 = (1 / f for f in (5040, 720, 120, 24, 6))


@intrinsic
def float_bits(typing_context: Any, value: Any) -> Any:
    """The bits of a float32, as a signed number of 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sext(builder.bitcast(arguments[0], I32), I64)

    return types.int64(types.float32), generate


@intrinsic
def bits_float(typing_context: Any, bits: Any) -> Any:
    """The float32 of these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.trunc(arguments[0], I32), F32)

    return types.float32(types.int64), generate


@intrinsic
def bits_double(typing_context: Any, bits: Any) -> Any:
    """The float64 of these 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], F64)

    return types.float64(types.int64), generate


@intrinsic
def multiply_high(typing_context: Any, a: Any, b: Any) -> Any:
    """The upper 64 bits of the product of two unsigned numbers of 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = [builder.zext(argument, _I128) for argument in arguments]
        return builder.trunc(builder.lshr(builder.mul(*wide), ir.Constant(_I128, 64)), I64)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def keep_bits(typing_context: Any, value: Any, bits: Any) -> Any:
    """Lane i where bit i is set, else minus infinity."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kept = builder.bitcast(builder.trunc(arguments[1], _I16), ir.VectorType(ir.IntType(1), LANES))
        return builder.select(kept, arguments[0], constant(Floats.llvm, float("-inf")))

    return Floats(Floats, types.int64), generate


@inline
def exp64(x: float) -> float:
    """e^x for x <= 0 in float64; 0 for x < -700 and for not-a-number. Relative error below 2^-51."""
    if not (x >= _SMALLEST):
        return 0.0
    n = int(x * _LOG2E - 0.5)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = _C13 * r + _C12
    p = p * r + _C11
    p = p * r + _C10
    p = p * r + _C9
    p = p * r + _C8
    p = p * r + _C7
    p = p * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * bits_double((n + 1023) << 52)


@inline
def descending_key(value: np.float32, token: int) -> int:
    """A number that puts tokens in order: the larger value first, the lower id among equals (both zeros are equal)."""
    bits = float_bits(value)
    if bits == -0x80000000:
        bits = 0
    if bits < 0:
        bits ^= 0x7FFFFFFF
    return ((-1 - bits) << 32) | token


@inline
def key_token(key: int) -> int:
    """The token id of a key."""
    return key & 0xFFFFFFFF


@inline
def key_value(key: int) -> np.float32:
    """The value of a key."""
    bits = -1 - (key >> 32)
    if bits < 0:
        bits ^= 0x7FFFFFFF
    return bits_float(bits)
