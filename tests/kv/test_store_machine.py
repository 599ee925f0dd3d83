"""Two stores on one folder that is written to, damaged and left by crashes in any order, against a model of it."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.kv import folder as files
from headrace.kv.store import DiskStore, Place, Refusal, Run, RunDraft
from tiny.runs import (
    NOW,
    STRIDE,
    disk_bytes,
    draft,
    open_store,
    pages_of,
    read,
    set_byte,
)


@dataclass
class OnDisk:
    """What the machine knows of a run file."""

    draft: RunDraft
    path: Path
    chains: list[bytes]
    num_pages: int
    damaged: set[int] = field(default_factory=set)
    unreadable: bool = False
    time_s: float = NOW


class StoreMachine(RuleBasedStateMachine):
    """Two stores on one folder against what was written, dropped and damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.now = NOW
        self.limit_bytes = 26 * STRIDE + files.SMALL_FILES_BYTES
        self.files: dict[str, OnDisk] = {}
        self.stores: list[DiskStore] = []
        self.runs: list[dict[str, Run]] = [{}, {}]  # known to each store, by file name
        self.next_seed = 1

    @initialize()
    def open(self) -> None:
        self.stores = [self._open(), self._open()]

    def _open(self) -> DiskStore:
        return open_store(self.folder, limit_bytes=self.limit_bytes, clock=lambda: self.now)

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.folder)

    @rule(who=st.integers(0, 1), num_pages=st.integers(1, 4), last=st.sampled_from([5, 32]), data=st.data())
    def write(self, who: int, num_pages: int, last: int, data: st.DataObject) -> None:
        behind = data.draw(st.sampled_from([None, *(run for run in self.runs[who].values() if run.num_pages)]))
        if behind is not None and behind.num_tokens % 32:
            behind = None
        new = draft(self.next_seed, num_pages, behind=behind, last_tokens=last, time_s=self.now)
        before = disk_bytes(self.folder) + (0 if list(self.folder.rglob("key.json")) else STRIDE)
        before -= STRIDE * len(list(self.folder.rglob("*.partial")))  # these go first
        run = self.stores[who].write(new)
        fits = before + (1 + num_pages) * STRIDE + files.SMALL_FILES_BYTES + self.limit_bytes // 64 <= self.limit_bytes
        assert isinstance(run, Run) == fits
        if isinstance(run, Refusal):
            assert run.reason == "no room"
            return
        self.next_seed += 1
        self.files[run.path.name] = OnDisk(new, run.path, run.chains(), num_pages, time_s=self.now)
        self.runs[who][run.path.name] = run

    @precondition(lambda self: any(self.runs))
    @rule(data=st.data(), count=st.integers(1, 4))
    def drop(self, data: st.DataObject, count: int) -> None:
        who, name = data.draw(st.sampled_from([(who, name) for who in (0, 1) for name in self.runs[who]]))
        run, file = self.runs[who][name], self.files.get(name)
        start = max(0, run.num_pages - count)
        self.stores[who].drop([Place(run.id, index) for index in range(start, run.num_pages)])
        assert run.num_pages == start
        if not start:
            del self.runs[who][name]
        if file is not None:
            file.num_pages = min(file.num_pages, start)
            assert file.unreadable or file.path.exists() == bool(file.num_pages)
            if not file.path.exists():
                del self.files[name]

    @precondition(lambda self: any(self.runs))
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        who, name = data.draw(st.sampled_from([(who, name) for who in (0, 1) for name in self.runs[who]]))
        run, file = self.runs[who][name], self.files.get(name)
        for index in range(run.num_pages):
            page = read(self.stores[who], Place(run.id, index))
            if file is None or file.unreadable:  # an open file may still be read
                assert page in ("gone", "damaged") or file is None or page == pages_of(file.draft)[index]
            elif index >= file.num_pages:
                assert page == "gone"
            else:
                assert page == ("damaged" if index in file.damaged else pages_of(file.draft)[index])

    @rule(who=st.integers(0, 1))
    def scan(self, who: int) -> None:
        found = self.stores[who].scan()
        self.runs[who] = {name: run for name, run in self.runs[who].items() if name in self.files}  # others are forgotten
        known = set(self.runs[who])
        expected = self._reachable(who)
        assert {run.path.name for run in found} == expected - known
        chains = {chain for name in known for chain in self.runs[who][name].chains()}
        for run in found:
            assert run.start_page == 0 or run.parent in chains
            chains |= set(run.chains())
            file = self.files[run.path.name]
            assert run.num_pages == file.num_pages
            assert run.tokens == file.draft.tokens[: 32 * run.num_pages]
            self.runs[who][run.path.name] = run
        for name, file in list(self.files.items()):  # orphans and damaged files that are old are removed
            if name not in expected | known and not file.path.exists():
                assert self.now - file.time_s > 60
                del self.files[name]

    def _reachable(self, who: int) -> set[str]:
        """Files with a whole header whose beginning is there, or known to the store that asks."""
        chains = {chain for run in self.runs[who].values() for chain in run.chains()}
        reachable = set()
        for name, file in sorted(self.files.items(), key=lambda item: item[1].draft.start_page):
            if not file.unreadable and (file.draft.start_page == 0 or file.draft.parent in chains):
                reachable.add(name)
                chains |= set(file.chains[: file.num_pages])
        return reachable

    @rule(who=st.integers(0, 1))
    def restart(self, who: int) -> None:
        self.stores[who].close()
        self.stores[who] = self._open()
        self.runs[who] = {}
        self.scan(who)

    @rule(seconds=st.sampled_from([1.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def damage_page(self, data: st.DataObject) -> None:
        file = self.files[data.draw(st.sampled_from(sorted(self.files)))]
        index = data.draw(st.integers(0, max(0, file.num_pages - 1)))
        if not file.unreadable and index not in file.damaged:
            set_byte(file.path, STRIDE * (1 + index) + data.draw(st.integers(0, 383)))
            file.damaged.add(index)

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def damage_header(self, data: st.DataObject) -> None:
        file = self.files[data.draw(st.sampled_from(sorted(self.files)))]
        if not file.unreadable:
            set_byte(file.path, data.draw(st.integers(0, 200)))
            file.unreadable = True

    @precondition(lambda self: self.files)
    @rule(data=st.data())
    def remove_file(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.files)))
        self.files.pop(name).path.unlink()

    @rule()
    def crash_while_writing(self) -> None:
        """What a killed process leaves."""
        if disk_bytes(self.folder) + STRIDE <= self.limit_bytes:
            (self.folder / "pages" / self.stores[0].key_folder.name / "dead.run.partial").write_bytes(bytes(10))

    @invariant()
    def bound_holds(self) -> None:
        assert disk_bytes(self.folder) <= self.limit_bytes


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
