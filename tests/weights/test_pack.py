"""Packing is a permutation of bits: checked against the slow packer, which places one weight at a time."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import ModelFileError
from headrace.kernels import reference_packed
from headrace.kernels.packed import PACKED, ROWS, packed_bytes
from headrace.weights.formats import ALL_FORMATS, FORMATS, TensorFormat, dequantise
from headrace.weights.pack import pack_rows

LARGEST_GROWTH = 1.02  # bytes of a packed weight over those of its GGUF form, whole groups of 16 rows


def _finite_blocks(tensor_format: TensorFormat, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bits, but no scale or weight that is infinite or not a number."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, tensor_format.row_bytes(columns)), dtype=np.uint8)
    if not tensor_format.quantised:
        width = tensor_format.block_bytes
        raw.reshape(-1, width)[:, -1] &= 0xBF  # one bit of the exponent is clear
        return raw
    blocks = raw.reshape(-1, tensor_format.block_bytes)
    for offset in _half_offsets(tensor_format.name):
        blocks[:, offset + 1] &= 0xBF
    return raw


def _half_offsets(name: str) -> tuple[int, ...]:
    """Where a block's float16 values lie."""
    if name in {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}:
        return 0, 2
    return {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(name, (0,))


def _pack(tensor_format: TensorFormat, raw: np.ndarray, columns: int, order: np.ndarray | None = None) -> np.ndarray:
    rows = len(raw) if order is None else len(order)
    out = np.full(packed_bytes(PACKED[tensor_format.name], rows, columns), 0xA5, np.uint8)
    pack_rows(tensor_format, raw, columns, out, order)
    return out


@pytest.mark.parametrize("tensor_format", ALL_FORMATS, ids=lambda each: each.name)
def test_packed_matrix_equals_the_slow_packer(tensor_format: TensorFormat) -> None:
    rows, columns = 21, 2 * PACKED[tensor_format.name].unit_columns  # the second group is padded
    raw = _finite_blocks(tensor_format, rows, columns)
    expected = reference_packed.pack_matrix(tensor_format.name, raw, columns)
    assert np.array_equal(_pack(tensor_format, raw, columns), expected)


@pytest.mark.parametrize("tensor_format", ALL_FORMATS, ids=lambda each: each.name)
def test_packed_matrix_holds_the_values_of_the_gguf_rows_in_order(tensor_format: TensorFormat) -> None:
    rows, columns = 32, PACKED[tensor_format.name].unit_columns
    raw = _finite_blocks(tensor_format, rows, columns, seed=1)
    order = np.random.default_rng(2).permutation(rows)
    packed = _pack(tensor_format, raw, columns, order)
    values = reference_packed.unpack_matrix(tensor_format.name, packed, rows, columns)
    assert np.array_equal(values, dequantise(tensor_format, raw)[order])


@pytest.mark.parametrize("tensor_format", ALL_FORMATS, ids=lambda each: each.name)
def test_packed_weights_take_no_more_bytes_than_in_gguf(tensor_format: TensorFormat) -> None:
    columns = 1024
    packed = packed_bytes(PACKED[tensor_format.name], 4 * ROWS, columns)
    assert packed <= LARGEST_GROWTH * 4 * ROWS * tensor_format.row_bytes(columns)


def test_packing_of_many_rows_equals_packing_of_few() -> None:
    tensor_format = FORMATS["Q4_1"]
    raw = _finite_blocks(tensor_format, 256 * ROWS + 40, 32)  # more groups than are packed at once
    whole = _pack(tensor_format, raw, 32)
    parts = [_pack(tensor_format, raw[start : start + 160], 32) for start in range(0, len(raw), 160)]
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("tensor_format", ALL_FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize("exponent_of", ["infinity", "nan"])
def test_value_that_is_not_finite_is_refused(tensor_format: TensorFormat, exponent_of: str) -> None:
    columns = PACKED[tensor_format.name].unit_columns
    kind = {"F32": np.float32, "BF16": np.uint16}.get(tensor_format.name, np.float16)
    value = {"infinity": -np.inf, "nan": np.nan}[exponent_of]
    if tensor_format.name == "BF16":
        value = {"infinity": 0xFF80, "nan": 0x7FC1}[exponent_of]
    for offset in _half_offsets(tensor_format.name):
        raw = _finite_blocks(tensor_format, 17, columns)
        width = np.dtype(kind).itemsize
        raw[16, offset : offset + width] = np.array([value], kind).view(np.uint8)
        with pytest.raises(ModelFileError, match=f"{tensor_format.name} weight or scale is not finite"):
            _pack(tensor_format, raw, columns)


def test_columns_that_are_no_multiple_of_a_unit_are_refused() -> None:
    with pytest.raises(ModelFileError, match="16 columns cannot be packed"):
        pack_rows(FORMATS["F32"], np.zeros((16, 64), np.uint8), 16, np.zeros(0, np.uint8))
