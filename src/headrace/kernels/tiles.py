"""Tiles: M accumulators side by side in registers, one per row of activations.

A matrix kernel is written once over a tile of M rows; M = 1 gives the matrix-vector product. Each row of a tile is
computed exactly as it would be alone, which is what keeps results independent of how rows were batched.

    IntTile(M)     M x 16 x int32
    FloatTile(M)   M x 16 x float32
    NarrowTile(M)  sums of products of small unsigned weights: 16 x int32, or on AVX2 32 x int16

A tile is an LLVM aggregate; Numba keeps it in an alloca that LLVM dissolves into registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from headrace.kernels import level as _level
from headrace.kernels.vectors import (
    F32,
    I16,
    I32,
    I64,
    Bytes,
    Floats,
    Ints,
    call,
    constant,
    llvm_fma,
    llvm_load,
    llvm_store,
    splat,
)

_SHORTS = ir.VectorType(I16, 32)
_HALF_BYTES = ir.VectorType(ir.IntType(8), 32)
_HALF_SHORTS = ir.VectorType(I16, 16)
_HALF_INTS = ir.VectorType(I32, 8)


class Tile(types.Type):  # type: ignore[misc]  # numba is untyped
    """M vectors of one kind."""

    def __init__(self, kind: str, rows: int) -> None:
        self.kind, self.rows = kind, rows
        super().__init__(name=f"{kind}Tile{rows}")

    @property
    def llvm(self) -> Any:
        """The aggregate; what a narrow accumulator is depends on the level."""
        return ir.ArrayType(_element(self.kind), self.rows)


def _element(kind: str) -> Any:
    if kind == "Float":
        return Floats.llvm
    if kind == "Narrow" and _level.current().name == "avx2":
        return _SHORTS
    return Ints.llvm


@register_model(Tile)
class _TileModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Tile) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


_TILES = {(kind, rows): Tile(kind, rows) for kind in ("Int", "Float", "Narrow") for rows in range(1, 17)}


def _zero(kind: str) -> Any:
    @intrinsic(prefer_literal=True)
    def zero(typing_context: Any, rows: Any) -> Any:
        tile = _TILES[kind, rows.literal_value]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return ir.Constant(tile.llvm, [constant(_element(kind), 0)] * tile.rows)

        return tile(rows), generate

    return zero


zero_ints = _zero("Int")
zero_floats = _zero("Float")
zero_narrow = _zero("Narrow")


def _map_rows(builder: Any, tile: Tile, value: Any, result: Tile, each: Callable[[int, Any], Any]) -> Any:
    output = ir.Constant(result.llvm, ir.Undefined)
    for row in range(tile.rows):
        output = builder.insert_value(output, each(row, builder.extract_value(value, row)), row)
    return output


def _row_address(builder: Any, base: Any, stride: Any, row: int) -> Any:
    return base if row == 0 else builder.add(base, builder.mul(stride, I64(row)))


def _broadcast_int(builder: Any, address: Any, vector: Any = Ints.llvm) -> Any:
    return splat(builder, llvm_load(builder, address, I32, 4), vector)


def _broadcast_float(builder: Any, address: Any) -> Any:
    return splat(builder, llvm_load(builder, address, F32, 4), Floats.llvm)


# ---- integer dot products: 4 columns of 16 rows of weights with 4 bytes of activations ----


def _split(builder: Any, value: Any, half: Any) -> tuple[Any, Any]:
    """The low and the high half of a vector."""
    count = half.count
    undefined = ir.Constant(value.type, ir.Undefined)

    def part(start: int) -> Any:
        order = ir.Constant(ir.VectorType(I32, count), [I32(start + i) for i in range(count)])
        return builder.shuffle_vector(value, undefined, order)

    return part(0), part(count)


def _join(builder: Any, low: Any, high: Any) -> Any:
    count = low.type.count * 2
    order = ir.Constant(ir.VectorType(I32, count), [I32(i) for i in range(count)])
    return builder.shuffle_vector(low, high, order)


def _pairs(builder: Any, unsigned: Any, signed: Any) -> Any:
    """AVX2: u8 x s8, neighbours added, to 32 x int16 (saturating: callers keep the sums in range)."""
    halves = zip(_split(builder, unsigned, _HALF_BYTES), _split(builder, signed, _HALF_BYTES), strict=True)
    return _join(builder, *(call(builder, "llvm.x86.avx2.pmadd.ub.sw", _HALF_SHORTS, [u, s]) for u, s in halves))


def _widen_pairs(builder: Any, shorts: Any) -> Any:
    """AVX2: neighbours of 32 x int16 added, to 16 x int32."""
    ones = constant(_HALF_SHORTS, 1)
    return _join(
        builder,
        *(call(builder, "llvm.x86.avx2.pmadd.wd", _HALF_INTS, [s, ones]) for s in _split(builder, shorts, _HALF_SHORTS)),
    )


def _plain_dot(builder: Any, total: Any, weights: Any, activations: Any, extend: str) -> Any:
    """Products in plain vector code, for levels with no instruction for it."""
    wide = ir.VectorType(I32, 64)
    products = builder.mul(getattr(builder, extend)(weights, wide), builder.sext(activations, wide))
    undefined = ir.Constant(wide, ir.Undefined)
    for part in range(4):
        order = ir.Constant(ir.VectorType(I32, 16), [I32(4 * i + part) for i in range(16)])
        total = builder.add(total, builder.shuffle_vector(products, undefined, order))
    return total


def _neon_dot(builder: Any, total: Any, weights: Any, activations: Any) -> Any:
    quarter_bytes, quarter_ints = ir.VectorType(ir.IntType(8), 16), ir.VectorType(I32, 4)
    parts = []
    for index in range(4):
        pick = ir.Constant(ir.VectorType(I32, 16), [I32(16 * index + i) for i in range(16)])
        lanes = ir.Constant(ir.VectorType(I32, 4), [I32(4 * index + i) for i in range(4)])
        arguments = [
            builder.shuffle_vector(total, total, lanes),
            builder.shuffle_vector(weights, weights, pick),
            builder.shuffle_vector(activations, activations, pick),
        ]
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        assert arguments[1].type == quarter_bytes
        parts.append(call(builder, name, quarter_ints, arguments))
    return _join(builder, _join(builder, parts[0], parts[1]), _join(builder, parts[2], parts[3]))


def _dot_unsigned(builder: Any, total: Any, weights: Any, activations: Any) -> Any:
    """Weights 0..127: the range in which signed and unsigned bytes agree and AVX2 pairs do not saturate."""
    name = _level.current().name
    if name == "avx512":
        ints = [builder.bitcast(weights, Ints.llvm), builder.bitcast(activations, Ints.llvm)]
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", Ints.llvm, [total, *ints])
    if name == "avx2":
        return builder.add(total, _widen_pairs(builder, _pairs(builder, weights, activations)))
    if name == "neon":
        return _neon_dot(builder, total, weights, activations)
    return _plain_dot(builder, total, weights, activations, "zext")


def _dot_signed(builder: Any, total: Any, weights: Any, activations: Any) -> Any:
    """Weights and activations -127..127. On AVX-512 the sum is too large by 128 x the activations: `finish_signed`."""
    name = _level.current().name
    if name == "avx512":
        flipped = builder.xor(weights, constant(Bytes.llvm, -128))
        ints = [builder.bitcast(flipped, Ints.llvm), builder.bitcast(activations, Ints.llvm)]
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", Ints.llvm, [total, *ints])
    if name == "avx2":
        parts = []
        for w, x in zip(_split(builder, weights, _HALF_BYTES), _split(builder, activations, _HALF_BYTES), strict=True):
            sign = "llvm.x86.avx2.psign.b"
            magnitude = call(builder, sign, _HALF_BYTES, [w, w])
            signed = call(builder, sign, _HALF_BYTES, [x, w])
            parts.append(call(builder, "llvm.x86.avx2.pmadd.ub.sw", _HALF_SHORTS, [magnitude, signed]))
        return builder.add(total, _widen_pairs(builder, _join(builder, *parts)))
    if name == "neon":
        return _neon_dot(builder, total, weights, activations)
    return _plain_dot(builder, total, weights, activations, "sext")


def _dot_narrow(builder: Any, total: Any, weights: Any, activations: Any) -> Any:
    """Weights 0..31: on AVX2 sums stay in 16 bits, for at most 4 calls with 5-bit and 8 calls with 4-bit weights."""
    if _level.current().name == "avx2":
        return builder.add(total, _pairs(builder, weights, activations))
    return _dot_unsigned(builder, total, weights, activations)


def _keep_order(builder: Any, value: Any) -> Any:
    """The value unchanged, through an empty piece of assembly that LLVM neither reorders nor looks into.

    Left alone, LLVM adds up one accumulator after the other and spills all unpacked weights to do so, which halves the
    speed where registers are few. This keeps the sums in the order of the weights.
    """

    def through(part: Any) -> Any:
        assembly = ir.InlineAsm(ir.FunctionType(part.type, [part.type]), "", "=v,0", side_effect=True)
        return builder.call(assembly, [part])

    if _level.current().name == "avx512":
        return through(value)
    return _join(builder, *(through(half) for half in _split(builder, value, _half_type(value.type))))


def _half_type(vector_type: Any) -> Any:
    return ir.VectorType(vector_type.element, vector_type.count // 2)


def _dot(emit: Callable[[Any, Any, Any, Any], Any], *, fewest_ordered: int = 2) -> Any:
    @intrinsic
    def dot(typing_context: Any, tile: Any, weights: Any, address: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value, w, base, step = arguments

            def each(row: int, total: Any) -> Any:
                x = _broadcast_int(builder, _row_address(builder, base, step, row))
                return emit(builder, total, w, builder.bitcast(x, Bytes.llvm))

            result = _map_rows(builder, tile, value, tile, each)
            if _level.current().name in ("avx2", "avx512") and tile.rows >= fewest_ordered:
                result = _map_rows(builder, tile, result, tile, lambda row, total: _keep_order(builder, total))
            return result

        return tile(tile, Bytes, types.int64, types.int64), generate

    return dot


dot4_unsigned = _dot(_dot_unsigned)
dot4_signed = _dot(_dot_signed)
dot4_narrow = _dot(_dot_narrow)
dot4_narrow_ordered = _dot(_dot_narrow, fewest_ordered=1)  # where even one row needs most registers


@intrinsic
def sum_bytes(typing_context: Any, value: Any) -> Any:
    """Sums of 4 neighbouring signed bytes, in 16 lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _dot_unsigned(builder, constant(Ints.llvm, 0), constant(Bytes.llvm, 1), arguments[0])

    return Ints(Bytes), generate


