"""CPU levels: which instructions the kernels may use, chosen from the host's features.

One kernel source serves every level. It is written over 512-bit logical vectors, which LLVM splits into the registers
that the level has; only the handful of primitives that ask for `level.current()` differ between levels.

The level of a compilation is process-wide state, set once by the compiling process before any kernel is compiled.
Does not know what the kernels compute.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from headrace.errors import OptionError


@dataclass(frozen=True)
class Level:
    """One target of compilation.

    `cpu` and `features` are LLVM names, empty for the host's own. `tile_tokens` is how many rows of activations a
    matrix-matrix kernel keeps in registers, `tile_tokens_two_sums` where each row needs two sums, and `score_panels` how
    many panels of keys attention takes at once.
    """

    name: str
    machines: tuple[str, ...]
    needs: tuple[str, ...]
    cpu: str
    features: str
    tile_tokens: int
    tile_tokens_two_sums: int
    score_panels: int


LEVELS = {
    level.name: level
    for level in (
        Level("portable", (), (), "generic", "", 4, 4, 1),
        Level("neon", ("aarch64", "arm64"), ("neon", "dotprod", "fullfp16"), "", "", 4, 4, 1),
        Level("avx2", ("x86_64", "amd64"), ("avx2", "fma", "f16c"), "x86-64-v3", "+f16c,+fma,+avx2", 4, 2, 1),
        Level("avx512", ("x86_64", "amd64"), ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"), "", "", 8, 6, 2),
    )
}


def host_levels() -> tuple[Level, ...]:
    """The levels that this host can run, worst first."""
    import llvmlite.binding as llvm

    present = {name for name, on in llvm.get_host_cpu_features().items() if on}
    machine = platform.machine().lower()
    return tuple(
        level
        for level in LEVELS.values()
        if (not level.machines or machine in level.machines) and all(need in present for need in level.needs)
    )


def choose_level(forced: str | None) -> Level:
    """The best level of the host, or the forced one.

    Raises:
        OptionError: the forced level does not run on this host.
    """
    possible = host_levels()
    if forced is None:
        return possible[-1]
    for level in possible:
        if level.name == forced:
            return level
    names = ", ".join(level.name for level in possible)
    raise OptionError(f"HEADRACE_CPU={forced!r} cannot run on this machine: it runs {names}")


class _Current:
    """The level that this process compiles for; a class so that the value is read when code is generated."""

    level: Level = LEVELS["portable"]
    counting: bool = False


def use_level(name: str, *, counting: bool = False) -> None:
    """Sets the level for all kernels compiled by this process from now on.

    With `counting`, every load and store also reports its address and size (see `vectors.py`): the build that proves
    the ledger's bytes.
    """
    _Current.level = LEVELS[name]
    _Current.counting = counting


def current() -> Level:
    """The level being compiled for."""
    return _Current.level


def counting() -> bool:
    """Whether loads and stores report themselves."""
    return _Current.counting
