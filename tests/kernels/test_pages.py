"""Compressed pages: narrowing byte for byte as the twin does it, what is lost by it, and what it does at the edges."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from headrace.kernels import reference, reference_pages
from headrace.kernels.fields import pages as fields_of_pages
from headrace.kernels.level import host_levels
from headrace.kernels.narrow import NARROW_KERNELS, Narrower, scratch_bytes
from headrace.kernels.page_formats import F16, FORMAT_BITS, FORMAT_NAMES, Q4, Q8, head_bytes, used_bytes, value_group_width

KERNELS = list(NARROW_KERNELS)
PAGE_TOKENS = 32
WIDTHS = (32, 64, 96, 128, 256)
COMPRESSED = (Q8, Q4)


def _narrow(kernels: Any, page: np.ndarray, page_format: int, heads: int, width: int, source_format: int = F16) -> np.ndarray:
    """A page of `heads` heads in another format, by the kernel."""
    source = kernels.array(page)
    target = kernels.array(np.full(heads * head_bytes(page_format, width, PAGE_TOKENS), 0xEE, np.uint8))
    kernels.run(
        f"narrow:{FORMAT_NAMES[page_format]}",
        "",
        fields_of_pages,
        -(-heads // 2),
        scratch_bytes=scratch_bytes(width, PAGE_TOKENS),
        source=source.ctypes.data + source_format,
        target=target,
        width=width,
        page_tokens=PAGE_TOKENS,
        heads=heads,
        block_heads=2,
    )
    return target


def _page(rng: np.random.Generator, heads: int, width: int, scale: float = 1.0) -> np.ndarray:
    """Keys with an offset per dimension, values with outliers, as models have them."""
    shape = (PAGE_TOKENS, heads, width)
    keys = scale * (rng.normal(size=shape) + 5 * rng.normal(size=shape[1:]))
    values = scale * rng.normal(size=shape) * rng.choice([1, 8], shape)
    return reference.page_of(reference.to_f16(keys.astype(np.float32)), reference.to_f16(values.astype(np.float32)))


@pytest.mark.parametrize("page_format", COMPRESSED)
@pytest.mark.parametrize("width", WIDTHS)
def test_narrow_equals_twin(kernels: Any, rng: np.random.Generator, page_format: int, width: int) -> None:
    for scale in (1.0, 1e-3, 1e-6, 4000.0):
        page = _page(rng, 3, width, scale)
        found = _narrow(kernels, page, page_format, 3, width)
        assert found.tobytes() == reference_pages.narrow(page, page_format, 3, width, PAGE_TOKENS).tobytes()


@pytest.mark.parametrize("width", WIDTHS)
def test_narrow_loses_at_most_half_a_step(rng: np.random.Generator, width: int) -> None:
    """Half a step, an eighth more where steps are short floats, and the rounding of a zero."""
    page = _page(rng, 2, width)
    keys, values = reference_pages.widen(page, F16, 2, width, PAGE_TOKENS)
    groups = values.reshape(PAGE_TOKENS, 2, -1, value_group_width(width))
    for page_format, levels in ((Q8, 127), (Q4, 15)):
        narrow = reference_pages.narrow(page, page_format, 2, width, PAGE_TOKENS)
        found_keys, found_values = reference_pages.widen(narrow, page_format, 2, width, PAGE_TOKENS)
        key_range = np.abs(keys).max(axis=0) if page_format == Q8 else np.ptp(keys, axis=0)
        assert (np.abs(found_keys - keys) <= key_range / levels * (1.125 / 2 + 0.01)).all()
        value_range = np.abs(groups).max(axis=3) if page_format == Q8 else np.ptp(groups, axis=3)
        lost = np.abs(found_values - values).reshape(groups.shape).max(axis=3)
        assert (lost <= value_range / levels * (1.125 / 2 + 1 / 16)).all()


def test_narrow_twin_by_hand() -> None:
    """One dimension of keys and one token of values, worked out on paper."""
    keys, values = np.zeros((PAGE_TOKENS, 1, 32), np.float16), np.zeros((PAGE_TOKENS, 1, 32), np.float16)
    keys[:, 0, 3] = np.linspace(-3, 12, 16).repeat(2)  # 16 levels, one apart
    values[5, 0, :4] = [-2.5, 12.5, 0.6, 5.0]
    page = reference.page_of(keys, values)
    q4 = reference_pages.narrow(page, Q4, 1, 32, PAGE_TOKENS)
    assert q4[:64].view(np.float16)[3] == -3  # minimum
    assert q4[64 + 3] == np.array(1.0, np.float16).view(np.uint16) >> 7  # step
    assert q4[96 + 16 : 96 + 32].tolist() == [n // 2 << 4 for n in range(16)]  # dimensions 2 and 3 of tokens 0 to 15
    at = 96 + 512
    assert q4[at + 5] == q4[64 + 3]  # a step of 1 again
    assert q4[at + 32 + 5] == 40  # zero at 2.5
    # tokens 4 and 5: numbers 0, 15, 3 (of 3.1) and 8 (of 7.5, to even); of zeros 2 (of 2.5, to even)
    assert q4[at + 64 + 32 : at + 64 + 38].tolist() == [0x00, 0xF0, 0x30, 0x80, 0x20, 0x20]
    q8 = reference_pages.narrow(page, Q8, 1, 32, PAGE_TOKENS)
    step = 12 / 127  # between the short floats 0.09375 and 0.1015625
    assert 0.09375 < step < 0.1015625
    assert reference_pages.short_floats(q8[3:4])[0] == 0.1015625
    assert q8[32 + 3 * 16] == 256 - 30  # -3 / 0.1015625 = -29.5...
    at = 32 + 1024
    assert q8[at : at + 64].view(np.float16)[5] == np.float16(12.5 / 127)
    assert q8[at + 64 + 5 * 16 : at + 64 + 5 * 16 + 4].view(np.int8).tolist() == [-25, 127, 6, 51]


@pytest.mark.parametrize("page_format", COMPRESSED)
def test_narrow_of_zeros_is_zeros(kernels: Any, page_format: int) -> None:
    page = np.zeros(2 * head_bytes(F16, 64, PAGE_TOKENS), np.uint8)
    page.view(np.uint16)[1::8] = 0x8000  # some of them negative
    narrow = _narrow(kernels, page, page_format, 2, 64)
    keys, values = reference_pages.widen(narrow, page_format, 2, 64, PAGE_TOKENS)
    assert not keys.any()
    assert not values.any()
    assert not narrow.any()


@pytest.mark.parametrize("page_format", COMPRESSED)
@pytest.mark.parametrize("width", [64, 96])
def test_narrow_survives_anything(kernels: Any, rng: np.random.Generator, page_format: int, width: int) -> None:
    """Random bits: infinite, not a number, the largest, the smallest. What comes out is finite, as the twin has it."""
    page = rng.integers(0, 256, 3 * head_bytes(F16, width, PAGE_TOKENS), np.uint8)
    page[: page.size // 3] |= 0x7C  # one head with little but infinities and not-a-numbers
    narrow = _narrow(kernels, page, page_format, 3, width)
    assert narrow.tobytes() == reference_pages.narrow(page, page_format, 3, width, PAGE_TOKENS).tobytes()
    keys, values = reference_pages.widen(narrow, page_format, 3, width, PAGE_TOKENS)
    assert np.isfinite(keys).all()
    assert np.isfinite(values).all()


@pytest.mark.parametrize("width", [64, 96, 256])
def test_narrow_takes_q8_for_q4(kernels: Any, rng: np.random.Generator, width: int) -> None:
    page = _page(rng, 3, width)
    q8 = reference_pages.narrow(page, Q8, 3, width, PAGE_TOKENS)
    keys, values = (reference.to_f16(part) for part in reference_pages.widen(q8, Q8, 3, width, PAGE_TOKENS))
    expected = reference_pages.narrow(reference.page_of(keys, values), Q4, 3, width, PAGE_TOKENS)
    assert _narrow(kernels, q8, Q4, 3, width, Q8).tobytes() == expected.tobytes()


def test_narrow_does_not_depend_on_blocks_or_repetition(kernels: Any, rng: np.random.Generator) -> None:
    page = _page(rng, 5, 64)
    whole = np.concatenate(
        [_narrow(kernels, part, Q4, 1, 64) for part in page.reshape(5, -1)],
    )
    assert _narrow(kernels, page, Q4, 5, 64).tobytes() == whole.tobytes()


def test_page_formats_have_the_promised_sizes() -> None:
    for width in range(64, 257, 32):
        f16, q8, q4 = (head_bytes(page_format, width, PAGE_TOKENS) for page_format in (F16, Q8, Q4))
        assert f16 == 4 * width * PAGE_TOKENS
        assert f16 / q8 >= 1.93
        assert f16 / q4 >= 3.55
    for width in (32, 64, 96, 128, 160, 256):
        assert width % value_group_width(width) == 0
        for page_format in range(len(FORMAT_NAMES)):
            stride = head_bytes(page_format, width, PAGE_TOKENS)
            assert stride % (FORMAT_BITS + 1) == 0
            assert stride - FORMAT_BITS <= used_bytes(page_format, width, PAGE_TOKENS) <= stride


def test_narrower_narrows_whole_pages_from_several_threads(rng: np.random.Generator) -> None:
    from headrace.config import Config
    from headrace.kernels.library import KernelLibrary

    library = KernelLibrary(Config.from_environment().kernels_dir, host_levels()[-1])
    layers, kv_heads, width = 4, 2, 64
    heads = layers * kv_heads
    narrower = Narrower(library, layers, kv_heads, width, PAGE_TOKENS)
    pages = [_aligned(_page(rng, heads, width)) for _ in range(8)]
    targets = {
        page_format: [_aligned(np.zeros(heads * head_bytes(page_format, width, PAGE_TOKENS), np.uint8)) for _ in pages]
        for page_format in COMPRESSED
    }

    def work(page_format: int) -> None:
        for page, target in zip(pages, targets[page_format], strict=True):
            narrower.narrow(page_format, page.ctypes.data, target.ctypes.data | page_format)

    threads = [threading.Thread(target=work, args=(page_format,)) for page_format in COMPRESSED]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for page_format in COMPRESSED:
        for page, target in zip(pages, targets[page_format], strict=True):
            assert target.tobytes() == reference_pages.narrow(page, page_format, heads, width, PAGE_TOKENS).tobytes()
    with pytest.raises(AssertionError, match="q4 to q8"):
        narrower.narrow(Q8, targets[Q4][0].ctypes.data | Q4, pages[0].ctypes.data)


def _aligned(content: np.ndarray) -> np.ndarray:
    room = np.empty(content.nbytes + FORMAT_BITS + 1, np.uint8)
    start = -room.ctypes.data % (FORMAT_BITS + 1)
    room[start : start + content.nbytes] = content
    return room[start : start + content.nbytes]
