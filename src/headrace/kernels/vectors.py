"""SIMD vectors for Numba: types, memory access and lane-wise arithmetic, as LLVM intrinsics.

Three 512-bit logical vectors, whatever the machine's registers:

    Bytes   64 x 8 bits
    Ints    16 x 32 bits, signed
    Floats  16 x float32

Memory is named by plain integer addresses, so kernels have one signature and no array headers.
Nothing here is fused, reassociated or approximated unless its name says so: bits are the same wherever it runs.

In a counting build (`level.use_level(..., counting=True)`) every access also calls `headrace_count(address, bytes,
is_store)`, which the caller supplies as a symbol.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, lower_builtin, register_model, type_callable

from headrace.kernels import level as _level

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
LANES = 16


class Vector(types.Type):  # type: ignore[misc]  # numba is untyped
    """A Numba type that is one LLVM vector."""

    def __init__(self, name: str, element: Any, lanes: int) -> None:
        self.llvm = ir.VectorType(element, lanes)
        super().__init__(name=name)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


Bytes = Vector("Bytes", I8, 64)
Ints = Vector("Ints", I32, LANES)
Floats = Vector("Floats", F32, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_SHORTS = ir.VectorType(I16, LANES)


def splat(builder: Any, scalar: Any, vector_type: Any) -> Any:
    """An LLVM vector that holds `scalar` in every lane."""
    undefined = ir.Constant(vector_type, ir.Undefined)
    one = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, vector_type.count), [0] * vector_type.count))


def constant(vector_type: Any, value: float) -> Any:
    """An LLVM constant vector that holds `value` in every lane."""
    return ir.Constant(vector_type, [ir.Constant(vector_type.element, value)] * vector_type.count)


def call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """A call of an LLVM intrinsic or an external symbol."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _report(builder: Any, address: Any, num_bytes: int, is_store: bool) -> None:
    if _level.counting():
        call(builder, "headrace_count", ir.VoidType(), [address, I64(num_bytes), I64(int(is_store))])


def llvm_load(builder: Any, address: Any, llvm_type: Any, num_bytes: int) -> Any:
    """An unaligned load of `llvm_type` from an integer address."""
    _report(builder, address, num_bytes, False)
    pointer = builder.inttoptr(address, llvm_type.as_pointer())
    return builder.load(pointer, align=1, typ=llvm_type)


