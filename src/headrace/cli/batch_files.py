"""The files of a batch: requests are read and answers appended line by line, and a run goes on behind the answers it finds.

Invariant: a regular file of answers holds whole lines, in the order of the requests, and at most one torn line behind them,
which a killed process leaves and the next one removes. A file that holds anything else is not touched.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from headrace.engine.request_lines import LINE_BYTES_MAX, RequestLine, is_answered
from headrace.errors import OptionError, StorageError
from headrace.kv.folder import LOCK_EXCLUSIVE, try_lock

_READ_BYTES = 1 << 20
_NOTHING = b" \t\r\n\xef\xbb\xbf"
"""Bytes of a line that holds no request: white space, a byte-order mark."""


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a stream with their line breaks; of a line longer than `LINE_BYTES_MAX`, that much and a byte more."""
    while line := stream.readline(LINE_BYTES_MAX + 1):
        rest = line
        while not rest.endswith(b"\n") and len(rest) > 0 and len(line) > LINE_BYTES_MAX:
            rest = stream.readline(_READ_BYTES)
        yield line


def count_requests(path: Path) -> int | None:
    """How many requests a file holds; None if it can be read only once."""
    if not path.is_file():
        return None
    with path.open("rb") as stream:
        return sum(1 for line in read_lines(stream) if line.strip(_NOTHING))


@dataclass(frozen=True)
class Found:
    """What a file of answers held already: answers, how many of them are errors, and the requests that are left."""

    num_answers: int
    num_errors: int
    requests: Iterator[RequestLine]


class AnswerFile:
    """A file that answers are appended to, each by itself. Only one process has it at a time.

    Raises:
        OptionError: it is a folder, or its own folder does not exist.
        StorageError: another process writes to it.
        OSError: it cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_dir():
            raise OptionError(f"--out={path} is a folder: name a file in it")
        if not path.parent.is_dir():
            raise OptionError(f"--out={path} lies in a folder that does not exist: create it first")
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        self._status = os.fstat(self._descriptor)
        self._is_file = stat.S_ISREG(self._status.st_mode)
        self._num_bytes = self._status.st_size
        with contextlib.suppress(OSError):  # a file system without locks
            if self._is_file and not try_lock(self._descriptor, LOCK_EXCLUSIVE):
                os.close(self._descriptor)
                raise StorageError(f"{path} is being written by another process: wait for its end, or use another --out")

    def check_apart(self, stream: BinaryIO) -> None:
        """Refuses to append to what is read.

        Raises:
            OptionError: the stream reads this file.
        """
        check_apart(stream, self._status, str(self.path))

    def find(self, requests: Iterator[RequestLine]) -> Found:
        """Compares what the file holds with the requests, one by one, and removes a torn last line.

        Raises:
            OptionError: these are no answers to these requests.
        """
        num_answers = num_errors = 0
        if not self._is_file or self._num_bytes == 0:
            return Found(0, 0, requests)
        whole_bytes = 0
        with self.path.open("rb") as stream:
            for line in read_lines(stream):
                request = next(requests, None)
                if request is None:
                    raise self._refusal(num_answers + 1, "the input has no request that it could be the answer to")
                if not line.endswith(b"\n"):
                    if line[: len(request.key)] != request.key[: len(line)]:
                        raise self._refusal(num_answers + 1, f"it does not answer the request of line {request.number}")
                    requests = chain([request], requests)
                    break
                if not line.startswith(request.key) or not line.endswith(b"}\n"):
                    raise self._refusal(num_answers + 1, f"it does not answer the request of line {request.number}")
                num_answers += 1
                num_errors += not is_answered(request, line)
                whole_bytes += len(line)
        if whole_bytes < self._num_bytes:
            self._truncate(whole_bytes)
        return Found(num_answers, num_errors, requests)

    def append(self, line: bytes) -> None:
        """Adds a line, all of it or nothing.

        Raises:
            OSError: there is no room.
        """
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException as error:
            self._truncate(self._num_bytes)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(self.path)
            raise
        self._num_bytes += len(line)

    def close(self) -> None:
        """Lets others have the file."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _truncate(self, num_bytes: int) -> None:
        if self._is_file:
            os.ftruncate(self._descriptor, num_bytes)
            self._num_bytes = num_bytes

    def _refusal(self, line: int, why: str) -> OptionError:
        return OptionError(
            f"--out={self.path} holds something else: line {line} is no answer to this input, {why}; "
            "use another --out, or move this file away"
        )


class AnswerStream:
    """Standard output in the place of a file of answers: there is nothing to go on from."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def check_apart(self, stream: BinaryIO) -> None:
        """As for a file."""
        with contextlib.suppress(OSError):  # a stream without a file
            check_apart(stream, os.fstat(self._stream.fileno()), "-")

    def find(self, requests: Iterator[RequestLine]) -> Found:
        """All requests are left."""
        return Found(0, 0, requests)

    def append(self, line: bytes) -> None:
        """Writes a line."""
        self._stream.write(line)
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


def check_apart(stream: BinaryIO, status: os.stat_result, name: str) -> None:
    """Refuses an output with this status that is the file which a stream reads.

    Raises:
        OptionError: it is.
    """
    with contextlib.suppress(OSError):  # a stream without a file
        read = os.fstat(stream.fileno())
        if stat.S_ISREG(read.st_mode) and os.path.samestat(read, status):
            raise OptionError(f"--out={name} is the file that the prompts are read from: use another one")
