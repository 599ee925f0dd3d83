"""Candidates among logits, against the twin, on every level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.kernels import reference
from headrace.kernels.fields import reduce as fields_of_reduce

KERNELS = ["reduce.candidates"]
# each e^x is off by 2^-22 (`test_math.py`) and 16 of them are added in float32; their sum is taken in float64
SUM_RELATIVE = 2.0**-22 + 6 * 2.0**-24


def _run(kernels: Any, logits: np.ndarray, margin: float, capacity: int) -> reference.Candidates:
    values = kernels.array(logits)  # guarded: a read beyond the end would find no logit, a write would be seen
    ids, kept, out = kernels.zeros(capacity, np.int64), kernels.zeros(capacity), kernels.zeros(4, np.int64)
    kernels.run(
        "reduce.candidates",
        "",
        fields_of_reduce,
        values=values,
        count=len(logits),
        margin=margin,
        capacity=capacity,
        ids=ids,
        kept=kept,
        out=out,
    )
    largest, total = out[:1].view(np.float32)
    found = int(out[2])
    count = min(found, capacity)
    assert not ids[count:].any()
    return reference.Candidates(float(largest), float(total), ids[:count].copy(), kept[:count].copy(), found, bool(out[3]))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100, 1000, 49152])
@pytest.mark.parametrize(("margin", "capacity"), [(0.0, 4), (3.0, 64), (3.0, 2), (1e9, 2000)])
def test_candidates_equal_twin(kernels: Any, rng: np.random.Generator, count: int, margin: float, capacity: int) -> None:
    logits = (rng.normal(size=count) * 5 - 3).astype(np.float32)
    logits[rng.integers(0, count)] = logits.max()  # two equals, now and then
    result, twin = _run(kernels, logits, margin, capacity), reference.candidates(logits, margin, capacity)
    assert result.largest == twin.largest
    assert abs(result.sum_exp - twin.sum_exp) <= SUM_RELATIVE * twin.sum_exp
    assert result.ids.tolist() == twin.ids.tolist()
    assert result.values.tobytes() == twin.values.tobytes()
    assert result.num_found == twin.num_found
    assert result.is_finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 15, 31, 32, 39])
def test_candidates_tell_that_a_logit_is_not_finite(kernels: Any, rng: np.random.Generator, bad: float, where: int) -> None:
    logits = rng.normal(size=40).astype(np.float32)
    logits[where] = bad
    assert not _run(kernels, logits, 1.0, 8).is_finite
