"""The bounds of the disk tier, and a disk that does not do what it should."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from headrace.errors import StorageError
from headrace.kv import folder as files
from headrace.kv import runs
from headrace.kv.store import Place, Refusal, Run, StoreKey
from tiny.runs import NOW, STRIDE, disk_bytes, draft, open_store, pages_of, read, read_all, write

OTHER_KEY = StoreKey("Other 2B", "cd" * 32, "kernels 1a2b width 64")
NEWER_KEY = StoreKey("Tiny 1B", "ab" * 32, "kernels 3c4d width 64")


def _only(found: list[Run]) -> Run:
    assert len(found) == 1
    return found[0]


# bounds


def _limit_for(num_runs: int) -> int:
    """A bound that leaves room for so many runs of two pages and no more."""
    limit = num_runs * 3 * STRIDE + files.SMALL_FILES_BYTES + STRIDE
    return limit + limit // 63


def test_bound_on_bytes_is_hard(tmp_path: Path) -> None:
    store = open_store(tmp_path, limit_bytes=_limit_for(5))
    written = [store.write(draft(seed)) for seed in range(9)]
    refused = [each for each in written if isinstance(each, Refusal)]
    assert 3 <= len(written) - len(refused) <= 5
    assert {each.reason for each in refused} == {"no room"}
    assert disk_bytes(tmp_path) == store.used_bytes <= store._budget.limit_bytes
    assert store.room_bytes < 3 * STRIDE
    first = written[0]
    assert isinstance(first, Run)
    store.drop([Place(first.id, 0), Place(first.id, 1)])
    assert store.room_bytes >= 3 * STRIDE
    write(store, draft(20))


def test_room_is_exact_to_the_block(tmp_path: Path) -> None:
    limit = _limit_for(5)
    store = open_store(tmp_path, limit_bytes=limit)
    write(store, draft(1, 1))
    room = limit - limit // 64 - files.SMALL_FILES_BYTES - disk_bytes(tmp_path)
    assert store.room_bytes == room
    fitting = room // STRIDE - 1  # pages behind a header of one block
    assert isinstance(store.write(draft(2, fitting + 1)), Refusal)
    assert isinstance(store.write(draft(3, fitting)), Run)
    assert store.room_bytes == room % STRIDE


def test_bound_counts_sessions_other_keys_and_partial_files(tmp_path: Path) -> None:
    limit = _limit_for(8)
    other = open_store(tmp_path, OTHER_KEY, limit_bytes=limit)
    write(other, draft(1))
    (tmp_path / "sessions" / "ab").mkdir(parents=True)
    (tmp_path / "sessions" / "ab" / "one.json").write_bytes(bytes(2 * 3 * STRIDE))
    store = open_store(tmp_path, limit_bytes=limit)
    assert store.used_bytes == disk_bytes(tmp_path) >= 3 * 3 * STRIDE
    while isinstance(store.write(draft(int(store.used_bytes))), Run):
        assert store.used_bytes == disk_bytes(tmp_path) <= limit
    assert disk_bytes(tmp_path) > limit - 5 * STRIDE - files.SMALL_FILES_BYTES - limit // 64


def test_oversized_run_displaces_nothing(tmp_path: Path) -> None:
    limit = _limit_for(8)
    other = open_store(tmp_path, OTHER_KEY, limit_bytes=limit)
    old = write(other, draft(1))
    other.close()
    store = open_store(tmp_path, limit_bytes=limit)
    mine = write(store, draft(2))
    refusal = store.write(draft(3, 60))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "no room"
    assert old.path.exists()
    assert mine.path.exists()
    assert disk_bytes(tmp_path) <= limit


def test_pages_of_keys_that_nobody_uses_give_way_oldest_first(tmp_path: Path) -> None:
    limit = _limit_for(7)
    old, used = open_store(tmp_path, OTHER_KEY, limit_bytes=limit), open_store(tmp_path, NEWER_KEY, limit_bytes=limit)
    oldest, newest = write(old, draft(1, time_s=NOW - 50)), write(old, draft(2, time_s=NOW - 5))
    theirs = write(used, draft(3, time_s=NOW - 900))
    old.close()
    store = open_store(tmp_path, limit_bytes=limit)
    room = store.room_bytes
    free = room - 2 * 3 * STRIDE  # what is left without the two old runs
    assert free > 0
    assert isinstance(store.write(draft(4, free // STRIDE + 1)), Run)
    assert not oldest.path.exists()
    assert newest.path.exists()
    assert isinstance(store.write(draft(5)), Run)
    assert not newest.path.exists()
    assert theirs.path.exists()  # its process is running
    refusal = store.write(draft(6))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, disk_bytes(tmp_path) <= limit) == ("no room", True)
    assert read_all(used, theirs) == pages_of(draft(3))


def test_daily_bound_holds_over_stores_and_restarts(tmp_path: Path) -> None:
    now = NOW
    clock = lambda: now  # noqa: E731 - reads the variable
    one = open_store(tmp_path, daily_bytes=7 * STRIDE, clock=clock)
    write(one, draft(1))
    other = open_store(tmp_path, OTHER_KEY, daily_bytes=7 * STRIDE, clock=clock)
    write(other, draft(2))
    one.close()
    again = open_store(tmp_path, daily_bytes=7 * STRIDE, clock=clock)
    refusal = again.write(draft(3))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "daily bound"
    assert again.written_today_bytes == 6 * STRIDE
    assert json.loads((tmp_path / "writes.json").read_text()) == {"day": files.day_of(NOW), "bytes": 6 * STRIDE}
    now = NOW + 86_400
    assert again.written_today_bytes == 0
    write(again, draft(3))
    assert (again.written_today_bytes, again.written_bytes) == (3 * STRIDE, 3 * STRIDE)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"day": 3, "bytes": "x"}', b'{"day": "2027-01-15", "bytes": -5}'])
def test_broken_count_of_daily_bytes_starts_anew(tmp_path: Path, content: bytes) -> None:
    store = open_store(tmp_path)
    (tmp_path / "writes.json").write_bytes(content)
    assert store.written_today_bytes == 0
    write(store, draft(1))
    assert store.written_today_bytes == 3 * STRIDE


# a disk that does not do what it should


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, "disk full"),
        (errno.EDQUOT, "disk full"),
        (errno.EROFS, "unusable"),
        (errno.EACCES, "unusable"),
        (errno.EIO, "unusable"),
    ],
)
@pytest.mark.parametrize("after", [0, 1, 3])
def test_failing_write_is_a_refusal_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str, after: int
) -> None:
    store = open_store(tmp_path)
    write(store, draft(1))
    used, calls, real = disk_bytes(tmp_path), [0], runs._write

    def failing(descriptor: int, data: memoryview) -> None:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(code, os.strerror(code))
        real(descriptor, data)

    monkeypatch.setattr(runs, "_write", failing)
    refusal = store.write(draft(2))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason
    assert os.strerror(code) in refusal.detail
    assert disk_bytes(tmp_path) == used
    monkeypatch.undo()
    assert read_all(store, write(store, draft(2))) == pages_of(draft(2))


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read, real_preadv = os.write, os.read, os.preadv
    monkeypatch.setattr(os, "write", lambda file, data: real_write(file, data[: max(1, len(data) // 3)]))
    monkeypatch.setattr(os, "read", lambda file, count: real_read(file, max(1, count // 3)))
    monkeypatch.setattr(os, "preadv", lambda file, to, at: real_preadv(file, [to[0][: max(1, len(to[0]) // 3)]], at))
    store = open_store(tmp_path)
    assert read_all(store, write(store, draft(1))) == pages_of(draft(1))
    other = open_store(tmp_path)
    assert read_all(other, _only(other.scan())) == pages_of(draft(1))


def test_system_without_locks_and_vectored_reads_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_flock", None)
    monkeypatch.delattr(os, "preadv")
    monkeypatch.delattr(os, "posix_fadvise")
    store = open_store(tmp_path)
    assert read_all(store, write(store, draft(1))) == pages_of(draft(1))
    partial = store.key_folder / "1.run.partial"
    partial.write_bytes(bytes(100))
    os.utime(partial, (NOW - 30, NOW - 30))
    open_store(tmp_path)
    assert partial.exists()  # it may have a writer
    os.utime(partial, (NOW - 90, NOW - 90))
    open_store(tmp_path)
    assert not partial.exists()


def test_too_many_open_files_close_those_not_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    one, two = write(store, draft(1)), write(store, draft(2))
    assert read_all(store, one) == pages_of(draft(1))
    real, failed = os.open, []

    def scarce(path: object, *args: int, **more: int) -> int:
        if str(path) == str(two.path) and not failed:
            failed.append(path)
            raise OSError(errno.EMFILE, "too many open files")
        return real(path, *args, **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", scarce)
    assert read_all(store, two) == pages_of(draft(2))
    assert failed
    assert store._readers.num_open == 1


def test_disk_that_cannot_read_is_reported_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    run = write(store, draft(1))

    def failing(*args: object) -> int:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    assert read_all(store, run) == ["damaged", "damaged"]


@pytest.mark.parametrize("name", ["lock", "pages"])
def test_folder_that_cannot_be_used_ends_in_one_sentence(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    if name == "lock":
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot keep pages in .*kv: .*kv_dir.*kv_disk=0") as error:
        open_store(folder)
    assert "\n" not in str(error.value)


def test_lock_that_others_keep_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LOCK_TRIES", 3)
    store, other = open_store(tmp_path), files.FolderLock(tmp_path)
    with other.held() as held:
        assert held
        refusal = store.write(draft(1))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "unusable"
    write(store, draft(1))


def test_lock_keeps_threads_apart_too(tmp_path: Path) -> None:
    lock, inside, most = files.FolderLock(tmp_path), [0], [0]

    def work() -> None:
        for _ in range(20):
            with lock.held() as held:
                assert held
                inside[0] += 1
                time.sleep(0.0002)
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_folder_removed_under_a_running_store_is_made_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    run = write(store, draft(1))
    (tmp_path / "kv").rename(tmp_path / "moved")
    assert read(store, Place(run.id, 0)) == "gone"
    assert store.scan() == []
    again = write(store, draft(2))
    assert read_all(store, again) == pages_of(draft(2))
    assert [found.facts["turn"] for found in open_store(tmp_path / "kv").scan()] == [2]
    assert disk_bytes(tmp_path / "kv") == store.used_bytes


def test_files_can_be_read_by_their_owner_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = open_store(tmp_path / "kv")
        write(store, draft(1))
    finally:
        os.umask(old)
    for path in (tmp_path / "kv", *(tmp_path / "kv").rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
