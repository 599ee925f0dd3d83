"""The disk tier: runs of pages in files, found again after a restart, within hard bounds on bytes kept and bytes written.

    write   a run that a request has left behind, if it fits; what does not is refused, with the reason
    scan    what there is, from the headers alone, and later what other processes have added
    read    a page, or one layer of it, straight into memory; checked, so wrong bytes are never taken for good ones
    drop    the last pages of runs

Any number of processes share a folder. Nothing that happens to its files raises: a page is there, gone or damaged.
Methods may be called from several threads; none holds the books while bytes of pages move.
Knows no tree and no worth: what to keep is the caller's choice.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.errors import StorageError
from headrace.kv import folder as files
from headrace.kv.budget import DiskBudget, Refusal
from headrace.kv.keys import Difference, StoreKey, difference, key_folder, key_folders, read_key, write_key
from headrace.kv.readers import Failure, RunReaders, Wanted
from headrace.kv.runs import (
    CHAIN_BYTES,
    RUN,
    Damaged,
    Header,
    OpenFile,
    PageShape,
    Place,
    Run,
    RunDraft,
    aligned,
    chain,
    encode_header,
    header_bytes,
    open_run,
    overwrite_page,
    parse_header,
    read_header,
    starts_with,
    write_all,
)
from headrace.model.step import PAGE_TOKENS

__all__ = [
    "CHAIN_BYTES",
    "DiskStore",
    "Failure",
    "PageShape",
    "Place",
    "Refusal",
    "Run",
    "RunDraft",
    "StoreKey",
    "chain",
]

_OPENED_AT_ONCE = 64
_NUMBERS = itertools.count(1)  # of the runs that this process has written, whichever store
_PROBLEMS_MAX = 1000
_RECENT_S = 1.0  # a folder that changed so short ago may change again without a new time


class DiskStore:
    """The runs of one key in a kv folder that other keys and other processes may share.

    `limit_bytes` bounds everything below the folder, whoever wrote it; `daily_bytes` what all processes write on one day
    (UTC). `clock` gives seconds since 1970.

    Raises:
        StorageError: the folder cannot be made or locked.
    """

    def __init__(
        self,
        folder: Path,
        key: StoreKey,
        shape: PageShape,
        *,
        limit_bytes: int,
        daily_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.folder, self.key, self.shape = folder, key, shape
        self.problems: list[str] = []
        """What was found in the folder and could not be used, one line for each file."""
        self.written_bytes = 0
        self.read_bytes = 0
        self._key_digest = key.digest
        self._clock = clock
        self._guard = threading.Lock()  # the books: everything below
        self._runs: dict[int, Run] = {}
        self._ids: dict[str, int] = {}  # by file name
        self._ignored: set[str] = set()  # names of files that cannot be used or are our own
        self._next_id = 1
        self._listed_ns = -1
        self._elsewhere: dict[bytes, Path] | None = None
        self._readers = RunReaders()
        self._in_use = -1  # the key's folder, open and locked: while it is, others do not take its pages away
        try:
            self._lock = files.FolderLock(folder)
            self.key_folder = key_folder(folder, key)
            self._enter_key_folder()
        except OSError as error:
            raise StorageError(
                f"cannot keep pages in {folder}: {error.strerror or error}; name another folder with kv_dir, or do without "
                "the disk: kv_disk=0",
                arguments=("kv_dir", "kv_disk"),
            ) from error
        self._budget = DiskBudget(folder, self.key_folder, limit_bytes=limit_bytes, daily_bytes=daily_bytes, clock=clock)
        with self._lock.held(wait=False) as held:
            self._budget.count(remove_partial=held)

    # what there is

    @property
    def used_bytes(self) -> int:
        """Bytes of everything below the kv folder, as of the last write, drop or scan here."""
        return self._budget.used_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that runs may still take, as of the last write, drop or scan; pages of keys that nobody uses give way."""
        return self._budget.room_bytes

    @property
    def written_today_bytes(self) -> int:
        """Bytes that all processes have written today."""
        return self._budget.written_today_bytes

    @property
    def num_layers(self) -> int:
        """Layers of a page."""
        return self.shape.num_layers

    def page_bytes(self, page_format: int) -> int:
        """What a page takes on disk."""
        return aligned(self.shape.page_bytes(page_format))

    def header_bytes(self, num_pages: int) -> int:
        """The most that a run takes on disk beside its pages."""
        return header_bytes(self.shape, num_pages)

    def scan(self) -> list[Run]:
        """The runs that this store did not know yet, parents before children. Reads headers only.

        A run whose parent is not there is left out, and removed once it is a minute old.
        """
        try:
            changed_s = self.key_folder.stat().st_mtime
            changed_ns = int(changed_s * 1e9)
            if changed_ns == self._listed_ns:
                return []
            with self._guard:
                before = set(self._ids)
            names = files.list_names(self.key_folder, RUN)
        except OSError as error:
            self._problem(self.key_folder.name, error.strerror or "cannot be listed")
            return []
        self._listed_ns = changed_ns if abs(self._clock() - changed_s) > _RECENT_S else -1
        with self._guard:
            removed = [self._ids.pop(name) for name in before - names if name in self._ids]
            for run_id in removed:
                self._runs.pop(run_id, None)
            new = names - self._ids.keys() - self._ignored
        for run_id in removed:  # by others: an open file would keep its room
            self._readers.forget(run_id)
        if not new and not removed:
            return []
        found = sorted(self._inspect(sorted(new)), key=lambda run: (run.start_page, run.time_s))
        adopted = self._adopt(found)
        if adopted:
            self._readers.make_ready()
        self._budget.count(remove_partial=False)
        return adopted

    def known_elsewhere(self, tokens: Sequence[int]) -> Difference | None:
        """If the first page of these tokens is kept under another key, what differs. Lists others' runs once."""
        if self._elsewhere is None:
            self._elsewhere = {}
            for folder in key_folders(self.folder):
                if folder != self.key_folder:
                    for header in _headers(folder):
                        if header.start_page == 0:
                            self._elsewhere[header.chain_bytes[:CHAIN_BYTES]] = folder
        found = self._elsewhere.get(chain(b"", tokens[:PAGE_TOKENS])) if self._elsewhere else None
        return None if found is None else difference(read_key(found), self.key)

    # pages

    def read(self, place: Place, target: npt.NDArray[np.uint8]) -> Failure | None:
        """Reads a page into a view [page bytes]; None if its bytes are those that were written."""
        return self._read(place, 0, self.shape.num_layers, target)

    def read_layer(self, place: Place, layer: int, target: npt.NDArray[np.uint8]) -> Failure | None:
        """Reads one layer of a page into a view [layer bytes]."""
        return self._read(place, layer, 1, target)

    def read_many(
        self, places: Sequence[Place], targets: Sequence[npt.NDArray[np.uint8]], layers: range | None = None
    ) -> list[Failure | None]:
        """Reads pages, or some consecutive layers of each, into a view [their bytes] each, several at once.

        Best in the order in which they lie on disk.
        """
        first, count = (0, self.num_layers) if layers is None else (layers.start, len(layers))
        pages = [
            Wanted(self._run_of(place), place.index, first, count, target.data)
            for place, target in zip(places, targets, strict=True)
        ]
        found = self._readers.read_many(pages)
        read = sum(target.nbytes for target, failure in zip(targets, found, strict=True) if failure is None)
        with self._guard:
            self.read_bytes += read
        return found

    def prefetch_layer(self, places: Iterable[Place], layer: int) -> None:
        """Has the system begin to read one layer of these pages, all at once, for `read_layer` to find it in memory."""
        for place in places:
            run = self._runs.get(place.run)
            opened = self._readers.take(run) if run is not None else "gone"
            if not isinstance(opened, str):
                opened.prefetch(place.index, layer, 1)
                self._readers.give_back(opened)

    def write(self, draft: RunDraft) -> Run | Refusal:
        """Writes a run, or says why not. Waits for other processes that are writing, two seconds at most."""
        header = encode_header(self._key_digest, self.shape, draft)
        num_bytes = len(header) + len(draft.pages) * files.file_bytes(draft.pages[0].nbytes)
        with self._lock.held() as held:
            if not held:
                return Refusal("unusable", f"the lock of {self.folder} cannot be had")
            try:
                self._enter_key_folder()
                write_key(self.key_folder, self.key)
                refusal = self._budget.admit(num_bytes)
                if refusal is not None:
                    return refusal
                name = self._write_file(header, draft)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                return Refusal("disk full" if full else "unusable", f"{self.folder}: {error.strerror or error}")
        run = Run.of(str(self.key_folder), name, parse_header(header), len(draft.pages), draft.time_s)
        self._budget.add(num_bytes)
        with self._guard:
            self._book(run)
            self.written_bytes += num_bytes
        return run

    def repair(self, place: Place, page: npt.NDArray[np.uint8]) -> bool:
        """Writes a page over its damaged copy, if it is the same to the bit; False if the copy cannot be repaired."""
        run = self._runs.get(place.run)
        if run is None or place.index >= run.num_pages:
            return False
        with self._lock.held() as held:
            if not held or page.nbytes != self.shape.page_bytes(run.page_format):
                return False
            try:
                return self._budget.spend(page.nbytes) is None and overwrite_page(run, place.index, page)
            except (OSError, Damaged):
                return False

    def drop(self, places: Iterable[Place]) -> None:
        """Gives up the last pages of their runs. Files that are gone or replaced are left alone."""
        indices: dict[int, set[int]] = defaultdict(set)
        for place in places:
            indices[place.run].add(place.index)
        for run_id, dropped in indices.items():
            with self._guard:
                run = self._runs.get(run_id)
                if run is None:
                    continue
                left = run.num_pages - len(dropped)
                assert dropped == set(range(left, run.num_pages)), "a run shrinks from its end"
                run.num_pages = left
                if left == 0:
                    del self._runs[run_id]
                    if self._ids.get(run.name) == run_id:
                        del self._ids[run.name]
            freed = self._shrink(run)
            self._budget.add(-freed)

    def close(self) -> None:
        """Closes all files; pages cannot be read any more."""
        with self._guard:
            self._runs.clear()
            self._ids.clear()
        self._readers.close()
        self._lock.close()
        if self._in_use >= 0:
            os.close(self._in_use)
            self._in_use = -1

    # reading

    def _run_of(self, place: Place) -> Run | None:
        """The run that has a page; None if there is none."""
        run = self._runs.get(place.run)
        return run if run is not None and place.index < run.num_pages else None

    def _read(self, place: Place, layer: int, num_layers: int, target: npt.NDArray[np.uint8]) -> Failure | None:
        run = self._run_of(place)
        opened = self._readers.take(run) if run is not None else "gone"
        if isinstance(opened, str):
            return opened
        try:
            failure = opened.read(place.index, layer, num_layers, target.data)
        finally:
            self._readers.give_back(opened)
        if failure is None:
            with self._guard:
                self.read_bytes += target.nbytes
        return failure

    # scanning

    def _inspect(self, names: Sequence[str]) -> Iterator[Run]:
        """The runs among some files, and a line in `problems` for each of the others.

        Files are opened in groups, so that the disk reads many headers at once.
        """
        for start in range(0, len(names), _OPENED_AT_ONCE):
            group = names[start : start + _OPENED_AT_ONCE]
            for name, opened in [(name, self._open(name)) for name in group]:
                if isinstance(opened, OpenFile):
                    try:
                        yield self._examine(name, opened)
                    except (OSError, Damaged, LookupError) as error:
                        self._reject(name, error, opened.time_s)
                    finally:
                        os.close(opened.descriptor)

    def _open(self, name: str) -> OpenFile | None:
        try:
            return open_run(f"{self.key_folder}{os.sep}{name}")
        except (OSError, Damaged) as error:
            self._reject(name, error, None)
            return None

    def _examine(self, name: str, opened: OpenFile) -> Run:
        """What a file holds.

        Raises:
            OSError: it cannot be read.
            Damaged: it is no run of these pages.
            LookupError: it is one, but of another key.
        """
        header = read_header(opened.descriptor, opened.size)
        if header.key != self._key_digest:
            raise LookupError("pages of another key")
        num_pages = header.pages_in(opened.size)
        if not header.has_shape(self.shape) or num_pages == 0:
            raise Damaged("no page is whole" if num_pages == 0 else "pages of another shape")
        return Run.of(str(self.key_folder), name, header, num_pages, opened.time_s)

    def _reject(self, name: str, error: Exception, time_s: float | None) -> None:
        """Reports a file that cannot be used, and removes it if it is a damaged one of ours that nobody is writing."""
        self._problem(name, str(getattr(error, "strerror", None) or error))
        removable = isinstance(error, Damaged) and time_s is not None and files.is_abandoned(time_s, self._clock())
        if not (removable and files.remove_file(self.key_folder / name)):
            self._ignored.add(name)

    def _adopt(self, found: list[Run]) -> list[Run]:
        """Takes runs, by start page, into the books if the page before each is known."""
        known: set[bytes] = set()
        if any(run.start_page for run in found):
            with self._guard:
                for run in self._runs.values():
                    known.update(run.chains())
        adopted = []
        for run in found:
            if run.start_page and run.parent not in known:
                # Whoever starts from here on can never reach its pages, and nobody's bookkeeping has them: they would
                # take up room for ever. A process that still uses them recomputes. A young one may be in a race with
                # the listing that missed its parent.
                self._problem(run.name, "the pages before it are gone")
                if files.is_abandoned(run.time_s, self._clock()):
                    files.remove_file(run.path)
                continue
            known.update(run.chains())
            adopted.append(run)
        with self._guard:
            for run in adopted:
                self._book(run)
        return adopted

    def _book(self, run: Run) -> None:
        run.id = self._next_id
        self._next_id += 1
        self._runs[run.id] = run
        self._ids[run.name] = run.id

    def _problem(self, name: str, what: str) -> None:
        line = f"{name}: {what}"
        if len(self.problems) < _PROBLEMS_MAX and line not in self.problems:
            self.problems.append(line)

    # writing

    def _enter_key_folder(self) -> None:
        """Makes the folder of this key, if it is not there or no longer, and says that it is in use.

        Raises:
            OSError: that is not possible.
        """
        files.make_private(self.key_folder.parent)
        files.make_private(self.key_folder)
        if not files.locks_are_known():
            return
        if self._in_use >= 0 and os.path.samestat(os.fstat(self._in_use), self.key_folder.stat()):
            return
        descriptor = os.open(self.key_folder, os.O_RDONLY | files.NO_FOLLOW)
        files.wait_for_lock(descriptor, files.LOCK_SHARED)
        if self._in_use >= 0:
            os.close(self._in_use)
        self._in_use = descriptor

    def _write_file(self, header: bytes, draft: RunDraft) -> str:
        """Writes a run's file, whole or not at all; its name.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        milliseconds = int(self._clock() * 1000)
        while True:
            name = f"{milliseconds:x}-{os.getpid():x}-{next(_NUMBERS):x}{RUN}"
            path = self.key_folder / name
            partial = self.key_folder / f"{name}{files.PARTIAL}"
            if not (os.path.lexists(path) or os.path.lexists(partial)):
                break
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | files.NO_FOLLOW, 0o600)
            try:
                write_all(descriptor, header, draft.pages)
            finally:
                os.close(descriptor)
            os.utime(partial, (draft.time_s, draft.time_s))
            with self._guard:
                self._ignored.add(name)  # a scan in another thread leaves it to this one
            partial.rename(path)
        except BaseException:
            files.remove_file(partial)
            raise
        return name

    def _shrink(self, run: Run) -> int:
        """Cuts a run's file off behind its pages; the bytes freed."""
        if run.num_pages == 0:
            self._readers.forget(run.id)
        try:
            descriptor = os.open(run.path, os.O_RDWR | files.NO_FOLLOW)
        except OSError:
            return 0
        try:
            status = os.fstat(descriptor)
            size = run.payload_offset + run.num_pages * run.stride
            if not stat.S_ISREG(status.st_mode) or not starts_with(descriptor, run.header_digest) or status.st_size <= size:
                return 0
            os.ftruncate(descriptor, size)
            os.utime(run.path, (run.time_s, run.time_s))
        except OSError:
            return 0
        finally:
            os.close(descriptor)
        if run.num_pages == 0 and not files.remove_file(run.path):
            return 0
        return files.file_bytes(status.st_size) - (files.file_bytes(size) if run.num_pages else 0)


def _headers(folder: Path) -> Iterator[Header]:
    """The headers of all sound runs in a folder."""
    with contextlib.suppress(OSError):
        for name in files.list_names(folder, RUN):
            with contextlib.suppress(OSError, Damaged):
                opened = open_run(folder / name)
                try:
                    yield read_header(opened.descriptor, opened.size)
                finally:
                    os.close(opened.descriptor)
