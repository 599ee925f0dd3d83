"""Files with one thing wrong: one clear sentence each, with the file, the offending value and what to do."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.errors import HeadraceError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from headrace.weights.gguf import GgufFile

if TYPE_CHECKING:
    from collections.abc import Callable

U32, U64_MAX = struct.Struct("<I").pack, 2**64 - 1


def bomb(forging: Any, depth: int) -> bytes:
    return forging.entry("deep", 9, forging.array(9, 1, b"") * depth + forging.array(0, 0, b""))


BAD: dict[str, tuple[Callable, type[ModelFileError], str]] = {
    "magic": (lambda f: f.Forge(magic=b"ABCD").build(), ModelFileError, r"begins with b'ABCD' and not with b'GGUF'"),
    "zip": (lambda f: f.Forge(magic=b"PK\3\4").build(), ModelFileError, "a zip archive: unpack it"),
    "lfs": (lambda f: b"version https://git-lfs.github.com/spec/v1\n", ModelFileError, "git lfs pull"),
    "empty": (lambda f: b"", ModelFileError, "is empty: fetch"),
    "version 1": (lambda f: f.Forge(version=1).build(), UnsupportedModelError, "has GGUF version 1, and versions 2 and 3"),
    "version 4": (lambda f: f.Forge(version=4).build(), UnsupportedModelError, "has GGUF version 4"),
    "big-endian": (lambda f: f.Forge(version=3 << 24).build(), UnsupportedModelError, "is a big-endian GGUF file"),
    "tensor count": (lambda f: f.Forge(num_tensors=U64_MAX).build(), ModelFileError, f"claims {U64_MAX} tensors"),
    "entry count": (lambda f: f.Forge(num_entries=10**6).build(), ModelFileError, "claims 1000000 metadata entries"),
    "key length": (
        lambda f: f.Forge([struct.pack("<Q", U64_MAX) + bytes(9)]).build(),
        ModelFileError,
        f"takes {U64_MAX} bytes",
    ),
    "key twice": (lambda f: f.Forge([f.entry("k", 0, b"\0")] * 2).build(), ModelFileError, "has the metadata key 'k' twice"),
    "key not text": (
        lambda f: f.Forge([f.string(b"k\xff") + U32(0) + b"\0"]).build(),
        ModelFileError,
        r"'k\\udcff' for a metadata",
    ),
    "value type": (lambda f: f.Forge([f.entry("k", 13, bytes(8))]).build(), ModelFileError, "unknown type 13 for 'k'"),
    "bool": (lambda f: f.Forge([f.entry("k", 7, b"\2")]).build(), ModelFileError, "has 2 for the boolean 'k'"),
    "bools": (
        lambda f: f.Forge([f.entry("k", 9, f.array(7, 2, b"\1\3"))]).build(),
        ModelFileError,
        "has 3 in the booleans 'k'",
    ),
    "array type": (lambda f: f.Forge([f.entry("k", 9, f.array(99, 1, bytes(8)))]).build(), ModelFileError, "unknown type 99"),
    "array count": (
        lambda f: f.Forge([f.entry("k", 9, f.array(12, U64_MAX, b""))]).build(),
        ModelFileError,
        "'k' takes 147573952589676412920 b",
    ),
    "strings count": (
        lambda f: f.Forge([f.entry("k", 9, f.array(8, 2**40, b""))]).build(),
        ModelFileError,
        "1099511627776 strings in 'k'",
    ),
    "string length": (
        lambda f: f.Forge([f.entry("k", 9, f.array(8, 1, struct.pack("<Q", 2**50)))]).build(),
        ModelFileError,
        "a string in 'k' takes 1125899906842624 bytes",
    ),
    "arrays count": (
        lambda f: f.Forge([f.entry("k", 9, f.array(9, 2**40, b""))]).build(),
        ModelFileError,
        "1099511627776 arrays in 'k'",
    ),
    "depth": (lambda f: f.Forge([bomb(f, 100_000)]).build(), ModelFileError, "nests arrays in 'deep' deeper than 4"),
    "alignment 0": (
        lambda f: f.Forge([f.entry("general.alignment", 4, U32(0))]).build(),
        ModelFileError,
        "general.alignment = 0",
    ),
    "alignment 48": (
        lambda f: f.Forge([f.entry("general.alignment", 4, U32(48))]).build(),
        ModelFileError,
        "general.alignment = 48",
    ),
    "alignment text": (
        lambda f: f.Forge([f.entry("general.alignment", 8, f.string("big"))]).build(),
        ModelFileError,
        "general.alignment = 'big', which must be a power of two of at least 8",
    ),
    "split": (lambda f: f.Forge([f.entry("split.count", 2, b"\3\0")]).build(), UnsupportedModelError, "is one of 3 parts"),
    "tensor twice": (lambda f: f.Forge([], [f.Tensor(), f.Tensor()]).build(), ModelFileError, "has two tensors named 't'"),
    "tensor name": (lambda f: f.Forge([], [f.Tensor(b"t\n")]).build(), ModelFileError, r"has 't\\n' for a tensor's name"),
    "no axes": (lambda f: f.Forge([], [f.Tensor(axes=(), data=bytes(40))]).build(), ModelFileError, "tensor 't' with 0 axes"),
    "axes": (
        lambda f: f.Forge([], [f.Tensor(num_axes=5)]).build(),
        ModelFileError,
        "tensor 't' with 5 axes, and there can be 1 to 4",
    ),
    "axis 0": (lambda f: f.Forge([], [f.Tensor(axes=(0, 4))]).build(), ModelFileError, r"tensor 't' of shape \(4, 0\)"),
    "shape": (
        lambda f: f.Forge([], [f.Tensor(axes=(U64_MAX,) * 4)]).build(),
        ModelFileError,
        "tensor 't' takes 46316835694926478",
    ),
    "columns": (
        lambda f: f.Forge([], [f.Tensor(axes=(48, 2), type_id=3, data=bytes(60))]).build(),
        ModelFileError,
        r"tensor 't' of shape \(2, 48\), but its rows must be whole Q4_1 blocks of 32",
    ),
    "format": (
        lambda f: f.Forge([], [f.Tensor(type_id=23)]).build(),
        UnsupportedModelError,
        r"'t' in format IQ4_XS \(23\).*Q4_K",
    ),
    "type id": (lambda f: f.Forge([], [f.Tensor(type_id=4321)]).build(), UnsupportedModelError, r"format number \(4321\)"),
    "misaligned": (
        lambda f: f.Forge([], [f.Tensor(offset=16)]).build(),
        ModelFileError,
        "offset 16, not a multiple of its alignment 32",
    ),
    "out of range": (
        lambda f: f.Forge([], [f.Tensor(offset=2**63)]).build(),
        ModelFileError,
        "tensor 't' takes 16 bytes at offset 92233",
    ),
    "overlap": (
        lambda f: f.Forge([], [f.Tensor("a", (16,), data=bytes(64)), f.Tensor("b", offset=32)]).build(),
        ModelFileError,
        "has overlapping data of tensors 'a' and 'b'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_open_names_what_is_wrong(case: str, tmp_path: Path, forging: Any) -> None:
    build, kind, problem = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(build(forging))
    with pytest.raises(kind, match=problem) as caught:
        GgufFile.open(path)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert message.isprintable()
    assert len(message) < 400 + len(str(path))


def test_open_rejects_truncation_at_every_offset(tmp_path: Path, forging: Any) -> None:
    path, sound = tmp_path / "cut.gguf", forging.sound_bytes()
    for size_bytes in range(len(sound)):
        path.write_bytes(sound[:size_bytes])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            GgufFile.open(path)
    path.write_bytes(sound)
    GgufFile.open(path).close()


def test_open_survives_every_byte_changed(tmp_path: Path, forging: Any) -> None:
    path, sound = tmp_path / "changed.gguf", forging.sound_bytes()
    num_rejected = 0
    for index in range(len(sound)):
        path.write_bytes(sound[:index] + bytes([sound[index] ^ 0xFF]) + sound[index + 1 :])
        try:
            GgufFile.open(path).close()
        except HeadraceError:
            num_rejected += 1
    assert num_rejected > len(sound) // 2  # most bytes of this file are structure


def test_open_allocates_no_more_than_the_file_warrants(tmp_path: Path, forging: Any) -> None:
    path = tmp_path / "greedy.gguf"
    entries = [forging.entry("k", 9, forging.array(8, 2**17 + 1, bytes(8 * 2**17)))]  # one string too many, found at the end
    path.write_bytes(forging.Forge(entries).build())
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError):
            GgufFile.open(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * path.stat().st_size + 100_000


def test_open_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"absent\.gguf does not exist"):
        GgufFile.open(tmp_path / "absent.gguf")


def test_open_rejects_what_is_not_a_regular_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is not a file"):
        GgufFile.open(tmp_path)
    if hasattr(os, "mkfifo"):  # opening a pipe that nobody writes to would wait for ever
        os.mkfifo(tmp_path / "pipe.gguf")
        with pytest.raises(ModelFileError, match="is not a file"):
            GgufFile.open(tmp_path / "pipe.gguf")


def test_open_names_an_unreadable_path() -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        GgufFile.open("nul\0.gguf")
