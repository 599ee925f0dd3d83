"""Reading past the system's cache: the same bytes as ever, and the ordinary way wherever it cannot be done."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.runtime import Memory
from headrace.kv import direct, readers
from headrace.kv.direct import BOUNCE_BYTES, DirectFile
from headrace.kv.runs import ALIGNMENT
from headrace.kv.store import DiskStore, Place, Run
from tiny.runs import draft, open_store, pages_of, read_all, set_byte, write

FILE_BYTES = 2 * BOUNCE_BYTES + 5 * ALIGNMENT
needs_system = pytest.mark.skipif(
    not hasattr(os, "O_DIRECT") or not hasattr(os, "posix_fadvise"), reason="this system reads nothing past its cache"
)


class File:
    """A file of random bytes, open in both ways."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "file"
        self.data = np.random.default_rng(0).integers(0, 256, FILE_BYTES, np.uint8)
        self.path.write_bytes(self.data.tobytes())
        self.descriptor = os.open(self.path, os.O_RDONLY)
        self.direct = DirectFile(self.path, self.descriptor, FILE_BYTES)

    def close(self) -> None:
        self.direct.close()
        os.close(self.descriptor)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    opened = File(tmp_path)
    yield opened
    opened.close()


def _drop(path: Path) -> None:
    """Takes a file out of the system's cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _can_be_dropped(opened: File) -> bool:
    """Whether the file system has a disk behind it."""
    _drop(opened.path)
    return not opened.direct.is_cached(0, FILE_BYTES)


@needs_system
def test_any_range_is_read_to_any_address(file: File) -> None:
    if not _can_be_dropped(file):
        pytest.skip("files lie in memory here")
    memory = Memory(FILE_BYTES + 2 * ALIGNMENT)
    edges = st.sampled_from([0, 1, 64, 4095, 4096, 4097, 8192, BOUNCE_BYTES - 1, BOUNCE_BYTES, BOUNCE_BYTES + 4096])

    @settings(max_examples=150, deadline=None)
    @given(st.one_of(edges, st.integers(0, FILE_BYTES - 1)), edges, st.sampled_from([0, 0, 1, 64, 4095]))
    def check(offset: int, length: int, shift: int) -> None:
        length = min(max(length, 1), FILE_BYTES - offset)
        memory.bytes[:] = 0
        start = ALIGNMENT + shift
        assert file.direct.read(memory.bytes[start : start + length].data, offset)
        assert np.array_equal(memory.bytes[start : start + length], file.data[offset : offset + length])
        assert not memory.bytes[:start].any()
        assert not memory.bytes[start + length :].any()

    check()


@needs_system
def test_cache_is_known_page_by_page(file: File) -> None:
    if not _can_be_dropped(file):
        pytest.skip("files lie in memory here")
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
    os.pread(file.descriptor, 4096, 3 * 4096)
    assert file.direct.is_cached(3 * 4096, 4096)
    assert file.direct.is_cached(3 * 4096 + 100, 50)
    assert not file.direct.is_cached(2 * 4096, 8192)
    assert not file.direct.is_cached(3 * 4096 + 1, 4096)
    file.direct.read(Memory(8192).bytes[:8192].data, 6 * 4096)
    assert not file.direct.is_cached(6 * 4096, 8192)


@needs_system
def test_what_is_not_there_is_left_to_the_ordinary_way(file: File) -> None:
    target = Memory(8192).bytes[:8192].data
    assert file.direct.is_cached(FILE_BYTES - 4096, 8192)  # nobody can tell
    assert not file.direct.read(target, FILE_BYTES - 4096)
    assert not file.direct.read(target[1:], FILE_BYTES - 4096)
    os.truncate(file.path, 4096)
    assert not file.direct.read(target, 4096)
    assert not file.direct.read(target, 0)
    file.direct.is_cached(4096, 8192)  # asking about what has been cut off does not end the process


@needs_system
def test_file_that_has_been_replaced_is_not_opened(file: File, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(FILE_BYTES))
    opened = DirectFile(other, file.descriptor, FILE_BYTES)
    assert not opened.read(Memory(4096).bytes[:4096].data, 0)
    assert opened.is_cached(0, 4096)
    opened.close()


def test_system_that_cannot_reads_in_the_ordinary_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_MINCORE", None)
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    descriptor = os.open(path, os.O_RDONLY)
    opened = DirectFile(path, descriptor, 8192)
    assert opened.is_cached(0, 8192)
    assert not opened.read(Memory(4096).bytes[:4096].data, 0)
    opened.close()
    os.close(descriptor)


# pages of runs


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing is in the system's cache; which offsets were asked of the disk itself."""
    asked: list[int] = []
    read = DirectFile.read

    def noted(self: DirectFile, target: memoryview, offset: int) -> bool:
        asked.append(offset)
        return read(self, target, offset)

    monkeypatch.setattr(DirectFile, "read", noted)
    monkeypatch.setattr(DirectFile, "is_cached", lambda *_: False)
    return asked


