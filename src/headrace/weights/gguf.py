"""GGUF, the container of llama.cpp's models: metadata and tensors of one memory-mapped file, versions 2 and 3, little-endian.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The bytes, in order:

| part | bytes |
|---|---|
| magic, version | "GGUF", uint32 |
| counts | uint64 tensors, uint64 metadata entries |
| each metadata entry | string key, uint32 value type, value |
| each tensor | string name, uint32 number of axes, uint64 per axis (fastest first), uint32 format, uint64 offset in the data |
| data | starts at the next multiple of `general.alignment` (32 unless the metadata says otherwise), and so does every tensor |

A string is a uint64 length and that many bytes; an array a uint32 value type, a uint64 count and the values.

Invariant: a file is untrusted. Every length is checked against the bytes left before anything is read or allocated, so memory
and time are at most a constant times the file's size, and whatever is wrong ends in one `ModelFileError`.
Does not know what a key or a tensor means.
"""

from __future__ import annotations

import contextlib
import mmap
import stat
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from headrace.weights.formats import ALL_FORMATS, FORMATS, TensorFormat, dequantise
from headrace.weights.metadata import TypedMetadata, shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from headrace.weights.metadata import MetadataValue

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_AXES = 4  # ggml's own limit
_MAX_ARRAY_DEPTH = 4  # real files nest none; deep nesting would only exhaust the stack
_REFETCH = "fetch or copy the file again"

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_DTYPES = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MIN_STRING_BYTES = 8
_MIN_ARRAY_BYTES = 12
_MIN_ENTRY_BYTES = 13  # an empty key and a one-byte value
_MIN_TENSOR_BYTES = 32  # an empty name and one axis

_NOT_GGUF = {
    b"vers": "a Git LFS pointer: fetch the file that it stands for with 'git lfs pull'",
    b"PK\x03\x04": "a zip archive: unpack it and name the .gguf file inside",
    b"tjgg": "a GGML file of before GGUF: convert the model to GGUF again",
    b"<!DO": "a web page: fetch the file itself, not its page",
}
_OTHER_FORMATS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """One tensor.

    `shape` is in NumPy's order, (..., rows, columns): the last axis varies fastest and consists of whole blocks.
    `raw` is a read-only view of the file's bytes, uint8 [product of shape / block_weights * block_bytes].
    """

    name: str
    format: TensorFormat
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8]

    @property
    def num_weights(self) -> int:
        """Product of the shape."""
        return self.raw.size // self.format.block_bytes * self.format.block_weights

    def dequantise(self) -> npt.NDArray[np.float32]:
        """All weights as float32 [*shape]: for small tensors and for tests."""
        return dequantise(self.format, self.raw).reshape(self.shape)


