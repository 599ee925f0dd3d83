"""Open run files: pages read straight into memory and checked, over a bounded number of descriptors.

A file is opened when a page of it is first read, and only used if its header is the one that the books know: what was
replaced is as good as gone. Descriptors that nobody is reading from are closed again, the longest unused first.
Readers on any thread; nothing is locked while bytes are read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from typing import Literal

import xxhash

from headrace.kv.runs import Damaged, Run, open_run, read_header, read_into

Failure = Literal["gone", "damaged"]

OPEN_FILES_MAX = 64
_GONE = (FileNotFoundError, NotADirectoryError, PermissionError)


class OpenRun:
    """A run file to read from."""

    __slots__ = (
        "checksums",
        "descriptor",
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
        self.users = 1
        self.retired = False  # to be closed by its last user

    def read(self, index: int, first_layer: int, num_layers: int, target: memoryview) -> Failure | None:
        """Reads some layers of a page: target [num_layers * layer_bytes]."""
        layer_bytes = self.layer_bytes
        num_bytes = num_layers * layer_bytes
        assert len(target) == num_bytes, "a target is as long as what is read into it"
        if index >= self.num_pages:
            return "gone"
        offset = self.payload_offset + index * self.stride + first_layer * layer_bytes
        try:
            if read_into(self.descriptor, target, offset) != num_bytes:
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
            offset = self.payload_offset + index * self.stride + first_layer * self.layer_bytes
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, offset, num_layers * self.layer_bytes, os.POSIX_FADV_WILLNEED)


class RunReaders:
    """The open files, by the id of their run."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._open: OrderedDict[int, OpenRun] = OrderedDict()  # the longest unused first

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
                os.close(opened.descriptor)
                return known
            self._open[run.id] = opened
            self._close_unused(OPEN_FILES_MAX)
        return opened

    def give_back(self, opened: OpenRun) -> None:
        """Ends a use."""
        with self._guard:
            opened.users -= 1
            if opened.retired and not opened.users:
                os.close(opened.descriptor)

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

    @property
    def num_open(self) -> int:
        """Files that are open."""
        return len(self._open)

    def _open_anew(self, run: Run) -> OpenRun:
        try:
            return OpenRun(run)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        with self._guard:  # others in this process have many files open
            self._close_unused(0)
        return OpenRun(run)

    def _close_unused(self, limit: int) -> None:
        if len(self._open) > limit:
            for run_id in [run_id for run_id, opened in self._open.items() if not opened.users][: len(self._open) - limit]:
                self._retire(self._open.pop(run_id))

    @staticmethod
    def _retire(opened: OpenRun) -> None:
        opened.retired = True
        if not opened.users:
            os.close(opened.descriptor)
