"""The folder that holds what is kept on disk: who may write, how many bytes lie in it, and files that are whole or absent.

    <kv folder>/lock                       held by whoever adds files
                writes.json                bytes written today
                sessions/lock              held by whoever changes a session
                sessions/<model>/*.json    `sessions.py`
                pages/<key>/key.json, counters.json    `keys.py`, `journal.py`
                            prices.json, *.run, *.partial    `journal.py`, `runs.py`

Files are added under the lock only, so the bytes counted under it are those that bounds are compared with, and a partial
file seen under it was left by a process that is gone. Folders and files can be read by their owner only: pages and sessions
hold what people wrote. Knows nothing of what the files hold.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGES_FOLDER = "pages"
SESSIONS_FOLDER = "sessions"
_FOLDERS = (PAGES_FOLDER, SESSIONS_FOLDER)
PARTIAL = ".partial"
ABANDONED_AFTER_S = 60.0
"""A damaged or half-written file that is older has no writer left who could finish it."""

SMALL_FILES_BYTES = 32 << 10
"""Left free below a bound for the small files of the folder (key, counters, daily bytes) and their replacements."""

_BLOCK_BYTES = 4096
_WRITES = "writes.json"
_LOCK_TRIES = 400
_LOCK_PAUSE_S = 0.005
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""How files of a folder are opened: no link out of it is followed, and no pipe can make the caller wait."""

try:
    import fcntl
except ImportError:  # no such locks here: nothing is kept from other processes
    _flock: Callable[[int, int], None] | None = None
    LOCK_SHARED = LOCK_EXCLUSIVE = UNLOCK = 0
else:
    _flock = fcntl.flock
    LOCK_SHARED, LOCK_EXCLUSIVE, UNLOCK = fcntl.LOCK_SH | fcntl.LOCK_NB, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN


def try_lock(descriptor: int, operation: int) -> bool:
    """Locks, unlocks or shares an open file without waiting; False if another process has it.

    Raises:
        OSError: the file system knows no locks.
    """
    if _flock is None:
        return True
    try:
        _flock(descriptor, operation)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(descriptor: int, operation: int) -> bool:
    """Locks an open file, waiting for two seconds at most; False if others have had it all the time.

    Raises:
        OSError: the file system knows no locks.
    """
    for _ in range(_LOCK_TRIES):
        if try_lock(descriptor, operation):
            return True
        time.sleep(_LOCK_PAUSE_S)
    return False


class FolderLock:
    """The lock of a kv folder: one writer at a time, over all threads and processes.

    Raises:
        OSError: the folder or the lock cannot be made, or not be locked.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._threads = threading.Lock()  # a file lock does not keep the threads of one process apart
        self._descriptor = -1
        make_private(folder)
        self._open()
        if try_lock(self._descriptor, LOCK_EXCLUSIVE):
            try_lock(self._descriptor, UNLOCK)

    @contextlib.contextmanager
    def held(self, *, wait: bool = True) -> Iterator[bool]:
        """The lock for a while: False, without it, if others have had it for two seconds on end (or have it now)."""
        with self._threads:
            taken = self._take(_LOCK_TRIES if wait else 1)
            try:
                yield taken
            finally:
                if taken:
                    with contextlib.suppress(OSError):
                        try_lock(self._descriptor, UNLOCK)

    def close(self) -> None:
        """Closes the file."""
        with self._threads:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def _take(self, tries: int) -> bool:
        for attempt in range(tries):
            if attempt:
                time.sleep(_LOCK_PAUSE_S)
            with contextlib.suppress(OSError):
                if not self._is_current():
                    self._open()
                if try_lock(self._descriptor, LOCK_EXCLUSIVE):
                    if self._is_current():
                        return True
                    try_lock(self._descriptor, UNLOCK)
        return False

    def _is_current(self) -> bool:
        """Whether the file still has its name: a lock on a removed file would keep nobody out."""
        if self._descriptor < 0:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except OSError:
            return False

    def _open(self) -> None:
        make_private(self._path.parent)
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o600)
        except PermissionError:
            descriptor = os.open(self._path, os.O_RDONLY | NO_FOLLOW)  # enough to lock, where pages may only be read
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor


def make_private(folder: Path) -> None:
    """Makes a folder that only its owner can enter; one that is there stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)