class GgufFile(TypedMetadata):
    """An open GGUF file; a context manager. Made by `GgufFile.open`.

    Attributes:
        path: where the file lies.
        size_bytes: its size.
        version: 2 or 3.
        metadata: key to value, in the file's order; values stay valid after `close`.
        tensors: name to tensor, in the file's order; empty after `close`.
    """

    def __init__(
        self,
        path: Path,
        data: mmap.mmap,
        version: int,
        metadata: Mapping[str, MetadataValue],
        tensors: Mapping[str, GgufTensor],
    ) -> None:
        self.path = path
        self.size_bytes = len(data)
        self.version = version
        self.metadata = MappingProxyType(metadata)
        self.tensors: Mapping[str, GgufTensor] = MappingProxyType(tensors)
        self._data = data

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Maps the file and reads all but the tensors' data. The file must not be shortened while it is open.

        Raises:
            ModelNotFoundError: there is no such file.
            UnsupportedModelError: a version, byte order or tensor format that is not read here, or one part of a split model.
            ModelFileError: not a GGUF file, truncated, corrupt or unreadable.
        """
        path = Path(path)
        data = _map_file(path)
        try:
            return _Parser(path, data).parse()
        except BaseException:
            _close_map(data)
            raise

    def require_tensor(self, name: str, shape: tuple[int, ...] | None = None) -> GgufTensor:
        """The tensor of that name, and of that shape when one is given.

        Raises:
            ModelFileError: there is none, or it has another shape.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise self._error(f"has no tensor {name!r}, which this model needs")
        if shape is not None and tensor.shape != shape:
            raise self._error(f"has a tensor {name!r} of shape {tensor.shape}, which must be {shape}")
        return tensor

    def close(self) -> None:
        """Forgets the tensors and unmaps the file, or lets the last array that still views it do so. Repeatable."""
        self.tensors = MappingProxyType({})
        _close_map(self._data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _map_file(path: Path) -> mmap.mmap:
    """The whole file as a read-only map; refuses what is not a regular file, since opening a pipe would wait for ever."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path} is not a file: name a .gguf file")
        if status.st_size == 0:
            raise ModelFileError(f"{path} is empty: {_REFETCH}")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path} does not exist: check the path, or name a model such as smollm2") from None
    except (OSError, ValueError) as error:  # ValueError: the file became empty in between, or a NUL byte in the path
        raise ModelFileError(f"{path} cannot be read ({error}): check the path and its permissions") from error


def _close_map(data: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # an array still views the map: it is unmapped with the last of them
        data.close()


class _Parser:
    """Reads one mapped file from front to back; `offset` is the next byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size_bytes = len(data)
        self.offset = 0

    def parse(self) -> GgufFile:
        version = self._header()
        num_tensors = self._number("<Q", "the number of tensors")
        num_entries = self._number("<Q", "the number of metadata entries")
        self._check_count(num_tensors, _MIN_TENSOR_BYTES, "tensors")
        self._check_count(num_entries, _MIN_ENTRY_BYTES, "metadata entries")
        metadata: dict[str, MetadataValue] = {}
        for _ in range(num_entries):
            key = self._name("a metadata key")
            if key in metadata:
                raise self._corrupt(f"has the metadata key {shown(key)} twice")
            metadata[key] = self._value(self._number("<I", f"the type of {shown(key)}"), key)
        num_parts = metadata.get("split.count")
        if isinstance(num_parts, int) and num_parts > 1:
            raise UnsupportedModelError(
                f"{self.path} is one of {num_parts} parts of a model: merge them with llama.cpp's 'llama-gguf-split --merge'"
            )
        tensors = self._tensors(num_tensors, self._alignment(metadata))
        return GgufFile(self.path, self.data, version, metadata, tensors)

    # Header and metadata.

    def _header(self) -> int:
        magic = self.data[:4]
        if magic != _MAGIC:
            kind = _NOT_GGUF.get(magic, "something else: name a .gguf file, or fetch it again")
            raise ModelFileError(f"{self.path} begins with {magic!r} and not with b'GGUF', so it is {kind}")
        self.offset = 4
        version = self._number("<I", "the version")
        if version in _VERSIONS:
            return version
        if version & 0xFFFF == 0:
            raise UnsupportedModelError(f"{self.path} is a big-endian GGUF file: use the little-endian file of this model")
        raise UnsupportedModelError(
            f"{self.path} has GGUF version {version}, and versions 2 and 3 can be read: convert the model again"
        )

    def _value(self, value_type: int, key: str) -> MetadataValue:
        code = _SCALARS.get(value_type)
        if code is not None:
            value: int | float = self._unpack(code, shown(key))
            return value
        if value_type == _STRING:
            return self._string(shown(key))
        if value_type == _BOOL:
            byte = self._number("<B", shown(key))
            if byte > 1:
                raise self._corrupt(f"has {byte} for the boolean {shown(key)}")
            return bool(byte)
        if value_type == _ARRAY:
            return self._array(key, 1)
        raise self._unknown_type(value_type, key)

    def _array(self, key: str, depth: int) -> MetadataValue:
        if depth > _MAX_ARRAY_DEPTH:
            raise self._corrupt(f"nests arrays in {shown(key)} deeper than {_MAX_ARRAY_DEPTH}")
        value_type = self._number("<I", f"the type of array {shown(key)}")
        count = self._number("<Q", f"the length of array {shown(key)}")
        if value_type == _STRING:
            return self._strings(count, key)
        if value_type == _ARRAY:
            self._check_count(count, _MIN_ARRAY_BYTES, f"arrays in {shown(key)}")
            return [self._array(key, depth + 1) for _ in range(count)]
        if value_type == _BOOL:
            flags = self._numbers("<u1", count, key)
            if count and flags.max() > 1:
                raise self._corrupt(f"has {flags.max()} in the booleans {shown(key)}")
            return flags.view(np.bool_)
        if value_type in _DTYPES:
            return self._numbers(_DTYPES[value_type], count, key)
        raise self._unknown_type(value_type, key)

    def _numbers(self, dtype: str, count: int, key: str) -> npt.NDArray[Any]:
        """A read-only copy, which outlives the map."""
        start = self._take(count * np.dtype(dtype).itemsize, shown(key))
        values = np.frombuffer(self.data, dtype, count, start).copy() if count else np.empty(0, dtype)
        values.flags.writeable = False
        return values

    def _strings(self, count: int, key: str) -> list[str]:
        """The hot loop of opening a file: a vocabulary has 10^5 strings, so its checks are inlined."""
        self._check_count(count, _MIN_STRING_BYTES, f"strings in {shown(key)}")
        data, size_bytes = self.data, self.size_bytes
        length_at = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        append = strings.append
        start = self.offset + 8
        for _ in range(count):
            if start > size_bytes:
                raise self._truncated(8, start - 8, f"a string in {shown(key)}")
            end = start + length_at(data, start - 8)[0]
            if end > size_bytes:
                raise self._truncated(end - start, start, f"a string in {shown(key)}")
            append(data[start:end].decode("utf-8", "surrogateescape"))
            start = end + 8
        self.offset = start - 8
        return strings

    def _alignment(self, metadata: Mapping[str, MetadataValue]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise self._corrupt(f"has general.alignment = {shown(alignment)}, which must be a power of two of at least 8")
        return alignment

    # Tensors.

    def _tensors(self, num_tensors: int, alignment: int) -> dict[str, GgufTensor]:
        infos = [self._tensor_info() for _ in range(num_tensors)]
        data_start = -(-self.offset // alignment) * alignment
        all_bytes = np.frombuffer(self.data, np.uint8)
        tensors: dict[str, GgufTensor] = {}
        spans: list[tuple[int, int, str]] = []
        for name, tensor_format, shape, num_bytes, offset in infos:
            if name in tensors:
                raise self._corrupt(f"has two tensors named {shown(name)}")
            if offset % alignment:
                raise self._corrupt(f"has tensor {shown(name)} at offset {offset}, not a multiple of its alignment {alignment}")
            start, end = data_start + offset, data_start + offset + num_bytes
            if end > self.size_bytes:
                raise self._truncated(num_bytes, start, f"tensor {shown(name)}")
            spans.append((start, end, name))
            tensors[name] = GgufTensor(name, tensor_format, shape, all_bytes[start:end])
        spans.sort()
        for (_, end, name), (start, _, next_name) in pairwise(spans):
            if start < end:
                raise self._corrupt(f"has overlapping data of tensors {shown(name)} and {shown(next_name)}")
        return tensors

    def _tensor_info(self) -> tuple[str, TensorFormat, tuple[int, ...], int, int]:
        """Name, format, shape, bytes and offset from the start of the data."""
        name = self._name("a tensor's name")
        num_axes = self._number("<I", f"the number of axes of {shown(name)}")
        if not 1 <= num_axes <= _MAX_AXES:
            raise self._corrupt(f"has tensor {shown(name)} with {num_axes} axes, and there can be 1 to {_MAX_AXES}")
        shape = tuple(self._number("<Q", f"the shape of {shown(name)}") for _ in range(num_axes))[::-1]
        type_id = self._number("<I", f"the format of {shown(name)}")
        offset = self._number("<Q", f"the offset of {shown(name)}")
        tensor_format = FORMATS.get(type_id)
        if tensor_format is None:
            known = ", ".join(each.name for each in ALL_FORMATS)
            raise UnsupportedModelError(
                f"{self.path} has tensor {shown(name)} in format {_OTHER_FORMATS.get(type_id, 'number')} ({type_id}), "
                f"which is not read here: use a file with formats {known}"
            )
        num_weights = 1
        for length in shape:
            num_weights *= length
        if num_weights == 0 or shape[-1] % tensor_format.block_weights:
            raise self._corrupt(
                f"has tensor {shown(name)} of shape {shape}, but its rows must be whole {tensor_format.name} blocks "
                f"of {tensor_format.block_weights}"
            )
        num_bytes = num_weights // tensor_format.block_weights * tensor_format.block_bytes
        return name, tensor_format, shape, num_bytes, offset

    # Primitives: each checks against the bytes that are left.

    def _take(self, num_bytes: int, what: str) -> int:
        """The offset of the next `num_bytes`, which are then passed."""
        start = self.offset
        if start + num_bytes > self.size_bytes:
            raise self._truncated(num_bytes, start, what)
        self.offset = start + num_bytes
        return start

    def _unpack(self, code: str, what: str) -> Any:
        return struct.unpack_from(code, self.data, self._take(struct.calcsize(code), what))[0]

    def _number(self, code: str, what: str) -> int:
        number: int = self._unpack(code, what)
        return number

    def _string(self, what: str) -> str:
        length = self._number("<Q", f"the length of {what}")
        start = self._take(length, what)
        return self.data[start : start + length].decode("utf-8", "surrogateescape")

    def _name(self, what: str) -> str:
        name = self._string(what)
        if not name.isprintable():  # nor do lone surrogates, which stand for bytes that are not UTF-8
            raise self._corrupt(f"has {shown(name)} for {what}")
        return name

    def _check_count(self, count: int, min_bytes: int, what: str) -> None:
        left_bytes = self.size_bytes - self.offset
        if count * min_bytes > left_bytes:
            raise ModelFileError(
                f"{self.path} claims {count} {what}, more than the {left_bytes} bytes that are left could hold: {_REFETCH}"
            )

    def _truncated(self, num_bytes: int, start: int, what: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path} is truncated or corrupt: {what} takes {num_bytes} bytes at offset {start}, "
            f"but the file ends at {self.size_bytes}; {_REFETCH}"
        )

    def _corrupt(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path} {problem}: {_REFETCH}")

    def _unknown_type(self, value_type: int, key: str) -> ModelFileError:
        return self._corrupt(f"has a value of unknown type {value_type} for {shown(key)}")