@intrinsic
def widen(typing_context: Any, tile: Any) -> Any:
    """A narrow tile as a tile of integers."""
    result = _TILES["Int", tile.rows]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def each(row: int, value: Any) -> Any:
            return _widen_pairs(builder, value) if _level.current().name == "avx2" else value

        return _map_rows(builder, tile, arguments[0], result, each)

    return result(tile), generate


def _offset(factor_of: Callable[[int], int]) -> Any:
    """ints[m] -= factor * (int32 at address + m * stride): an offset that all weights of the block share."""

    @intrinsic(prefer_literal=True)
    def subtract(typing_context: Any, tile: Any, factor: Any, address: Any, stride: Any) -> Any:
        number = factor.literal_value

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value, _, base, step = arguments
            scale = factor_of(number)

            def each(row: int, total: Any) -> Any:
                if scale == 0:
                    return total
                sums = _broadcast_int(builder, _row_address(builder, base, step, row))
                return builder.sub(total, builder.mul(sums, constant(Ints.llvm, scale)))

            return _map_rows(builder, tile, value, tile, each)

        return tile(tile, factor, types.int64, types.int64), generate

    return subtract


subtract_offset = _offset(lambda factor: factor)
finish_signed = _offset(lambda factor: 128 if _level.current().name == "avx512" else 0)


