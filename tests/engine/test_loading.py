"""From a model file to weights in memory: packed once, reused while the content is the same, whatever goes wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from headrace.engine import loading
from headrace.engine.loading import LoadedWeights, load_weights
from headrace.errors import ModelFileError, StorageError, UnsupportedModelError
from headrace.weights.progress import NullProgress
from tiny.models import Tensor, TinySpec, write_model

SPEC = TinySpec(format="Q8_0", formats={"ffn_down": "F16", "attn_v": "Q4_1"})
GROWTH = 1.02


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf", SPEC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "packed"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was read of model files: 'hash' and 'pack', in order."""
    seen: list[str] = []
    for name, function in (("hash", loading._hash_file), ("pack", loading._pack)):

        def record(*args: object, _name: str = name, _function: Callable[..., object] = function) -> object:
            seen.append(_name)
            return _function(*args)

        monkeypatch.setattr(loading, f"_{name}_file" if name == "hash" else "_pack", record)
    return seen


def _load(path: Path, folder: Path | None) -> LoadedWeights:
    return load_weights(path, folder, NullProgress())


def _content(weights: LoadedWeights) -> dict[str, bytes]:
    return {name: weights.packed.section(name).tobytes() for name in weights.packed.header["sections"]}


def _packed_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.headrace"))


def test_second_start_reads_nothing_of_the_model_file(source: Path, folder: Path, reads: list[str]) -> None:
    first = _content(_load(source, folder))
    assert reads == ["hash", "pack"]
    reads.clear()
    data = source.read_bytes()
    status = source.stat()
    source.write_bytes(bytes(len(data)))  # what is not read may as well be zero
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert _content(_load(source, folder)) == first
    assert reads == []


def test_weights_in_memory_equal_those_on_disk(source: Path, folder: Path) -> None:
    on_disk, in_memory = _load(source, folder), _load(source, None)
    assert _content(in_memory) == _content(on_disk)
    assert in_memory.config == on_disk.config
    assert in_memory.matrices == on_disk.matrices
    assert in_memory.template == on_disk.template
    assert in_memory.tokenizer.to_json() == on_disk.tokenizer.to_json()


def test_weights_in_memory_touch_no_folder(source: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    _load(source, None)
    assert sorted(tmp_path.rglob("*")) == before


def test_touched_file_is_hashed_again_and_not_packed(source: Path, folder: Path, reads: list[str]) -> None:
    _load(source, folder)
    reads.clear()
    os.utime(source, ns=(1, 1))
    _load(source, folder)
    assert reads == ["hash"]
    _load(source, folder)
    assert reads == ["hash"]


def test_copy_under_another_name_is_hashed_and_not_packed(source: Path, folder: Path, reads: list[str], tmp_path: Path) -> None:
    _load(source, folder)
    reads.clear()
    copy = tmp_path / "copy.gguf"
    shutil.copy(source, copy)
    _load(copy, folder)
    assert reads == ["hash"]
    assert len(_packed_files(folder)) == 1


def test_changed_file_is_packed_again(source: Path, folder: Path, reads: list[str]) -> None:
    first = _content(_load(source, folder))
    reads.clear()
    write_model(source, TinySpec(format="Q8_0", seed=9))
    second = _content(_load(source, folder))
    assert reads == ["hash", "pack"]
    assert second["embedding"] != first["embedding"]


def test_file_changed_while_it_is_read_is_refused(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_file = loading._hash_file

    def change(path: Path, progress: NullProgress) -> str:
        digest = hash_file(path, progress)
        write_model(path, TinySpec(seed=9))
        return digest

    monkeypatch.setattr(loading, "_hash_file", change)
    with pytest.raises(ModelFileError, match="changed while it was read"):
        _load(source, folder)
    assert _packed_files(folder) == []


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:50], lambda data: b"", lambda data: data[:-5000], lambda data: data[:20] + b"?" + data[21:]],
    ids=["header-cut", "empty", "end-cut", "header-changed"],
)
def test_damaged_packed_file_is_packed_again(
    source: Path, folder: Path, reads: list[str], damage: Callable[[bytes], bytes]
) -> None:
    first = _content(_load(source, folder))
    (packed,) = _packed_files(folder)
    packed.write_bytes(damage(packed.read_bytes()))
    reads.clear()
    assert _content(_load(source, folder)) == first
    assert reads == ["hash", "pack"]


def test_damaged_tokenizer_section_is_packed_again(source: Path, folder: Path) -> None:
    weights = _load(source, folder)
    first, start = _content(weights), weights.packed.offset("tokenizer")
    (packed,) = _packed_files(folder)
    data = bytearray(packed.read_bytes())
    data[start : start + 4] = b"\xff" * 4
    packed.write_bytes(data)
    assert _content(_load(source, folder)) == first


@pytest.mark.parametrize("text", ["", "{", "[]", '{"path": 1}', "null"])
def test_damaged_record_of_the_source_is_ignored(source: Path, folder: Path, reads: list[str], text: str) -> None:
    _load(source, folder)
    (record,) = folder.glob("*.source.json")
    record.write_text(text)
    reads.clear()
    _load(source, folder)
    assert reads == ["hash"]


