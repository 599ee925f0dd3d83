"""Compiled kernels on disk: what is damaged is compiled anew, since the loader would crash on it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from headrace.errors import KernelError, StorageError
from headrace.kernels import library as library_module
from headrace.kernels.level import host_levels
from headrace.kernels.library import KernelLibrary, entry_name, library_key, seal, unseal

NAME = "probes.ticks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds one kernel."""
    folder = tmp_path_factory.mktemp("kernels")
    KernelLibrary(folder, host_levels()[0]).prepare([NAME])
    return folder


def _file(library: KernelLibrary) -> Path:
    return library.folder / f"{entry_name(NAME)}.o"


def _ticks(library: KernelLibrary) -> int:
    out = ctypes.c_int64()
    library.function(NAME)(ctypes.addressof(out), 0, 0)
    return out.value


def test_kernel_on_disk_is_loaded_and_not_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = KernelLibrary(folder, host_levels()[0])
    monkeypatch.setattr(library, "_compile", None)
    library.prepare([NAME])
    assert _ticks(library) < _ticks(library)


@pytest.mark.parametrize("damage", ["empty", "cut", "one bit"])
def test_damaged_kernel_is_compiled_anew(folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = KernelLibrary(folder, host_levels()[0])
    sound = _file(library).read_bytes()
    flipped = sound[:200] + bytes([sound[200] ^ 1]) + sound[201:]
    _file(library).write_bytes({"empty": b"", "cut": sound[:-1], "one bit": flipped}[damage])
    compiled: list[list[str]] = []

    def compile_again(names: list[str], _processes: int, _progress: object) -> None:
        compiled.append(names)
        _file(library).write_bytes(sound)

    monkeypatch.setattr(library, "_compile", compile_again)
    assert library.missing([NAME]) == [NAME]
    library.prepare([NAME])
    assert compiled == [[NAME]]
    assert _ticks(library) > 0


def test_kernel_that_cannot_be_read_back_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = KernelLibrary(tmp_path, host_levels()[0])
    monkeypatch.setattr(library, "_compile", lambda *_: None)
    with pytest.raises(KernelError, match=r"^the kernel probes\.ticks cannot be read back from .*: check the disk"):
        library.prepare([NAME])


def test_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"^cannot keep compiled kernels in .*set HEADRACE_HOME"):
        KernelLibrary(tmp_path / "file", host_levels()[0]).prepare([NAME])


def test_unseal_gives_back_what_was_sealed() -> None:
    assert unseal(seal(b"object")) == b"object"
    assert unseal(b"") is None
    assert unseal(seal(b"")) is None


def test_key_differs_by_level_build_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {library_key(level, counting=counting) for level in host_levels() for counting in (False, True)}
    assert len(keys) == 2 * len(host_levels())
    monkeypatch.setattr(library_module, "_release", lambda package: f"another {package}".encode())
    assert library_key(host_levels()[0]) not in keys


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_release_holds_the_version(package: str) -> None:
    from importlib.metadata import version

    assert version(package).encode() in library_module._release(package)