@intrinsic
def scale_ints(typing_context: Any, tile: Any, factors: Any) -> Any:
    """ints[m] * factors, lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, scale = arguments
        return _map_rows(builder, tile, value, tile, lambda row, total: builder.mul(total, scale))

    return tile(tile, Ints), generate


@intrinsic
def subtract_scaled_sums(typing_context: Any, tile: Any, factors: Any, address: Any, stride: Any) -> Any:
    """ints[m] - factors * (int32 at address + m * stride), lane by lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, scale, base, step = arguments

        def each(row: int, total: Any) -> Any:
            sums = _broadcast_int(builder, _row_address(builder, base, step, row))
            return builder.sub(total, builder.mul(sums, scale))

        return _map_rows(builder, tile, value, tile, each)

    return tile(tile, Ints, types.int64, types.int64), generate


@intrinsic
def add_ints(typing_context: Any, left: Any, right: Any) -> Any:
    """left[m] + right[m]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b = arguments
        return _map_rows(builder, left, a, left, lambda row, total: builder.add(total, builder.extract_value(b, row)))

    return left(left, left), generate


# ---- floats ----


@intrinsic
def accumulate(typing_context: Any, sums: Any, ints: Any, scales: Any, address: Any, stride: Any) -> Any:
    """sums[m] + ints[m] * (scales * float32 at address + m * stride)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, integers, scale, base, step = arguments

        def each(row: int, total: Any) -> Any:
            factor = builder.fmul(scale, _broadcast_float(builder, _row_address(builder, base, step, row)))
            exact = builder.sitofp(builder.extract_value(integers, row), Floats.llvm)
            return llvm_fma(builder, exact, factor, total)

        return _map_rows(builder, sums, value, sums, each)

    return sums(sums, _TILES["Int", sums.rows], Floats, types.int64, types.int64), generate


