"""The worker team: the same results for any number of threads, whichever of them lose their core, and no cost at rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from headrace.kernels import layout, reference, reference_packed
from headrace.kernels.fields import matmul as matmul_fields
from headrace.kernels.fields import rows as rows_fields
from headrace.kernels.packed import PACKED, quantised_row_bytes
from headrace.kernels.program import AFTER, COMMIT, COMPUTE, NUM_BLOCKS, argument
from headrace.kernels.reference_packed import Fields
from headrace.kernels.runtime import SPIN_US, Memory, Program, Team, set_kernel

# the fields of `probe_kernels.chain`
INPUT, OUTPUT, COUNT, INPUT_BLOCKS, SALT, RELEASE, HELD_SCRATCH, COMMITS, DELAY = (argument(i) for i in range(9))
MAX_BLOCKS, MAX_OPS = 16, 12
PATIENCE_S = 20.0


@contextmanager
def _team(bench: Any, threads: int) -> Iterator[Team]:
    bench.probes.prepare(["probe.chain", "probe.chain.commit"])
    with Team(bench.library, threads, scratch_bytes=1 << 16, max_ops=MAX_OPS) as team:
        yield team


@dataclass
class Chain:
    """A program of `probe.chain` operations; each sums the blocks of an earlier one."""

    bench: Any
    num_ops: int
    program: Program = field(init=False)
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        self.program = Program(self.num_ops, self.num_ops * MAX_BLOCKS, 8)
        self.memory = Memory((2 * self.num_ops * MAX_BLOCKS + 2) * 8)
        words = self.memory.words(0, 2 * self.num_ops * MAX_BLOCKS + 2)
        size = self.num_ops * MAX_BLOCKS
        self.outputs = words[:size].reshape(self.num_ops, MAX_BLOCKS)
        self.commits = words[size : 2 * size].reshape(self.num_ops, MAX_BLOCKS)
        self.release, self.held = words[2 * size :][:1], words[2 * size + 1 :]
        self.expected = np.zeros_like(self.outputs)

    def fill(self, rng: np.random.Generator, *, delay: int = 0, held_scratch: int = 0, blocks: int = 0) -> None:
        """New operations: random blocks (or so many), salts, inputs and delays."""
        ops = self.program.ops
        ops[:] = 0
        counts = rng.integers(1, MAX_BLOCKS + 1, self.num_ops) if blocks == 0 else np.full(self.num_ops, blocks)
        self.outputs[:] = self.commits[:] = self.expected[:] = 0
        for i in range(self.num_ops):
            # the operation before, or an earlier one with nothing between to wait for
            after = int(rng.integers(max(0, i - 2), i + 1))
            salt = int(rng.integers(1, 1000))
            ops[i, [COMPUTE // 8, COMMIT // 8]] = [self.bench.probes.address(f"probe.chain{part}") for part in ("", ".commit")]
            ops[i, [NUM_BLOCKS // 8, AFTER // 8, SALT // 8]] = counts[i], after, salt
            ops[i, [OUTPUT // 8, COMMITS // 8]] = self.outputs[i].ctypes.data, self.commits[i].ctypes.data
            ops[i, [RELEASE // 8, HELD_SCRATCH // 8]] = self.release.ctypes.data, held_scratch
            ops[i, DELAY // 8] = int(rng.integers(0, delay + 1))
            total = np.zeros(1, np.int64)
            if after:
                ops[i, [INPUT // 8, INPUT_BLOCKS // 8]] = self.outputs[after - 1].ctypes.data, counts[after - 1]
                total = self.expected[after - 1].sum(keepdims=True)
            self.expected[i, : counts[i]] = salt * np.arange(1, counts[i] + 1) + total
        self.counts = counts
        self.program.assign_flags()

    def check(self, runs: int = 1) -> None:
        """All results are there, and every block was committed once per run."""
        np.testing.assert_array_equal(self.outputs, self.expected)
        np.testing.assert_array_equal(self.commits, runs * (np.arange(MAX_BLOCKS) < self.counts[:, np.newaxis]))


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"nothing happened for {PATIENCE_S} s"
        time.sleep(0.001)


def _scratch(team: Team, number: int) -> int:
    return int(team._words[team._line(number) + layout.SCRATCH // 8])


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_team_runs_every_block_once(best_kernels: Any, rng: np.random.Generator, threads: int) -> None:
    with _team(best_kernels, threads) as team:
        chain = Chain(best_kernels, MAX_OPS)
        chain.fill(rng, delay=20)
        for run in range(1, 101):
            team.run_single(chain.program)
            chain.check(run)


def test_team_stamps_operations_in_order(best_kernels: Any, rng: np.random.Generator) -> None:
    with _team(best_kernels, 2) as team:
        chain = Chain(best_kernels, MAX_OPS)
        chain.fill(rng, delay=100)
        before = team.read_ticks()
        team.run_single(chain.program)
        after = team.read_ticks()
        *ends, start = chain.program.stamps.tolist()
        assert before <= start
        assert max(ends) <= after
        awaited = chain.program.ops[:, AFTER // 8]
        assert all(ends[i] >= max(ends[: awaited[i]], default=start) for i in range(MAX_OPS))


def test_team_gives_the_same_bits_for_any_number_of_threads(
    best_kernels: Any, make_fields: Callable[[str, int, int], Fields], rng: np.random.Generator
) -> None:
    """Norm, product, norm, product of 5 tokens in small blocks."""
    kernels, tokens, columns = best_kernels, 5, 256
    names = ("rows", "rows.commit", "matmul:Q4_1", "matmul:Q8_0", "matmul.commit")
    kernels.library.prepare(names)
    x = kernels.array(rng.normal(size=(tokens, columns)).astype(np.float32))
    weight = kernels.array(rng.normal(size=columns).astype(np.float32))
    stride = -(-quantised_row_bytes(columns) // 64) * 64
    quantised = [kernels.zeros((tokens, stride), np.uint8) for _ in range(2)]
    products = [kernels.zeros((tokens, columns)) for _ in range(2)]
    matrices = [kernels.array(reference_packed.pack_fields(n, make_fields(n, columns, columns))) for n in ("Q4_1", "Q8_0")]

    def build() -> Program:
        """For one team: the flags of a program count that team's steps."""
        program = Program(4, 200, 8)
        for i, name in enumerate(("Q4_1", "Q8_0")):
            set_kernel(program, 2 * i, kernels.library, "rows", "rows.commit")
            source = x if i == 0 else products[0]
            _set(program.ops[2 * i], rows_fields, 3, 2 * i, input=source, input_stride=4 * columns, columns=columns)
            _set(program.ops[2 * i], rows_fields, 3, 2 * i, tokens=tokens, block_tokens=2, weight=weight, quantised=stride)
            _set(program.ops[2 * i], rows_fields, 3, 2 * i, output=quantised[i], output_stride=stride)
            set_kernel(program, 2 * i + 1, kernels.library, f"matmul:{name}", "matmul.commit")
            op = program.ops[2 * i + 1]
            units = columns // PACKED[name].unit_columns
            _set(op, matmul_fields, 16 * 3, 2 * i + 1, weights=matrices[i], groups=columns // 16, units=units, tokens=tokens)
            _set(op, matmul_fields, 16 * 3, 2 * i + 1, input=quantised[i], input_stride=stride, records=columns)
            _set(op, matmul_fields, 16 * 3, 2 * i + 1, output=products[i], output_stride=4 * columns, block_groups=1)
            _set(op, matmul_fields, 16 * 3, 2 * i + 1, block_tokens=2)
        program.assign_flags()
        return program

    results = set()
    for threads in (1, 2, 3, 4):
        with _team(kernels, threads) as team:
            program = build()
            for _ in range(50):
                products[1][:] = np.nan
                team.run_single(program)
                results.add(products[1].tobytes())
    assert len(results) == 1
    kernels.check_guards()
    twin = reference.matmul("Q8_0", _unpacked("Q8_0", matrices[1], columns), _decoded(quantised[1], columns))
    assert np.abs(products[1] - twin.values).max() <= 1e-5 * twin.magnitudes.max()


def _set(op: np.ndarray, fields: Any, blocks: int, after: int, **values: Any) -> None:
    op[NUM_BLOCKS // 8], op[AFTER // 8] = blocks, after
    for name, value in values.items():
        op[getattr(fields, name.upper()) // 8] = value.ctypes.data if isinstance(value, np.ndarray) else value


def _unpacked(name: str, packed: np.ndarray, columns: int) -> Fields:
    return reference_packed.unpack_fields(name, packed, columns, columns)


def _decoded(rows: np.ndarray, columns: int) -> reference.QuantisedRows:
    return reference.QuantisedRows.decode(rows, columns)


def test_team_helps_a_thread_that_lost_its_core(best_kernels: Any, rng: np.random.Generator) -> None:
    """A worker stops inside a block, for as long as 100 further steps take, and wakes without harm."""
    with _team(best_kernels, 3) as team:
        stalled = Chain(best_kernels, 3)
        stalled.fill(rng, delay=2000, held_scratch=_scratch(team, 1), blocks=MAX_BLOCKS)
        runs = 0
        while not stalled.held[0]:
            assert runs < 2000, "the worker never claimed a block"
            team.run(stalled.program)
            runs += 1
            stalled.check(runs)
            _wait_until(lambda: bool(stalled.held[0]) or team.is_free(stalled.program))
        assert team.helped_blocks > 0
        assert not team.is_free(stalled.program)
        other = Chain(best_kernels, MAX_OPS)
        for _ in range(100):
            other.fill(rng, delay=50)
            team.run_single(other.program)
            other.check()
        assert not team.is_free(stalled.program)
        stalled.release[0] = 1
        _wait_until(lambda: team.is_free(stalled.program))
        stalled.check(runs)  # what the worker computed late was dropped
        other.fill(rng, delay=50)
        team.run_single(other.program)
        other.check()


def test_team_worker_that_wakes_after_a_step_leaves_its_program_alone(best_kernels: Any, rng: np.random.Generator) -> None:
    """The program may have been changed by then: nothing of it must run before its next step."""
    may_start = threading.Event()

    class LateTeam(Team):
        def _work(self, number: int) -> None:
            may_start.wait()
            super()._work(number)

    best_kernels.probes.prepare(["probe.chain", "probe.chain.commit"])
    team = LateTeam(best_kernels.library, 2, scratch_bytes=1 << 16, max_ops=MAX_OPS)
    try:
        chain = Chain(best_kernels, 2)
        chain.fill(rng, blocks=1)
        team.run(chain.program)
        chain.check()
        assert team.is_free(chain.program)
        chain.fill(rng, blocks=MAX_BLOCKS)
        may_start.set()
        time.sleep(0.1)
        assert not chain.commits.any()
        team.run_single(chain.program)
        chain.check()
    finally:
        may_start.set()
        team.close()


def test_team_with_more_threads_than_cores_never_mixes_steps(best_kernels: Any, rng: np.random.Generator) -> None:
    """Hundreds of tiny steps; programs are changed as soon as they are free, as the engine does."""
    with _team(best_kernels, 7) as team:
        chains = [Chain(best_kernels, num_ops) for num_ops in (1, 2, 5, 8, MAX_OPS)]
        for _ in range(600):
            free = [chain for chain in chains if team.is_free(chain.program)]
            if not free:
                chains.append(Chain(best_kernels, MAX_OPS))
                free = chains[-1:]
            chain = free[int(rng.integers(0, len(free)))]
            chain.fill(rng, delay=int(rng.integers(0, 2)) * 300)
            team.run(chain.program)
            chain.check()
        assert len(chains) <= 5 + 7  # a thread can hold one program back, no more


def test_team_at_rest_costs_nothing(best_kernels: Any, rng: np.random.Generator) -> None:
    with _team(best_kernels, 4) as team:
        chain = Chain(best_kernels, MAX_OPS)
        chain.fill(rng)
        team.run_single(chain.program)
        time.sleep(0.05 + SPIN_US * 1e-6)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.01
        team.run_single(chain.program)  # and it wakes
        chain.check(2)


def test_team_starts_a_step_within_20_microseconds(best_kernels: Any, rng: np.random.Generator) -> None:
    """From the call to the end of a step of one tiny block: the fastest of many, for the machine may be busy."""
    for threads in (1, 2):
        with _team(best_kernels, threads) as team:
            chain = Chain(best_kernels, 1)
            chain.fill(rng, blocks=1)
            fastest_us = np.inf
            for _ in range(300):
                start = time.perf_counter()
                team.run(chain.program)
                fastest_us = min(fastest_us, (time.perf_counter() - start) * 1e6)
                _wait_until(lambda: team.is_free(chain.program))  # noqa: B023
            assert fastest_us < 20


def test_team_closes_while_it_sleeps_and_more_than_once(best_kernels: Any) -> None:
    with _team(best_kernels, 4) as team:
        time.sleep(0.02)  # all asleep
        start = time.monotonic()
        team.close()
        team.close()
        assert time.monotonic() - start < 5
        assert not any(worker.is_alive() for worker in team._workers)


def test_team_closes_right_after_a_step(best_kernels: Any, rng: np.random.Generator) -> None:
    for _ in range(20):
        with _team(best_kernels, 3) as team:
            chain = Chain(best_kernels, 2)
            chain.fill(rng)
            team.run(chain.program)
        chain.check()


@pytest.mark.parametrize("start", [2**31 - 4, 2**32 - 4])
def test_team_runs_on_beyond_the_serials_a_word_can_hold(best_kernels: Any, rng: np.random.Generator, start: int) -> None:
    """Words carry a step's serial in 31 bits, which a server of 500 steps a second uses up in fifty days."""
    with _team(best_kernels, 3) as team:
        team._serial = start
        chain = Chain(best_kernels, 4)
        for _ in range(8):
            chain.fill(rng)
            team.run_single(chain.program)
            chain.check()
        assert team._serial == start + 8