def llvm_store(builder: Any, address: Any, value: Any, num_bytes: int) -> None:
    """An unaligned store to an integer address."""
    _report(builder, address, num_bytes, True)
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _loader(result: Any, memory_type: Any, num_bytes: int, convert: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return convert(builder, llvm_load(builder, arguments[0], memory_type, num_bytes))

        return result(types.int64), generate

    return load


def _storer(argument_type: Any, num_bytes: int, convert: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            llvm_store(builder, arguments[0], convert(builder, arguments[1]), num_bytes)
            return context.get_dummy_value()

        return types.void(types.int64, argument_type), generate

    return store


def _same(builder: Any, value: Any) -> Any:
    return value


def _f16_to_f32(builder: Any, halves: Any) -> Any:
    """float16 widened; by integer arithmetic on the portable level, which assumes no instruction for it."""
    if _level.current().name != "portable":
        return builder.fpext(builder.bitcast(halves, _HALVES), Floats.llvm)
    bits = builder.zext(halves, Ints.llvm)
    magnitude = builder.and_(bits, constant(Ints.llvm, 0x7FFF))
    # The exponent moves to float32's place; the product adds the difference of the biases, subnormals included.
    shifted = builder.bitcast(builder.shl(magnitude, constant(Ints.llvm, 13)), Floats.llvm)
    finite = builder.bitcast(builder.fmul(shifted, constant(Floats.llvm, 2.0**112)), Ints.llvm)
    special = builder.or_(finite, constant(Ints.llvm, 0x7F800000))
    is_special = builder.icmp_unsigned(">=", magnitude, constant(Ints.llvm, 0x7C00))
    value = builder.select(is_special, special, finite)
    sign = builder.shl(builder.and_(bits, constant(Ints.llvm, 0x8000)), constant(Ints.llvm, 16))
    return builder.bitcast(builder.or_(value, sign), Floats.llvm)


def _bf16_to_f32(builder: Any, halves: Any) -> Any:
    wide = builder.zext(halves, Ints.llvm)
    return builder.bitcast(builder.shl(wide, constant(Ints.llvm, 16)), Floats.llvm)


def _f32_to_f16(builder: Any, value: Any) -> Any:
    """Rounded to nearest; clamped so that no infinity is stored, NaN becomes the lower bound."""
    top, bottom = constant(Floats.llvm, 65504.0), constant(Floats.llvm, -65504.0)
    value = builder.select(builder.fcmp_ordered(">", value, bottom), value, bottom)
    value = builder.select(builder.fcmp_ordered("<", value, top), value, top)
    if _level.current().name != "portable":
        return builder.bitcast(builder.fptrunc(value, _HALVES), _SHORTS)
    bits = builder.bitcast(value, Ints.llvm)
    sign = builder.and_(builder.lshr(bits, constant(Ints.llvm, 16)), constant(Ints.llvm, 0x8000))
    magnitude = builder.and_(bits, constant(Ints.llvm, 0x7FFFFFFF))
    # Below the smallest normal float16, adding 0.5 leaves the rounded subnormal in the low bits of the sum.
    half = constant(Floats.llvm, 0.5)
    tiny = builder.sub(
        builder.bitcast(builder.fadd(builder.bitcast(magnitude, Floats.llvm), half), Ints.llvm),
        builder.bitcast(half, Ints.llvm),
    )
    odd = builder.and_(builder.lshr(magnitude, constant(Ints.llvm, 13)), constant(Ints.llvm, 1))
    rebiased = builder.sub(magnitude, constant(Ints.llvm, (112 << 23) - 0xFFF))
    normal = builder.lshr(builder.add(rebiased, odd), constant(Ints.llvm, 13))
    is_tiny = builder.icmp_unsigned("<", magnitude, constant(Ints.llvm, 113 << 23))
    return builder.trunc(builder.or_(builder.select(is_tiny, tiny, normal), sign), _SHORTS)


_BYTES16 = ir.VectorType(I8, LANES)
_SHORT_FLOAT_SHIFT = 7  # bits of float16 that a short float lacks at its lower end


def _short_to_f32(builder: Any, short: Any) -> Any:
    """Short floats (see `page_formats.py`) widened."""
    return _f16_to_f32(builder, builder.shl(builder.zext(short, _SHORTS), constant(_SHORTS, _SHORT_FLOAT_SHIFT)))


def _f32_to_short(builder: Any, value: Any) -> Any:
    """Rounded to float16, then up to the next short float; of values from 0 on, well below the largest float16."""
    up = builder.add(_f32_to_f16(builder, value), constant(_SHORTS, (1 << _SHORT_FLOAT_SHIFT) - 1))
    return builder.trunc(builder.lshr(up, constant(_SHORTS, _SHORT_FLOAT_SHIFT)), _BYTES16)


load_bytes = _loader(Bytes, Bytes.llvm, 64, _same)
load_floats = _loader(Floats, Floats.llvm, 64, _same)
load_f16 = _loader(Floats, _SHORTS, 32, _f16_to_f32)
load_bf16 = _loader(Floats, _SHORTS, 32, _bf16_to_f32)
load_short_floats = _loader(Floats, _BYTES16, 16, _short_to_f32)
load_u8_ints = _loader(Ints, _BYTES16, 16, lambda b, v: b.zext(v, Ints.llvm))
load_i8_ints = _loader(Ints, _BYTES16, 16, lambda b, v: b.sext(v, Ints.llvm))
store_floats = _storer(Floats, 64, _same)
store_f16 = _storer(Floats, 32, _f32_to_f16)
store_short_floats_up = _storer(Floats, 16, _f32_to_short)
store_ints_as_i8 = _storer(Ints, 16, lambda b, v: b.trunc(v, _BYTES16))

load_i64 = _loader(types.int64, I64, 8, _same)
load_u8 = _loader(types.int64, I8, 1, lambda b, v: b.zext(v, I64))
load_i8 = _loader(types.int64, I8, 1, lambda b, v: b.sext(v, I64))
load_f32 = _loader(types.float32, F32, 4, _same)
load_f16_scalar = _loader(types.float32, I16, 2, lambda b, v: b.extract_element(_f16_to_f32(b, splat(b, v, _SHORTS)), I32(0)))
load_bf16_scalar = _loader(types.float32, I16, 2, lambda b, v: b.bitcast(b.shl(b.zext(v, I32), I32(16)), F32))
store_i64 = _storer(types.int64, 8, _same)
store_i32 = _storer(types.int64, 4, lambda b, v: b.trunc(v, I32))
store_i16 = _storer(types.int64, 2, lambda b, v: b.trunc(v, I16))
load_u16 = _loader(types.int64, I16, 2, lambda b, v: b.zext(v, I64))
store_f32 = _storer(types.float32, 4, _same)


@intrinsic
def splat_float(typing_context: Any, value: Any) -> Any:
    """float32 in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return splat(builder, arguments[0], Floats.llvm)

    return Floats(types.float32), generate


@intrinsic
def splat_int(typing_context: Any, value: Any) -> Any:
    """The low 32 bits of an integer in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return splat(builder, builder.trunc(arguments[0], I32), Ints.llvm)

    return Ints(types.int64), generate


@intrinsic
def lane(typing_context: Any, vector: Any, index: Any) -> Any:
    """One lane of a vector of floats."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.extract_element(arguments[0], builder.trunc(arguments[1], I32))

    return types.float32(Floats, types.int64), generate


def _binary(vector: Vector, instruction: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return getattr(builder, instruction)(*arguments)

    return generate


def _register_operators() -> None:
    table = {
        (operator.add, Floats): "fadd",
        (operator.sub, Floats): "fsub",
        (operator.mul, Floats): "fmul",
        (operator.truediv, Floats): "fdiv",
        (operator.add, Ints): "add",
        (operator.sub, Ints): "sub",
        (operator.mul, Ints): "mul",
        (operator.and_, Ints): "and_",
        (operator.or_, Ints): "or_",
        (operator.rshift, Ints): "lshr",
        (operator.or_, Bytes): "or_",
        (operator.and_, Bytes): "and_",
    }
    by_operator: dict[Any, list[Vector]] = {}
    for (function, vector), instruction in table.items():
        lower_builtin(function, vector, vector)(_binary(vector, instruction))
        by_operator.setdefault(function, []).append(vector)
    for function, vectors in by_operator.items():
        _type_operator(function, tuple(vectors))


def _type_operator(function: Any, vectors: tuple[Vector, ...]) -> None:
    @type_callable(function)
    def _(context: Any) -> Any:
        def typer(left: Any, right: Any) -> Any:
            return left if left in vectors and right == left else None

        return typer


_register_operators()


def _unary(result: Vector, argument: Vector, emit: Callable[[Any, Any], Any]) -> Any:
    @intrinsic
    def apply(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(builder, arguments[0])

        return result(argument), generate

    return apply


def _float_call(name: str) -> Callable[[Any, Any], Any]:
    return lambda builder, value: call(builder, f"llvm.{name}.v16f32", Floats.llvm, [value])


ints_to_floats = _unary(Floats, Ints, lambda b, v: b.sitofp(v, Floats.llvm))
floats_to_ints = _unary(Ints, Floats, lambda b, v: b.fptosi(v, Ints.llvm))
bits_as_floats = _unary(Floats, Ints, lambda b, v: b.bitcast(v, Floats.llvm))
absolute = _unary(Floats, Floats, _float_call("fabs"))
round_even = _unary(Floats, Floats, _float_call("roundeven"))


def _immediate(vector: Vector, emit: Callable[[Any, Any, Any], Any]) -> Any:
    """An operation of a vector with a constant integer that is the same in every lane."""

    @intrinsic(prefer_literal=True)
    def apply(typing_context: Any, value: Any, amount: Any) -> Any:
        if not isinstance(amount, types.IntegerLiteral):
            return None
        number = amount.literal_value

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(builder, arguments[0], constant(vector.llvm, number))

        return vector(vector, amount), generate

    return apply


mask_bytes = _immediate(Bytes, lambda b, v, c: b.and_(v, c))
shift_bytes_right = _immediate(Bytes, lambda b, v, c: b.lshr(v, c))
shift_bytes_left = _immediate(Bytes, lambda b, v, c: b.shl(v, c))
shift_ints_left = _immediate(Ints, lambda b, v, c: b.shl(v, c))
shift_ints_right = _immediate(Ints, lambda b, v, c: b.lshr(v, c))
mask_ints = _immediate(Ints, lambda b, v, c: b.and_(v, c))
add_to_ints = _immediate(Ints, lambda b, v, c: b.add(v, c))


def _ternary(emit: Callable[[Any, Any, Any, Any], Any]) -> Any:
    @intrinsic
    def apply(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(builder, *arguments)

        return Floats(Floats, Floats, Floats), generate

    return apply


def llvm_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once where the level has such an instruction, twice (mul, add) where it has none."""
    if _level.current().name == "portable":
        return builder.fadd(builder.fmul(a, b), c)
    return call(builder, "llvm.fma.v16f32", a.type, [a, b, c])


fma = _ternary(llvm_fma)
# c where a > b, else 0
zero_unless_greater = _ternary(lambda b, x, y, z: b.select(b.fcmp_ordered(">", x, y), z, constant(Floats.llvm, 0.0)))


@intrinsic
def maximum(typing_context: Any, a: Any, b: Any) -> Any:
    """The larger of two, lane by lane; the second where either is NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return Floats(Floats, Floats), generate


def _fold(combine: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Lanes i and i + 8, then i + 4, 2, 1: one fixed tree on every level."""

    def emit(builder: Any, value: Any) -> Any:
        undefined = ir.Constant(Floats.llvm, ir.Undefined)
        for half in (8, 4, 2, 1):
            order = ir.Constant(ir.VectorType(I32, LANES), [I32((i + half) % LANES) for i in range(LANES)])
            value = combine(builder, value, builder.shuffle_vector(value, undefined, order))
        return builder.extract_element(value, I32(0))

    return emit


def _reduction(combine: Callable[[Any, Any, Any], Any]) -> Any:
    emit = _fold(combine)

    @intrinsic
    def apply(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(builder, arguments[0])

        return types.float32(Floats), generate

    return apply


sum_lanes = _reduction(lambda b, x, y: b.fadd(x, y))
max_lanes = _reduction(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


def _shuffled(builder: Any, value: Any, order: list[int]) -> Any:
    undefined = ir.Constant(value.type, ir.Undefined)
    return builder.shuffle_vector(value, undefined, ir.Constant(ir.VectorType(I32, len(order)), [I32(i) for i in order]))


@intrinsic
def sum_quads(typing_context: Any, value: Any) -> Any:
    """Lanes 0, 4, 8, 12 hold the sum of themselves and the three lanes that follow."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total = arguments[0]
        for distance in (1, 2):
            total = builder.add(total, _shuffled(builder, total, [i ^ distance for i in range(LANES)]))
        return total

    return Ints(Ints), generate


@intrinsic
def int_lane(typing_context: Any, vector: Any, index: Any) -> Any:
    """One lane of a vector of integers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sext(builder.extract_element(arguments[0], builder.trunc(arguments[1], I32)), I64)

    return types.int64(Ints, types.int64), generate


@intrinsic
def keep_between(typing_context: Any, value: Any, first: Any, low: Any, high: Any) -> Any:
    """Lane i where low <= first + i <= high, else minus infinity."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        floats, *bounds = arguments
        base, lowest, highest = (splat(builder, builder.trunc(bound, I32), Ints.llvm) for bound in bounds)
        number = builder.add(base, ir.Constant(Ints.llvm, [I32(i) for i in range(LANES)]))
        inside = builder.and_(builder.icmp_signed(">=", number, lowest), builder.icmp_signed("<=", number, highest))
        return builder.select(inside, floats, constant(Floats.llvm, float("-inf")))

    return Floats(Floats, types.int64, types.int64, types.int64), generate


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Asks for the cache line at an address that will be read once, soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], I8.as_pointer())
        call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(2), I32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def keep_apart(typing_context: Any) -> Any:
    """Keeps LLVM from copying the function that this stands in into its callers, where it would be compiled once more."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate
