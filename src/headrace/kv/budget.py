"""The bounds of the disk tier: bytes kept in a kv folder, and bytes written on a day, over all processes that share it.

    used_bytes     every file, whoever wrote it
    room_bytes     what runs may still take: the bound - used - what is kept free for small files
                   + runs of keys that no process uses, which give way

Bytes are counted from the files themselves whenever something is to be added, under the folder's lock. Knows no runs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.kv import folder as files
from headrace.kv.keys import key_folders
from headrace.kv.runs import RUN
from headrace.units import format_bytes


@dataclass(frozen=True)
class Refusal:
    """Why a run was not written."""

    reason: Literal["disk full", "no room", "daily bound", "unusable"]
    detail: str


class DiskBudget:
    """What may still be added to a kv folder by the user of one key."""

    def __init__(
        self, folder: Path, key_folder: Path, *, limit_bytes: int, daily_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.limit_bytes, self.daily_bytes = limit_bytes, daily_bytes
        self._folder, self._key_folder, self._clock = folder, key_folder, clock
        # What sessions and processes that start may add beside runs; so runs are refused before those are.
        self._reserve_bytes = files.SMALL_FILES_BYTES + min(limit_bytes // 64, 32_000_000)
        self._guard = threading.Lock()
        self._used_bytes = 0
        self._yielding_bytes = 0  # of runs that give way

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, when last counted."""
        return self._used_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that runs may still take."""
        return max(0, self._yielding_bytes - self._missing(0))

    @property
    def written_today_bytes(self) -> int:
        """Bytes that all processes have written today."""
        day, num_bytes = files.read_writes(self._folder)
        return num_bytes if day == files.day_of(self._clock()) else 0

    def add(self, num_bytes: int) -> None:
        """Notes bytes added, or freed, since the last count."""
        with self._guard:
            self._used_bytes += num_bytes

    def count(self, *, remove_partial: bool) -> None:
        """Counts all files. What is partly written and has no writer is removed: with the lock held, that is all of it."""
        used = 0
        by_folder: dict[str, int] = {}
        now_s = self._clock()
        for file in files.list_files(self._folder):
            abandoned = remove_partial and file.name.endswith(files.PARTIAL) and self._has_no_writer(file, now_s)
            if abandoned and files.remove_file(file.path):
                continue
            used += file.num_bytes
            if file.name.endswith(RUN):
                parent = file.path[: -len(file.name) - 1]
                by_folder[parent] = by_folder.get(parent, 0) + file.num_bytes
        with contextlib.ExitStack() as stack:
            yielding = sum(by_folder.get(str(folder), 0) for folder in self._unused_keys(stack))
        with self._guard:
            self._used_bytes, self._yielding_bytes = used, yielding

    def admit(self, num_bytes: int) -> Refusal | None:
        """Makes room for a new file and counts it as written, or says why it may not be. The lock is held.

        Raises:
            OSError: the folder cannot be written.
        """
        self.count(remove_partial=True)
        missing = self._missing(num_bytes)
        if missing > self._yielding_bytes:
            used, limit = format_bytes(self._used_bytes), format_bytes(self.limit_bytes)
            return Refusal("no room", f"{used} of {limit} are used, {format_bytes(num_bytes)} were to be added")
        refusal = self.spend(num_bytes)
        if refusal is None and missing > 0:
            self._remove_unused(missing)
            missing = self._missing(num_bytes)
            if missing > 0:
                refusal = Refusal("no room", "pages that nobody uses cannot be removed")
        return refusal

    def spend(self, num_bytes: int) -> Refusal | None:
        """Counts bytes as written today, or says that no more may be. The lock is held.

        They are counted before they are written, so a process that is killed has written at most what was counted.

        Raises:
            OSError: the folder cannot be written.
        """
        written = self.written_today_bytes
        if written + num_bytes > self.daily_bytes:
            left = format_bytes(max(0, self.daily_bytes - written))
            return Refusal("daily bound", f"{left} of {format_bytes(self.daily_bytes)} may still be written today")
        self.add(files.record_writes(self._folder, files.day_of(self._clock()), written + num_bytes))
        return None

    def _missing(self, num_bytes: int) -> int:
        """Bytes that have to go before so many can be added; negative if there is room."""
        return self._used_bytes + num_bytes + self._reserve_bytes - self.limit_bytes

    def _remove_unused(self, missing_bytes: int) -> None:
        """Removes runs of keys that no process uses, oldest first, until so many bytes are free."""
        with contextlib.ExitStack() as stack:
            runs = [file for folder in self._unused_keys(stack) for file in files.list_files(folder) if file.name.endswith(RUN)]
            for file in sorted(runs, key=lambda file: file.time_s):
                if missing_bytes <= 0:
                    break
                if files.remove_file(file.path):
                    missing_bytes -= file.num_bytes
                    with self._guard:
                        self._used_bytes -= file.num_bytes
                        self._yielding_bytes -= file.num_bytes

    def _unused_keys(self, stack: contextlib.ExitStack) -> Iterator[Path]:
        """Folders of other keys that no process has in use, nor can have until the stack is closed."""
        for folder in key_folders(self._folder):
            if folder != self._key_folder:
                with contextlib.suppress(OSError):
                    descriptor = os.open(folder, os.O_RDONLY | files.NO_FOLLOW)
                    stack.callback(os.close, descriptor)
                    if files.try_lock(descriptor, files.LOCK_EXCLUSIVE):
                        yield folder

    @staticmethod
    def _has_no_writer(file: files.File, now_s: float) -> bool:
        """Sessions are written without the lock, and where there are no locks nobody knows: those are given a minute."""
        may_have = not files.locks_are_known() or Path(file.path).parent.parent.name == files.SESSIONS_FOLDER
        return not may_have or files.is_abandoned(file.time_s, now_s)
