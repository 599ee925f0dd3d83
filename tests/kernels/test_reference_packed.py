"""The slow packing twin: against blocks built by hand, and against the dequantiser of `weights`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.kernels import reference_packed
from headrace.kernels.packed import PACKED, ROWS, groups, packed_bytes
from headrace.kernels.reference_packed import Fields
from headrace.weights.formats import FORMATS, dequantise

MakeFields = Callable[[str, int, int], Fields]
ROWS_OF_TEST, COLUMNS_OF_TEST = 21, 512  # the last group is not full; two units of 256 columns


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def test_pack_matrix_holds_what_the_blocks_hold(packed_name: str, rng: np.random.Generator) -> None:
    raw = rng.integers(0, 256, (ROWS_OF_TEST, FORMATS[packed_name].row_bytes(COLUMNS_OF_TEST))).astype(np.uint8)
    packed = reference_packed.pack_matrix(packed_name, raw, COLUMNS_OF_TEST)
    assert packed.size == packed_bytes(PACKED[packed_name], ROWS_OF_TEST, COLUMNS_OF_TEST)
    with np.errstate(all="ignore"):  # random scales are now and then infinite or not a number
        weights = reference_packed.unpack_matrix(packed_name, packed, ROWS_OF_TEST, COLUMNS_OF_TEST)
        np.testing.assert_array_equal(weights, dequantise(FORMATS[packed_name], raw))


def test_packed_fields_come_back_unchanged(packed_name: str, make_fields: MakeFields) -> None:
    fields = make_fields(packed_name, ROWS_OF_TEST, COLUMNS_OF_TEST)
    packed = reference_packed.pack_fields(packed_name, fields)
    back = reference_packed.unpack_fields(packed_name, packed, ROWS_OF_TEST, COLUMNS_OF_TEST)
    assert all(_same_bits(getattr(back, part), getattr(fields, part)) for part in ("q", "scales", "d", "m"))


def test_packed_padding_rows_are_zero(packed_name: str, make_fields: MakeFields) -> None:
    fields = make_fields(packed_name, ROWS_OF_TEST, COLUMNS_OF_TEST)
    packed = reference_packed.pack_fields(packed_name, fields)
    padded = groups(ROWS_OF_TEST) * ROWS
    weights = reference_packed.unpack_matrix(packed_name, packed, padded, COLUMNS_OF_TEST)
    assert np.isfinite(weights).all()
    assert not weights[ROWS_OF_TEST:].any()


@pytest.mark.parametrize("name", PACKED)
def test_packed_form_never_has_more_bytes_than_gguf(name: str) -> None:
    layout, tensor_format = PACKED[name], FORMATS[name]
    assert layout.unit_bytes == ROWS * tensor_format.row_bytes(layout.unit_columns)


def test_q4_1_unit_built_by_hand() -> None:
    """Row 3 of a group: weight i is i % 16 for the low nibbles, 15 - i % 16 for the high ones, d = 2, m = -1."""
    block = np.zeros((4, 20), np.uint8)
    block[3, :2] = np.array([2.0], np.float16).view(np.uint8)
    block[3, 2:4] = np.array([-1.0], np.float16).view(np.uint8)
    block[3, 4:] = [i | (15 - i) << 4 for i in range(16)]
    packed = reference_packed.pack_matrix("Q4_1", block, 32)
    assert packed.size == 320
    for vector in range(4):
        row = packed[64 * vector + 4 * 3 : 64 * vector + 4 * 4]
        assert row.tolist() == [c | (15 - c) << 4 for c in range(4 * vector, 4 * vector + 4)]
    assert packed[256 + 6 : 256 + 8].view(np.float16).tolist() == [2.0]
    assert packed[288 + 6 : 288 + 8].view(np.float16).tolist() == [-1.0]
    weights = reference_packed.unpack_matrix("Q4_1", packed, 4, 32)[3]
    assert weights.tolist() == [2.0 * i - 1 for i in range(16)] + [2.0 * (15 - i) - 1 for i in range(16)]


def test_q6_k_unit_built_by_hand() -> None:
    """Row 1: d = 1; weight 0 has q = 63 and scale -2, weight 17 has q = 16 and scale 3, all others q = 32 or scale 0."""
    block = np.zeros((2, 210), np.uint8)
    low, high, scales = block[1, :128], block[1, 128:192], block[1, 192:208].view(np.int8)
    low[0], high[0] = 15, 3  # q = 15 | 3 << 4
    low[17], high[17] = 0, 1  # q = 16
    scales[0], scales[1] = -2, 3
    high[1:16] = 2  # q = 32: zero
    high[16], high[18:32] = 2, 2
    block[1, 208:] = np.array([1.0], np.float16).view(np.uint8)
    weights = reference_packed.unpack_matrix("Q6_K", reference_packed.pack_matrix("Q6_K", block, 256), 2, 256)
    expected = np.zeros((2, 256), np.float32)
    expected[1, 0], expected[1, 17] = (63 - 32) * -2, (16 - 32) * 3
    np.testing.assert_array_equal(weights, expected)


def test_q3_k_scales_built_by_hand() -> None:
    """Scale 5 = 33 (low nibble of byte 5, upper bits in byte 9), scale 14 = 62 (high nibble of byte 6, bits 6-7 of byte 10)."""
    scales = np.zeros((1, 1, 12), np.uint8)
    scales[0, 0, 5], scales[0, 0, 9] = 33 & 15, 33 >> 4 << 2
    scales[0, 0, 6], scales[0, 0, 10] = (62 & 15) << 4, 62 >> 4 << 6
    half = np.ones((1, 1), np.float16)
    fields = Fields(np.zeros((1, 256), np.uint8), scales, half, half[:, :0])
    signed, minimums = reference_packed.sub_block_scales("Q3_K", fields)
    assert signed[0].tolist() == [-32] * 5 + [1] + [-32] * 8 + [30, -32]
    assert not minimums.any()
