"""Times of operations: taken from stamps, and adding up to the time of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace.engine.accounts import Account, ticks_between, timed_rows
from headrace.model.step import SequenceStep
from tiny.models import TinySpec

if TYPE_CHECKING:
    from conftest import TinyModels

# gate and up, queries and keys run beside one another
SPEC = TinySpec(formats={"ffn_up": "F16", "attn_k": "F16"})


def test_ticks_of_operations_in_turn_are_differences_of_stamps() -> None:
    assert ticks_between(np.array([110, 130, 135, 100])).tolist() == [10, 20, 5]


def test_ticks_of_operations_beside_one_another_count_no_time_twice() -> None:
    # the second was complete before the first, the third after both
    assert ticks_between(np.array([150, 120, 170, 100])).tolist() == [50, 0, 20]


def test_ticks_of_several_steps_are_taken_apart() -> None:
    stamps = np.array([[110, 130, 100], [205, 206, 200]])
    assert ticks_between(stamps).tolist() == [[10, 20], [5, 1]]


@pytest.mark.parametrize("threads", [1, 2])
def test_ticks_of_a_real_step_add_up_to_its_length(tiny_models: TinyModels, threads: int) -> None:
    model = tiny_models.load(SPEC, threads=threads)
    sequence = model.sequence()
    sequence.append([1, 2, 3])
    stamps = model._executor.last.stamps[0]
    ticks = ticks_between(stamps)
    assert (ticks >= 0).all()
    assert ticks.sum() == stamps[:-1].max() - stamps[-1]
    rows = timed_rows(model._booking_ledger, [SequenceStep(3, chosen=True)], stamps, model._executor.team.ticks_per_us)
    assert sum(row.time_us or 0 for row in rows) == pytest.approx(ticks.sum() / model._executor.team.ticks_per_us)
    sequence.close()


def test_account_sums_calls_bytes_and_time_by_class(tiny_models: TinyModels) -> None:
    model = tiny_models.load(SPEC)
    sequence = model.sequence()
    account = Account(model._booking_ledger, model._booking_graph, model._executor.team.ticks_per_us, "decode")
    sequence.accounts.append(account)
    spans = []
    for token in range(300):  # more steps than are buffered
        sequence.append([token % 250])
        stamps = model._executor.last.stamps[0]
        spans.append(int(stamps[:-1].max() - stamps[-1]))
    sequence.close()
    classes = account.operations()
    assert [each.operation for each in classes][:4] == ["embed f32", "attention_norm f32", "qkv f32", "qkv f16"]
    assert {each.phase for each in classes} == {"decode"}
    by_name = {each.operation: each for each in classes}
    assert by_name["qkv f32"].calls == 300 * SPEC.layers * 2
    assert by_name["logits f32"].macs == 300 * SPEC.vocabulary * SPEC.embedding
    assert sum(each.total_bytes for each in classes) == account.totals.total_bytes
    assert sum(each.macs for each in classes) == account.totals.macs
    assert account.totals.steps == 300
    seconds = sum(spans) / model._executor.team.ticks_per_us / 1e6
    assert sum(each.time_s for each in classes) == pytest.approx(seconds)
