"""Sound files: what the reference writer puts in comes out again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from headrace.errors import ModelFileError
from headrace.weights.gguf import GgufFile

if TYPE_CHECKING:
    from collections.abc import Iterator

STRINGS = ["", "a", "naïve", "日本", "😀 "] * 20


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file by the reference writer, with values of every kind and tensors of one, two and three axes."""
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 😀")
    writer.add_array("strings", STRINGS)
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("bools", [True, False])
    rng = np.random.default_rng(1)
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.add_tensor("halves", np.arange(12, dtype=np.float16).reshape(2, 2, 3))
    weights = rng.standard_normal((3, 64), dtype=np.float32)
    writer.add_tensor(
        "blocks", gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_1), raw_dtype=gguf.GGMLQuantizationType.Q4_1
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def opened(written: Path) -> Iterator[GgufFile]:
    with GgufFile.open(written) as file:
        yield file


def test_open_reads_metadata_of_every_type(opened: GgufFile) -> None:
    found = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in opened.metadata.items()}
    assert found == {
        "general.architecture": "llama",
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "naïve 😀",
        "strings": STRINGS,
        "ints": [1, -2, 3],
        "floats": [0.5, -1.5],
        "bools": [True, False],
    }
    assert opened.metadata["yes"] is True
    assert opened.version == 3


def test_open_reads_tensors_in_numpy_order(opened: GgufFile) -> None:
    found = {tensor.name: (tensor.format.name, tensor.shape, tensor.raw.size) for tensor in opened.tensors.values()}
    assert found == {"vector": ("F32", (5,), 20), "halves": ("F16", (2, 2, 3), 24), "blocks": ("Q4_1", (3, 64), 120)}
    assert opened.tensors["vector"].dequantise().tolist() == [0, 1, 2, 3, 4]
    assert opened.tensors["halves"].dequantise().tolist() == np.arange(12).reshape(2, 2, 3).tolist()
    assert opened.tensors["blocks"].num_weights == 192


def test_tensor_dequantise_equals_reference_reader(opened: GgufFile, written: Path) -> None:
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(written).tensors}["blocks"]
    expected = gguf.quants.dequantize(reference.data, reference.tensor_type)
    assert np.array_equal(opened.tensors["blocks"].dequantise(), expected)


def test_arrays_and_tensors_are_read_only(opened: GgufFile) -> None:
    with pytest.raises(ValueError, match="read-only"):
        opened.metadata["ints"][0] = 1  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        opened.tensors["vector"].raw[0] = 1


def test_close_keeps_views_and_metadata_usable(written: Path) -> None:
    file = GgufFile.open(written)
    tensor = file.tensors["vector"]
    file.close()
    file.close()
    assert dict(file.tensors) == {}
    assert tensor.dequantise().tolist() == [0, 1, 2, 3, 4]
    assert file.metadata["ints"].tolist() == [1, -2, 3]  # type: ignore[union-attr]
    assert file.size_bytes == written.stat().st_size


def test_open_accepts_version_2_other_alignment_and_nested_arrays(tmp_path: Path, forging: Any) -> None:
    path = tmp_path / "v2.gguf"
    entries = [
        forging.entry("general.alignment", 4, (64).to_bytes(4, "little")),
        forging.entry(
            "nested", 9, forging.array(9, 2, forging.array(0, 2, b"\1\2") + forging.array(8, 1, forging.string("x")))
        ),
        forging.entry("broken", 8, forging.string(b"a\xff")),
    ]
    tensors = [forging.Tensor("a"), forging.Tensor("b", data=b"\0\0\x80\x3f" * 4)]
    path.write_bytes(forging.Forge(entries, tensors, version=2, alignment=64).build())
    with GgufFile.open(str(path)) as file:
        assert file.version == 2
        first, second = file.metadata["nested"]
        assert first.tolist() == [1, 2]
        assert second == ["x"]
        assert file.metadata["broken"].encode("utf-8", "surrogateescape") == b"a\xff"
        assert file.tensors["b"].dequantise().tolist() == [1, 1, 1, 1]


def test_open_accepts_a_file_without_tensors(tmp_path: Path, forging: Any) -> None:
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(forging.Forge([forging.entry("a", 8, forging.string("b"))]).build())
    with GgufFile.open(path) as file:
        assert dict(file.tensors) == {}
        assert dict(file.metadata) == {"a": "b"}


def test_open_of_a_large_vocabulary_is_quick(tmp_path: Path, forging: Any) -> None:
    path, num_strings = tmp_path / "vocabulary.gguf", 262_144
    strings = b"".join(forging.string(f"t{index}") for index in range(num_strings))
    scores = forging.entry("scores", 9, forging.array(6, num_strings, bytes(4 * num_strings)))
    path.write_bytes(forging.Forge([forging.entry("tokens", 9, forging.array(8, num_strings, strings)), scores]).build())
    start_s = time.perf_counter()
    with GgufFile.open(path) as file:
        assert file.require_strings("tokens")[-1] == "t262143"
    assert time.perf_counter() - start_s < 1.0  # 0.07 s on an idle core; a reader with an object per value takes ten or more


def test_require_tensor_checks_name_and_shape(opened: GgufFile) -> None:
    assert opened.require_tensor("blocks", (3, 64)) is opened.tensors["blocks"]
    assert opened.require_tensor("vector") is opened.tensors["vector"]
    with pytest.raises(ModelFileError, match=r"written.gguf has no tensor 'output', which this model needs"):
        opened.require_tensor("output")
    with pytest.raises(ModelFileError, match=r"tensor 'blocks' of shape \(3, 64\), which must be \(64, 3\)"):
        opened.require_tensor("blocks", (64, 3))
