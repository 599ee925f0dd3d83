"""Steps of many sequences: each has the bits and tokens that it has alone, whatever decodes beside it and is shared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from headrace.engine.ahead import MAX_STEPS
from headrace.engine.batch import BatchMaker, RowSampling, Slice
from headrace.engine.executor import MAX_STEP_OUTPUTS, StepRun
from headrace.engine.model import Model
from headrace.kernels.fields import sample
from headrace.kernels.fields.sample import SAMPLE_WORDS
from headrace.kernels.runtime import Memory
from headrace.kv.pages import page_bytes, pages_for
from headrace.model.step import MAX_STEP_TOKENS, PAGE_TOKENS
from tiny.models import TinySpec

if TYPE_CHECKING:
    from conftest import TinyModels

Words = npt.NDArray[np.int64]

SPECS = {
    "llama": TinySpec(format="Q8_0", formats={"attn_output": "F16"}, heads=6, kv_heads=2, head_width=32, context=1536, seed=3),
    "one head": TinySpec(heads=1, kv_heads=1, context=1536, seed=4),
    "gemma3": TinySpec("gemma3", layers=6, window=300, heads=4, kv_heads=1, context=1536, seed=5),
    "narrow": TinySpec("gemma3", layers=6, window=40, heads=4, kv_heads=2, context=1536, seed=6),
}
every_model = pytest.mark.parametrize("name", SPECS)


class Pages:
    """Sequences of one model whose pages the test gives out itself, some of them to several sequences."""

    def __init__(self, model: Model, num_pages: int = 1200) -> None:
        self.model, self.executor = model, model._executor
        self._size, self._used = page_bytes(model.config), 0
        self._memory = Memory(num_pages * self._size)

    def begin(self, seed: int, num_tokens: int, shared: Slice | None = None, num_shared: int = 0, room: int = 40) -> Slice:
        """Computes a sequence of random tokens but for its last one, which is returned; whole pages may be another's."""
        ids = np.random.default_rng(seed).integers(0, self.model.vocab_size, num_tokens).tolist()
        kept = num_shared // PAGE_TOKENS
        if shared is not None:
            ids[: kept * PAGE_TOKENS] = list(shared.token_ids)[: kept * PAGE_TOKENS]
        fresh = pages_for(num_tokens + room) - kept
        addresses = self._memory.address + self._size * np.arange(self._used, self._used + fresh)
        self._used += fresh
        assert self._used * self._size <= self._memory.num_bytes
        if shared is not None:
            addresses = np.concatenate([shared.page_addresses[:kept], addresses])
        for start in range(kept * PAGE_TOKENS, num_tokens - 1, MAX_STEP_TOKENS):
            chunk = ids[start : min(start + MAX_STEP_TOKENS, num_tokens - 1)]
            self.executor.run([Slice(chunk, start, addresses, 0)])
        # all ids, so that others can begin with them
        return Slice(ids, num_tokens - 1, addresses)

    def alone(self, begun: Slice, steps: int) -> tuple[Words, list[bytes]]:
        """The tokens that follow one step after the other, and the logits of each."""
        token, tokens, logits = begun.token_ids[-1], [], []
        for step in range(steps):
            run = self.executor.run([Slice([token], begun.past_tokens + step, begun.page_addresses)])
            token = int(run.chosen[0, 0])
            assert token == int(run.logits[0].argmax())
            tokens.append(token)
            logits.append(run.logits[0].tobytes())
        return np.array(tokens), logits

    def together(self, begun: Sequence[Slice], steps: int) -> StepRun:
        """The next steps of several sequences at once."""
        return self.executor.run([replace(each, token_ids=each.token_ids[-1:]) for each in begun], steps)

    def check(self, begun: Sequence[Slice], steps: int, expected: Sequence[tuple[Words, list[bytes]]]) -> StepRun:
        run = self.together(begun, steps)
        assert run.chosen.shape == (steps, len(begun))
        for number, (tokens, logits) in enumerate(expected):
            assert run.chosen[:, number].tolist() == tokens[:steps].tolist(), number
            assert run.logits[number].tobytes() == logits[steps - 1], number
        return run


@pytest.fixture
def open_pages(tiny_models: TinyModels) -> Iterator[Callable[..., Pages]]:
    opened: list[Pages] = []

    def open_for(spec: str | TinySpec, threads: int = 1) -> Pages:
        opened.append(Pages(tiny_models.load(SPECS[spec] if isinstance(spec, str) else spec, threads=threads)))
        return opened[-1]

    yield open_for
    for pages in opened:
        # a late thread may still read pages, which are freed now
        while pages.executor.team._inside.any():
            time.sleep(0.001)


