"""The ledger's bytes are the bytes that the kernels touch: counted, access by access, in a build that reports them.

Every operation of a step runs alone; each byte counts once per operation. Scratch, programs and tables are not counted,
and no byte may be touched that belongs to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace.config import Config
from headrace.engine.batch import Slice
from headrace.engine.loading import load_weights
from headrace.engine.model import Model
from headrace.engine.sampler import SamplingParams
from headrace.engine.sampling_rows import SamplingRow
from headrace.kernels.fields import matmul
from headrace.kernels.level import host_levels
from headrace.kernels.library import _KERNEL, KernelLibrary
from headrace.kernels.packed import RECORD_BYTES
from headrace.kernels.page_formats import F16, Q4, Q8
from headrace.kernels.program import COMMIT, COMPUTE, NUM_BLOCKS
from headrace.kernels.runtime import Program
from headrace.model.graph import Product, choosing_graph
from headrace.model.step import PAGE_TOKENS, LedgerTotals, SequenceStep, StepLedger
from headrace.weights.progress import NullProgress
from tiny.models import TinySpec

if TYPE_CHECKING:
    from conftest import TinyModels

# formats of every kind of layout: bytes with a scale, nibbles with a minimum, 256 columns, floats
SPECS = {
    "llama": TinySpec(format="Q8_0", formats={"attn_k": "F16", "ffn_up": "Q4_1", "blk.1.": "F16", "blk.1.ffn_down": "Q8_0"}),
    "gemma3": TinySpec(
        "gemma3",
        format="Q8_0",
        formats={"attn_output": "Q6_K", "ffn_down": "F16"},
        heads=4,
        kv_heads=2,
        head_width=64,
        layers=6,
        window=20,
    ),
}
CLASSES = ("weight_bytes", "kv_read_bytes", "kv_write_bytes", "activation_bytes")
# (past, new, outputs) of each sequence: decoding, with a past in three segments; a prompt; chunks in which some tokens do
# not see the last segment, others not the first; a batch
STEPS = (
    [(0, 1, 1)],
    [(5, 1, 1)],
    [(400, 1, 1)],
    [(0, 13, 3)],
    [(250, 9, 1)],
    [(270, 5, 5)],
    [(300, 1, 1), (40, 2, 2), (0, 5, 1)],
    [(300, 1, 1), (40, 1, 1), (500, 1, 1)],
    [(0, 5, 0), (33, 1, 0)],
)


@dataclass
class Counter:
    """Receives accesses; `take` gives those since the last call."""

    accesses: list[tuple[int, int, bool]]

    def __call__(self, address: int, num_bytes: int, is_store: bool) -> None:
        self.accesses.append((address, num_bytes, is_store))

    def take(self) -> np.ndarray:
        """int64 [N, 3]: address, bytes, store."""
        taken = np.array(self.accesses or np.zeros((0, 3)), np.int64)
        self.accesses.clear()
        return np.unique(taken, axis=0)


class CountedModel:
    """A model whose steps run operation by operation, and report the bytes that each touched."""

    def __init__(self, model: Model, counter: Counter) -> None:
        self.model, self._counter = model, counter
        self.counts: list[dict[str, int]] = []
        self.sampled: SamplingRow | None = None  # how the row of the step is sampled
        model._executor.team.run = self._run  # type: ignore[method-assign]

    def _run(self, program: Program) -> None:
        self.counts = []
        scratch = self.model._executor.team._memory
        _, scratch_at, _ = self._region(scratch)
        whole = choosing_graph(self.model.graph)
        graph = whole * (len(program.ops) // len(whole)) or whole[: len(program.ops)]
        for op, record in zip(graph, program.ops, strict=True):
            compute, commit = _KERNEL(int(record[COMPUTE // 8])), _KERNEL(int(record[COMMIT // 8]))
            out = np.zeros(2, np.int64)
            where = out.ctypes.data
            self._counter.take()
            for block in range(int(record[NUM_BLOCKS // 8])):
                for kernel in (compute, commit):
                    kernel(where, where, record.ctypes.data, block, scratch_at)
            accesses = self._counter.take()
            if isinstance(op, Product) and op.matrix.layout.integer_activations:
                accesses = _whole_records(accesses, record)
            self.counts.append(self._count(accesses, program))

    @staticmethod
    def _region(memory: Any) -> tuple[str, int, int]:
        return "", memory.address, memory.address + memory.num_bytes

    def _count(self, accesses: np.ndarray, program: Program) -> dict[str, int]:
        model, executor = self.model, self.model._executor
        packed = model._weights.packed
        regions = [("weight_bytes", packed.address, packed.address + len(packed.bytes))]
        owners = [("kv", arena.memory) for arena in model.cache.pool._arenas]
        owners += [("activation_bytes", executor.buffers.memory)]
        owners += [("activation_bytes", memory) for memory in executor._angles._memories]
        owners += [("", program.memory), ("", executor.team._memory), ("", executor.buffers.parts)]
        regions += [(name, *self._region(memory)[1:]) for name, memory in owners]
        if self.sampled is not None:
            owned = (self.sampled._history, self.sampled._biases, self.sampled._mask)
            regions += [("", *self._region(memory)[1:]) for memory in owned if memory is not None]
        counts = dict.fromkeys(CLASSES, 0)
        known = np.zeros(len(accesses), bool)
        for name, start, end in regions:
            inside = (accesses[:, 0] >= start) & (accesses[:, 0] + accesses[:, 1] <= end)
            known |= inside
            if name == "kv":
                counts["kv_read_bytes"] += _distinct(accesses[inside & (accesses[:, 2] == 0)])
                counts["kv_write_bytes"] += _distinct(accesses[inside & (accesses[:, 2] == 1)])
            elif name:
                counts[name] += _distinct(accesses[inside])
        assert known.all(), "an operation touched memory that is not its own"
        return counts


def _whole_records(accesses: np.ndarray, record: np.ndarray) -> np.ndarray:
    """Each format reads other fields of an activation block's record of 16 bytes; the ledger counts it whole."""
    widened = accesses.copy()
    stride, columns = int(record[matmul.INPUT_STRIDE // 8]), int(record[matmul.RECORDS // 8])
    rows = int(record[matmul.TOKENS // 8])
    offset = accesses[:, 0] - int(record[matmul.INPUT // 8])
    in_records = (offset >= 0) & (offset < rows * stride) & (offset % stride >= columns)
    widened[in_records, 0] -= offset[in_records] % RECORD_BYTES
    widened[in_records, 1] = RECORD_BYTES
    return widened


def _distinct(accesses: np.ndarray) -> int:
    """Bytes in the union of the accesses."""
    parts = []
    for size in np.unique(accesses[:, 1]):
        starts = accesses[accesses[:, 1] == size, 0]
        parts.append((starts[:, None] + np.arange(size)).reshape(-1))
    return len(np.unique(np.concatenate(parts))) if parts else 0


@pytest.fixture(scope="module")
def counted(tiny_models: TinyModels) -> Iterator[dict[str, CountedModel]]:
    counter = Counter([])
    library = KernelLibrary(Config.from_environment().kernels_dir, host_levels()[-1], counting=counter)
    models = {}
    for name, spec in SPECS.items():
        path = tiny_models.path(spec)
        weights = load_weights(path, None, NullProgress())
        model = Model(path, weights, library, threads=1, context=None, progress=NullProgress())
        models[name] = CountedModel(model, counter)
    yield models
    for each in models.values():
        each.model.close()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_ledger_declares_the_bytes_that_kernels_touch(
    counted: dict[str, CountedModel], name: str, step: Sequence[tuple[int, int, int]]
) -> None:
    _check_step(counted[name], step)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("step", [[(400, 1, 1)], [(270, 5, 5)], [(300, 1, 1), (64, 2, 2), (0, 5, 1)]], ids=str)
@pytest.mark.parametrize("page_formats", [(Q8,), (Q4,), (Q4, Q8, F16)], ids=str)
def test_ledger_declares_the_bytes_of_compressed_pages(
    counted: dict[str, CountedModel], name: str, step: Sequence[tuple[int, int, int]], page_formats: tuple[int, ...]
) -> None:
    """Pages that new tokens do not go to have the formats in turn."""
    _check_step(counted[name], step, page_formats)


def _check_step(counted: CountedModel, step: Sequence[tuple[int, int, int]], page_formats: tuple[int, ...] = ()) -> None:
    model = counted.model
    pool = model.cache.pool
    # ids and positions are all different, so that no embedding row or angle is shared by two tokens
    sequences, pages, slices, batch = [], [], [], []
    ids = iter(range(model.vocab_size))
    for past, new, outputs in step:
        sequence = model.sequence()
        sequence.reserve(past + new)
        sequences.append(sequence)
        formats = tuple(page_formats[i % len(page_formats)] for i in range(past // PAGE_TOKENS)) if page_formats else ()
        addresses = sequence._addresses.copy()
        for number, page_format in enumerate(formats):
            page = pool.allocate(page_format)
            assert page is not None
            pages.append(page)
            addresses[number] = pool.address(page)
        slices.append(Slice([next(ids) for _ in range(new)], past, addresses, outputs))
        batch.append(SequenceStep(new, past, outputs, chosen=True, page_formats=formats))
    assert model._executor.run(slices).sequence_steps() == tuple(batch)
    for page in pages:
        pool.release(page)
    for sequence in sequences:
        sequence.close()
    _compare(counted, batch)


def _compare(counted: CountedModel, batch: Sequence[SequenceStep]) -> None:
    """What the ledger declares is what was counted in the last step, operation by operation and in all."""
    model, found = counted.model, counted.counts
    rows = model._booking_ledger.rows(batch)
    wrong = [
        f"{row.operation} {row.format} of layer {row.layer}: {kind} {getattr(row, kind)} declared, {counts[kind]} touched"
        for row, counts in zip(rows, found, strict=True)
        for kind in CLASSES
        if getattr(row, kind) != counts[kind]
    ]
    assert wrong == []
    totals = LedgerTotals(1, sum(row.macs for row in rows), *(sum(each[kind] for each in found) for kind in CLASSES))
    assert model._booking_ledger.totals(batch) == totals


@pytest.mark.parametrize("name", SPECS)
def test_ledger_declares_the_bytes_of_steps_that_choose_their_token(counted: dict[str, CountedModel], name: str) -> None:
    model = counted[name].model
    sequence = model.sequence()
    sequence.reserve(302)
    model._executor.run([Slice([7], 300, sequence._addresses)], 2)
    sequence.close()
    ledger = StepLedger(model.config, choosing_graph(model.graph), 1)
    batches = [(SequenceStep(1, past, chosen=True),) for past in (300, 301)]
    rows = [row for batch in batches for row in ledger.rows(batch)]
    declared = [{kind: getattr(row, kind) for kind in CLASSES} for row in rows]
    assert declared == counted[name].counts
    assert [row.operation for row in rows].count("choose") == 4
    for batch in batches:
        total = ledger.totals(batch)
        assert total == LedgerTotals(1, *(sum(getattr(row, kind) for row in ledger.rows(batch)) for kind in ("macs", *CLASSES)))
        assert ledger.totals((SequenceStep(1, batch[0].past_tokens),)) == model.step_ledger.totals(batch)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("pasts", "groups"),
    [
        # (past of each sequence, pages shared with the sequences of its group)
        ((300, 310, 290), ((9, (0, 1, 2)),)),
        ((400, 40, 420, 330, 500), ((8, (0, 2, 3)), (10, (0, 2)))),
        ((40, 41), ((1, (0, 1)),)),
    ],
    ids=str,
)
def test_ledger_counts_shared_pages_once(
    counted: dict[str, CountedModel], name: str, pasts: Sequence[int], groups: Sequence[tuple[int, tuple[int, ...]]]
) -> None:
    model = counted[name].model
    slices, sequences = [], []
    for number, past in enumerate(pasts):
        sequence = model.sequence()
        sequence.reserve(past + 1)
        sequences.append(sequence)
        slices.append(Slice([number], past, sequence._addresses.copy()))
    apart = model._booking_ledger.totals(model._executor.run(slices).sequence_steps())
    for pages, members in groups:
        for member in members[1:]:
            slices[member].page_addresses[:pages] = slices[members[0]].page_addresses[:pages]
    slices = [Slice(part.token_ids, part.past_tokens, part.page_addresses.copy()) for part in slices]
    batch = model._executor.run(slices).sequence_steps()
    for sequence in sequences:
        sequence.close()
    assert any(part.shared_pages for part in batch)
    _compare(counted[name], batch)
    assert model._booking_ledger.totals(batch).kv_read_bytes < apart.kv_read_bytes


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_ledger_declares_the_bytes_of_steps_that_draw_their_token(
    counted: dict[str, CountedModel], name: str, penalty: float
) -> None:
    model = counted[name].model
    params = SamplingParams(temperature=1.0, top_k=0, min_p=0.0, repeat_penalty=penalty)
    row = SamplingRow(params, model.vocab_size, 400)
    row.note([1] * 301, 0)
    counted[name].sampled = row
    sequence = model.sequence()
    sequence.reserve(302)
    model._executor.run([Slice([7], 300, sequence._addresses, sampling=row)])
    sequence.close()
    counted[name].sampled = None
    ledger = StepLedger(model.config, choosing_graph(model.graph), 1)
    batch = (SequenceStep(1, 300, chosen=True, edited=row.is_edited),)
    *declared, _ = [{kind: getattr(each, kind) for kind in CLASSES} for each in ledger.rows(batch)]
    *touched, drawn = counted[name].counts
    assert declared == touched
    # how many candidates a draw looks at is up to the logits, and no row of the ledger
    assert 0 < drawn["activation_bytes"] <= 4 * model.vocab_size
    total = LedgerTotals(1, *(sum(getattr(each, kind) for each in ledger.rows(batch)) for kind in ("macs", *CLASSES)))
    assert ledger.totals(batch) == total
