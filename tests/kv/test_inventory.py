"""What lies in a kv folder: listed, verified, repaired and cleared without a model, whatever state it is in."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from headrace.kv.counters import Counters, merge_counters, read_counters
from headrace.kv.folder import day_of
from headrace.kv.inventory import Damage, clear, inventory, verify
from headrace.kv.sessions import SessionFiles, SessionRecord
from headrace.kv.store import Run, StoreKey
from tiny.runs import KEY, NOW, STRIDE, disk_bytes, draft, journal_of, open_store, pages_of, read_all, set_byte, write

OTHER_KEY = StoreKey("Other 2B (chat)", "cd" * 32, "kernels 1a2b width 64")


def _session(name: str, token_ids: tuple[int, ...], digest: str = KEY.model_digest) -> SessionRecord:
    return SessionRecord(name, digest, token_ids, (("user", "hello"),), False, 1.0, None, NOW)


def _fill(folder: Path) -> tuple[Run, Run, Run]:
    """Two runs of one path and one of another, of a key; a run of another key; two sessions."""
    store = open_store(folder)
    first = write(store, draft(1, 3, time_s=NOW - 50))
    second = write(store, draft(2, 2, behind=first, last_tokens=5))
    third = write(store, draft(3, 1, page_format=2, time_s=NOW - 20))
    store.close()
    other = open_store(folder, OTHER_KEY)
    write(other, draft(4, 1))
    other.close()
    history = (*draft(1, 3).tokens, *draft(2, 2, last_tokens=5).tokens, 1, 2, 3)
    assert SessionFiles(folder, KEY.model_digest).save(_session("long", history))
    assert SessionFiles(folder, KEY.model_digest).save(_session("unknown", (5, 6, 7)))
    assert SessionFiles(folder, OTHER_KEY.model_digest).save(_session("theirs", draft(4, 1).tokens, OTHER_KEY.model_digest))
    return first, second, third


def test_inventory_lists_keys_and_sessions(tmp_path: Path) -> None:
    _fill(tmp_path)
    found = inventory(tmp_path)
    other, tiny = found.keys
    assert (tiny.model, tiny.numbers, tiny.key) == (KEY.model, KEY.numbers, KEY)
    assert (tiny.num_runs, tiny.num_pages, tiny.num_tokens) == (3, 6, 5 * 32 + 5)
    assert tiny.pages_by_format == {0: 5, 2: 1}
    assert (tiny.oldest_s, tiny.newest_s, tiny.in_use) == (NOW - 50, NOW, False)
    assert tiny.total_bytes == disk_bytes(tiny.folder)
    assert (other.model, other.num_pages) == ("Other 2B (chat)", 1)
    assert found.total_bytes == disk_bytes(tmp_path)
    assert (found.written_day, found.written_bytes) == (day_of(NOW), 11 * STRIDE)
    assert {each.record.name: (each.disk_tokens, each.num_tokens) for each in found.sessions} == {
        "long": (4 * 32, 4 * 32 + 8),  # its last page goes on differently
        "unknown": (0, 3),
        "theirs": (32, 32),
    }


def test_inventory_counts_a_partly_filled_page(tmp_path: Path) -> None:
    write(open_store(tmp_path), draft(1, 2, last_tokens=5))
    SessionFiles(tmp_path, KEY.model_digest).save(_session("short", draft(1, 2, last_tokens=5).tokens))
    assert inventory(tmp_path).sessions[0].disk_tokens == 37


def test_inventory_of_nothing_is_empty(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        found = inventory(folder)
        assert (found.keys, found.sessions, found.total_bytes, found.written_bytes) == ((), (), 0, 0)
        assert verify(folder, repair=True) == []
        assert clear(folder, model=None) == 0


def test_inventory_sees_what_a_process_has_in_use(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert inventory(tmp_path).keys[0].in_use
    write(store, draft(1))  # looking has not taken it away
    store.close()
    assert not inventory(tmp_path).keys[0].in_use


def _break_everything(folder: Path) -> None:
    first, _, third = _fill(folder)
    set_byte(third.path, 30)
    first.path.with_name("empty.run").write_bytes(b"")
    first.path.with_name("folder.run").mkdir()
    first.path.with_name("link.run").symlink_to(first.path)
    first.path.with_name("nowhere.run").symlink_to("nowhere")
    first.path.with_name("key.json").write_bytes(b"{")
    first.path.with_name("counters.json").write_bytes(b'{"lookups": -5, "missed_tokens": 4}')
    (folder / "writes.json").write_bytes(b"\xff")
    (folder / "pages" / "notes.txt").write_bytes(b"mine")
    (folder / "pages" / "not a key").mkdir()
    (folder / "sessions" / "stray.json").write_bytes(b"")
    broken = folder / "sessions" / KEY.model_digest[:32] / "broken.json"
    broken.write_bytes(b"{")


def test_inventory_and_verify_of_a_damaged_folder_never_raise(tmp_path: Path) -> None:
    _break_everything(tmp_path)
    found = inventory(tmp_path)
    (tiny,) = (key for key in found.keys if key.key is None)
    assert (tiny.model, tiny.numbers, tiny.num_runs, tiny.counters) == ("tiny-1b", "unknown", 2, Counters())
    assert found.num_problems == 5
    damages = verify(tmp_path, repair=False)
    assert {each.path.name for each in damages} >= {"empty.run", "folder.run", "link.run", "nowhere.run", "broken.json"}
    assert len(damages) == 6
    assert verify(tmp_path, repair=False) == damages  # nothing was touched
    assert verify(tmp_path, repair=True) == damages
    assert verify(tmp_path, repair=True) == []
    assert (tmp_path / "pages" / "notes.txt").read_bytes() == b"mine"
    store = open_store(tmp_path)
    assert [read_all(store, run) for run in store.scan()] == [
        pages_of(draft(1, 3)),
        pages_of(draft(2, 2, last_tokens=5)),
    ]
    assert store.problems == []


def test_verify_of_sound_pages_reads_all_and_reports_its_progress(tmp_path: Path) -> None:
    _fill(tmp_path)
    steps: list[tuple[int, int]] = []
    assert verify(tmp_path, repair=True, on_progress=lambda done, total: steps.append((done, total))) == []
    total = sum(path.stat().st_size for path in tmp_path.rglob("*.run"))
    assert steps[-1] == (total, total)
    assert steps == sorted(steps)


@pytest.mark.parametrize("page", [0, 1, 2])
def test_repair_keeps_the_pages_before_a_damaged_one(tmp_path: Path, page: int) -> None:
    first, second, _ = _fill(tmp_path)
    set_byte(first.path, (1 + page) * STRIDE + 200)
    damages = verify(tmp_path, repair=False)
    assert damages == [
        Damage(first.path, page, "its bytes are not those that were written"),
        Damage(second.path, None, "pages before it are damaged or gone"),
    ]
    assert verify(tmp_path, repair=True) == damages
    assert verify(tmp_path, repair=False) == []
    assert first.path.exists() == (page > 0)
    assert not second.path.exists()
    store = open_store(tmp_path)
    found = {run.facts["turn"]: read_all(store, run) for run in store.scan()}
    assert found.pop(1, []) == pages_of(draft(1, 3))[:page]
    assert found == {3: pages_of(draft(3, 1, page_format=2))}
    assert {run.facts["turn"]: run.time_s for run in open_store(tmp_path).scan()}.get(1, NOW - 50) == NOW - 50


def test_repair_removes_what_killed_writers_left(tmp_path: Path) -> None:
    first, _, _ = _fill(tmp_path)
    partial = first.path.with_name("1-2-3.run.partial")
    partial.write_bytes(b"half")
    assert verify(tmp_path, repair=False) == []
    assert partial.exists()
    assert verify(tmp_path, repair=True) == []
    assert not partial.exists()


def test_clear_removes_everything_but_the_bytes_written_today(tmp_path: Path) -> None:
    _break_everything(tmp_path)
    (tmp_path / "writes.json").write_text(json.dumps({"day": day_of(NOW), "bytes": 7}))
    before = disk_bytes(tmp_path)
    freed = clear(tmp_path, model=None)
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["lock", "lock", "notes.txt", "stray.json", "writes.json"]
    assert freed > 0
    assert disk_bytes(tmp_path) <= before - freed + STRIDE
    assert inventory(tmp_path).written_bytes == 7
    assert open_store(tmp_path).written_today_bytes == 7


@pytest.mark.parametrize(
    ("model", "left"), [("tiny", "Other 2B (chat)"), ("Other 2B", KEY.model), ("OTHER-2b-Chat", KEY.model)]
)
def test_clear_of_a_model_leaves_the_others(tmp_path: Path, model: str, left: str) -> None:
    _fill(tmp_path)
    freed = clear(tmp_path, model=model)
    found = inventory(tmp_path)
    assert freed > 0
    assert [key.model for key in found.keys] == [left]
    assert {each.record.model_digest for each in found.sessions} == {found.keys[0].key and found.keys[0].key.model_digest}
    assert clear(tmp_path, model="no such model") == 0


def test_clear_can_leave_the_sessions(tmp_path: Path) -> None:
    _fill(tmp_path)
    assert clear(tmp_path, model=None, with_sessions=False) > 0
    found = inventory(tmp_path)
    assert found.keys == ()
    assert sorted((each.record.name, each.disk_tokens) for each in found.sessions) == [
        ("long", 0),
        ("theirs", 0),
        ("unknown", 0),
    ]


def test_clear_under_a_running_store_is_only_a_recompute(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    run, unread = write(store, draft(1)), write(store, draft(2))
    assert read_all(store, run) == pages_of(draft(1))
    clear(tmp_path, model=None)
    assert read_all(store, run) == pages_of(draft(1))  # it is open
    assert read_all(store, unread) == ["gone", "gone"]
    assert store.scan() == []
    again = write(store, draft(3))
    assert read_all(store, again) == pages_of(draft(3))
    assert store.used_bytes == disk_bytes(tmp_path)
    assert inventory(tmp_path).keys[0].model == KEY.model


# counters


def test_counters_add_up_over_processes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    mine = Counters(lookups=2, prompt_tokens=100, saved_s=0.5)
    mine.miss("first_seen", 7)
    assert merge_counters(journal_of(store), mine)
    other = Counters(lookups=1, read_bytes=4096)
    other.miss("first_seen", 3)
    other.miss("damaged", 1)
    assert merge_counters(journal_of(store), other)
    expected = Counters(lookups=3, prompt_tokens=100, read_bytes=4096, saved_s=0.5)
    expected.missed_tokens = {"first_seen": 10, "damaged": 1}
    assert read_counters(journal_of(store)) == inventory(tmp_path).keys[0].counters == expected


def test_counters_of_processes_that_end_at_once_are_all_kept(tmp_path: Path) -> None:
    journal = journal_of(open_store(tmp_path))
    threads = [threading.Thread(target=merge_counters, args=(journal, Counters(lookups=1))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_counters(journal).lookups == 12


def test_counters_of_earlier_versions_are_added_to_the_same_reasons(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (store.key_folder / "counters.json").write_bytes(b'{"missed_tokens": {"first seen": 5, "first_seen": 2, "damaged": 1}}')
    assert read_counters(journal_of(store)).missed_tokens == {"first_seen": 7, "damaged": 1}


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"lookups": "x", "saved_s": -1, "missed_tokens": {"a": "b"}}', b'{"lookups": true}'],
)
def test_broken_counters_start_anew(tmp_path: Path, content: bytes) -> None:
    store = open_store(tmp_path)
    (store.key_folder / "counters.json").write_bytes(content)
    assert read_counters(journal_of(store)) == Counters()
    assert merge_counters(journal_of(store), Counters(lookups=4))
    assert read_counters(journal_of(store)).lookups == 4


def test_counters_that_cannot_be_written_are_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (store.key_folder / "counters.json").mkdir()
    assert not merge_counters(journal_of(store), Counters(lookups=4))
