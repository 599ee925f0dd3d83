"""Residual sums, RMS norms and quantisation of rows, against the twin, on every level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from headrace.kernels import reference
from headrace.kernels.fields import rows as fields_of_rows
from headrace.kernels.packed import quantised_row_bytes
from headrace.kernels.program import GELU, SILU

KERNELS = ["rows", "rows.commit"]
TOKENS = 7
EPSILON = 1e-5
ROUNDING = 2.0**-24


def _norm_roundings(columns: int) -> float:
    """A norm's relative error in roundings: half of the mean square's (columns / 16 additions in a lane, a product
    each, four across lanes, a division, a sum with epsilon), then square root, reciprocal and two products."""
    return (columns / 16 + 8) / 2 + 4


@dataclass
class Result:
    """What one operation wrote."""

    sums: np.ndarray
    quantised: np.ndarray
    floats: np.ndarray


def _run(
    kernels: Any,
    x: np.ndarray,
    *,
    table: list[int] | None = None,
    want_quantised: bool = True,
    want_floats: bool = True,
    block_tokens: int = 3,
    repeat: bool = False,
    **arrays: Any,
) -> Result:
    columns = x.shape[1]
    tokens = len(x) if table is None else len(table)
    quantised = -(-quantised_row_bytes(columns) // 64) * 64 if want_quantised else 0
    floats = 4 * columns if want_floats else 0
    out = kernels.zeros((tokens, quantised + floats), np.uint8)
    sums = kernels.zeros((tokens, columns + 16))
    values = {name: kernels.array(value) if isinstance(value, np.ndarray) else value for name, value in arrays.items()}
    if "addend" in values:
        values["addend_stride"] = values["addend"].strides[0]
    kernels.run(
        "rows",
        "rows.commit",
        fields_of_rows,
        -(-tokens // block_tokens),
        repeat=repeat,
        input=kernels.array(x),
        input_stride=4 * columns,
        columns=columns,
        tokens=tokens,
        block_tokens=block_tokens,
        row_table=0 if table is None else kernels.array(table, np.int64),
        epsilon=EPSILON,
        sum=sums,
        sum_stride=sums.strides[0],
        output=out,
        output_stride=out.strides[0],
        quantised=quantised,
        floats=floats,
        **values,
    )
    assert not sums[:, columns:].any()
    return Result(sums[:, :columns].copy(), out[:, :quantised].copy(), out[:, quantised:].copy().view(np.float32))


def _quantised_as_twin(result: Result) -> bool:
    twin = reference.quantise(result.floats).encode()
    return result.quantised[:, : twin.shape[1]].tobytes() == twin.tobytes()


@pytest.mark.parametrize("columns", [64, 576, 2048])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("addend", ["none", "plain", "normed"])
def test_rows_equal_twin(kernels: Any, rng: np.random.Generator, columns: int, with_norm: bool, addend: str) -> None:
    x, other = (rng.normal(size=(TOKENS, columns)).astype(np.float32) * 3 for _ in range(2))
    weight, post = (rng.normal(size=columns).astype(np.float32) for _ in range(2))
    arrays: dict[str, np.ndarray] = {"weight": weight} if with_norm else {}
    arrays |= {"addend": other} if addend != "none" else {}
    arrays |= {"addend_norm": post} if addend == "normed" else {}
    result = _run(kernels, x, **arrays)
    sums, _ = reference.rows(x, **arrays, epsilon=EPSILON)
    added = np.abs(sums - x)
    assert (np.abs(result.sums - sums) <= ROUNDING * (np.abs(sums) + _norm_roundings(columns) * added)).all()
    # against the sums as they were rounded, so that only the norm's own error counts
    expected = reference.rms_norm(result.sums, weight, EPSILON) if with_norm else result.sums
    assert (np.abs(result.floats - expected) <= _norm_roundings(columns) * ROUNDING * np.abs(expected)).all()
    assert _quantised_as_twin(result)


def test_rows_do_not_depend_on_blocks_or_repetition(kernels: Any, rng: np.random.Generator) -> None:
    x, addend = (rng.normal(size=(TOKENS, 576)).astype(np.float32) for _ in range(2))
    weight = rng.normal(size=576).astype(np.float32)
    whole = _run(kernels, x, addend=addend, weight=weight, block_tokens=64)
    for block_tokens, repeat in [(1, False), (2, True), (5, True)]:
        cut = _run(kernels, x, addend=addend, weight=weight, block_tokens=block_tokens, repeat=repeat)
        assert cut.quantised.tobytes() == whole.quantised.tobytes()
        assert cut.floats.tobytes() == whole.floats.tobytes()
        assert cut.sums.tobytes() == whole.sums.tobytes()


def test_rows_give_only_what_is_wanted(kernels: Any, rng: np.random.Generator) -> None:
    x = rng.normal(size=(TOKENS, 320)).astype(np.float32)
    weight = rng.normal(size=320).astype(np.float32)
    both = _run(kernels, x, weight=weight)
    assert _run(kernels, x, weight=weight, want_floats=False).quantised.tobytes() == both.quantised.tobytes()
    assert _run(kernels, x, weight=weight, want_quantised=False).floats.tobytes() == both.floats.tobytes()


def test_rows_are_picked_by_a_table(kernels: Any, rng: np.random.Generator) -> None:
    x, addend = (rng.normal(size=(TOKENS, 64)).astype(np.float32) for _ in range(2))
    result = _run(kernels, x, addend=addend, table=[5, 0, 5])
    assert result.sums.tobytes() == (x + addend)[[5, 0, 5]].tobytes()


@pytest.mark.parametrize("function", ["silu", "gelu"])
def test_rows_combine_gate_and_up(kernels: Any, rng: np.random.Generator, function: str) -> None:
    gate, up = (rng.normal(size=(TOKENS, 96)).astype(np.float32) * 4 for _ in range(2))
    result = _run(kernels, gate, addend=up, combine={"silu": SILU, "gelu": GELU}[function])
    expected = getattr(reference, function)(gate) * up
    # `test_math.py` bounds the function by 4 roundings of its argument; then there is the product
    assert (np.abs(result.floats - expected) <= 5 * ROUNDING * np.abs(gate * up)).all()
    assert _quantised_as_twin(result)


def test_quantise_handles_tiny_and_huge_values(kernels: Any) -> None:
    blocks = [0.0, 1e-45, 1e-38, 3e-37, 1e-30, 1.0, 1e30, 1.7e38]
    x = np.repeat(np.float32(blocks), 32)[np.newaxis] * np.resize(np.float32([1, -1, 0.5, 0.25, -0.75]), 256)
    result = _run(kernels, x.astype(np.float32))
    assert _quantised_as_twin(result)


def test_quantise_rounds_half_to_even(kernels: Any) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    assert _run(kernels, x).quantised[0, :6].view(np.int8).tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantise_marks_a_row_that_is_not_finite(kernels: Any, rng: np.random.Generator, bad: float) -> None:
    x = rng.normal(size=(3, 128)).astype(np.float32)
    clean = _run(kernels, x).quantised
    for column in (32, 47, 48, 63):
        spoilt = x.copy()
        spoilt[1, column] = bad
        result = _run(kernels, spoilt).quantised
        assert np.isnan(reference.QuantisedRows.decode(result, 128).scale[1]).all()
        assert result[[0, 2]].tobytes() == clean[[0, 2]].tobytes()


def test_norm_carries_not_a_number(kernels: Any, rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 128)).astype(np.float32)
    x[1, 7] = np.nan
    result = _run(kernels, x, weight=np.ones(128, np.float32))
    assert np.isnan(result.floats[1]).all()
    assert np.isnan(reference.QuantisedRows.decode(result.quantised, 128).scale[1]).all()
    assert np.isfinite(result.floats[[0, 2]]).all()
