"""Matrix products of every packed format, on every level, against the twin; and the same bits however they are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.kernels import reference, reference_packed
from headrace.kernels.fields import matmul as fields_of_matmul
from headrace.kernels.packed import PACKED, ROWS, groups
from headrace.kernels.program import GELU, NONE, SILU
from headrace.kernels.reference_packed import Fields

MakeFields = Callable[[str, int, int], Fields]

KERNELS = [*(f"matmul:{name}" for name in PACKED), "matmul.commit"]
MATRIX_ROWS = 72  # four groups and a half
GATED_ROWS = 64  # two groups of gates, two of ups
COLUMNS = 512
TOKENS = 19  # two tiles of 8 and one of 3; on other levels other remainders

ROUNDING = 2.0**-24
# A term is rounded when its two scales are multiplied, when its integer sum becomes float32 (more than 24 bits for
# Q6_K), and when it is added; a minimum when its scale, its row's sum and the product are. The terms' own additions,
# each off by at most ROUNDING times the magnitudes, come on top.
TERM_ROUNDINGS = 4
# f(gate) * up is off by at most so many roundings of gate * up: `test_math.py` bounds f by 4, then there is the product.
GATE_ROUNDINGS = 5


def _activations(kernels: Any, name: str, x: np.ndarray) -> tuple[np.ndarray, int]:
    """x [T, K] as the format wants it, and the offset of its records."""
    if PACKED[name].integer_activations:
        return kernels.array(reference.quantise(x).encode()), x.shape[1]
    return kernels.array(x), 0


def _multiply(
    kernels: Any,
    name: str,
    fields: Fields,
    rows: np.ndarray,
    *,
    records: int,
    block_groups: int = 2,
    block_tokens: int = 64,
    activation: int = NONE,
    repeat: bool = False,
) -> np.ndarray:
    """The product of encoded activations [T, bytes] with a matrix, float32 [T, padded N]."""
    num_rows, columns = fields.shape
    tokens = len(rows)
    width = groups(num_rows) * ROWS // (1 if activation == NONE else 2)
    out = kernels.zeros((tokens, width))
    out[:] = np.nan
    kernels.run(
        f"matmul:{name}",
        "matmul.commit",
        fields_of_matmul,
        -(-groups(num_rows) // block_groups) * -(-tokens // block_tokens),
        repeat=repeat,
        weights=kernels.array(reference_packed.pack_fields(name, fields)),
        groups=groups(num_rows),
        units=columns // PACKED[name].unit_columns,
        tokens=tokens,
        input=rows,
        input_stride=rows.strides[0],
        records=records,
        output=out,
        output_stride=out.strides[0],
        block_groups=block_groups,
        block_tokens=block_tokens,
        activation=activation,
    )
    return out


def _twin(name: str, fields: Fields, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values [T, N] and how far a kernel's may be from them."""
    if PACKED[name].integer_activations:
        product = reference.matmul(name, fields, reference.quantise(x))
    else:
        product = reference.matmul_floats(name, fields, x)
    return product.values, (product.num_terms + TERM_ROUNDINGS) * ROUNDING * product.magnitudes


def _random_rows(rng: np.random.Generator, tokens: int) -> np.ndarray:
    x = rng.normal(size=(tokens, COLUMNS)).astype(np.float32)
    x[:, 64:96] = 0  # a block of zeros has no scale
    return x * rng.uniform(0.01, 10, (tokens, 1)).astype(np.float32)


def test_matmul_equals_twin(kernels: Any, packed_name: str, make_fields: MakeFields, rng: np.random.Generator) -> None:
    fields = make_fields(packed_name, MATRIX_ROWS, COLUMNS)
    x = _random_rows(rng, TOKENS)
    rows, records = _activations(kernels, packed_name, x)
    result = _multiply(kernels, packed_name, fields, rows, records=records)
    values, tolerance = _twin(packed_name, fields, x)
    assert (np.abs(result[:, :MATRIX_ROWS] - values) <= tolerance).all()
    assert not result[:, MATRIX_ROWS:].any()  # the padding rows of the last group


