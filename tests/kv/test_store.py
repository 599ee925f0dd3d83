"""The disk tier: what is written is found again, by the same process, the next one, and others beside it."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.kv import folder as files
from headrace.kv.readers import OPEN_FILES_MAX
from headrace.kv.runs import chains, encode_header, parse_header
from headrace.kv.store import CHAIN_BYTES, DiskStore, PageShape, Place, Run, StoreKey, chain
from headrace.model.step import PAGE_TOKENS
from tiny.runs import KEY, NOW, SHAPE, STRIDE, disk_bytes, draft, open_store, pages_of, read, read_all, set_byte, write

OTHER_KEY = StoreKey("Other 2B", "cd" * 32, "kernels 1a2b width 64")
NEWER_KEY = StoreKey("Tiny 1B", "ab" * 32, "kernels 3c4d width 64")


def _only(found: list[Run]) -> Run:
    assert len(found) == 1
    return found[0]


# what is written is found again


def test_chain_names_tokens_and_all_before() -> None:
    assert len(chain(b"", [1, 2])) == CHAIN_BYTES
    assert chain(b"", [1, 2]) == chain(b"", (1, 2))
    assert len({chain(b"", [1, 2]), chain(b"", [2, 1]), chain(b"", [1]), chain(chain(b"", [1]), [2])}) == 4
    tokens = list(range(PAGE_TOKENS + 5))
    first = chain(b"", tokens[:PAGE_TOKENS])
    assert chains(b"", tokens) == [first, chain(first, tokens[PAGE_TOKENS:])]


@pytest.mark.parametrize("page_format", [0, 1, 2])
def test_run_round_trip_in_the_same_process_and_after_a_restart(tmp_path: Path, page_format: int) -> None:
    new = draft(1, 3, page_format=page_format, last_tokens=7)
    with_store = open_store(tmp_path)
    run = write(with_store, new)
    assert read_all(with_store, run) == pages_of(new)
    assert with_store.scan() == []  # its own are known
    with_store.close()

    store = open_store(tmp_path)
    found = _only(store.scan())
    assert store.scan() == []
    for field in ("parent", "start_page", "tokens", "page_format", "facts", "time_s"):
        assert getattr(found, field) == getattr(new, field), field
    assert (found.num_pages, found.num_tokens) == (3, 2 * PAGE_TOKENS + 7)
    assert found.num_bytes == run.num_bytes == found.path.stat().st_size
    assert found.chains() == chains(b"", new.tokens)
    assert read_all(store, found) == pages_of(new)
    assert store.problems == []


def test_layers_are_read_one_by_one(tmp_path: Path) -> None:
    store, new = open_store(tmp_path), draft(1, 2)
    run = write(store, new)
    target = np.zeros(128, np.uint8)
    store.prefetch_layer([Place(run.id, 0), Place(run.id, 1), Place(run.id + 1, 0)], 2)
    for index in range(2):
        for layer in range(3):
            assert store.read_layer(Place(run.id, index), layer, target) is None
            assert target.tobytes() == pages_of(new)[index][layer * 128 : (layer + 1) * 128]
    assert store.read_bytes == 6 * 128


def test_many_pages_are_read_at_once(tmp_path: Path) -> None:
    store, new = open_store(tmp_path), draft(1, 4)
    run = write(store, new)
    set_byte(run.path, run.payload_offset + STRIDE)
    targets = list(np.zeros((5, 384), np.uint8))
    places = [Place(run.id, index) for index in (0, 1, 2, 3, 4)]
    assert store.read_many(places, targets) == [None, "damaged", None, None, "gone"]
    assert [targets[index].tobytes() for index in (0, 2, 3)] == [pages_of(new)[index] for index in (0, 2, 3)]


def test_header_says_what_the_format_says(tmp_path: Path) -> None:
    new = draft(1, 2)
    data = encode_header(KEY.digest, SHAPE, new)
    assert data[:8] == b"HEADRUN\x01"
    assert len(data) % 4096 == 0
    header = parse_header(data)
    assert (header.key, header.num_layers, header.layer_bytes, header.stride) == (KEY.digest, 3, 128, 4096)
    assert header.payload_offset == len(data)
    run = write(open_store(tmp_path), new)
    content = run.path.read_bytes()
    assert content[: len(data)] == data
    assert content[len(data) : len(data) + 384] == pages_of(new)[0]
    assert content[len(data) + 384 : len(data) + 4096] == bytes(4096 - 384)
    assert len(content) == len(data) + 2 * 4096


def test_parents_come_before_children_and_orphans_do_not(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = write(store, draft(1, 2))
    second = write(store, draft(2, 3, behind=first, time_s=NOW - 500))
    write(store, draft(3, 1, behind=second, time_s=NOW - 900))
    inner = write(store, draft(4, 1, parent=second.chain(0), start_page=3))
    write(store, draft(5, 1, parent=b"x" * 16, start_page=1))
    store.close()

    other = open_store(tmp_path)
    found = other.scan()
    assert [run.facts["turn"] for run in found] in ([1, 2, 4, 3], [1, 2, 3, 4])
    assert other.problems == [f"{_name_of(tmp_path, 5)}: the pages before it are gone"]
    assert inner.path.exists()


def _name_of(folder: Path, turn: int) -> str:
    for path in folder.rglob("*.run"):
        if parse_header(path.read_bytes()).facts["turn"] == turn:
            return path.name
    raise AssertionError(turn)


def test_orphans_are_removed_when_they_are_old(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = write(store, draft(1, 2, time_s=NOW - 100))
    child = write(store, draft(2, 1, behind=first, time_s=NOW - 100))
    grandchild = write(store, draft(3, 1, behind=child, time_s=NOW - 10))
    first.path.unlink()
    store.close()
    assert open_store(tmp_path).scan() == []
    assert not child.path.exists()
    assert grandchild.path.exists()  # too young: its parent may be on its way


def test_run_that_lost_its_end_is_parent_of_what_is_left(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = write(store, draft(1, 3))
    write(store, draft(2, 1, parent=first.chain(0), start_page=1))
    write(store, draft(3, 1, parent=first.chain(1), start_page=2))
    store.drop([Place(first.id, 1), Place(first.id, 2)])
    store.close()
    assert [run.facts["turn"] for run in open_store(tmp_path).scan()] == [1, 2]


# dropping and touching


def test_dropped_pages_free_their_bytes_at_once(tmp_path: Path) -> None:
    store, new = open_store(tmp_path), draft(1, 4, last_tokens=3)
    run = write(store, new)
    used = store.used_bytes
    store.drop([Place(run.id, 3), Place(run.id, 2)])
    assert store.used_bytes == used - 2 * STRIDE == disk_bytes(tmp_path)
    assert (run.num_pages, run.tokens, run.num_bytes) == (2, new.tokens[:64], run.path.stat().st_size)
    assert read(store, Place(run.id, 2)) == "gone"
    assert read_all(store, run) == pages_of(new)[:2]
    other = open_store(tmp_path)
    again = _only(other.scan())
    assert (again.num_pages, again.tokens, again.time_s) == (2, new.tokens[:64], NOW)
    store.drop([Place(run.id, 0), Place(run.id, 1)])
    assert not run.path.exists()
    assert store.used_bytes == disk_bytes(tmp_path)
    assert read(store, Place(run.id, 0)) == "gone"
    store.drop([Place(run.id, 0)])  # nothing is left to drop
    assert read(other, Place(again.id, 0)) == "gone"


def test_pages_from_the_middle_cannot_be_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    run = write(store, draft(1, 3))
    with pytest.raises(AssertionError, match="end"):
        store.drop([Place(run.id, 1)])
    assert read_all(store, run) == pages_of(draft(1, 3))


def test_drop_leaves_files_alone_that_are_not_its_own(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    gone, foreign = write(store, draft(1)), write(store, draft(2))
    gone.path.unlink()
    foreign.path.write_bytes(b"a letter" * 4000)
    store.drop([Place(gone.id, 0), Place(gone.id, 1)])
    store.drop([Place(foreign.id, 1)])
    store.drop([Place(foreign.id, 0)])
    assert foreign.path.read_bytes() == b"a letter" * 4000


def test_scan_finds_the_time_of_the_use(tmp_path: Path) -> None:
    run = write(open_store(tmp_path), draft(1))
    assert run.time_s == _only(open_store(tmp_path).scan()).time_s == draft(1).time_s


# several stores on one folder


def test_scan_finds_what_other_processes_added_since(tmp_path: Path) -> None:
    one, other = open_store(tmp_path), open_store(tmp_path)
    assert other.scan() == []
    first = write(one, draft(1))
    found = _only(other.scan())
    assert read_all(other, found) == pages_of(draft(1))
    child = write(other, draft(2, behind=found))
    assert [run.facts["turn"] for run in one.scan()] == [2]
    assert one.scan() == other.scan() == []
    one.drop([Place(first.id, 1)])
    assert read(other, Place(found.id, 1)) == "gone"
    assert read_all(other, child) == pages_of(draft(2))


def test_scan_lists_a_folder_again_only_if_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, clock=time.time)
    write(store, draft(1))
    os.utime(store.key_folder, (NOW, NOW))
    store.scan()

    def fail(*args: object) -> set[str]:
        raise AssertionError("listed again")

    monkeypatch.setattr(files, "list_names", fail)
    assert store.scan() == []
    os.utime(store.key_folder, (NOW + 1, NOW + 1))
    with pytest.raises(AssertionError, match="listed again"):
        store.scan()


def test_scan_lets_go_of_runs_that_others_removed(tmp_path: Path) -> None:
    one, other = open_store(tmp_path), open_store(tmp_path)
    first = write(one, draft(1))
    found = _only(other.scan())
    assert read_all(other, found) == pages_of(draft(1))
    one.drop([Place(first.id, 0), Place(first.id, 1)])
    write(one, draft(2, 1, parent=found.chain(1), start_page=2))
    assert other.scan() == []  # the child of a run that is gone is of no use
    assert read(other, Place(found.id, 0)) == "gone"
    assert other._readers.num_open == 0  # an open file would keep its room on the disk
    assert other.used_bytes == disk_bytes(tmp_path)


def test_scan_while_a_run_is_written_never_gives_it_twice(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    twice: list[Run] = []
    done = threading.Event()

    def scan() -> None:
        while not done.is_set():
            twice.extend(store.scan())

    scanner = threading.Thread(target=scan)
    scanner.start()
    for seed in range(60):
        write(store, draft(seed, 1))
    done.set()
    scanner.join()
    assert twice == store.scan() == []


def test_threads_read_while_pages_are_written_and_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    kept = [write(store, draft(seed)) for seed in range(OPEN_FILES_MAX + 20)]
    wrong: list[object] = []

    def reading(offset: int) -> None:
        for turn in range(400):
            run = kept[(turn * 7 + offset) % len(kept)]
            found = read(store, Place(run.id, turn % 2))
            if found != pages_of(draft(run.facts["turn"]))[turn % 2]:
                wrong.append(found)

    readers = [threading.Thread(target=reading, args=(offset,)) for offset in (0, 3)]
    for reader in readers:
        reader.start()
    for seed in range(1000, 1040):
        run = write(store, draft(seed))
        store.drop([Place(run.id, 0), Place(run.id, 1)])
    for reader in readers:
        reader.join()
    assert wrong == []
    assert store._readers.num_open <= OPEN_FILES_MAX


def _num_descriptors() -> int:
    """Files this process has open, where the system says so."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def test_open_files_are_bounded(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    new = [write(store, draft(seed, 1)) for seed in range(OPEN_FILES_MAX + 10)]
    before = _num_descriptors()
    for _ in range(2):
        for run in new:
            assert read_all(store, run) == pages_of(draft(run.facts["turn"], 1))
    assert store._readers.num_open == OPEN_FILES_MAX
    store.close()
    assert store._readers.num_open == 0
    assert _num_descriptors() <= before


