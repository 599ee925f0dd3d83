"""Small runs of random pages, and stores for them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.kv.journal import FolderJournal
from headrace.kv.store import DiskStore, Failure, PageShape, Place, Run, RunDraft, StoreKey
from headrace.model.step import PAGE_TOKENS

NOW = 1_800_000_000.0
SHAPE = PageShape(3, (128, 64, 32))
KEY = StoreKey("Tiny 1B", "ab" * 32, "kernels 1a2b width 64")
STRIDE = 4096


def open_store(
    folder: Path,
    key: StoreKey = KEY,
    *,
    shape: PageShape = SHAPE,
    limit_bytes: int = 10**8,
    daily_bytes: int = 10**9,
    clock: Callable[[], float] = lambda: NOW,
) -> DiskStore:
    """A store with room for everything, unless told otherwise."""
    return DiskStore(folder, key, shape, limit_bytes=limit_bytes, daily_bytes=daily_bytes, clock=clock)


def journal_of(store: DiskStore) -> FolderJournal:
    """Where what is counted beside the pages of a store is kept."""
    return FolderJournal(store.key_folder, store.folder)


def draft(
    seed: int,
    num_pages: int = 2,
    *,
    behind: Run | None = None,
    parent: bytes = b"",
    start_page: int = 0,
    page_format: int = 0,
    last_tokens: int = PAGE_TOKENS,
    time_s: float = NOW,
    shape: PageShape = SHAPE,
) -> RunDraft:
    """A run of random tokens and bytes, the same for a seed; behind the pages of another run, if there is one."""
    if behind is not None:
        parent, start_page = behind.chain(behind.num_pages - 1), behind.start_page + behind.num_pages
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1 << 32, (num_pages - 1) * PAGE_TOKENS + last_tokens, dtype=np.uint32)
    tokens[0] = seed
    pages = rng.integers(0, 256, (num_pages, shape.page_bytes(page_format)), dtype=np.uint8)
    return RunDraft(parent, start_page, tuple(tokens.tolist()), page_format, list(pages), {"turn": seed}, time_s)


def write(store: DiskStore, new: RunDraft) -> Run:
    """Writes a run for which there is room."""
    run = store.write(new)
    assert isinstance(run, Run), run
    return run


def read(store: DiskStore, place: Place, page_format: int = 0) -> bytes | Failure:
    """A page's bytes, or why they cannot be had."""
    target: npt.NDArray[np.uint8] = np.zeros(store.shape.page_bytes(page_format), np.uint8)
    return store.read(place, target) or target.tobytes()


def pages_of(new: RunDraft) -> list[bytes]:
    """The bytes of a draft's pages."""
    return [page.tobytes() for page in new.pages]


def read_all(store: DiskStore, run: Run) -> list[bytes | Failure]:
    """All pages of a run."""
    return [read(store, Place(run.id, index), run.page_format) for index in range(run.num_pages)]


def disk_bytes(folder: Path) -> int:
    """What all files of a folder take, by another way than the store counts."""
    total = 0
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:  # removed meanwhile
            continue
        total += 0 if stat.S_ISDIR(status.st_mode) else (status.st_size + 4095) // 4096 * 4096
    return total


def set_byte(path: Path, offset: int, flip: int = 1) -> None:
    """Flips bits of one byte of a file; its times stay."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ flip]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def set_page_byte(store: DiskStore, place: Place, offset: int) -> None:
    """Flips a bit of one byte of a page, in the file that it lies in."""
    run = store._runs[place.run]
    set_byte(run.path, run.payload_offset + place.index * run.stride + offset)
