"""The disk tier under fire: killed processes, torn, damaged and replaced files, two processes at once."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace.kv import folder as files
from headrace.kv.readers import OpenRun, RunReaders
from headrace.kv.store import Place, Run, StoreKey
from tiny.runs import (
    NOW,
    STRIDE,
    disk_bytes,
    draft,
    open_store,
    pages_of,
    read,
    read_all,
    set_byte,
    write,
)

# damage


@dataclass
class Kept:
    """A run of three pages on disk, in a folder of its own."""

    folder: Path
    run: Run
    pages: list[bytes]

    @property
    def path(self) -> Path:
        return self.run.path


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    store, new = open_store(tmp_path / "kv"), draft(1, 3, last_tokens=9)
    run = write(store, new)
    store.close()
    return Kept(tmp_path / "kv", run, pages_of(new))


def _check_only_good_pages_are_read(kept: Kept) -> tuple[int, int]:
    """Opens the folder anew: (pages found, pages read as they were written); all others must be refused."""
    store = open_store(kept.folder)
    found = store.scan()
    assert len(found) <= 1
    good = 0
    for run in found:
        assert run.tokens == draft(1, 3, last_tokens=9).tokens[: run.num_tokens]
        for index in range(run.num_pages):
            page = read(store, Place(run.id, index))
            assert page in ("gone", "damaged", kept.pages[index])
            good += page == kept.pages[index]
    assert len(found) == 1 or not kept.path.exists() or store.problems
    store.close()
    return (found[0].num_pages if found else 0), good


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(0, 4 * STRIDE - 1), flip=st.integers(1, 255))
@example(offset=0, flip=1)  # magic
@example(offset=7, flip=3)  # version
@example(offset=8, flip=1)  # length of the text
@example(offset=12, flip=255)  # length of the body
@example(offset=15, flip=255)  # beyond the file
@example(offset=16, flip=1)  # digest
@example(offset=24, flip=1)  # text
@example(offset=400, flip=1)  # chains, checksums, tokens
@example(offset=STRIDE, flip=1)  # first byte of the payload
@example(offset=STRIDE + 383, flip=128)  # last byte of the first page
def test_flipped_bits_are_found_wherever_they_are(kept: Kept, offset: int, flip: int) -> None:
    set_byte(kept.path, offset, flip)
    pages, good = _check_only_good_pages_are_read(kept)
    set_byte(kept.path, offset, flip)
    page, within = divmod(offset - STRIDE, STRIDE)
    if offset >= STRIDE:
        assert (pages, good) == (3, 2 if within < 384 else 3)
        assert page < 3
    else:
        assert good in (0, 3)  # nothing depends on the padding of the header
    assert _check_only_good_pages_are_read(kept) == (3, 3)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_flipped_bit_spoils_its_layer_only(kept: Kept, index: int, layer: int) -> None:
    set_byte(kept.path, STRIDE * (1 + index) + 128 * layer + 5)
    store = open_store(kept.folder)
    (run,) = store.scan()
    target = bytearray(128)
    view = np.frombuffer(target, np.uint8)
    for each in range(3):
        assert store.read_layer(Place(run.id, index), each, view) == ("damaged" if each == layer else None)
    assert read(store, Place(run.id, index)) == "damaged"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(0, 4 * STRIDE))
@example(size=0)
@example(size=7)
@example(size=24)
@example(size=STRIDE - 1)
@example(size=STRIDE)
@example(size=STRIDE + 383)
@example(size=2 * STRIDE - 1)
@example(size=2 * STRIDE)
@example(size=4 * STRIDE - 1)
@example(size=4 * STRIDE)
def test_torn_file_keeps_its_whole_pages(kept: Kept, size: int) -> None:
    whole = kept.path.read_bytes()
    os.truncate(kept.path, size)
    os.utime(kept.path, (NOW, NOW))
    expected = max(0, size // STRIDE - 1)
    assert _check_only_good_pages_are_read(kept) == (expected, expected)
    kept.path.write_bytes(whole)
    os.utime(kept.path, (NOW, NOW))


@pytest.mark.parametrize("hole", [0, 1, 2])
def test_hole_of_zeros_is_found(kept: Kept, hole: int) -> None:
    """What a power failure leaves of blocks that were never written."""
    with kept.path.open("r+b") as file:
        file.seek(STRIDE * (1 + hole))
        file.write(bytes(STRIDE))
    os.utime(kept.path, (NOW, NOW))
    assert _check_only_good_pages_are_read(kept) == (3, 2)


def _foreign_file(path: Path) -> None:
    path.write_bytes(random.Random(3).randbytes(20_000))


def _directory(path: Path) -> None:
    (path / "inside").mkdir(parents=True)


def _link(path: Path) -> None:
    target = path.with_suffix(".elsewhere")
    target.write_bytes(path.with_suffix(".kept").read_bytes())
    path.symlink_to(target)


def _other_run(path: Path) -> None:
    with tempfile.TemporaryDirectory() as other:
        run = write(open_store(Path(other)), draft(7, 3))
        shutil.copy(run.path, path)


def _run_of_another_key(path: Path) -> None:
    with tempfile.TemporaryDirectory() as other:
        run = write(open_store(Path(other), StoreKey("Tiny 1B", "ab" * 32, "kernels 3c4d")), draft(1, 3, last_tokens=9))
        shutil.copy(run.path, path)


REPLACEMENTS: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "an empty file": lambda path: path.write_bytes(b"") and None,
    "a foreign file": _foreign_file,
    "a directory": _directory,
    "a link": _link,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
    "another run": _other_run,
    "a run of another key": _run_of_another_key,
}


@pytest.mark.parametrize("what", REPLACEMENTS)
@pytest.mark.parametrize("opened_before", [False, True])
def test_replaced_file_is_gone_or_damaged(kept: Kept, what: str, opened_before: bool) -> None:
    running, late = open_store(kept.folder), open_store(kept.folder)
    (run,), (unread,) = running.scan(), late.scan()
    if opened_before:
        assert read_all(running, run) == kept.pages
    kept.path.rename(kept.path.with_suffix(".kept"))
    REPLACEMENTS[what](kept.path)
    if kept.path.is_file() and not kept.path.is_symlink():
        os.utime(kept.path, (NOW, NOW))
    if opened_before:
        assert read_all(running, run) == kept.pages  # from the file that is still open
    assert set(read_all(late, unread)) <= {"gone", "damaged"}
    running.drop([Place(run.id, index) for index in range(3)])
    late.drop([Place(unread.id, index) for index in range(3)])

    fresh = open_store(kept.folder, clock=lambda: NOW + 1)
    found = fresh.scan()
    assert [read_all(fresh, each) for each in found] == ([pages_of(draft(7, 3))] if what == "another run" else [])
    assert bool(fresh.problems) == (what not in ("nothing", "another run"))
    assert os.path.lexists(kept.path) == (what != "nothing")


def test_file_cut_off_while_it_is_open_is_gone(kept: Kept) -> None:
    store = open_store(kept.folder)
    (run,) = store.scan()
    assert read_all(store, run) == kept.pages
    os.truncate(kept.path, 2 * STRIDE + 100)
    assert read_all(store, run) == [kept.pages[0], "gone", "gone"]


def test_file_cut_off_while_it_is_read_is_gone(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(kept.folder)
    (run,) = store.scan()

    def cut(descriptor: int, targets: tuple[memoryview], offset: int) -> int:
        os.truncate(kept.path, offset)
        targets[0][:] = bytes(len(targets[0]))  # what is left of a block that goes away meanwhile
        return len(targets[0])

    monkeypatch.setattr(os, "preadv", cut)
    assert read(store, Place(run.id, 2)) == "gone"


def test_file_is_closed_by_its_last_reader(kept: Kept) -> None:
    readers, target = RunReaders(), bytearray(384)
    first, second = readers.take(kept.run), readers.take(kept.run)
    assert isinstance(first, OpenRun)
    assert first is second
    readers.forget(kept.run.id)
    readers.give_back(first)
    assert first.read(1, 0, 3, memoryview(target)) is None
    assert bytes(target) == kept.pages[1]
    readers.give_back(first)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(first.descriptor)


def test_damaged_files_of_our_own_are_removed_when_they_are_old(kept: Kept) -> None:
    torn, foreign = kept.path.with_name("torn.run"), kept.path.with_name("foreign.run")
    _run_of_another_key(foreign)
    for now, left in ((NOW + 30, True), (NOW + 90, False)):
        torn.write_bytes(kept.path.read_bytes()[:200])
        os.utime(torn, (NOW, NOW))
        store = open_store(kept.folder, clock=lambda now=now: now)  # type: ignore[misc]
        assert len(store.scan()) == 1
        assert sorted(store.problems) == ["foreign.run: pages of another key", "torn.run: the header is cut short"]
        assert torn.exists() == left
        assert foreign.exists()
        store.close()


def test_damaged_page_is_repaired_if_it_is_the_same(kept: Kept) -> None:
    set_byte(kept.path, 2 * STRIDE + 9)
    store = open_store(kept.folder)
    (run,) = store.scan()
    place = Place(run.id, 1)
    assert read(store, place) == "damaged"
    pages = [np.frombuffer(page, np.uint8) for page in kept.pages]
    assert not store.repair(place, pages[0])
    assert not store.repair(Place(run.id, 3), pages[1])
    assert not store.repair(Place(run.id + 1, 1), pages[1])
    written = store.written_today_bytes
    assert store.repair(place, pages[1])
    assert store.written_today_bytes > written
    assert read_all(store, run) == kept.pages
    assert read_all(open_store(kept.folder), run) == ["gone"] * 3  # a store knows its own ids only
    os.truncate(kept.path, 2 * STRIDE)
    assert not store.repair(place, pages[1])
    assert kept.path.stat().st_size == 2 * STRIDE
    kept.path.unlink()
    assert not store.repair(place, pages[1])


def test_partial_files_are_removed_unless_somebody_is_writing(kept: Kept) -> None:
    partial = kept.path.with_name("1-2-3.run.partial")
    partial.write_bytes(bytes(100_000))
    lock = files.FolderLock(kept.folder)
    with lock.held():
        store = open_store(kept.folder)
        assert partial.exists()
        assert store.used_bytes == disk_bytes(kept.folder)
    write(store, draft(5))
    assert not partial.exists()
    partial.write_bytes(bytes(100_000))
    assert open_store(kept.folder).used_bytes == disk_bytes(kept.folder)
    assert not partial.exists()


# processes

WRITER = """
import sys
from pathlib import Path
from tiny.runs import draft, open_store
from headrace.kv.store import Run
folder, first, count, limit, pages = Path(sys.argv[1]), *map(int, sys.argv[2:])
store = open_store(folder, limit_bytes=limit)
store.scan()
print("ready", flush=True)
behind = None
for seed in range(first, first + count):
    run = store.write(draft(seed, pages, behind=behind if seed % 3 else None))
    if isinstance(run, Run):
        print(seed, run.path.name, flush=True)
        behind = run
    else:
        print("refused", run.reason, flush=True)
