"""The run file: a stretch of consecutive pages of one path, written in one go, that only ever shrinks from its end.

     0   8 bytes   magic, with the format's version
     8   4 bytes   length of the JSON text, padded to a multiple of 8
    12   4 bytes   length of the body
    16   8 bytes   XXH3 of the body, seeded with the two lengths
    24   body      JSON text: key, shape, page format, first page, parent, facts
                   chain of each page, 16 bytes each
                   XXH3 of each layer of each page, [pages][layers], 8 bytes each
                   token ids, 4 bytes each
         payload   from the next multiple of 4096 on, each page rounded up to 4096 bytes

Integers are little-endian. A file is written under another name and then renamed, so a killed process leaves a whole run
or none. Nothing is forced to the disk: what a power failure tears is found by its checksums, and is only a recompute.
The size of the file says how many of its pages are still there.

A page's chain is a hash of its tokens and all tokens before: it names the page's place in the prefix tree.
Knows no budgets, and nothing of what lies beside a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from headrace.kv.folder import NO_FOLLOW
from headrace.model.step import PAGE_TOKENS

CHAIN_BYTES = 16
RUN = ".run"
ALIGNMENT = 4096
FORMAT_VERSION = 1

_MAGIC = b"HEADRUN" + bytes([FORMAT_VERSION])
_FIXED = struct.Struct("<8sIIQ")
_FIRST_READ_BYTES = 16 << 10  # holds the header of 27 pages of 30 layers
_SEEKING = threading.Lock()


class Damaged(ValueError):  # noqa: N818 - says what a file is; never leaves this package
    """A file that is no whole run of this version."""


@dataclass(frozen=True)
class PageShape:
    """The bytes of a page: `layer_bytes` of one layer (all KV heads, keys and values), by the code of the page's format."""

    num_layers: int
    layer_bytes: tuple[int, ...]

    def page_bytes(self, page_format: int) -> int:
        """Bytes of a page of a format."""
        return self.num_layers * self.layer_bytes[page_format]


class Place(NamedTuple):
    """Where a page lies on disk: a run's id, and the page's index in it."""

    run: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a place


