"""Compiled kernels for the tests: one library per level that this host can run, in the cache that the engine uses too.

A test that takes `kernels` runs once per level. `Bench.run` executes one operation block by block, without the team,
between guards that catch a store outside of what the operation may write.

Where the tools for it are installed, kernels for 64-bit Arm are compiled too and run under emulation, as one more level.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from headrace.config import Config
from headrace.errors import KernelError
from headrace.kernels import build
from headrace.kernels.level import LEVELS, Level, host_levels
from headrace.kernels.library import KernelLibrary, compile_environment, entry_name
from headrace.kernels.packed import PACKED
from headrace.kernels.program import COMMIT, COMPUTE, NUM_BLOCKS, OP_FIELDS
from headrace.kernels.reference_packed import Fields

PROBES = Path(__file__).with_name("probe_kernels.py")
RUNNER = Path(__file__).with_name("neon_runner.c")
CHECK_NEON = Path(__file__).parents[2] / "tools" / "check_neon.py"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
ARM_ROOT = Path("/usr/aarch64-linux-gnu")
EMULATED_ADDRESS, EMULATED_BYTES = 1 << 36, 1 << 30  # far from where either process has anything; a sparse file
WEIGHT_LEVELS = {"Q4_0": 16, "Q4_1": 16, "Q5_0": 32, "Q5_1": 32, "Q2_K": 4, "Q3_K": 8, "Q4_K": 16, "Q5_K": 32, "Q6_K": 64}
SCALE_BYTES = {"Q2_K": 16, "Q3_K": 12, "Q4_K": 12, "Q5_K": 12, "Q6_K": 16}
GUARD_BYTES = 256
GUARD = 0xA5


def _compile(level: Level, command: Sequence[str | Path], *, through_arm: bool = False) -> None:
    prefix = [sys.executable, str(CHECK_NEON), "--through"] if through_arm else [sys.executable]
    whole = [*prefix, *map(str, command)]
    done = subprocess.run(whole, env=compile_environment(level), capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"{' '.join(whole)} failed: {done.stderr}")


def _key_of_files(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:8]


class ProbeLibrary(KernelLibrary):
    """A library of the kernels in `probe_kernels.py`, whose folder's key covers that file too."""

    def __init__(self, folder: Path, level: Level) -> None:
        super().__init__(folder, level)
        self.folder = self.folder.with_name(f"{self.folder.name}-{_key_of_files(PROBES)}")

    def _compile(self, names: Sequence[str], processes: int, progress: object) -> None:
        _compile(self.level, [PROBES, self.folder, self.level.name, *names])