"""


def _start_writer(folder: Path, first: int, count: int, limit_bytes: int, pages: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, *map(str, (folder, first, count, limit_bytes, pages))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_killed_writers_leave_whole_runs_or_none(tmp_path: Path) -> None:
    rng, written = random.Random(7), {}
    for turn in range(10):
        process = _start_writer(tmp_path, 1000 * turn, 900, 10**8, 30)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(rng.randint(1, 6))]
        time.sleep(rng.uniform(0.0, 0.01))
        process.kill()
        process.wait()
        for line in (*lines, *process.stdout.read().splitlines()):
            if line.strip().endswith(".run"):  # the last line may be cut off
                written[line.split()[1]] = int(line.split()[0])
        process.stdout.close()
    left = list(tmp_path.rglob("*.partial"))
    store = open_store(tmp_path)
    found = store.scan()
    assert {run.path.name for run in found} >= written.keys()
    assert len(found) >= 10
    assert store.problems == []
    for run in found:
        assert run.num_pages == 30
        assert read_all(store, run) == pages_of(draft(run.facts["turn"], 30))
    assert not any(path.exists() for path in left)
    assert store.used_bytes == disk_bytes(tmp_path)


def test_two_processes_share_a_folder_and_its_bound(tmp_path: Path) -> None:
    limit = 60 * 5 * STRIDE
    writers = [_start_writer(tmp_path, first, 60, limit, 4) for first in (0, 1000)]
    highest, running = 0, True
    while running:
        running = any(writer.poll() is None for writer in writers)
        highest = max(highest, disk_bytes(tmp_path))
        time.sleep(0.002)
    written, refused = set(), 0
    for writer in writers:
        assert writer.returncode == 0
        assert writer.stdout is not None
        lines = writer.stdout.read().splitlines()
        writer.stdout.close()
        refused += lines.count("refused no room")
        written |= {int(line.split()[0]) for line in lines if not line.startswith("refused")}
        assert len(lines) == 60
    assert highest <= limit
    assert refused > 0
    assert len(written) > 40
    store = open_store(tmp_path)
    found = store.scan()
    assert {run.facts["turn"] for run in found} == written
    for run in found:
        assert read_all(store, run) == pages_of(draft(run.facts["turn"], 4))
    assert store.written_today_bytes == sum(run.num_bytes for run in found)
