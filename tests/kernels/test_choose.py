"""The token of the largest logit, against the twin, on every level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.kernels import reference
from headrace.kernels.fields import choose as fields_of_choose

KERNELS = ["find", "find.commit", "choose", "choose.commit"]


def _run(kernels: Any, logits: np.ndarray, part: int) -> tuple[int, int]:
    """The chosen id, and what the next token's id became."""
    num_parts = -(-len(logits) // part)
    parts, chosen, following = kernels.zeros(2 * num_parts, np.int64), kernels.zeros(1, np.int64), kernels.zeros(1, np.int64)
    values = kernels.array(logits)  # guarded: a read beyond the end would find no logit
    kernels.run(
        "find", "find.commit", fields_of_choose, num_blocks=num_parts, logits=values, count=len(logits), part=part, parts=parts
    )
    kernels.run("choose", "choose.commit", fields_of_choose, parts=parts, num_parts=num_parts, chosen=chosen, next=following)
    return int(chosen[0]), int(following[0])


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100, 1000, 49152])
@pytest.mark.parametrize("part", [16, 64, 3072])
def test_chosen_token_equals_twin(kernels: Any, rng: np.random.Generator, count: int, part: int) -> None:
    if count // part > 400:
        part = 4096
    logits = (rng.normal(size=count) * 5 - 3).astype(np.float32)
    expected = reference.chosen_token(logits)
    assert _run(kernels, logits, part) == (expected, expected)


def test_chosen_token_is_the_lowest_of_equals(kernels: Any) -> None:
    logits = np.full(100, -2.0, np.float32)
    assert _run(kernels, logits, 32) == (0, 0)
    logits[[37, 38, 90]] = 1.0
    assert _run(kernels, logits, 32) == (37, 37)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 15, 31, 32, 39])
def test_chosen_token_tells_that_a_logit_is_not_finite(kernels: Any, rng: np.random.Generator, bad: float, where: int) -> None:
    logits = rng.normal(size=40).astype(np.float32)
    logits[where] = bad
    assert reference.chosen_token(logits) == -1
    assert _run(kernels, logits, 16) == (-1, 0)  # and the step that follows reads a row that is there