class Emulator:
    """Memory that an emulated Arm process has at the same address, and calls of kernels in that process."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="headrace-emulated-")  # noqa: SIM115  # lives as long as the tests
        self._file.truncate(EMULATED_BYTES)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        access, fixed = mmap.PROT_READ | mmap.PROT_WRITE, 0x100000  # MAP_FIXED_NOREPLACE
        where = libc.mmap(EMULATED_ADDRESS, EMULATED_BYTES, access, mmap.MAP_SHARED | fixed, self._file.fileno(), 0)
        assert where == EMULATED_ADDRESS
        whole = (ctypes.c_uint8 * EMULATED_BYTES).from_address(EMULATED_ADDRESS)
        self._memory = np.frombuffer(whole, np.uint8)
        self._used = 0
        runner = folder / f"neon_runner-{_key_of_files(RUNNER)}"
        if not runner.exists():
            subprocess.run([CROSS_COMPILER, "-O1", "-o", str(runner), str(RUNNER), "-ldl"], check=True)
        command = [EMULATOR, "-L", str(ARM_ROOT), runner, self._file.name, str(EMULATED_ADDRESS), str(EMULATED_BYTES)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Bytes of the shared memory."""
        start = self._used
        self._used += -(-num_bytes // 64) * 64
        assert self._used <= EMULATED_BYTES
        return self._memory[start : start + num_bytes]

    def free_all(self) -> None:
        """Forgets all allocations."""
        self._used = 0

    def call(self, library: Path, symbol: str, op: int, block: int, scratch: int) -> None:
        """Calls one kernel."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{library} {symbol} {op} {block} {scratch}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "0\n", f"{symbol} failed under emulation"

    def close(self) -> None:
        """Ends the emulated process."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._file.close()


class EmulatedLibrary(KernelLibrary):
    """Kernels for Arm, compiled by `script`, linked to a shared library each, called in the emulated process."""

    def __init__(self, folder: Path, emulator: Emulator, script: Path) -> None:
        super().__init__(folder, LEVELS["neon"])
        self.folder = self.folder.with_name(f"{self.folder.name}-{_key_of_files(script, CHECK_NEON)}")
        self._emulator, self._script = emulator, script

    def _compile(self, names: Sequence[str], processes: int, progress: object) -> None:
        _compile(self.level, [self._script, self.folder, self.level.name, *names], through_arm=True)

    def _load(self, names: Sequence[str]) -> None:
        for name in names:
            target = self.folder / f"{entry_name(name)}.so"
            if not target.exists():
                command = [CROSS_COMPILER, "-shared", "-nostdlib", "-o", str(target), str(target.with_suffix(".o"))]
                subprocess.run(command, check=True)
            self._addresses[name] = 0  # known to the emulated process only

    def function(self, name: str) -> Callable[[int, int, int], None]:
        return functools.partial(self._emulator.call, self.folder / f"{entry_name(name)}.so", entry_name(name))


class Bench:
    """Kernels of one level, memory for them, and a way to run one operation."""

    def __init__(self, level: Level, folder: Path, emulator: Emulator | None = None) -> None:
        self.level = level
        self._emulator = emulator
        self.library: KernelLibrary
        self.probes: KernelLibrary
        if emulator:
            self.library = EmulatedLibrary(folder, emulator, Path(build.__file__))
            self.probes = EmulatedLibrary(folder, emulator, PROBES)
        else:
            self.library, self.probes = KernelLibrary(folder, level), ProbeLibrary(folder, level)
        self._guarded: list[tuple[np.ndarray, int, int]] = []

    def array(self, values: Any, dtype: Any = None) -> np.ndarray:
        """A copy of `values` in 64-byte aligned memory between guards."""
        source = np.ascontiguousarray(values, dtype)
        num_bytes = source.nbytes + 2 * GUARD_BYTES + 64
        whole = self._emulator.allocate(num_bytes) if self._emulator else np.empty(num_bytes, np.uint8)
        whole[:] = GUARD
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
        op = self.zeros(OP_FIELDS, np.int64)
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
        if self._emulator:
            self._emulator.free_all()


def _word(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    if isinstance(value, float | np.floating):
        return int(np.float32(value).view(np.uint32))
    return int(value)


def _is_emulated(level: Level) -> bool:
    return level not in host_levels()


def _levels() -> list[Level]:
    """What this host runs, and Arm if it can be emulated."""
    can_emulate = shutil.which(CROSS_COMPILER) and shutil.which(EMULATOR) and platform.system() == "Linux"
    others = [LEVELS["neon"]] if can_emulate and _is_emulated(LEVELS["neon"]) else []
    return [*host_levels(), *others]


@functools.cache
def _bench(level: Level) -> Bench:
    return Bench(level, Config.from_environment().kernels_dir)


@pytest.fixture(scope="session", params=_levels(), ids=lambda level: level.name)
def level_bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The bench of each level in turn."""
    if not _is_emulated(request.param):
        yield _bench(request.param)
        return
    folder = Config.from_environment().kernels_dir
    folder.mkdir(parents=True, exist_ok=True)
    emulator = Emulator(folder)
    yield Bench(request.param, folder, emulator)
    emulator.close()


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
