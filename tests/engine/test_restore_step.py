"""Steps that begin while their past is still being read: the bits of a computation in which everything is there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.engine.arrival import FEWEST_PAGES, NUM_BANDS, Arrival, should_arrive
from headrace.engine.batch import Slice
from headrace.engine.model import Model
from headrace.engine.recall import recall
from headrace.engine.streaming import PageLostError
from headrace.errors import NumericError
from headrace.kv.mover import LayersJob, Mover
from headrace.kv.pages import layer_bytes, page_bytes
from headrace.kv.prices import PriceBook
from headrace.kv.readers import Failure
from headrace.kv.runs import parse_header
from headrace.kv.store import DiskStore
from headrace.model.step import MAX_STEP_TOKENS, PAGE_TOKENS
from tiny.memory import FixedPrices, PagedRun, Reference, answer, run_files
from tiny.models import TinySpec
from tiny.runs import set_byte

if TYPE_CHECKING:
    from conftest import TinyModels

SPECS = {
    "llama": TinySpec(ends=False, context=1024, layers=4, seed=31),
    "gemma3": TinySpec("gemma3", ends=False, context=1024, layers=7, kv_heads=1, window=72, seed=32),
}
TOKENS = 600
POISON = 0xFF  # as float16: not a number
THREADS = (1, 2, 5)  # of 2 cores, more often than not

Open = Callable[..., Model]


@pytest.fixture
def name() -> str:
    """The model, unless a test is parametrised by it."""
    return "llama"


@pytest.fixture
def threads() -> int:
    """Those of the model that is started, unless a test is parametrised by them."""
    return 2


@pytest.fixture
def spec(name: str) -> TinySpec:
    return SPECS[name]


every_case = pytest.mark.parametrize(("name", "threads"), [(name, threads) for name in SPECS for threads in THREADS])


# the step itself


class Late:
    """Pages that are not there, but for the layers that have been waited for."""

    def __init__(self, run: Run, pages: list[int], fails_at: int | None = None) -> None:
        self.waited: list[int] = []
        self._run, self._pages, self._fails_at = run, pages, fails_at
        for page in pages:
            run.page(page)[:] = POISON

    def wait_for(self, layer: int) -> None:
        self.waited.append(layer)
        if layer == self._fails_at:
            raise PageLostError(self._pages[0], "torn")
        size = self._run.layer_bytes
        for page in self._pages:
            start = layer * size
            self._run.page(page)[start : start + size] = self._run.whole_page(page)[start : start + size]


class Run(PagedRun):
    """A sequence of random tokens, some of whose pages can be late."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, np.random.default_rng(5).integers(5, 9, TOKENS).tolist())

    def check(self, past: int, count: int, late: Late | None, outputs: int = 1) -> None:
        """A step has the bits of the computation from nothing, and afterwards all pages have, too."""
        part = Slice(self.ids[past : past + count], past, self.addresses, outputs, arriving=late)
        self.check_step(part, range((past + count) // PAGE_TOKENS))


@pytest.fixture
def run(tiny_models: TinyModels, spec: TinySpec, threads: int) -> Iterator[Run]:
    opened = Run(tiny_models.load(spec, threads=threads))
    yield opened
    opened.close()


@pytest.mark.parametrize(("past", "count"), [(512, 1), (512, 20), (520, 1), (300, MAX_STEP_TOKENS), (64, 33), (592, 8)])
@every_case
def test_every_attention_waits_for_its_layer(run: Run, past: int, count: int) -> None:
    whole = list(range(past // PAGE_TOKENS))
    for pages in (whole, whole[1::2], whole[-1:]):
        late = Late(run, pages)
        run.check(past, count, late, min(count, 3))
        assert late.waited == list(range(len(run.config.layers)))
    run.check(past, count, None)
    streamed = run.executor.last.streamed
    assert streamed is None


@pytest.mark.parametrize("count", [1, 40])
@every_case
def test_step_is_repeated_when_a_layer_failed(run: Run, count: int) -> None:
    for layer in range(len(run.config.layers)):
        with pytest.raises(PageLostError, match="page 2 cannot be read: torn"):
            run.check(512, count, Late(run, [2, 3, 15], fails_at=layer))
        run.check(512, count, Late(run, [2, 3, 15]))


@pytest.mark.parametrize("threads", [1])
def test_waiting_is_part_of_the_time_of_attention(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(run, [0, 1])
    wait = late.wait_for

    def slowly(layer: int) -> None:
        time.sleep(0.002)
        wait(layer)

    monkeypatch.setattr(late, "wait_for", slowly)
    run.check(512, 1, late)
    streamed = run.executor.last.streamed
    assert streamed is not None
    assert streamed.streamed_bytes == 0
    stamps = run.executor.last.stamps[0]
    assert 0.008 < streamed.waited_s <= (stamps[:-1].max() - stamps[-1]) / run.executor.team.ticks_per_us / 1e6


# restarts


class Restarts:
    """A model that is started again and again, with what it left on disk."""

    def __init__(self, opened: Open, reference: Reference, threads: int) -> None:
        self._opened, self._reference, self._threads = opened, reference, threads
        self._seed = 0

    def start(self, **options: object) -> Model:
        return self._opened(**{"threads": self._threads, "pages": 80, **options})

    def new_tokens(self, count: int) -> list[int]:
        """Tokens whose first was never asked before."""
        self._seed += 1
        return [10 + self._seed, *np.random.default_rng(self._seed).integers(5, 9, count - 1).tolist()]

    def keep(self, num_tokens: int) -> list[int]:
        """Tokens whose past is on disk: a prompt of so many, and an answer."""
        prompt = self.new_tokens(num_tokens)
        model = self.start()
        first = answer(model, self._reference, prompt, 2)
        model.close()
        return [*prompt, *first.token_ids[:1]]


@pytest.fixture
def restarts(opened: Open, reference: Reference, threads: int) -> Restarts:
    return Restarts(opened, reference, threads)


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[Arrival]:
    """All arrivals so far."""
    seen: list[Arrival] = []
    begin = Arrival.__init__

    def noted(self: Arrival, *arguments: object) -> None:
        seen.append(self)
        begin(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Arrival, "__init__", noted)
    return seen


@every_case
def test_restart_reads_the_past_while_it_computes(
    restarts: Restarts, reference: Reference, arrivals: list[Arrival], checked_memory: Callable[[Model], None]
) -> None:
    """New tokens up to several steps, the known past ending with a page or within one."""
    for known, count in ((511, 20), (300, 1), (511, 300), (600, 2)):
        past = restarts.keep(known)
        del arrivals[:]
        model = restarts.start()
        generation = answer(model, reference, [*past, *restarts.new_tokens(count)], 3)
        assert len(arrivals) == 1
        reuse = generation.result.reuse
        assert (reuse.disk_tokens, reuse.memory_tokens) == (known + 1, 0)
        assert generation.result.usage.cached_tokens == known + 1
        assert reuse.streamed_bytes == 0
        assert model.cache.counters.disk_tokens == known + 1
        # it is in memory now, all layers of it
        again = answer(model, reference, [*past, *restarts.new_tokens(2)], 3)
        assert again.result.reuse.disk_tokens == 0
        assert len(arrivals) == 1
        checked_memory(model)
        model.close()


@pytest.mark.parametrize("name", SPECS)
def test_any_damaged_layer_of_any_page_is_computed(
    restarts: Restarts, reference: Reference, folder: Path, arrivals: list[Arrival], checked_memory: Callable[[Model], None]
) -> None:
    past = restarts.keep(12 * PAGE_TOKENS - 1)
    model = restarts.start()
    layers, size = len(model.config.layers), layer_bytes(model.config)
    model.close()
    for number, (page, layer) in enumerate([(0, 0), (0, layers - 1), (5, 1), (11, layers // 2), (11, layers - 1)]):
        _damage(folder, page, layer * size)
        model = restarts.start()
        generation = answer(model, reference, [*past, *restarts.new_tokens(20)], 2)
        assert len(arrivals) == number + 1
        reuse = generation.result.reuse
        known = [(miss.reason, miss.at_token, miss.num_tokens) for miss in reuse.misses if miss.at_token < len(past)]
        assert known == [("damaged", page * PAGE_TOKENS, PAGE_TOKENS)]
        assert reuse.disk_tokens == 11 * PAGE_TOKENS == generation.result.usage.cached_tokens
        assert model.cache.counters.disk_tokens == 11 * PAGE_TOKENS
        assert reuse.disk_tokens + reuse.computed_tokens == len(past) + 20
        checked_memory(model)
        model.close()
    # the damage was repaired each time
    model = restarts.start()
    reuse = answer(model, reference, [*past, *restarts.new_tokens(20)], 2).result.reuse
    assert reuse.disk_tokens == 12 * PAGE_TOKENS


def _damage(folder: Path, page: int, offset: int) -> None:
    """Flips a bit of the first conversation's page."""
    for path in run_files(folder):
        header = parse_header(path.read_bytes())
        if header.start_page <= page < header.start_page + header.num_pages:
            set_byte(path, header.payload_offset + (page - header.start_page) * header.stride + offset)
            return
    raise AssertionError(page)


@pytest.mark.parametrize("name", SPECS)
def test_pages_that_are_gone_are_computed(
    restarts: Restarts, reference: Reference, folder: Path, arrivals: list[Arrival], checked_memory: Callable[[Model], None]
) -> None:
    past = restarts.keep(12 * PAGE_TOKENS - 1)
    model = restarts.start()
    path = run_files(folder)[0]
    header = parse_header(path.read_bytes())
    os.truncate(path, header.payload_offset + 4 * header.stride)
    generation = answer(model, reference, [*past, *restarts.new_tokens(20)], 2)
    assert len(arrivals) == 1
    reuse = generation.result.reuse
    assert {miss.reason for miss in reuse.misses} == {"gone", "first_seen"}
    # four pages of the prompt, and the last one, which was written with the answer
    assert reuse.disk_tokens == 5 * PAGE_TOKENS
    checked_memory(model)


def test_first_layers_are_computed_with_before_the_last_are_read(
    restarts: Restarts, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = restarts.keep(511)
    model = restarts.start()
    team, computed, bands = model._executor.team, threading.Event(), list[range]()
    run, read_many = team.run, DiskStore.read_many
    pieces = 0

    def counted(program: object) -> None:
        nonlocal pieces
        pieces += 1
        run(program)  # type: ignore[arg-type]
        if pieces == 2:  # up to the attention of layer 0, and that of layer 0
            computed.set()

    def read(self: DiskStore, places: object, targets: object, layers: range | None = None) -> list[Failure | None]:
        if layers is not None:
            bands.append(layers)
            if len(bands) == NUM_BANDS:
                assert computed.wait(20)
        return read_many(self, places, targets, layers)  # type: ignore[arg-type]

    monkeypatch.setattr(team, "run", counted)
    monkeypatch.setattr(DiskStore, "read_many", read)
    answer(model, reference, [*past, 5, 6, 7], 1)
    assert computed.is_set()
    assert [layer for band in bands for layer in band] == list(range(4))


def test_prices_learn_from_reading_and_not_from_waiting(
    restarts: Restarts, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = restarts.keep(511)
    learnt: list[tuple[str, int]] = []
    monkeypatch.setattr(FixedPrices, "computed", lambda _, count, *__: learnt.append(("computed", count)))
    monkeypatch.setattr(FixedPrices, "read", lambda _, num_bytes, __: learnt.append(("read", num_bytes)))
    model = restarts.start()
    generation = answer(model, reference, [*past, *restarts.new_tokens(20)], 1)
    size = page_bytes(model.config)
    assert learnt == [("read", 16 * size)]
    assert model.cache.counters.read_bytes == 16 * size
    assert 0 < generation.result.reuse.load_s < generation.result.timings.prefill_s


def test_slow_disk_is_not_waited_for(restarts: Restarts, reference: Reference, arrivals: list[Arrival]) -> None:
    past = restarts.keep(511)
    model = restarts.start(prices=FixedPrices(token_s=1e-6, byte_s=1e-3))
    answer(model, reference, [*past, 5, 6, 7], 1)
    assert arrivals == []


# ends before its time


def _arriving(model: Model, past: list[int]) -> tuple[object, Arrival]:
    """A sequence whose past is being read."""
    sequence = model._sequence(None)
    recall(sequence, past, 1, time.perf_counter)
    assert sequence.arrival is not None
    return sequence, sequence.arrival


def test_sequence_is_closed_when_nothing_is_written_any_more(
    restarts: Restarts, reference: Reference, monkeypatch: pytest.MonkeyPatch, checked_memory: Callable[[Model], None]
) -> None:
    past = restarts.keep(511)
    model = restarts.start()
    begun, ended = threading.Event(), list[range | None]()
    read_many = DiskStore.read_many

    def slowly(self: DiskStore, places: object, targets: object, layers: range | None = None) -> list[Failure | None]:
        begun.set()
        time.sleep(0.02)
        found = read_many(self, places, targets, layers)  # type: ignore[arg-type]
        ended.append(layers)
        return found

    monkeypatch.setattr(DiskStore, "read_many", slowly)
    sequence, _ = _arriving(model, past)
    assert begun.wait(20)
    sequence.close()  # type: ignore[attr-defined]
    assert len(ended) == 1  # what had begun, and no more
    model.cache.flush()
    assert len(ended) == 1
    checked_memory(model)
    assert answer(model, reference, [*past, 5], 2).result.reuse.disk_tokens == 512


def test_what_needs_the_pages_waits_for_them(
    restarts: Restarts, reference: Reference, checked_memory: Callable[[Model], None]
) -> None:
    past = restarts.keep(511)
    for use in (
        lambda sequence: sequence.truncate(300),
        lambda sequence: sequence.commit(0),
        lambda sequence: sequence.run_ahead(5, 2),
    ):
        model = restarts.start()
        sequence, _ = _arriving(model, past)
        use(sequence)
        assert sequence.arrival is None  # type: ignore[attr-defined]
        sequence.close()  # type: ignore[attr-defined]
        checked_memory(model)
        assert answer(model, reference, [*past, 5], 2).result.reuse.memory_tokens >= 300
        model.close()


def test_error_in_the_step_leaves_memory_in_order(
    restarts: Restarts, reference: Reference, monkeypatch: pytest.MonkeyPatch, checked_memory: Callable[[Model], None]
) -> None:
    past = restarts.keep(511)
    for error in (NumericError, KeyboardInterrupt):
        model = restarts.start()
        with monkeypatch.context() as patched:
            patched.setattr(model._executor.streaming, "_run_arriving", _raise(error))
            with pytest.raises(error):
                model.generate_ids([*past, 5], max_tokens=2).text()
        checked_memory(model)
        reuse = answer(model, reference, [*past, 5], 2).result.reuse
        assert reuse.memory_tokens + reuse.disk_tokens == 512
        model.close()


def _raise(error: type[BaseException]) -> Callable[..., None]:
    def raising(*_: object) -> None:
        raise error("stop")

    return raising


def test_mover_that_stops_lets_nobody_wait() -> None:
    class Store:
        num_layers = 6

        def read_many(self, places: list[int], targets: object, layers: range) -> list[Failure | None]:
            mover._stopped = layers.start > 0  # while the second band is read
            return [None] * len(places)

    mover = Mover(Store(), time.perf_counter)  # type: ignore[arg-type]
    job: LayersJob = mover.read_layers([1, 2], [np.zeros(60, np.uint8)] * 2, 3)  # type: ignore[list-item]
    assert job.bands == [range(2), range(2, 4), range(4, 6)]
    mover.wait_layer(job, 1)
    assert job.failures == {}
    mover.wait_layer(job, 5)
    assert job.failures == {0: "gone", 1: "gone"}
    mover.abandon(job)
    mover.stop()
    assert (job.num_read, job.num_bytes) == (2, 80)


# where it is quicker


def test_arrival_is_for_quick_disks_and_many_pages() -> None:
    page, numbers = 10**6, list(range(100))
    # a page: 3.2 ms to compute, 0.1 ms to read; a step of 20 tokens: 2 ms
    quick = FixedPrices(token_s=1e-4, position_s=0, byte_s=1e-10)
    assert should_arrive(quick, numbers, page, 20, 3200)
    assert not should_arrive(quick, numbers[: FEWEST_PAGES - 1], page, 20, 3200)
    assert should_arrive(quick, numbers[:FEWEST_PAGES], page, 20, 3200)
    # 10 ms to read a page: 75 pages are computed while 24 are read, which saves more than the step takes
    assert not should_arrive(FixedPrices(1e-4, 0, 1e-8), numbers, page, 20, 3200)
    # 1 ms to read a page: 23 pages are computed meanwhile; two thirds of a step of 20 tokens are less than 23 ms
    slower = FixedPrices(1e-4, 0, 1e-9)
    assert not should_arrive(slower, numbers, page, 20, 3200)
    assert not should_arrive(slower, numbers, page, 240, 3200)
    assert should_arrive(FixedPrices(1e-4, 0, 5e-10), numbers, page, 240, 3200)
    # computing without end: nothing else is worth it
    assert should_arrive(FixedPrices(1.0, 0, 1e-8), numbers, page, 1, 3200)


def test_arrival_is_tried_before_anything_was_measured() -> None:
    assert should_arrive(PriceBook(), list(range(FEWEST_PAGES)), 10**6, 20, 320)