# other keys


def test_keys_keep_pages_apart(tmp_path: Path) -> None:
    write(open_store(tmp_path), draft(1))
    assert open_store(tmp_path, NEWER_KEY).scan() == []
    assert open_store(tmp_path, OTHER_KEY).scan() == []
    renamed = dataclasses.replace(KEY, model="Another name for it")
    assert len(open_store(tmp_path, renamed).scan()) == 1
    assert len(list((tmp_path / "pages").iterdir())) == 3


def test_pages_of_another_shape_are_left_alone(tmp_path: Path) -> None:
    run = write(open_store(tmp_path), draft(1, 1, time_s=NOW - 10))
    for shape in (PageShape(2, (192, 64, 32)), PageShape(3, (64, 64, 32)), PageShape(3, ())):
        store = open_store(tmp_path, shape=shape)
        assert store.scan() == []
        assert store.problems == [f"{run.name}: pages of another shape"]
    assert run.path.exists()


def test_pages_kept_under_another_key_are_pointed_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    new = draft(1, 2, last_tokens=5)
    write(store, new)
    write(store, draft(2, 1, last_tokens=4))
    assert store.known_elsewhere(new.tokens) is None
    newer = open_store(tmp_path, NEWER_KEY)
    assert newer.known_elsewhere(new.tokens) == ("format", "of other numbers (kernels 1a2b instead of 3c4d)")
    assert newer.known_elsewhere((*new.tokens[:32], 7, 8)) is not None
    assert newer.known_elsewhere(new.tokens[:31]) is None
    assert newer.known_elsewhere(draft(2, 1, last_tokens=4).tokens) is not None
    assert newer.known_elsewhere(()) is None
    other = open_store(tmp_path, OTHER_KEY)
    assert other.known_elsewhere(new.tokens) == ("model", "of another model (Tiny 1B)")
    same_name = open_store(tmp_path, StoreKey("Tiny 1B", "ef" * 32, KEY.numbers))
    assert same_name.known_elsewhere(new.tokens) == (
        "model",
        "of another model (Tiny 1B, with content abababab instead of efefefef)",
    )
    longer = open_store(tmp_path, StoreKey("Tiny 1B", "ab" * 32, "kernels 1a2b"))
    assert longer.known_elsewhere(new.tokens) == ("format", "of other numbers (kernels 1a2b width 64 instead of kernels 1a2b)")
    (store.key_folder / "key.json").write_text("{")
    unknown = open_store(tmp_path, OTHER_KEY)
    assert unknown.known_elsewhere(new.tokens) == ("model", "of another model or version")


def test_scan_of_2000_runs_takes_less_than_a_glance(tmp_path: Path) -> None:
    shape = PageShape(30, (64, 64, 64))
    store = open_store(tmp_path, shape=shape)
    one = write(store, draft(0, 22, shape=shape))
    header = one.path.read_bytes()[: one.payload_offset + one.stride]
    for number in range(2000):
        (store.key_folder / f"{number}.run").write_bytes(header)
    store.close()
    times = []
    for _ in range(3):
        again = open_store(tmp_path, shape=shape)
        start = time.perf_counter()
        assert len(again.scan()) == 2001
        times.append(time.perf_counter() - start)
        again.close()
    assert min(times) < 0.5  # 0.06 s where this was written; the rest is for busy machines


def test_store_is_closed_for_good(tmp_path: Path) -> None:
    store: DiskStore = open_store(tmp_path)
    run = write(store, draft(1))
    assert read_all(store, run) == pages_of(draft(1))
    store.close()
    store.close()
    assert read(store, Place(run.id, 0)) == "gone"
