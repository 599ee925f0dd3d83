"""One block of each format computed by hand, and parity with the reference dequantiser on random blocks."""

from __future__ import annotations

import dataclasses

import gguf
import numpy as np
import pytest

from headrace.errors import ModelFileError
from headrace.weights import formats
from headrace.weights.formats import ALL_FORMATS, FORMATS, dequantise

ONE, HALF, TWO, QUARTER, MINUS_ONE = (bytes.fromhex(word) for word in ("003c", "0038", "0040", "0034", "00bc"))  # float16


def placed(num_bytes: int, values: dict[int, int], fill: int = 0) -> bytes:
    data = bytearray([fill]) * num_bytes
    for index, value in values.items():
        data[index] = value
    return bytes(data)


# Group 0: scale 2 (byte 0), minimum 4 (byte 4). Group 6: scale 16 * 1 + 3 = 19 (top bits of byte 2, low nibble of byte 10),
# minimum 16 * 2 + 2 = 34 (top bits of byte 6, high nibble of byte 10). All others 0.
SIX_BIT_SCALES = placed(12, {0: 2, 4: 4, 2: 0x40, 6: 0x80, 10: 0x23})

# name: (block, {index: weight}, weight of all others by range of indices)
HAND_BUILT = {
    "F32": (bytes.fromhex("0000c03f"), {0: 1.5}, {}),
    "F16": (bytes.fromhex("003e"), {0: 1.5}, {}),
    "BF16": (bytes.fromhex("20c0"), {0: -2.5}, {}),  # float32 0xc0200000
    # d = 0.5: weights 0 and 16 from 0xf0 are 0.5 * (0 - 8) and 0.5 * (15 - 8); 15 and 31 from 0x9a; 0x88 is zero.
    "Q4_0": (HALF + placed(16, {0: 0xF0, 15: 0x9A}, 0x88), {0: -4.0, 16: 3.5, 15: 1.0, 31: 0.5}, {(0, 32): 0.0}),
    # d = 0.5, m = -1: 0.5 * q - 1.
    "Q4_1": (HALF + MINUS_ONE + placed(16, {0: 0xF0, 15: 0x9A}), {16: 6.5, 15: 4.0, 31: 3.5}, {(0, 32): -1.0}),
    # d = 2, fifth bits of weights 0 and 31: 2 * (17 - 16), 2 * (2 - 16), 2 * (31 - 16); else 2 * (0 - 16).
    "Q5_0": (
        TWO + bytes([1, 0, 0, 0x80]) + placed(16, {0: 0x21, 15: 0xF0}),
        {0: 2.0, 16: -28.0, 31: 30.0},
        {(0, 32): -32.0},
    ),
    # d = 2, m = -1: 2 * 17 - 1, 2 * 2 - 1, 2 * 31 - 1.
    "Q5_1": (
        TWO + MINUS_ONE + bytes([1, 0, 0, 0x80]) + placed(16, {0: 0x21, 15: 0xF0}),
        {0: 33.0, 16: 3.0, 31: 61.0},
        {(0, 32): -1.0},
    ),
    # d = 0.25: signed bytes -128, 127, -1.
    "Q8_0": (QUARTER + placed(32, {0: 0x80, 1: 0x7F, 31: 0xFF}), {0: -32.0, 1: 31.75, 31: -0.25}, {(0, 32): 0.0}),
    # d = 1, dmin = 0.5. All groups: scale 1, minimum 2, so q - 1; group 9: scale 3, minimum 4, so 3 * q - 2.
    # Byte 0 of qs = 0b11100100 holds weights 0, 32, 64, 96; byte 32 + 17 holds weight 128 + 17, of group 9.
    "Q2_K": (
        placed(16, {9: 0x43}, 0x21) + placed(64, {0: 0xE4, 49: 0x02}) + ONE + HALF,
        {0: -1.0, 32: 0.0, 64: 1.0, 96: 2.0, 145: 4.0},
        {(0, 256): -1.0, (144, 160): -2.0},
    ),
    # d = 1. Group 0: scale 16 * 2 + 3 - 32 = 3; group 13: nibble 5 of byte 5, bits 6-7 of byte 9: 16 * 2 + 5 - 32 = 5.
    # Third bits set but for weight 3 (bit 0 of hmask[3]) and weight 211 = 32 * 6 + 19 (bit 6 of hmask[19]): q - 4 = -4 there.
    # Weight 1: 3 * 2. Weight 210 = 128 + 2 * 32 + 18: bits 4-5 of qs[32 + 18], 5 * 3.
    "Q3_K": (
        placed(32, {3: 0xFE, 19: 0xBF}, 0xFF)
        + placed(64, {1: 0x02, 50: 0x30})
        + placed(12, {0: 0x03, 5: 0x50, 8: 0x02, 9: 0x80})
        + ONE,
        {1: 6.0, 3: -12.0, 210: 15.0, 211: -20.0},
        {(0, 256): 0.0},
    ),
    # d = 1, dmin = 0.5: group 0 is 2 * q - 2, group 6 is 19 * q - 17. Weight 200 is the low nibble of qs[96 + 8].
    "Q4_K": (
        ONE + HALF + SIX_BIT_SCALES + placed(128, {5: 0x07, 104: 0x0B}),
        {5: 12.0, 200: 192.0},
        {(0, 256): 0.0, (0, 32): -2.0, (192, 224): -17.0},
    ),
    # As Q4_K, with the fifth bits of weight 5 (bit 0 of qh[5]) and of weight 200 = 32 * 6 + 8 (bit 6 of qh[8]): q + 16.
    "Q5_K": (
        ONE + HALF + SIX_BIT_SCALES + placed(32, {5: 0x01, 8: 0x40}) + placed(128, {5: 0x07, 104: 0x0B}),
        {5: 44.0, 200: 496.0},
        {(0, 256): 0.0, (0, 32): -2.0, (192, 224): -17.0},
    ),
    # d = 0.5, scales 1, -2 for group 13: 0.5 * (q - 32), 32 - q. ql[0] = 0x21 holds weights 0 and 64, qh[0] = 0b11100100
    # the upper bits of weights 0, 32, 64, 96. Weight 209 = 128 + 64 + 17: high nibble of ql[64 + 17], bits 4-5 of qh[32 + 17].
    "Q6_K": (
        placed(128, {0: 0x21, 81: 0x90}) + placed(64, {0: 0xE4, 49: 0x30}) + placed(16, {13: 0xFE}, 1) + HALF,
        {0: -15.5, 32: -8.0, 64: 1.0, 96: 8.0, 209: -25.0},
        {(0, 256): -16.0, (208, 224): 32.0},
    ),
}


