"""What Headrace has stored on this machine, and which of it this version does not use any more.

Stale are kernels that were compiled from other sources, by other compilers or for another CPU, packed weights in another
layout, and pieces that a process left behind when it was killed. All of it can be made again.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import StorageError

if TYPE_CHECKING:
    from headrace.config import Config

ABANDONED_AFTER_S = 3600.0
"""A piece that has not been written to for so long belongs to no process that still runs."""
_PIECE_PATTERNS = ("*.partial", ".*-*")  # of packing and compiling, and of fetching


@dataclass(frozen=True)
class Folder:
    """What lies in one folder; `stale` are entries that this version does not use."""

    what: str
    path: Path
    num_files: int
    size_bytes: int
    stale: tuple[Path, ...]
    stale_bytes: int


def measure_folders(config: Config, now_s: float) -> list[Folder]:
    """Each folder that Headrace writes to; one that is not there yet is empty. `now_s` is the time of files' dates."""
    stale = {"models": (), "packed weights": _other_layouts(config.packed_dir), "kernels": _other_kernels(config.kernels_dir)}
    folders = []
    for what, path in (("models", config.models_dir), ("packed weights", config.packed_dir), ("kernels", config.kernels_dir)):
        sizes = _file_sizes(path)
        unused = tuple(sorted({*stale[what], *_abandoned(path, now_s)}))
        unused_bytes = sum(sum(_file_sizes(entry)) for entry in unused)
        folders.append(Folder(what, path, len(sizes), sum(sizes), unused, unused_bytes))
    return folders


def remove_stale(folders: list[Folder]) -> int:
    """Deletes what is stale; the bytes that this freed.

    Raises:
        StorageError: something cannot be deleted.
    """
    freed_bytes = 0
    for folder in folders:
        for entry in folder.stale:
            try:
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(f"{entry} cannot be deleted ({error.strerror}): delete it by hand") from error
        freed_bytes += folder.stale_bytes
    return freed_bytes


def can_write(folder: Path) -> bool:
    """Whether files can be made in a folder, or the folder itself where it is not there yet."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _other_layouts(folder: Path) -> tuple[Path, ...]:
    from headrace.weights.container import LAYOUT_VERSION

    return tuple(path for path in folder.glob("*.headrace") if not path.name.endswith(f".v{LAYOUT_VERSION}.headrace"))


def _other_kernels(folder: Path) -> tuple[Path, ...]:
    from headrace.kernels.level import host_levels
    from headrace.kernels.library import library_key

    used = {library_key(level, counting=counting) for level in host_levels() for counting in (False, True)}
    return tuple(path for path in folder.glob("*") if path.is_dir() and path.name not in used)


def _abandoned(folder: Path, now_s: float) -> Iterator[Path]:
    for pattern in _PIECE_PATTERNS:
        for path in folder.rglob(pattern):
            try:
                if path.lstat().st_mtime < now_s - ABANDONED_AFTER_S:
                    yield path
            except OSError:  # it went away meanwhile
                continue


def _file_sizes(path: Path) -> list[int]:
    """Sizes of the files below a folder, or of the one file."""
    files = [Path(parent) / name for parent, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
    sizes = []
    for file in files:
        try:
            status = file.lstat()
        except OSError:  # it went away meanwhile
            continue
        if stat.S_ISREG(status.st_mode):
            sizes.append(status.st_size)
    return sizes
