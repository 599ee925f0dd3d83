"""The page arena: a state machine that allocates, shares and releases, against counts kept beside it."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kv.pages import PAGE_TOKENS, PageArena, layer_bytes, page_bytes, pages_for
from headrace.model.config import LayerConfig, ModelConfig, RopeConfig

NUM_PAGES = 5
PAGE_BYTES = 4096


class PageMachine(RuleBasedStateMachine):
    """Every page that someone owns holds the mark that its first owner wrote, however others come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = PageArena(NUM_PAGES, PAGE_BYTES)
        self.owned: list[int] = []  # one entry per owner
        self.marks: dict[int, int] = {}
        self.next_mark = 1

    @rule()
    def allocate(self) -> None:
        page = self.arena.allocate()
        assert (page is None) == (len(set(self.owned)) == NUM_PAGES)
        if page is not None:
            assert page not in self.owned
            self.owned.append(page)
            self.marks[page] = self.next_mark
            for at in (0, PAGE_BYTES - 8):
                ctypes.c_int64.from_address(self.arena.address(page) + at).value = self.next_mark
            self.next_mark += 1

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.owned))
        self.arena.share(page)
        self.owned.append(page)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.owned))
        self.arena.release(page)
        self.owned.remove(page)

    @invariant()
    def counts_agree(self) -> None:
        self.arena.check()
        assert self.arena.num_free == NUM_PAGES - len(set(self.owned))
        for page in range(NUM_PAGES):
            assert self.arena.owners(page) == self.owned.count(page)

    @invariant()
    def owned_pages_keep_what_was_written(self) -> None:
        for page in set(self.owned):
            for at in (0, PAGE_BYTES - 8):
                assert ctypes.c_int64.from_address(self.arena.address(page) + at).value == self.marks[page]


TestPageMachine = PageMachine.TestCase
TestPageMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_arena_hands_out_low_pages_first() -> None:
    arena = PageArena(3, PAGE_BYTES)
    assert [arena.allocate() for _ in range(4)] == [0, 1, 2, None]
    arena.release(1)
    assert arena.allocate() == 1


def test_free_page_can_be_neither_shared_nor_released() -> None:
    arena = PageArena(2, PAGE_BYTES)
    page = arena.allocate()
    assert page is not None
    arena.release(page)
    with pytest.raises(AssertionError, match="free page"):
        arena.share(page)
    with pytest.raises(AssertionError, match="free already"):
        arena.release(page)


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
