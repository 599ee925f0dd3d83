"""Elementary functions and conversions on 16 lanes, measured over their whole domains on every level."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.kernels import reference
from headrace.kernels.program import argument

FIELDS = SimpleNamespace(INPUT=argument(0), OUTPUT=argument(1), COUNT=argument(2))
KERNELS: list[str] = []

ROUNDING = 2.0**-24
# What `math.py` promises; without a fused multiply-add (portable) Horner's rule rounds twice as often.
EXP_RELATIVE = 2.0**-22
# sigmoid: the error of e^-x, one addition, one division
SIGMOID_RELATIVE = 2.0**-22 + 2.0**-23
# silu(x) and gelu(x) against |x|: f is x times a sigmoid at most 1; the argument of GELU's sigmoid is rounded four
# times, which moves it by as many parts of itself, and y e^-y is below 0.37
GATE_ROUNDINGS = 4
SUBNORMAL_STEP = 2.0**-149


def _apply(kernels: Any, name: str, source: np.ndarray, out_dtype: Any) -> np.ndarray:
    values = kernels.array(np.resize(source, -(-source.size // 16) * 16))
    out = kernels.zeros(values.shape, out_dtype)
    kernels.run(f"probe.{name}", "", FIELDS, input=values, output=out, count=values.size // 16)
    return out[: source.size].copy()


def _floats_between(low: float, high: float, count: int = 150_000) -> np.ndarray:
    """Evenly spaced values, and the neighbours of zero and of both ends."""
    tiny = np.float32([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 1e-10, -1e-10, 2.0**-24, -(2.0**-24)])
    even = np.linspace(low, high, count).astype(np.float32)
    small = np.geomspace(1e-30, 1, 10_000).astype(np.float32)
    return np.concatenate([even, small, -small, tiny, np.nextafter(even[:1], 0), np.nextafter(even[-1:], 0)])


def test_exp_is_within_its_bound(kernels: Any) -> None:
    x = _floats_between(-86.99, 87.99)
    exact = np.exp(x.astype(np.float64))
    error = np.abs(_apply(kernels, "exp", x, np.float32) - exact) / exact
    assert error.max() < EXP_RELATIVE


def test_exp_of_zero_is_exactly_one(kernels: Any) -> None:
    assert (_apply(kernels, "exp", np.float32([0.0, -0.0]), np.float32) == 1.0).all()


def test_exp_clamps_at_both_ends(kernels: Any) -> None:
    low = np.float32([-87.0, -87.5, -1e4, -3e38, -np.inf, np.nan])
    assert _apply(kernels, "exp", low, np.float32).tolist() == [0.0] * 6
    high = _apply(kernels, "exp", np.float32([88.0, 88.5, 1e4, 3e38, np.inf]), np.float32)
    assert np.isfinite(high).all()
    assert len(set(high.tolist())) == 1


def test_exp_never_decreases_beyond_its_error(kernels: Any) -> None:
    x = np.sort(_floats_between(-87.5, 88.5))
    result = _apply(kernels, "exp", x, np.float32).astype(np.float64)
    assert (result[1:] >= result[:-1] * (1 - 2 * EXP_RELATIVE)).all()


def test_sigmoid_is_within_its_bound(kernels: Any) -> None:
    x = _floats_between(-86.99, 120)
    exact = reference.sigmoid(x)
    error = np.abs(_apply(kernels, "sigmoid", x, np.float32) - exact) / exact
    assert error.max() < SIGMOID_RELATIVE


@pytest.mark.parametrize("function", ["silu", "gelu"])
def test_activation_is_within_its_bound(kernels: Any, function: str) -> None:
    for x in (_floats_between(-20, 20), _floats_between(-1000, 1000)):
        error = np.abs(_apply(kernels, function, x, np.float32) - getattr(reference, function)(x))
        assert (error <= GATE_ROUNDINGS * ROUNDING * np.abs(x) + SUBNORMAL_STEP).all()


@pytest.mark.parametrize("function", ["silu", "gelu"])
def test_activation_of_huge_values_is_finite(kernels: Any, function: str) -> None:
    x = np.float32([1e5, 1e12, 1e15, 3e38])
    assert _apply(kernels, function, x, np.float32).tolist() == x.tolist()
    negative = _apply(kernels, function, -x, np.float32)
    assert (np.abs(negative) <= x * np.exp(-87.0)).all()


@pytest.mark.parametrize("function", ["silu", "gelu", "sigmoid"])
def test_activation_carries_not_a_number(kernels: Any, function: str) -> None:
    result = _apply(kernels, function, np.full(16, np.nan, np.float32), np.float32)
    assert np.isnan(result).all() or function == "sigmoid"  # a product with x brings it back


def test_float16_widens_exactly(kernels: Any) -> None:
    """All 65,536 bit patterns: subnormals, zeros of both signs, infinities, not-a-numbers."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    result = _apply(kernels, "load_f16", bits, np.float32)
    expected = bits.view(np.float16).astype(np.float32)
    number = ~np.isnan(expected)
    assert np.isnan(result[~number]).all()
    assert result[number].tobytes() == expected[number].tobytes()


def test_bfloat16_widens_exactly(kernels: Any) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    result = _apply(kernels, "load_bf16", bits, np.float32)
    assert result.tobytes() == (bits.astype(np.uint32) << 16).tobytes()


def test_float16_narrows_as_numpy_rounds(kernels: Any, rng: np.random.Generator) -> None:
    """Every float16, the points halfway to its neighbour and their float32 neighbours, random bits, and the specials."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    magnitudes = np.concatenate([halves, middles, np.nextafter(middles, 0), np.nextafter(middles, np.float32(np.inf))])
    anything = rng.integers(0, 1 << 32, 100_000).astype(np.uint32).view(np.float32)
    anything[np.isnan(anything)] = np.nan  # quiet ones: arithmetic makes no others
    special = np.float32([65504, 65519.9, 65520, 1e6, 3e38, np.inf, np.nan])
    x = np.concatenate([magnitudes, -magnitudes, anything, special, -special])
    result = _apply(kernels, "store_f16", x, np.uint16)
    assert result.tobytes() == reference.to_f16(x).tobytes()
