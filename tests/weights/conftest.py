"""Small GGUF files written byte by byte, so that every field can be made wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import pytest

STRING, ARRAY = 8, 9


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str, value_type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + value


def array(item_type: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", item_type, count) + items


@dataclass
class ForgedTensor:
    """By default four F32 weights in one row of a vector."""

    name: str | bytes = "t"
    axes: tuple[int, ...] = (4,)  # as in the file: fastest first
    type_id: int = 0
    data: bytes = bytes(16)
    offset: int | None = None  # None: after the tensor before, aligned
    num_axes: int | None = None


@dataclass
class Forge:
    """Everything in a GGUF file; a field that is None is filled in as a sound file would have it."""

    entries: list[bytes] = field(default_factory=list)
    tensors: list[ForgedTensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_entries: int | None = None
    alignment: int = 32

    def build(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_entries = len(self.entries) if self.num_entries is None else self.num_entries
        head = self.magic + struct.pack("<IQQ", self.version, num_tensors, num_entries) + b"".join(self.entries)
        data = b""
        for tensor in self.tensors:
            data += bytes(-len(data) % self.alignment)
            offset = len(data) if tensor.offset is None else tensor.offset
            num_axes = len(tensor.axes) if tensor.num_axes is None else tensor.num_axes
            head += string(tensor.name) + struct.pack("<I", num_axes) + struct.pack(f"<{len(tensor.axes)}Q", *tensor.axes)
            head += struct.pack("<IQ", tensor.type_id, offset)
            data += tensor.data
        return head + bytes(-len(head) % self.alignment) + data if data else head


def sound_bytes() -> bytes:
    """A sound file with every value type, nested arrays, and tensors of four formats; its last byte belongs to a tensor."""
    scalars = ["<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", None, None, "<Q", "<q", "<d"]
    entries = [entry("general.architecture", STRING, string("llama"))]
    for value_type, code in enumerate(scalars):
        if code:
            entries.append(entry(f"scalar.{value_type}", value_type, struct.pack(code, 1)))
            entries.append(entry(f"array.{value_type}", ARRAY, array(value_type, 3, struct.pack(f"<3{code[1]}", 1, 0, 1))))
    entries.append(entry("strings", ARRAY, array(STRING, 3, string("héllo") + string("") + string(b"\xff\xfe"))))
    entries.append(entry("nested", ARRAY, array(ARRAY, 2, array(4, 1, bytes(4)) + array(STRING, 1, string("x")))))
    entries.append(entry("empty", ARRAY, array(STRING, 0, b"")))
    tensors = [
        ForgedTensor("token_embd.weight", (32, 3), 3, bytes(range(60))),
        ForgedTensor("norm.weight", (4,), 0, struct.pack("<4f", 1, 2, 3, 4)),
        ForgedTensor("half.weight", (2, 2, 2), 1, struct.pack("<8e", *range(8))),
        ForgedTensor("ffn.weight", (256, 1), 12, bytes(range(144))),
    ]
    return Forge(entries, tensors).build()


@dataclass(frozen=True)
class Forging:
    """What the tests of a file's bytes need, in one fixture, since test modules cannot import one another."""

    Forge = Forge
    Tensor = ForgedTensor
    string = staticmethod(string)
    entry = staticmethod(entry)
    array = staticmethod(array)
    sound_bytes = staticmethod(sound_bytes)


@pytest.fixture(scope="session")
def forging() -> Forging:
    return Forging()