# before, at and behind the ends of pages and segments, which 8 more tokens cross or not
LENGTHS = (1, 2, 31, 32, 33, 60, 128, 250, 255, 256, 257, 300, 511, 512, 513, 550, 700, 769, 1020, 40)


@every_model
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sequences_of_a_batch_have_the_bits_and_tokens_they_have_alone(
    open_pages: Callable[..., Pages], name: str, threads: int
) -> None:
    pages = open_pages(name, threads)
    begun = [pages.begin(number, length) for number, length in enumerate(LENGTHS)]
    expected = [pages.alone(each, MAX_STEPS) for each in begun]
    # batch sizes and numbers of steps change from run to run
    for count, steps in ((20, 1), (1, 8), (20, 8), (3, 2), (16, 8), (2, 8), (7, 3), (20, 8), (1, 1), (19, 5), (4, 8)):
        first = (count * 7) % (len(begun) - count + 1)
        part = slice(first, first + count)
        run = pages.check(begun[part], steps, expected[part])
        assert all(not each.shared_pages for each in run.sequence_steps())


@every_model
@pytest.mark.parametrize("threads", [1, 3])
def test_shared_beginnings_change_no_bit(open_pages: Callable[..., Pages], name: str, threads: int) -> None:
    pages = open_pages(name, threads)
    system = pages.begin(0, 530)
    document = pages.begin(1, 830, system, 512)
    begun = [
        document,
        pages.begin(2, 540, system, 512),
        pages.begin(3, 900, document, 800),  # the last shared segment is not a whole one
        pages.begin(4, 769, document, 768),
        pages.begin(5, 300),
        system,
        pages.begin(6, 1023, document, 768),
        pages.begin(7, 515, system, 32),  # only a page
        pages.begin(8, 1100, document, 512),
        *[pages.begin(9 + number, 513 + 11 * number, system, 512) for number in range(9)],
    ]
    expected = [pages.alone(each, MAX_STEPS) for each in begun]
    order = np.random.default_rng(threads)
    for count in (len(begun), 2, 6, 13, len(begun)):
        chosen = order.permutation(len(begun))[:count]
        for steps in (1, MAX_STEPS):
            run = pages.check([begun[number] for number in chosen], steps, [expected[number] for number in chosen])
    ledger = pages.model._booking_ledger
    shared = run.sequence_steps()
    assert sum(each.shared_pages for each in shared) > 16 * 12
    apart = [replace(each, shared_pages=0) for each in shared]
    assert (
        ledger.totals(shared).kv_read_bytes < (0.8 if name in ("llama", "one head") else 1) * ledger.totals(apart).kv_read_bytes
    )


@pytest.mark.parametrize("window", [255, 256, 257, 260, 272, 512])
def test_windows_as_long_as_a_segment_change_no_bit(open_pages: Callable[..., Pages], window: int) -> None:
    pages = open_pages(TinySpec("gemma3", layers=6, window=window, heads=2, kv_heads=1, context=1536))
    system = pages.begin(0, 520)
    begun = [pages.begin(number, 513 + number % 3, system, 512) for number in range(1, 30)]
    expected = [pages.alone(each, 1) for each in begun]
    pages.check(begun, 1, expected)


def test_batch_as_large_as_may_be_runs_ahead(open_pages: Callable[..., Pages]) -> None:
    pages = open_pages("llama", 2)
    begun = [pages.begin(number, 1 + number * 3, room=MAX_STEPS) for number in range(MAX_STEP_OUTPUTS)]
    expected = [pages.alone(each, MAX_STEPS) for each in begun]
    pages.check(begun, MAX_STEPS, expected)


@every_model
def test_prompts_and_decoding_sequences_share_a_step(open_pages: Callable[..., Pages], name: str) -> None:
    pages = open_pages(name)
    begun = [pages.begin(number, length) for number, length in enumerate((300, 33, 600))]
    expected = [pages.alone(each, 1) for each in begun]
    prompt = pages.begin(11, 1)
    ids = np.random.default_rng(11).integers(0, pages.model.vocab_size, 60).tolist()
    whole = pages.executor.run([Slice(ids, 0, pages.begin(12, 1, room=100).page_addresses)])
    logits, chosen = whole.logits[0].tobytes(), int(whole.chosen[0, 0])
    target = pages.begin(13, 1, room=100).page_addresses
    decoding = [replace(each, token_ids=each.token_ids[-1:]) for each in begun]
    for start in (0, 20):
        run = pages.executor.run([decoding[0], Slice(ids[start : start + 20], start, target, 0), *decoding[1:]])
        for number, (tokens, rows) in enumerate(expected):
            assert run.chosen[0, number] == tokens[0]
            assert run.logits[number].tobytes() == rows[0]
    run = pages.executor.run([*decoding, Slice(ids[40:], 40, target, 1), prompt])
    assert run.chosen.shape == (1, 5)
    assert run.chosen[0, 3] == chosen
    assert run.logits[3].tobytes() == logits


