"""Mutations of a small sound file: it opens, or raises a HeadraceError; nothing else, and no big allocation."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import HeadraceError
from headrace.weights.gguf import GgufFile

if TYPE_CHECKING:
    from pathlib import Path

NUM_CASES = 1000  # of each of four tests
# A metadata entry, a nested array and a tensor each take a few hundred bytes as Python objects and 13 to 32 bytes in the file.
PEAK_BYTES_PER_FILE_BYTE = 30
PEAK_BYTES_FIXED = 64 * 1024

fuzz = settings(max_examples=NUM_CASES, deadline=None, derandomize=True, database=None)
positions = st.integers(0, 2**16)  # taken modulo the file's size
edges = st.sampled_from([0, 1, 2, 7, 8, 9, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**61, 2**62, 2**63, 2**64 - 1])
numbers = edges | st.integers(0, 64)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "mutant.gguf"


@pytest.fixture(scope="module")
def sound(forging: Any) -> bytes:
    return forging.sound_bytes()


def check(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    file, problem = None, "none"
    tracemalloc.start()
    try:
        file = GgufFile.open(path)
    except HeadraceError as error:
        problem = str(error)
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < PEAK_BYTES_PER_FILE_BYTE * len(content) + PEAK_BYTES_FIXED
    assert problem.isprintable()
    if file is None:
        return
    with file:
        assert sum(tensor.raw.size for tensor in file.tensors.values()) <= len(content)
        for tensor in file.tensors.values():
            assert tensor.dequantise().shape == tensor.shape
            assert int(np.prod(tensor.shape)) == tensor.num_weights


@fuzz
@given(changes=st.lists(st.tuples(positions, st.integers(1, 255)), min_size=1, max_size=8))
def test_open_survives_bytes_flipped(scratch: Path, sound: bytes, changes: list[tuple[int, int]]) -> None:
    content = bytearray(sound)
    for position, change in changes:
        content[position % len(content)] ^= change
    check(scratch, bytes(content))


@fuzz
@given(position=positions, width=st.sampled_from([4, 8]), number=numbers, cut=st.none() | positions)
def test_open_survives_integers_overwritten(
    scratch: Path, sound: bytes, position: int, width: int, number: int, cut: int | None
) -> None:
    content = bytearray(sound)
    start = position % (len(content) - width)
    content[start : start + width] = (number % 256**width).to_bytes(width, "little")
    check(scratch, bytes(content if cut is None else content[: cut % len(content)]))


@fuzz
@given(source=positions, num_bytes=st.integers(0, 200), target=positions, replaced=st.integers(0, 200))
def test_open_survives_splices(scratch: Path, sound: bytes, source: int, num_bytes: int, target: int, replaced: int) -> None:
    source, target = source % len(sound), target % len(sound)
    check(scratch, sound[:target] + sound[source : source + num_bytes] + sound[target + replaced :])


@fuzz
@given(
    counts=st.tuples(numbers, numbers),
    body=st.binary(max_size=300),
    version=st.sampled_from([2, 3]),
)
def test_open_survives_random_bytes_behind_the_header(
    scratch: Path, counts: tuple[int, int], body: bytes, version: int
) -> None:
    header = b"GGUF" + version.to_bytes(4, "little") + b"".join(count.to_bytes(8, "little") for count in counts)
    check(scratch, header + body)
