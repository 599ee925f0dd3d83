"""Compiled kernels for the tests: one library per level that this host can run, in the cache that the engine uses too.

A test that takes `kernels` runs once per level. `Bench.run` executes one operation block by block, without the team,
between guards that catch a store outside of what the operation may write.
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from headrace.config import Config
from headrace.errors import KernelError
from headrace.kernels.level import Level, host_levels
from headrace.kernels.library import KernelLibrary, compile_environment
from headrace.kernels.packed import PACKED
from headrace.kernels.program import COMMIT, COMPUTE, NUM_BLOCKS, OP_FIELDS
from headrace.kernels.reference_packed import Fields

PROBES = Path(__file__).with_name("probe_kernels.py")
WEIGHT_LEVELS = {"Q4_0": 16, "Q4_1": 16, "Q5_0": 32, "Q5_1": 32, "Q2_K": 4, "Q3_K": 8, "Q4_K": 16, "Q5_K": 32, "Q6_K": 64}
SCALE_BYTES = {"Q2_K": 16, "Q3_K": 12, "Q4_K": 12, "Q5_K": 12, "Q6_K": 16}
GUARD_BYTES = 256
GUARD = 0xA5


class ProbeLibrary(KernelLibrary):
    """A library of the kernels in `probe_kernels.py`, whose folder's key covers that file too."""

    def __init__(self, folder: Path, level: Level) -> None:
        super().__init__(folder, level)
        digest = hashlib.sha256(PROBES.read_bytes()).hexdigest()[:8]
        self.folder = self.folder.with_name(f"{self.folder.name}-{digest}")

    def _compile(self, names: Sequence[str], processes: int, progress: object) -> None:
        command = [sys.executable, str(PROBES), str(self.folder), self.level.name, *names]
        done = subprocess.run(command, env=compile_environment(self.level), capture_output=True, text=True, check=False)
        if done.returncode:
            raise KernelError(f"compiling {', '.join(names)} failed: {done.stderr}")


class Bench:
    """Kernels of one level, memory for them, and a way to run one operation."""

    def __init__(self, level: Level, folder: Path) -> None:
        self.level = level
        self.library = KernelLibrary(folder, level)
        self.probes = ProbeLibrary(folder, level)
        self._guarded: list[tuple[np.ndarray, int, int]] = []

    def array(self, values: Any, dtype: Any = None) -> np.ndarray:
        """A copy of `values` in 64-byte aligned memory between guards."""
        source = np.ascontiguousarray(values, dtype)
        whole = np.full(source.nbytes + 2 * GUARD_BYTES + 64, GUARD, np.uint8)
        start = GUARD_BYTES + -(whole.ctypes.data + GUARD_BYTES) % 64
        inside = whole[start : start + source.nbytes].view(source.dtype).reshape(source.shape)
        inside[...] = source
        self._guarded.append((whole, start, start + source.nbytes))
        return inside

    def zeros(self, shape: Any, dtype: Any = np.float32) -> np.ndarray:
        """Zeros in memory as `array` gives it."""
        return self.array(np.zeros(shape, dtype))

    def run(
        self,
        compute: str,
        commit: str,
        fields: ModuleType,
        num_blocks: int = 1,
        *,
        scratch_bytes: int = 1 << 20,
        repeat: bool = False,
        **values: Any,
    ) -> None:
        """Computes and commits all blocks of one operation, then checks the guards.

        `values` are the kernel's own fields by their name in lower case: numbers, floats (stored as float32 bits) or
        arrays (stored by address). With `repeat` every block is computed twice, and all of it in reverse order, as a
        team that helps might.
        """
        library = self.probes if compute.startswith("probe.") else self.library
        library.prepare([name for name in (compute, commit) if name])
        op = np.zeros(OP_FIELDS, np.int64)
        for name, value in values.items():
            op[getattr(fields, name.upper()) // 8] = _word(value)
        op[NUM_BLOCKS // 8] = num_blocks
        op[COMPUTE // 8] = library.address(compute)
        scratch = self.array(np.full(scratch_bytes, 0xFF, np.uint8))  # not-a-number wherever it is read before written
        run_compute = library.function(compute)
        run_commit = library.function(commit) if commit else None
        op[COMMIT // 8] = library.address(commit) if commit else 0
        for block in reversed(range(num_blocks)) if repeat else range(num_blocks):
            for _ in range(2 if repeat else 1):
                run_compute(op.ctypes.data, block, scratch.ctypes.data)
            if run_commit:
                run_commit(op.ctypes.data, block, scratch.ctypes.data)
        self.check_guards()

    def check_guards(self) -> None:
        """Every byte around every array is as it was."""
        for whole, start, end in self._guarded:
            assert (whole[:start] == GUARD).all()
            assert (whole[end:] == GUARD).all()

    def forget(self) -> None:
        """Lets go of the arrays made so far."""
        self._guarded.clear()


def _word(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    if isinstance(value, float | np.floating):
        return int(np.float32(value).view(np.uint32))
    return int(value)


@functools.cache
def _bench(level: Level) -> Bench:
    return Bench(level, Config.from_environment().kernels_dir)


@pytest.fixture(scope="session", params=host_levels(), ids=lambda level: level.name)
def level_bench(request: pytest.FixtureRequest) -> Bench:
    """The bench of each level in turn."""
    return _bench(request.param)


@pytest.fixture
def kernels(level_bench: Bench, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The bench of each level in turn, emptied after the test; the module's KERNELS are compiled together."""
    level_bench.library.prepare(getattr(request.module, "KERNELS", ()))
    yield level_bench
    level_bench.forget()


@pytest.fixture
def best_kernels() -> Iterator[Bench]:
    """The bench of the best level only, for what does not depend on the level."""
    bench = _bench(host_levels()[-1])
    yield bench
    bench.forget()


def random_fields(name: str, rows: int, columns: int, rng: np.random.Generator) -> Fields:
    """A random matrix of a packed format: every bit pattern of integers and scale bytes, block scales of either sign."""
    layout = PACKED[name]
    units = columns // layout.unit_columns
    none = np.zeros((rows, 0), np.float16)
    if not layout.integer_activations:
        values = rng.normal(size=(rows, columns)).astype(np.float32)
        values[:, ::7] *= np.float32(1e-6)  # subnormal as float16
        bits = {"F32": values, "F16": values.astype(np.float16), "BF16": (values.view(np.uint32) >> 16).astype(np.uint16)}
        return Fields(bits[name], np.zeros((rows, units, 0), np.uint8), none, none)
    if name == "Q8_0":
        q = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
    else:
        q = rng.integers(0, WEIGHT_LEVELS[name], (rows, columns)).astype(np.uint8)
    scales = rng.integers(0, 256, (rows, units, SCALE_BYTES.get(name, 0))).astype(np.uint8)
    d = rng.normal(size=(rows, units)).astype(np.float16)
    has_minimum = "m" in dict(layout.sections)
    m = rng.normal(size=(rows, units)).astype(np.float16) if has_minimum else none
    return Fields(q, scales, d, m)


@pytest.fixture
def make_fields(rng: np.random.Generator) -> Callable[[str, int, int], Fields]:
    """`random_fields` with the test's own random numbers."""
    return lambda name, rows, columns: random_fields(name, rows, columns, rng)


@pytest.fixture(params=PACKED)
def packed_name(request: pytest.FixtureRequest) -> str:
    """Every packed format."""
    return request.param


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that are the same at every run of a test."""
    digest = hashlib.sha256(request.node.name.encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))