def test_folder_that_cannot_be_written_still_serves_what_it_holds(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _content(_load(source, folder))
    os.utime(source, ns=(1, 1))

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(loading, "write_atomically", refuse)
    assert _content(_load(source, folder)) == first


def test_folder_that_cannot_be_made_is_one_sentence(source: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StorageError, match="cache=False"):
        _load(source, blocked / "packed")


_PACK = """
import sys
from pathlib import Path
from headrace.engine import loading
from headrace.weights.progress import NullProgress
if sys.argv[3] == "hang":
    import time
    def hang(*args):
        print("filling", flush=True)
        time.sleep(60)
    loading.pack_rows = hang
weights = loading.load_weights(Path(sys.argv[1]), Path(sys.argv[2]), NullProgress())
print(weights.num_bytes, flush=True)
"""


def _start(source: Path, folder: Path, mode: str) -> subprocess.Popen[str]:
    package = Path(loading.__file__).parents[2]
    environment = dict(os.environ, PYTHONPATH=str(package))
    command = [sys.executable, "-c", _PACK, str(source), str(folder), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_processes_that_pack_at_once_do_no_harm(source: Path, folder: Path) -> None:
    children = [_start(source, folder, "pack") for _ in range(3)]
    answers = [child.communicate()[0] for child in children]
    expected = _load(source, None)
    assert answers == [f"{expected.num_bytes}\n"] * 3
    assert [path.suffix for path in sorted(folder.iterdir())].count(".partial") == 0
    assert _content(_load(source, folder)) == _content(expected)
    assert len(_packed_files(folder)) == 1


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
def test_process_killed_while_packing_leaves_nothing_that_is_used(source: Path, folder: Path, reads: list[str]) -> None:
    child = _start(source, folder, "hang")
    assert child.stdout is not None
    assert child.stdout.readline() == "filling\n"
    child.kill()
    child.communicate()
    assert _packed_files(folder) == []
    (half,) = folder.glob("*.partial")
    os.utime(half, (1000, 1000))  # as if it had happened some time ago
    _load(source, folder)
    assert reads == ["hash", "pack"]
    assert not half.exists()


@pytest.mark.parametrize(
    "spec", [SPEC, TinySpec("gemma3", format="Q6_K", embedding=256, feed_forward=256, heads=8)], ids=["llama", "gemma3"]
)
def test_packed_weights_take_no_more_bytes_than_in_gguf(tmp_path: Path, spec: TinySpec) -> None:
    sizes: list[int] = []

    def measure(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            values = tensor.data.size
            per_block = {Kind.F32: (1, 4), Kind.F16: (1, 2), Kind.Q8_0: (32, 34), Kind.Q4_1: (32, 20)}
            weights, num_bytes = per_block.get(tensor.kind, (1, 1))  # blocks of K-quants are bytes already
            sizes.append(values // weights * num_bytes)

    weights = _load(write_model(tmp_path / "m.gguf", spec, measure), None)
    rows = spec.vocabulary
    padding = (-rows % 16) / rows  # of the embedding, in a vocabulary this small
    assert weights.num_bytes <= (GROWTH + padding) * sum(sizes)


def _poisoned(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name].data.reshape(-1)[7] = value

    return edit


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.1.ffn_down.weight", "token_embd.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, folder: Path, name: str, value: float) -> None:
    path = write_model(tmp_path / "bad.gguf", TinySpec(), _poisoned(name, value))
    with pytest.raises(ModelFileError, match=name) as caught:
        _load(path, folder)
    assert "not finite" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not folder.exists() or list(folder.iterdir()) == []


def test_scale_that_is_not_finite_is_refused_by_name(tmp_path: Path) -> None:
    spec = TinySpec(format="Q4_K", embedding=256, feed_forward=256, heads=8)

    def poison_scale(tensors: dict[str, Tensor]) -> None:
        tensors["blk.1.ffn_up.weight"].data[5, 2:4] = np.array([np.inf], np.float16).view(np.uint8)

    with pytest.raises(ModelFileError, match=r"gate\.weight or blk\.1\.ffn_up\.weight: a Q4_K weight or scale is not finite"):
        _load(write_model(tmp_path / "bad.gguf", spec, poison_scale), None)


def test_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    def shorten(tensors: dict[str, Tensor]) -> None:
        tensors["token_embd.weight"].data = tensors["token_embd.weight"].data[:-3]

    path = write_model(tmp_path / "bad.gguf", TinySpec(), shorten)
    count = TinySpec().vocabulary
    with pytest.raises(ModelFileError, match=f"{count} tokens and embeddings for {count - 3}"):
        _load(path, None)


def test_check_refuses_before_anything_is_packed(source: Path, folder: Path) -> None:
    def refuse(config: object, num_bytes: int) -> None:
        assert num_bytes > 0
        raise UnsupportedModelError("too big")

    with pytest.raises(UnsupportedModelError, match="too big"):
        load_weights(source, folder, NullProgress(), refuse)
    assert not folder.exists() or list(folder.iterdir()) == []


def test_progress_tells_of_hashing_and_packing(source: Path, folder: Path) -> None:
    told: list[tuple[str, int]] = []

    class Recorder:
        def start(self, label: str, total: int, unit: str = "bytes") -> None:
            told.append((label, total))
            self.done_units = 0

        def advance(self, amount: int) -> None:
            self.done_units += amount
            assert self.done_units <= told[-1][1]

        def done(self) -> None:
            told.append(("done", 0))

    load_weights(source, folder, Recorder())
    assert [label for label, _ in told] == ["reading model.gguf", "done", "packing model.gguf", "done"]