def _broadcast_fma(negate: bool) -> Any:
    @intrinsic
    def multiply_add(typing_context: Any, sums: Any, weights: Any, address: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value, w, base, step = arguments
            if negate:
                w = builder.fneg(w)

            def each(row: int, total: Any) -> Any:
                return llvm_fma(builder, w, _broadcast_float(builder, _row_address(builder, base, step, row)), total)

            return _map_rows(builder, sums, value, sums, each)

        return sums(sums, Floats, types.int64, types.int64), generate

    return multiply_add


add_broadcast = _broadcast_fma(negate=False)
subtract_broadcast = _broadcast_fma(negate=True)


@intrinsic
def add_tiles(typing_context: Any, left: Any, right: Any) -> Any:
    """left[m] + right[m]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b = arguments
        return _map_rows(builder, left, a, left, lambda row, total: builder.fadd(total, builder.extract_value(b, row)))

    return left(left, left), generate


@intrinsic
def store_tile(typing_context: Any, tile: Any, address: Any, stride: Any) -> Any:
    """Stores row m at address + m * stride."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, base, step = arguments
        for row in range(tile.rows):
            llvm_store(builder, _row_address(builder, base, step, row), builder.extract_value(value, row), 64)
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), generate


@intrinsic
def load_tile(typing_context: Any, like: Any, address: Any, stride: Any) -> Any:
    """Loads row m from address + m * stride, into a tile of the same kind as `like`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, base, step = arguments

        def each(row: int, old: Any) -> Any:
            return llvm_load(builder, _row_address(builder, base, step, row), Floats.llvm, 64)

        return _map_rows(builder, like, value, like, each)

    return like(like, types.int64, types.int64), generate
