"""The token of the largest logit of each row, against the twin, on every level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.kernels import reference
from headrace.kernels.fields import choose as fields_of_choose
from headrace.kernels.tables import TOKEN_ID, TOKEN_WORDS

KERNELS = ["find", "find.commit", "choose", "choose.commit"]


def _run(
    kernels: Any, logits: np.ndarray, part: int, places: list[int] | None = None, **how: bool
) -> tuple[list[int], list[int]]:
    """The ids chosen for rows of logits, and what the ids in the next step's records of tokens became.

    `places`: which token of a step each row is of; by default they have the same order.
    """
    rows, count = logits.shape
    num_parts = -(-count // part)
    record_words = fields_of_choose.part_bytes(part) // 8
    chosen, following = kernels.zeros(rows, np.int64), kernels.zeros((rows, TOKEN_WORDS), np.int64)
    common = {
        "logits": kernels.array(logits),  # guarded: a read beyond the end would find no logit
        "stride": 4 * count,
        "count": count,
        "part": part,
        "num_parts": num_parts,
        "parts": kernels.zeros((rows, num_parts, record_words), np.int64),
        "chosen": chosen,
        "next": following,
        "row_table": kernels.array(np.array(range(rows) if places is None else places, np.int64)),
    }
    kernels.run("find", "find.commit", fields_of_choose, num_blocks=rows * num_parts, **how, **common)
    kernels.run("choose", "choose.commit", fields_of_choose, num_blocks=rows, **how, **common)
    records = np.array(following)
    assert not records[:, : TOKEN_ID // 8].any()
    return chosen.tolist(), records[:, TOKEN_ID // 8].tolist()


def test_each_row_has_its_token_which_goes_to_the_row_of_the_next_step(kernels: Any, rng: np.random.Generator) -> None:
    logits = rng.normal(size=(3, 100)).astype(np.float32)
    logits[1, 7] = np.nan
    expected = [reference.chosen_token(row) for row in logits]
    chosen, following = _run(kernels, logits, 64, [2, 0, 1])
    assert chosen == expected
    assert expected[1] == -1
    assert following == [0, expected[2], expected[0]]


@pytest.mark.parametrize("count", [1, 15, 16, 17, 63, 64, 65, 100, 1000, 49152])
@pytest.mark.parametrize("part", [64, 128, 3072])
def test_chosen_token_equals_twin(kernels: Any, rng: np.random.Generator, count: int, part: int) -> None:
    if count // part > 400:
        part = 4096
    logits = (rng.normal(size=(3, count)) * 5 - 3).astype(np.float32)
    expected = [reference.chosen_token(row) for row in logits]
    assert _run(kernels, logits, part) == (expected, expected)
    assert _run(kernels, logits, part, repeat=True) == (expected, expected)


def test_chosen_token_is_the_lowest_of_equals(kernels: Any) -> None:
    logits = np.full((3, 200), -2.0, np.float32)
    logits[1, [37, 38, 90]] = 1.0
    logits[2, [70, 150]] = 0.0
    logits[2, [65, 66]] = -0.0
    assert _run(kernels, logits, 64) == ([0, 37, 65], [0, 37, 65])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 15, 31, 63, 64, 79])
def test_chosen_token_tells_that_a_logit_is_not_finite(kernels: Any, rng: np.random.Generator, bad: float, where: int) -> None:
    logits = rng.normal(size=(2, 80)).astype(np.float32)
    logits[0, where] = bad
    assert reference.chosen_token(logits[0]) == fields_of_choose.NOT_FINITE
    sound = reference.chosen_token(logits[1])
    assert _run(kernels, logits, 64) == ([-1, sound], [0, sound])  # and the step that follows reads a row that is there
