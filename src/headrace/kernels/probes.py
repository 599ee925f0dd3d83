"""Small measurements of the machine itself: reading memory as fast as it goes, and the tick counter."""

from __future__ import annotations

import numpy as np

from headrace.kernels.atomics import ticks
from headrace.kernels.fields.probes import (
    BLOCK_BYTES,
    BUFFER,
    REPEATS,
)
from headrace.kernels.vectors import load_floats, load_i64, prefetch, splat_float, store_floats, store_i64


def read(op: int, block: int, scratch: int) -> None:
    """Sums a block's bytes as float32, in eight chains: nothing but loads can be the limit."""
    num_bytes = load_i64(op + BLOCK_BYTES)
    base = load_i64(op + BUFFER) + block * num_bytes
    zero = splat_float(np.float32(0.0))
    a, b, c, d = zero, zero, zero, zero
    e, f, g, h = zero, zero, zero, zero
    for _ in range(load_i64(op + REPEATS)):
        for i in range(num_bytes // 512):
            at = base + 512 * i
            for line in range(8):
                prefetch(at + 4096 + 64 * line)
            a = a + load_floats(at)
            b = b + load_floats(at + 64)
            c = c + load_floats(at + 128)
            d = d + load_floats(at + 192)
            e = e + load_floats(at + 256)
            f = f + load_floats(at + 320)
            g = g + load_floats(at + 384)
            h = h + load_floats(at + 448)
    store_floats(scratch, ((a + b) + (c + d)) + ((e + f) + (g + h)))


def read_ticks(out: int, unused: int, scratch: int) -> None:
    """Stores the tick counter at `out`."""
    store_i64(out, ticks())


def nothing(op: int, block: int, scratch: int) -> None:
    """Commits nothing."""
