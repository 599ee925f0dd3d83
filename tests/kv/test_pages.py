"""The pool of pages: a state machine over formats, owners and the bound, against counts kept beside it."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kernels.page_formats import FORMAT_BITS, FORMAT_NAMES
from headrace.kv.pages import PAGE_TOKENS, PagePool, format_of, layer_bytes, page_bytes, pages_for
from headrace.model.config import LayerConfig, ModelConfig, RopeConfig

SIZES = (16384, 8192 + 64, 4096)
LIMIT = 5 * SIZES[0]


class PoolMachine(RuleBasedStateMachine):
    """Every page that someone owns holds the mark that its first owner wrote, however others come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(LIMIT, SIZES)
        self.owned: list[int] = []  # one entry per owner
        self.marks: dict[int, int] = {}
        self.reserved: list[int] = []
        self.next_mark = 1

    def _free(self) -> int:
        return LIMIT - sum(SIZES[format_of(page)] for page in set(self.owned)) - sum(self.reserved)

    def _places(self, page: int) -> tuple[int, int]:
        address = self.pool.address(page)
        assert address & FORMAT_BITS == format_of(page)
        return address & ~FORMAT_BITS, (address & ~FORMAT_BITS) + SIZES[format_of(page)] - 8

    @rule(page_format=st.integers(0, len(FORMAT_NAMES) - 1))
    def allocate(self, page_format: int) -> None:
        fits = SIZES[page_format] <= self._free()
        page = self.pool.allocate(page_format)
        assert (page is not None) == fits
        if page is not None:
            assert format_of(page) == page_format
            assert page not in self.owned
            self.owned.append(page)
            self.marks[page] = self.next_mark
            for at in self._places(page):
                ctypes.c_int64.from_address(at).value = self.next_mark
            self.next_mark += 1

    @rule(num_bytes=st.integers(0, LIMIT))
    def reserve(self, num_bytes: int) -> None:
        fits = num_bytes <= self._free()
        assert self.pool.reserve(num_bytes) == fits
        if fits:
            self.reserved.append(num_bytes)

    @precondition(lambda self: self.reserved)
    @rule()
    def unreserve(self) -> None:
        self.pool.unreserve(self.reserved.pop())

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.owned))
        self.pool.share(page)
        self.owned.append(page)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.owned))
        self.pool.release(page)
        self.owned.remove(page)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        assert self.pool.free_bytes == self._free()
        for page in set(self.owned):
            assert self.pool.owners(page) == self.owned.count(page)
        for page_format in range(len(FORMAT_NAMES)):
            assert self.pool.num_owned(page_format) == sum(format_of(page) == page_format for page in set(self.owned))

    @invariant()
    def owned_pages_keep_what_was_written(self) -> None:
        for page in set(self.owned):
            for at in self._places(page):
                assert ctypes.c_int64.from_address(at).value == self.marks[page]
            assert int.from_bytes(self.pool.view(page)[:8].tobytes(), "little") == self.marks[page]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_pool_gives_free_pages_of_one_format_back_to_the_system_for_another() -> None:
    pool = PagePool(LIMIT, SIZES)
    large = [pool.allocate(0) for _ in range(5)]
    for page in large:
        assert page is not None
        pool.view(page)[:] = 7
        pool.release(page)
    small = pool.allocate(2)
    assert small is not None
    pool.check()  # resident pages are within the bound, so at least one large page is not resident any more
    again = [pool.allocate(0) for _ in range(4)]
    assert None not in again
    returned = [page for page in again if page is not None and not pool.view(page).any()]
    assert len(returned) == 0  # those that were kept come first
    pool.release(small)
    last = pool.allocate(0)
    assert last is not None
    assert not pool.view(last).any(), "the page that was given back reads as zeros"


def test_free_page_can_be_neither_shared_nor_released() -> None:
    pool = PagePool(LIMIT, SIZES)
    page = pool.allocate()
    assert page is not None
    pool.release(page)
    with pytest.raises(AssertionError, match="free page"):
        pool.share(page)
    with pytest.raises(AssertionError, match="free already"):
        pool.release(page)


def test_pages_for_rounds_up() -> None:
    assert [pages_for(count) for count in (0, 1, PAGE_TOKENS, PAGE_TOKENS + 1)] == [0, 1, 1, 2]


def test_page_holds_float16_keys_and_values_of_all_layers_and_kv_heads() -> None:
    config = ModelConfig(
        architecture="llama",
        name="x",
        context_tokens=64,
        vocabulary=10,
        embedding_width=64,
        feed_forward_width=64,
        heads=6,
        kv_heads=3,
        head_width=32,
        norm_epsilon=1e-5,
        layers=(LayerConfig(),) * 5,
        ropes=(RopeConfig(1e4, 32),),
    )
    assert layer_bytes(config) == 32 * 3 * 32 * 2 * 2
    assert page_bytes(config) == 5 * layer_bytes(config)
