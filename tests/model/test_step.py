"""The ledger's arithmetic; that its bytes are those the kernels touch is in tests/engine/test_ledger_counted.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.kernels.page_formats import F16, Q4, Q8, used_bytes
from headrace.model.step import (
    MAX_STEP_TOKENS,
    PAGE_TOKENS,
    LedgerTotals,
    SequenceStep,
    StepLedger,
    states_buffer_bytes,
)
from tiny.models import TinySpec

if TYPE_CHECKING:
    from conftest import Plan

SPECS = {
    "llama": TinySpec(format="Q8_0", formats={"blk.1.": "F16"}),
    "gemma3": TinySpec("gemma3", format="F16", layers=7, window=20),
}

_parts = st.builds(
    lambda new, past, outputs, formats: SequenceStep(new, past, min(outputs, new), page_formats=tuple(formats)),
    st.integers(1, 40),
    st.integers(0, 2000),
    st.integers(1, 4),
    st.lists(st.sampled_from([F16, Q8, Q4]), max_size=8),
)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("threads", [1, 4])
def test_ledger_totals_equal_the_sum_of_its_rows(make_plan: Callable[..., Plan], name: str, threads: int) -> None:
    plan = make_plan(SPECS[name])
    ledger = StepLedger(plan.config, plan.graph, threads)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(_parts, min_size=1, max_size=6))
    def check(batch: list[SequenceStep]) -> None:
        rows, totals = ledger.rows(batch), ledger.totals(batch)
        assert totals.steps == 1
        for field in fields(LedgerTotals):
            if field.name != "steps":
                assert getattr(totals, field.name) == sum(getattr(row, field.name) for row in rows), field.name
        assert totals.total_bytes == sum(row.total_bytes for row in rows)

    check()


def test_ledger_of_a_decoding_step_counts_each_weight_once(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(TinySpec())
    config = plan.config
    totals = StepLedger(config, plan.graph, 1).totals([SequenceStep(1, 99)])
    matrices = [matrix for name, matrix in plan.matrices.matrices.items() if name != "embedding"]
    logits = plan.matrices.matrices["embedding"]  # tied
    weights = sum(matrix.rows * matrix.columns for matrix in [*matrices, logits])
    attention = 2 * len(config.layers) * config.heads * config.head_width * 100
    assert totals.macs == weights + attention
    # padded to groups of 16 rows; one row of the embedding; norm weights
    vectors = 4 * sum(plan.matrices.vectors.values())
    assert totals.weight_bytes == sum(matrix.num_bytes for matrix in [*matrices, logits]) + 4 * 64 + vectors
    key_and_value = len(config.layers) * config.kv_heads * config.head_width * 4
    assert totals.kv_write_bytes == key_and_value
    assert totals.kv_read_bytes == 128 * key_and_value  # 100 tokens lie in 4 pages of 32


def test_ledger_of_a_window_reads_its_pages_only(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(TinySpec("gemma3", layers=6, window=33))
    rows = StepLedger(plan.config, plan.graph, 1).rows([SequenceStep(1, 1000)])
    attention = [row for row in rows if row.operation == "attention"]
    per_token = plan.config.kv_heads * plan.config.head_width * 4
    # positions 968 to 1000 lie in two pages; the sixth layer sees all 32 pages
    assert [row.kv_read_bytes // per_token for row in attention] == [64] * 5 + [1024]
    assert [row.macs // (2 * plan.config.heads * plan.config.head_width) for row in attention] == [33] * 5 + [1001]


def test_ledger_counts_the_bytes_of_each_pages_format(make_plan: Callable[..., Plan]) -> None:
    """1000 tokens of the past lie in 32 pages; a window of 100 sees the last 4 of them."""
    plan = make_plan(TinySpec("gemma3", layers=6, window=100))
    config = plan.config
    f16, q8, q4 = (config.kv_heads * used_bytes(each, config.head_width, PAGE_TOKENS) for each in (F16, Q8, Q4))
    assert f16 > q8 > q4
    formats = (*[Q4] * 20, *[Q8] * 10)  # and f16 from there on
    rows = StepLedger(config, plan.graph, 1).rows([SequenceStep(1, 1000, page_formats=formats)])
    read = [row.kv_read_bytes for row in rows if row.operation == "attention"]
    assert read == [2 * q8 + 2 * f16] * 5 + [20 * q4 + 10 * q8 + 2 * f16]


def test_states_buffer_holds_the_largest_step(make_plan: Callable[..., Plan]) -> None:
    config = make_plan(TinySpec()).config
    assert states_buffer_bytes(config) >= MAX_STEP_TOKENS * config.heads * 4 * (config.head_width + 16)


def test_ledger_totals_add_up() -> None:
    assert LedgerTotals(1, 2, 3, 4, 5, 6) + LedgerTotals(1, 1, 1, 1, 1, 1) == LedgerTotals(2, 3, 4, 5, 6, 7)
