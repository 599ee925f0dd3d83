"""The file of packed weights: whole or not there, whoever writes it and whatever happens meanwhile."""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import StorageError
from headrace.weights import container
from headrace.weights.container import Section

FACTS = {"model": "x", "numbers": [1, 2]}


def _filler(value: int) -> Callable[[np.ndarray], None]:
    def fill(out: np.ndarray) -> None:
        out[:] = value

    return fill


SECTIONS = [Section("a", 100, _filler(1)), Section("b", 0, _filler(2)), Section("c", 5000, _filler(3))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "packed" / "model.headrace"


def _left(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def test_container_gives_back_what_was_written(path: Path) -> None:
    container.write(path, FACTS, SECTIONS)
    packed = container.open_packed(path)
    assert packed is not None
    assert {key: packed.header[key] for key in FACTS} == FACTS
    assert [packed.section(name).tolist() for name in "abc"] == [[1] * 100, [], [3] * 5000]
    assert all(packed.offset(name) % 64 == 0 for name in "abc")
    assert packed.address % 64 == 0
    assert not packed.bytes.flags.writeable
    assert _left(path) == ["model.headrace"]


def test_container_in_memory_equals_the_one_on_disk(path: Path) -> None:
    container.write(path, FACTS, SECTIONS)
    packed = container.build(lambda num_bytes: np.zeros(num_bytes, np.uint8), FACTS, SECTIONS)
    assert packed.bytes.tobytes() == path.read_bytes()


@pytest.mark.parametrize("keep", [0, 7, 8, 15, 16, 100, 200, -64])
def test_truncated_container_is_as_good_as_none(path: Path, keep: int) -> None:
    container.write(path, FACTS, SECTIONS)
    path.write_bytes(path.read_bytes()[:keep])
    packed = container.open_packed(path)
    assert packed is None


def test_container_with_any_wrong_byte_before_its_sections_is_as_good_as_none(path: Path) -> None:
    container.write(path, FACTS, SECTIONS)
    data = path.read_bytes()
    header_bytes = struct.unpack("<I", data[8:12])[0]
    for at in range(16 + header_bytes):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert container.open_packed(path) is None, at


@pytest.mark.parametrize("header", [[], {}, {"sections": []}, {"sections": {"a": [0]}}, {"sections": {"a": ["x", 1]}}, 3])
def test_container_with_a_sound_but_strange_header_is_as_good_as_none(path: Path, header: object) -> None:
    container.write(path, FACTS, SECTIONS)
    text = json.dumps(header).encode()
    path.write_bytes(path.read_bytes()[:8] + struct.pack("<II", len(text), zlib.crc32(text)) + text + bytes(6000))
    assert container.open_packed(path) is None


def test_container_that_is_not_there_or_is_a_folder_is_none(path: Path) -> None:
    assert container.open_packed(path) is None
    path.mkdir(parents=True)
    assert container.open_packed(path) is None


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves no disk space")
@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "Read-only file system")])
def test_disk_that_takes_no_more_is_one_sentence(path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StorageError, match=words) as caught:
        container.write(path, FACTS, SECTIONS)
    assert "cache=False" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert _left(path) == []


def test_folder_that_cannot_be_made_is_one_sentence(path: Path) -> None:
    path.parent.write_text("a file")
    with pytest.raises(StorageError, match="cannot write packed weights into"):
        container.write(path, FACTS, SECTIONS)


@pytest.mark.parametrize("error", [ValueError("damaged"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_error_while_filling_leaves_nothing(path: Path, error: BaseException) -> None:
    def fail(out: np.ndarray) -> None:
        raise error

    with pytest.raises(type(error)):
        container.write(path, FACTS, [*SECTIONS, Section("d", 10, fail)])
    assert _left(path) == []


def test_writing_again_replaces_the_file_under_those_who_have_it_open(path: Path) -> None:
    container.write(path, FACTS, SECTIONS)
    before = container.open_packed(path)
    container.write(path, FACTS, [Section("a", 100, _filler(9))])
    after = container.open_packed(path)
    assert before is not None
    assert after is not None
    assert before.section("a")[0] == 1
    assert after.section("a")[0] == 9


def test_what_a_killed_process_left_is_removed(path: Path) -> None:
    path.parent.mkdir()
    old, young, other = (path.parent / name for name in ("old.partial", "young.partial", "old.headrace"))
    for each in (old, young, other):
        each.write_bytes(b"half")
    for each in (old, other):
        os.utime(each, (1000, 1000))
    container.write(path, FACTS, SECTIONS)
    assert _left(path) == ["model.headrace", "old.headrace", "young.partial"]


def test_what_another_process_is_writing_is_left_alone(path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path.parent.mkdir()
    old = path.parent / "old.partial"
    with old.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(old, (1000, 1000))
        container.write(path, FACTS, SECTIONS)
        assert old.exists()
