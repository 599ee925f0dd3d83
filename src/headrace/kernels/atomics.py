"""Atomics, time and calls by address: what the worker team is made of.

All memory is named by integer addresses of aligned int64 words.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.kernels.vectors import I32, I64, call


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def atomic_load(typing_context: Any, address: Any) -> Any:
    """The word, with sequentially consistent order: a weaker load may overtake a store before it, which the team forbids."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word(builder, arguments[0]), "seq_cst", 8, typ=I64)

    return types.int64(types.int64), generate


@intrinsic
def atomic_store(typing_context: Any, address: Any, value: Any) -> Any:
    """Sets the word, with sequentially consistent order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _word(builder, arguments[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Adds to the word; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def compare_and_swap(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Sets the word if it is as expected; returns whether it did."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address_, expected_, value_ = arguments
        pair = builder.cmpxchg(_word(builder, address_), expected_, value_, "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def spin_pause(typing_context: Any) -> Any:
    """Tells the core that this is a spin loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if "aarch64" in builder.module.triple or "arm64" in builder.module.triple:
            call(builder, "llvm.aarch64.hint", ir.VoidType(), [I32(1)])
        else:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def ticks(typing_context: Any) -> Any:
    """A counter of constant rate: the time stamp counter, or on Arm the virtual counter."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if "aarch64" in builder.module.triple or "arm64" in builder.module.triple:
            # not inline assembly: to put that into an object takes an assembler, which Numba does not set up
            return call(builder, "llvm.read_volatile_register.i64", I64, [builder.module.add_metadata(["cntvct_el0"])])
        return call(builder, "llvm.readcyclecounter", I64, [])

    return types.int64(), generate


@intrinsic
def call_kernel(typing_context: Any, function: Any, op: Any, block: Any, scratch: Any) -> Any:
    """Calls a kernel by its address. Numba's convention: where to return, where to raise, then the arguments."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(I32, [pointer, pointer, I64, I64, I64])
        function_ = builder.inttoptr(arguments[0], kind.as_pointer())
        # at the function's entry: in a loop, an alloca in place would eat the stack
        where = builder.bitcast(cgutils.alloca_once(builder, ir.ArrayType(I64, 2)), pointer)
        builder.call(function_, [where, where, *arguments[1:]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


def _external(name: str, num_arguments: int) -> Any:
    """A C function of the process that takes and returns 64-bit integers (pointers included)."""
    kinds = (types.int64,) * num_arguments

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return call(builder, name, I64, list(arguments))

    @intrinsic
    def zero(typing_context: Any) -> Any:
        return types.int64(), generate

    @intrinsic
    def one(typing_context: Any, a: Any) -> Any:
        return types.int64(*kinds), generate

    @intrinsic
    def two(typing_context: Any, a: Any, b: Any) -> Any:
        return types.int64(*kinds), generate

    return (zero, one, two)[num_arguments]


sched_yield = _external("sched_yield", 0)
mutex_lock = _external("pthread_mutex_lock", 1)
mutex_unlock = _external("pthread_mutex_unlock", 1)
condition_wait = _external("pthread_cond_wait", 2)
condition_broadcast = _external("pthread_cond_broadcast", 1)