def _store_of_runs(folder: Path) -> tuple[DiskStore, list[Run], list[Place], list[bytes]]:
    """A store with 3 runs of 10 pages."""
    store = open_store(folder)
    runs, places, pages = [], [], []
    behind = None
    for turn in range(3):
        new = draft(turn + 1, 10, behind=behind)
        behind = write(store, new)
        runs.append(behind)
        places += [Place(behind.id, index) for index in range(10)]
        pages += pages_of(new)
    return store, runs, places, pages


@pytest.mark.parametrize("layers", [None, range(1), range(1, 3), range(3)])
def test_pages_and_layers_are_read_by_several_threads(tmp_path: Path, far: list[int], layers: range | None) -> None:
    store, runs, places, pages = _store_of_runs(tmp_path)
    first, count = (0, 3) if layers is None else (layers.start, len(layers))
    targets = list(np.zeros((30, 128 * count), np.uint8))
    assert store.read_many(places, targets, layers) == [None] * 30
    assert [target.tobytes() for target in targets] == [page[128 * first : 128 * (first + count)] for page in pages]
    assert sorted(far) == sorted(run.payload_offset + at * run.stride + 128 * first for run in runs for at in range(10))
    assert store.read_bytes == 30 * 128 * count
    store.close()


def test_what_failed_is_told_page_by_page(tmp_path: Path, far: list[int]) -> None:
    store, runs, places, _ = _store_of_runs(tmp_path)
    set_byte(runs[0].path, runs[0].payload_offset + 3 * runs[0].stride + 200)  # layer 1 of page 3
    os.truncate(runs[1].path, runs[1].payload_offset + 6 * runs[1].stride)
    runs[2].path.unlink()
    expected = ["damaged" if at == 3 else "gone" if at >= 16 else None for at in range(30)]
    assert store.read_many(places, list(np.zeros((30, 384), np.uint8))) == expected
    assert store.read_bytes == 15 * 384
    expected[3] = None
    assert store.read_many(places, list(np.zeros((30, 128), np.uint8)), range(2, 3)) == expected
    assert len(far) == 40
    store.close()


def test_what_lies_in_the_cache_is_read_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, runs, places, pages = _store_of_runs(tmp_path)
    monkeypatch.setattr(DirectFile, "is_cached", lambda *_: True)
    monkeypatch.setattr(DirectFile, "read", lambda *_: pytest.fail("it is there already"))
    targets = list(np.zeros((30, 384), np.uint8))
    assert store.read_many(places, targets) == [None] * 30
    assert [target.tobytes() for target in targets] == pages
    # single pages and layers leave to the system what it keeps
    monkeypatch.setattr(DirectFile, "is_cached", lambda *_: False)
    assert read_all(store, runs[0]) == pages[:10]
    store.close()


def test_reads_without_helpers_where_no_thread_can_be_had(
    tmp_path: Path, far: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _, places, pages = _store_of_runs(tmp_path)
    asked: list[Callable[[], None]] = []

    class Exhausted:
        def submit(self, work: Callable[[], None]) -> None:
            asked.append(work)
            raise RuntimeError("can't start new thread")

        def shutdown(self) -> None:
            pass

    monkeypatch.setattr(store._readers, "_pool", Exhausted())
    targets = list(np.zeros((30, 384), np.uint8))
    assert store.read_many(places, targets) == [None] * 30
    assert [target.tobytes() for target in targets] == pages
    assert (len(asked), len(far)) == (1, 30)
    store.close()


def test_helpers_are_there_before_the_first_read(tmp_path: Path) -> None:
    def helpers() -> int:
        return sum(each.name.startswith("headrace-disk") for each in threading.enumerate())

    before = helpers()
    empty = open_store(tmp_path)
    empty.scan()
    assert helpers() == before
    write(empty, draft(1))
    store = open_store(tmp_path)
    store.scan()
    assert helpers() == before + readers.READS_AT_ONCE - 1
    store.close()
    assert helpers() == before


def test_no_more_is_asked_of_a_disk_at_once_than_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _, places, _ = _store_of_runs(tmp_path)
    at_once, most, guard = 0, 0, threading.Lock()
    everybody = threading.Barrier(readers.READS_AT_ONCE)
    arrived = iter(range(readers.READS_AT_ONCE))

    def read(self: DirectFile, target: memoryview, offset: int) -> bool:
        nonlocal at_once, most
        with guard:
            at_once += 1
            most = max(most, at_once)
            is_first = next(arrived, None) is not None
        if is_first:
            everybody.wait(20)  # all of them read at the same time
        with guard:
            at_once -= 1
        return False

    monkeypatch.setattr(DirectFile, "read", read)
    monkeypatch.setattr(DirectFile, "is_cached", lambda *_: False)
    assert store.read_many(places, list(np.zeros((30, 384), np.uint8))) == [None] * 30
    assert most == readers.READS_AT_ONCE
    store.close()
