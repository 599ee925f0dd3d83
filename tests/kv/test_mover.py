"""The mover: what comes first, what can be taken back, what is waited for, and the rest between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.kv.budget import Refusal
from headrace.kv.mover import PAUSE_RATIO, READ_GROUP_PAGES, Bytes, Mover, WriteJob
from headrace.kv.runs import Place, RunDraft
from tiny.runs import draft

SIZE = 8
PATIENCE_S = 20.0


class FakeStore:
    """Notes what it is asked for, in turn; waits before each until it is let on. What reads is the number of the place."""

    num_layers = 4

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.lost: dict[int, str] = {}
        self.error: Exception | None = None
        self.now_s = 0.0
        self.takes_s = 0.0
        self._turns = threading.Semaphore(0)
        self._began = threading.Condition()

    def let_on(self, turns: int = 1) -> None:
        self._turns.release(turns)

    def wait_for(self, count: int) -> None:
        """Until so many calls have begun."""
        with self._began:
            assert self._began.wait_for(lambda: len(self.begun) >= count, PATIENCE_S), self.begun

    def clock(self) -> float:
        return self.now_s

    def _work(self, what: Any) -> None:
        with self._began:
            self.begun.append(what)
            self._began.notify_all()
        assert self._turns.acquire(timeout=PATIENCE_S)
        self.now_s += self.takes_s
        if self.error is not None:
            raise self.error

    def write(self, new: RunDraft) -> Refusal:
        self._work(("write", new.facts["turn"]))
        return Refusal("no room", "")

    def read_many(self, places: Sequence[Place], targets: Sequence[Bytes], layers: range | None = None) -> list[str | None]:
        numbers = [place.run for place in places]
        if numbers:
            self._work(("read", *numbers) if layers is None else ("layers", layers.start, layers.stop, *numbers))
        for number, target in zip(numbers, targets, strict=True):
            target[:] = number
        return [self.lost.get(number) for number in numbers]


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def mover(store: FakeStore) -> Iterator[Mover]:
    mover = Mover(store, store.clock, lambda: store.now_s / 8)  # type: ignore[arg-type]
    yield mover
    store.let_on(1000)
    mover.stop()


def _pages(*numbers: int) -> tuple[list[Place], list[Bytes]]:
    return [Place(number, 0) for number in numbers], list(np.zeros((len(numbers), SIZE), np.uint8))


def _write(mover: Mover, number: int) -> WriteJob:
    return mover.write(draft(number, 1), f"tag {number}")


def _in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


# order


def test_what_somebody_waits_for_comes_first_then_writes_then_reads_ahead(mover: Mover, store: FakeStore) -> None:
    _write(mover, 1)
    store.wait_for(1)  # the first is under way
    ahead = mover.read(*_pages(2), "ahead", urgent=False)
    _write(mover, 3)
    mover.call(lambda: store._work("call"), "called")
    _write(mover, 4)
    urgent = mover.read(*_pages(5))
    store.let_on(10)
    mover.flush()
    assert store.begun == [("write", 1), ("read", 5), ("write", 3), ("write", 4), "call", ("read", 2)]
    finished = mover.finished()
    assert [job.tag for job in finished] == ["tag 1", "tag 3", "tag 4", "called", "ahead"]
    assert ahead in finished
    assert urgent not in finished
    assert mover.finished() == []


def test_urgent_read_goes_between_the_groups_of_a_read_ahead(mover: Mover, store: FakeStore) -> None:
    mover.read(*_pages(*range(READ_GROUP_PAGES + 2)), urgent=False)
    store.wait_for(1)
    mover.read(*_pages(99))
    store.let_on(3)
    mover.flush()
    assert [len(asked) - 1 for asked in store.begun] == [READ_GROUP_PAGES, 1, 2]
    assert store.begun[1] == ("read", 99)


def test_pages_are_read_in_order_in_groups_and_each_outcome_told(mover: Mover, store: FakeStore) -> None:
    store.lost = {3: "gone", 9: "damaged"}
    places, targets = _pages(*range(1, READ_GROUP_PAGES + 4))
    store.let_on(2)
    job = mover.read(places, targets)
    mover.wait_read(job, len(places))
    assert job.done
    assert job.outcomes == {at: store.lost.get(at + 1) for at in range(len(places))}
    assert [int(target[0]) for target in targets] == [place.run for place in places]
    assert job.num_bytes == SIZE * len(places)
    numbers = [place.run for place in places]
    assert store.begun == [("read", *numbers[:READ_GROUP_PAGES]), ("read", *numbers[READ_GROUP_PAGES:])]


def test_job_of_no_pages_is_done(mover: Mover, store: FakeStore) -> None:
    job = mover.read([], [])
    assert job.done
    mover.wait_read(job, 0)
    part = mover.read(*_pages(1, 2, 3), end=0)
    assert part.done
    mover.flush()
    assert store.begun == []


def test_pages_behind_the_end_of_a_job_are_not_read(mover: Mover, store: FakeStore) -> None:
    store.let_on(1)
    job = mover.read(*_pages(1, 2, 3), end=2)
    mover.wait_read(job, 5)
    mover.flush()
    assert store.begun == [("read", 1, 2)]
    assert job.outcomes == {0: None, 1: None}


# taking back


def test_cut_takes_back_what_is_not_being_read_and_nothing_else(mover: Mover, store: FakeStore) -> None:
    count = 3 * READ_GROUP_PAGES
    job = mover.read(*_pages(*range(count)))
    store.wait_for(1)
    assert not mover.cut(job, count - READ_GROUP_PAGES + 1)
    assert job.end == count
    assert mover.cut(job, count - READ_GROUP_PAGES - 3)
    store.let_on(2)
    mover.flush()
    assert [len(asked) - 1 for asked in store.begun] == [READ_GROUP_PAGES, 3]
    assert job.done
    assert sorted(job.outcomes) == list(range(READ_GROUP_PAGES + 3))


def test_cut_of_all_that_is_left_ends_the_job(mover: Mover, store: FakeStore) -> None:
    count = READ_GROUP_PAGES + 2
    job = mover.read(*_pages(*range(count)), "ahead", urgent=False)
    store.wait_for(1)
    assert mover.cut(job, 2)
    store.let_on(1)
    mover.flush()
    assert len(store.begun) == 1
    assert [each.tag for each in mover.finished()] == ["ahead"]


def test_abandoned_job_writes_nothing_any_more(mover: Mover, store: FakeStore) -> None:
    places, targets = _pages(*range(1, 3 * READ_GROUP_PAGES))
    job = mover.read(places, targets)
    store.wait_for(1)
    waiter = _in_background(lambda: mover.abandon(job))
    waiter.join(0.05)
    assert waiter.is_alive()  # the first group is still being written to
    store.let_on(100)
    assert _ended(waiter)
    for target in targets:
        target[:] = 0
    mover.flush()
    assert not any(target.any() for target in targets)
    assert len(store.begun) == 1


# layer by layer


def test_layers_are_read_in_bands_of_all_pages(mover: Mover, store: FakeStore) -> None:
    store.let_on(2)
    job = mover.read_layers(*_pages(1, 2), 2)
    mover.wait_layer(job, 3)
    assert store.begun == [("layers", 0, 2, 1, 2), ("layers", 2, 4, 1, 2)]
    assert (job.done, job.failures, job.num_bytes) == (True, {}, 2 * SIZE)


def test_first_band_is_there_before_the_second_is_read(mover: Mover, store: FakeStore) -> None:
    store.let_on(1)
    job = mover.read_layers(*_pages(1, 2), 2)
    mover.wait_layer(job, 1)
    assert not job.has(2)
    assert [target.tolist() for target in job.targets] == [[1] * 4 + [0] * 4, [2] * 4 + [0] * 4]
    store.let_on(1)
    mover.wait_layer(job, 2)
    assert job.has(3)


def test_page_that_failed_is_left_out_of_later_bands(mover: Mover, store: FakeStore) -> None:
    store.lost = {1: "damaged"}
    store.let_on(2)
    job = mover.read_layers(*_pages(1, 2), 2)
    mover.wait_layer(job, 3)
    assert store.begun[1] == ("layers", 2, 4, 2)
    assert job.failures == {0: "damaged"}


def test_bands_that_will_never_be_read_have_failed(mover: Mover, store: FakeStore) -> None:
    job = mover.read_layers(*_pages(1, 2), 4)
    store.wait_for(1)
    store.let_on(1)
    mover.abandon(job)
    mover.wait_layer(job, 3)
    assert job.failures == {0: "gone", 1: "gone"}


# waiting


def test_write_is_waited_for_and_says_what_became_of_it(mover: Mover, store: FakeStore) -> None:
    store.takes_s = 2.0
    store.let_on(1)
    job = _write(mover, 1)
    mover.wait_write(job)
    assert isinstance(job.outcome, Refusal)
    assert job.work_s == 0.25
    assert mover.finished() == [job]
    assert mover.pending_writes == 0


def test_error_of_the_system_is_a_refusal(mover: Mover, store: FakeStore) -> None:
    store.error = OSError("the disk is on fire")
    store.let_on(1)
    job = _write(mover, 1)
    mover.wait_write(job)
    assert job.outcome == Refusal("unusable", "the disk is on fire")
    store.error = None
    store.let_on(1)
    again = _write(mover, 2)
    mover.wait_write(again)
    assert isinstance(again.outcome, Refusal)
    assert again.outcome.reason == "no room"


def test_flush_waits_for_everything(mover: Mover, store: FakeStore) -> None:
    _write(mover, 1)
    mover.read(*_pages(2), urgent=False)
    waiter = _in_background(mover.flush)
    store.wait_for(1)
    store.let_on(1)
    store.wait_for(2)
    waiter.join(0.05)
    assert waiter.is_alive()
    store.let_on(1)
    assert _ended(waiter)
    assert len(mover.finished()) == 2


def test_flush_of_nothing_needs_no_thread(mover: Mover) -> None:
    mover.flush()
    assert mover._thread is None


def test_stopped_mover_ends_what_is_running_and_drops_the_rest(mover: Mover, store: FakeStore) -> None:
    job, dropped = _write(mover, 1), _write(mover, 2)
    store.wait_for(1)
    stopper = _in_background(mover.stop)
    store.let_on(1)
    assert _ended(stopper)
    assert job.outcome is not None
    assert dropped.outcome is None
    assert store.begun == [("write", 1)]


# rests


class _Rests:
    """Seconds that a mover wants to rest, as they are asked for; it does not."""

    def __init__(self, mover: Mover, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: list[float] = []
        self.woken: list[bool] = []
        real = mover._changed.wait_for

        def wait_for(until: Callable[[], Any], timeout: float | None = None) -> Any:
            if timeout is None:
                return real(until)
            self.seconds.append(timeout)
            self.woken.append(bool(until()))
            return True

        monkeypatch.setattr(mover._changed, "wait_for", wait_for)


def test_mover_rests_in_proportion_to_what_it_did_unless_somebody_waits(
    mover: Mover, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = _Rests(mover, monkeypatch)
    store.takes_s = 3.0
    first = _write(mover, 1)
    store.wait_for(1)
    second = _write(mover, 2)
    store.let_on(1)
    store.wait_for(2)  # nobody waits: it would have rested
    assert rests.seconds == [3.0 * PAUSE_RATIO]
    assert rests.woken == [False]
    urgent = mover.read(*_pages(5))
    store.let_on(1)
    store.wait_for(3)
    assert rests.woken == [False, True]  # somebody waits for the read
    waiter = _in_background(mover.flush)
    while not mover._hurried:
        waiter.join(0.001)
    store.let_on(1)
    assert _ended(waiter)
    mover.stop()
    assert rests.woken == [False, True, True]
    assert first.outcome is not None
    assert second.outcome is not None
    assert urgent.done


def test_rest_ends_when_somebody_waits(mover: Mover, store: FakeStore) -> None:
    store.takes_s = 1e6  # a rest of weeks
    store.let_on(2)
    _write(mover, 1)
    store.wait_for(1)
    job = mover.read(*_pages(5))
    mover.wait_read(job, 0)
    assert job.outcomes == {0: None}


def test_error_that_nobody_foresaw_reaches_those_who_wait(store: FakeStore, mover: Mover) -> None:
    store.error = ValueError("not foreseen")
    job = mover.read([Place(1, 0)], [np.zeros(SIZE, np.uint8)])
    store.let_on(5)
    with pytest.raises(RuntimeError, match="has failed") as caught:
        mover.wait_read(job, 0)
    assert caught.value.__cause__ is store.error
    with pytest.raises(RuntimeError, match="has failed"):
        mover.flush()