def file_bytes(size: int) -> int:
    """What a file of a size takes on disk: whole blocks."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


class File(NamedTuple):
    """A file of a kv folder."""

    path: str
    name: str
    num_bytes: int
    time_s: float


def list_files(folder: Path) -> Iterator[File]:
    """Every regular file that counts: those of the folder itself, and all below `pages` and `sessions`."""
    waiting = [str(folder)]
    top = waiting[0]
    while waiting:
        current = waiting.pop()
        try:
            entries = os.scandir(current)
        except OSError:
            continue  # removed meanwhile
        with entries:
            for entry in entries:
                try:
                    if entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        yield File(entry.path, entry.name, file_bytes(status.st_size), status.st_mtime)
                    elif entry.is_dir(follow_symlinks=False) and (current != top or entry.name in _FOLDERS):
                        waiting.append(entry.path)
                except OSError:
                    continue  # removed meanwhile


def list_names(folder: Path, suffix: str) -> set[str]:
    """Names in a folder that end so, whatever goes by them.

    Raises:
        OSError: the folder cannot be listed.
    """
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.name.endswith(suffix)}


def folder_bytes(folder: Path) -> int:
    """Bytes on disk of all files that count."""
    return sum(file.num_bytes for file in list_files(folder))


def is_abandoned(time_s: float, now_s: float) -> bool:
    """Whether a file last changed at a time has no writer any more; a time in the future is as good as an old one."""
    return abs(now_s - time_s) > ABANDONED_AFTER_S


def locks_are_known() -> bool:
    """Whether this system has file locks: without them a partial file may have a writer."""
    return _flock is not None


def remove_file(path: str | Path) -> bool:
    """Removes a file; False if that was not possible or it is gone."""
    try:
        Path(path).unlink()
    except OSError:
        return False
    return True


def write_json(path: Path, content: Any) -> None:
    """Replaces a file: readers find the old content or the new one.

    Raises:
        OSError: it cannot be written; the old content stays.
    """
    replace_file(path, encode_json(content))


def encode_json(content: Any) -> bytes:
    """Compact JSON; what is no UTF-8 is escaped."""
    return json.dumps(content, separators=(",", ":")).encode()


def replace_file(path: Path, content: bytes) -> None:
    """As `write_json`, for bytes. Without the folder's lock two writers may not share a path."""
    partial = path.with_name(f"{path.name}.{os.getpid():x}-{threading.get_ident():x}{PARTIAL}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_FOLLOW, 0o600), "wb") as file:
            file.write(content)
        partial.replace(path)
    except BaseException:
        remove_file(partial)
        raise


def read_json(path: str | Path) -> Any:
    """What a file says; None if it is not there, or no JSON."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | NO_FOLLOW), "rb") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):
        return None


def day_of(time_s: float) -> str:
    """The day (UTC) that a time belongs to: '2026-11-30'."""
    return dt.datetime.fromtimestamp(time_s, dt.UTC).date().isoformat()


def read_writes(folder: Path) -> tuple[str, int]:
    """The day of the last write of pages, and the bytes written on it by all processes; ('', 0) if there was none."""
    content = read_json(folder / _WRITES)
    if isinstance(content, dict):
        day, num_bytes = content.get("day"), content.get("bytes")
        if isinstance(day, str) and isinstance(num_bytes, int) and num_bytes >= 0:
            return day, num_bytes
    return "", 0


def record_writes(folder: Path, day: str, num_bytes: int) -> int:
    """Sets the bytes written on a day; the bytes that this itself has added to the folder.

    Raises:
        OSError: the file cannot be replaced.
    """
    path = folder / _WRITES
    added = 0 if path.exists() else file_bytes(1)
    write_json(path, {"day": day, "bytes": num_bytes})
    return added