@dataclass
class Run:
    """A run on disk: pages `start_page` to `start_page + num_pages` of a path, of one format.

    `parent` is the chain of the page before, b"" if there is none. `facts` are the writer's own. `time_s` is when it was
    written.
    """

    id: int
    folder: str
    name: str
    parent: bytes
    start_page: int
    page_format: int
    num_pages: int
    facts: dict[str, int]
    time_s: float
    # Packed, as a tuple takes ten times as much for as long as the run is known.
    token_bytes: bytes = field(repr=False)
    chain_bytes: bytes = field(repr=False)
    header_digest: int = field(repr=False)
    payload_offset: int = field(repr=False)
    stride: int = field(repr=False)

    @classmethod
    def of(cls, folder: str, name: str, header: Header, num_pages: int, time_s: float) -> Run:
        """The run of a file with `num_pages` whole pages; whoever keeps books gives it its id."""
        return cls(
            id=0,
            folder=folder,
            name=name,
            parent=header.parent,
            start_page=header.start_page,
            page_format=header.page_format,
            num_pages=num_pages,
            facts=header.facts,
            time_s=time_s,
            token_bytes=header.token_bytes,
            chain_bytes=header.chain_bytes,
            header_digest=header.digest,
            payload_offset=header.payload_offset,
            stride=header.stride,
        )

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.folder, self.name)

    @property
    def num_bytes(self) -> int:
        """What it takes on disk."""
        return self.payload_offset + self.num_pages * self.stride

    @property
    def num_tokens(self) -> int:
        """Tokens of the pages that are there."""
        return min(len(self.token_bytes) // 4, self.num_pages * PAGE_TOKENS)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the pages that are there; only the last page may be partly filled."""
        return struct.unpack_from(f"<{self.num_tokens}I", self.token_bytes)

    def chain(self, index: int) -> bytes:
        """The chain of page `index`: the parent of what continues there."""
        return self.chain_bytes[index * CHAIN_BYTES : (index + 1) * CHAIN_BYTES]

    def chains(self) -> list[bytes]:
        """The chain of each page that is there."""
        ends = range(CHAIN_BYTES, (self.num_pages + 1) * CHAIN_BYTES, CHAIN_BYTES)
        return [self.chain_bytes[end - CHAIN_BYTES : end] for end in ends]


@dataclass(frozen=True)
class RunDraft:
    """A run to write: as `Run`, with one view [page bytes] of each page. Nobody may write to the pages meanwhile."""

    parent: bytes
    start_page: int
    tokens: Sequence[int]
    page_format: int
    pages: Sequence[npt.NDArray[np.uint8]]
    facts: dict[str, int]
    time_s: float


class OpenFile(NamedTuple):
    """A file that has just been opened; its user closes it."""

    descriptor: int
    size: int
    time_s: float


class Header(NamedTuple):
    """What a run file says of itself, checked against its digest."""

    key: str
    num_layers: int
    layer_bytes: int
    page_format: int
    start_page: int
    parent: bytes
    facts: dict[str, int]
    num_pages: int
    token_bytes: bytes
    chain_bytes: bytes
    checksum_bytes: bytes
    digest: int
    payload_offset: int
    stride: int  # bytes from a page to the next

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.num_layers * self.layer_bytes

    def checksums(self) -> memoryview:
        """XXH3 of each layer of each page: integers [num_pages * num_layers]."""
        return np.frombuffer(self.checksum_bytes, "<u8").astype(np.uint64).data

    def pages_in(self, size: int) -> int:
        """Whole pages in a file of a size."""
        return max(0, min(self.num_pages, (size - self.payload_offset) // self.stride))

    def has_shape(self, shape: PageShape) -> bool:
        """Whether pages are laid out as expected."""
        return (
            self.page_format < len(shape.layer_bytes)
            and self.num_layers == shape.num_layers
            and self.layer_bytes == shape.layer_bytes[self.page_format]
        )


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The chain of a page with these tokens behind a page with chain `parent`; b"" is the parent of a first page.

    [CHAIN_BYTES] bytes of BLAKE2b: two pages with one chain would be taken for each other, so no weaker hash will do.
    """
    return hashlib.blake2b(parent + struct.pack(f"<{len(tokens)}I", *tokens), digest_size=CHAIN_BYTES).digest()


def chains(parent: bytes, tokens: Sequence[int]) -> list[bytes]:
    """The chain of each page of tokens behind a page with chain `parent`."""
    found = []
    for start in range(0, len(tokens), PAGE_TOKENS):
        parent = chain(parent, tokens[start : start + PAGE_TOKENS])
        found.append(parent)
    return found


def aligned(num_bytes: int) -> int:
    """Rounded up to where the payload, and each page in it, may start."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def header_bytes(shape: PageShape, num_pages: int) -> int:
    """The most that comes before the payload of a run, but for very long facts."""
    return aligned(_FIXED.size + 1024 + num_pages * (CHAIN_BYTES + 8 * shape.num_layers + 4 * PAGE_TOKENS))


def encode_header(key: str, shape: PageShape, draft: RunDraft) -> bytes:
    """The bytes before the payload, padded to its start. Reads all pages for their checksums."""
    assert (draft.start_page == 0) == (draft.parent == b""), "only a first page has no parent"
    assert len(draft.pages) == -(-len(draft.tokens) // PAGE_TOKENS) > 0, "one page for each PAGE_TOKENS tokens"
    layer_bytes = shape.layer_bytes[draft.page_format]
    facts = {
        "key": key,
        "layers": shape.num_layers,
        "layer_bytes": layer_bytes,
        "page_tokens": PAGE_TOKENS,
        "format": draft.page_format,
        "start": draft.start_page,
        "parent": draft.parent.hex(),
        "pages": len(draft.pages),
        "facts": draft.facts,
    }
    text = json.dumps(facts, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksums: list[int] = []
    for page in draft.pages:
        assert page.nbytes == shape.num_layers * layer_bytes, "a page holds all layers"
        checksums += layer_checksums(page, layer_bytes)
    body = b"".join(
        (
            text,
            *chains(draft.parent, draft.tokens),
            struct.pack(f"<{len(checksums)}Q", *checksums),
            struct.pack(f"<{len(draft.tokens)}I", *draft.tokens),
        )
    )
    head = _FIXED.pack(_MAGIC, len(text), len(body), _digest(len(text), body)) + body
    return head + bytes(-len(head) % ALIGNMENT)


def layer_checksums(page: npt.NDArray[np.uint8], layer_bytes: int) -> list[int]:
    """XXH3 of each layer of a page."""
    view = page.data
    digest = xxhash.xxh3_64_intdigest
    return [digest(view[start : start + layer_bytes]) for start in range(0, len(view), layer_bytes)]


def open_run(path: str | Path) -> OpenFile:
    """Opens a run file; the system begins to read its header.

    Raises:
        OSError: it is not there or cannot be read.
        Damaged: this is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | NO_FOLLOW)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise Damaged("no regular file")
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # some file systems take no advice
            os.posix_fadvise(descriptor, 0, _FIRST_READ_BYTES, os.POSIX_FADV_WILLNEED)
    return OpenFile(descriptor, status.st_size, status.st_mtime)


def read_header(descriptor: int, size: int) -> Header:
    """The header of a run file of a size that has just been opened.

    Raises:
        OSError: it cannot be read.
        Damaged: it is not whole, or of another version.
    """
    data = _read_on(descriptor, _FIRST_READ_BYTES)
    if len(data) >= _FIXED.size:
        end = _FIXED.size + _FIXED.unpack_from(data)[2]
        if len(data) < end <= size:
            data += _read_on(descriptor, end - len(data))
    return parse_header(data)


def parse_header(data: bytes) -> Header:
    """The header at the beginning of a run file's bytes.

    Raises:
        Damaged: it is not whole, or of another version.
    """
    if len(data) < _FIXED.size:
        raise Damaged("shorter than any run")
    magic, text_bytes, body_bytes, digest = _FIXED.unpack_from(data)
    if magic != _MAGIC:
        raise Damaged("another version" if magic[:-1] == _MAGIC[:-1] else "no run")
    body = data[_FIXED.size : _FIXED.size + body_bytes]
    if len(body) != body_bytes or text_bytes > body_bytes:
        raise Damaged("the header is cut short")
    if _digest(text_bytes, body) != digest:
        raise Damaged("the header is damaged")
    try:
        return _decode(body, text_bytes, digest)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged("the header makes no sense") from error


def starts_with(descriptor: int, header_digest: int) -> bool:
    """Whether a file that has just been opened is the run with this header.

    Raises:
        OSError: it cannot be read.
    """
    data = _read_on(descriptor, _FIXED.size)
    return len(data) == _FIXED.size and data[:8] == _MAGIC and _FIXED.unpack(data)[3] == header_digest


def _decode(body: bytes, text_bytes: int, digest: int) -> Header:
    says: dict[str, Any] = json.loads(body[:text_bytes])
    num_layers, layer_bytes, num_pages = says["layers"], says["layer_bytes"], says["pages"]
    sums_at = text_bytes + num_pages * CHAIN_BYTES
    tokens_at = sums_at + num_pages * num_layers * 8
    token_bytes = body[tokens_at:]
    if (
        not isinstance(says["facts"], dict)
        or says["page_tokens"] != PAGE_TOKENS
        or min(num_layers, layer_bytes, num_pages) <= 0
        or says["format"] < 0
    ):
        raise ValueError("another geometry")
    if len(token_bytes) % 4 or not (num_pages - 1) * PAGE_TOKENS < len(token_bytes) // 4 <= num_pages * PAGE_TOKENS:
        raise ValueError("tokens and pages do not fit together")
    parent = bytes.fromhex(says["parent"])
    if len(parent) != (CHAIN_BYTES if says["start"] else 0):
        raise ValueError("parent and first page do not fit together")
    return Header(
        key=says["key"],
        num_layers=num_layers,
        layer_bytes=layer_bytes,
        page_format=says["format"],
        start_page=says["start"],
        parent=parent,
        facts=says["facts"],
        num_pages=num_pages,
        token_bytes=token_bytes,
        chain_bytes=body[text_bytes:sums_at],
        checksum_bytes=body[sums_at:tokens_at],
        digest=digest,
        payload_offset=aligned(_FIXED.size + len(body)),
        stride=aligned(num_layers * layer_bytes),
    )


def _digest(text_bytes: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=text_bytes << 32 | len(body))


def _read_on(descriptor: int, num_bytes: int) -> bytes:
    """The next bytes of a file, fewer at its end."""
    data = os.read(descriptor, num_bytes)
    while 0 < len(data) < num_bytes:
        more = os.read(descriptor, num_bytes - len(data))
        if not more:
            break
        data += more
    return data


def read_into(descriptor: int, target: memoryview, offset: int) -> int:
    """Reads straight into memory, from any thread: the bytes read, fewer than asked for at the end of the file.

    Raises:
        OSError: the file cannot be read.
    """
    count = _read_once(descriptor, target, offset)
    while 0 < count < len(target):
        more = _read_once(descriptor, target[count:], offset + count)
        if not more:
            break
        count += more
    return count


def _read_once(descriptor: int, target: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, (target,), offset)
    with _SEEKING:  # the place in a file is shared by its readers
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(target))
    target[: len(data)] = data
    return len(data)


def write_all(descriptor: int, header: bytes, pages: Sequence[npt.NDArray[np.uint8]]) -> None:
    """Writes a header and the payload behind it, straight from where the pages lie.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    padding = memoryview(bytes(-pages[0].nbytes % ALIGNMENT))
    _write(descriptor, memoryview(header))
    for page in pages:
        _write(descriptor, page.data)
        _write(descriptor, padding)


def overwrite_page(run: Run, index: int, page: npt.NDArray[np.uint8]) -> bool:
    """Writes a page of a run again; False if it is not the page that was written, or that place is gone.

    Raises:
        OSError: the file cannot be read or written.
        Damaged: it is no whole run.
    """
    descriptor = os.open(run.path, os.O_RDWR | NO_FOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        header = read_header(descriptor, size)
        checksums = list(header.checksums()[index * header.num_layers : (index + 1) * header.num_layers])
        if header.digest != run.header_digest or layer_checksums(page, header.layer_bytes) != checksums:
            return False
        if index >= header.pages_in(size):
            return False
        os.lseek(descriptor, header.payload_offset + index * header.stride, os.SEEK_SET)
        _write(descriptor, page.data)
        os.utime(run.path, (run.time_s, run.time_s))
    finally:
        os.close(descriptor)
    return True


def _write(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]
