"""The file of packed weights: one per model content and layout, written once, mapped at every later start.

    8 bytes   magic, with the layout's version
    4 bytes   length of the header, little-endian
    4 bytes   CRC-32 of the header
    header    JSON: what the writer wants to find again, and the place of each section
    sections  each at a multiple of 64 bytes

A file is written under another name and moved into place, so it is whole or not there, and processes that pack the
same model at once do no harm. What a killed process left under another name is removed by the next one that packs.
Sections are not checked when a file is opened: that would read all of it. Does not know what the sections mean.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import StorageError

LAYOUT_VERSION = 2
_MAGIC = b"HEADRCE" + bytes([LAYOUT_VERSION])
_ALIGNMENT = 64
_PARTIAL = ".partial"
_ABANDONED_AFTER_S = 60.0


@dataclass(frozen=True)
class Section:
    """A section to write: its size, and what fills it."""

    name: str
    num_bytes: int
    fill: Callable[[npt.NDArray[np.uint8]], None]


@dataclass(frozen=True)
class PackedFile:
    """A container in memory: `bytes` is the whole of it, `address` where it lies."""

    header: Mapping[str, Any]
    bytes: npt.NDArray[np.uint8]

    @property
    def address(self) -> int:
        """The address of its first byte."""
        return int(self.bytes.ctypes.data)

    def offset(self, name: str) -> int:
        """Where a section starts."""
        return int(self.header["sections"][name][0])

    def section(self, name: str) -> npt.NDArray[np.uint8]:
        """A section's bytes."""
        start, num_bytes = self.header["sections"][name]
        return self.bytes[start : start + num_bytes]


def build(target: Callable[[int], npt.NDArray[np.uint8]], facts: Mapping[str, Any], sections: list[Section]) -> PackedFile:
    """Lays out a container in what `target(num_bytes)` gives, and fills it."""
    places, offset = {}, 0
    for section in sections:
        places[section.name] = [offset, section.num_bytes]
        offset = _aligned(offset + section.num_bytes)
    # the header's own length moves the sections, so offsets count from the end of the header
    text = json.dumps({**facts, "sections": places}).encode()
    base = _aligned(16 + len(text))
    data = target(base + offset)
    data[:8] = np.frombuffer(_MAGIC, np.uint8)
    data[8:16] = np.frombuffer(struct.pack("<II", len(text), zlib.crc32(text)), np.uint8)
    data[16 : 16 + len(text)] = np.frombuffer(text, np.uint8)
    packed = _parse(data)
    for section in sections:
        section.fill(packed.section(section.name))
    return packed


def write(path: Path, facts: Mapping[str, Any], sections: list[Section]) -> None:
    """Writes a container to a file, atomically.

    Raises:
        StorageError: the folder cannot be written or the disk is full.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=_PARTIAL)
        with os.fdopen(handle, "r+b") as file:
            _lock(file.fileno())
            _remove_abandoned(path.parent, os.fstat(handle).st_mtime)

            def target(num_bytes: int) -> npt.NDArray[np.uint8]:
                # blocks are reserved first: running out of disk under a mapping would kill the process
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                file.truncate(num_bytes)
                return np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)

            build(target, facts, sections)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        _remove(temporary)
        raise _storage_error(path, error) from error
    except BaseException:
        _remove(temporary)
        raise


def open_packed(path: Path) -> PackedFile | None:
    """Maps a container; None if it is not there, or damaged so that it must be packed anew."""
    try:
        with path.open("rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        return _parse(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None


def _parse(data: npt.NDArray[np.uint8]) -> PackedFile:
    """Reads the header, and makes its offsets count from the start of the file.

    Raises:
        ValueError: this is no container of this version, or it is cut short.
    """
    if data[:8].tobytes() != _MAGIC:
        raise ValueError("not a container of this version")
    length, checksum = struct.unpack("<II", data[8:16].tobytes())
    text = data[16 : 16 + length].tobytes()
    if zlib.crc32(text) != checksum:
        raise ValueError("the header is damaged")
    header = json.loads(text)
    base = _aligned(16 + length)
    header["sections"] = {name: [base + start, size] for name, (start, size) in header["sections"].items()}
    if any(start + size > len(data) for start, size in header["sections"].values()):
        raise ValueError("cut short")
    return PackedFile(header, data)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _lock(descriptor: int) -> bool:
    """Takes a file for as long as this process has it open; False if another process has it."""
    try:
        import fcntl
    except ImportError:  # no such locks here: nothing is taken for abandoned
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_abandoned(folder: Path, now: float) -> None:
    """Removes what killed processes left half-written: files that are not being written and have not been for a minute."""
    for path in folder.glob(f"*{_PARTIAL}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if os.fstat(file.fileno()).st_mtime < now - _ABANDONED_AFTER_S and _lock(file.fileno()):
                path.unlink()


def _remove(name: str) -> None:
    if name:
        Path(name).unlink(missing_ok=True)


def _storage_error(path: Path, error: OSError) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the disk is full while packing weights into {path.parent}: free some space, or use cache=False",
            arguments=("cache",),
        )
    return StorageError(
        f"cannot write packed weights into {path.parent}: {error.strerror}; set HEADRACE_HOME to a folder that can be "
        "written, or use cache=False",
        arguments=("cache",),
    )
