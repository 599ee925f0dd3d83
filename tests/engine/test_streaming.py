"""Steps with cold pages: the bits of a computation in which everything is in memory, whatever was cold and got lost."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.accounts import ticks_between
from headrace.engine.batch import ColdPages, Slice
from headrace.engine.model import Model
from headrace.engine.streaming import PageLostError, _Layout
from headrace.kernels.page_formats import FORMAT_BITS
from headrace.kernels.runtime import Memory, Program
from headrace.kv.pages import layer_bytes, pages_for
from headrace.model.graph import choosing_graph
from headrace.model.step import MAX_STEP_TOKENS, PAGE_TOKENS
from tiny.memory import PagedRun
from tiny.models import TinySpec

if TYPE_CHECKING:
    from conftest import TinyModels

# more than two segments of 256 tokens, windows that end within a page, layers read alone, by twos and by threes
SPECS = {
    "llama": TinySpec(format="Q8_0", seed=11, layers=3, context=640),
    "one head": TinySpec(format="Q4_1", seed=12, layers=9, heads=5, kv_heads=1, head_width=64, context=640),
    "gemma3": TinySpec("gemma3", format="Q8_0", seed=13, layers=7, window=72, context=640),
}
TOKENS = 600
POISON = 0xFF  # as float16: not a number


class Copies:
    """A source that keeps its own copies of pages, by their place in the sequence."""

    def __init__(self, run: Run, indices: Sequence[int]) -> None:
        self.expected: list[tuple[int, int]] = []
        self.asked: list[tuple[int, int]] = []
        self.lost: Callable[[int, int], str | None] = _nothing_lost
        self._size = run.layer_bytes
        self._pages = [run.page(index).copy() for index in indices]

    def expect_layer(self, layer: int, first: int) -> None:
        self.expected.append((layer, first))

    def read_layer(self, layer: int, number: int, target: np.ndarray) -> str | None:
        self.asked.append((layer, number))
        target[:] = self._pages[number][layer * self._size : (layer + 1) * self._size]
        return self.lost(layer, number)


def _nothing_lost(layer: int, number: int) -> None:
    pass


NO_SOURCE = object.__new__(Copies)


class Run(PagedRun):
    """A sequence of random tokens, some of whose pages can be taken away."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, np.random.default_rng(0).integers(0, model.vocab_size, TOKENS).tolist())

    def make_cold(self, indices: Sequence[int]) -> ColdPages:
        """Takes pages away: what is in memory of them is not a number any more."""
        source = Copies(self, indices)
        for index in indices:
            self.page(index)[:] = POISON
            self.addresses[index] = 0
        self.addresses = self.addresses.copy()
        return ColdPages(np.array(indices, np.int64), source)

    def restore(self) -> None:
        """All pages are in memory again."""
        self.memory.bytes[:] = self.whole
        self.addresses = self.page_addresses()

    def forget(self, past_tokens: int) -> None:
        """Pages behind the past are as if they had never been computed."""
        for index in range(pages_for(past_tokens), pages_for(TOKENS)):
            self.page(index)[:] = 0

    def _slice(self, past: int, count: int, cold: ColdPages | None, outputs: int = 1) -> Slice:
        return Slice(self.ids[past : past + count], past, self.addresses, outputs, cold)

    def step(self, past: int, count: int, cold: ColdPages) -> None:
        self.executor.run([self._slice(past, count, cold)])

    def check(self, past: int, count: int, cold: ColdPages | None, outputs: int = 1) -> None:
        """A step has the bits of the computation without cold pages, in its logits and in the pages that it writes."""
        # all slots of pages that are full now; later ones were written by a longer computation
        full = range(past // PAGE_TOKENS, (past + count) // PAGE_TOKENS)
        self.check_step(self._slice(past, count, cold, outputs), full)


@pytest.fixture
def open_run(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Callable[[str, int], Run]:
    def opened(name: str, threads: int) -> Run:
        run = Run(tiny_models.load(SPECS[name], threads=threads))
        request.addfinalizer(run.close)
        return run

    return opened


@pytest.fixture(params=[(name, threads) for name in SPECS for threads in (1, 2)], ids=lambda case: f"{case[0]}-{case[1]}")
def run(request: pytest.FixtureRequest, open_run: Callable[[str, int], Run]) -> Run:
    return open_run(*request.param)


@pytest.fixture
def llama(open_run: Callable[[str, int], Run]) -> Run:
    return open_run("llama", 2)


def _whole_pages(past: int) -> range:
    return range(past // PAGE_TOKENS)


@st.composite
def _steps(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    """Past, new tokens, outputs, cold pages."""
    past = draw(st.integers(PAGE_TOKENS, TOKENS - 1))
    count = draw(st.one_of(st.just(1), st.integers(1, min(MAX_STEP_TOKENS, TOKENS - past))))
    cold = draw(st.sets(st.sampled_from(_whole_pages(past)), min_size=1))
    return past, count, draw(st.integers(1, min(count, 5))), sorted(cold)


def test_any_cold_pages_give_the_same_bits(run: Run) -> None:
    @settings(max_examples=40, deadline=None)
    @given(_steps())
    def check(step: tuple[int, int, int, list[int]]) -> None:
        past, count, outputs, indices = step
        run.restore()
        run.forget(past)
        run.check(past, count, run.make_cold(indices), outputs)

    check()


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_decoding_with_cold_pages_gives_the_same_bits(run: Run, keep: int) -> None:
    """Token by token across pages, segments and the window's edge; pages become cold as they fill up, but for some."""
    start = 480
    run.forget(start)
    cold = run.make_cold([index for index in _whole_pages(start) if index % 3 >= keep])
    for past in range(start, start + 50):
        if past % PAGE_TOKENS == 0 and past > start and keep < 2:
            run.restore()
            run.forget(past)
            cold = run.make_cold([index for index in _whole_pages(past) if index % 3 >= keep])
        run.check(past, 1, cold)


def test_prompt_is_computed_in_chunks_with_everything_before_cold(run: Run) -> None:
    run.forget(0)
    run.check(0, 100, None)
    past = 100
    for count in (MAX_STEP_TOKENS, 1, 31, 64, 148):
        run.check(past, count, run.make_cold(_whole_pages(past)), min(count, 3))
        # what was read is not kept
        past += count
        run.restore()
        run.forget(past)
    assert past == TOKENS


def test_layers_read_the_pages_that_they_see(open_run: Callable[[str, int], Run]) -> None:
    run = open_run("gemma3", 1)
    cold = run.make_cold([0, 3, 13, 15, 16])
    run.check(560, 1, cold)
    # a window of 72 tokens: position 560 sees 489 and later, which is in page 15
    firsts = [3 if layer.window else 0 for layer in run.config.layers]
    assert sorted(firsts) == [0, 3, 3, 3, 3, 3, 3]
    assert cold.source.asked == [(layer, number) for layer, first in enumerate(firsts) for number in range(first, 5)]
    assert cold.source.expected == list(enumerate(firsts))
    streamed = run.executor.last.streamed
    assert streamed is not None
    assert streamed.streamed_bytes == len(cold.source.asked) * run.layer_bytes
    # nothing cold within the window: one layer reads
    run.restore()
    cold = run.make_cold([0])
    run.check(560, 1, cold)
    assert cold.source.asked == [(5, 0)]


@pytest.mark.parametrize("count", [1, 40])
def test_lost_page_raises_and_the_repeated_step_has_the_right_bits(run: Run, count: int) -> None:
    past, indices = 512, [1, 2, 7, 15]
    run.forget(past)
    cold = run.make_cold(indices)
    layers = len(run.config.layers)
    seen = [numbers for layer, numbers in enumerate([range(4)] * layers) if run.config.layers[layer].window == 0]
    assert seen
    for layer in range(layers):
        number = 3 if run.config.layers[layer].window else 1
        cold.source.lost = lambda at, which, case=(layer, number): "torn" if (at, which) == case else None
        with pytest.raises(PageLostError, match=f"page {indices[number]} cannot be read: torn") as caught:
            run.step(past, count, cold)
        assert (caught.value.page, caught.value.reason) == (indices[number], "torn")
        cold.source.lost = _nothing_lost
        run.check(past, count, cold)
    # or without the page: it is in memory again
    cold.source.lost = lambda layer, number: "gone" if number == 0 else None
    with pytest.raises(PageLostError, match="page 1 cannot be read: gone"):
        run.step(past, count, cold)
    run.restore()
    run.forget(past)
    run.check(past, count, run.make_cold(indices[1:]))
    run.restore()
    run.forget(past)
    run.check(past, count, None)


def test_error_of_the_source_ends_the_step_and_leaves_nobody_writing(llama: Run) -> None:
    cold = llama.make_cold(_whole_pages(512))

    def fail(layer: int, number: int) -> None:
        if layer == 1:
            raise OSError("unplugged")

    cold.source.lost = fail
    with pytest.raises(OSError, match="unplugged"):
        llama.step(512, 1, cold)
    asked = len(cold.source.asked)
    pool = llama.executor.streaming._pool
    assert pool is not None
    pool.submit(int).result()  # behind all that has begun
    assert len(cold.source.asked) == asked
    cold.source.lost = _nothing_lost
    llama.check(512, 1, cold)


def test_failed_step_ends_when_nothing_is_written_any_more(llama: Run) -> None:
    cold = llama.make_cold(_whole_pages(512))
    begun, done = [], []

    def slow(layer: int, number: int) -> str | None:
        if number == 0:
            begun.append(layer)
            time.sleep(0.01)  # long enough for a step that does not wait to be over
            done.append(layer)
        return "torn" if layer == 0 else None

    cold.source.lost = slow
    for _ in range(3):
        with pytest.raises(PageLostError, match="page 0 cannot be read: torn"):
            llama.step(512, 1, cold)
        assert begun == done


def test_page_that_is_no_longer_cold_is_found_in_memory(llama: Run) -> None:
    # the same array of addresses, which would otherwise mean that no word of the page table has changed
    for indices in ([1, 2], [2], [0, 2]):
        llama.check(512, 1, ColdPages(np.array(indices), Copies(llama, indices)))


def test_waiting_is_measured_and_booked_as_time_of_attention(llama: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    team = llama.executor.team
    cold = llama.make_cold(_whole_pages(512))
    waiting, read_ticks = threading.Event(), team.read_ticks

    def noticed() -> int:
        # the thread that runs steps looks at the clock when it is about to wait
        if threading.current_thread() is threading.main_thread():
            waiting.set()
        return read_ticks()

    def until_waited_for(layer: int, number: int) -> str | None:
        return None if layer != 1 or waiting.wait(20) else "nobody waits"

    monkeypatch.setattr(team, "read_ticks", noticed)
    cold.source.lost = until_waited_for
    llama.check(512, 1, cold)
    streamed, stamps = llama.executor.last.streamed, llama.executor.last.stamps[0]
    assert streamed is not None
    assert streamed.streamed_bytes == len(llama.config.layers) * len(cold.indices) * llama.layer_bytes
    graph = choosing_graph(llama.model.graph)
    assert len(stamps) == len(graph) + 1
    assert stamps[-1] <= stamps[:-1].min()
    ticks = ticks_between(stamps)
    attention = sum(count for op, count in zip(graph, ticks, strict=True) if op.name == "attention")
    assert 0 < streamed.waited_s <= attention / team.ticks_per_us / 1e6 < ticks.sum() / team.ticks_per_us / 1e6
    assert streamed.read_s > 0


def test_step_without_cold_pages_says_so(llama: Run) -> None:
    llama.check(512, 1, llama.make_cold([2]))
    assert llama.executor.last.streamed is not None
    llama.restore()
    llama.check(512, 1, None)
    assert llama.executor.last.streamed is None


def test_next_layer_is_read_while_the_team_works(llama: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = llama.make_cold(_whole_pages(512))
    last, layers = len(cold.indices) - 1, len(llama.config.layers)
    read = [threading.Event() for _ in range(layers)]
    ahead: list[int] = []
    run_piece, piece = llama.executor.team.run, iter(range(-1, layers))

    def note(layer: int, number: int) -> None:
        if number == last:
            read[layer].set()

    def slowly(program: Program) -> None:
        # the piece of an attention takes until the next layer is read, which must not wait for the end of the piece
        layer = next(piece)
        assert read[min(layer + 1, layers - 1)].wait(20)
        ahead.append(max(asked for asked, _ in cold.source.asked) - layer)
        run_piece(program)

    cold.source.lost = note
    monkeypatch.setattr(llama.executor.team, "run", slowly)
    llama.check(512, 1, cold)
    # what is in use is not overwritten: one layer ahead at most
    assert len(ahead) == layers + 1
    assert max(ahead[1:]) == 1


def test_repeated_steps_make_no_new_programs(llama: Run) -> None:
    streaming = llama.executor.streaming
    cold = llama.make_cold(_whole_pages(512))
    for count in (1, 2, 3, 4, 5, 6):
        llama.check(512, count, cold)
    assert len(streaming._shapes) == 4
    kept = dict(streaming._shapes)
    for _ in range(3):
        for count in (3, 5, 4, 6):
            llama.check(512, count, cold)
    assert dict(streaming._shapes) == kept


def test_staging_is_as_large_as_needed_and_given_back(llama: Run) -> None:
    streaming = llama.executor.streaming
    assert streaming.held_bytes == streaming.staging_bytes(0) == 0
    sizes = []
    for indices in ([3], range(10), range(18), [0, 1], [5]):
        llama.restore()
        cold = llama.make_cold(indices)
        llama.check(590, 1, cold)
        assert streaming.held_bytes == streaming.staging_bytes(len(indices)) >= 2 * len(indices) * llama.layer_bytes
        sizes.append(streaming.held_bytes)
    assert sizes[0] == sizes[1] < sizes[2] > sizes[3] == sizes[4]
    streaming.release()
    assert streaming.held_bytes == 0
    llama.check(590, 1, cold)


def test_staging_is_never_larger_than_said(tiny_models: TinyModels) -> None:
    streaming = tiny_models.load(SPECS["one head"])._executor.streaming
    sizes = [streaming.staging_bytes(count) for count in range(300)]
    assert sizes == sorted(sizes)
    slices = layer_bytes(tiny_models.load(SPECS["one head"]).config)
    for count, size in enumerate(sizes):
        staging = Memory(size)
        layout = _Layout(ColdPages(np.arange(count), NO_SOURCE), (slices,), staging, 3) if count else None
        if layout is not None:
            # the last layer of a group in the second half is the end of it all
            last = layout.targets(2 * layout.group_layers - 1)[-1]
            assert last.ctypes.data + last.nbytes <= staging.address + size


def test_more_threads_than_cores_never_mix_layers(open_run: Callable[[str, int], Run]) -> None:
    run = open_run("gemma3", 5)
    random = np.random.default_rng(5)
    for number in range(60):
        past = int(random.integers(PAGE_TOKENS, TOKENS - 1))
        run.restore()
        run.forget(past)
        share = random.uniform(0.2, 1)
        cold = run.make_cold([index for index in _whole_pages(past) if random.uniform() < share] or [0])
        count = 1 if number % 2 else int(random.integers(1, min(40, TOKENS - past) + 1))
        for _ in range(3):
            run.check(past, count, cold)


def test_compressed_pages_are_found_by_the_offsets_of_their_format() -> None:
    sizes, formats = (4096, 2048 + 64, 1024 + 64), np.array([0, 2, 1, 2, 0])
    staging = Memory(2 * 3 * 5 * sizes[0])
    layout = _Layout(ColdPages(np.arange(5), NO_SOURCE, formats), sizes, staging, 3)
    assert layout.group_layers == 3
    taken = []
    for number, layer in enumerate([0, 1, 2, 5, 6, 9]):
        words, targets = layout.words(number, layer, 0), layout.targets(number)
        assert np.array_equal(words & FORMAT_BITS, formats)
        assert np.array_equal(layout.words(number, layer, 3), words[3:])
        for word, code, target in zip(words, formats, targets, strict=True):
            assert (word & ~FORMAT_BITS) + layer * sizes[code] == target.ctypes.data
            assert len(target) == sizes[code]
            taken.append((target.ctypes.data, target.ctypes.data + len(target)))
    # no two slots overlap, and all lie within
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    assert staging.address <= taken[0][0]
    assert taken[-1][1] <= staging.address + staging.num_bytes
    # the group after the next one uses the first half again
    assert [slot.ctypes.data for slot in layout.targets(6)] == [slot.ctypes.data for slot in layout.targets(0)]
