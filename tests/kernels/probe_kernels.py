"""Kernels that only tests need, compiled the way all others are. Runs as its own process:

    python probe_kernels.py FOLDER LEVEL KERNEL...

Function probes (`probe.exp`, ...) apply one function to vectors of 16 values. `probe.chain` sums blocks of integers, and
holds up a chosen thread in the middle of a block, as a busy neighbour would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from headrace.kernels import build
from headrace.kernels.program import argument

INPUT, OUTPUT, COUNT = argument(0), argument(1), argument(2)
INPUT_BLOCKS, SALT, RELEASE, HELD_SCRATCH, COMMITS, DELAY = (argument(i) for i in range(3, 9))


def _vector_probe(apply: Callable[[int, int], None], in_bytes: int, out_bytes: int) -> Callable[[int, int, int], None]:
    from headrace.kernels.vectors import load_i64

    def probe(op: int, block: int, scratch: int) -> None:
        source, target = load_i64(op + INPUT), load_i64(op + OUTPUT)
        for i in range(load_i64(op + COUNT)):
            apply(source + in_bytes * i, target + out_bytes * i)

    return probe


def _functions() -> dict[str, Callable[[int, int, int], None]]:
    from headrace.kernels import math, vectors
    from headrace.kernels.dots import inline
    from headrace.kernels.vectors import load_floats, store_f16, store_floats

    def of_floats(function: Any) -> Callable[[int, int, int], None]:
        @inline
        def apply(source: int, target: int) -> None:
            store_floats(target, function(load_floats(source)))

        return _vector_probe(apply, 64, 64)

    def widening(load: Any) -> Callable[[int, int, int], None]:
        @inline
        def apply(source: int, target: int) -> None:
            store_floats(target, load(source))

        return _vector_probe(apply, 32, 64)

    @inline
    def narrow(source: int, target: int) -> None:
        store_f16(target, load_floats(source))

    return {
        "probe.exp": of_floats(math.exp),
        "probe.sigmoid": of_floats(math.sigmoid),
        "probe.silu": of_floats(math.silu),
        "probe.gelu": of_floats(math.gelu),
        "probe.load_f16": widening(vectors.load_f16),
        "probe.load_bf16": widening(vectors.load_bf16),
        "probe.store_f16": _vector_probe(narrow, 64, 32),
    }


def _chain() -> dict[str, Callable[[int, int, int], None]]:
    from headrace.kernels.atomics import atomic_add, atomic_load, spin_pause
    from headrace.kernels.vectors import load_i64, store_i64

    def chain(op: int, block: int, scratch: int) -> None:
        """scratch = SALT * (block + 1) + the sum of all input blocks.

        The thread with HELD_SCRATCH adds one to the word after RELEASE, and waits for RELEASE.
        """
        total = load_i64(op + SALT) * (block + 1)
        for i in range(load_i64(op + INPUT_BLOCKS)):
            total += load_i64(load_i64(op + INPUT) + 8 * i)
        for _ in range(load_i64(op + DELAY)):
            spin_pause()
        store_i64(scratch, total)
        if load_i64(op + HELD_SCRATCH) == scratch:
            release = load_i64(op + RELEASE)
            atomic_add(release + 8, 1)
            while atomic_load(release) == 0:
                spin_pause()

    def commit(op: int, block: int, scratch: int) -> None:
        """output[block] = scratch, and one more commit of this block is counted."""
        store_i64(load_i64(op + OUTPUT) + 8 * block, load_i64(scratch))
        atomic_add(load_i64(op + COMMITS) + 8 * block, 1)

    return {"probe.chain": chain, "probe.chain.commit": commit}


def main(arguments: list[str]) -> None:
    """`build.main`, with the probes beside the engine's own kernels."""
    own = build.kernel_function
    build.kernel_function = lambda name: (
        {**_functions(), **_chain()}[name] if name.startswith("probe.") else own(name)  # made after the level is set
    )
    build.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
