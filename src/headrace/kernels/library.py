"""Compiled kernels: finds them in the cache folder, compiles what is missing, loads them through llvmlite.

Numba runs in child processes only. The folder's key covers every source file of this package, the versions of the
compilers, the level and the CPU, so a stale kernel is never used. A file is whole or not there (see `build.py`), so
processes that start at once at worst compile the same kernel twice.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import KernelError, StorageError
from headrace.kernels.level import Level

Progress = Callable[[int, int], None]
"""Called with (kernels done, kernels to compile)."""

_DIGEST_BYTES = 32
_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_COUNT = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def entry_name(name: str) -> str:
    """The symbol of a kernel, and the stem of its object file."""
    return "headrace_" + "".join(c if c.isalnum() else "_" for c in name)


def seal(content: bytes) -> bytes:
    """An object file as it is stored: with its SHA-256 behind it, since LLVM trusts what it loads."""
    return content + hashlib.sha256(content).digest()


def unseal(stored: bytes) -> bytes | None:
    """What `seal` was given; None if the file is damaged."""
    content, digest = stored[:-_DIGEST_BYTES], stored[-_DIGEST_BYTES:]
    return content if content and hashlib.sha256(content).digest() == digest else None


def library_key(level: Level, *, counting: bool = False) -> str:
    """A key that differs whenever the machine code could."""
    import llvmlite.binding as llvm

    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        if path.name.startswith("reference"):  # the slow twins are not compiled
            continue
        digest.update(path.name.encode() + path.read_bytes())
    for package in ("numba", "llvmlite"):
        digest.update(_release(package))
    digest.update(f"{sys.version_info} {level} {counting} {llvm.get_process_triple()} {llvm.get_host_cpu_name()}".encode())
    digest.update(llvm.get_host_cpu_features().flatten().encode())
    return f"{level.name}-{digest.hexdigest()[:20]}"


def _release(package: str) -> bytes:
    """What tells releases of a package apart: its version file, as numba takes long to import and its metadata to look up."""
    found = importlib.util.find_spec(package)
    try:
        assert found is not None
        assert found.origin is not None
        return Path(found.origin).with_name("_version.py").read_bytes()
    except (AssertionError, OSError):
        from importlib import metadata

        return metadata.version(package).encode()


def compile_environment(level: Level) -> dict[str, str]:
    """The environment of a compiling process: its CPU, and no passes that explicit vectors have no use for."""
    environment = dict(
        os.environ, NUMBA_LOOP_VECTORIZE="0", NUMBA_SLP_VECTORIZE="0", NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING="1"
    )
    if level.cpu:
        environment.update(NUMBA_CPU_NAME=level.cpu, NUMBA_CPU_FEATURES=level.features)
    # the child finds this package where the parent did
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    return environment


class KernelLibrary:
    """The kernels of one level, by name; `address` is what an operation's record holds."""

    def __init__(self, folder: Path | None, level: Level, *, counting: Callable[[int, int, bool], None] | None = None) -> None:
        """Compiles nothing yet.

        Args:
            folder: the cache of all kernels, or None to keep nothing on disk.
            level: what to compile for.
            counting: receives every access (address, bytes, is_store) of a build that reports them.
        """
        self.level = level
        self._counting = counting
        self._temporary = tempfile.TemporaryDirectory(prefix="headrace-kernels-") if folder is None else None
        base = Path(self._temporary.name) if self._temporary else folder
        assert base is not None
        self.folder = base / library_key(level, counting=counting is not None)
        self._engine: Any = None
        self._objects: dict[str, bytes] = {}  # read and not yet loaded
        self._addresses: dict[str, int] = {}

    def missing(self, names: Sequence[str]) -> list[str]:
        """The kernels that would have to be compiled."""
        return [name for name in names if name not in self._addresses and self._read(name) is None]

    def prepare(self, names: Sequence[str], *, processes: int = 2, progress: Progress | None = None) -> None:
        """Compiles what is missing, loads what is not loaded.

        Raises:
            KernelError: the compiler failed; its last line is quoted.
            StorageError: the cache folder cannot be written.
        """
        names = list(dict.fromkeys(names))
        absent = self.missing(names)
        if absent:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(
                    f"cannot keep compiled kernels in {self.folder}: {error.strerror}; set HEADRACE_HOME to a folder "
                    "that can be written, or use cache=False",
                    arguments=("cache",),
                ) from error
            self._compile(absent, processes, progress)
        self._load([name for name in names if name not in self._addresses])

    def _read(self, name: str) -> bytes | None:
        """The object file of a kernel; None if it is not there or damaged, so that it must be compiled anew."""
        if name not in self._objects:
            try:
                content = unseal((self.folder / f"{entry_name(name)}.o").read_bytes())
            except OSError:
                return None
            if content is None:
                return None
            self._objects[name] = content
        return self._objects[name]

    def address(self, name: str) -> int:
        """The address of a kernel that was prepared."""
        return self._addresses[name]

    def function(self, name: str) -> Callable[[int, int, int], None]:
        """A kernel as a Python function of three integers; it runs without the interpreter's lock."""
        entry = _KERNEL(self._addresses[name])
        slot = (ctypes.c_int64 * 2)()
        where = ctypes.addressof(slot)

        def run(first: int, second: int, third: int, _keep: Any = slot) -> None:
            entry(where, where, first, second, third)

        return run

    def _compile(self, names: list[str], processes: int, progress: Progress | None) -> None:
        queues = _balance(names, max(1, min(processes, len(names))))
        command = [sys.executable, "-m", "headrace.kernels.build", str(self.folder), self.level.name]
        flags = ["--counting"] if self._counting else []
        with tempfile.TemporaryFile() as errors:
            children = [
                subprocess.Popen(
                    [*command, *queue, *flags],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=compile_environment(self.level),
                )
                for queue in queues
            ]
            try:
                self._watch(children, len(names), progress)
            finally:
                for child in children:
                    if child.poll() is None:
                        child.terminate()
                    child.wait()
                    if child.stdout:
                        child.stdout.close()
            if any(child.returncode for child in children):
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines() or ["no message"]
                full = any("No space left" in line for line in lines)
                if full:
                    raise StorageError(f"the disk of {self.folder} is full: free some space or set HEADRACE_HOME")
                raise KernelError(f"compiling a kernel for {self.level.name} failed: {lines[-1]}; try HEADRACE_CPU=portable")

    def _watch(self, children: list[subprocess.Popen[bytes]], total: int, progress: Progress | None) -> None:
        import selectors

        done = 0
        with selectors.DefaultSelector() as selector:
            for child in children:
                assert child.stdout is not None
                selector.register(child.stdout, selectors.EVENT_READ)
            if progress:
                progress(0, total)
            while selector.get_map():
                for key, _ in selector.select():
                    text = os.read(key.fd, 65536)
                    if not text:
                        selector.unregister(key.fileobj)
                    done += text.count(b"\n")
                    if progress:
                        progress(done, total)

    def _load(self, names: list[str]) -> None:
        if not names:
            return
        import llvmlite.binding as llvm

        if self._engine is None:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            if self._counting:
                report = self._counting
                self._count = _COUNT(lambda address, num_bytes, is_store: report(address, num_bytes, bool(is_store)))
                llvm.add_symbol("headrace_count", ctypes.cast(self._count, ctypes.c_void_p).value)
            machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for name in names:
            content = self._read(name)
            if content is None:
                raise KernelError(
                    f"the kernel {name} cannot be read back from {self.folder}: check the disk, or use cache=False",
                    arguments=("cache",),
                )
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(self._objects.pop(name)))
        self._engine.finalize_object()
        for name in names:
            self._addresses[name] = int(self._engine.get_function_address(entry_name(name)))


_SLOW_PRODUCTS = ("matmul:Q6_K", "matmul:Q5_K", "matmul:Q3_K", "matmul:Q2_K", "matmul:Q4_K", "matmul:Q5_0", "matmul:")
_SLOW = ("attention:", "rows", "choose.draw", *_SLOW_PRODUCTS)


def _balance(names: list[str], processes: int) -> list[list[str]]:
    """Deals kernels to processes, those slow to compile first."""

    def rank(name: str) -> int:
        return next((i for i, prefix in enumerate(_SLOW) if name.startswith(prefix)), len(_SLOW))

    ordered = sorted(names, key=rank)
    return [ordered[i::processes] for i in range(processes)]