def test_matmul_does_not_depend_on_blocks_or_batch(
    kernels: Any, packed_name: str, make_fields: MakeFields, rng: np.random.Generator
) -> None:
    fields = make_fields(packed_name, MATRIX_ROWS, COLUMNS)
    rows, records = _activations(kernels, packed_name, _random_rows(rng, TOKENS))
    whole = _multiply(kernels, packed_name, fields, rows, records=records)
    cuts = [(1, 1), (1, 64), (3, 5), (4, 8), (100, 100)]
    for block_groups, block_tokens in cuts:
        cut = _multiply(
            kernels, packed_name, fields, rows, records=records, block_groups=block_groups, block_tokens=block_tokens
        )
        assert cut.tobytes() == whole.tobytes()
    for tokens in range(1, 10):  # every number of rows left over after the tiles of any level
        some = _multiply(kernels, packed_name, fields, rows[:tokens], records=records)
        assert some.tobytes() == whole[:tokens].tobytes()
    last = _multiply(kernels, packed_name, fields, rows[TOKENS - 1 :], records=records)
    assert last.tobytes() == whole[TOKENS - 1 :].tobytes()


@pytest.mark.parametrize("extreme", ["largest", "smallest"])
def test_matmul_sums_do_not_overflow(kernels: Any, packed_name: str, make_fields: MakeFields, extreme: str) -> None:
    """Every weight and every activation as large as it can be, all of one sign or of both."""
    fields = make_fields(packed_name, MATRIX_ROWS, COLUMNS)
    fields.q[...] = fields.q.max() if extreme == "largest" else fields.q.min()
    x = np.ones((TOKENS, COLUMNS), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    rows, records = _activations(kernels, packed_name, x)
    result = _multiply(kernels, packed_name, fields, rows, records=records)
    values, tolerance = _twin(packed_name, fields, x)
    assert (np.abs(result[:, :MATRIX_ROWS] - values) <= tolerance).all()


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "F16"])
@pytest.mark.parametrize("function", ["silu", "gelu"])
def test_matmul_gates_pairs_of_groups(
    kernels: Any, name: str, function: str, make_fields: MakeFields, rng: np.random.Generator
) -> None:
    fields = make_fields(name, GATED_ROWS, COLUMNS)
    fields = Fields(fields.q, fields.scales, fields.d * np.float16(0.01), fields.m * np.float16(0.01))
    x = _random_rows(rng, TOKENS)
    rows, records = _activations(kernels, name, x)
    activation = {"silu": SILU, "gelu": GELU}[function]
    plain = _multiply(kernels, name, fields, rows, records=records)
    expected = reference.gate(plain, function)
    pairs = np.abs(plain.astype(np.float64)).reshape(TOKENS, -1, 2, ROWS)
    tolerance = GATE_ROUNDINGS * ROUNDING * (pairs[:, :, 0] * pairs[:, :, 1]).reshape(TOKENS, -1)
    for block_groups, block_tokens in [(2, 64), (4, 3)]:
        result = _multiply(
            kernels,
            name,
            fields,
            rows,
            records=records,
            activation=activation,
            block_groups=block_groups,
            block_tokens=block_tokens,
        )
        assert (np.abs(result - expected) <= tolerance).all()


def test_matmul_block_may_be_repeated(kernels: Any, make_fields: MakeFields, rng: np.random.Generator) -> None:
    fields = make_fields("Q4_1", GATED_ROWS, COLUMNS)
    rows, records = _activations(kernels, "Q4_1", _random_rows(rng, TOKENS))
    once = _multiply(kernels, "Q4_1", fields, rows, records=records, activation=SILU, block_tokens=5)
    twice = _multiply(kernels, "Q4_1", fields, rows, records=records, activation=SILU, block_tokens=5, repeat=True)
    assert once.tobytes() == twice.tobytes()


def test_matmul_carries_not_a_number_of_one_token(
    kernels: Any, packed_name: str, make_fields: MakeFields, rng: np.random.Generator
) -> None:
    fields = make_fields(packed_name, MATRIX_ROWS, COLUMNS)
    x = _random_rows(rng, TOKENS)
    if PACKED[packed_name].integer_activations:
        quantised = reference.quantise(x)
        quantised.scale[3, 1] = np.nan
        rows, records = kernels.array(quantised.encode()), COLUMNS
    else:
        x[3, 40] = np.nan
        rows, records = _activations(kernels, packed_name, x)
    result = _multiply(kernels, packed_name, fields, rows, records=records)
    assert np.isnan(result[3]).all()
    assert np.isfinite(np.delete(result, 3, axis=0)).all()