@pytest.mark.parametrize("name", [each.name for each in ALL_FORMATS])
def test_dequantise_gives_weights_computed_by_hand(name: str) -> None:
    block, weights, ranges = HAND_BUILT[name]
    expected = np.zeros(FORMATS[name].block_weights, np.float32)
    for (start, stop), weight in ranges.items():
        expected[start:stop] = weight
    for index, weight in weights.items():
        expected[index] = weight
    assert len(block) == FORMATS[name].block_bytes
    assert dequantise(FORMATS[name], np.frombuffer(block, np.uint8)).tolist() == expected.tolist()


@pytest.mark.parametrize("name", [each.name for each in ALL_FORMATS])
def test_dequantise_equals_reference_bit_for_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_CHUNK_WEIGHTS", 1024)  # several chunks, the last one partial
    tensor_format = FORMATS[name]
    num_blocks = 1300 // tensor_format.block_weights + 40
    raw = np.random.default_rng(7).integers(0, 256, (3, num_blocks * tensor_format.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random bytes make scales that are inf or NaN
        reference = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(tensor_format.gguf_type)).astype(np.float32)
    found = dequantise(tensor_format, raw)
    assert found.dtype == np.float32
    assert found.shape == reference.shape == (3, num_blocks * tensor_format.block_weights)
    is_nan = np.isnan(reference)
    assert np.array_equal(np.isnan(found), is_nan)
    assert np.array_equal(found.view(np.uint32)[~is_nan], reference.view(np.uint32)[~is_nan])


@pytest.mark.parametrize("tensor_format", ALL_FORMATS, ids=lambda each: each.name)
def test_format_sizes_equal_reference(tensor_format: formats.TensorFormat) -> None:
    type_id = gguf.GGMLQuantizationType(tensor_format.gguf_type)
    assert type_id.name == tensor_format.name
    assert gguf.GGML_QUANT_SIZES[type_id] == (tensor_format.block_weights, tensor_format.block_bytes)
    assert FORMATS[tensor_format.name] is FORMATS[tensor_format.gguf_type] is tensor_format


def test_dequantise_takes_views_that_are_not_contiguous() -> None:
    raw = np.random.default_rng(3).integers(0, 100, (4, 80), dtype=np.uint8)
    expected = dequantise(FORMATS["Q4_1"], np.ascontiguousarray(raw[::2, 20:60]))
    assert np.array_equal(dequantise(FORMATS["Q4_1"], raw[::2, 20:60]), expected)


def test_dequantise_of_no_blocks_is_empty() -> None:
    assert dequantise(FORMATS["Q6_K"], np.empty((2, 0), np.uint8)).shape == (2, 0)


def test_dequantise_rejects_part_of_a_block() -> None:
    with pytest.raises(ModelFileError, match="21 bytes are not a whole number of Q4_1 blocks of 20 bytes"):
        dequantise(FORMATS["Q4_1"], np.zeros(21, np.uint8))


def test_row_bytes_counts_blocks_and_rejects_a_part_of_one() -> None:
    assert FORMATS["Q4_1"].row_bytes(576) == 18 * 20
    assert FORMATS["F16"].row_bytes(3) == 6
    assert FORMATS["Q4_0"].bits_per_weight == 4.5
    assert [each.name for each in ALL_FORMATS if not each.quantised] == ["F32", "F16", "BF16"]
    with pytest.raises(ModelFileError, match="a row of 33 weights is not a whole number of Q4_1 blocks of 32"):
        FORMATS["Q4_1"].row_bytes(33)


def test_format_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS["F32"].name = "F64"  # type: ignore[misc]
