"""Open run files: pages read straight into memory and checked, over a bounded number of files.

A file is opened when a page of it is first read, and only used if its header is the one that the books know: what was
replaced is as good as gone. Files that nobody is reading from are closed again, the longest unused first. Of many pages,
those that only the disk has are read past the system's cache by several threads, so that the disk always has work.
Readers on any thread; nothing is locked while bytes are read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import xxhash

from headrace.kv.direct import DirectFile
from headrace.kv.runs import Damaged, Run, open_run, read_header, read_into

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Failure = Literal["gone", "damaged"]

OPEN_FILES_MAX = 64
READS_AT_ONCE = 8
"""What a disk is asked for at once: enough for it to be busy all the time, few enough to begin with the first."""
_GONE = (FileNotFoundError, NotADirectoryError, PermissionError)


class Wanted(NamedTuple):
    """Some layers of a page of a run, and where they go. A run that nobody knows is None."""

    run: Run | None
    page: int
    first_layer: int
    num_layers: int
    target: memoryview


class OpenRun:
    """A run file to read from."""

    __slots__ = (
        "checksums",
        "descriptor",
        "direct",
        "layer_bytes",
        "num_layers",
        "num_pages",
        "payload_offset",
        "retired",
        "stride",
        "users",
    )

    def __init__(self, run: Run) -> None:
        """Opens a run's file.

        Raises:
            OSError: it is gone or cannot be read.
            Damaged: it is no whole run.
            LookupError: it is another run.
        """
        self.descriptor, size, _ = open_run(run.path)
        try:
            header = read_header(self.descriptor, size)
            if header.digest != run.header_digest:
                raise LookupError("another run has this name")
        except BaseException:
            os.close(self.descriptor)
            raise
        self.checksums = header.checksums()
        self.num_layers, self.layer_bytes = header.num_layers, header.layer_bytes
        self.num_pages, self.payload_offset, self.stride = header.num_pages, header.payload_offset, header.stride
        self.direct = DirectFile(run.path, self.descriptor, size)
        self.users = 1
        self.retired = False  # to be closed by its last user

    def read(
        self, index: int, first_layer: int, num_layers: int, target: memoryview, *, past_cache: bool = False
    ) -> Failure | None:
        """Reads some layers of a page: target [num_layers * layer_bytes]."""
        layer_bytes = self.layer_bytes
        num_bytes = num_layers * layer_bytes
        assert len(target) == num_bytes, "a target is as long as what is read into it"
        if index >= self.num_pages:
            return "gone"
        offset = self._offset(index, first_layer)
        try:
            is_read = past_cache and self.direct.read(target, offset)
            if not is_read and read_into(self.descriptor, target, offset) != num_bytes:
                return "gone"  # cut off by whoever needed the room
            number = index * self.num_layers + first_layer
            for start in range(0, num_bytes, layer_bytes):
                if xxhash.xxh3_64_intdigest(target[start : start + layer_bytes]) != self.checksums[number]:
                    # a file that is being cut off while it is read gives zeros
                    return "damaged" if os.fstat(self.descriptor).st_size >= offset + num_bytes else "gone"
                number += 1
        except OSError:
            return "damaged"
        return None

    def prefetch(self, index: int, first_layer: int, num_layers: int) -> None:
        """Has the system begin to read some layers of a page."""
        if hasattr(os, "posix_fadvise"):
            offset = self._offset(index, first_layer)
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, offset, num_layers * self.layer_bytes, os.POSIX_FADV_WILLNEED)

    def is_cached(self, index: int, first_layer: int, num_layers: int) -> bool:
        """Whether some layers of a page are to be had without the disk, as far as can be told."""
        return self.direct.is_cached(self._offset(index, first_layer), num_layers * self.layer_bytes)

    def close(self) -> None:
        """Closes the file."""
        self.direct.close()
        os.close(self.descriptor)

    def _offset(self, index: int, first_layer: int) -> int:
        return self.payload_offset + index * self.stride + first_layer * self.layer_bytes


class RunReaders:
    """The open files, by the id of their run."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._open: OrderedDict[int, OpenRun] = OrderedDict()  # the longest unused first
        self._pool: ThreadPoolExecutor | None = None

    def read_many(self, wanted: Sequence[Wanted]) -> list[Failure | None]:
        """Reads layers of pages, best in the order in which they lie on disk; what failed, or None, for each."""
        found: list[Failure | None] = [None] * len(wanted)
        opened = [self.take(each.run) if each.run is not None else "gone" for each in wanted]
        near: list[int] = []
        far: list[int] = []
        for at, (each, run) in enumerate(zip(wanted, opened, strict=True)):
            if isinstance(run, str):
                found[at] = run
            else:
                (near if run.is_cached(each.page, each.first_layer, each.num_layers) else far).append(at)
        left = iter(far)

        def read(numbers: Iterable[int], *, past_cache: bool) -> None:
            for at in numbers:
                run, each = opened[at], wanted[at]
                assert not isinstance(run, str)
                found[at] = run.read(each.page, each.first_layer, each.num_layers, each.target, past_cache=past_cache)

        helpers = self._start(min(len(far), READS_AT_ONCE) - 1, lambda: read(left, past_cache=True))
        try:
            read(near, past_cache=False)
            read(left, past_cache=True)
        finally:
            for helper in helpers:
                helper.result()
            for run in opened:
                if not isinstance(run, str):
                    self.give_back(run)
        return found

    def make_ready(self) -> None:
        """Starts the helpers, so that the first read that somebody waits for does not have to."""
        if self._pool is None:
            together = threading.Barrier(READS_AT_ONCE - 1)  # one that is done would be taken for the next
            self._start(READS_AT_ONCE - 1, lambda: together.wait(1))

    def take(self, run: Run) -> OpenRun | Failure:
        """A run's file for one user, who gives it back; or why it cannot be read."""
        with self._guard:
            known = self._open.get(run.id)
            if known is not None:
                known.users += 1
                self._open.move_to_end(run.id)
                return known
        try:
            opened = self._open_anew(run)
        except (LookupError, *_GONE):
            return "gone"
        except (OSError, Damaged):
            return "damaged"
        with self._guard:
            known = self._open.get(run.id)
            if known is not None:  # another thread was faster
                known.users += 1
                opened.close()
                return known
            self._open[run.id] = opened
            self._close_oldest(OPEN_FILES_MAX)
        return opened

    def give_back(self, opened: OpenRun) -> None:
        """Ends a use."""
        with self._guard:
            opened.users -= 1
            if opened.retired and not opened.users:
                opened.close()

    def forget(self, run_id: int) -> None:
        """Closes a run's file, once nobody reads it any more."""
        with self._guard:
            opened = self._open.pop(run_id, None)
            if opened is not None:
                self._retire(opened)

    def close(self) -> None:
        """Closes all files that nobody is reading, and the others as soon as nobody does."""
        with self._guard:
            while self._open:
                self._retire(self._open.popitem()[1])
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    @property
    def num_open(self) -> int:
        """Files that are open."""
        return len(self._open)

    def _start(self, count: int, work: Callable[[], object]) -> list[Future[object]]:
        """Has helpers do something: as many as asked for, or as can be had."""
        started: list[Future[object]] = []
        if count > 0:
            with self._guard, contextlib.suppress(RuntimeError):  # the process ends, or has all threads that it may have
                if self._pool is None:
                    from concurrent.futures import ThreadPoolExecutor

                    self._pool = ThreadPoolExecutor(READS_AT_ONCE - 1, "headrace-disk")
                while len(started) < count:
                    started.append(self._pool.submit(work))
        return started

    def _open_anew(self, run: Run) -> OpenRun:
        try:
            return OpenRun(run)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        with self._guard:  # others in this process have many files open
            self._close_oldest(0)
        return OpenRun(run)

    def _close_oldest(self, limit: int) -> None:
        while len(self._open) > limit:
            self._retire(self._open.popitem(last=False)[1])

    @staticmethod
    def _retire(opened: OpenRun) -> None:
        opened.retired = True
        if not opened.users:
            opened.close()