def test_step_without_outputs_ends_before_the_logits(open_pages: Callable[..., Pages]) -> None:
    pages = open_pages("llama")
    addresses = pages.begin(0, 1).page_addresses
    run = pages.executor.run([Slice([1, 2, 3], 0, addresses, 0)])
    assert run.chosen.shape == (1, 0)
    assert run.logits.shape == (0, pages.model.vocab_size)
    rows = pages.model._booking_ledger.rows(run.sequence_steps())
    assert rows[-1].operation == "down"
    assert run.stamps.shape == (1, len(rows) + 1)
    with_logits = pages.executor.run([Slice([1, 2, 3], 0, addresses)])
    assert with_logits.stamps.shape == (1, len(pages.model._booking_graph) + 1)


def test_stamps_of_steps_in_a_row_follow_one_another(open_pages: Callable[..., Pages]) -> None:
    pages = open_pages("llama", 2)
    run = pages.together([pages.begin(0, 5), pages.begin(1, 50)], 4)
    assert run.stamps.shape == (4, len(pages.model._booking_graph) + 1)
    assert (run.stamps[:, :-1] >= run.stamps[:, -1:]).all()
    assert np.array_equal(run.stamps[1:, -1], run.stamps[:-1, -2])


def test_pages_that_change_are_written_anew(open_pages: Callable[..., Pages]) -> None:
    pages = open_pages("llama")
    begun = [pages.begin(number, 100) for number in range(3)]
    expected = [pages.alone(each, 2) for each in begun]
    pages.check(begun, 2, expected)
    # the same sequences in other pages, step by step
    for number, each in enumerate(begun):
        moved = pages.begin(number, 100)
        begun[number] = replace(each, page_addresses=moved.page_addresses)
        pages.check(begun, 2, expected)


class _Noting(RowSampling):
    def __init__(self, number: int) -> None:
        self.number, self.positions = number, list[int]()

    def write(self, words: Words, position: int) -> None:
        assert not words.any()
        words[sample.WINDOW // 8] = self.number  # which nothing reads without flags
        self.positions.append(position)


def test_sampling_records_are_those_of_the_rows_wanted(open_pages: Callable[..., Pages]) -> None:
    """Written once for all steps of a program, for the token that follows; nothing is left of them for the next batch."""
    pages = open_pages("llama")
    begun = [
        replace(pages.begin(number, 40 + number), sampling=_Noting(number) if number != 1 else None) for number in range(4)
    ]
    pages.together(begun, 3)
    tables, program = pages.executor._tables, max(pages.executor._programs, key=lambda each: each.serial)
    words, at = program._step_tables[0].words, tables.offsets["sampling"]
    records = words[at : at + 64 * SAMPLE_WORDS].reshape(64, SAMPLE_WORDS)
    assert records[:, sample.WINDOW // 8].tolist() == [0, 0, 2, 3, *[0] * 60]
    assert [each.sampling.positions for each in begun if isinstance(each.sampling, _Noting)] == [[40], [42], [43]]
    pages.together([replace(part, sampling=None) for part in begun], 3)
    assert not records.any()


def test_page_tables_are_laid_out_once() -> None:
    maker, addresses = BatchMaker(), [np.arange(4) + 10 * number for number in range(3)]
    slices = [Slice([1], 5, each) for each in addresses]
    first = maker.make(slices)
    assert maker.make([replace(part, past_tokens=6) for part in slices]).paging is first.paging
    assert maker.make([slices[0], slices[1], replace(slices[2], page_addresses=addresses[2].copy())]).paging is not first.paging
    # a prompt beside them keeps the order asked for
    mixed = maker.make([*slices, Slice([1, 2], 0, np.arange(4) + 50)])
    assert mixed.paging.order is None
    assert mixed.output_rows.tolist() == [0, 1, 2, 4]
