"""What processes have counted and measured, kept beside the pages for the processes that come after: a file for each name.

    <folder of a key>/counters.json, prices.json

Readers find the old content or the new one. A disk that takes nothing loses what was counted, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.kv.folder import FolderLock, read_json, write_json


class FolderJournal:
    """The journal of one key, in its folder; `kv_folder` has the lock."""

    def __init__(self, key_folder: Path, kv_folder: Path) -> None:
        self._key_folder, self._kv_folder = key_folder, kv_folder

    def read(self, name: str) -> object:
        """What is kept under a name, as JSON has it; None if there is nothing, or it is damaged."""
        return read_json(self._path(name))

    def merge(self, name: str, change: Callable[[object], object]) -> bool:
        """Puts what `change` makes of the content in its place, whole or not at all, while no other process does."""
        try:
            lock = FolderLock(self._kv_folder)
            try:
                with lock.held() as held:
                    if held:
                        write_json(self._path(name), change(self.read(name)))
                    return held
            finally:
                lock.close()
        except OSError:
            return False

    def _path(self, name: str) -> Path:
        return self._key_folder / f"{name}.json"
